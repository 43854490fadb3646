//! Measuring on demand, with a scripted runtime.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;

use prost::Message as _;
use serde_json::Value;
use tonic::Status;

use super::*;
use crate::model::ContainerStatus;
use crate::model::runtime_keys::POD_UID;
use crate::model::testing;
use crate::oom::OomCounts;
use crate::runtime::RuntimeOptions;
use crate::runtime::tests::server::Answer;
use crate::runtime::tests::server::Script;
use crate::runtime::tests::server::Socket;
use crate::runtime::tests::server::say;
use crate::runtime::tests::server::script;

struct Node {
    stats: Stats,
    asked: Arc<AtomicUsize>,
    _dir: tempfile::TempDir,
}

struct OnePod {
    /// The process of its container, if the runtime has reported it.
    pid: Option<u32>,
}

impl Snapshots for OnePod {
    fn all(&self) -> Vec<Arc<PodSnapshot>> {
        let main = ContainerStatus { pid: self.pid, ..testing::running("main", 0) };
        vec![Arc::new(testing::snapshot(vec![main]))]
    }
}

/// One pod on a node in this folder, with this runtime.
fn stats_in(dir: &Path, runtime: Script, (layout, proc): (Layout, PathBuf), pod: impl Snapshots + 'static) -> Stats {
    let socket = Socket::default();
    socket.serve(runtime);
    let runtime =
        Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
    Stats::new(StatsSource {
        node_name: "node".to_owned(),
        layout,
        proc,
        system: Vec::new(),
        folders: Folders { root: dir.to_owned(), pod_logs: dir.join("logs") },
        volume_period: Some(Duration::from_secs(60)),
        runtime,
        snapshots: Arc::new(pod),
        ooms: OomCounts::default(),
    })
}

/// The cgroups and processes of this machine.
fn this_machine() -> (Layout, PathBuf) {
    (crate::cgroups::Hierarchies::detect().unwrap().layout, "/proc".into())
}

fn node(fails: bool) -> Node {
    let dir = tempfile::tempdir().unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let (count, mount) = (asked.clone(), dir.path().to_string_lossy().into_owned());
    let runtime = script(move |method, _| {
        count.fetch_add(1, Ordering::Relaxed);
        if fails {
            return Err(Status::unknown("broken"));
        }
        let used = |bytes| Some(cri::UInt64Value { value: bytes });
        match method {
            "ListContainerStats" => say(&cri::ListContainerStatsResponse {
                stats: vec![cri::ContainerStats {
                    attributes: Some(cri::ContainerAttributes { id: "main-0".to_owned(), ..Default::default() }),
                    cpu: Some(cri::CpuUsage { usage_core_nano_seconds: used(5), ..Default::default() }),
                    writable_layer: Some(cri::FilesystemUsage { used_bytes: used(4096), ..Default::default() }),
                    ..Default::default()
                }],
            }),
            "ImageFsInfo" => say(&cri::ImageFsInfoResponse {
                image_filesystems: vec![cri::FilesystemUsage {
                    fs_id: Some(cri::FilesystemIdentifier { mountpoint: mount.clone() }),
                    used_bytes: used(77),
                    ..Default::default()
                }],
                container_filesystems: vec![cri::FilesystemUsage {
                    fs_id: Some(cri::FilesystemIdentifier { mountpoint: "/proc".to_owned() }),
                    used_bytes: used(55),
                    ..Default::default()
                }],
            }),
            _ => Err(Status::unimplemented(method.to_owned())),
        }
    });
    let stats = stats_in(dir.path(), runtime, this_machine(), OnePod { pid: None });
    Node { stats, asked, _dir: dir }
}

#[tokio::test]
async fn the_first_answer_has_rates_and_disks() {
    let node = node(false);
    let json = String::from_utf8(node.stats.summary(false).await.unwrap().json().unwrap()).unwrap();
    assert!(json.starts_with("{\n \"node\": {\n  \"nodeName\": \"node\","), "{json}");
    let summary: Value = serde_json::from_str(&json).unwrap();
    assert!(summary["node"]["cpu"]["usageNanoCores"].is_u64(), "{json}");
    assert_eq!(summary["node"]["runtime"]["imageFs"]["usedBytes"], 77);
    assert_eq!(summary["node"]["runtime"]["containerFs"]["usedBytes"], 55, "writable layers are on another device");
    assert_eq!(summary["pods"][0]["containers"][0]["rootfs"]["usedBytes"], 4096);
    assert_eq!(summary["pods"][0]["containers"][0]["cpu"]["usageCoreNanoSeconds"], 5);
}

#[tokio::test]
async fn requests_within_the_period_share_a_sample() {
    let node = node(false);
    let first = node.stats.resource_metrics().await;
    assert_eq!(node.asked.load(Ordering::Relaxed), 1);
    assert_eq!(node.stats.resource_metrics().await, first);
    assert_eq!(node.asked.load(Ordering::Relaxed), 1, "measured once");
    let (one, other) = tokio::join!(node.stats.summary(false), node.stats.summary(false));
    let json = |summary: Result<Summary, StatsError>| summary.unwrap().json().unwrap();
    assert_eq!(json(one), json(other), "concurrent requests share a sample");
}

#[tokio::test]
async fn errors_of_the_runtime_are_reported() {
    let node = node(true);
    let error = node.stats.summary(false).await.unwrap_err().to_string();
    assert_eq!(error, "failed to get imageFs stats: rpc error: code = Unknown desc = broken");
    assert_eq!(scrape_error(&node.stats.resource_metrics().await), 1.0);
    let summary: Value = serde_json::from_slice(&node.stats.summary(true).await.unwrap().json().unwrap()).unwrap();
    assert!(summary["node"]["cpu"]["usageCoreNanoSeconds"].is_u64(), "the rest is reported: {summary}");
    assert_eq!(summary["pods"][0]["containers"][0]["name"], "main");
}

fn scrape_error(families: &[MetricFamily]) -> f64 {
    let family = families.iter().find(|family| family.name() == "resource_scrape_error").unwrap();
    family.get_metric()[0].get_gauge().get_value()
}

fn hangs() -> Script {
    Arc::new(|_, _| Box::pin(std::future::pending::<Answer>()))
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_hides_no_pod() {
    let dir = tempfile::tempdir().unwrap();
    let (mount, proc) = (dir.path().join("cgroup"), dir.path().join("proc"));
    let (pod, process) = (mount.join("kubepods/poduid"), proc.join("7"));
    for folder in [&pod, &process] {
        std::fs::create_dir_all(folder).unwrap();
    }
    std::fs::write(pod.join("memory.current"), "700").unwrap();
    // The container runs in a virtual machine, which is in the pod's cgroup.
    std::fs::write(process.join("cgroup"), "0::/kubepods/poduid/sandbox-0\n").unwrap();
    let stats = stats_in(dir.path(), hangs(), (Layout::V2 { mount }, proc), OnePod { pid: Some(7) });
    let began = Instant::now();
    assert_eq!(stats.pods(false).await.unwrap()[&PodUid::from("uid")].memory, Some(700));
    assert_eq!(began.elapsed(), Duration::ZERO, "the runtime is not asked");
    let families = stats.resource_metrics().await;
    assert!((SCRAPE_RUNTIME_TIMEOUT..2 * SCRAPE_RUNTIME_TIMEOUT).contains(&began.elapsed()), "{:?}", began.elapsed());
    assert_eq!(scrape_error(&families), 1.0);
    let of_pod = families.iter().find(|family| family.name() == "pod_memory_working_set_bytes").unwrap();
    assert_eq!(of_pod.get_metric()[0].get_gauge().get_value(), 700.0);
}

#[tokio::test(start_paused = true)]
async fn a_sample_measures_the_cgroups_that_the_last_one_has_found() {
    let dir = tempfile::tempdir().unwrap();
    let (mount, proc) = (dir.path().join("cgroup"), dir.path().join("proc"));
    let (pod, process) = (mount.join("kubepods/poduid"), proc.join("7"));
    std::fs::create_dir_all(pod.join("main-0")).unwrap();
    std::fs::create_dir_all(&process).unwrap();
    std::fs::write(process.join("cgroup"), "0::/kubepods/poduid/main-0\n").unwrap();
    let stats = stats_in(dir.path(), hangs(), (Layout::V2 { mount }, proc), OnePod { pid: Some(7) });
    for (used, age) in [("700", FRESH), ("600", 2 * sample::LONGEST), ("500", FRESH)] {
        std::fs::write(pod.join("memory.current"), used).unwrap();
        std::fs::write(pod.join("main-0/memory.current"), used).unwrap();
        let families = stats.resource_metrics().await;
        for name in ["pod_memory_working_set_bytes", "container_memory_working_set_bytes"] {
            let family = families.iter().find(|family| family.name() == name).unwrap();
            assert_eq!(family.get_metric()[0].get_gauge().get_value().to_string(), used, "{name}");
        }
        // They are found by this process alone.
        let _ = std::fs::remove_dir_all(&process);
        tokio::time::advance(age).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_eviction_waits_shortly_for_a_runtime_that_alone_can_measure_a_pod() {
    let dir = tempfile::tempdir().unwrap();
    let stats = stats_in(dir.path(), hangs(), this_machine(), OnePod { pid: None });
    let began = Instant::now();
    assert_eq!(stats.pods(false).await.unwrap()[&PodUid::from("uid")].memory, None);
    assert!(
        (EVICTION_RUNTIME_TIMEOUT..2 * EVICTION_RUNTIME_TIMEOUT).contains(&began.elapsed()),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(node(false).stats.pods(false).await.unwrap().len(), 1);
}

/// Pods of these names, each with a container: one that has ended, or that runs as a process of the pod's cgroup.
struct Pods(&'static [(&'static str, bool)]);

impl Snapshots for Pods {
    fn all(&self) -> Vec<Arc<PodSnapshot>> {
        let of_pod = |(name, runs): &(&str, bool)| {
            let main = match runs {
                true => ContainerStatus { pid: Some(7), ..testing::running("main", 0) },
                false => testing::exited("main", 0, 0),
            };
            Arc::new(PodSnapshot { pod: named(name), ..testing::snapshot(vec![main]) })
        };
        self.0.iter().map(of_pod).collect()
    }
}

fn named(name: &str) -> PodRef {
    PodRef { uid: name.into(), namespace: "ns".into(), name: name.into() }
}

#[tokio::test]
async fn files_are_measured_of_the_wanted_pods_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (mount, proc) = (dir.path().join("cgroup"), dir.path().join("proc"));
    std::fs::create_dir_all(mount.join("pods/main-0")).unwrap();
    std::fs::write(mount.join("pods/main-0/memory.current"), "700").unwrap();
    std::fs::create_dir_all(proc.join("7")).unwrap();
    std::fs::write(proc.join("7/cgroup"), "0::/pods/main-0\n").unwrap();
    let logs = dir.path().join("logs").join(named("a").log_dir_name()).join("main");
    std::fs::create_dir_all(&logs).unwrap();
    std::fs::write(logs.join("0.log"), "7").unwrap();
    // The pods that the runtime is asked for; none if for all.
    let asked: Arc<Mutex<Vec<Option<String>>>> = Arc::default();
    let filters = asked.clone();
    let runtime = script(move |_, message| {
        let mut filter = cri::ListContainerStatsRequest::decode(message).unwrap().filter.unwrap_or_default();
        filters.lock().unwrap().push(filter.label_selector.remove(POD_UID));
        let layer = cri::FilesystemUsage { used_bytes: Some(cri::UInt64Value { value: 4096 }), ..Default::default() };
        let attributes = cri::ContainerAttributes { id: "main-0".to_owned(), ..Default::default() };
        let stats =
            cri::ContainerStats { attributes: Some(attributes), writable_layer: Some(layer), ..Default::default() };
        say(&cri::ListContainerStatsResponse { stats: vec![stats] })
    });
    let pods = Pods(&[("a", true), ("b", true), ("c", true), ("d", true), ("ended", false)]);
    let stats = stats_in(dir.path(), runtime, (Layout::V2 { mount }, proc), pods);
    let wanted = |names: &[&str]| names.iter().map(|name| PodUid::from(*name)).collect::<HashSet<_>>();

    let found = stats.files_of(wanted(&["a", "ended", "unknown"])).await.unwrap();
    let of_a = &found[&PodUid::from("a")];
    let main = of_a.containers["main"];
    assert_eq!((found.len(), main.logs.map(|logs| logs.inodes)), (1, Some(1)), "the log without its folder");
    assert_eq!((main.rootfs.map(|layer| layer.bytes), main.memory, of_a.memory), (Some(4096), None, None));
    assert_eq!(asked.lock().unwrap().split_off(0), [Some("a".to_owned())]);

    assert_eq!(stats.files_of(wanted(&["a", "b"])).await.unwrap().len(), 2);
    assert_eq!(asked.lock().unwrap().split_off(0), [None::<String>], "many are asked for at once");
    assert!(stats.files_of(wanted(&["ended"])).await.unwrap().is_empty());
    assert!(asked.lock().unwrap().is_empty());

    // With everything that can be measured of all of them.
    let all = stats.pods(true).await.unwrap();
    let with_memory = ContainerUsage { memory: Some(700), ..main };
    assert_eq!((all.len(), all[&PodUid::from("a")].containers["main"]), (4, with_memory));
}

/// One pod with these volumes.
struct WithVolumes(Vec<MeasurableVolume>);

impl Snapshots for WithVolumes {
    fn all(&self) -> Vec<Arc<PodSnapshot>> {
        OnePod { pid: None }.all()
    }

    fn volumes(&self) -> HashMap<PodUid, Vec<MeasurableVolume>> {
        [("uid".into(), self.0.clone())].into()
    }
}

#[tokio::test]
async fn measurements_of_volumes_are_timed_by_their_kind() {
    let dir = tempfile::tempdir().unwrap();
    let device = dir.path().join("device");
    std::fs::write(&device, "1234567").unwrap();
    let at = |name: &str, path: &Path, by| {
        let (name, path, claim) = (name.to_owned(), path.to_owned(), Some(name.to_owned()));
        MeasurableVolume { name, path, claim, is_local: false, by, project: None }
    };
    let volumes = vec![
        at("walked", dir.path(), MeasuredBy::Walk),
        at("mounted", dir.path(), MeasuredBy::FileSystem),
        at("gone", &dir.path().join("gone"), MeasuredBy::FileSystem),
        at("raw", &device, MeasuredBy::Device),
    ];
    let metrics = Metrics::new();
    let stats = stats_in(dir.path(), hangs(), this_machine(), WithVolumes(volumes)).with_metrics(metrics.clone());
    for _ in 0..2 {
        stats.claims().await;
        let text = metrics.render().unwrap();
        // What cannot be measured is timed too; within the period nothing is measured again.
        for (source, count) in [("du", 1), ("statfs", 2), ("block", 1)] {
            let series =
                format!("kubelet_volume_metric_collection_duration_seconds_count{{metric_source=\"{source}\"}}");
            assert!(text.contains(&format!("{series} {count}\n")), "{series} {count} is missing in\n{text}");
        }
    }
}
