//! Static pod files on a real runtime: replaced, removed, and what must be left of a pod then.

use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_tests::agent::Scene;
use keblet_tests::agent::processes_with;
use keblet_tests::agent::running;
use serde_json::Value;

/// Folders below `root` (the node's cgroups, for one) whose name contains `part`.
fn folders(root: &Path, part: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(root) else { return Vec::new() };
    let inner = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir() && !path.is_symlink());
    inner
        .flat_map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let below = folders(&path, part);
            name.contains(part).then_some(path).into_iter().chain(below)
        })
        .collect()
}

/// Everything of the pod with this uid: log folder, pod folder, cgroups.
fn traces(scene: &Scene, uid: &str) -> Vec<PathBuf> {
    let cgroup = scene.containerd.ready().cgroup_root.trim_start_matches('/').to_owned();
    let hierarchies = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
    let cgroups =
        hierarchies.map(|hierarchy| hierarchy.join(&cgroup)).chain([Path::new("/sys/fs/cgroup").join(&cgroup)]);
    let roots = cgroups.chain([scene.node.pod_logs.clone(), scene.node.root.join("pods")]);
    roots.flat_map(|root| folders(&root, uid)).collect()
}

fn uid(scene: &mut Scene, name: &str) -> Result<String> {
    let log =
        fs::read_dir(&scene.node.pod_logs)?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let found = log.filter(|folder| folder.contains(name)).last().context("the pod has no log folder")?;
    Ok(found.rsplit('_').next().unwrap_or_default().to_owned())
}

#[test]
#[ignore = "real runtime"]
fn replaced_static_pod_terminates_before_its_successor_starts() -> Result<()> {
    let mut scene = Scene::new()?;
    scene.put_runner("web")?;
    scene.put_runner("other")?;
    scene.start()?;
    let old = scene.until_running("web")?;
    let other = scene.until_running("other")?;

    // The same name and stamp file; another command, so another pod.
    let stamp = scene.stamp("web");
    scene.put("web", &["exit", "--after-ms", "3600000", "--stamp", &stamp])?;
    let new = scene.until("the new pod", |scene| {
        let alive = running(&scene.sandboxes("web")?);
        ensure!(alive.len() <= 1, "old and new pod run at once: {alive:?}");
        Ok(alive.into_iter().find(|container| container.id != old.id))
    })?;
    scene.until_true("the new pod's stamp", |scene| Ok(scene.starts("web") == 2))?;
    let stamps = scene.stamped("web");
    let words: Vec<&str> = stamps.iter().map(|(word, _)| word.as_str()).collect();
    ensure!(words == ["start", "exit", "start"], "{words:?}");
    ensure!(stamps[1].1 < stamps[2].1, "the old pod ended at {} and the new one began at {}", stamps[1].1, stamps[2].1);
    ensure!(new.attempt == 0 && new.name == "main", "the new pod starts counting at zero: {new:?}");
    scene.until_true("the old sandbox removed", |scene| Ok(scene.sandboxes("web")?.len() == 1))?;
    ensure!(scene.running("other")? == Some(other), "another pod was touched");
    scene.finish()
}

#[test]
#[ignore = "real runtime"]
fn removed_static_pod_is_cleaned_up() -> Result<()> {
    let mut scene = Scene::new()?;
    scene.put_runner("gone")?;
    scene.put_runner("stays")?;
    scene.start()?;
    scene.until_running("gone")?;
    let stays = scene.until_running("stays")?;
    let (gone_uid, stays_uid) = (uid(&mut scene, "gone")?, uid(&mut scene, "stays")?);
    for uid in [&gone_uid, &stays_uid] {
        let found = traces(&scene, uid);
        let below = |root: &Path| found.iter().any(|path| path.starts_with(root));
        ensure!(
            below(&scene.node.pod_logs) && below(&scene.node.root) && below(Path::new("/sys/fs/cgroup")),
            "{found:?}"
        );
    }

    scene.node.remove_manifest("gone")?;
    scene.until_true("no sandbox in the runtime", |scene| Ok(scene.sandboxes("gone")?.is_empty()))?;
    scene.until_true("no file and no cgroup", |scene| Ok(traces(scene, &gone_uid).is_empty()))?;
    scene.until_true("no pod in /pods", |scene| Ok(scene.status("gone") == Value::Null))?;
    ensure!(processes_with(&scene.stamp("gone")).is_empty(), "its process lives");
    let words: Vec<String> = scene.stamped("gone").into_iter().map(|(word, _)| word).collect();
    ensure!(words == ["start", "exit"], "it was not asked to end: {words:?}");
    ensure!(scene.running("stays")? == Some(stays), "another pod was touched");
    ensure!(!traces(&scene, &stays_uid).is_empty(), "another pod's files were touched");
    scene.finish()
}
