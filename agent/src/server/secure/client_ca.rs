//! `authentication.x509.clientCAFile`: the authorities whose client certificates are trusted. Reloaded when the file
//! changes; a file that cannot be used leaves the previous authorities in place.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::DistinguishedName;
use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::UnixTime;
use rustls::pki_types::pem::PemObject as _;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::error::CertificateError;
use super::files::FileWatch;
use crate::filesystem;

const FIELD: &str = "authentication.x509.clientCAFile";
/// Longest file that is read, bytes: thousands of authorities.
const MAX_FILE: usize = 4 << 20;

/// The authorities, reloaded by [`ClientCa::follow`].
#[derive(Debug)]
pub(super) struct ClientCa {
    path: PathBuf,
    provider: Arc<CryptoProvider>,
    current: watch::Sender<Bundle>,
}

#[derive(Clone, Debug)]
pub(super) struct Bundle {
    text: Vec<u8>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl ClientCa {
    /// Reads the file. Blocks.
    ///
    /// # Errors
    /// It cannot be read or holds no certificate.
    pub(super) fn load(path: &Path, provider: Arc<CryptoProvider>) -> Result<Self, CertificateError> {
        let bundle = read(path, &provider)?;
        Ok(Self { path: path.to_owned(), provider, current: watch::Sender::new(bundle) })
    }

    /// Verifies a client certificate against the authorities.
    ///
    /// # Errors
    /// Why it is not trusted.
    pub(super) fn verify(&self, leaf: &CertificateDer<'_>, intermediates: &[CertificateDer<'_>]) -> Result<(), String> {
        let verifier = self.current.borrow().verifier.clone();
        let verified = verifier.verify_client_cert(leaf, intermediates, UnixTime::now());
        verified.map(drop).map_err(|error| format!("verifying the client certificate: {error}"))
    }

    /// The authorities' names (`certificate_authorities` of the handshake).
    pub(super) fn hints(&self) -> Vec<DistinguishedName> {
        self.current.borrow().verifier.root_hint_subjects().to_vec()
    }

    /// Receives every new bundle.
    pub(super) fn changes(&self) -> watch::Receiver<Bundle> {
        self.current.subscribe()
    }

    /// Reloads the file whenever it changes, until `shutdown`.
    pub(super) async fn follow(&self, shutdown: CancellationToken) {
        let mut files = FileWatch::new(vec![self.path.clone()]).await;
        let mut last_error = String::new();
        loop {
            // The file may have changed before the watch began, so it is read first.
            let (path, provider) = (self.path.clone(), self.provider.clone());
            let error = match tokio::task::spawn_blocking(move || read(&path, &provider)).await {
                Ok(Ok(bundle)) => {
                    self.take(bundle);
                    String::new()
                }
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            };
            if !error.is_empty() && error != last_error {
                tracing::warn!(
                    error,
                    "cannot reload the authorities of client certificates, keeping the previous ones"
                );
            }
            if !error.is_empty() {
                files.not_used();
            }
            last_error = error;
            if shutdown.run_until_cancelled(files.changed()).await.is_none() {
                return;
            }
        }
    }

    fn take(&self, bundle: Bundle) {
        let new = self.current.send_if_modified(|current| {
            let changed = current.text != bundle.text;
            if changed {
                *current = bundle;
            }
            changed
        });
        if new {
            tracing::info!(path = %self.path.display(), "reloaded the authorities of client certificates");
        }
    }
}

fn read(path: &Path, provider: &Arc<CryptoProvider>) -> Result<Bundle, CertificateError> {
    let text = filesystem::read_named(path, MAX_FILE);
    let text = text.map_err(|cause| CertificateError::Read { field: FIELD, path: path.to_owned(), cause })?;
    let content = |problem: String| CertificateError::Content { field: FIELD, path: path.to_owned(), problem };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&text) {
        let certificate = certificate.map_err(|error| content(error.to_string()))?;
        roots.add(certificate).map_err(|error| content(error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(content("holds no certificate".to_owned()));
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .build()
        .map_err(|error| content(error.to_string()))?;
    Ok(Bundle { text, verifier })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::super::testing::Authority;
    use super::*;

    fn provider() -> Arc<CryptoProvider> {
        Arc::new(rustls::crypto::aws_lc_rs::default_provider())
    }

    #[test]
    fn unusable_files_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ca.crt");
        let refused = || ClientCa::load(&path, provider()).expect_err("refused").to_string();
        assert!(refused().starts_with("authentication.x509.clientCAFile: cannot read "));
        for text in ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            fs::write(&path, text).expect("written");
            assert!(refused().starts_with("authentication.x509.clientCAFile: "), "{text:?}");
        }
    }

    #[test]
    fn certificates_of_the_authorities_are_trusted() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ca.crt");
        let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
        fs::write(&path, ours.pem()).expect("written");
        let ca = ClientCa::load(&path, provider()).expect("usable");
        let verify = |chain: &[CertificateDer<'static>]| ca.verify(&chain[0], &chain[1..]);
        assert_eq!(verify(&ours.client("ann", &[]).chain), Ok(()));
        assert!(verify(&theirs.client("ann", &[]).chain).is_err());
        assert!(verify(&ours.server("n1").chain).is_err(), "a server's certificate is no client's");
        assert!(verify(&ours.expired("ann").chain).is_err());
        let below = ours.intermediate("below");
        let client = below.client("ann", &[]);
        assert_eq!(
            ca.verify(&client.chain[0], &[below.der()]),
            Ok(()),
            "the client sends the intermediate certificate"
        );
        assert!(ca.verify(&client.chain[0], &[]).is_err());
        assert_eq!(ca.hints().len(), 1);
    }

    #[tokio::test]
    async fn a_changed_file_is_reloaded_and_an_invalid_one_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("ca.crt");
        let (old, new) = (Authority::new("old"), Authority::new("new"));
        fs::write(&path, old.pem()).expect("written");
        let ca = Arc::new(ClientCa::load(&path, provider()).expect("usable"));
        let mut changes = ca.changes();
        let follower = ca.clone();
        let shutdown = CancellationToken::new();
        let task = tokio::spawn({
            let shutdown = shutdown.clone();
            async move { follower.follow(shutdown).await }
        });
        fs::write(&path, "nonsense").expect("written");
        fs::write(&path, new.pem()).expect("written");
        tokio::time::timeout(Duration::from_secs(10), changes.changed()).await.expect("in time").expect("alive");
        let verify = |chain: &[CertificateDer<'static>]| ca.verify(&chain[0], &chain[1..]);
        assert_eq!(verify(&new.client("ann", &[]).chain), Ok(()));
        assert!(verify(&old.client("ann", &[]).chain).is_err());
        shutdown.cancel();
        task.await.expect("ends");
    }
}
