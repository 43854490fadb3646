//! Sets up and refreshes a pod's volumes.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::ActContext;
use super::PodError;
use crate::model::backoff_delay;
use crate::recorder::EventType;
use crate::volumes::FailedVolume;
use crate::volumes::RefreshDue;
use crate::workers::generate::NodeSettings;
use crate::workers::generate::names;
use crate::workers::generate::resources;

/// First pause after volumes could not be set up, and the longest.
const FIRST_RETRY: Duration = Duration::from_millis(500);
const LAST_RETRY: Duration = Duration::from_secs(122);
/// The longest pause while a claim cannot be used yet: claims are not watched. A kubelet syncs such a pod every 10 to 15 s.
const LAST_CLAIM_RETRY: Duration = Duration::from_secs(10);

/// Sets up everything that containers mount.
///
/// # Errors
/// Some volumes cannot be set up; each has its event.
pub(super) async fn set_up(ctx: &ActContext, pod: &Pod) -> Result<(), PodError> {
    ctx.volumes.set_up(pod, memory(&ctx.settings, pod)).await.map_err(|failed| report_failed(ctx, pod, failed))
}

/// Refreshes volumes that change with API objects.
///
/// # Errors
/// Some could not be, and keep their content; each has its event.
pub async fn refresh(ctx: &ActContext, pod: &Pod) -> Result<RefreshDue, PodError> {
    ctx.volumes.refresh(pod, memory(&ctx.settings, pod)).await.map_err(|failed| report_failed(ctx, pod, failed))
}

/// The pause after so many failures in a row to set up volumes. `claims`: one of them has a claim that cannot be used yet.
pub fn retry_after(failures: u32, claims: bool) -> Duration {
    backoff_delay(FIRST_RETRY, if claims { LAST_CLAIM_RETRY } else { LAST_RETRY }, failures)
}

/// Size limit of a volume in memory in bytes: the node's allocatable memory, and no more than the limit of the pod's cgroup,
/// which there is only if every container has one.
fn memory(settings: &NodeSettings, pod: &Pod) -> Option<i64> {
    let of_node = settings.resources.allocatable.get("memory").map(|amount| amount.value());
    // A limit that cannot be parsed is reported when it is applied.
    let of_pod = resources::pod_cgroup_values(pod, &settings.resources).ok().and_then(|values| values.memory_max);
    let of_pod = of_pod.and_then(|bytes| i64::try_from(bytes).ok());
    [of_node, of_pod].into_iter().flatten().filter(|bytes| *bytes > 0).min()
}

/// Sends the event of each volume that could not be set up.
fn report_failed(ctx: &ActContext, pod: &Pod, failed: Vec<FailedVolume>) -> PodError {
    for failure in failed.iter().filter(|failure| !failure.is_unprocessed()) {
        ctx.pod_event(pod, EventType::Warning, failure.reason(), &failure.to_string());
    }
    let has_unprocessed = failed.iter().any(FailedVolume::is_unprocessed);
    let error = PodError::SetUpVolumes { failed };
    if has_unprocessed {
        let message = format!("Unable to attach or mount volumes: {}", error.render().message);
        ctx.pod_event(pod, EventType::Warning, "FailedMount", &message);
    }
    tracing::debug!(pod = names::describe(pod), %error, "volumes not set up");
    error
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::workers::generate::ResourceSettings;

    #[test]
    fn memory_is_limited_by_node_and_pod() {
        let settings = |memory: &str| NodeSettings {
            resources: ResourceSettings {
                allocatable: [("memory".to_owned(), memory.parse().expect("an amount"))].into(),
                ..ResourceSettings::default()
            },
            ..NodeSettings::default()
        };
        let pod = |limits: &[Option<&str>]| -> Pod {
            let container = |limit: &Option<&str>| match limit {
                Some(limit) => json!({"name": "c", "resources": {"limits": {"memory": limit}}}),
                None => json!({"name": "c"}),
            };
            let containers: Vec<_> = limits.iter().map(container).collect();
            serde_json::from_value(json!({"spec": {"containers": containers}})).expect("a pod")
        };
        for (node, limits, expected) in [
            ("4Ki", vec![Some("1Ki"), Some("1Ki")], 2048),
            ("4Ki", vec![Some("1Ki"), None], 4096),
            ("4Ki", vec![Some("8Ki")], 4096),
            ("4Ki", vec![None], 4096),
        ] {
            assert_eq!(memory(&settings(node), &pod(&limits)), Some(expected), "{node} {limits:?}");
        }
    }

    #[test]
    fn pauses_double_up_to_two_minutes() {
        let seconds = |failures| retry_after(failures, false).as_secs_f64();
        assert_eq!([1, 2, 3, 8, 9, 100].map(seconds), [0.5, 1.0, 2.0, 64.0, 122.0, 122.0]);
        let of_claims = |failures| retry_after(failures, true).as_secs_f64();
        assert_eq!([1, 2, 5, 6, 100].map(of_claims), [0.5, 1.0, 8.0, 10.0, 10.0]);
    }
}
