//! `/run` and `/checkpoint`.

use std::path::Path;
use std::time::Duration;

use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::response::Response;
use k8s_openapi::jiff::Timestamp;

use super::super::containers::Containers;
use super::super::containers::has_container;
use super::find::full_name;
use super::refusal::Refusal;
use crate::model::pod_ref;
use crate::model::quote::go_quoted;

/// Runs a command in a container and responds with its output.
///
/// # Errors
/// The container is not running, or the command failed.
pub(super) async fn run(
    containers: &Containers,
    (namespace, name, container): (&str, &str, &str),
    query: &[(String, String)],
) -> Result<Response, Refusal> {
    let pod = containers.desired(namespace, name)?;
    let line = query.iter().find(|(key, _)| key == "cmd").map(|(_, value)| value.as_str()).unwrap_or_default();
    let command: Vec<String> = line.split(' ').map(str::to_owned).collect();
    let id = containers.running(&pod, container).await?;
    let id = id.ok_or_else(|| Refusal::internal(format!("container not found ({})", go_quoted(container))))?;
    // Errors of the command and of the runtime have the same status code.
    let done = containers.runtime.exec_sync(&id, command.clone(), Duration::ZERO).await;
    let done = done.map_err(|error| Refusal::internal(error.rpc_text()))?;
    if done.exit_code != 0 {
        let stderr = String::from_utf8_lossy(&done.stderr);
        let text = format!("command '{}' exited with {}: {stderr}", command.join(" "), done.exit_code);
        return Err(Refusal::internal(text));
    }
    let output = [done.stdout, done.stderr].concat();
    if output.is_empty() {
        return Ok(StatusCode::OK.into_response());
    }
    Ok(([(header::CONTENT_TYPE, "application/json")], output).into_response())
}

/// Makes the runtime checkpoint a container to a file in `folder` and responds with its name (KEP-2008).
///
/// # Errors
/// The container is not running, a parameter is invalid, or the runtime failed.
pub(super) async fn checkpoint(
    containers: &Containers,
    folder: &Path,
    (namespace, name, container): (&str, &str, &str),
    query: &[(String, String)],
) -> Result<Response, Refusal> {
    let pod = containers.desired(namespace, name)?;
    if !has_container(&pod, container) {
        return Err(Refusal::not_found(format!("container {container} does not exist")));
    }
    let failed =
        |why: &str| Refusal::internal(format!("checkpointing of {namespace}/{name}/{container} failed ({why})"));
    let timeout = effective_timeout(query, containers.runtime.usual_deadline())?;
    let timeout = timeout.ok_or_else(|| failed("CheckpointContainer requires the timeout value to be > 0"))?;
    let id = containers.running(&pod, container).await.map_err(|refusal| failed(refusal.text()))?;
    let id = id.ok_or_else(|| failed(&format!("container {container} not found")))?;
    let file = file_name(&full_name(&pod_ref(&pod)), container, Timestamp::now());
    let location = folder.join(file);
    let location = location.to_string_lossy();
    let done = containers.runtime.checkpoint_container(&id, &location, timeout).await;
    done.map_err(|error| failed(&error.rpc_text()))?;
    Ok(axum::Json(serde_json::json!({ "items": [location] })).into_response())
}

/// Longest time that a client can give a checkpoint. Longer ones cannot be sent to the runtime: a gRPC timeout has
/// eight digits at most.
const MAX_CHECKPOINT_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// The client's timeout, but not less than `usual` nor more than a day. `None` if it is negative.
fn effective_timeout(query: &[(String, String)], usual: Duration) -> Result<Option<Duration>, Refusal> {
    let Some((_, text)) = query.iter().rfind(|(key, _)| key == "timeout") else { return Ok(Some(usual)) };
    let seconds: i64 = text.parse().map_err(|_| Refusal::not_found("cannot parse value of timeout parameter"))?;
    Ok(u64::try_from(seconds).ok().map(|seconds| Duration::from_secs(seconds).min(MAX_CHECKPOINT_TIMEOUT).max(usual)))
}

fn file_name(pod: &str, container: &str, now: Timestamp) -> String {
    format!("checkpoint-{pod}-{container}-{}.tar", now.strftime("%Y-%m-%dT%H:%M:%SZ"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_checkpoints() {
        let timeout = |values: &[&str]| {
            let query: Vec<_> = values.iter().map(|value| ("timeout".to_owned(), (*value).to_owned())).collect();
            effective_timeout(&query, Duration::from_secs(120))
        };
        assert_eq!(timeout(&[]), Ok(Some(Duration::from_secs(120))));
        assert_eq!(timeout(&["7"]), Ok(Some(Duration::from_secs(120))));
        assert_eq!(timeout(&["x", "600"]), Ok(Some(Duration::from_secs(600))), "the last value counts");
        assert_eq!(timeout(&["9223372036854775807"]), Ok(Some(MAX_CHECKPOINT_TIMEOUT)));
        assert_eq!(timeout(&["-1"]), Ok(None));
        assert_eq!(timeout(&["soon"]), Err(Refusal::not_found("cannot parse value of timeout parameter")));
    }

    #[test]
    fn names_of_checkpoints() {
        let now: Timestamp = "2026-01-02T03:04:05.678Z".parse().unwrap();
        assert_eq!(file_name("web_ns", "c", now), "checkpoint-web_ns-c-2026-01-02T03:04:05Z.tar");
    }
}
