//! HTTP servers: the main port (authenticated and authorized), the read-only port, and the health port on loopback.
//!
//! Owns the paths, bodies and status codes that clients of a kubelet rely on ([`paths`]), authentication and
//! authorization ([`secure`]), and the limits of connections ([`connections`], [`listen`]). Reads the agent through
//! [`AgentState`] and changes only the log's verbosity; routers of other modules are mounted ([`Mounted`]).
//!
//! ```text
//!  10250 main       HTTPS ─▶ secure ─┐
//!  10255 read-only  HTTP ────────────┴▶ dispatch ─▶ paths ─▶ endpoints · mounted routers
//!  10248 health     HTTP    /healthz /healthz/ping /readyz, for probes of the agent itself
//! ```

mod answer;
mod checks;
mod configz;
mod connections;
mod containers;
mod debug;
mod dispatch;
mod encoding;
mod endpoints;
mod exposition;
mod health;
mod listen;
pub mod logs;
mod mounted;
mod paths;
mod pod_list;
pub mod secure;
pub mod streams;
pub mod usage;
mod zpages;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use tokio_util::sync::CancellationToken;

pub use self::configz::Configz;
pub use self::containers::Containers;
pub use self::containers::PodLookup;
use crate::config::Feature;
use crate::config::FeatureGates;
use crate::config::KubeletConfiguration;
use crate::metrics::Metrics;
use dispatch::Dispatcher;
pub use dispatch::InFlight;
use endpoints::Endpoints;
pub use listen::HostPort;
pub use listen::ListenError;
pub use mounted::Mounted;
pub use paths::EnabledHandlers;
use paths::Table;
pub use pod_list::running;
use secure::Secure;

/// The state of one sensor, as `/healthz?verbose` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SensorReport {
    /// Its name.
    pub sensor: &'static str,
    /// `up`, `degraded`, `down` or `off`.
    pub state: &'static str,
    /// Why it is not up.
    pub reason: Option<String>,
}

/// What the servers read of the agent, and the one thing they change. Methods are called for each request; none may block.
pub trait AgentState: Send + Sync + 'static {
    /// The desired pods; static ones with the status that the agent has computed.
    fn pods(&self) -> Vec<Arc<Pod>>;

    /// The pods that run, as the runtime reports them.
    ///
    /// # Errors
    /// The runtime has not answered yet.
    fn running_pods(&self) -> Result<Vec<Arc<Pod>>, String>;

    /// The state of every sensor.
    fn sensors(&self) -> Vec<SensorReport>;

    /// Time since the last iteration of the sync loop; `None` before it has started.
    fn sync_loop_age(&self) -> Option<Duration>;

    /// Whether the runtime can start containers now.
    ///
    /// # Errors
    /// Why it cannot.
    fn runtime_ready(&self) -> Result<(), String>;

    /// Updates the gauges that are computed when metrics are scraped. Calls may overlap, and may be dropped.
    fn refresh_metrics(&self) -> BoxFuture<'_, ()>;

    /// Sets the verbosity of the log.
    ///
    /// # Errors
    /// There is no such verbosity.
    fn set_verbosity(&self, level: u32) -> Result<(), String>;
}

/// What the servers are made from. Cheap to clone.
#[derive(Clone)]
pub struct Handles {
    /// The agent as it is now.
    pub agent: Arc<dyn AgentState>,
    /// The effective configuration.
    pub configz: Configz,
    /// The Kubernetes version that the agent implements, such as `v1.36.3`.
    pub version: &'static str,
    /// The flags with their values.
    pub flags: Arc<BTreeMap<String, String>>,
    /// All metrics.
    pub metrics: Arc<Metrics>,
}

/// Addresses and switches of the servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Address of the health server; `None` turns it off.
    pub healthz: Option<HostPort>,
    /// Address of the read-only server; `None` turns it off.
    pub read_only: Option<SocketAddr>,
    /// An iteration of the sync loop may take this long before `/healthz/syncloop` fails.
    pub sync_loop_limit: Duration,
    /// Handlers that are enabled on the main port.
    pub enabled: EnabledHandlers,
}

/// Lower bound of the time after which the sync loop counts as stuck.
const SYNC_LOOP_LEAST: Duration = Duration::from_secs(300);

impl Options {
    /// From the standard configuration. An invalid `address`, which validation has refused before, disables the read-only
    /// server.
    pub fn new(config: &KubeletConfiguration, gates: &FeatureGates) -> Self {
        let port = |port: i32| u16::try_from(port).ok().filter(|port| *port != 0);
        let address = config.address.parse::<IpAddr>().ok();
        Self {
            healthz: port(config.healthz_port).map(|port| HostPort { host: config.healthz_bind_address.clone(), port }),
            read_only: address.zip(port(config.read_only_port)).map(SocketAddr::from),
            sync_loop_limit: (config.sync_frequency.std() * 2).max(SYNC_LOOP_LEAST),
            enabled: EnabledHandlers {
                debugging: config.enable_debugging_handlers,
                profiling: config.enable_profiling_handler,
                debug_flags: config.enable_debug_flags_handler,
                system_logs: config.enable_system_log_handler,
                checkpoint: gates.enabled(Feature::ContainerCheckpoint),
                flagz: gates.enabled(Feature::ComponentFlagz),
                statusz: gates.enabled(Feature::ComponentStatusz),
            },
        }
    }
}

/// Serves the health and the read-only port until `shutdown`; requests in progress are answered. The health server
/// tries to bind its address until it succeeds.
///
/// # Errors
/// The address of the read-only port cannot be bound within 5 s.
pub async fn run(
    options: Options,
    handles: Handles,
    mounted: Mounted,
    shutdown: CancellationToken,
) -> Result<(), ListenError> {
    let health = health::router(handles.clone());
    let read_only = read_only(&options, handles, &mounted);
    let Options { healthz, read_only: address, .. } = options;
    let health = async {
        listen::serve("health", healthz, health, &shutdown).await;
        Ok(())
    };
    let read_only = listen::serve_or_fail("read-only", address, read_only, &shutdown);
    tokio::try_join!(health, read_only).map(drop)
}

/// Serves a router of another program than the agent, such as the metrics of `keblet observe`, over HTTP until `shutdown`;
/// with the same limits of connections.
///
/// # Errors
/// The address cannot be bound within 5 s.
pub async fn run_plain(
    server: &'static str,
    address: SocketAddr,
    router: Router,
    shutdown: CancellationToken,
) -> Result<(), ListenError> {
    listen::serve_or_fail(server, Some(address), router, &shutdown).await
}

/// Serves the main port until `shutdown`; requests in progress have 2 s to end.
pub async fn run_main(main: Secure, options: Options, handles: Handles, mounted: Mounted, shutdown: CancellationToken) {
    let (guard, listening) = main.into_parts();
    let table = Table::main(&options.enabled);
    let endpoints = Endpoints::new(handles, options.sync_loop_limit, table.own_paths());
    let dispatcher = Dispatcher::new(table, Some(guard), endpoints, &mounted);
    listening.serve(Arc::new(dispatcher), shutdown).await;
}

/// The paths of the read-only port, without authorization.
fn read_only(options: &Options, handles: Handles, mounted: &Mounted) -> Router {
    let endpoints = Endpoints::new(handles, options.sync_loop_limit, Vec::new());
    let dispatcher = Arc::new(Dispatcher::new(Table::read_only(), None, endpoints, mounted));
    Router::new().fallback(async move |request| dispatcher.answer(request).await)
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
