//! Which container instance a log request is for, or why there is none yet. Pure.

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::PodStatus;

use crate::model::quote::go_quoted;

/// The container id in the form of the status (`type://id`).
///
/// # Errors
/// The text of the response: the container has no log (yet).
pub(super) fn log_instance(status: &PodStatus, pod: &str, container: &str, previous: bool) -> Result<String, String> {
    let lists = [&status.container_statuses, &status.init_container_statuses, &status.ephemeral_container_statuses];
    let mut all = lists.into_iter().flatten().flatten();
    let what = format!("container {} in pod {}", go_quoted(container), go_quoted(pod));
    let Some(found) = all.find(|status| status.name == container) else {
        return Err(format!("{what} is not available"));
    };
    let last = last_terminated(found).filter(|id| !id.is_empty());
    if previous {
        return last.ok_or_else(|| format!("previous terminated {what} not found"));
    }
    let state = found.state.clone().unwrap_or_default();
    if state.running.is_some() {
        return Ok(found.container_id.clone().unwrap_or_default());
    }
    if let Some(terminated) = &state.terminated {
        // The latest instance may have failed before it had an id.
        let own = terminated.container_id.clone().filter(|id| !id.is_empty());
        return own.or(last).ok_or_else(|| format!("{what} is terminated"));
    }
    if last_terminated(found).is_some() {
        return last.ok_or_else(|| format!("{what} is terminated"));
    }
    Err(match state.waiting {
        Some(waiting) => {
            let reason = waiting.reason.unwrap_or_default();
            let state = match reason.as_str() {
                "ErrImagePull" => "image can't be pulled",
                "ImagePullBackOff" => "trying and failing to pull image",
                reason => reason,
            };
            format!("{what} is waiting to start: {state}")
        }
        None => format!("{what} is waiting to start - no logs yet"),
    })
}

/// Id of the previous instance; empty if it is unknown, `None` if there was none.
fn last_terminated(status: &ContainerStatus) -> Option<String> {
    let terminated = status.last_state.as_ref()?.terminated.as_ref()?;
    Some(terminated.container_id.clone().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn choose(mut status: Value, previous: bool) -> Result<String, String> {
        for (key, value) in [("name", json!("c")), ("ready", json!(false)), ("restartCount", json!(0))] {
            status[key] = value;
        }
        for (key, value) in [("image", json!("i")), ("imageID", json!(""))] {
            status[key] = value;
        }
        let status = serde_json::from_value(json!({ "containerStatuses": [status] })).unwrap();
        log_instance(&status, "p", "c", previous)
    }

    fn ended(id: &str) -> Value {
        json!({"terminated": {"exitCode": 1, "containerID": id}})
    }

    #[test]
    fn the_instance_of_the_log() {
        let running = json!({"state": {"running": {}}, "containerID": "t://2", "lastState": ended("t://1")});
        assert_eq!(choose(running.clone(), false), Ok("t://2".to_owned()));
        assert_eq!(choose(running, true), Ok("t://1".to_owned()));
        assert_eq!(choose(json!({"state": ended("t://3")}), false), Ok("t://3".to_owned()));
        let crashed = json!({"state": ended("t://3"), "lastState": ended("t://2")});
        assert_eq!(choose(crashed.clone(), false), Ok("t://3".to_owned()), "the latest of two that have ended");
        assert_eq!(choose(crashed, true), Ok("t://2".to_owned()));
        let not_started = json!({"state": ended(""), "lastState": ended("t://1")});
        assert_eq!(choose(not_started, false), Ok("t://1".to_owned()));
        let waiting = json!({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended("t://1")});
        assert_eq!(choose(waiting, false), Ok("t://1".to_owned()));
    }

    #[test]
    fn containers_of_every_kind_have_logs() {
        for list in ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"] {
            let found = json!({"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"running": {}}, "containerID": "t://1"});
            let mut status = json!({});
            status[list] = json!([found]);
            let status = serde_json::from_value(status).unwrap();
            assert_eq!(log_instance(&status, "p", "c", false), Ok("t://1".to_owned()), "{list}");
        }
    }

    #[test]
    fn errors_without_a_log() {
        let cases = [
            (json!({"state": {"running": {}}}), true, "previous terminated container \"c\" in pod \"p\" not found"),
            (json!({"state": ended("")}), false, "container \"c\" in pod \"p\" is terminated"),
            (json!({"lastState": ended("")}), false, "container \"c\" in pod \"p\" is terminated"),
            (
                json!({"state": {"waiting": {"reason": "ErrImagePull"}}}),
                false,
                "container \"c\" in pod \"p\" is waiting to start: image can't be pulled",
            ),
            (
                json!({"state": {"waiting": {"reason": "ImagePullBackOff"}}}),
                false,
                "container \"c\" in pod \"p\" is waiting to start: trying and failing to pull image",
            ),
            (
                json!({"state": {"waiting": {"reason": "ContainerCreating"}}}),
                false,
                "container \"c\" in pod \"p\" is waiting to start: ContainerCreating",
            ),
            (json!({}), false, "container \"c\" in pod \"p\" is waiting to start - no logs yet"),
        ];
        for (status, previous, text) in cases {
            assert_eq!(choose(status.clone(), previous), Err(text.to_owned()), "{status}");
        }
        let nothing = log_instance(&PodStatus::default(), "p", "c", false);
        assert_eq!(nothing, Err("container \"c\" in pod \"p\" is not available".to_owned()));
    }
}
