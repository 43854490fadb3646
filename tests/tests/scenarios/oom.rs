//! OOM kills in real containers: how status, metrics and log report them.

use std::fs;
use std::process::Child;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use k8s_openapi::jiff::Timestamp;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::is_emulated;
use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use serde_json::Value;
use serde_json::json;

/// A pod whose container has a limit of 32 MiB.
fn pod(node: &StandaloneNode, name: &str, policy: &str, arguments: &[&str]) -> Value {
    let mut pod = node.pod(name, arguments);
    pod["spec"]["restartPolicy"] = json!(policy);
    pod["spec"]["containers"][0]["resources"] =
        json!({ "limits": { "memory": "32Mi" }, "requests": { "memory": "32Mi" } });
    pod
}

/// The metric of kills of processes of this kind, whichever limit was exceeded: those of pod and container are equal.
fn kills_of(node: &StandaloneNode, victim: &str) -> u64 {
    let text = node.metrics().unwrap_or_default();
    let word = format!("victim=\"{victim}\"");
    let lines = text.lines().filter(|line| line.starts_with("keblet_oom_kills_total{") && line.contains(&word));
    lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
}

/// `container_oom_events_total` of container `main` of this pod.
fn oom_events(node: &StandaloneNode, name: &str) -> Option<u64> {
    let pod = format!("pod=\"{name}-node\"");
    let lines = node.cadvisor("container_oom_events_total{container=\"main\"");
    let values =
        lines.iter().filter(|line| line.contains(&pod)).filter_map(|line| line.split(' ').nth(1)?.parse().ok());
    values.reduce(|a: u64, b| a + b)
}

#[test]
#[ignore = "real runtime"]
fn a_killed_child_does_not_label_the_later_exit() -> Result<()> {
    // With cgroup v2 the whole container would be killed.
    let mut node = StandaloneNode::with(json!({ "singleProcessOOMKill": true }))?;
    node.layout.write_manifest("child", &pod(&node, "child", "Never", &["oom", "--mb", "64", "--child"]))?;
    node.start()?;
    node.until_true("the verdict", |node| Ok(kills_of(node, "child") == 1))?;
    let container = node.running("child")?.context("the container keeps running")?;
    let [event] = &node.events("child", "OomKilled")[..] else {
        anyhow::bail!("{:?}", node.events("child", "OomKilled"))
    };
    ensure!(event["comm"] == "probe" && event["victim"] == "child" && event["confidence"] == "kernel", "{event}");
    ensure!(event["limit_bytes"] == 32 << 20 && event["missing"] == "", "{event}");
    // RFC 3339 with a fraction; the line was written afterwards, by another clock.
    let time = event["time"].as_str().and_then(|time| time.parse::<Timestamp>().ok());
    let at = time.with_context(|| format!("no time: {event}"))?.as_millisecond();
    let written = event["ts"].as_f64().context("a time of the line")?;
    ensure!((-1000.0..60_000.0).contains(&(written - at as f64)), "{event}");
    ensure!(node.log_contains(&["OOMKilled", "a child of the main process of container main"]), "no event on the pod");
    node.until_true("the series", |node| Ok(oom_events(node, "child") == Some(1)))?;

    let pid = container.pid.context("the runtime reports the process")?;
    kill(Pid::from_raw(pid), Signal::SIGTERM)?;
    node.until_true("phase Succeeded", |node| Ok(node.status("child")["phase"] == "Succeeded"))?;
    node.until_true("the runtime's confirmation", |node| Ok(node.running("child")?.is_none()))?;
    let terminated = node.status("child")["containerStatuses"][0]["state"]["terminated"].clone();
    ensure!(terminated["exitCode"] == 0 && terminated["reason"] == "Completed", "{terminated}");
    // The container's cgroup is gone, its count is not.
    ensure!(oom_events(&node, "child") == Some(1), "{:?}", node.cadvisor("container_oom_events_total"));
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn a_killed_main_process_is_oom_killed() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.layout.write_manifest("main", &pod(&node, "main", "Always", &["oom", "--mb", "64"]))?;
    node.start()?;
    node.until_true("two kills", |node| Ok(kills_of(node, "main") >= 2))?;
    let status = node.until("the last state", |node| {
        let status = node.status("main")["containerStatuses"][0].clone();
        let ends = [&status["lastState"]["terminated"], &status["state"]["terminated"]];
        let ended = ends.into_iter().find(|end| end.is_object()).cloned();
        Ok(ended)
    })?;
    ensure!(status["reason"] == "OOMKilled" && status["exitCode"] == 137, "{status}");
    let events = node.events("main", "OomKilled");
    let event = events.first().context("a log line")?;
    ensure!(event["victim"] == "main" && event["limit_bytes"] == 32 << 20, "{event}");
    ensure!(event["scope"] == "container" || event["scope"] == "pod", "{event}");
    ensure!(node.log_contains(&["OOMKilled", "the main process of container main, was killed"]), "no event on the pod");
    node.until_true("the count of both instances", |node| Ok(oom_events(node, "main") >= Some(2)))?;
    node.stop()
}

/// A process outside of pods that the OOM killer prefers to all others. Killed and reaped on drop.
struct Victim(Child);

impl Victim {
    fn start() -> Result<Self> {
        let victim = Self(Command::new("sleep").arg("600").spawn().context("cannot start sleep")?);
        let score = format!("/proc/{}/oom_score_adj", victim.0.id());
        fs::write(&score, "1000").with_context(|| format!("cannot write {score}"))?;
        Ok(victim)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `SysRq` lets the kernel act as on a machine that is out of memory, without a shortage for tests and daemons.
#[test]
#[ignore = "real runtime"]
fn vm_a_kill_for_the_whole_machine_is_a_system_oom() -> Result<()> {
    if !is_emulated() {
        keblet_skip::skip("the OOM killer would choose among all processes of the machine");
        return Ok(());
    }
    // Without pods: processes of BestEffort pods have the score of the victim.
    let mut node = StandaloneNode::new()?;
    node.start()?;
    node.until_true("the probe is loaded", |node| {
        Ok(node.metrics().is_some_and(|text| text.contains("keblet_sensor_state{sensor=\"oom\",state=\"up\"} 1")))
    })?;
    let victim = Victim::start()?;
    let pid = victim.0.id();
    fs::write("/proc/sysrq-trigger", "f").context("cannot call the OOM killer")?;

    let verdict = node.until("the verdict", |node| {
        let is_verdict = |line: &Value| line["event"] == "OomKilled" && line["pid"] == pid;
        Ok(node.log().into_iter().find(is_verdict))
    })?;
    ensure!(verdict["scope"] == "node" && verdict["comm"] == "sleep", "{verdict}");
    ensure!(verdict["pod"].is_null() && verdict["limit_bytes"].is_null(), "{verdict}");
    let text = format!("System OOM encountered, victim process: sleep, pid: {pid}");
    node.until_true("the event on the node", |node| Ok(node.log_contains(&["SystemOOM", &text])))?;
    node.stop()
}
