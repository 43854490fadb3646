//! TLS to the API server: trusted authorities and the client certificate.

use std::fmt;
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::RwLock;
use std::time::Duration;
use std::time::SystemTime;

use hyper_rustls::ConfigBuilderExt as _;
use rustls::ClientConfig;
use rustls::DigitallySignedStruct;
use rustls::RootCertStore;
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::danger::ServerCertVerified;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::crypto::verify_tls12_signature;
use rustls::crypto::verify_tls13_signature;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::ServerName;
use rustls::pki_types::UnixTime;
use rustls::pki_types::pem::PemObject as _;
use rustls::sign::CertifiedKey;
use secrecy::ExposeSecret as _;
use tokio::sync::watch;
use x509_parser::prelude::ASN1Time;
use x509_parser::prelude::FromDer as _;
use x509_parser::prelude::X509Certificate;

use super::ConnectError;
use super::kubeconfig::Access;
use super::kubeconfig::Pem;
use crate::metrics::AuthorityReload;

/// The authorities that may have signed the server's certificate; can be replaced.
#[derive(Clone, Debug)]
pub struct Roots {
    /// The PEM text, and the verifier made from it.
    current: Arc<RwLock<(String, Arc<WebPkiServerVerifier>)>>,
}

/// Makes aws-lc-rs the crypto provider of the process. Further calls do nothing.
pub fn install_crypto() {
    // An error means that a provider is installed already.
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
}

fn provider() -> Arc<CryptoProvider> {
    let installed = || Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    CryptoProvider::get_default().cloned().unwrap_or_else(installed)
}

/// The client certificate; can be replaced, or be absent yet.
#[derive(Clone, Default)]
pub struct Identity {
    current: watch::Sender<Option<Arc<CertifiedKey>>>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("present", &self.get().is_some()).finish()
    }
}

impl Identity {
    /// The certificate of the next handshake.
    pub fn get(&self) -> Option<Arc<CertifiedKey>> {
        self.current.borrow().clone()
    }

    /// Replaces it. Returns whether it differs from the previous one. Open connections are not affected.
    pub fn set(&self, key: Option<Arc<CertifiedKey>>) -> bool {
        self.current.send_if_modified(|current| {
            let chain = |key: &Option<Arc<CertifiedKey>>| key.as_ref().map(|key| key.cert.clone());
            let changed = chain(current) != chain(&key);
            if changed {
                *current = key;
            }
            changed
        })
    }
}

impl ResolvesClientCert for Identity {
    fn resolve(&self, _: &[&[u8]], schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        self.get().filter(|key| key.key.choose_scheme(schemes).is_some())
    }

    fn has_certs(&self) -> bool {
        self.get().is_some()
    }
}

/// Why PEM text is not a certificate with its key.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// Not PEM, or something else in it.
    #[error("{0} is not valid PEM: {1}")]
    Pem(&'static str, rustls::pki_types::pem::Error),
    /// No certificate at all.
    #[error("holds no certificate")]
    Empty,
    /// The key cannot be used, or belongs to another certificate.
    #[error("certificate and key are not usable together: {0}")]
    Key(#[from] rustls::Error),
}

/// A certificate chain and its key from PEM text; both may be the same text.
///
/// # Errors
/// Either cannot be parsed, or they do not match.
pub fn certified_key(certificate: &str, key: &str) -> Result<CertifiedKey, PairError> {
    let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| PairError::Pem("certificate", error))?;
    if chain.is_empty() {
        return Err(PairError::Empty);
    }
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|error| PairError::Pem("key", error))?;
    Ok(CertifiedKey::from_der(chain, key, &provider())?)
}

/// The validity of a certificate: not before, not after.
pub(super) fn validity(key: &CertifiedKey) -> Option<(SystemTime, SystemTime)> {
    let (_, leaf) = X509Certificate::from_der(key.cert.first()?).ok()?;
    let at = |time: ASN1Time| {
        SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(time.timestamp()).unwrap_or_default())
    };
    Some((at(leaf.validity().not_before), at(leaf.validity().not_after)))
}

/// The expiry of a certificate, for log lines.
pub fn lifetime(key: &CertifiedKey, now: SystemTime) -> String {
    let Some((_, until)) = validity(key) else { return "with an unknown expiry".to_owned() };
    let verb = if until < now { "expired at" } else { "valid until" };
    format!("{verb} {}", humantime::format_rfc3339_seconds(until))
}

/// The configuration of all connections to the server of `access`, and its certificate authority if it has one of its
/// own.
///
/// # Errors
/// The certificate authority cannot be read or holds no certificate.
pub fn client_config(access: &Access, identity: &Identity) -> Result<(ClientConfig, Option<Roots>), ConnectError> {
    let builder = ClientConfig::builder_with_provider(provider());
    let builder = builder.with_safe_default_protocol_versions().map_err(ConnectError::Tls)?;
    let mut roots = None;
    let with_roots = match &access.authority {
        _ if access.insecure => {
            let algorithms = provider().signature_verification_algorithms;
            builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyServer(algorithms)))
        }
        Some(pem) => {
            let own = roots.insert(Roots { current: Arc::new(RwLock::new(verifier(pem)?)) });
            builder.dangerous().with_custom_certificate_verifier(Arc::new(own.clone()))
        }
        None => builder.with_native_roots().map_err(ConnectError::SystemRoots)?,
    };
    let mut config = with_roots.with_client_cert_resolver(Arc::new(identity.clone()));
    // A resumed session would keep the client certificate of its first handshake.
    config.resumption = rustls::client::Resumption::disabled();
    Ok((config, roots))
}

/// Reads a certificate authority: its text, and the verifier made from it. Blocks.
///
/// # Errors
/// It cannot be read or holds no certificate.
pub fn verifier(pem: &Pem) -> Result<(String, Arc<WebPkiServerVerifier>), ConnectError> {
    let place = pem.path().map_or_else(|| "certificate-authority-data".to_owned(), |path| path.display().to_string());
    let wrong = |reason, problem: String| ConnectError::Authority { place: place.clone(), problem, reason };
    let unreadable = |source: std::io::Error| wrong(AuthorityReload::Unreadable, source.to_string());
    let invalid = |problem: String| wrong(AuthorityReload::Invalid, problem);
    let text = pem.read().map_err(unreadable)?.expose_secret().to_owned();
    let mut store = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(text.as_bytes()) {
        let certificate = certificate.map_err(|error| invalid(format!("is not valid PEM: {error}")))?;
        store.add(certificate).map_err(|error| invalid(error.to_string()))?;
    }
    if store.is_empty() {
        return Err(wrong(AuthorityReload::Empty, "holds no certificate".to_owned()));
    }
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider()).build();
    Ok((text, verifier.map_err(|error| invalid(error.to_string()))?))
}

impl Roots {
    fn get(&self) -> Arc<WebPkiServerVerifier> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).1.clone()
    }

    /// Replaces them for new connections. Returns whether they differ from the previous ones.
    pub fn set(&self, roots: (String, Arc<WebPkiServerVerifier>)) -> bool {
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let changed = current.0 != roots.0;
        *current = roots;
        changed
    }
}

impl ServerCertVerifier for Roots {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.get().verify_server_cert(certificate, between, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.get().verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.get().verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.get().supported_verify_schemes()
    }
}

/// `insecure-skip-tls-verify`: any certificate is accepted whose key the server has.
#[derive(Debug)]
struct AnyServer(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}
