//! Speaks to the API server. Owns access (kubeconfig, credentials, TLS), connections, the limits on requests and the
//! watches that never end. Knows nothing of what is asked for.
//!
//! ```text
//!  main ──────┐ 50/s, 100 at once       turn ─▶ headers ─▶ pool ─▶ HTTP/2 connection
//!  events ────┼ 50/s, 100 at once         │                  │
//!  heartbeat ─┘ no limit, but a timeout   └── limit.rs       └── transport.rs: shared by all three
//! ```
//!
//! Bodies are JSON: the client library speaks nothing else, and protobuf would save next to nothing here (ARCHITECTURE.md
//! has the figures).

pub mod credentials;
mod dial;
mod exec;
mod files;
pub mod kubeconfig;
pub mod limit;
mod reachability;
pub mod recovery;
mod requests;
pub mod tls;
pub mod transport;
pub mod watch;

use std::sync::Arc;
use std::time::Duration;

use http::HeaderValue;
use kube::client::ClientBuilder;
use kube::client::middleware::BaseUriLayer;
use rustls::pki_types::ServerName;
use rustls::sign::CertifiedKey;
use tokio_util::sync::CancellationToken;

use self::credentials::{Authorizer, CredentialError};
use self::dial::{Dialer, Dialing};
use self::files::Files;
use self::kubeconfig::Access;
use self::limit::Limiter;
use self::reachability::Reachability;
use self::recovery::{Recovered, Recovery};
use self::requests::{Requests, Shared};
use self::tls::{Identity, PairError};
use self::transport::Transport;
use crate::metrics::{AuthorityReload, Metrics};

/// Limits and names of the clients.
#[derive(Clone, Debug)]
pub struct Options {
    /// `kubeAPIQPS`: requests per second of the main client.
    pub per_second: i32,
    /// `kubeAPIBurst`: requests at once of the main client.
    pub burst: i32,
    /// `eventRecordQPS`.
    pub events_per_second: i32,
    /// `eventBurst`.
    pub events_burst: i32,
    /// How long a heartbeat may take.
    pub heartbeat_timeout: Duration,
    /// keblet's own version and the Kubernetes version it stands in for, for the user agent.
    pub versions: (&'static str, &'static str),
}

/// Why the API server cannot even be asked.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The certificate authority is unusable.
    #[error("certificate authority {place}: {problem}")]
    Authority {
        /// File or field.
        place: String,
        /// What is wrong.
        problem: String,
        /// The same in a word, for metrics.
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
    /// `tls-server-name` is no host name.
    #[error("tls-server-name {0:?} is no host name")]
    ServerName(String),
    /// The system's certificate authorities cannot be found.
    #[error("cannot load the system's certificate authorities: {0}")]
    SystemRoots(std::io::Error),
    /// TLS cannot be set up at all.
    #[error("cannot set up TLS: {0}")]
    Tls(rustls::Error),
    /// Credentials that cannot be sent.
    #[error(transparent)]
    Credentials(#[from] CredentialError),
}

/// Why there is no client certificate.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// What was read is no pair.
    #[error(transparent)]
    Pair(#[from] PairError),
}

/// The clients of one API server. Cheap to clone.
#[derive(Clone)]
pub struct ApiServer {
    /// For everything that is not below.
    pub main: kube::Client,
    /// Node status and Lease: never waits for its turn, gives up in time.
    pub heartbeat: kube::Client,
    /// Events: cannot take turns from the rest.
    pub events: kube::Client,
    shared: Arc<Shared>,
}

impl ApiServer {
    /// Makes the clients. Sends nothing: a server that is away is no error. Certificates in files are looked after until
    /// `cancel` is cancelled; needs an async runtime.
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

    /// As [`ApiServer::connect`] with another client certificate than the one of `access`, or none for now: the caller
    /// gives new ones to [`ApiServer::identify`].
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
            http2,
            metrics: metrics.clone(),
        };
        let authorizer = Authorizer::new(&access.credentials, &metrics)?;
        let shared = Arc::new(Shared {
            transport: Transport::new(Dialer::new(dialing, &access.server), metrics.clone()),
            identity,
            authorizer,
            certificate: access.certificate.as_ref().map(|pair| pair.place()),
            reachability: Reachability::new(access.server.to_string()),
            recovery: Recovery::default(),
            user_agent: user_agent(options.versions),
            host: access.server.authority().map(ToString::to_string).unwrap_or_default(),
            metrics,
        });
        let client = |limiter: Option<Limiter>, timeout| {
            let requests = Requests { shared: shared.clone(), limiter: limiter.map(Arc::new), timeout };
            ClientBuilder::new(requests, "default").with_layer(&BaseUriLayer::new(access.server.clone())).build()
        };
        // The first client came with the transport; the other two share it.
        (0..2).for_each(|_| shared.metrics.rest_client.transport_shared());
        let api = Self {
            main: client(Limiter::new(options.per_second, options.burst), None),
            heartbeat: client(None, Some(options.heartbeat_timeout)),
            events: client(Limiter::new(options.events_per_second, options.events_burst), None),
            shared: shared.clone(),
        };
        let files = Files { certificate: access.certificate.clone(), authority: access.authority.clone().zip(roots) };
        if files.worth_watching() {
            tokio::spawn(files.watch(api.clone(), cancel));
        }
        Ok(api)
    }

    /// Shows another client certificate from now on. If it really is another one (true), all connections are closed and
    /// opened again; watches go on from where they were.
    pub fn identify(&self, key: Arc<CertifiedKey>) -> bool {
        self.shared.identify(key)
    }

    /// Shows no client certificate any more, because the one there was has expired.
    pub fn forget_identity(&self) {
        self.shared.identity.set(None);
    }

    /// Tells whoever waits an absence of the server out when it is over.
    pub fn recovered(&self) -> Recovered {
        self.shared.recovery.subscribe()
    }

    /// New connections for all requests to come; those under way are left alone. For when heartbeats fail repeatedly.
    pub fn retire_connections(&self) {
        self.shared.transport.retire();
    }
}

/// In the form that servers' logs and metrics know from kubelet.
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
mod test_server;
#[cfg(test)]
mod tests;
