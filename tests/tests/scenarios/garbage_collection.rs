//! Garbage collection on a real runtime: replaced container instances with their logs, by the limits of container and node;
//! replaced sandboxes, and log folders of unknown pods. Checked in the runtime and in the folders.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::ContainerView;
use keblet_tests::standalone::NODE;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::kill;
use keblet_tests::standalone::processes_of;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::json;

const NAME: &str = "web";

/// Attempts of a pod's container by their state, oldest first, over all sandboxes.
fn instances(node: &mut StandaloneNode, pod: &str, state: &str) -> Result<Vec<u32>> {
    let pods = node.sandboxes(pod)?;
    let containers = pods.iter().flat_map(|pod| &pod.containers).filter(|container| container.state == state);
    let mut attempts: Vec<u32> = containers.map(|container| container.attempt).collect();
    attempts.sort_unstable();
    Ok(attempts)
}

/// Names of the log files of a pod's container.
fn logs(node: &StandaloneNode, pod: &str) -> Result<Vec<String>> {
    let prefix = format!("default_{pod}-{NODE}_");
    let folders = fs::read_dir(&node.layout.pod_logs)?.flatten();
    let folder = folders
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)));
    let folder = folder.context("the pod has no log folder")?.join("main");
    let mut names: Vec<_> =
        fs::read_dir(folder)?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// Waits until the last instance runs, the one before it has exited and older ones are removed.
fn until_collected(node: &mut StandaloneNode, last: u32) -> Result<ContainerView> {
    node.until_true(&format!("instance {last} runs, and one exited instance is left"), |node| {
        Ok(instances(node, NAME, "running")? == [last] && instances(node, NAME, "exited")? == [last - 1])
    })?;
    let names = logs(node, NAME)?;
    ensure!(names == [format!("{}.log", last - 1), format!("{last}.log")], "{names:?}");
    node.until_running(NAME)
}

fn ids(node: &mut StandaloneNode) -> Result<Vec<String>> {
    Ok(node.sandboxes(NAME)?.into_iter().map(|pod| pod.id).collect())
}

#[test]
#[ignore = "real runtime"]
fn only_the_last_exited_instance_is_kept() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let folder = |name: &str| node.layout.pod_logs.join(name);
    let (orphaned, foreign) = (folder("default_gone_0123456789abcdef"), folder("not-of-a-pod"));
    fs::create_dir_all(orphaned.join("main"))?;
    fs::write(orphaned.join("main/0.log"), "old log\n")?;
    fs::create_dir_all(&foreign)?;
    node.write_running_pod(NAME)?;
    node.start()?;
    let first = node.until_running(NAME)?;
    node.until_true("logs of an unknown pod are removed", |_| Ok(!orphaned.exists()))?;
    ensure!(foreign.exists(), "a folder without a pod's name was removed");

    kill(&first)?;
    let second = until_collected(&mut node, 1)?;

    // The sandbox exits with its containers: older instances are removed, and the sandbox is kept for the last one in
    // it.
    let old = ids(&mut node)?;
    ensure!(old.len() == 1, "{old:?}");
    processes_of(&old[0])
        .into_iter()
        .try_for_each(|pid| nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL))?;
    node.until_true("an instance in another sandbox", |node| {
        Ok(node.running(NAME)?.is_some_and(|now| now.id != second.id) && node.sandboxes(NAME)?.len() == 2)
    })?;
    let third = until_collected(&mut node, 2)?;
    kill(&third)?;
    until_collected(&mut node, 3)?;
    node.until_true("the old sandbox is removed", |node| Ok(node.sandboxes(NAME)?.len() == 1))?;
    let now = ids(&mut node)?;
    ensure!(now != old, "{now:?}");
    ensure!(Path::new(&node.layout.pod_logs).join("not-of-a-pod").exists());
    node.stop()
}

/// Kills the container of a pod so many times, each time when it runs.
fn crash(node: &mut StandaloneNode, pod: &str, times: usize) -> Result<()> {
    let mut current = node.until_running(pod)?;
    for _ in 0..times {
        kill(&current)?;
        let replaces = |next: &ContainerView| next.attempt > current.attempt;
        current = node.until("the next instance", |node| Ok(node.running(pod)?.filter(replaces)))?;
    }
    Ok(())
}

#[test]
#[ignore = "real runtime"]
fn dead_containers_are_limited_by_container_and_by_node() -> Result<()> {
    let mut node = StandaloneNode::with(json!({ "crashLoopBackOff": { "maxContainerRestartPeriod": "1s" } }))?;
    node.flags.push("--maximum-dead-containers-per-container=2".to_owned());
    for pod in ["db", NAME] {
        node.write_running_pod(pod)?;
    }
    node.start()?;
    // The dead instance of the first one is the oldest of all.
    crash(&mut node, "db", 1)?;
    crash(&mut node, NAME, 4)?;
    node.until_true("two dead instances are left", |node| {
        Ok(instances(node, NAME, "exited")? == [2, 3] && instances(node, "db", "exited")? == [0])
    })?;
    let names = logs(&node, NAME)?;
    ensure!(names == ["2.log", "3.log", "4.log"], "{names:?}");
    let before = [node.until_running("db")?.id, node.until_running(NAME)?.id];

    // Two of all pods: one of each container. What an earlier agent has left counts.
    node.kill_agent()?;
    node.flags.push("--maximum-dead-containers=2".to_owned());
    node.start()?;
    node.until_true("one dead instance of each container is left", |node| {
        Ok(instances(node, NAME, "exited")? == [3] && instances(node, "db", "exited")? == [0])
    })?;
    let names = [logs(&node, "db")?, logs(&node, NAME)?];
    ensure!(names == [["0.log", "1.log"], ["3.log", "4.log"]], "{names:?}");
    let now = [node.until_running("db")?.id, node.until_running(NAME)?.id];
    ensure!(now == before, "a running container was replaced");
    node.stop()
}
