//! Static pod files on a real runtime: replaced, removed, and what remains of a pod then.

use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::processes_with;
use keblet_tests::standalone::running;
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

/// All folders of the pod with this UID: log folder, pod folder, cgroups.
fn traces(node: &StandaloneNode, uid: &str) -> Vec<PathBuf> {
    let cgroup = node.containerd.ready().cgroup_root.trim_start_matches('/').to_owned();
    let hierarchies = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten().map(|entry| entry.path());
    let cgroups =
        hierarchies.map(|hierarchy| hierarchy.join(&cgroup)).chain([Path::new("/sys/fs/cgroup").join(&cgroup)]);
    let roots = cgroups.chain([node.layout.pod_logs.clone(), node.layout.root.join("pods")]);
    roots.flat_map(|root| folders(&root, uid)).collect()
}

fn uid(node: &mut StandaloneNode, name: &str) -> Result<String> {
    let log =
        fs::read_dir(&node.layout.pod_logs)?.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let found = log.filter(|folder| folder.contains(name)).last().context("the pod has no log folder")?;
    Ok(found.rsplit('_').next().unwrap_or_default().to_owned())
}

#[test]
#[ignore = "real runtime"]
fn replaced_static_pod_terminates_before_its_successor_starts() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.write_running_pod("web")?;
    node.write_running_pod("other")?;
    node.start()?;
    let old = node.until_running("web")?;
    let other = node.until_running("other")?;

    // The same name and stamp file; another command, so another pod.
    let stamp = node.stamp("web");
    node.write_pod("web", &["exit", "--after-ms", "3600000", "--stamp", &stamp])?;
    let new = node.until("the new pod", |node| {
        let alive = running(&node.sandboxes("web")?);
        ensure!(alive.len() <= 1, "old and new pod run at the same time: {alive:?}");
        Ok(alive.into_iter().find(|container| container.id != old.id))
    })?;
    node.until_true("the new pod's stamp", |node| Ok(node.starts("web") == 2))?;
    let stamps = node.stamps_of("web");
    let kinds: Vec<&str> = stamps.iter().map(|(kind, _)| kind.as_str()).collect();
    ensure!(kinds == ["start", "exit", "start"], "{kinds:?}");
    ensure!(
        stamps[1].1 < stamps[2].1,
        "the old pod exited at {} and the new one started at {}",
        stamps[1].1,
        stamps[2].1
    );
    ensure!(new.attempt == 0 && new.name == "main", "the first attempt of the new pod is 0: {new:?}");
    node.until_true("the old sandbox removed", |node| Ok(node.sandboxes("web")?.len() == 1))?;
    ensure!(node.running("other")? == Some(other), "another pod was restarted");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn removed_static_pod_is_cleaned_up() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.write_running_pod("removed")?;
    node.write_running_pod("stays")?;
    node.start()?;
    node.until_running("removed")?;
    let stays = node.until_running("stays")?;
    let (removed_uid, stays_uid) = (uid(&mut node, "removed")?, uid(&mut node, "stays")?);
    for uid in [&removed_uid, &stays_uid] {
        let found = traces(&node, uid);
        let below = |root: &Path| found.iter().any(|path| path.starts_with(root));
        ensure!(
            below(&node.layout.pod_logs) && below(&node.layout.root) && below(Path::new("/sys/fs/cgroup")),
            "{found:?}"
        );
    }

    node.layout.remove_manifest("removed")?;
    node.until_true("no sandbox in the runtime", |node| Ok(node.sandboxes("removed")?.is_empty()))?;
    node.until_true("no file and no cgroup", |node| Ok(traces(node, &removed_uid).is_empty()))?;
    node.until_true("no pod in /pods", |node| Ok(node.status("removed") == Value::Null))?;
    ensure!(processes_with(&node.stamp("removed")).is_empty(), "its process still runs");
    let kinds: Vec<String> = node.stamps_of("removed").into_iter().map(|(kind, _)| kind).collect();
    ensure!(kinds == ["start", "exit"], "it was not terminated gracefully: {kinds:?}");
    ensure!(node.running("stays")? == Some(stays), "another pod was restarted");
    ensure!(!traces(&node, &stays_uid).is_empty(), "files of another pod were removed");
    node.stop()
}
