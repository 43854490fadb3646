//! A node whose disk and process ids are below their thresholds from the start. Static pods are critical: they run on, and
//! what no pod needs is removed. The witnesses are the runtime, the agent's log and its metrics.

use anyhow::Result;
use anyhow::ensure;
use keblet_tests::standalone::StandaloneNode;
use serde_json::json;

/// Containers of a pod that have exited, over all its sandboxes.
fn exited(node: &mut StandaloneNode, name: &str) -> Result<usize> {
    let pods = node.sandboxes(name)?;
    Ok(pods.iter().flat_map(|pod| &pod.containers).filter(|container| container.state == "exited").count())
}

#[test]
#[ignore = "real runtime"]
fn a_disk_below_its_threshold_costs_dead_containers_and_no_static_pod() -> Result<()> {
    let mut node = StandaloneNode::with(json!({
        "evictionHard": { "nodefs.available": "99.99%", "imagefs.available": "99.99%" },
        "evictionPressureTransitionPeriod": "5s",
        // The images belong to all tests.
        "imageMinimumGCAge": "1h",
    }))?;
    node.write_running_pod("web")?;
    let mut once = node.pod("once", &["exit", "--stamp", &node.stamp("once")]);
    once["spec"]["restartPolicy"] = json!("Never");
    node.layout.write_manifest("once", &once)?;
    node.start()?;
    let web = node.until_running("web")?;
    node.until_true("it has been announced", |node| {
        Ok(node.log_contains(&["EvictionThresholdMet", "Attempting to reclaim ephemeral-storage"]))
    })?;
    node.until_true("once has ended", |node| Ok(node.status("once")["phase"] == "Succeeded"))?;
    node.until_true("its dead container is removed", |node| Ok(exited(node, "once")? == 0))?;
    node.until_true("critical pods were considered", |node| Ok(node.log_contains(&["critical pods are not evicted"])))?;
    let now = node.until_running("web")?;
    ensure!(now.id == web.id, "the static pod was restarted");
    ensure!(node.status("web")["reason"].is_null(), "{}", node.status("web"));
    let metrics = node.metrics().unwrap_or_default();
    ensure!(!metrics.contains("kubelet_evictions{"), "{metrics}");
    ensure!(
        metrics.contains("kubelet_eviction_stats_age_seconds_count{eviction_signal=\"nodefs.available\"}"),
        "{metrics}"
    );
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn thresholds_on_memory_and_process_ids_spare_static_pods() -> Result<()> {
    let mut node = StandaloneNode::with(json!({
        "evictionHard": { "memory.available": "99.99%", "pid.available": "99.99%" },
    }))?;
    node.write_running_pod("web")?;
    node.start()?;
    node.until_running("web")?;
    node.until_true("it has been announced", |node| {
        Ok(node.log_contains(&["EvictionThresholdMet", "Attempting to reclaim memory"]))
    })?;
    node.until_true("the conditions are logged", |node| Ok(node.log_contains(&["MemoryPressure", "PIDPressure"])))?;
    ensure!(node.running("web")?.is_some());
    for source in ["working_set", "mem_available"] {
        let series = format!("keblet_node_memory_available_bytes{{source=\"{source}\"}} ");
        node.until_true(&series, |node| {
            let metrics = node.metrics().unwrap_or_default();
            let bytes = metrics.lines().find_map(|line| line.strip_prefix(&series)?.parse::<f64>().ok());
            Ok(bytes > Some(0.0))
        })?;
    }
    node.stop()
}

/// Triggers are registered with the kernel, if need be with longer windows; `memory.events` is watched where there is any.
#[test]
#[ignore = "real runtime"]
fn pressure_of_the_node_is_followed() -> Result<()> {
    if std::fs::read("/proc/pressure/memory").is_err() {
        keblet_skip::skip("the kernel has no pressure stall information");
        return Ok(());
    }
    let mut node = StandaloneNode::with(json!({}))?;
    node.write_running_pod("web")?;
    node.start()?;
    node.until_running("web")?;
    let state = |metrics: &str, sensor: &str, state: &str| {
        metrics.contains(&format!("keblet_sensor_state{{sensor=\"{sensor}\",state=\"{state}\"}} 1"))
    };
    node.until_true("triggers are followed", |node| {
        let metrics = node.metrics().unwrap_or_default();
        Ok(state(&metrics, "pressure", "up") || state(&metrics, "pressure", "degraded"))
    })?;
    let is_v2 = std::path::Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let expected = if is_v2 { "up" } else { "down" };
    node.until_true("memory.events", |node| Ok(state(&node.metrics().unwrap_or_default(), "memory-events", expected)))?;
    node.stop()
}
