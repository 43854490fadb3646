//! Takes samples: from cgroup files if a process of the container's cgroup is known, else from the runtime. Blocks.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keblet_proto::cri::v1 as cri;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::StatsError;
use super::StatsSource;
use super::open_cgroups::OpenCgroups;
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
pub type SystemCgroups = Vec<(&'static str, SystemCgroup)>;

/// A cgroup that is reported as a system container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SystemCgroup {
    /// At this path.
    At(String),
    /// The agent's own, looked up for each sample, since the agent may be moved. Not reported while that is the root: its
    /// usage is the node's.
    OfAgent,
}

impl SystemCgroup {
    fn path(&self, source: &StatsSource) -> Option<String> {
        match self {
            Self::At(path) => Some(path.clone()),
            Self::OfAgent => CgroupPlace::path_of_process(&source.layout, &memberships_of(&source.proc, "self")?),
        }
    }
}

/// As [`take`], in a thread that holds `turn`: a kernel that hangs, as while another thread holds its lock of all cgroups,
/// keeps this thread and no others, however often usage is asked for.
///
/// # Errors
/// The files were not read within `limit`, or the agent is shutting down.
pub(super) async fn take_within(
    limit: Duration,
    turn: &Arc<Mutex<()>>,
    source: &Arc<StatsSource>,
    before: Option<Arc<Sample>>,
) -> Result<Sample, StatsError> {
    let taking = async {
        let turn = turn.clone().lock_owned().await;
        let (source, snapshots) = (source.clone(), source.snapshots.all());
        let taken = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            take(&source, &snapshots, OpenCgroups::of(before.as_deref()))
        });
        taken.await.map_err(|error| StatsError::Stopped(error.to_string()))
    };
    let taken = tokio::time::timeout(limit, taking).await;
    taken.unwrap_or_else(|_| Err(StatsError::Pods(format!("the files of cgroups were not read within {limit:?}"))))
}

/// Measures everything now, except what only the runtime can. The `opened` cgroups are not looked up again while they exist.
pub(super) fn take(source: &StatsSource, snapshots: &[Arc<PodSnapshot>], mut opened: OpenCgroups<'_>) -> Sample {
    let StatsSource { layout, system, proc, .. } = source;
    let (taken, at) = (Instant::now(), Clock::System.wall_nanos());
    let system = system.iter().filter_map(|(name, cgroup)| {
        let path = cgroup.path(source)?;
        let usage = CgroupPlace::at(layout, &path).read();
        usage.is_there().then(|| (*name, Measured::new(*name, usage).at(Some(path))))
    });
    Sample {
        taken,
        at,
        node: Measured::new("/", Machine::usage(layout, proc)).at(Some("/".to_owned())),
        huge_pages: Machine::huge_pages(proc),
        system: system.collect(),
        pods: snapshots.iter().filter_map(|snapshot| pod(source, snapshot, &mut opened)).collect(),
        is_incomplete: false,
    }
}

/// Adds what the runtime reports of the containers that only it can measure.
pub(super) fn add_runtime_stats(sample: &mut Sample, all: &[cri::ContainerStats]) {
    let by_id: HashMap<&str, &cri::ContainerStats> =
        all.iter().filter_map(|stats| Some((stats.attributes.as_ref()?.id.as_str(), stats))).collect();
    let containers = sample.pods.iter_mut().flat_map(|pod| &mut pod.containers);
    for container in containers.filter(|container| container.needs_runtime) {
        let id = container.id.as_str();
        if let Some(stats) = by_id.get(id) {
            container.measured = by_runtime(id, stats);
        }
    }
}

/// A pod with running containers.
fn pod(source: &StatsSource, snapshot: &PodSnapshot, opened: &mut OpenCgroups<'_>) -> Option<PodSample> {
    let mut own = opened.measure(snapshot.pod.uid.as_str());
    let mut containers = Vec::new();
    for container in snapshot.running() {
        let known = opened.measure(container.id.as_str());
        let sought = container.pid.filter(|_| own.is_none() || known.is_none());
        let memberships = sought.and_then(|pid| memberships_of(&source.proc, &pid.to_string()));
        let mut named = |id: &str| opened.find(&source.layout, memberships.as_deref()?, id);
        own = own.or_else(|| named(snapshot.pod.uid.as_str()));
        let measured = known.or_else(|| named(container.id.as_str()));
        // A process elsewhere runs a sandbox such as a virtual machine, or its number was used again. One that is gone uses
        // nothing: the runtime, which is slow while containers end, is not queried for it.
        let runs_elsewhere =
            memberships.as_deref().is_some_and(|memberships| is_in_a_cgroup(&source.layout, memberships));
        let needs_runtime = measured.is_none() && (container.pid.is_none() || runs_elsewhere);
        let unknown = || Measured::new(container.id.as_str(), CgroupUsage::default());
        containers.push(of_container(container, measured.unwrap_or_else(unknown), needs_runtime));
    }
    let newest = snapshot.sandboxes.first();
    let earliest = containers.iter().map(|container: &ContainerSample| container.created_at).min()?;
    let is_on_host = newest.is_some_and(|sandbox| sandbox.host_network);
    Some(PodSample {
        pod: snapshot.pod.clone(),
        created_at: newest.map_or(earliest, |sandbox| sandbox.created_at),
        sandbox: newest.map(|sandbox| sandbox.id.clone()),
        sandbox_attempt: newest.map_or(0, |sandbox| sandbox.attempt),
        network_of: snapshot.running().find_map(|container| container.pid).filter(|_| !is_on_host),
        own,
        containers,
    })
}

/// False for a process that has ended and was not waited for: with v1 it is in no cgroup but the root. The v2 hierarchy beside
/// v1, which measures nothing, keeps it in its last cgroup.
fn is_in_a_cgroup(layout: &Layout, memberships: &str) -> bool {
    let measures = |line: &&str| layout.is_v2() || !line.starts_with("0::");
    memberships.lines().filter(measures).any(|line| !line.ends_with(":/"))
}

/// The text of `/proc/<process>/cgroup`; `None` if there is no such process.
fn memberships_of(proc: &Path, process: &str) -> Option<String> {
    read::text(&proc.join(process).join("cgroup"), read::PROC_FILE_LIMIT).ok()
}

fn of_container(container: &ContainerStatus, measured: Measured, needs_runtime: bool) -> ContainerSample {
    ContainerSample {
        name: container.name.clone(),
        id: container.id.clone(),
        attempt: container.attempt,
        image: container.image.clone(),
        resources: container.resources,
        init: container.pid.filter(|_| measured.path.is_some()),
        created_at: container.created_at,
        needs_runtime,
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
    use std::collections::BTreeMap;

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

    /// Its container runs as process 7.
    struct OnePod;

    impl super::super::Snapshots for OnePod {
        fn all(&self) -> Vec<Arc<PodSnapshot>> {
            vec![Arc::new(testing::snapshot(vec![running_as("a", 7)]))]
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

    /// A node in a folder, with cgroup v2 and these processes.
    fn source_in(folder: &Path, processes: &[(&str, &str)], system: SystemCgroups) -> StatsSource {
        let (mount, proc) = (folder.join("cgroup"), folder.join("proc"));
        for (process, cgroup) in processes {
            std::fs::create_dir_all(proc.join(process)).unwrap();
            std::fs::write(proc.join(process).join("cgroup"), format!("0::{cgroup}\n")).unwrap();
        }
        StatsSource { layout: Layout::V2 { mount }, proc, ..source(system) }
    }

    /// A cgroup of [`source_in`] that uses as much memory.
    fn cgroup(folder: &Path, path: &str, memory: u64) {
        let cgroup = folder.join("cgroup").join(path.trim_start_matches('/'));
        std::fs::create_dir_all(&cgroup).unwrap();
        std::fs::write(cgroup.join("memory.current"), memory.to_string()).unwrap();
    }

    fn running_as(name: &str, pid: u32) -> ContainerStatus {
        ContainerStatus { pid: Some(pid), ..testing::running(name, 0) }
    }

    fn memory(measured: &Measured) -> Option<u64> {
        measured.usage.memory.map(|memory| memory.working_set)
    }

    #[tokio::test]
    async fn containers_without_a_pid_are_measured_by_the_runtime() {
        let snapshot = testing::snapshot(vec![testing::running("a", 0), testing::exited("b", 0, 0)]);
        let source = source(vec![("pods", SystemCgroup::At("/no/such/cgroup".to_owned()))]);
        let mut sample = take(&source, &[Arc::new(snapshot)], OpenCgroups::of(None));
        assert!(sample.needs_runtime() && sample.needs_runtime_for_pods());
        let nameless = cri::ContainerStats { attributes: None, ..runtime_stats("a-0") };
        add_runtime_stats(&mut sample, &[nameless, runtime_stats("other-0"), runtime_stats("a-0")]);
        assert!(sample.system.is_empty() && sample.node.usage.cpu > Some(0));
        let [pod] = &sample.pods[..] else { panic!("one pod") };
        let [container] = &pod.containers[..] else { panic!("one running container") };
        let memory = container.measured.usage.memory.unwrap();
        assert_eq!((container.measured.usage.cpu, container.measured.nano_cores), (Some(5), Some(9)));
        assert_eq!((memory.working_set, memory.available()), (10, Some(20)));
    }

    #[tokio::test]
    async fn a_container_that_has_divided_its_cgroup_is_measured_whole() {
        let dir = tempfile::tempdir().unwrap();
        let pod = "/kubepods.slice/kubepods-poduid.slice";
        let container = format!("{pod}/cri-containerd-a-0.scope");
        let init = format!("{container}/init.scope");
        for (path, memory) in [(pod, 600), (container.as_str(), 500), (init.as_str(), 20)] {
            cgroup(dir.path(), path, memory);
        }
        let source = source_in(dir.path(), &[("7", &init)], Vec::new());
        let sample = take(&source, &[Arc::new(testing::snapshot(vec![running_as("a", 7)]))], OpenCgroups::of(None));
        assert!(!sample.needs_runtime());
        let [found] = &sample.pods[..] else { panic!("one pod") };
        let (own, measured) = (found.own.as_ref().unwrap(), &found.containers[0].measured);
        assert_eq!((memory(own), own.path.as_deref()), (Some(600), Some(pod)));
        assert_eq!((memory(measured), measured.path.as_deref()), (Some(500), Some(container.as_str())));
    }

    #[tokio::test]
    async fn a_cgroup_that_was_found_is_not_looked_up_again_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (pod, container) = ("/kubepods/poduid", "/kubepods/poduid/a-0");
        for path in [pod, container] {
            cgroup(dir.path(), path, 600);
        }
        let source = source_in(dir.path(), &[("7", container)], Vec::new());
        let snapshots = [Arc::new(testing::snapshot(vec![running_as("a", 7)]))];
        let first = take(&source, &snapshots, OpenCgroups::of(None));
        let measured = |sample: &Sample| {
            let of = |measured: &Measured| measured.path.clone().zip(memory(measured));
            (sample.pods[0].own.as_ref().and_then(of), of(&sample.pods[0].containers[0].measured))
        };
        let at = |path: &str, memory| Some((path.to_owned(), memory));

        std::fs::remove_dir_all(&source.proc).unwrap();
        cgroup(dir.path(), container, 500);
        let second = take(&source, &snapshots, OpenCgroups::of(Some(&first)));
        assert_eq!(measured(&second), (at(pod, 600), at(container, 500)), "its process is not asked for");

        std::fs::remove_dir_all(dir.path().join("cgroup")).unwrap();
        cgroup(dir.path(), container, 400);
        let third = take(&source, &snapshots, OpenCgroups::of(Some(&second)));
        assert_eq!(measured(&third), (None, None), "removed, and no process says where it is now");

        let source = source_in(dir.path(), &[("7", container)], Vec::new());
        let fourth = take(&source, &snapshots, OpenCgroups::of(Some(&third)));
        assert_eq!(measured(&fourth).1, at(container, 400));
    }

    #[tokio::test]
    async fn a_pods_own_cgroup_that_was_not_read_is_looked_up_again() {
        let dir = tempfile::tempdir().unwrap();
        let (pod, container) = ("/kubepods/poduid", "/kubepods/poduid/a-0");
        cgroup(dir.path(), container, 500);
        let source = source_in(dir.path(), &[("7", container)], Vec::new());
        let snapshots = [Arc::new(testing::snapshot(vec![running_as("a", 7)]))];
        let first = take(&source, &snapshots, OpenCgroups::of(None));
        cgroup(dir.path(), pod, 600);
        let second = take(&source, &snapshots, OpenCgroups::of(Some(&first)));
        let used = |sample: &Sample| {
            let [pod] = &sample.pods[..] else { panic!("one pod") };
            (pod.own.as_ref().and_then(memory), memory(&pod.containers[0].measured))
        };
        assert_eq!((used(&first), used(&second)), ((None, Some(500)), (Some(600), Some(500))));
    }

    #[tokio::test]
    async fn a_container_in_a_virtual_machine_is_measured_by_the_runtime() {
        let dir = tempfile::tempdir().unwrap();
        cgroup(dir.path(), "/kubepods/poduid/sandbox-0", 700);
        cgroup(dir.path(), "/kubepods/poduid", 700);
        let source = source_in(dir.path(), &[("7", "/kubepods/poduid/sandbox-0")], Vec::new());
        let snapshot = testing::snapshot(vec![running_as("a", 7), running_as("gone", 8)]);
        let mut sample = take(&source, &[Arc::new(snapshot)], OpenCgroups::of(None));
        assert!(sample.needs_runtime() && !sample.needs_runtime_for_pods(), "the cgroup of the pod is known");
        add_runtime_stats(&mut sample, &[runtime_stats("a-0"), runtime_stats("gone-0")]);
        let [pod] = &sample.pods[..] else { panic!("one pod") };
        let usage: Vec<_> = pod.containers.iter().map(|container| memory(&container.measured)).collect();
        assert_eq!((usage, pod.own.as_ref().and_then(memory)), (vec![Some(10), None], Some(700)));
        assert_eq!(pod.containers[0].init, None, "the process is not the container's");
    }

    #[tokio::test]
    async fn a_process_that_is_gone_needs_no_runtime() {
        let dir = tempfile::tempdir().unwrap();
        let snapshot = testing::snapshot(vec![running_as("gone", 8)]);
        let source = source_in(dir.path(), &[], Vec::new());
        assert!(!take(&source, &[Arc::new(snapshot)], OpenCgroups::of(None)).needs_runtime());
    }

    #[test]
    fn a_process_that_has_ended_is_in_no_cgroup() {
        let v2 = Layout::V2 { mount: "/".into() };
        let v1 = Layout::V1 { controllers: BTreeMap::new(), unified: Some("/".into()) };
        for (layout, memberships, expected) in [
            (&v2, "0::/kubepods/poduid/sandbox-0\n", true),
            (&v2, "0::/\n", false),
            (&v1, "4:memory:/\n1:name=systemd:/\n0::/kubepods/poduid/a-0\n", false),
            (&v1, "4:memory:/kubepods/poduid/sandbox-0\n1:name=systemd:/\n0::/\n", true),
        ] {
            assert_eq!(is_in_a_cgroup(layout, memberships), expected, "{layout:?} {memberships:?}");
        }
    }

    #[tokio::test]
    async fn the_agents_own_cgroup_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        for (path, memory) in [("/", 9), ("/system.slice/kubelet.service", 30), ("/kube.slice/kubelet.service", 40)] {
            cgroup(dir.path(), path, memory);
        }
        let system = vec![("kubelet", SystemCgroup::OfAgent)];
        let found = |cgroup: &str| {
            let sample = take(&source_in(dir.path(), &[("self", cgroup)], system.clone()), &[], OpenCgroups::of(None));
            let one = |(name, measured): &(&'static str, Measured)| (*name, measured.path.clone(), memory(measured));
            sample.system.iter().map(one).collect::<Vec<_>>()
        };
        for (path, memory) in [("/system.slice/kubelet.service", 30), ("/kube.slice/kubelet.service", 40)] {
            assert_eq!(found(path), [("kubelet", Some(path.to_owned()), Some(memory))]);
        }
        assert!(found("/").is_empty(), "the root is the node");
    }

    #[tokio::test]
    async fn a_pod_without_running_containers_is_absent() {
        let all = [Arc::new(testing::snapshot(vec![testing::exited("b", 0, 0)]))];
        assert!(take(&source(Vec::new()), &all, OpenCgroups::of(None)).pods.is_empty());
    }

    /// In real time, as a call that hangs stops a paused clock: a pipe is opened for reading when it is opened for writing.
    #[tokio::test]
    async fn files_that_hang_keep_one_thread_and_are_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("proc/7/cgroup");
        std::fs::create_dir_all(pipe.parent().unwrap()).unwrap();
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let source = source_in(dir.path(), &[], Vec::new());
        let source = Arc::new(StatsSource { snapshots: Arc::new(OnePod), ..source });
        let (turn, mut early) = (Arc::default(), Vec::new());
        for _ in 0..3 {
            early.push(take_within(Duration::from_millis(20), &turn, &source, None).await);
        }
        let holders = Arc::strong_count(&source);
        // Lets the thread go on, which the end of the test waits for.
        let writer = std::fs::File::options().write(true).open(&pipe).unwrap();
        std::fs::remove_file(&pipe).unwrap();
        drop(writer);
        assert!(early.iter().all(|taken| matches!(taken, Err(StatsError::Pods(_)))), "{early:?}");
        assert_eq!(holders, 2, "the test, and one thread");
        let taken = take_within(Duration::from_secs(60), &turn, &source, None).await;
        assert_eq!(taken.unwrap().pods.len(), 1);
    }

    #[tokio::test]
    async fn a_reused_pid_is_not_measured() {
        let snapshot = testing::snapshot(vec![running_as("a", std::process::id())]);
        let sample = take(&source(Vec::new()), &[Arc::new(snapshot)], OpenCgroups::of(None));
        assert_eq!(sample.pods[0].containers[0].measured.usage, CgroupUsage::default());
    }
}
