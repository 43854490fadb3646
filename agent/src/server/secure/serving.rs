//! The serving certificate of the main port: from files, which are reloaded, or from the certificate manager.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::sign::CertifiedKey;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::error::CertificateError;
use super::files::FileWatch;
use super::tls::Serving;
use crate::filesystem;

const CERTIFICATE: &str = "tlsCertFile";
const KEY: &str = "tlsPrivateKeyFile";
/// Longest file that is read, bytes.
pub(super) const MAX_FILE: usize = 1 << 20;

/// Where the serving certificate comes from.
#[derive(Clone, Debug)]
pub enum ServingSource {
    /// `tlsCertFile` and `tlsPrivateKeyFile`, or the self-signed pair.
    Files {
        /// Chain, as PEM.
        certificate: PathBuf,
        /// Key, as PEM.
        key: PathBuf,
        /// Feature gate `ReloadKubeletServerCertificateFile`.
        reload: bool,
    },
    /// From the certificate manager (`serverTLSBootstrap`); handshakes fail while there is none.
    Given(Serving),
}

/// A pair of files that was loaded at least once.
pub(super) struct ServingFiles {
    certificate: PathBuf,
    key: PathBuf,
    provider: Arc<CryptoProvider>,
    sender: watch::Sender<Option<Arc<CertifiedKey>>>,
    reload: bool,
}

impl ServingFiles {
    /// Reads the pair. Blocks.
    ///
    /// # Errors
    /// A file cannot be read, or certificate and key do not match.
    pub(super) fn load(
        certificate: &Path,
        key: &Path,
        provider: Arc<CryptoProvider>,
    ) -> Result<(Self, Serving), CertificateError> {
        let (sender, serving) = watch::channel(Some(Arc::new(read(certificate, key, &provider)?)));
        let files = Self { certificate: certificate.to_owned(), key: key.to_owned(), provider, sender, reload: true };
        Ok((files, serving))
    }

    /// Whether the files are reloaded.
    pub(super) fn reloading(self, reload: bool) -> Self {
        Self { reload, ..self }
    }

    /// Reloads the pair whenever it changes, until `shutdown`. A certificate and a key that do not match are half of a
    /// change: the previous pair stays.
    pub(super) async fn follow(self, shutdown: CancellationToken) {
        if !self.reload {
            return shutdown.cancelled().await;
        }
        let mut files = FileWatch::new(vec![self.certificate.clone(), self.key.clone()]).await;
        let mut last_error = String::new();
        loop {
            // The files may have changed before the watch began, so they are read first.
            let (certificate, key, provider) = (self.certificate.clone(), self.key.clone(), self.provider.clone());
            let error = match tokio::task::spawn_blocking(move || read(&certificate, &key, &provider)).await {
                Ok(Ok(pair)) => {
                    self.take(pair);
                    String::new()
                }
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            };
            if !error.is_empty() && error != last_error {
                tracing::warn!(error, "cannot reload the serving certificate, keeping the previous one");
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

    fn take(&self, pair: CertifiedKey) {
        let new = self.sender.send_if_modified(|current| {
            let changed = current.as_ref().is_none_or(|current| current.cert != pair.cert);
            if changed {
                *current = Some(Arc::new(pair));
            }
            changed
        });
        if new {
            tracing::info!(certificate = %self.certificate.display(), "reloaded the serving certificate");
        }
    }
}

/// Reads a pair of files.
fn read(certificate: &Path, key: &Path, provider: &CryptoProvider) -> Result<CertifiedKey, CertificateError> {
    let text = |field: &'static str, path: &Path| {
        let read = filesystem::read_named(path, MAX_FILE);
        read.map_err(|cause| CertificateError::Read { field, path: path.to_owned(), cause })
    };
    let (chain, private) = (text(CERTIFICATE, certificate)?, text(KEY, key)?);
    pair((certificate, &chain), (key, &private), provider)
}

/// A certificate and its key from PEM text. The paths are for errors.
///
/// # Errors
/// The text is no PEM, or certificate and key do not match.
pub(super) fn pair(
    (certificate, chain): (&Path, &[u8]),
    (key, private): (&Path, &[u8]),
    provider: &CryptoProvider,
) -> Result<CertifiedKey, CertificateError> {
    let content = |field: &'static str, path: &Path, problem: String| CertificateError::Content {
        field,
        path: path.to_owned(),
        problem,
    };
    let chain = CertificateDer::pem_slice_iter(chain)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| content(CERTIFICATE, certificate, error.to_string()))?;
    if chain.is_empty() {
        return Err(content(CERTIFICATE, certificate, "holds no certificate".to_owned()));
    }
    let private = PrivateKeyDer::from_pem_slice(private)
        .map_err(|error| content(KEY, key, format!("holds no private key: {error}")))?;
    CertifiedKey::from_der(chain, private, provider).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => content(KEY, key, format!("is not the key of {}", certificate.display())),
        other => content(KEY, key, other.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::super::testing::Authority;
    use super::super::testing::Pair;
    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;

    fn provider() -> Arc<CryptoProvider> {
        Arc::new(rustls::crypto::aws_lc_rs::default_provider())
    }

    struct Files {
        folder: tempfile::TempDir,
    }

    impl Files {
        fn new(pair: &Pair) -> Self {
            let files = Self { folder: tempfile::tempdir().expect("a folder") };
            fs::write(files.certificate(), pair.chain_pem()).expect("written");
            fs::write(files.key(), pair.key_pem()).expect("written");
            files
        }

        fn certificate(&self) -> PathBuf {
            self.folder.path().join("tls.crt")
        }

        fn key(&self) -> PathBuf {
            self.folder.path().join("tls.key")
        }

        fn load(&self) -> Result<(ServingFiles, Serving), String> {
            ServingFiles::load(&self.certificate(), &self.key(), provider()).map_err(|error| error.to_string())
        }
    }

    #[test]
    fn errors_name_field_and_file() {
        let authority = Authority::new("ca");
        let (one, two) = (authority.server("n1"), authority.server("n1"));
        let files = Files::new(&one);
        assert!(files.load().is_ok());
        fs::write(files.key(), two.key_pem()).expect("written");
        assert!(files.load().err().expect("refused").starts_with("tlsPrivateKeyFile: "));
        fs::write(files.certificate(), "nonsense").expect("written");
        assert!(files.load().err().expect("refused").starts_with("tlsCertFile: "));
        fs::remove_file(files.certificate()).expect("removed");
        assert!(files.load().err().expect("refused").starts_with("tlsCertFile: cannot read "));
        for found in [InPlace::Huge, InPlace::Folder] {
            let _ = fs::remove_file(files.certificate());
            found.put(&files.certificate()).expect("made");
            let (certificate, key) = (files.certificate(), files.key());
            let loaded = in_time(move || read(&certificate, &key, &provider()).map(drop));
            let error = loaded.expect("it ends").expect_err("refused").to_string();
            assert!(error.starts_with("tlsCertFile: cannot read "), "{found:?}: {error}");
        }
    }

    #[tokio::test]
    async fn a_mismatch_keeps_the_previous_pair() {
        let authority = Authority::new("ca");
        let (one, two) = (authority.server("n1"), authority.server("n1"));
        let files = Files::new(&one);
        let (loaded, mut serving) = files.load().expect("usable");
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(loaded.follow(shutdown.clone()));
        let shown = |serving: &Serving| serving.borrow().as_ref().expect("one").cert[0].clone();
        assert_eq!(shown(&serving), one.chain[0]);
        fs::write(files.certificate(), two.chain_pem()).expect("written");
        // Long enough for the change to be loaded.
        let early = tokio::time::timeout(Duration::from_millis(300), serving.changed()).await;
        assert!(early.is_err(), "an incomplete change was loaded");
        fs::write(files.key(), two.key_pem()).expect("written");
        tokio::time::timeout(Duration::from_secs(10), serving.changed()).await.expect("in time").expect("alive");
        assert_eq!(shown(&serving), two.chain[0]);
        shutdown.cancel();
        task.await.expect("ends");
    }

    #[tokio::test(start_paused = true)]
    async fn without_the_feature_gate_a_new_pair_is_not_loaded() {
        let authority = Authority::new("ca");
        let (one, two) = (authority.server("n1"), authority.server("n1"));
        let files = Files::new(&one);
        let (loaded, mut serving) = files.load().expect("usable");
        fs::write(files.certificate(), two.chain_pem()).expect("written");
        fs::write(files.key(), two.key_pem()).expect("written");
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(loaded.reloading(false).follow(shutdown.clone()));
        let changed = tokio::time::timeout(Duration::from_secs(600), serving.changed()).await;
        assert!(changed.is_err(), "it was loaded");
        shutdown.cancel();
        task.await.expect("ends");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pair_that_could_not_be_used_is_read_again_without_an_event() {
        let authority = Authority::new("ca");
        let (one, two) = (authority.server("n1"), authority.server("n1"));
        let files = Files::new(&one);
        let (loaded, mut serving) = files.load().expect("usable");
        // Another name of the key, in a folder that is not watched.
        let elsewhere = tempfile::tempdir().expect("a folder");
        let unwatched = elsewhere.path().join("key");
        fs::hard_link(files.key(), &unwatched).expect("linked");
        fs::write(files.certificate(), two.chain_pem()).expect("written");
        let task = tokio::spawn(loaded.follow(CancellationToken::new()));
        let early = tokio::time::timeout(Duration::from_secs(600), serving.changed()).await;
        assert!(early.is_err(), "an incomplete change was loaded");
        fs::write(&unwatched, two.key_pem()).expect("written");
        let read = tokio::time::timeout(Duration::from_secs(600), serving.changed()).await;
        read.expect("in time").expect("alive");
        assert_eq!(serving.borrow().as_ref().expect("one").cert[0], two.chain[0]);
        task.abort();
    }
}
