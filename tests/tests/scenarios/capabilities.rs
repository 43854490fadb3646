//! The agent with fewer capabilities, and pods whose exits prove nothing: exits are still handled, and the sensors
//! report what is missing.

use anyhow::Result;
use anyhow::ensure;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::kill;
use keblet_tests::standalone::processes_of;
use serde_json::json;

/// Runs the agent under `wrapper`, kills a container, and returns the health report of the sensors.
fn exits_are_handled_under(wrapper: &[&str]) -> Result<String> {
    let mut node = StandaloneNode::new()?;
    node.write_running_pod("victim")?;
    node.write_running_pod("bystander")?;
    node.start_under(wrapper)?;
    let (victim, bystander) = (node.until_running("victim")?, node.until_running("bystander")?);
    kill(&victim)?;
    let next = node
        .until("the next instance", |node| Ok(node.running("victim")?.filter(|container| container.id != victim.id)))?;
    ensure!(next.attempt == 1, "{next:?}");
    node.until_true("its stamp", |node| Ok(node.starts("victim") == 2))?;
    ensure!(node.running("bystander")? == Some(bystander), "another pod was restarted");
    let exits = node.until("the event", |node| {
        Ok(Some(node.events("victim", "ContainerDied")).filter(|events| !events.is_empty()))
    })?;
    // An exit that came before the agent watched the process is detected without its code, which the runtime then reports.
    let code = &exits[0]["exit_code"];
    ensure!(exits.len() == 1 && (*code == 137 || code.is_null()), "{exits:?}");
    let recorded = node.until("the runtime's exit code", |node| {
        let sandboxes = node.sandboxes("victim")?;
        let first = sandboxes.into_iter().flat_map(|pod| pod.containers).find(|container| container.id == victim.id);
        Ok(first.filter(|container| container.state == "exited"))
    })?;
    ensure!(recorded.exit_code == 137, "{recorded:?}");
    let (code, sensors) = node.health("/healthz?verbose").unwrap_or_default();
    ensure!(code == 200, "{sensors}");
    // Logged once, not repeatedly.
    let warnings = node
        .log()
        .into_iter()
        .filter(|line| line["level"] == "WARN" && line["msg"].as_str().is_some_and(|text| text.contains("probes")));
    ensure!(warnings.count() <= 1, "logged more than once");
    node.stop()?;
    Ok(sensors)
}

/// A sensor's line in the health report.
fn line<'a>(report: &'a str, sensor: &str) -> &'a str {
    report.lines().find(|line| line.contains(&format!("sensor {sensor} "))).unwrap_or_default()
}

/// The probes are down for a reason that contains this text; sensors that need no probes are up.
fn ensure_without_probes(report: &str, reason: &str) -> Result<()> {
    let exits = line(report, "exits");
    ensure!(exits.starts_with("sensor exits down: ") && exits.contains(reason), "{report}");
    ensure!(line(report, "runtime-events").starts_with("sensor runtime-events up"), "{report}");
    Ok(())
}

#[test]
#[ignore = "real runtime"]
fn exits_are_handled_without_bpf_capability() -> Result<()> {
    // CAP_SYS_ADMIN would permit it as well.
    let report = exits_are_handled_under(&["setpriv", "--bounding-set", "-bpf,-perfmon,-sys_admin"])?;
    ensure_without_probes(&report, "CAP_BPF")?;
    ensure!(line(&report, "pidfd").starts_with("sensor pidfd up"), "{report}");
    Ok(())
}

#[test]
#[ignore = "real runtime"]
fn exits_are_handled_without_capabilities() -> Result<()> {
    let report = exits_are_handled_under(&["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"])?;
    ensure_without_probes(&report, "CAP_BPF")
}

#[test]
#[ignore = "real runtime"]
fn exits_are_handled_without_btf() -> Result<()> {
    let hide = "mount -t tmpfs none /sys/kernel/btf && exec \"$@\"";
    let report = exits_are_handled_under(&["unshare", "--mount", "sh", "-c", hide, "sh"])?;
    ensure_without_probes(&report, "/sys/kernel/btf/vmlinux")
}

#[test]
#[ignore = "real runtime"]
fn host_pid_container_restarts_only_after_the_runtime_event() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    // The first process runs long enough to be watched, and then leaves a child.
    let mut pod = node.pod("orphan", &[]);
    pod["spec"]["hostPID"] = true.into();
    let main = &mut pod["spec"]["containers"][0];
    main["image"] = BUSYBOX_IMAGE.into();
    main["command"] = json!(["/bin/sh", "-c", "sleep 36000 & sleep 3"]);
    node.layout.write_manifest("orphan", &pod)?;
    node.start()?;
    // The pidfd sensor is up, so the delay is not for lack of a sensor.
    node.until_true("pidfds at work", |node| {
        let (_, report) = node.health("/healthz?verbose").unwrap_or_default();
        Ok(line(&report, "pidfd").starts_with("sensor pidfd up"))
    })?;

    let sandboxes = node.until("a second instance", |node| {
        let sandboxes = node.sandboxes("orphan")?;
        let second = sandboxes.iter().flat_map(|pod| &pod.containers).any(|c| c.attempt == 1 && c.started_at > 0);
        Ok(second.then_some(sandboxes))
    })?;
    ensure!(sandboxes.len() == 1, "{sandboxes:?}");
    let instance = |attempt| sandboxes[0].containers.iter().find(|container| container.attempt == attempt);
    let (Some(first), Some(second)) = (instance(0), instance(1)) else { anyhow::bail!("{sandboxes:?}") };
    ensure!(first.state == "exited" && first.exit_code == 0, "{first:?}");
    // No early restart: neither before the runtime has recorded the exit, nor while a process of the first instance
    // runs.
    ensure!(second.started_at > first.finished_at, "{first:?} {second:?}");
    ensure!(processes_of(&first.id).is_empty(), "a child of the first instance still runs");
    let exits = node.events("orphan", "ContainerDied");
    ensure!(!exits.is_empty() && exits.iter().all(|event| event["source"] == "runtime"), "{exits:?}");
    node.stop()
}
