//! What a node still has of pods, as the runtime and the kernel show it.

use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

use super::ClusterNode;
use super::TIMEOUT;
use super::node::POLL;

const CGROUP_MOUNT: &str = "/sys/fs/cgroup";

impl ClusterNode {
    /// Waits until the node has no pod, container, cgroup, mount, folder or log of a pod.
    ///
    /// # Errors
    /// It has one at the deadline; the error lists all.
    pub async fn until_nothing_remains(&self) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let remains = self.remains()?;
            if remains.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("{} still has:\n{}\n{}", self.name(), remains.join("\n"), self.log_excerpt());
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Pods, and what belongs to them; a line each.
    fn remains(&self) -> Result<Vec<String>> {
        let pods = self.pods()?.into_iter();
        let mut found: Vec<String> =
            pods.map(|pod| format!("pod {} with {} containers", pod.name, pod.containers.len())).collect();
        found.extend(pod_mounts(&self.folder()?, &self.node.root)?.into_iter().map(|line| format!("mount {line}")));
        found.extend(pod_cgroups(&self.cgroup_root()?).iter().map(|path| format!("cgroup {}", path.display())));
        for folder in [self.node.root.join("pods"), self.node.pod_logs.clone()] {
            let entries = fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
            found.extend(entries.flatten().map(|entry| format!("folder {}", entry.path().display())));
        }
        Ok(found)
    }
}

/// Lines of the mount table below a folder: the volumes of pods, and the file systems of containers. The agent's root
/// directory is a mount itself, which stays.
fn pod_mounts(folder: &Path, root: &Path) -> Result<Vec<String>> {
    let table = fs::read_to_string("/proc/self/mountinfo").context("cannot read the mount table")?;
    let is_of_pod = |point: &str| Path::new(point).starts_with(folder) && Path::new(point) != root;
    let lines = table.lines().filter(|line| line.split(' ').nth(4).is_some_and(is_of_pod));
    Ok(lines.map(str::to_owned).collect())
}

/// Cgroups of pods below `root`, in every hierarchy.
fn pod_cgroups(root: &str) -> Vec<PathBuf> {
    let mount = Path::new(CGROUP_MOUNT);
    let hierarchies = fs::read_dir(mount).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found = Vec::new();
    for hierarchy in hierarchies.chain([mount.to_owned()]) {
        collect(&hierarchy.join(root.trim_start_matches('/')), &mut found);
    }
    found
}

fn collect(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        // Each class has a folder in `kubepods`, each pod one in that of its class.
        match name.starts_with("pod") {
            true => found.push(entry.path()),
            false => collect(&entry.path(), found),
        }
    }
}
