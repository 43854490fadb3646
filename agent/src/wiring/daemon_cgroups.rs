//! Keeps the agent in `kubeletCgroups` and stray processes in `systemCgroups`.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::cgroups::CgroupError;
use crate::cgroups::DaemonCgroup;
use crate::cgroups::Layout;
use crate::config::Settings;
use crate::kernel::proc;
use crate::model::named;
use crate::model::until;

/// Time between two checks, as in the kubelet.
const PERIOD: Duration = Duration::from_secs(60);

/// Moves the processes now and once a minute, until `shutdown`. An error is logged when it changes, and tried again. Not in a
/// PID namespace of its own, where the processes of the node are not visible.
pub(super) fn keep(settings: &Settings, layout: &Layout, tasks: &mut JoinSet<()>, shutdown: &CancellationToken) {
    let kubelet = &settings.kubelet;
    if !proc::in_host_pid_namespace() {
        return tracing::debug!("kubeletCgroups and systemCgroups are not applied in a PID namespace of its own");
    }
    let cgroup = |path: &String| (!path.is_empty()).then(|| DaemonCgroup::new(layout.clone(), path.clone()));
    let own = std::process::id();
    if let Some(cgroup) = cgroup(&kubelet.kubelet_cgroups) {
        let work = move || cgroup.take(own).map(usize::from);
        tasks.spawn(named("kubeletCgroups", until(shutdown.clone(), repeat("kubeletCgroups", work))));
    }
    // The two tasks would move the agent to and fro.
    let spared = (!kubelet.kubelet_cgroups.is_empty()).then_some(own);
    if let Some(cgroup) = cgroup(&kubelet.system_cgroups) {
        let work = move || cgroup.take_from_root(spared);
        tasks.spawn(named("systemCgroups", until(shutdown.clone(), repeat("systemCgroups", work))));
    }
}

async fn repeat(field: &'static str, work: impl Fn() -> Result<usize, CgroupError> + Clone + Send + 'static) {
    let mut reported = None;
    loop {
        let result = tokio::task::spawn_blocking(work.clone()).await;
        let error = match result {
            Ok(Ok(moved)) => {
                if moved > 0 {
                    tracing::info!(field, processes = moved, "moved processes to their cgroup");
                }
                None
            }
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(error.to_string()),
        };
        if let Some(error) = error.as_ref().filter(|error| reported.as_ref() != Some(*error)) {
            tracing::warn!(field, error, "cannot move processes to their cgroup; trying again every minute");
        }
        reported = error;
        tokio::time::sleep(PERIOD).await;
    }
}
