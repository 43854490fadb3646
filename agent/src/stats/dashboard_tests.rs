//! The series that the dashboards and rules of kubernetes-mixin, metrics-server and monitoring systems query, of a node in
//! temporary folders: with cgroup v1, hybrid, and v2.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;
use tonic::Status;

use super::*;
use crate::kernel::usage::DiskUsage;
use crate::metrics::encode_text;
use crate::model::testing;
use crate::oom::OomCounts;
use crate::runtime::RuntimeOptions;
use crate::runtime::tests::server::Socket;
use crate::runtime::tests::server::say;
use crate::runtime::tests::server::script;

/// Of the container.
const PID: u32 = 4242;
const POD: &str = "kubepods/burstable/poduid";

/// Queried of `/metrics/cadvisor` for each container: the series, and labels that must have a value.
const OF_CONTAINERS: &[(&str, &[&str])] = &[
    ("container_cpu_usage_seconds_total", &["image", "namespace", "pod", "container", "cpu"]),
    ("container_memory_working_set_bytes", &["image", "namespace", "pod", "container"]),
    ("container_memory_rss", &["image", "namespace", "pod", "container"]),
    ("container_memory_cache", &["image", "namespace", "pod", "container"]),
    ("container_memory_swap", &["image", "namespace", "pod", "container"]),
    ("container_cpu_cfs_periods_total", &["namespace", "pod", "container"]),
    ("container_cpu_cfs_throttled_periods_total", &["namespace", "pod", "container"]),
    ("container_fs_reads_total", &["namespace", "pod", "container", "device"]),
    ("container_fs_writes_total", &["namespace", "pod", "container", "device"]),
    ("container_fs_reads_bytes_total", &["namespace", "pod", "container", "device"]),
    ("container_fs_writes_bytes_total", &["namespace", "pod", "container", "device"]),
    ("container_file_descriptors", &["namespace", "pod", "container"]),
    ("container_sockets", &["namespace", "pod", "container"]),
    ("container_processes", &["namespace", "pod", "container"]),
    ("container_threads", &["namespace", "pod", "container"]),
    ("container_ulimits_soft", &["namespace", "pod", "container", "ulimit"]),
    ("container_oom_events_total", &["namespace", "pod", "container"]),
    ("container_spec_memory_limit_bytes", &["namespace", "pod", "container"]),
    ("container_start_time_seconds", &["namespace", "pod", "container"]),
];
/// For the network of each pod.
const OF_NETWORKS: [&str; 6] = [
    "container_network_receive_bytes_total",
    "container_network_receive_packets_total",
    "container_network_receive_packets_dropped_total",
    "container_network_transmit_bytes_total",
    "container_network_transmit_packets_total",
    "container_network_transmit_packets_dropped_total",
];
/// For the node, and where the kernel has it for pods and containers.
const OF_PRESSURE: [&str; 6] = [
    "container_pressure_cpu_stalled_seconds_total",
    "container_pressure_cpu_waiting_seconds_total",
    "container_pressure_io_stalled_seconds_total",
    "container_pressure_io_waiting_seconds_total",
    "container_pressure_memory_stalled_seconds_total",
    "container_pressure_memory_waiting_seconds_total",
];
/// For the node.
const OF_FILE_SYSTEMS: [&str; 4] =
    ["container_fs_inodes_free", "container_fs_inodes_total", "container_fs_limit_bytes", "container_fs_usage_bytes"];
/// Queried of `/metrics/resource` by metrics-server; and what else a kubelet has there.
const OF_RESOURCES: [&str; 9] = [
    "node_cpu_usage_seconds_total",
    "node_memory_working_set_bytes",
    "container_cpu_usage_seconds_total",
    "container_memory_working_set_bytes",
    "container_start_time_seconds",
    "container_swap_usage_bytes",
    "pod_cpu_usage_seconds_total",
    "pod_memory_working_set_bytes",
    "resource_scrape_error",
];

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    V1,
    Hybrid,
    V2,
}

/// One sample: name, and labels.
type Sample = (String, BTreeMap<String, String>);

/// The samples of a page; no label of these tests has a comma in it.
fn samples(page: &str) -> Vec<Sample> {
    let sample = |line: &str| {
        let series = line.split(' ').next()?;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let pairs = labels.trim_end_matches('}').split(',').filter_map(|pair| pair.split_once('='));
        let labels = pairs.map(|(name, value)| (name.to_owned(), value.trim_matches('"').to_owned()));
        Some((name.to_owned(), labels.collect()))
    };
    page.lines().filter(|line| !line.starts_with('#')).filter_map(sample).collect()
}

/// A sample of this name has these labels, and a value in all of those.
fn has(samples: &[Sample], name: &str, labels: &[(&str, &str)], set: &[&str]) -> bool {
    samples.iter().any(|(found, of)| {
        let value = |label: &str| of.get(label).map_or("", String::as_str);
        found == name
            && labels.iter().all(|(label, expected)| value(label) == *expected)
            && set.iter().all(|label| !value(label).is_empty())
    })
}

fn write(folder: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        let file = folder.join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
}

const PRESSURE: &str = "some avg10=1.00 avg60=0.50 avg300=0.10 total=2000000\n\
                        full avg10=0.50 avg60=0.25 avg300=0.05 total=1000000\n";

fn cgroup_v2(folder: &Path) {
    write(
        folder,
        &[
            ("cpu.stat", "usage_usec 5000000\nuser_usec 3000000\nsystem_usec 2000000\nnr_periods 9\nnr_throttled 4\n"),
            ("cpu.max", "50000 100000\n"),
            ("memory.current", "1000000\n"),
            ("memory.stat", "anon 300000\nfile 500000\ninactive_file 400000\n"),
            ("memory.max", "4000000\n"),
            ("memory.events", "max 0\noom_kill 1\n"),
            ("memory.swap.current", "5\n"),
            ("pids.current", "3\n"),
            ("cgroup.procs", &format!("{PID}\n")),
            ("io.stat", "8:0 rbytes=512 wbytes=1024 rios=1 wios=2\n"),
            ("cpu.pressure", PRESSURE),
            ("memory.pressure", PRESSURE),
            ("io.pressure", PRESSURE),
        ],
    );
}

fn cgroup_v1(mount: &Path, path: &str) {
    let at = |controller: &str| mount.join(controller).join(path);
    write(&at("cpuacct"), &[("cpuacct.usage", "5000000000\n"), ("cpuacct.stat", "user 3\nsystem 2\n")]);
    write(&at("cpu"), &[("cpu.stat", "nr_periods 9\nnr_throttled 4\n"), ("cpu.cfs_quota_us", "50000\n")]);
    write(
        &at("memory"),
        &[
            ("memory.usage_in_bytes", "1000000\n"),
            ("memory.limit_in_bytes", "4000000\n"),
            ("memory.stat", "total_rss 300000\ntotal_cache 500000\ntotal_inactive_file 400000\n"),
            ("memory.oom_control", "oom_kill 1\n"),
            ("memory.memsw.usage_in_bytes", "1000005\n"),
        ],
    );
    write(&at("pids"), &[("pids.current", "3\n"), ("cgroup.procs", &format!("{PID}\n"))]);
    write(
        &at("blkio"),
        &[
            ("blkio.throttle.io_service_bytes", "8:0 Read 512\n8:0 Write 1024\n"),
            ("blkio.throttle.io_serviced", "8:0 Read 1\n8:0 Write 2\n"),
        ],
    );
}

/// `/proc` of the node and of the container's process.
fn proc(root: &Path, kind: Kind) -> PathBuf {
    let (proc, path) = (root.join("proc"), format!("{POD}/main-0"));
    let memberships = match kind {
        Kind::V2 => format!("0::/{path}\n"),
        Kind::V1 | Kind::Hybrid => {
            format!("5:blkio:/{path}\n4:cpu,cpuacct:/{path}\n3:memory:/{path}\n2:pids:/{path}\n0::/{path}\n")
        }
    };
    let interfaces = "\n\n lo: 9 1 0 0 0 0 0 0 9 1 0 0\n eth0: 100 2 3 6 0 0 0 0 200 4 5 7\n";
    write(
        &proc,
        &[
            ("stat", "btime 1767000000\n"),
            ("loadavg", "0.0 0.0 0.0 2/345 9\n"),
            (
                "meminfo",
                "MemTotal: 8000 kB\nMemFree: 3000 kB\nInactive(file): 1000 kB\nSwapTotal: 100 kB\nSwapFree: 90 kB\n",
            ),
            ("sys/kernel/pid_max", "4194304\n"),
            ("self/net/dev", interfaces),
            ("self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"),
            ("pressure/cpu", PRESSURE),
            ("pressure/memory", PRESSURE),
            ("pressure/io", PRESSURE),
        ],
    );
    let process = proc.join(PID.to_string());
    write(
        &process,
        &[("cgroup", &memberships), ("net/dev", interfaces), ("limits", "Max open files 1024 4096 files\n")],
    );
    fs::create_dir_all(process.join("fd")).unwrap();
    symlink("socket:[1]", process.join("fd/1")).unwrap();
    symlink("/dev/null", process.join("fd/2")).unwrap();
    proc
}

fn layout(root: &Path, kind: Kind) -> Layout {
    let mount = root.join("cgroup");
    let cgroups = [String::new(), POD.to_owned(), format!("{POD}/main-0"), format!("{POD}/sandbox-0")];
    if kind == Kind::V2 {
        cgroups.iter().for_each(|path| cgroup_v2(&mount.join(path)));
        return Layout::V2 { mount };
    }
    cgroups.iter().for_each(|path| cgroup_v1(&mount, path));
    let controllers = ["cpu", "cpuacct", "memory", "pids", "blkio"].map(|name| (name.to_owned(), mount.join(name)));
    Layout::V1 { controllers: controllers.into(), unified: (kind == Kind::Hybrid).then(|| root.join("unified")) }
}

struct Pods(PathBuf);

impl Snapshots for Pods {
    fn all(&self) -> Vec<Arc<PodSnapshot>> {
        let mut container = testing::running("main", 0);
        container.pid = Some(PID);
        vec![Arc::new(testing::snapshot(vec![container]))]
    }

    fn volumes(&self) -> HashMap<PodUid, Vec<MeasurableVolume>> {
        let at = |name: &str, claim: Option<&str>| MeasurableVolume {
            name: name.to_owned(),
            path: self.0.clone(),
            claim: claim.map(str::to_owned),
            is_local: claim.is_none(),
            by: if claim.is_some() { MeasuredBy::FileSystem } else { MeasuredBy::Walk },
            project: None,
        };
        [("uid".into(), vec![at("scratch", None), at("data", Some("claim"))])].into()
    }
}

struct Node {
    stats: Stats,
    asked: Arc<std::sync::Mutex<Vec<String>>>,
    _dir: tempfile::TempDir,
}

fn node(kind: Kind) -> Node {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_owned();
    let (socket, asked) = (Socket::default(), Arc::new(std::sync::Mutex::new(Vec::new())));
    let (calls, mountpoint) = (asked.clone(), root.to_string_lossy().into_owned());
    socket.serve(script(move |method, _| {
        calls.lock().unwrap().push(method.to_owned());
        match method {
            "ListContainerStats" => say(&cri::ListContainerStatsResponse::default()),
            "ImageFsInfo" => say(&cri::ImageFsInfoResponse {
                image_filesystems: vec![cri::FilesystemUsage {
                    fs_id: Some(cri::FilesystemIdentifier { mountpoint: mountpoint.clone() }),
                    ..Default::default()
                }],
                ..Default::default()
            }),
            "PodSandboxStatus" => say(&cri::PodSandboxStatusResponse {
                info: [("info".to_owned(), r#"{"image": "registry/pause:3"}"#.to_owned())].into(),
                ..Default::default()
            }),
            _ => Err(Status::unimplemented(method.to_owned())),
        }
    }));
    let volume = root.join("volume");
    write(&volume, &[("file", "content")]);
    let stats = Stats::new(StatsSource {
        node_name: "node".to_owned(),
        layout: layout(&root, kind),
        proc: proc(&root, kind),
        system: Vec::new(),
        folders: Folders { root: root.clone(), pod_logs: root.join("logs") },
        volume_period: Some(Duration::from_secs(60)),
        runtime: Runtime::with_connector(
            "unix:///test.sock",
            move || socket.clone().connect(),
            RuntimeOptions::default(),
        ),
        snapshots: Arc::new(Pods(volume)),
        ooms: OomCounts::default(),
    });
    Node { stats, asked, _dir: dir }
}

#[tokio::test]
async fn dashboards_find_their_series_of_containers() {
    for kind in [Kind::V1, Kind::Hybrid, Kind::V2] {
        let node = node(kind);
        let scrape = node.stats.cadvisor_metrics().await;
        let mut page = Vec::new();
        scrape.write_text(&mut page).unwrap();
        let page = String::from_utf8(page).unwrap();
        let found = samples(&page);
        let main = [("container", "main"), ("pod", "pod"), ("namespace", "ns")];
        for (name, labels) in OF_CONTAINERS {
            // The device of the fixture exists on few machines: its label has a value there only.
            let labels: Vec<&str> = labels.iter().copied().filter(|label| *label != "device").collect();
            assert!(has(&found, name, &main, &labels), "{kind:?}: {name} {labels:?} is missing in\n{page}");
        }
        let sandbox = [("container", ""), ("pod", "pod"), ("namespace", "ns"), ("interface", "eth0")];
        for name in OF_NETWORKS {
            assert!(has(&found, name, &sandbox, &["id", "image"]), "{kind:?}: {name} is missing in\n{page}");
        }
        assert!(!page.contains("interface=\"lo\""), "{page}");
        let root = [("id", "/"), ("pod", "")];
        for name in OF_FILE_SYSTEMS {
            assert!(has(&found, name, &root, &["device"]), "{kind:?}: {name} is missing in\n{page}");
        }
        for name in OF_PRESSURE {
            assert!(has(&found, name, &root, &[]), "{kind:?}: {name} of the node is missing in\n{page}");
            for (level, labels) in [("pod", [("container", ""), ("pod", "pod")]), ("container", [main[0], main[1]])] {
                let expected = kind == Kind::V2;
                assert_eq!(has(&found, name, &labels, &[]), expected, "{kind:?}: {name} of the {level} in\n{page}");
            }
        }
        drop(node.stats.cadvisor_metrics().await);
        assert_eq!(*node.asked.lock().unwrap(), ["PodSandboxStatus"], "{kind:?}: for the image of sandboxes, once");
    }
}

#[tokio::test]
async fn metrics_server_finds_its_series() {
    for kind in [Kind::V1, Kind::Hybrid, Kind::V2] {
        let node = node(kind);
        let page = String::from_utf8(encode_text(&node.stats.resource_metrics().await).unwrap()).unwrap();
        let found = samples(&page);
        for name in OF_RESOURCES {
            assert!(has(&found, name, &[], &[]), "{kind:?}: {name} is missing in\n{page}");
        }
        let main = [("container", "main"), ("pod", "pod"), ("namespace", "ns")];
        assert!(has(&found, "container_cpu_usage_seconds_total", &main, &[]), "{page}");
        // metrics-server drops a pod of which one container has no memory or no CPU time.
        let zero = page.lines().any(|line| line.starts_with("container_") && line.contains("} 0 "));
        assert!(!zero, "{page}");
    }
}

#[tokio::test]
async fn the_summary_has_volumes_pressure_and_processes() {
    for kind in [Kind::V1, Kind::Hybrid, Kind::V2] {
        let node = node(kind);
        let summary: Value = serde_json::from_slice(&node.stats.summary(false).await.unwrap().json().unwrap()).unwrap();
        let (machine, pod) = (&summary["node"], &summary["pods"][0]);
        assert_eq!(machine["memory"]["psi"]["full"]["total"], 1_000_000, "{kind:?}: {machine}");
        assert_eq!(machine["rlimit"]["curproc"], 345);
        assert_eq!(machine["swap"]["swapUsageBytes"], 10 * 1024);
        assert_eq!(pod["network"]["name"], "eth0");
        assert_eq!(pod["process_stats"]["process_count"], 1);
        let expected = if kind == Kind::V2 { 2_000_000 } else { 0 };
        assert_eq!(pod["cpu"]["psi"]["some"]["total"], expected, "{kind:?}");
        assert_eq!(pod["containers"][0]["io"]["psi"]["some"]["total"], expected, "{kind:?}");
        assert_eq!(pod["containers"][0]["memory"]["workingSetBytes"], 600_000);
        let volumes = pod["volume"].as_array().expect("volumes");
        let names: Vec<_> = volumes.iter().map(|volume| volume["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["scratch", "data"]);
        assert_eq!(volumes[1]["pvcRef"], serde_json::json!({"name": "claim", "namespace": "ns"}));
        assert_eq!(volumes[0]["inodesUsed"], 2, "the folder and its file");
        assert!(volumes[0]["capacityBytes"].as_u64() > Some(0));
        let storage = &pod["ephemeral-storage"];
        assert_eq!(storage["usedBytes"], volumes[0]["usedBytes"], "the volume of the claim does not count");
        let claims = node.stats.claims().await;
        let [claim] = &claims[..] else { panic!("{claims:?}") };
        assert_eq!((claim.namespace.as_str(), claim.name.as_str()), ("ns", "claim"));
        let DiskUsage { inodes, inodes_free, inodes_used, .. } = claim.usage;
        assert_eq!(inodes_used + inodes_free, inodes, "of its file system, not of the files that were counted");
        assert_eq!(volumes[1]["usedBytes"], claim.usage.used);
    }
}

/// In real time, as a call that hangs stops a paused clock. A pipe is opened for reading when it is opened for writing.
#[test]
fn a_request_that_hangs_keeps_one_thread() {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().max_blocking_threads(2).build().unwrap();
    runtime.block_on(async {
        for is_summary in [false, true] {
            let node = node(Kind::V2);
            let file = node._dir.path().join("proc/self/net/dev");
            fs::remove_file(&file).unwrap();
            mkfifo(&file, Mode::S_IRWXU).unwrap();
            let first = tokio::spawn(ask(node.stats.clone(), is_summary));
            let mut options = fs::File::options();
            options.write(true).custom_flags(libc::O_NONBLOCK);
            let _writer = loop {
                match options.open(&file) {
                    Ok(writer) => break writer,
                    Err(_) => tokio::task::yield_now().await,
                }
            };
            first.abort();
            let second = tokio::time::timeout(Duration::from_millis(500), ask(node.stats.clone(), is_summary)).await;
            assert!(second.is_err(), "it waits for the first one");
            let other = tokio::time::timeout(Duration::from_secs(20), tokio::task::spawn_blocking(|| ())).await;
            assert!(other.is_ok(), "summary: {is_summary}");
        }
    });
}

async fn ask(stats: Stats, is_summary: bool) {
    if is_summary {
        drop(stats.summary(false).await);
    } else {
        drop(stats.cadvisor_metrics().await);
    }
}
