//! HTTP: the main port for clients that are known, the read-only port, and the health server on loopback.
//!
//! Owns the paths, bodies and status codes clients of a kubelet rely on ([`paths`]), and who may ask ([`secure`]). Reads
//! through small handles given at start and changes nothing; what rooms answer themselves is mounted ([`Mounted`]).
//!
//! ```text
//!  10250 main       HTTPS ─▶ secure ─┐
//!  10255 read-only  HTTP ────────────┴▶ dispatcher ─▶ paths ─▶ endpoints · routers of other rooms
//!  10248 health     HTTP    /healthz /healthz/ping, for probes of the agent itself
//! ```

mod answer;
mod checks;
mod connections;
mod containers;
mod debug;
mod dispatch;
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
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

pub use self::containers::Containers;
use crate::config::{FeatureGates, Gate, KubeletConfiguration};
use crate::metrics::Metrics;
use dispatch::Dispatcher;
pub use dispatch::InFlight;
use endpoints::Endpoints;
pub use listen::ListenError;
pub use mounted::Mounted;
pub use paths::EnabledHandlers;
use paths::Table;
pub use pod_list::running;
use secure::Secure;

/// The state of one sensor, as told to people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SensorReport {
    /// Its name.
    pub sensor: &'static str,
    /// `up`, `degraded`, `down` or `off`.
    pub state: &'static str,
    /// Why it is not up.
    pub reason: Option<String>,
}

/// What the servers read. Called for each request; none may block.
#[derive(Clone)]
pub struct Handles {
    /// The desired pods; static ones with the status the agent has computed.
    pub pods: Arc<dyn Fn() -> Vec<Arc<Pod>> + Send + Sync>,
    /// What runs, as the runtime knows it.
    pub running_pods: Arc<dyn Fn() -> Result<Vec<Arc<Pod>>, String> + Send + Sync>,
    /// Every sensor.
    pub sensors: Arc<dyn Fn() -> Vec<SensorReport> + Send + Sync>,
    /// Time since the sync loop last came round; `None` before it has started.
    pub sync_loop_age: Arc<dyn Fn() -> Option<Duration> + Send + Sync>,
    /// Whether containers can be started now, or why not.
    pub ready: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
    /// Brings the gauges up to date, before metrics are shown.
    pub refresh: Arc<dyn Fn() + Send + Sync>,
    /// Sets how much is logged.
    pub verbosity: Arc<dyn Fn(u32) -> Result<(), String> + Send + Sync>,
    /// The configuration as it was at start.
    pub configz: Arc<Value>,
    /// The Kubernetes version that is stood in for, such as `v1.36.3`.
    pub version: &'static str,
    /// The flags, as they are shown.
    pub flags: Arc<BTreeMap<String, String>>,
    /// Everything that is counted.
    pub metrics: Arc<Metrics>,
}

/// Where the servers listen and what they take for healthy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Address of the health server; `None` turns it off.
    pub healthz: Option<SocketAddr>,
    /// Address of the read-only server; `None` turns it off.
    pub read_only: Option<SocketAddr>,
    /// The sync loop may take this long to come round.
    pub sync_loop_limit: Duration,
    /// What the main port offers.
    pub enabled: EnabledHandlers,
}

/// The shortest time after which the sync loop counts as stuck.
const SYNC_LOOP_LEAST: Duration = Duration::from_secs(300);

impl Options {
    /// From the standard configuration. An address that is none turns its server off; the configuration's checks have
    /// refused it before.
    pub fn new(config: &KubeletConfiguration, gates: &FeatureGates) -> Self {
        let address = |host: &str, port: i32| {
            let port = u16::try_from(port).ok().filter(|port| *port != 0)?;
            Some(SocketAddr::new(host.parse::<IpAddr>().ok()?, port))
        };
        Self {
            healthz: address(&config.healthz_bind_address, config.healthz_port),
            read_only: address(&config.address, config.read_only_port),
            sync_loop_limit: (config.sync_frequency.std() * 2).max(SYNC_LOOP_LEAST),
            enabled: EnabledHandlers {
                debugging: config.enable_debugging_handlers,
                profiling: config.enable_profiling_handler,
                debug_flags: config.enable_debug_flags_handler,
                system_logs: config.enable_system_log_handler,
                checkpoint: gates.enabled(Gate::ContainerCheckpoint),
                flagz: gates.enabled(Gate::ComponentFlagz),
                statusz: gates.enabled(Gate::ComponentStatusz),
            },
        }
    }
}

/// Serves the health and the read-only port until `shutdown`; requests in progress are answered. The health server waits
/// for its port.
///
/// # Errors
/// The read-only port cannot be had.
pub async fn run(
    options: Options,
    handles: Handles,
    mounted: Mounted,
    shutdown: CancellationToken,
) -> Result<(), ListenError> {
    let health = health::router(handles.clone());
    let read_only = read_only(&options, handles, &mounted);
    let health = async {
        listen::serve("health", options.healthz, health, &shutdown).await;
        Ok(())
    };
    let read_only = listen::serve_or_fail("read-only", options.read_only, read_only, &shutdown);
    tokio::try_join!(health, read_only).map(drop)
}

/// Serves the main port until `shutdown`; requests in progress have a moment to end.
pub async fn run_main(main: Secure, options: Options, handles: Handles, mounted: Mounted, shutdown: CancellationToken) {
    let (guard, listening) = main.into_parts();
    let table = Table::main(&options.enabled);
    let endpoints = Endpoints::new(handles, options.sync_loop_limit, table.own_paths());
    let dispatcher = Dispatcher::new(table, Some(guard), endpoints, &mounted);
    listening.serve(Arc::new(dispatcher), shutdown).await;
}

/// The read-only port's paths, for everybody.
fn read_only(options: &Options, handles: Handles, mounted: &Mounted) -> Router {
    let endpoints = Endpoints::new(handles, options.sync_loop_limit, Vec::new());
    let dispatcher = Arc::new(Dispatcher::new(Table::read_only(), None, endpoints, mounted));
    Router::new().fallback(async move |request| dispatcher.answer(request).await)
}

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
