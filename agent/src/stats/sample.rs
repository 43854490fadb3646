//! Samples of CPU and memory usage, and the rates between two of them. Pure.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::open_cgroups::KeptCgroup;
use crate::cgroups::usage::CgroupUsage;
use crate::model::ContainerId;
use crate::model::ContainerResources;
use crate::model::PodRef;
use crate::model::SandboxId;

/// Shortest and longest time between samples of a rate.
const SHORTEST: Duration = Duration::from_millis(50);
pub(super) const LONGEST: Duration = Duration::from_secs(60);

/// Everything measured at one moment.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// When, on the monotonic clock.
    pub(super) taken: Instant,
    /// When, in nanoseconds since the Unix epoch.
    pub(super) at: i64,
    /// The root cgroup.
    pub(super) node: Measured,
    /// Bytes of the node's memory that are huge pages.
    pub(super) huge_pages: u64,
    /// System cgroups: `kubelet`, `runtime`, `misc`, `pods`.
    pub(super) system: Vec<(&'static str, Measured)>,
    pub(super) pods: Vec<PodSample>,
    /// The runtime has not reported the usage of containers that only it can measure.
    pub(super) is_incomplete: bool,
}

/// A pod with running containers.
#[derive(Clone, Debug)]
pub(super) struct PodSample {
    pub(super) pod: PodRef,
    /// Creation of its sandbox, in nanoseconds since the Unix epoch.
    pub(super) created_at: i64,
    /// Its newest sandbox.
    pub(super) sandbox: Option<SandboxId>,
    /// The attempt of that sandbox; 0 if there is none.
    pub(super) sandbox_attempt: u32,
    /// A process whose network is the pod's; absent with host network.
    pub(super) network_of: Option<u32>,
    /// The pod's own cgroup, if it is known.
    pub(super) own: Option<Measured>,
    pub(super) containers: Vec<ContainerSample>,
}

/// A running container.
#[derive(Clone, Debug)]
pub(super) struct ContainerSample {
    pub(super) name: String,
    pub(super) id: ContainerId,
    pub(super) attempt: u32,
    /// As reported by the runtime.
    pub(super) image: String,
    /// What the runtime reports that it may use.
    pub(super) resources: ContainerResources,
    /// Its init process, if that was found in its cgroup.
    pub(super) init: Option<u32>,
    /// In nanoseconds since the Unix epoch.
    pub(super) created_at: i64,
    /// Only the runtime can measure it: its process is not known, or is in another cgroup.
    pub(super) needs_runtime: bool,
    pub(super) measured: Measured,
}

/// The usage of one cgroup.
#[derive(Clone, Debug, Default)]
pub(super) struct Measured {
    /// Identifies the cgroup in all samples.
    pub(super) key: String,
    /// The cgroup; absent if the runtime reported the usage.
    pub(super) path: Option<String>,
    /// The cgroup's open folders, from which further values and the next sample are read; absent if they are not kept open.
    pub(super) open: Option<Arc<KeptCgroup>>,
    pub(super) usage: CgroupUsage,
    /// Recent CPU usage in billionths of a core.
    pub(super) nano_cores: Option<u64>,
}

impl Measured {
    pub(super) fn new(key: impl Into<String>, usage: CgroupUsage) -> Self {
        Self { key: key.into(), path: None, open: None, usage, nano_cores: None }
    }

    /// The usage of the cgroup at this path.
    pub(super) fn at(self, path: Option<String>) -> Self {
        Self { path, ..self }
    }
}

impl PodSample {
    /// What the pod uses: that of its own cgroup or, if that is not known, of its containers together.
    pub(super) fn whole(&self) -> Cow<'_, Measured> {
        self.own.as_ref().map_or_else(|| Cow::Owned(self.together()), Cow::Borrowed)
    }

    /// What its containers use together, as far as they were measured. Without pressure, which cannot be added.
    pub(super) fn together(&self) -> Measured {
        let all = || self.containers.iter().map(|container| &container.measured);
        let usage = CgroupUsage {
            cpu: all().filter_map(|measured| measured.usage.cpu).reduce(u64::saturating_add),
            memory: all().filter_map(|measured| measured.usage.memory).reduce(|one, other| one + other),
            tasks: all().filter_map(|measured| measured.usage.tasks).reduce(u64::saturating_add),
            ..CgroupUsage::default()
        };
        let nano_cores = all().filter_map(|measured| measured.nano_cores).reduce(u64::saturating_add);
        Measured { nano_cores, ..Measured::new(self.pod.uid.as_str(), usage) }
    }
}

impl Sample {
    /// A container can be measured by the runtime only.
    pub(super) fn needs_runtime(&self) -> bool {
        self.pods.iter().flat_map(|pod| &pod.containers).any(|container| container.needs_runtime)
    }

    /// A whole pod can be measured by the runtime only: its own cgroup is not known.
    pub(super) fn needs_runtime_for_pods(&self) -> bool {
        let unknown = self.pods.iter().filter(|pod| pod.own.is_none());
        unknown.flat_map(|pod| &pod.containers).any(|container| container.needs_runtime)
    }

    /// Pods, by their own cgroups, and containers.
    pub(super) fn of_pods(&self) -> impl Iterator<Item = &Measured> {
        let containers = self.pods.iter().flat_map(|pod| &pod.containers).map(|container| &container.measured);
        self.pods.iter().filter_map(|pod| pod.own.as_ref()).chain(containers)
    }

    fn all(&self) -> impl Iterator<Item = &Measured> {
        let system = self.system.iter().map(|(_, measured)| measured);
        std::iter::once(&self.node).chain(system).chain(self.of_pods())
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Measured> {
        let system = self.system.iter_mut().map(|(_, measured)| measured);
        let pods = self.pods.iter_mut().flat_map(|pod| {
            pod.own.iter_mut().chain(pod.containers.iter_mut().map(|container| &mut container.measured))
        });
        std::iter::once(&mut self.node).chain(system).chain(pods)
    }

    /// The sample is recent enough to compute a rate at `now`.
    pub(super) fn is_recent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.taken) <= LONGEST
    }

    /// Sets the rates since `before`. A counter that has decreased was reset and has no rate.
    pub(super) fn rate_since(&mut self, before: &Self) {
        let passed = self.taken.saturating_duration_since(before.taken);
        if !(SHORTEST..=LONGEST).contains(&passed) {
            return;
        }
        let counters: HashMap<&str, u64> =
            before.all().filter_map(|measured| Some((measured.key.as_str(), measured.usage.cpu?))).collect();
        for measured in self.all_mut() {
            let used = measured.usage.cpu.zip(counters.get(measured.key.as_str()).copied());
            let used = used.and_then(|(now, before)| now.checked_sub(before));
            measured.nano_cores = used.map(|nanos| per_second(nanos, passed)).or(measured.nano_cores);
        }
    }
}

fn per_second(nanos: u64, passed: Duration) -> u64 {
    u64::try_from(u128::from(nanos) * 1_000_000_000 / passed.as_nanos().max(1)).unwrap_or(u64::MAX)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cgroups::usage::MemoryUsage;

    /// A node with one pod of one container that has used `cpu` nanoseconds.
    pub(in crate::stats) fn sample(taken: Instant, cpu: u64) -> Sample {
        let memory =
            MemoryUsage { usage: 900, working_set: 600, limit: Some(1000), swap: Some(7), ..Default::default() };
        let usage = CgroupUsage { cpu: Some(cpu), memory: Some(memory), tasks: Some(3), ..Default::default() };
        let container = ContainerSample {
            name: "main".to_owned(),
            id: "main-0".into(),
            attempt: 0,
            image: "registry/main:1".to_owned(),
            resources: ContainerResources::default(),
            init: None,
            created_at: 1_767_225_600_000_000_000,
            needs_runtime: false,
            measured: Measured::new("main-0", usage),
        };
        let pod = PodSample {
            pod: PodRef { uid: "uid".into(), namespace: "ns".into(), name: "pod".into() },
            created_at: 1_767_225_599_000_000_000,
            sandbox: Some("sandbox-0".into()),
            sandbox_attempt: 0,
            network_of: None,
            own: Some(Measured::new("uid", usage)),
            containers: vec![container],
        };
        Sample {
            taken,
            at: 1_767_225_700_500_000_000,
            node: Measured::new("/", usage),
            huge_pages: 0,
            system: vec![("pods", Measured::new("pods", usage))],
            pods: vec![pod],
            is_incomplete: false,
        }
    }

    #[tokio::test]
    async fn a_pod_without_a_cgroup_uses_what_its_containers_use() {
        let mut pod = sample(Instant::now(), 5).pods.remove(0);
        let mut other = pod.containers[0].clone();
        other.measured.nano_cores = Some(2);
        let unmeasured = ContainerSample { measured: Measured::default(), ..other.clone() };
        pod.containers.extend([other, unmeasured]);
        assert_eq!(pod.whole().usage.cpu, Some(5), "its own cgroup");
        pod.own = None;
        let whole = pod.whole().into_owned();
        let memory = whole.usage.memory.unwrap();
        assert_eq!((whole.usage.cpu, whole.usage.tasks, whole.nano_cores), (Some(10), Some(6), Some(2)));
        assert_eq!((memory.usage, memory.working_set, memory.available()), (1800, 1200, Some(800)));
        assert_eq!((whole.key.as_str(), whole.path.as_deref()), ("uid", None));
        pod.containers.clear();
        assert_eq!(pod.whole().usage, CgroupUsage::default());
    }

    #[tokio::test]
    async fn rates_between_two_samples() {
        let start = Instant::now();
        let before = sample(start, 1_000_000_000);
        let rated = |seconds: f64, cpu: u64| {
            let mut after = sample(start + Duration::from_secs_f64(seconds), cpu);
            after.rate_since(&before);
            let rates: Vec<_> = after.all().map(|measured| measured.nano_cores).collect();
            assert!(rates.windows(2).all(|pair| pair[0] == pair[1]), "{rates:?}");
            rates[0]
        };
        assert_eq!(rated(2.0, 2_000_000_000), Some(500_000_000));
        assert_eq!(rated(10.0, 1_000_000_000), Some(0));
        assert_eq!(rated(2.0, 500_000_000), None, "the counter was reset");
        assert_eq!(rated(0.01, 2_000_000_000), None, "too short");
        assert_eq!(rated(120.0, 2_000_000_000), None, "too long ago");
        assert!(before.is_recent(start + LONGEST) && !before.is_recent(start + LONGEST * 2));
    }
}
