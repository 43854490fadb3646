//! The agent as a service: real systemd, logind and bus, with the deployed unit. Readiness, watchdog, slices, and
//! shutdown of the machine.

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_tests::machine::Machine;
use keblet_tests::standalone::StandaloneNode;
use serde_json::json;

const PROGRAM: &str = env!("CARGO_BIN_EXE_private-systemd");
const LOGIND: [&str; 3] = ["org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager"];

/// A unit's property.
fn property(machine: &Machine, unit: &str, name: &str) -> Result<String> {
    let output = machine.run(&["systemctl", "show", "--property", name, "--value", unit])?;
    Ok(output.trim().to_owned())
}

/// A property of the agent's service.
fn service(machine: &Machine, name: &str) -> Result<String> {
    property(machine, "keblet.service", name)
}

fn is_up(machine: &Machine) -> bool {
    // Before the bus is up, connections fail.
    service(machine, "ActiveState").is_ok_and(|state| state == "active")
}

fn power_off(machine: &Machine) -> Result<()> {
    machine.run(&[&["busctl", "call"], &LOGIND[..], &["PowerOff", "b", "false"]].concat()).map(drop)
}

/// Number of the agent's inhibitor locks, as logind lists them.
fn locks(machine: &Machine) -> Result<usize> {
    let output = machine.run(&["systemd-inhibit", "--list", "--no-legend", "--no-pager"])?;
    let fields = ["kubelet", "shutdown", "delay", "Kubelet needs time to handle node shutdown"];
    Ok(output.lines().filter(|line| fields.iter().all(|field| line.contains(field))).count())
}

fn until_up(node: &mut StandaloneNode, machine: &Machine) -> Result<()> {
    node.until_true("an active service that holds the lock", |_| {
        Ok(is_up(machine) && locks(machine).is_ok_and(|locks| locks == 1))
    })
}

#[test]
#[ignore = "real runtime"]
fn systemd_powers_off_after_pod_termination() -> Result<()> {
    let mut node = StandaloneNode::with(json!({
        // The machine's tree is cgroup v2 without controllers, the runtime's is the system's.
        "cgroupsPerQOS": false,
        "cgroupRoot": "",
        "singleProcessOOMKill": true,
        "shutdownGracePeriod": "40s",
        "shutdownGracePeriodCriticalPods": "20s",
    }))?;
    node.write_running_pod("web")?;
    let mut critical = node.pod("critical", &["run", "--stamp", &node.stamp("critical")]);
    critical["spec"]["priority"] = json!(2_000_001_000);
    node.layout.write_manifest("critical", &critical)?;
    let machine = Machine::start(&mut node, PROGRAM)?;
    until_up(&mut node, &machine)?;
    let running = [node.until_running("web")?, node.until_running("critical")?];
    ensure!(service(&machine, "WatchdogUSec")? == "30s", "the watchdog is not armed");
    let delay = machine.run(&[&["busctl", "get-property"], &LOGIND[..], &["InhibitDelayMaxUSec"]].concat())?;
    ensure!(delay.trim() == "t 40000000", "logind's maximal delay is {delay}");

    // A killed service is restarted at once, and changes no container.
    machine.run(&["systemctl", "kill", "--signal=KILL", "keblet.service"])?;
    node.until_true("a restart of the service", |_| {
        Ok(service(&machine, "NRestarts").is_ok_and(|restarts| restarts == "1"))
    })?;
    until_up(&mut node, &machine)?;
    ensure!(running == [node.until_running("web")?, node.until_running("critical")?], "a container was restarted");

    power_off(&machine)?;
    let off = node.until("the power-off", |_| Ok(machine.off_at()))?;
    let ended = |name: &str| -> Result<f64> {
        let stamps = node.stamps_of(name);
        let last = stamps.last().filter(|(word, _)| word == "exit").with_context(|| format!("{name}: {stamps:?}"))?;
        Ok(last.1 as f64 / 1e9)
    };
    let (web, critical) = (ended("web")?, ended("critical")?);
    // Uptime has a resolution of 10 ms.
    ensure!(web < critical && critical < off + 0.01, "{web} {critical} {off}");
    ensure!(off < web + 20.0, "the power-off was delayed without reason: {web} {off}");
    ensure!(node.starts("web") == 1 && node.starts("critical") == 1, "a container was restarted");
    ensure!(node.log_contains(&["Shutdown manager detected shutdown event"]), "the shutdown was not logged");
    node.until_ended()?;
    node.containerd.stop()
}

#[test]
#[ignore = "real runtime"]
fn systemd_slice_exists_per_pod() -> Result<()> {
    slice_exists_per_pod(&[])
}

#[test]
#[ignore = "real runtime"]
fn systemd_slice_exists_per_pod_without_a_bus() -> Result<()> {
    slice_exists_per_pod(&["/usr/bin/env", "DBUS_SYSTEM_BUS_ADDRESS=unix:path=/run/none"])
}

/// The agent is executed by `wrapper`.
fn slice_exists_per_pod(wrapper: &[&str]) -> Result<()> {
    let mut node = StandaloneNode::with(json!({
        "cgroupDriver": "systemd",
        "cgroupRoot": "",
        "singleProcessOOMKill": true,
        "podPidsLimit": 77,
    }))?;
    let machine = Machine::start_through(&mut node, PROGRAM, wrapper)?;
    node.until_true("an active service", |_| Ok(is_up(&machine)))?;
    for class in ["burstable", "besteffort"] {
        let slice = format!("kubepods-{class}.slice");
        ensure!(property(&machine, &slice, "Slice")? == "kubepods.slice", "{slice} is not in kubepods.slice");
        let least = |_: &mut StandaloneNode| Ok(property(&machine, &slice, "CPUWeight")? == "1");
        node.until_true("the weight of a class that requests nothing", least)?;
    }

    let mut pod = node.pod("web", &["run", "--stamp", &node.stamp("web")]);
    let limits = json!({ "cpu": "250m", "memory": "64Mi" });
    pod["spec"]["containers"][0]["resources"] = json!({ "limits": limits, "requests": limits });
    node.layout.write_manifest("web", &pod)?;
    node.until_running("web")?;
    let output = machine.run(&["systemctl", "list-units", "--plain", "--no-legend", "kubepods-pod*.slice"])?;
    let slice = output.split_whitespace().next().context("the pod has no slice")?;
    let values = [("Slice", "kubepods.slice"), ("CPUQuotaPerSecUSec", "250ms"), ("CPUWeight", "10")];
    for (name, value) in values.into_iter().chain([("MemoryMax", "67108864"), ("TasksMax", "77")]) {
        let is = property(&machine, slice, name)?;
        ensure!(is == value, "{name} of {slice} is {is} instead of {value}");
    }

    node.layout.remove_manifest("web")?;
    node.until_true("the slice removed", |_| Ok(property(&machine, slice, "ActiveState")? == "inactive"))?;
    let ready: Vec<_> = node.sandboxes("web")?.into_iter().filter(|sandbox| sandbox.ready).collect();
    ensure!(ready.is_empty(), "it was removed before the pod: {ready:?}");
    // Without a grace period the agent takes no inhibitor lock.
    ensure!(locks(&machine)? == 0, "an unexpected inhibitor lock");
    power_off(&machine)?;
    node.until_ended()?;
    node.containerd.stop()
}
