//! The runtime or the agent is killed with SIGKILL under running and starting pods: what died is started again, what
//! lives is left alone. The witnesses are the runtime, the containers' stamps and `/proc`.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use anyhow::Result;
use anyhow::ensure;
use keblet_peers::ContainerView;
use keblet_peers::PodView;
use keblet_tests::agent::NODE;
use keblet_tests::agent::Scene;
use keblet_tests::agent::kill;
use keblet_tests::agent::processes_with;
use keblet_tests::agent::running;

const PODS: usize = 20;

fn names() -> Vec<String> {
    (0..PODS).map(|n| format!("pod-{n:02}")).collect()
}

/// All sandboxes by the name of their pod's file.
fn sandboxes(scene: &mut Scene) -> Result<BTreeMap<String, Vec<PodView>>> {
    let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let suffix = format!("-{NODE}");
    for pod in scene.containerd.pods()? {
        all.entry(pod.name.strip_suffix(&suffix).unwrap_or(&pod.name).to_owned()).or_default().push(pod);
    }
    Ok(all)
}

/// Waits until every pod has begun and has a running container.
fn all_running(scene: &mut Scene) -> Result<BTreeMap<String, ContainerView>> {
    scene.until("all pods running", |scene| {
        let all = sandboxes(scene)?;
        let alive = |name: &String| running(all.get(name)?).into_iter().find(|_| scene.has_begun(name));
        Ok(names().into_iter().map(|name| alive(&name).map(|container| (name, container))).collect())
    })
}

fn count_running(scene: &mut Scene) -> Result<usize> {
    Ok(running(&scene.containerd.pods()?).len())
}

/// Of no pod two containers run at once, by the runtime's word and by the process table; and no container was ever
/// asked to end, which it would have stamped.
fn ensure_single(scene: &mut Scene) -> Result<()> {
    for (name, pods) in sandboxes(scene)? {
        let alive = running(&pods);
        ensure!(alive.len() <= 1, "{name} runs twice: {alive:?}");
        let processes = processes_with(&scene.stamp(&name));
        ensure!(processes.len() <= 1, "{name} has processes {processes:?}");
        let stamps = scene.stamped(&name);
        ensure!(stamps.iter().all(|(word, _)| word == "start"), "{name} was told to end: {stamps:?}");
    }
    Ok(())
}

#[test]
#[ignore = "real runtime"]
fn killed_runtime_restarts_only_exited_containers() -> Result<()> {
    let mut scene = Scene::new()?;
    for name in names() {
        scene.put_runner(&name)?;
    }
    scene.start()?;
    let before = all_running(&mut scene)?;

    // Some die in the same moment as the runtime, some while it is away, one when it is back.
    let victims: Vec<String> = names().into_iter().step_by(3).collect();
    let (at_once, later) = victims.split_at(2);
    let (away, back) = later.split_at(later.len() - 1);
    at_once.iter().try_for_each(|name| kill(&before[name]))?;
    scene.containerd.kill()?;
    away.iter().try_for_each(|name| kill(&before[name]))?;
    // The agent has to notice that the runtime is gone, not to be spared it.
    scene.until_true("the agent is not ready", |scene| {
        Ok(scene.health("/readyz").is_some_and(|(code, _)| code == 500))
    })?;
    scene.containerd.restart()?;
    back.iter().try_for_each(|name| kill(&before[name]))?;

    scene.until_true("the dead are restarted", |scene| {
        let all = sandboxes(scene)?;
        let new = |name: &String| running(&all[name]).iter().any(|container| container.id != before[name].id);
        Ok(victims.iter().all(new))
    })?;
    scene.until_true("the agent is ready again", |scene| {
        Ok(scene.health("/readyz").is_some_and(|(code, _)| code == 200))
    })?;
    let after = all_running(&mut scene)?;
    let all = sandboxes(&mut scene)?;
    for (name, container) in after {
        let died = victims.contains(&name);
        ensure!((container.id != before[&name].id) == died, "{name}: died {died}, {container:?}");
        ensure!(container.attempt == u32::from(died), "{name}: {container:?}");
        scene.until_true("its program begun", |scene| Ok(scene.starts(&name) > usize::from(died)))?;
        ensure!(scene.starts(&name) == 1 + usize::from(died), "{name}: {:?}", scene.stamped(&name));
        ensure!(all[&name].len() == 1, "{name} has another sandbox: {:?}", all[&name]);
        let seen = scene.events(&name, "ContainerDied");
        ensure!(seen.len() == usize::from(died), "{name}: {seen:?}");
    }
    ensure_single(&mut scene)?;
    scene.finish()
}

#[test]
#[ignore = "real runtime"]
fn killed_agent_starts_no_duplicate_containers() -> Result<()> {
    let mut scene = Scene::new()?;
    for name in names() {
        scene.put_runner(&name)?;
    }
    // Killed as soon as so many sandboxes or containers are there: before the first container, amid them, near the end.
    let mut lived = BTreeSet::new();
    for (pods, containers) in [(1, 0), (3, 1), (6, 5), (PODS, 12)] {
        scene.start()?;
        scene.until_true(&format!("{pods} sandboxes, {containers} containers"), |scene| {
            Ok(scene.containerd.pods()?.len() >= pods && count_running(scene)? >= containers)
        })?;
        scene.kill_agent()?;
        ensure_single(&mut scene)?;
        lived.extend(running(&scene.containerd.pods()?).into_iter().map(|container| container.id));
    }
    // Two die while no agent looks.
    let victims: Vec<ContainerView> = running(&scene.containerd.pods()?).into_iter().take(2).collect();
    victims.iter().try_for_each(kill)?;
    let dead: BTreeSet<&str> = victims.iter().map(|container| container.id.as_str()).collect();
    scene.until_true("the runtime has noticed", |scene| {
        Ok(running(&scene.containerd.pods()?).iter().all(|container| !dead.contains(container.id.as_str())))
    })?;

    scene.start()?;
    let before = all_running(&mut scene)?;
    let all = sandboxes(&mut scene)?;
    for (name, alive) in &before {
        let pods = &all[name];
        ensure!(pods.iter().filter(|sandbox| sandbox.ready).count() == 1, "{name}: {pods:?}");
        // A start that was cut off may have left dead instances, of which not all are kept; all of them are counted.
        let ended = pods.iter().flat_map(|pod| &pod.containers).filter(|container| container.state == "exited").count();
        let earlier = ended.max(alive.attempt as usize);
        ensure!(scene.starts(name) <= 1 + earlier, "{name} started {:?}: {pods:?}", scene.stamped(name));
        ensure!(processes_with(&scene.stamp(name)) == [alive.pid.unwrap_or_default()], "{name}: {alive:?}");
    }
    let alive: BTreeSet<&str> = before.values().map(|container| container.id.as_str()).collect();
    let replaced: BTreeSet<&str> = lived.iter().map(String::as_str).filter(|id| !alive.contains(id)).collect();
    ensure!(replaced == dead, "{replaced:?} are no more, but {dead:?} died");

    // One more end and start with everything running changes nothing at all.
    scene.kill_agent()?;
    scene.start()?;
    scene.put_runner("last")?;
    scene.until_running("last")?;
    let after = all_running(&mut scene)?;
    ensure!(before == after, "{before:?}\n{after:?}");
    ensure_single(&mut scene)?;
    scene.finish()
}
