//! Grace periods. Pure.

use std::time::Duration;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Probe;

use crate::model::KillReason;

/// Least time the runtime gives a container, seconds: also for grace periods of 0 and 1.
const FLOOR: i64 = 2;

/// Grace period of a container in seconds: the deletion's, else the spec's, else the floor; for a failed probe the probe's
/// own one (KEP-2238). An override replaces them all.
pub fn grace_period(pod: &Pod, container: &Container, reason: KillReason, grace_override: Option<i64>) -> i64 {
    let of_probe = |probe: &Option<Probe>| probe.as_ref().and_then(|probe| probe.termination_grace_period_seconds);
    let of_spec = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    let stated = match reason {
        KillReason::Liveness => of_probe(&container.liveness_probe).or(of_spec),
        KillReason::Startup => of_probe(&container.startup_probe).or(of_spec),
        _ => of_spec,
    };
    let base = pod.metadata.deletion_grace_period_seconds.or(stated).unwrap_or(FLOOR);
    grace_override.unwrap_or(base)
}

/// What is left of a grace period after one of its waits, in whole seconds: of each wait only the whole seconds count.
pub(super) fn remaining(grace: i64, waited: Duration) -> i64 {
    grace.saturating_sub(i64::try_from(waited.as_secs()).unwrap_or(i64::MAX))
}

/// How long a wait within a grace period may take; no time if nothing is left of it.
pub(super) fn limit(grace: i64) -> Duration {
    Duration::from_secs(grace.max(0).unsigned_abs())
}

/// Timeout of StopContainer with so much of the grace period left.
pub(super) fn stop_timeout(left: i64) -> Duration {
    limit(left.max(FLOOR))
}

/// When the runtime should have killed a pod: after its grace period, and the shortest timeout of a stop, which sidecars have
/// after the other containers.
pub fn runtime_kill_limit(grace: i64) -> Duration {
    limit(grace) + 2 * limit(FLOOR)
}

/// How long a caller waits for a kill: 1.5 times the grace period, at least 10 s.
pub fn blocking_kill_limit(grace: i64) -> Duration {
    Duration::from_secs(grace.max(0).unsigned_abs()).mul_f64(1.5).max(Duration::from_secs(10))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::model::spec;

    fn pod(deletion: Option<i64>, spec_grace: Option<i64>) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"deletionGracePeriodSeconds": deletion},
            "spec": {
                "terminationGracePeriodSeconds": spec_grace,
                "containers": [
                    {"name": "a", "livenessProbe": {"terminationGracePeriodSeconds": 99}},
                    {"name": "b", "startupProbe": {"terminationGracePeriodSeconds": 77}},
                ],
            },
        }))
        .expect("a pod")
    }

    #[test]
    fn grace_periods() {
        use KillReason::DefinitionChanged;
        use KillReason::Liveness;
        use KillReason::PodKilled;
        use KillReason::Startup;
        let table = [
            (None, None, PodKilled, None, 2),
            (None, Some(30), PodKilled, None, 30),
            (Some(5), Some(30), PodKilled, None, 5),
            (Some(5), Some(30), PodKilled, Some(1), 1),
            (None, Some(30), Liveness, None, 99),
            (Some(5), Some(30), Liveness, None, 5),
            (None, Some(30), Startup, None, 30),
            (None, Some(30), DefinitionChanged, Some(0), 0),
        ];
        for (deletion, spec_grace, reason, grace_override, expected) in table {
            let pod = pod(deletion, spec_grace);
            let container = &spec::regular_containers(&pod)[0];
            assert_eq!(grace_period(&pod, container, reason, grace_override), expected, "{deletion:?} {reason:?}");
        }
        let starting = &spec::regular_containers(&pod(None, Some(30)))[1].clone();
        for (reason, expected) in [(Startup, 77), (Liveness, 30), (PodKilled, 30)] {
            assert_eq!(grace_period(&pod(None, Some(30)), starting, reason, None), expected, "{reason:?}");
        }
    }

    #[test]
    fn the_runtime_gets_two_seconds_at_least() {
        let table = [(0, 0, 2), (1, 0, 2), (30, 0, 30), (30, 10_999, 20), (30, 40_000, 2), (-3, 0, 2)];
        for (grace, waited, expected) in table {
            let timeout = stop_timeout(remaining(grace, Duration::from_millis(waited)));
            assert_eq!(timeout, Duration::from_secs(expected));
        }
    }

    #[test]
    fn waiting_for_a_kill_is_bounded() {
        assert_eq!([0, 4, 30].map(|grace| blocking_kill_limit(grace).as_secs()), [10, 10, 45]);
        assert_eq!([-1, 0, 1, 30].map(|grace| runtime_kill_limit(grace).as_secs()), [4, 4, 5, 34]);
    }
}
