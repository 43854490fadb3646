//! The runtime or the agent is killed with SIGKILL under running and starting pods: exited containers are restarted,
//! running ones are not. Checked by the runtime, the containers' timestamps and `/proc`.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::Agent;
use keblet_peers::ContainerView;
use keblet_peers::PodView;
use keblet_tests::standalone::NODE;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::kill;
use keblet_tests::standalone::processes_with;
use keblet_tests::standalone::program;
use keblet_tests::standalone::running;

const PODS: usize = 20;

fn names() -> Vec<String> {
    (0..PODS).map(|n| format!("pod-{n:02}")).collect()
}

/// All sandboxes by the name of their pod's file.
fn sandboxes(node: &mut StandaloneNode) -> Result<BTreeMap<String, Vec<PodView>>> {
    let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let suffix = format!("-{NODE}");
    for pod in node.containerd.pods()? {
        all.entry(pod.name.strip_suffix(&suffix).unwrap_or(&pod.name).to_owned()).or_default().push(pod);
    }
    Ok(all)
}

/// Waits until every pod's program has started and its container runs.
fn all_running(node: &mut StandaloneNode) -> Result<BTreeMap<String, ContainerView>> {
    node.until("all pods running", |node| {
        let all = sandboxes(node)?;
        let alive = |name: &String| running(all.get(name)?).into_iter().find(|_| node.has_started(name));
        Ok(names().into_iter().map(|name| alive(&name).map(|container| (name, container))).collect())
    })
}

fn count_running(node: &mut StandaloneNode) -> Result<usize> {
    Ok(running(&node.containerd.pods()?).len())
}

/// No pod has two running containers, according to the runtime and to the process table; and no container received
/// SIGTERM, which it would have written to its timestamps.
fn ensure_single(node: &mut StandaloneNode) -> Result<()> {
    for (name, pods) in sandboxes(node)? {
        let alive = running(&pods);
        ensure!(alive.len() <= 1, "{name} has two running containers: {alive:?}");
        let processes = processes_with(&node.stamp(&name));
        ensure!(processes.len() <= 1, "{name} has processes {processes:?}");
        let stamps = node.stamps_of(&name);
        ensure!(stamps.iter().all(|(kind, _)| kind == "start"), "{name} received SIGTERM: {stamps:?}");
    }
    Ok(())
}

/// The gauges have the number of running containers, whatever events and relists there were before.
fn ensure_gauges(node: &StandaloneNode, running: usize) -> Result<()> {
    let metrics = node.metrics().context("no /metrics")?;
    for expected in [
        format!("kubelet_running_pods {running}"),
        format!("kubelet_running_containers{{container_state=\"running\"}} {running}"),
    ] {
        ensure!(metrics.lines().any(|line| line == expected), "{expected} is missing:\n{metrics}");
    }
    Ok(())
}

#[test]
#[ignore = "real runtime"]
fn killed_runtime_restarts_only_exited_containers() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    for name in names() {
        node.write_running_pod(&name)?;
    }
    node.start()?;
    let before = all_running(&mut node)?;

    // Some are killed together with the runtime, some while it is down, one when it is up again.
    let victims: Vec<String> = names().into_iter().step_by(3).collect();
    let (at_once, later) = victims.split_at(2);
    let (while_down, afterwards) = later.split_at(later.len() - 1);
    at_once.iter().try_for_each(|name| kill(&before[name]))?;
    node.containerd.kill()?;
    while_down.iter().try_for_each(|name| kill(&before[name]))?;
    // The agent must have noticed that the runtime is down.
    node.until_true("the agent is not ready", |node| Ok(node.health("/readyz").is_some_and(|(code, _)| code == 500)))?;
    node.containerd.restart()?;
    afterwards.iter().try_for_each(|name| kill(&before[name]))?;

    node.until_true("killed containers are restarted", |node| {
        let all = sandboxes(node)?;
        let new = |name: &String| running(&all[name]).iter().any(|container| container.id != before[name].id);
        Ok(victims.iter().all(new))
    })?;
    node.until_true("the agent is ready again", |node| {
        Ok(node.health("/readyz").is_some_and(|(code, _)| code == 200))
    })?;
    let after = all_running(&mut node)?;
    let all = sandboxes(&mut node)?;
    for (name, container) in after {
        let killed = victims.contains(&name);
        ensure!((container.id != before[&name].id) == killed, "{name}: killed {killed}, {container:?}");
        ensure!(container.attempt == u32::from(killed), "{name}: {container:?}");
        node.until_true("its program started", |node| Ok(node.starts(&name) > usize::from(killed)))?;
        ensure!(node.starts(&name) == 1 + usize::from(killed), "{name}: {:?}", node.stamps_of(&name));
        ensure!(all[&name].len() == 1, "{name} has another sandbox: {:?}", all[&name]);
        let events = node.events(&name, "ContainerDied");
        ensure!(events.len() == usize::from(killed), "{name}: {events:?}");
    }
    ensure_single(&mut node)?;
    ensure_gauges(&node, PODS)?;
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn killed_agent_starts_no_duplicate_containers() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    for name in names() {
        node.write_running_pod(&name)?;
    }
    // Killed when so many sandboxes or containers exist: before the first container, in between, near the end.
    let mut observed = BTreeSet::new();
    for (pods, containers) in [(1, 0), (3, 1), (6, 5), (PODS, 12)] {
        node.start()?;
        node.until_true(&format!("{pods} sandboxes, {containers} containers"), |node| {
            Ok(node.containerd.pods()?.len() >= pods && count_running(node)? >= containers)
        })?;
        node.kill_agent()?;
        ensure_single(&mut node)?;
        observed.extend(running(&node.containerd.pods()?).into_iter().map(|container| container.id));
    }
    // Two are killed while no agent runs.
    let victims: Vec<ContainerView> = running(&node.containerd.pods()?).into_iter().take(2).collect();
    victims.iter().try_for_each(kill)?;
    let killed: BTreeSet<&str> = victims.iter().map(|container| container.id.as_str()).collect();
    node.until_true("the runtime has noticed", |node| {
        Ok(running(&node.containerd.pods()?).iter().all(|container| !killed.contains(container.id.as_str())))
    })?;

    node.start()?;
    let before = all_running(&mut node)?;
    let all = sandboxes(&mut node)?;
    for (name, alive) in &before {
        let pods = &all[name];
        ensure!(pods.iter().filter(|sandbox| sandbox.ready).count() == 1, "{name}: {pods:?}");
        // An interrupted start may have left exited instances, of which not all are kept; all of them are counted.
        let ended = pods.iter().flat_map(|pod| &pod.containers).filter(|container| container.state == "exited").count();
        let earlier = ended.max(alive.attempt as usize);
        ensure!(node.starts(name) <= 1 + earlier, "{name} started {:?}: {pods:?}", node.stamps_of(name));
        ensure!(processes_with(&node.stamp(name)) == [alive.pid.unwrap_or_default()], "{name}: {alive:?}");
    }
    let alive: BTreeSet<&str> = before.values().map(|container| container.id.as_str()).collect();
    let replaced: BTreeSet<&str> = observed.iter().map(String::as_str).filter(|id| !alive.contains(id)).collect();
    ensure!(replaced == killed, "{replaced:?} were replaced, but {killed:?} were killed");

    // One more restart with everything running changes nothing.
    node.kill_agent()?;
    node.start()?;
    node.write_running_pod("last")?;
    node.until_running("last")?;
    let after = all_running(&mut node)?;
    ensure!(before == after, "{before:?}\n{after:?}");
    ensure_single(&mut node)?;
    node.stop()
}

/// It is started by mistake, without the static pods of the first one, which are not desired by it.
#[test]
#[ignore = "real runtime"]
fn a_second_agent_ends_and_touches_no_pod() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.write_running_pod("only")?;
    node.start()?;
    let before = node.until_running("only")?;
    let manifests = node.stamps.join("no-manifests");
    fs::create_dir(&manifests).with_context(|| format!("cannot create {}", manifests.display()))?;
    let mut command = Command::new(program()?);
    command.args(["run", "--hostname-override", NODE]).arg("--config").arg(&node.layout.config);
    command.arg("--pod-manifest-path").arg(&manifests).arg("--root-dir").arg(&node.layout.root);
    command.arg("--cert-dir").arg(node.layout.root.join("pki"));
    let mut second = Agent::start(&mut command, &node.layout, &mut node.containerd)?;
    let status = node.until("the end of the second agent", |_| second.ended())?;
    ensure!(!status.success(), "it ended with {status}, without its port");
    let after = node.until_running("only")?;
    ensure!(after.id == before.id, "the container was replaced: {before:?} {after:?}");
    ensure_single(&mut node)?;
    node.stop()
}
