//! The API client. Owns access (kubeconfig, credentials, TLS), connections, rate limits, and watches that never end.
//! Independent of the kinds of objects that are requested.
//!
//! ```text
//!  main ──────┐ 50/s, burst 100          rate limit ─▶ headers ─▶ connection pool ─▶ HTTP/2 connection
//!  events ────┤ 50/s, burst 100              │                      │
//!  reviews ───┤ 20/s, burst 40               └── model::RateLimiter └── transport.rs: shared by all clients
//!  heartbeat ─┘ no rate limit, but a timeout
//! ```
//!
//! Token and access reviews are caused by clients of this node's server: with a limiter of their own they cannot use up
//! the rate of the main client.
//!
//! Bodies are JSON: the client library supports nothing else, and protobuf would save little here (ARCHITECTURE.md has
//! the figures).

pub mod credentials;
mod decode;
mod dial;
mod exec;
mod files;
mod freshness;
mod impersonation;
pub mod kubeconfig;
mod managed_fields;
pub(crate) mod pauses;
mod reachability;
pub mod recovery;
mod requests;
mod sent_at;
pub(crate) mod streaming_lists;
pub mod tls;
pub mod transport;
mod warnings;
pub mod watch;
pub(crate) mod watch_errors;
mod watch_requests;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use kube::client::ClientBuilder;
use kube::client::middleware::BaseUriLayer;
use rustls::pki_types::ServerName;
use rustls::sign::CertifiedKey;
use tokio_util::sync::CancellationToken;

use self::credentials::Authorizer;
use self::credentials::CredentialError;
use self::dial::Dialer;
use self::dial::Dialing;
use self::files::Files;
use self::kubeconfig::Access;
use self::reachability::Reachability;
use self::recovery::Recovered;
use self::recovery::Recovery;
use self::requests::Requests;
use self::requests::Shared;
use self::tls::Identity;
use self::tls::PairError;
use self::transport::Transport;
use self::warnings::Warned;
use crate::metrics::AuthorityReload;
use crate::metrics::Metrics;
use crate::model::RateLimiter;
use crate::proxy::Proxies;

/// Requests per second if 0 is configured, as in client-go.
const DEFAULT_PER_SECOND: u32 = 5;
/// Requests at once if 0 is configured.
const DEFAULT_BURST: u32 = 10;
/// Reviews per second: far more than the clients of one node need, for answers are cached.
const REVIEWS_PER_SECOND: i32 = 20;
/// Reviews at once.
const REVIEWS_BURST: i32 = 40;

/// Limits and names of the clients.
#[derive(Clone, Debug)]
pub struct Options {
    /// `kubeAPIQPS`: requests per second of the main client.
    pub per_second: i32,
    /// `kubeAPIBurst`: requests at once of the main client.
    pub burst: i32,
    /// `eventRecordQPS`; 0 for no limit, as upstream since 1.37.
    pub events_per_second: i32,
    /// `eventBurst`.
    pub events_burst: i32,
    /// How long a heartbeat may take.
    pub heartbeat_timeout: Duration,
    /// keblet's own version and the Kubernetes version that it implements, for the user agent.
    pub versions: (&'static str, &'static str),
}

/// Why the clients cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The certificate authority is unusable.
    #[error("certificate authority {place}: {problem}")]
    Authority {
        /// File or field.
        place: String,
        /// What is wrong.
        problem: String,
        /// The same as a label, for metrics.
        reason: AuthorityReload,
    },
    /// The client certificate is unusable.
    #[error("client certificate {place}: {source}")]
    Certificate {
        /// File or field.
        place: String,
        /// What is wrong.
        source: CertificateError,
    },
    /// `tls-server-name` is not a host name.
    #[error("tls-server-name {0:?} is not a host name")]
    ServerName(String),
    /// The system's certificate authorities cannot be found.
    #[error("cannot load the system's certificate authorities: {0}")]
    SystemRoots(std::io::Error),
    /// TLS cannot be set up at all.
    #[error("cannot set up TLS: {0}")]
    Tls(rustls::Error),
    /// The credentials cannot be used in a header.
    #[error(transparent)]
    Credentials(#[from] CredentialError),
}

/// Why a client certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// What was read is not a certificate with its key.
    #[error(transparent)]
    Pair(#[from] PairError),
}

/// The clients of one API server. Cheap to clone.
#[derive(Clone)]
pub struct ApiServer {
    /// For all requests that have no client of their own.
    pub main: kube::Client,
    /// Node status and Lease: no rate limit, every request has a timeout.
    pub heartbeat: kube::Client,
    /// Events, with a rate limit of their own.
    pub events: kube::Client,
    /// TokenReviews and SubjectAccessReviews on behalf of clients of this node's server.
    pub reviews: kube::Client,
    shared: Arc<Shared>,
}

impl ApiServer {
    /// Makes the clients. Sends nothing: an unreachable server is no error. Certificates in files are reloaded until
    /// `cancel` is cancelled. Needs an async runtime; reads the files, which blocks.
    ///
    /// # Errors
    /// Certificates, keys or credentials that cannot be used.
    pub fn connect(
        access: &Access,
        options: &Options,
        metrics: Arc<Metrics>,
        cancel: CancellationToken,
    ) -> Result<Self, ConnectError> {
        let identity = Identity::default();
        if let Some(pair) = &access.certificate {
            identity.set(Some(Arc::new(files::read_pair(pair)?)));
        }
        Self::with_identity(access, identity, options, metrics, cancel)
    }

    /// As [`ApiServer::connect`] with another client certificate than that of `access`, or none yet: the caller passes
    /// new ones to [`ApiServer::identify`].
    ///
    /// # Errors
    /// As those of [`ApiServer::connect`].
    pub fn with_identity(
        access: &Access,
        identity: Identity,
        options: &Options,
        metrics: Arc<Metrics>,
        cancel: CancellationToken,
    ) -> Result<Self, ConnectError> {
        let (tls, roots) = tls::client_config(access, &identity)?;
        let server_name = access
            .server_name
            .as_ref()
            .map(|name| ServerName::try_from(name.clone()).map_err(|_| ConnectError::ServerName(name.clone())));
        let http2 = std::env::var_os("DISABLE_HTTP2").is_none_or(|value| value.is_empty());
        let dialing = Dialing {
            tls,
            server_name: server_name.transpose()?,
            proxy: access.proxy.clone(),
            proxies: Proxies::from_env(),
            http2,
            metrics: metrics.clone(),
        };
        let authorizer = Authorizer::new(&access.credentials, &metrics)?;
        let shared = Arc::new(Shared {
            transport: Transport::new(Dialer::new(dialing, &access.server), metrics.clone()),
            identity,
            authorizer,
            impersonation: access.impersonation.clone(),
            certificate: access.certificate.as_ref().map(|pair| pair.place()),
            reachability: Reachability::new(access.server.to_string()),
            recovery: Recovery::default(),
            warned: Warned::default(),
            user_agent: user_agent(options.versions),
            host: access.server.authority().map(ToString::to_string).unwrap_or_default(),
            metrics,
        });
        let client = |limiter: Option<RateLimiter>, timeout| {
            let requests = Requests { shared: shared.clone(), limiter: limiter.map(Arc::new), timeout };
            ClientBuilder::new(requests, "default").with_layer(&BaseUriLayer::new(access.server.clone())).build()
        };
        // The first client came with the transport; the other three share it.
        (0..3).for_each(|_| shared.metrics.rest_client.transport_shared());
        let api = Self {
            main: client(rate_limiter(options.per_second, options.burst), None),
            heartbeat: client(None, Some(options.heartbeat_timeout)),
            events: client(events_limiter(options), None),
            reviews: client(rate_limiter(REVIEWS_PER_SECOND, REVIEWS_BURST), None),
            shared: shared.clone(),
        };
        let files = Files { certificate: access.certificate.clone(), authority: access.authority.clone().zip(roots) };
        if files.worth_watching() {
            // Cannot panic: reading can, in a task of its own; that is logged, and the files are read again.
            tokio::spawn(files.watch(api.clone(), cancel));
        }
        Ok(api)
    }

    /// Uses another client certificate from now on. If it differs from the previous one (true), all connections are
    /// closed and opened again; watches resume.
    pub fn identify(&self, key: Arc<CertifiedKey>) -> bool {
        self.shared.identify(key)
    }

    /// Uses no client certificate any more, because the previous one has expired.
    pub fn forget_identity(&self) {
        self.shared.identity.set(None);
    }

    /// Ends pauses of retries when the server is available again.
    pub fn recovered(&self) -> Recovered {
        self.shared.recovery.subscribe()
    }

    /// Opens new connections for further requests, after repeated failures of heartbeats. Requests in progress keep theirs
    /// with HTTP/2, which detects a broken connection. Otherwise all are aborted, as by a kubelet with `DISABLE_HTTP2`: a
    /// watch would not notice that its connection is broken.
    pub fn retire_connections(&self) {
        let transport = &self.shared.transport;
        if transport.is_probed() { transport.retire() } else { transport.reconnect() }
    }
}

/// The limiter of the client that sends events.
fn events_limiter(options: &Options) -> Option<RateLimiter> {
    let is_limited = options.events_per_second != 0;
    is_limited.then(|| rate_limiter(options.events_per_second, options.events_burst)).flatten()
}

/// The limiter of a client as client-go makes it: 0 means its default, a negative rate no limit.
fn rate_limiter(per_second: i32, burst: i32) -> Option<RateLimiter> {
    let or = |value: i32, default: u32| match u32::try_from(value) {
        Ok(value) => Some(NonZeroU32::new(value).or(NonZeroU32::new(default)).unwrap_or(NonZeroU32::MIN)),
        Err(_) => None,
    };
    let burst = or(burst, DEFAULT_BURST).unwrap_or(NonZeroU32::MIN);
    or(per_second, DEFAULT_PER_SECOND).map(|per_second| RateLimiter::new(per_second, burst))
}

/// In kubelet's form.
fn user_agent((own, kubernetes): (&str, &str)) -> HeaderValue {
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let text = format!("keblet/v{own} ({}/{arch}) kubernetes/{kubernetes}", std::env::consts::OS);
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("keblet"))
}

#[cfg(test)]
pub(crate) mod test_server;
#[cfg(test)]
mod tests;
