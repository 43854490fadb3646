//! Admission on a real runtime: a node with room for two pods. Static pods are critical, so that one with a priority preempts
//! those with a lower one.

use std::fs;

use anyhow::Result;
use anyhow::ensure;
use keblet_tests::standalone::StandaloneNode;
use serde_json::Value;
use serde_json::json;

/// Writes a pod that runs until SIGTERM.
fn write(node: &StandaloneNode, name: &str, priority: i32, ports: Value) -> Result<()> {
    let mut pod = node.pod(name, &["run", "--stamp", &node.stamp(name)]);
    pod["spec"]["priority"] = json!(priority);
    pod["spec"]["containers"][0]["ports"] = ports;
    node.layout.write_manifest(name, &pod)
}

/// Reason and message of a pod that has failed.
fn failure(node: &mut StandaloneNode, name: &str) -> Result<(Value, Value)> {
    node.until(&format!("{name} has failed"), |node| {
        let status = node.status(name);
        Ok((status["phase"] == "Failed").then(|| (status["reason"].clone(), status["message"].clone())))
    })
}

fn rejected(reason: &str, message: &str) -> (Value, Value) {
    (json!(reason), json!(format!("Pod was rejected: {message}")))
}

#[test]
#[ignore = "real runtime"]
fn a_full_node_preempts_for_critical_pods_and_rejects_the_others() -> Result<()> {
    let mut node = StandaloneNode::with(json!({ "maxPods": 2 }))?;
    let port = |address: &str| json!([{ "containerPort": 18_080, "hostPort": 18_080, "hostIP": address }]);
    write(&node, "web", 5, port("127.0.0.1"))?;
    write(&node, "low", 1, json!([]))?;
    node.start()?;
    let web = node.until_running("web")?;
    node.until_running("low")?;

    write(&node, "high", 3, port("127.0.0.2"))?;
    let message = json!("Preempted in order to admit critical pod");
    ensure!(failure(&mut node, "low")? == (json!("Preempting"), message), "{}", node.status("low"));
    let conditions = node.status("low")["conditions"].clone();
    let mut conditions = conditions.as_array().into_iter().flatten();
    let disruption = conditions.find(|condition| condition["type"] == "DisruptionTarget");
    ensure!(disruption.is_some_and(|condition| condition["reason"] == "TerminationByKubelet"), "{disruption:?}");
    let high = node.until_running("high")?;
    ensure!(node.running("low")?.is_none(), "a preempted pod runs");

    let none = "Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods to \
                preempt: no set of running pods found to reclaim resources: [(res: pods, q: 1), ]";
    write(&node, "same", 3, json!([]))?;
    ensure!(failure(&mut node, "same")? == rejected("UnexpectedAdmissionError", none), "{}", node.status("same"));
    let taken = "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports";
    write(&node, "port", 9, port("127.0.0.1"))?;
    ensure!(failure(&mut node, "port")? == rejected("NodePorts", taken), "{}", node.status("port"));
    for name in ["same", "port"] {
        ensure!(node.sandboxes(name)?.is_empty(), "{name} has a sandbox");
        let folder = node.layout.root.join("pods").join(node.uid(name).unwrap_or_default());
        ensure!(!folder.exists(), "{} is left", folder.display());
    }
    let metrics = node.metrics().unwrap_or_default();
    for line in [
        "kubelet_preemptions{preemption_signal=\"pods\"} 1",
        "kubelet_admission_rejections_total{reason=\"UnexpectedAdmissionError\"} 1",
        "kubelet_admission_rejections_total{reason=\"Other\"} 1",
    ] {
        ensure!(metrics.lines().any(|found| found == line), "{line} is missing in\n{metrics}");
    }

    // With room for one pod the next agent keeps both that run.
    node.kill_agent()?;
    let config = fs::read_to_string(&node.layout.config)?;
    let smaller = config.replace("\"maxPods\":2", "\"maxPods\":1").replace("\"maxPods\": 2", "\"maxPods\": 1");
    ensure!(smaller != config, "{config}");
    fs::write(&node.layout.config, smaller)?;
    node.start()?;
    failure(&mut node, "same")?;
    for (name, before) in [("web", web), ("high", high)] {
        node.until_true("it is known", |node| Ok(node.status(name)["phase"] == "Running"))?;
        ensure!(node.running(name)? == Some(before), "{name} was restarted");
    }
    node.stop()
}
