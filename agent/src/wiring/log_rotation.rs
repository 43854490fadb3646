//! Connects the rotation of container logs to the pods of this node.

use std::sync::Arc;

use anyhow::Context as _;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::Settings;
use crate::kernel::local_time;
use crate::log_rotation;
use crate::log_rotation::Parts;
use crate::log_rotation::Policy;
use crate::model::Amount;
use crate::model::Clock;
use crate::model::named;
use crate::pleg::PlegHandle;
use crate::retry::RetryTracker;
use crate::runtime::Runtime;

/// Starts the rotation, unless the configured size is negative.
///
/// # Errors
/// The configured size cannot be parsed.
pub(super) fn start(
    settings: &Settings,
    pleg: PlegHandle,
    runtime: Runtime,
    retries: RetryTracker,
    tasks: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let Some(policy) = policy(settings)? else { return Ok(()) };
    let pods = Arc::new(move || pleg.all());
    let parts = Parts { policy, pods, runtime, clock: Clock::System, local_time: local_time::now, retries };
    tasks.spawn(named("log rotation", log_rotation::run(parts, shutdown.clone())));
    Ok(())
}

fn policy(settings: &Settings) -> anyhow::Result<Option<Policy>> {
    let kubelet = &settings.kubelet;
    let size = kubelet.container_log_max_size.as_str();
    let max_size = size.parse::<Amount>().with_context(|| format!("containerLogMaxSize {size:?}"))?;
    let Ok(max_size) = u64::try_from(max_size.value()) else { return Ok(None) };
    let count = |number: i32| usize::try_from(number).unwrap_or(0);
    Ok(Some(Policy {
        max_size,
        max_files: count(kubelet.container_log_max_files).max(2),
        workers: count(kubelet.container_log_max_workers).max(1),
        interval: kubelet.container_log_monitor_interval.std(),
    }))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::Value;
    use serde_json::json;

    use super::*;
    use crate::wiring::node::tests::settings;

    #[test]
    fn when_logs_are_rotated_unless_their_size_has_no_limit() {
        let policy_of = |fields: Value| policy(&settings(&fields, &[])).expect("a size");
        let interval = Duration::from_secs(10);
        let usual = Policy { max_size: 10 << 20, max_files: 5, workers: 1, interval };
        assert_eq!(policy_of(json!({})), Some(usual));
        let stated = json!({"containerLogMaxSize": "100Ki", "containerLogMaxFiles": 3, "containerLogMaxWorkers": 2,
            "containerLogMonitorInterval": "4s"});
        let interval = Duration::from_secs(4);
        assert_eq!(policy_of(stated), Some(Policy { max_size: 100 << 10, max_files: 3, workers: 2, interval }));
        assert_eq!(policy_of(json!({"containerLogMaxSize": "0"})), Some(Policy { max_size: 0, ..usual }));
        assert_eq!(policy_of(json!({"containerLogMaxSize": "-1"})), None);
    }
}
