//! The self-signed serving pair, generated once and kept in the certificate directory.

use std::fs;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::SystemTime;

use rcgen::BasicConstraints;
use rcgen::CertificateParams;
use rcgen::DistinguishedName;
use rcgen::DnType;
use rcgen::ExtendedKeyUsagePurpose;
use rcgen::IsCa;
use rcgen::Issuer;
use rcgen::KeyPair;
use rcgen::KeyUsagePurpose;
use rcgen::PKCS_RSA_SHA256;
use rcgen::RsaKeySize;
use rustls::sign::CertifiedKey;

use super::error::CertificateError;
use super::serving;
use crate::filesystem;

/// The flag that names the folder.
const FOLDER: &str = "--cert-dir";
/// Validity of the pair.
const LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);
/// The validity begins this long ago, for clocks that are slow.
const SLACK: Duration = Duration::from_secs(3600);

/// A self-signed pair.
#[derive(Debug)]
pub(super) enum SelfSigned {
    /// Certificate and key, in files.
    Kept(PathBuf, PathBuf),
    /// Not stored for lack of disk space; the next start generates another pair.
    Unkept(CertifiedKey),
}

/// The pair in `folder`, generated for `host` if there is none. A full disk prevents storing it, not using it: the node
/// must stay accessible to find out why it is full. Blocks: generates keys, reads and writes files.
///
/// # Errors
/// Only certificate or key exists, or the pair cannot be accessed, generated or written.
pub(super) fn pair(folder: &Path, host: &str, now: SystemTime) -> Result<SelfSigned, CertificateError> {
    let (certificate, key) = (folder.join("kubelet.crt"), folder.join("kubelet.key"));
    if exists(&key)? && !exists(&certificate)? {
        complete(folder, &certificate, &key)?;
    }
    match (exists(&certificate)?, exists(&key)?) {
        (true, true) => return Ok(SelfSigned::Kept(certificate, key)),
        (true, false) => return Err(CertificateError::Half { present: certificate, missing: key }),
        (false, true) => return Err(CertificateError::Half { present: key, missing: certificate }),
        (false, false) => {}
    }
    let (chain, private) = make(host, now)
        .map_err(|error| CertificateError::Make { host: host.to_owned(), problem: error.to_string() })?;
    match keep(folder, (&certificate, &chain), (&key, &private)) {
        Ok(()) => {
            tracing::info!(certificate = %certificate.display(), host, "generated a self-signed serving certificate");
            Ok(SelfSigned::Kept(certificate, key))
        }
        Err(CertificateError::Write { path, cause }) if is_full(&cause) => {
            let path = path.display();
            tracing::warn!(%path, host, %cause, "generated a self-signed serving certificate that cannot be stored");
            let provider = rustls::crypto::aws_lc_rs::default_provider();
            let pair = serving::pair((&certificate, chain.as_bytes()), (&key, private.as_bytes()), &provider);
            pair.map(SelfSigned::Unkept)
        }
        Err(error) => Err(error),
    }
}

/// What cannot be accessed may be a pair: another one would replace it.
fn exists(path: &Path) -> Result<bool, CertificateError> {
    path.try_exists().map_err(|cause| CertificateError::Read { field: FOLDER, path: path.to_owned(), cause })
}

fn is_full(cause: &io::Error) -> bool {
    matches!(cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Renames the certificate of a pair whose key alone has its name, since the agent was killed in between. Any other lone
/// key is left to the administrator.
fn complete(folder: &Path, certificate: &Path, key: &Path) -> Result<(), CertificateError> {
    let written = partial_path(certificate);
    let read = |path: &Path| filesystem::read_bounded(path, serving::MAX_FILE);
    let (Ok(chain), Ok(private)) = (read(&written), read(key)) else { return Ok(()) };
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    if serving::pair((&written, &chain), (key, &private), &provider).is_err() {
        return Ok(());
    }
    let path = certificate.to_owned();
    fs::rename(&written, certificate).map_err(|cause| CertificateError::Write { path, cause })?;
    sync(folder);
    tracing::info!(certificate = %certificate.display(), "finished storing a self-signed serving certificate");
    Ok(())
}

/// Both files are complete on disk before either is renamed, and neither stays if one cannot be, since half a pair is an
/// error at the next start.
fn keep(folder: &Path, certificate: (&Path, &str), key: (&Path, &str)) -> Result<(), CertificateError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        |cause| CertificateError::Write { path, cause }
    };
    fs::create_dir_all(folder).map_err(failed(folder))?;
    let private = partial(key.0, key.1, 0o600).map_err(failed(key.0))?;
    let chain = partial(certificate.0, certificate.1, 0o644).inspect_err(|_| {
        let _ = fs::remove_file(&private);
    });
    let chain = chain.map_err(failed(certificate.0))?;
    let renamed = fs::rename(&private, key.0)
        .map_err(failed(key.0))
        .and_then(|()| fs::rename(&chain, certificate.0).map_err(failed(certificate.0)));
    match &renamed {
        Ok(()) => sync(folder),
        Err(_) => [key.0, private.as_path(), chain.as_path()].into_iter().for_each(|left| _ = fs::remove_file(left)),
    }
    renamed
}

/// Has the names of the files written to the disk. Without that a crash of the machine may undo a rename, no more.
fn sync(folder: &Path) {
    if let Err(error) = fs::File::open(folder).and_then(|opened| opened.sync_all()) {
        tracing::warn!(folder = %folder.display(), %error, "cannot sync the folder of a serving certificate");
    }
}

fn partial_path(path: &Path) -> PathBuf {
    path.with_added_extension("partial")
}

/// Writes the text to a temporary file beside `path`, which is removed on failure.
fn partial(path: &Path, text: &str, mode: u32) -> io::Result<PathBuf> {
    let partial = partial_path(path);
    let _ = fs::remove_file(&partial);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&partial)?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.map(|()| partial.clone()).inspect_err(|_| {
        let _ = fs::remove_file(&partial);
    })
}

/// Chain (the certificate and its one-time authority) and key, as PEM.
fn make(host: &str, now: SystemTime) -> Result<(String, String), rcgen::Error> {
    let unix = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let (from, until) = (now - SLACK, now - SLACK + LIFETIME);
    let rsa = || KeyPair::generate_rsa_for(&PKCS_RSA_SHA256, RsaKeySize::_2048);

    let mut authority = named(&format!("{host}-ca@{unix}"), Vec::new())?;
    (authority.not_before, authority.not_after) = (from.into(), until.into());
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages =
        vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment, KeyUsagePurpose::KeyCertSign];
    let authority_key = rsa()?;
    let authority_certificate = authority.self_signed(&authority_key)?;

    let mut leaf = named(&format!("{host}@{unix}"), vec![host.to_owned()])?;
    (leaf.not_before, leaf.not_after) = (from.into(), until.into());
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    leaf.use_authority_key_identifier_extension = true;
    let key = rsa()?;
    let certificate = leaf.signed_by(&key, &Issuer::from_params(&authority, &authority_key))?;
    Ok((format!("{}{}", certificate.pem(), authority_certificate.pem()), key.serialize_pem()))
}

fn named(common_name: &str, names: Vec<String>) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    Ok(params)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;
    use x509_parser::prelude::FromDer as _;
    use x509_parser::prelude::GeneralName;
    use x509_parser::prelude::X509Certificate;

    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;

    #[test]
    fn contents_of_the_pair() {
        let folder = tempfile::tempdir().expect("a folder");
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let SelfSigned::Kept(certificate, key) = pair(&folder.path().join("pki"), "n1", now).expect("a pair") else {
            panic!("there is room for it");
        };
        let mode = |path: &Path| fs::metadata(path).expect("is there").permissions().mode() & 0o777;
        assert_eq!((mode(&certificate), mode(&key)), (0o644, 0o600));
        let chain: Vec<_> =
            CertificateDer::pem_file_iter(&certificate).expect("readable").map(|der| der.expect("PEM")).collect();
        let parsed: Vec<_> = chain.iter().map(|der| X509Certificate::from_der(der).expect("a certificate").1).collect();
        let subjects: Vec<_> = parsed.iter().map(|parsed| parsed.subject().to_string()).collect();
        assert_eq!(subjects, ["CN=n1@1800000000", "CN=n1-ca@1800000000"]);
        assert!(parsed[0].verify_signature(Some(parsed[1].public_key())).is_ok());
        assert!(parsed[1].is_ca() && !parsed[0].is_ca());
        let names = parsed[0].subject_alternative_name().expect("well-formed").expect("there");
        assert_eq!(names.value.general_names, [GeneralName::DNSName("n1")]);
        let validity = parsed[0].validity();
        assert_eq!(validity.not_before.timestamp(), 1_800_000_000 - 3600);
        assert_eq!(validity.not_after.timestamp() - validity.not_before.timestamp(), 365 * 24 * 3600);
        assert!(parsed[0].public_key().parsed().is_ok_and(|key| key.key_size() == 2048));
        let before = fs::read(&certificate).expect("readable");
        pair(&folder.path().join("pki"), "other", now).expect("the same pair");
        assert_eq!(fs::read(&certificate).expect("readable"), before, "what is there is left alone");
    }

    #[test]
    fn an_ip_address_becomes_an_ip_san() {
        let (chain, _) = make("192.0.2.1", SystemTime::now()).expect("a pair");
        let der = CertificateDer::from_pem_slice(chain.as_bytes()).expect("PEM");
        let (_, parsed) = X509Certificate::from_der(&der).expect("a certificate");
        let names = parsed.subject_alternative_name().expect("well-formed").expect("there");
        assert_eq!(names.value.general_names, [GeneralName::IPAddress(&[192, 0, 2, 1])]);
    }

    #[test]
    fn an_incomplete_pair_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("kubelet.key"), "x").expect("written");
        let error = pair(folder.path(), "n1", SystemTime::now()).expect_err("half a pair");
        assert!(matches!(error, CertificateError::Half { .. }), "{error}");
        fs::rename(folder.path().join("kubelet.key"), folder.path().join("kubelet.crt")).expect("renamed");
        let error = pair(folder.path(), "n1", SystemTime::now()).expect_err("the other half");
        assert!(matches!(error, CertificateError::Half { .. }), "{error}");
    }

    #[test]
    fn a_pair_whose_key_alone_has_its_name_is_completed() {
        let folder = tempfile::tempdir().expect("a folder");
        let of = |name: &str| folder.path().join(name);
        let (certificate, key, partial) = (of("kubelet.crt"), of("kubelet.key"), of("kubelet.crt.partial"));
        let now = SystemTime::now();
        pair(folder.path(), "n1", now).expect("a pair");
        let before = [&certificate, &key].map(|path| fs::read(path).expect("readable"));
        fs::rename(&certificate, &partial).expect("renamed");
        let again = pair(folder.path(), "n1", now).expect("the same pair");
        assert!(matches!(again, SelfSigned::Kept(..)));
        assert_eq!([&certificate, &key].map(|path| fs::read(path).expect("readable")), before);
        assert!(!partial.exists());

        fs::rename(&certificate, &partial).expect("renamed");
        fs::write(&key, make("n1", now).expect("a pair").1).expect("written");
        let error = pair(folder.path(), "n1", now).expect_err("the key of another certificate");
        assert!(matches!(error, CertificateError::Half { .. }), "{error}");
        assert!(!certificate.exists());
    }

    #[test]
    fn what_lies_in_place_of_a_file_is_named_and_stays() {
        for found in InPlace::ALL {
            for name in ["kubelet.crt", "kubelet.key", "kubelet.crt.partial"] {
                let folder = tempfile::tempdir().expect("a folder");
                let path = folder.path().join(name);
                found.put(&path).expect("made");
                if name == "kubelet.crt.partial" {
                    fs::write(folder.path().join("kubelet.key"), "x").expect("written");
                }
                let of_thread = folder.path().to_owned();
                let made = in_time(move || pair(&of_thread, "n1", SystemTime::now()).map(drop));
                made.expect("no other process is waited for").expect_err("half a pair");
                assert!(found.is_at(&path), "{name} {found:?}");
            }
        }
    }

    #[test]
    fn no_key_stays_without_its_certificate() {
        let folder = tempfile::tempdir().expect("a folder");
        let (certificate, key) = (folder.path().join("kubelet.crt"), folder.path().join("kubelet.key"));
        fs::create_dir(&certificate).expect("made");
        let error = keep(folder.path(), (&certificate, "chain"), (&key, "private")).expect_err("a folder in the way");
        assert!(matches!(&error, CertificateError::Write { path, .. } if *path == certificate), "{error}");
        let left: Vec<_> = fs::read_dir(folder.path()).expect("listed").map(|one| one.expect("read").path()).collect();
        assert_eq!(left, [certificate]);
    }
}
