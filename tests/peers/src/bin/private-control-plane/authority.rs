//! The certificate authorities of a control plane and the certificates they sign. Private keys are readable by the
//! owner only.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;
use std::time::SystemTime;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Identity;
use rcgen::BasicConstraints;
use rcgen::CertificateParams;
use rcgen::DistinguishedName;
use rcgen::DnType;
use rcgen::ExtendedKeyUsagePurpose;
use rcgen::IsCa;
use rcgen::Issuer;
use rcgen::KeyPair;
use rcgen::KeyUsagePurpose;

const HOUR: Duration = Duration::from_secs(3600);
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// A certificate authority.
pub(crate) struct Authority(Issuer<'static, KeyPair>);

impl Authority {
    /// Creates an authority and writes its certificate and key.
    ///
    /// # Errors
    /// The key cannot be generated, or a file cannot be written.
    pub(crate) fn create(name: &str, certificate: &Path, key: &Path) -> Result<Self> {
        let pair = KeyPair::generate().context("cannot generate a key")?;
        let mut params = CertificateParams::default();
        params.distinguished_name = subject(name, None);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages =
            vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let now = SystemTime::now();
        params.not_before = (now - HOUR).into();
        params.not_after = (now + YEAR).into();
        let signed = params.self_signed(&pair).with_context(|| format!("cannot sign {name}"))?;
        write_public(certificate, &signed.pem())?;
        write_private(key, &pair.serialize_pem())?;
        Ok(Self(Issuer::new(params, pair)))
    }

    /// Issues a certificate and writes it and its key.
    ///
    /// # Errors
    /// A name is invalid, or a file cannot be written.
    pub(crate) fn issue(&self, identity: &Identity, certificate: &Path, key: &Path) -> Result<()> {
        let pair = KeyPair::generate().context("cannot generate a key")?;
        let mut params = CertificateParams::new(identity.names.clone())
            .with_context(|| format!("invalid names for a certificate: {:?}", identity.names))?;
        params.distinguished_name = subject(&identity.common_name, identity.group.as_deref());
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if !identity.names.is_empty() {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        params.use_authority_key_identifier_extension = true;
        let now = SystemTime::now();
        params.not_before = identity.not_before.unwrap_or(now - HOUR).into();
        params.not_after = identity.not_after.unwrap_or(now + YEAR).into();
        let signed = params
            .signed_by(&pair, &self.0)
            .with_context(|| format!("cannot sign a certificate for {}", identity.common_name))?;
        write_public(certificate, &signed.pem())?;
        write_private(key, &pair.serialize_pem())
    }
}

/// Writes the key pair for service account tokens.
///
/// # Errors
/// The key cannot be generated, or a file cannot be written.
pub(crate) fn write_token_keys(public: &Path, private: &Path) -> Result<()> {
    let pair = KeyPair::generate().context("cannot generate a key")?;
    write_public(public, &pair.public_key_pem())?;
    write_private(private, &pair.serialize_pem())
}

fn subject(common_name: &str, group: Option<&str>) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    if let Some(group) = group {
        name.push(DnType::OrganizationName, group);
    }
    name.push(DnType::CommonName, common_name);
    name
}

fn write_public(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn write_private(path: &Path, text: &str) -> Result<()> {
    let mut options = fs::OpenOptions::new();
    let mut file = options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot create {}", path.display()))?;
    file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
}
