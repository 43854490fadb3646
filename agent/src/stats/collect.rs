//! Takes samples: from cgroup files if the container's process is known, else from the runtime. Blocks.

use std::path::Path;
use std::sync::Arc;

use keblet_proto::cri::v1 as cri;
use tokio::time::Instant;

use super::StatsSource;
use super::sample::ContainerSample;
use super::sample::Measured;
use super::sample::PodSample;
use super::sample::Sample;
use crate::cgroups::Layout;
use crate::cgroups::usage::CgroupPlace;
use crate::cgroups::usage::CgroupUsage;
use crate::cgroups::usage::MemoryUsage;
use crate::cgroups::usage::Pressure;
use crate::cgroups::usage::PressureLine;
use crate::kernel::read;
use crate::kernel::usage::Machine;
use crate::model::Clock;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;

/// Cgroups reported as system containers, by name.
pub type SystemCgroups = Vec<(&'static str, String)>;

/// True if the usage of a running container is available from the runtime only.
pub(super) fn needs_runtime(snapshots: &[Arc<PodSnapshot>]) -> bool {
    snapshots.iter().flat_map(|snapshot| snapshot.running()).any(|container| container.pid.is_none())
}

/// Measures everything now.
pub(super) fn take(
    source: &StatsSource,
    snapshots: &[Arc<PodSnapshot>],
    runtime_stats: &[cri::ContainerStats],
) -> Sample {
    let StatsSource { layout, system, proc, .. } = source;
    let (taken, at) = (Instant::now(), Clock::System.wall_nanos());
    let system = system.iter().filter_map(|(name, path)| {
        let usage = CgroupPlace::at(layout, path).read();
        let is_there = usage.cpu.is_some() || usage.memory.is_some();
        is_there.then(|| (*name, Measured::new(*name, usage).at(Some(path.clone()))))
    });
    Sample {
        taken,
        at,
        node: Measured::new("/", Machine::usage(layout, proc)).at(Some("/".to_owned())),
        system: system.collect(),
        pods: snapshots.iter().filter_map(|snapshot| pod(source, snapshot, runtime_stats)).collect(),
    }
}

/// A pod with running containers.
fn pod(source: &StatsSource, snapshot: &PodSnapshot, runtime_stats: &[cri::ContainerStats]) -> Option<PodSample> {
    let StatsSource { layout, proc, .. } = source;
    let mut own = None;
    let mut containers = Vec::new();
    for container in snapshot.running() {
        let place = container.pid.and_then(|pid| place_of(layout, proc, pid, container));
        if own.is_none() {
            own = place.as_ref().and_then(|place| place.parent_named(snapshot.pod.uid.as_str()));
        }
        containers.push(measure(layout, container, place.as_ref(), runtime_stats));
    }
    let newest = snapshot.sandboxes.first();
    let earliest = containers.iter().map(|container: &ContainerSample| container.created_at).min()?;
    let is_on_host = newest.is_some_and(|sandbox| sandbox.host_network);
    Some(PodSample {
        pod: snapshot.pod.clone(),
        created_at: newest.map_or(earliest, |sandbox| sandbox.created_at),
        sandbox: newest.map(|sandbox| sandbox.id.clone()),
        network_of: snapshot.running().find_map(|container| container.pid).filter(|_| !is_on_host),
        own: own.map(|place| Measured::new(snapshot.pod.uid.as_str(), place.read()).at(place.path(layout))),
        containers,
    })
}

/// The container's cgroup, by its init process. If the pid was reused, the cgroup's path does not contain the container's
/// id.
fn place_of(layout: &Layout, proc: &Path, pid: u32, container: &ContainerStatus) -> Option<CgroupPlace> {
    let memberships = read::text(&proc.join(pid.to_string()).join("cgroup"), read::PROC_FILE_LIMIT).ok()?;
    memberships.contains(container.id.as_str()).then(|| CgroupPlace::of_process(layout, &memberships))
}

fn measure(
    layout: &Layout,
    container: &ContainerStatus,
    place: Option<&CgroupPlace>,
    runtime_stats: &[cri::ContainerStats],
) -> ContainerSample {
    let of_runtime = runtime_stats
        .iter()
        .find(|stats| stats.attributes.as_ref().is_some_and(|attributes| attributes.id == container.id.as_str()));
    let key = container.id.as_str();
    let measured = match (place, of_runtime) {
        (Some(place), _) => Measured::new(key, place.read()).at(place.path(layout)),
        (None, Some(stats)) => by_runtime(key, stats),
        (None, None) => Measured::new(key, CgroupUsage::default()),
    };
    ContainerSample {
        name: container.name.clone(),
        id: container.id.clone(),
        image: container.image.clone(),
        init: container.pid.filter(|_| place.is_some()),
        created_at: container.created_at,
        measured,
    }
}

/// Usage reported by the runtime.
fn by_runtime(key: &str, stats: &cri::ContainerStats) -> Measured {
    let value = |value: &Option<cri::UInt64Value>| value.as_ref().map(|value| value.value);
    let (cpu, memory) = (stats.cpu.as_ref(), stats.memory.as_ref());
    let memory_usage = memory.map(|memory| {
        let working_set = value(&memory.working_set_bytes).unwrap_or(0);
        MemoryUsage {
            usage: value(&memory.usage_bytes).unwrap_or(working_set),
            working_set,
            rss: value(&memory.rss_bytes).unwrap_or(0),
            page_faults: value(&memory.page_faults).unwrap_or(0),
            major_page_faults: value(&memory.major_page_faults).unwrap_or(0),
            limit: value(&memory.available_bytes).map(|left| left.saturating_add(working_set)),
            swap: stats.swap.as_ref().and_then(|swap| value(&swap.swap_usage_bytes)),
            swap_limit: stats.swap.as_ref().and_then(|swap| {
                Some(value(&swap.swap_available_bytes)?.saturating_add(value(&swap.swap_usage_bytes)?))
            }),
        }
    });
    let usage = CgroupUsage {
        cpu: cpu.and_then(|cpu| value(&cpu.usage_core_nano_seconds)),
        cpu_pressure: pressure(cpu.and_then(|cpu| cpu.psi.as_ref())),
        memory: memory_usage,
        memory_pressure: pressure(memory.and_then(|memory| memory.psi.as_ref())),
        io_pressure: pressure(stats.io.as_ref().and_then(|io| io.psi.as_ref())),
        ..CgroupUsage::default()
    };
    Measured { nano_cores: cpu.and_then(|cpu| value(&cpu.usage_nano_cores)), ..Measured::new(key, usage) }
}

fn pressure(runtime_stats: Option<&cri::PsiStats>) -> Pressure {
    let line = |data: &Option<cri::PsiData>| {
        let data = data.unwrap_or_default();
        PressureLine { total: data.total, avg10: data.avg10, avg60: data.avg60, avg300: data.avg300 }
    };
    runtime_stats.map(|psi| Pressure { some: line(&psi.some), full: line(&psi.full) }).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::Hierarchies;
    use crate::model::testing;
    use crate::oom::OomCounts;
    use crate::runtime::Runtime;
    use crate::runtime::RuntimeOptions;
    use crate::runtime::tests::server::Socket;

    fn runtime_stats(id: &str) -> cri::ContainerStats {
        let some = |value| Some(cri::UInt64Value { value });
        cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes { id: id.to_owned(), ..Default::default() }),
            cpu: Some(cri::CpuUsage {
                usage_core_nano_seconds: some(5),
                usage_nano_cores: some(9),
                ..Default::default()
            }),
            memory: Some(cri::MemoryUsage {
                working_set_bytes: some(10),
                available_bytes: some(20),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    struct NoPods;

    impl super::super::Snapshots for NoPods {
        fn all(&self) -> Vec<Arc<PodSnapshot>> {
            Vec::new()
        }
    }

    fn source(system: SystemCgroups) -> StatsSource {
        let (socket, none) = (Socket::default(), Path::new("/no/such/folder"));
        StatsSource {
            node_name: "node".to_owned(),
            layout: Hierarchies::detect().unwrap().layout,
            proc: "/proc".into(),
            system,
            folders: super::super::Folders { root: none.to_owned(), pod_logs: none.to_owned() },
            volume_period: None,
            runtime: Runtime::with_connector("unix:///t", move || socket.clone().connect(), RuntimeOptions::default()),
            snapshots: Arc::new(NoPods),
            ooms: OomCounts::default(),
        }
    }

    #[tokio::test]
    async fn containers_without_a_pid_are_measured_by_the_runtime() {
        let snapshot = testing::snapshot(vec![testing::running("a", 0), testing::exited("b", 0, 0)]);
        let all = [Arc::new(snapshot)];
        assert!(needs_runtime(&all));
        let source = source(vec![("pods", "/no/such/cgroup".to_owned())]);
        let sample = take(&source, &all, &[runtime_stats("a-0")]);
        assert!(sample.system.is_empty() && sample.node.usage.cpu > Some(0));
        let [pod] = &sample.pods[..] else { panic!("one pod") };
        let [container] = &pod.containers[..] else { panic!("one running container") };
        let memory = container.measured.usage.memory.unwrap();
        assert_eq!((container.measured.usage.cpu, container.measured.nano_cores), (Some(5), Some(9)));
        assert_eq!((memory.working_set, memory.available()), (10, Some(20)));
    }

    #[tokio::test]
    async fn a_pod_without_running_containers_is_absent() {
        let all = [Arc::new(testing::snapshot(vec![testing::exited("b", 0, 0)]))];
        assert!(take(&source(Vec::new()), &all, &[]).pods.is_empty());
    }

    #[test]
    fn a_reused_pid_is_not_measured() {
        let mut container = testing::running("a", 0);
        container.pid = Some(std::process::id());
        let layout = Hierarchies::detect().unwrap().layout;
        assert_eq!(place_of(&layout, Path::new("/proc"), std::process::id(), &container), None);
    }
}
