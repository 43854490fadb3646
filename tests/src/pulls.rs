//! What a node shows of pulls that fail and succeed: events and status, with upstream's reasons and messages.

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use serde_json::Value;
use serde_json::json;

use crate::standalone::StandaloneNode;

/// The manifest of a pod that runs this image until SIGTERM and writes its timestamps under its name.
pub fn pod(node: &StandaloneNode, name: &str, image: &str, policy: &str) -> Value {
    let mut pod = node.pod(name, &["run", "--stamp", &node.stamp(name)]);
    let container = &mut pod["spec"]["containers"][0];
    container["image"] = json!(image);
    container["imagePullPolicy"] = json!(policy);
    pod
}

/// Waits until a pull of the pod has failed and the next one is held back. Checks events and status, and returns the error
/// of the runtime.
///
/// # Errors
/// As [`StandaloneNode::until`]; an event or the status is another than upstream's.
pub fn until_backed_off(node: &mut StandaloneNode, name: &str, image: &str) -> Result<String> {
    let what = format!("{name} is in back-off after a failed pull");
    let (status, events) = node.until(&what, |node| {
        let (status, events) = (node.status(name), node.recorded(name));
        let is_held = waiting(&status)["reason"] == "ImagePullBackOff";
        let is_logged = events.iter().any(|event| event == "W Failed: Error: ImagePullBackOff");
        Ok((is_held && is_logged).then_some((status, events)))
    })?;
    let failed = format!("W Failed: Failed to pull image {image:?}: ");
    let error = events.get(1).and_then(|event| event.strip_prefix(&failed));
    let error = error.with_context(|| format!("{name}: the second event is no failed pull: {events:?}"))?;
    let expected = [
        format!("N Pulling: Pulling image {image:?}"),
        format!("{failed}{error}"),
        "W Failed: Error: ErrImagePull".to_owned(),
        format!("N BackOff: Back-off pulling image {image:?}"),
        "W Failed: Error: ImagePullBackOff".to_owned(),
    ];
    ensure!(events.starts_with(&expected), "{name}: {events:?}");
    let message = format!("Back-off pulling image {image:?}: ErrImagePull: {error}");
    ensure!(waiting(&status)["message"] == message.as_str(), "{name}: {status}");
    ensure!(status["phase"] == "Pending" && status["containerStatuses"][0]["imageID"] == "", "{name}: {status}");
    Ok(error.to_owned())
}

/// Waits until the pod runs the image with this digest. Checks the events of pull and start, and returns how long the pull
/// took by its event, seconds.
///
/// # Errors
/// As [`StandaloneNode::until`]; an event is another than upstream's.
pub fn until_pulled(node: &mut StandaloneNode, name: &str, image: &str, digest: &str) -> Result<f64> {
    node.until_running(name)?;
    until_runs_image(node, name, digest)?;
    let started = "N Started: Container started";
    let events = node.until(&format!("the events of {name}"), |node| {
        let events = node.recorded(name);
        Ok(events.last().is_some_and(|last| last == started).then_some(events))
    })?;
    let last = events.len().checked_sub(4).map(|first| &events[first..]);
    let Some([pulling, pulled, created, _]) = last else { anyhow::bail!("{name}: {events:?}") };
    ensure!(*pulling == format!("N Pulling: Pulling image {image:?}"), "{name}: {events:?}");
    ensure!(created == "N Created: Container created", "{name}: {events:?}");
    seconds(pulled, image).with_context(|| format!("{name}: no end of a pull in {events:?}"))
}

/// Waits until the status says that the pod's container runs the image with this digest.
///
/// # Errors
/// As [`StandaloneNode::until`].
pub fn until_runs_image(node: &mut StandaloneNode, name: &str, digest: &str) -> Result<()> {
    node.until_true(&format!("{name} runs {digest}"), |node| {
        let status = &node.status(name)["containerStatuses"][0];
        let is_image = status["imageID"].as_str().is_some_and(|id| id.ends_with(digest));
        Ok(is_image && status["state"]["running"].is_object())
    })
}

/// Checks that no container of the pod was created.
///
/// # Errors
/// One was, or the runtime does not answer.
pub fn never_ran(node: &mut StandaloneNode, name: &str) -> Result<()> {
    let sandboxes = node.sandboxes(name)?;
    let is_empty = sandboxes.iter().all(|sandbox| sandbox.containers.is_empty());
    ensure!(is_empty && node.starts(name) == 0, "{name}: {sandboxes:?}");
    Ok(())
}

fn waiting(status: &Value) -> &Value {
    &status["containerStatuses"][0]["state"]["waiting"]
}

/// The duration in the event of a pull that succeeded.
fn seconds(event: &str, image: &str) -> Option<f64> {
    let rest = event.strip_prefix(&format!("N Pulled: Successfully pulled image {image:?} in "))?;
    let (took, rest) = rest.split_once(" (")?;
    let (total, size) = rest.split_once(" including waiting). Image size: ")?;
    let bytes: u64 = size.strip_suffix(" bytes.")?.parse().ok()?;
    (bytes > 0 && go_seconds(total)? >= go_seconds(took)?).then_some(())?;
    go_seconds(took)
}

/// A duration of less than an hour as Go prints it: `250ms`, `1.5s`, `1m1.5s`.
fn go_seconds(text: &str) -> Option<f64> {
    if let Some(milliseconds) = text.strip_suffix("ms") {
        return Some(milliseconds.parse::<f64>().ok()? / 1000.0);
    }
    let (minutes, seconds) = text.strip_suffix('s')?.split_once('m').unwrap_or(("0", text.strip_suffix('s')?));
    Some(minutes.parse::<f64>().ok()? * 60.0 + seconds.parse::<f64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_event_of_a_pull_has_its_duration() {
        let event = |took: &str, total: &str| {
            let text = format!("{took} ({total} including waiting). Image size: 7 bytes.");
            seconds(&format!("N Pulled: Successfully pulled image \"a:1\" in {text}"), "a:1")
        };
        assert_eq!(event("250ms", "1.5s"), Some(0.25));
        assert_eq!(event("12.5s", "1m2.5s"), Some(12.5));
        assert_eq!(event("1m2.5s", "1m2.5s"), Some(62.5));
        assert_eq!(event("2s", "1s"), None, "waiting is included");
        assert_eq!(seconds("N Pulled: Container image \"a:1\" already present on machine", "a:1"), None);
    }
}
