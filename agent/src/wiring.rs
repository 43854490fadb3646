//! The only place that knows every room: constructs them and hands each what it takes. Decides nothing.

mod observers;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::cli::host;
use crate::config::Settings;
use crate::events::sensors::SensorBoard;
use crate::metrics::Metrics;
use crate::server::{self, Handles};

pub use observers::Observers;

/// Runs the node agent until `shutdown`.
pub async fn run(settings: Settings, shutdown: CancellationToken) -> anyhow::Result<()> {
    let metrics = Metrics::new();
    let board = SensorBoard::default();
    let cgroup_version = if host::facts().cgroup_v1 { 1 } else { 2 };
    observers::announce(
        &metrics,
        &host::node_name(&settings.flags.hostname_override)?,
        cgroup_version,
        &settings.gates,
    );
    let sensors = board.clone();
    let handles = Handles {
        pods: Arc::new(Vec::new),
        sensors: Arc::new(move || observers::sensor_reports(&sensors)),
        sync_loop_age: Arc::new(|| None),
        metrics: metrics.clone(),
    };
    tokio::join!(
        observers::follow_sensors(board, metrics, shutdown.clone()),
        server::run(server::Options::new(&settings.kubelet), handles, shutdown),
    );
    Ok(())
}
