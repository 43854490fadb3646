//! Notifications to systemd: readiness and the watchdog.

use anyhow::Context as _;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::Settings;
use crate::model::named;
use crate::server;
use crate::sync::SharedPods;
use crate::systemd;
use crate::systemd::Watchdog;

/// The watchdog that systemd has set for this process, if any.
pub(super) fn watchdog() -> anyhow::Result<Option<Watchdog>> {
    let variable = |name: &'static str| std::env::var(name).ok();
    Watchdog::configured(variable, std::process::id()).context("create health checker")
}

/// Reports that the agent is ready, and from then on that it is healthy: the sync loop, once started, must complete a round
/// within the time that `/healthz` allows it. `ping` and `log` are not checked: lines of the log are written synchronously,
/// so that a task that cannot write one does not get here.
pub(super) fn start(
    watchdog: Option<Watchdog>,
    settings: &Settings,
    pods: SharedPods,
    tasks: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) {
    systemd::ready();
    let Some(watchdog) = watchdog else { return };
    let limit = server::Options::new(&settings.kubelet, &settings.gates).sync_loop_limit;
    let check = move || match pods.last_iteration().map(|at| at.elapsed()) {
        Some(age) if age > limit => Err("checker syncloop failed: sync Loop took longer than expected".to_owned()),
        _ => Ok(()),
    };
    tasks.spawn(named("watchdog of systemd", watchdog.run(check, shutdown.clone())));
}
