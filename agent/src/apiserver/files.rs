//! Client certificate and certificate authority in files: read every ten seconds, as client-go does, and reloaded when
//! they have changed and are valid. An invalid file leaves the previous one in use.

use std::sync::Arc;
use std::time::Duration;

use secrecy::ExposeSecret as _;
use tokio_util::sync::CancellationToken;

use super::ApiServer;
use super::ConnectError;
use super::kubeconfig::CertificatePair;
use super::kubeconfig::Pem;
use super::tls;
use super::tls::Roots;
use crate::metrics::AuthorityReload;

/// Time between two reads.
const PERIOD: Duration = Duration::from_secs(10);

/// The files.
pub(super) struct Files {
    /// Client certificate and key.
    pub certificate: Option<CertificatePair>,
    /// The certificate authority, and the verifier that uses it.
    pub authority: Option<(Pem, Roots)>,
}

impl Files {
    /// Whether any of them is a file; inline data cannot change.
    pub(super) fn worth_watching(&self) -> bool {
        let pair = self.certificate.as_ref().is_some_and(|pair| pair.certificate.path().is_some());
        pair || self.authority.as_ref().is_some_and(|(pem, _)| pem.path().is_some())
    }

    /// Reloads until cancelled. Logs an error once, until it is another one.
    pub(super) async fn watch(self, api: ApiServer, cancel: CancellationToken) {
        let (files, mut last_error) = (Arc::new(self), String::new());
        while cancel.run_until_cancelled(tokio::time::sleep(PERIOD)).await.is_some() {
            let (files, api) = (files.clone(), api.clone());
            let error = match tokio::task::spawn_blocking(move || files.reload(&api)).await {
                Ok(Ok(())) => String::new(),
                Ok(Err(error)) => error.to_string(),
                Err(error) => error.to_string(),
            };
            if error != last_error && !error.is_empty() {
                tracing::warn!("{error}; the previous one stays in use");
            }
            last_error = error;
        }
    }

    /// Reads the files once. Blocks.
    ///
    /// # Errors
    /// A file cannot be used; what it held before stays in use.
    pub(super) fn reload(&self, api: &ApiServer) -> Result<(), ConnectError> {
        if let Some((pem, roots)) = &self.authority {
            let read = tls::verifier(pem).map(|found| roots.set(found));
            let outcome = match &read {
                Ok(true) => AuthorityReload::Updated,
                Err(ConnectError::Authority { reason, .. }) => *reason,
                Ok(false) | Err(_) => AuthorityReload::Unchanged,
            };
            api.shared.metrics.rest_client.authority_reloaded(outcome);
            if read? {
                tracing::info!("the certificate authority of the API server has changed");
            }
        }
        if let Some(pair) = &self.certificate
            && api.identify(Arc::new(read_pair(pair)?))
        {
            tracing::info!("the client certificate has changed, reconnecting");
        }
        Ok(())
    }
}

/// Reads the pair. Blocks.
///
/// # Errors
/// It cannot be read, or certificate and key do not match.
pub(super) fn read_pair(pair: &CertificatePair) -> Result<rustls::sign::CertifiedKey, ConnectError> {
    let read = || -> Result<_, super::CertificateError> {
        let (certificate, key) = (pair.certificate.read()?, pair.key.read()?);
        Ok(tls::certified_key(certificate.expose_secret(), key.expose_secret())?)
    };
    read().map_err(|source| ConnectError::Certificate { place: pair.place(), source })
}
