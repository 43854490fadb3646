//! The main port: HTTPS with authentication and authorization.
//!
//! ```text
//!  listener ─▶ connections (bounded) ─▶ TLS ─▶ Dispatcher: path known? ─▶ Guard: authn, authz ─▶ response
//!                     serving certificate ─┘          404, 307         401    403, 500
//!                     client authorities ──┴───────────────────────────┘
//! ```

mod authenticate;
mod authorize;
mod client_ca;
mod error;
mod files;
mod guard;
mod listener;
mod review;
mod self_signed;
mod serving;
#[cfg(test)]
pub(super) mod testing;
mod tls;
mod user;

use std::net::IpAddr;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use super::connections::Peer;
pub use error::CertificateError;
pub use error::SetupError;
pub(super) use guard::Guard;
pub use review::ApiReviews;
pub use review::ReviewError;
pub use review::Reviews;
pub use serving::ServingSource;
pub use tls::Serving;
pub use tls::check_tls;
pub use user::User;

use super::dispatch::Dispatcher;
use super::listen;
use crate::config::Feature;
use crate::config::FeatureGates;
use crate::config::KubeletConfiguration;
use crate::metrics::Metrics;
use authenticate::Authenticator;
use authenticate::Tokens;
use authorize::Authorizer;
use authorize::Webhook;
use client_ca::ClientCa;
use listener::Handshakes;
use self_signed::SelfSigned;
use serving::ServingFiles;
use tls::TlsSettings;

/// The serving pair of the configuration, or a self-signed one for `host` in `cert_dir`. Blocks: reads files, may
/// generate keys. For `serverTLSBootstrap` see [`ServingSource::Given`].
///
/// # Errors
/// Only certificate or key exists, or a pair cannot be generated.
pub fn serving_files(
    config: &KubeletConfiguration,
    gates: &FeatureGates,
    cert_dir: &Path,
    host: &str,
) -> Result<ServingSource, SetupError> {
    let (certificate, key) = if config.tls_cert_file.is_empty() && config.tls_private_key_file.is_empty() {
        match self_signed::pair(cert_dir, host, SystemTime::now())? {
            SelfSigned::Kept(certificate, key) => (certificate, key),
            SelfSigned::Unkept(pair) => return Ok(ServingSource::Given(watch::channel(Some(Arc::new(pair))).1)),
        }
    } else {
        (config.tls_cert_file.clone().into(), config.tls_private_key_file.clone().into())
    };
    Ok(ServingSource::Files { certificate, key, reload: gates.enabled(Feature::ReloadKubeletServerCertificateFile) })
}

/// What [`Secure::open`] applies.
pub struct SecureOptions<'a> {
    /// The configuration.
    pub config: &'a KubeletConfiguration,
    /// Feature gates.
    pub gates: &'a FeatureGates,
    /// The node's name.
    pub node: &'a str,
    /// The serving certificate.
    pub serving: ServingSource,
    /// The API server, if there is one.
    pub reviews: Option<Arc<dyn Reviews>>,
    /// What is counted.
    pub metrics: &'a Arc<Metrics>,
}

/// The main port, ready to be served by [`super::run_main`].
pub struct Secure {
    listener: TcpListener,
    handshakes: Handshakes,
    guard: Guard,
    client_ca: Option<Arc<ClientCa>>,
    serving_files: Option<ServingFiles>,
}

impl Secure {
    /// Validates the configuration of the main port, whose address `listener` has bound. Reads the certificate files, which
    /// blocks.
    ///
    /// # Errors
    /// A setting that cannot be applied.
    pub fn open(listener: TcpListener, options: SecureOptions<'_>) -> Result<Self, SetupError> {
        let SecureOptions { config, gates, node, serving, reviews, metrics } = options;
        let settings = TlsSettings::new(config)?;
        let file = Some(&config.authentication.x509.client_ca_file).filter(|file| !file.is_empty());
        let client_ca = match file {
            Some(file) => Some(Arc::new(ClientCa::load(Path::new(file), settings.provider().clone())?)),
            None => None,
        };
        let guard = Guard {
            authenticator: authenticator(config, gates, client_ca.clone(), reviews.clone(), metrics)?,
            authorizer: authorizer(config, node, reviews)?,
        };
        let (serving, serving_files) = match serving {
            ServingSource::Given(serving) => (serving, None),
            ServingSource::Files { certificate, key, reload } => {
                let (files, serving) = ServingFiles::load(&certificate, &key, settings.provider().clone())?;
                (serving, Some(files.reloading(reload)))
            }
        };
        let reload_hints = gates.enabled(Feature::ReloadKubeletClientCAFile);
        let handshakes = Handshakes::new(settings, serving, client_ca.clone(), reload_hints)?;
        Ok(Self { listener, handshakes, guard, client_ca, serving_files })
    }

    /// The bound address.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.local_addr().ok()
    }

    /// Splits it into the guard and the listener.
    pub(super) fn into_parts(self) -> (Guard, Listening) {
        let Self { listener, handshakes, guard, client_ca, serving_files } = self;
        (guard, Listening { listener, handshakes, client_ca, serving_files })
    }
}

/// The bound port without its guard.
pub(super) struct Listening {
    listener: TcpListener,
    handshakes: Handshakes,
    client_ca: Option<Arc<ClientCa>>,
    serving_files: Option<ServingFiles>,
}

impl Listening {
    /// Serves until `shutdown`; requests in progress have 2 s to end.
    pub(super) async fn serve(self, dispatcher: Arc<Dispatcher>, shutdown: CancellationToken) {
        let Self { listener, handshakes, client_ca, serving_files } = self;
        let follow_ca = async {
            if let Some(client_ca) = client_ca {
                client_ca.follow(shutdown.clone()).await;
            }
        };
        let follow_serving = async {
            if let Some(files) = serving_files {
                files.follow(shutdown.clone()).await;
            }
        };
        tokio::join!(listener::serve(listener, handshakes, dispatcher, &shutdown), follow_ca, follow_serving);
    }
}

/// Binds the address of the main port. Connections wait until [`super::run_main`] serves them.
///
/// # Errors
/// An invalid address, or one that cannot be bound within 5 s.
pub async fn bind(config: &KubeletConfiguration) -> Result<TcpListener, SetupError> {
    let tls = |field: &str, problem: String| SetupError::Tls { field: field.to_owned(), problem };
    let host: IpAddr =
        config.address.parse().map_err(|_| tls("address", format!("{:?} is not an IP address", config.address)))?;
    let port = u16::try_from(config.port).map_err(|_| tls("port", format!("{} is not a port", config.port)))?;
    let address = SocketAddr::new(host, port);
    listen::bind("main", address).await.map_err(|cause| SetupError::Listen { address, cause })
}

fn authenticator(
    config: &KubeletConfiguration,
    gates: &FeatureGates,
    client_ca: Option<Arc<ClientCa>>,
    reviews: Option<Arc<dyn Reviews>>,
    metrics: &Arc<Metrics>,
) -> Result<Authenticator, SetupError> {
    let webhook = &config.authentication.webhook;
    let tokens = match (webhook.enabled, reviews) {
        (false, _) => None,
        (true, None) => return Err(SetupError::NoAuthenticationClient),
        (true, Some(reviews)) => Some(Tokens::new(reviews, webhook.cache_ttl.std(), metrics.clone())?),
    };
    Ok(Authenticator {
        client_ca,
        tokens,
        anonymous: config.authentication.anonymous.enabled,
        metrics: metrics.clone(),
        uid_from_certificate: gates.enabled(Feature::AllowParsingUserUIDFromCertAuth),
    })
}

fn authorizer(
    config: &KubeletConfiguration,
    node: &str,
    reviews: Option<Arc<dyn Reviews>>,
) -> Result<Authorizer, SetupError> {
    let webhook = &config.authorization.webhook;
    match config.authorization.mode.as_str() {
        "AlwaysAllow" => Ok(Authorizer::AlwaysAllow),
        "Webhook" => {
            let reviews = reviews.ok_or(SetupError::NoAuthorizationClient)?;
            let (yes, no) = (webhook.cache_authorized_ttl.std(), webhook.cache_unauthorized_ttl.std());
            Ok(Authorizer::Webhook(Webhook::new(reviews, node.to_owned(), yes, no)))
        }
        "" => Err(SetupError::NoMode),
        other => Err(SetupError::UnknownMode(other.to_owned())),
    }
}

#[cfg(test)]
mod tests;
