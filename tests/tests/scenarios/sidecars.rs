//! Sidecars (restartable init containers, KEP-753) on a real runtime, observed by the timestamps of the containers.

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::kill;
use serde_json::Value;
use serde_json::json;

/// A pod with an init container, a sidecar, another init container and a main container, each with its own timestamps.
fn pod(node: &StandaloneNode, policy: &str, main: &[&str]) -> Value {
    let mut pod = node.pod("web", &[]);
    let template = pod["spec"]["containers"][0].clone();
    let container = |name: &str, arguments: &[&str]| {
        let mut container = template.clone();
        let command: Vec<&str> = std::iter::once("/probe").chain(arguments.iter().copied()).collect();
        container["name"] = json!(name);
        container["command"] = json!(command);
        container["command"].as_array_mut().expect("a list").extend([json!("--stamp"), json!(node.stamp(name))]);
        container
    };
    let mut sidecar = container("proxy", &["run"]);
    sidecar["restartPolicy"] = json!("Always");
    pod["spec"]["restartPolicy"] = json!(policy);
    pod["spec"]["initContainers"] = json!([container("first", &["exit"]), sidecar, container("second", &["exit"])]);
    pod["spec"]["containers"] = json!([container("main", main)]);
    pod
}

/// Nanoseconds of the last timestamp of this kind.
fn last(node: &StandaloneNode, container: &str, kind: &str) -> Result<u64> {
    let stamps = node.stamps_of(container);
    let found = stamps.iter().rev().find(|(word, _)| word == kind).map(|(_, at)| *at);
    found.with_context(|| format!("{container} wrote no {kind}: {stamps:?}"))
}

#[test]
#[ignore = "real runtime"]
fn sidecar_starts_restarts_and_terminates_in_order() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.layout.write_manifest("web", &pod(&node, "Never", &["run"]))?;
    node.start()?;
    node.until_true("the main container's timestamp", |node| Ok(node.starts("main") == 1))?;
    let order = [("first", "exit"), ("proxy", "start"), ("second", "start"), ("second", "exit"), ("main", "start")];
    // Only the start of the runtime's process is ordered before the next container; its program may write later.
    let times = order.map(|(container, kind)| last(&node, container, kind));
    let times = times.into_iter().collect::<Result<Vec<_>>>()?;
    ensure!(times[0] < times[1] && times[0] < times[2] && times[3] < times[4], "{order:?}: {times:?}");

    let sidecar = |node: &mut StandaloneNode| -> Result<_> {
        let containers = node.sandboxes("web")?.into_iter().flat_map(|pod| pod.containers);
        Ok(containers.filter(|one| one.name == "proxy").max_by_key(|one| one.attempt))
    };
    let first = sidecar(&mut node)?.context("no sidecar")?;
    ensure!(first.attempt == 0, "{first:?}");
    kill(&first)?;
    let second = node.until("the second instance of the sidecar", |node| {
        Ok(sidecar(node)?.filter(|one| one.attempt == 1 && one.state == "running"))
    })?;
    node.until_true("its timestamp", |node| Ok(node.starts("proxy") == 2))?;
    ensure!(node.starts("main") == 1 && node.starts("first") == 1, "another container was restarted with {second:?}");

    node.layout.remove_manifest("web")?;
    node.until_true("no sandbox in the runtime", |node| Ok(node.sandboxes("web")?.is_empty()))?;
    let (main, proxy) = (last(&node, "main", "exit")?, last(&node, "proxy", "exit")?);
    ensure!(main < proxy, "the sidecar exited at {proxy}, the main container at {main}");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn pod_with_a_sidecar_succeeds_when_its_main_container_exits() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.layout.write_manifest("web", &pod(&node, "OnFailure", &["exit", "--after-ms", "1000"]))?;
    node.start()?;
    node.until_true("phase Succeeded", |node| Ok(node.status("web")["phase"] == "Succeeded"))?;
    let (main, proxy) = (last(&node, "main", "exit")?, last(&node, "proxy", "exit")?);
    ensure!(main < proxy, "the sidecar exited at {proxy}, the main container at {main}");
    let starts = ["first", "proxy", "second", "main"].map(|name| node.starts(name));
    ensure!(starts == [1; 4], "{starts:?}");
    node.stop()
}
