//! `keblet observe` beside an agent on a real runtime, with the privileges of the DaemonSet: it reports what happens and
//! what has happened, and the agent works as if it were alone.

use anyhow::Result;
use anyhow::ensure;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::observer::LEAST_PRIVILEGES;
use keblet_tests::observer::Observer;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::kill;
use serde_json::Value;
use serde_json::json;

fn start(node: &StandaloneNode, wrapper: &[&str]) -> Result<Observer> {
    Observer::start(&node.containerd.ready().socket, wrapper)
}

/// The record is about this static pod.
fn is_of(record: &Value, pod: &str) -> bool {
    record["pod"]["name"].as_str().is_some_and(|name| name.starts_with(pod)) && record["pod"]["namespace"] == "default"
}

/// A pod whose container keeps running when its child is killed at the container's limit.
fn hungry(node: &StandaloneNode) -> Value {
    limited(node, "hungry", &["oom", "--child", "--mb", "256"])
}

fn limited(node: &StandaloneNode, name: &str, arguments: &[&str]) -> Value {
    let mut pod = node.pod(name, arguments);
    let container = &mut pod["spec"]["containers"][0];
    container["image"] = json!(PROBE_IMAGE);
    container["resources"] = json!({ "limits": { "memory": "48Mi" } });
    pod
}

#[test]
#[ignore = "real runtime"]
fn exits_and_oom_kills_are_reported_beside_an_agent() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.write_running_pod("victim")?;
    node.start()?;
    let victim = node.until_running("victim")?;
    let mut observer = start(&node, &LEAST_PRIVILEGES)?;
    observer.until_ready()?;
    observer.until("pod", "the pod that runs already", |record| {
        is_of(record, "victim") && record["containers"][0]["state"] == "running"
    })?;
    kill(&victim)?;
    let exit = observer.until("exit", "the exit of victim", |record| is_of(record, "victim"))?;
    ensure!(exit["id"] == json!(victim.id) && exit["exitCode"] == 137 && exit["earlier"] == false, "{exit}");
    node.layout.write_manifest("hungry", &hungry(&node))?;
    let oom = observer.until("oom", "the kill of a child", |record| is_of(record, "hungry"))?;
    let sensors = observer.until("start", "the beginning", |_| true)?["sensors"].clone();
    let sensors = sensors.as_array().into_iter().flatten();
    if sensors.into_iter().any(|sensor| sensor["sensor"] == "oom" && sensor["state"] == "up") {
        // Pod and container have the same limit, and the sandbox's process is charged to the pod as well.
        ensure!(oom["victim"] == "child" && oom["scope"] == "pod", "{oom}");
        ensure!(oom["limitBytes"] == 48 << 20 && oom["confidence"] == "kernel", "{oom}");
    }
    ensure!(node.running("hungry")?.is_some(), "the container goes on without its child");
    // The agent has received its events: the container was restarted once, and another one was started.
    let next = node
        .until("the next instance", |node| Ok(node.running("victim")?.filter(|container| container.id != victim.id)))?;
    ensure!(next.attempt == 1, "{next:?}");
    let metrics = observer.metrics()?;
    let counted = |name: &str, pod: &str| metrics.lines().any(|line| line.starts_with(name) && line.contains(pod));
    ensure!(
        counted("keblet_pod_oom_kills_total{", "hungry") && counted("keblet_pod_memory_bytes{", "victim"),
        "{metrics}"
    );
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn what_happened_before_the_start_is_reported() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.layout.write_manifest("hungry", &hungry(&node))?;
    let mut once = node.pod("once", &["exit", "--code", "3", "--stamp", &node.stamp("once")]);
    once["spec"]["restartPolicy"] = json!("Never");
    node.layout.write_manifest("once", &once)?;
    let mut killed = limited(&node, "killed", &["oom", "--mb", "256"]);
    killed["spec"]["restartPolicy"] = json!("Never");
    node.layout.write_manifest("killed", &killed)?;
    node.start()?;
    node.until_running("hungry")?;
    for pod in ["once", "killed"] {
        node.until_true(&format!("{pod} has failed"), |node| Ok(node.status(pod)["phase"] == "Failed"))?;
    }
    node.until_true("the child was killed", |node| Ok(node.log_contains(&["OomKilled", "hungry"])))?;
    let mut observer = start(&node, &[])?;
    let exit = observer.until("exit", "the exit of once", |record| is_of(record, "once"))?;
    ensure!(exit["earlier"] == true && exit["exitCode"] == 3, "{exit}");
    let oom = observer.until("oom", "the kill", |record| is_of(record, "hungry"))?;
    ensure!(oom["earlier"] == true && oom["confidence"] == "counter" && oom["kills"] == 1, "{oom}");
    // Its cgroup is gone.
    let oom = observer.until("oom", "the kill of the main process", |record| is_of(record, "killed"))?;
    ensure!(oom["earlier"] == true && oom["confidence"] == "runtime" && oom["victim"] == "main", "{oom}");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn without_capabilities_the_observer_says_what_is_lost() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.write_running_pod("victim")?;
    node.start()?;
    let victim = node.until_running("victim")?;
    let mut observer = start(&node, &["setpriv", "--inh-caps=-all", "--bounding-set=-all", "--"])?;
    let begun = observer.until("start", "the beginning", |_| true)?;
    for sensor in ["exits", "oom", "cgroups", "reclaim"] {
        let found = begun["sensors"].as_array().into_iter().flatten().find(|one| one["sensor"] == sensor);
        let text = found.map(Value::to_string).unwrap_or_default();
        ensure!(text.contains("CAP_BPF") && text.contains("\"cost\""), "{sensor}: {begun}");
    }
    observer.until_ready()?;
    kill(&victim)?;
    let exit = observer.until("exit", "the exit of victim", |record| is_of(record, "victim"))?;
    ensure!(exit["exitCode"] == 137, "{exit}");
    node.stop()
}
