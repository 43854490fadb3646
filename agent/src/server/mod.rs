//! HTTP: the health server on loopback and the read-only port.
//!
//! Owns the paths, bodies and status codes clients of a kubelet rely on. Reads through small handles given at start and
//! changes nothing; refuses everything that would need to know who is asking.
//!
//! ```text
//!  10248 health     /healthz /healthz/ping              loopback, for probes of the agent itself
//!  10255 read-only  /healthz /pods /metrics             off unless asked for
//! ```

mod answer;
mod checks;
mod containers;
mod health;
mod listen;
pub mod logs;
mod readonly;
mod spans;
pub mod streams;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio_util::sync::CancellationToken;

pub use self::containers::Containers;
use crate::config::KubeletConfiguration;
use crate::metrics::Metrics;

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
    /// Every sensor.
    pub sensors: Arc<dyn Fn() -> Vec<SensorReport> + Send + Sync>,
    /// Time since the sync loop last came round; `None` before it has started.
    pub sync_loop_age: Arc<dyn Fn() -> Option<Duration> + Send + Sync>,
    /// Whether containers can be started now, or why not.
    pub ready: Arc<dyn Fn() -> Result<(), String> + Send + Sync>,
    /// Brings the gauges up to date, before metrics are shown.
    pub refresh: Arc<dyn Fn() + Send + Sync>,
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
}

/// The shortest time after which the sync loop counts as stuck.
const SYNC_LOOP_LEAST: Duration = Duration::from_secs(300);

impl Options {
    /// From the standard configuration. An address that is none turns its server off; the configuration's checks have
    /// refused it before.
    pub fn new(config: &KubeletConfiguration) -> Self {
        let address = |host: &str, port: i32| {
            let port = u16::try_from(port).ok().filter(|port| *port != 0)?;
            Some(SocketAddr::new(host.parse::<IpAddr>().ok()?, port))
        };
        Self {
            healthz: address(&config.healthz_bind_address, config.healthz_port),
            read_only: address(&config.address, config.read_only_port).filter(|_| config.enable_server),
            sync_loop_limit: (config.sync_frequency.std() * 2).max(SYNC_LOOP_LEAST),
        }
    }
}

/// Serves until `shutdown`; requests in progress are answered.
pub async fn run(options: Options, handles: Handles, shutdown: CancellationToken) {
    let health = health::router(handles.clone());
    let read_only = readonly::router(handles, options.sync_loop_limit);
    tokio::join!(
        listen::serve("health", options.healthz, health, &shutdown),
        listen::serve("read-only", options.read_only, read_only, &shutdown),
    );
}

#[cfg(test)]
mod tests;
