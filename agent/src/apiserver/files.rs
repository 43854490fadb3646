//! Certificates on disk that others may replace: looked at every ten seconds, taken over when they have changed and make
//! sense. One that does not make sense, or not yet, leaves the last good one in place.

use std::sync::Arc;
use std::time::Duration;

use secrecy::ExposeSecret as _;
use tokio_util::sync::CancellationToken;

use super::kubeconfig::{CertificatePair, Pem};
use super::tls::{self, Roots};
use super::{ApiServer, ConnectError};
use crate::metrics::AuthorityReload;

/// Time between two looks.
const PERIOD: Duration = Duration::from_secs(10);

/// What to look at.
pub struct Files {
    /// Client certificate and key.
    pub certificate: Option<CertificatePair>,
    /// The certificate authority, and where it is used.
    pub authority: Option<(Pem, Roots)>,
}

impl Files {
    /// Only what lies in files can change.
    pub fn worth_watching(&self) -> bool {
        let pair = self.certificate.as_ref().is_some_and(|pair| pair.certificate.path().is_some());
        pair || self.authority.as_ref().is_some_and(|(pem, _)| pem.path().is_some())
    }

    /// Looks until cancelled.
    pub async fn watch(self, api: ApiServer, cancel: CancellationToken) {
        let mut last_problem = String::new();
        while cancel.run_until_cancelled(tokio::time::sleep(PERIOD)).await.is_some() {
            let problem = self.look(&api).err().map(|error| error.to_string()).unwrap_or_default();
            if problem != last_problem && !problem.is_empty() {
                tracing::warn!("{problem}; the one before is used on");
            }
            last_problem = problem;
        }
    }

    /// One look.
    ///
    /// # Errors
    /// Something does not make sense; it stays as it was.
    pub(super) fn look(&self, api: &ApiServer) -> Result<(), ConnectError> {
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
            tracing::info!("the client certificate has changed, connecting anew");
        }
        Ok(())
    }
}

/// The pair as it is now.
///
/// # Errors
/// It cannot be read, or is none.
pub fn read_pair(pair: &CertificatePair) -> Result<rustls::sign::CertifiedKey, ConnectError> {
    let read = || -> Result<_, super::CertificateError> {
        let (certificate, key) = (pair.certificate.read()?, pair.key.read()?);
        Ok(tls::certified_key(certificate.expose_secret(), key.expose_secret())?)
    };
    read().map_err(|source| ConnectError::Certificate { place: pair.place(), source })
}
