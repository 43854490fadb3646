//! What pods use of the resources that they are evicted for. Plain data, made from a sample and from the disks. Pure.

use std::collections::BTreeMap;
use std::collections::HashMap;

use super::extras::FsUsage;
use super::files::PodFiles;
use super::sample::PodSample;
use crate::model::ContainerId;
use crate::model::PodSnapshot;

/// What a pod with running containers uses. Values that were not measured are absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodUsage {
    /// The working set of all its containers, in bytes.
    pub memory: Option<u64>,
    /// Processes and threads.
    pub processes: Option<u64>,
    /// By container.
    pub containers: BTreeMap<String, ContainerUsage>,
    /// Files of the pod outside its volumes that belong to no container: in its log folder, and its hosts file.
    pub other: FsUsage,
    /// Volumes on the disk of the node.
    pub volumes: BTreeMap<String, FsUsage>,
}

/// What a running container uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContainerUsage {
    /// Working set in bytes.
    pub memory: Option<u64>,
    /// The writable layer.
    pub rootfs: Option<FsUsage>,
    /// The logs.
    pub logs: Option<FsUsage>,
}

impl PodUsage {
    /// From a sample; without disks.
    pub(super) fn of(sample: &PodSample) -> Self {
        let containers = sample.containers.iter().map(|container| {
            let memory = container.measured.usage.memory.map(|memory| memory.working_set);
            (container.name.clone(), ContainerUsage { memory, ..ContainerUsage::default() })
        });
        let containers: BTreeMap<String, ContainerUsage> = containers.collect();
        let own = sample.own.as_ref().map(|own| own.usage).unwrap_or_default();
        let together = sample.together().usage;
        Self {
            memory: own.memory.or(together.memory).map(|memory| memory.working_set),
            processes: own.tasks.or(together.tasks),
            containers,
            ..Self::default()
        }
    }

    /// With its files, and the writable layers of its containers by id.
    pub(super) fn with_disks(self, sample: &PodSample, files: &PodFiles, writable: &HashMap<String, FsUsage>) -> Self {
        let disks = |(name, usage): (String, ContainerUsage)| {
            let id = sample.containers.iter().find(|container| container.name == name).map(|found| &found.id);
            let usage = usage.with_disks(&name, id, files, writable);
            (name, usage)
        };
        Self { containers: self.containers.into_iter().map(disks).collect(), other: files.other, ..self }
    }

    /// Its files alone, and the writable layers of its containers by id.
    pub(super) fn of_files(snapshot: &PodSnapshot, files: &PodFiles, writable: &HashMap<String, FsUsage>) -> Self {
        let mut containers = BTreeMap::new();
        // The newest instance of each comes first.
        for container in snapshot.running() {
            let (name, id) = (&container.name, Some(&container.id));
            let disks = || ContainerUsage::default().with_disks(name, id, files, writable);
            containers.entry(name.clone()).or_insert_with(disks);
        }
        Self { containers, other: files.other, ..Self::default() }
    }
}

impl ContainerUsage {
    fn with_disks(
        self,
        name: &str,
        id: Option<&ContainerId>,
        files: &PodFiles,
        writable: &HashMap<String, FsUsage>,
    ) -> Self {
        let rootfs = id.and_then(|id| writable.get(id.as_str())).copied();
        let logs = Some(files.logs.get(name).copied().unwrap_or_default());
        Self { rootfs, logs, ..self }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::super::sample::ContainerSample;
    use super::super::sample::Measured;
    use super::super::sample::tests::sample;
    use super::*;

    #[tokio::test]
    async fn usage_of_a_sample_with_and_without_disks() {
        let mut sample = sample(Instant::now(), 0);
        let pod = &sample.pods[0];
        let usage = PodUsage::of(pod);
        assert_eq!((usage.memory, usage.processes, usage.containers["main"].memory), (Some(600), Some(3), Some(600)));
        assert_eq!((usage.containers["main"].rootfs, usage.containers["main"].logs), (None, None), "not measured");
        let some = |bytes| FsUsage { bytes, inodes: 1 };
        let files = PodFiles { logs: HashMap::new(), other: some(3) };
        let usage = usage.with_disks(pod, &files, &[("main-0".to_owned(), some(5))].into());
        let main = usage.containers["main"];
        assert_eq!((main.rootfs, main.logs, usage.other), (Some(some(5)), Some(FsUsage::default()), some(3)));
        sample.pods[0].own = None;
        let containers = &mut sample.pods[0].containers;
        let mut second = containers[0].clone();
        second.name = "second".to_owned();
        let unmeasured = ContainerSample { measured: Measured::default(), ..second.clone() };
        containers.extend([second, unmeasured]);
        let usage = PodUsage::of(&sample.pods[0]);
        let sum = (Some(1200), Some(6));
        assert_eq!((usage.memory, usage.processes), sum, "of its containers, as far as they were measured");
    }
}
