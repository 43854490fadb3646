use tokio::time::Instant;

use super::super::open_cgroups::OpenCgroups;
use super::super::sample::tests::sample;
use super::*;
use crate::cgroups::usage::CgroupLimits;
use crate::cgroups::usage::DiskTraffic;
use crate::cgroups::usage::FileCounters;
use crate::cgroups::usage::MemoryDetail;
use crate::cgroups::usage::MemoryUsage;
use crate::cgroups::usage::ReclaimCounters;
use crate::cgroups::usage::Throttling;
use crate::metrics::encode_text;
use crate::model::KernelMoment;
use crate::model::OomConfidence;
use crate::model::OomContainer;
use crate::model::OomRecord;
use crate::model::OomScope;
use crate::model::OomTime;
use crate::model::OomVerdict;
use crate::oom::OomReporter;
use crate::oom::verdict::decide;
use crate::stats::filesystems::Traffic;

/// As families; the text that is written directly has the same samples.
fn text(scrape: &Scrape) -> String {
    let families: Vec<MetricFamily> = scrape.families().collect();
    let encoded = String::from_utf8(encode_text(&families).unwrap()).unwrap();
    let mut direct = Vec::new();
    scrape.write_text(&mut direct).unwrap();
    let direct = String::from_utf8(direct).unwrap();
    let samples = |text: &str| text.lines().map(with_sorted_labels).collect::<Vec<_>>();
    assert_eq!(samples(&direct), samples(&encoded));
    encoded
}

/// No label of these tests has a comma or a brace in it.
fn with_sorted_labels(line: &str) -> String {
    let Some((name, (labels, value))) = line.split_once('{').and_then(|(n, rest)| Some((n, rest.split_once('}')?)))
    else {
        return line.to_owned();
    };
    let mut labels: Vec<&str> = labels.split(',').collect();
    labels.sort_unstable();
    format!("{name}{{{}}}{value}", labels.join(","))
}

/// A cgroup v2 hierarchy with one pod of one container.
fn scrape(with_sandbox: bool) -> (tempfile::TempDir, Scrape) {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::V2 { mount: dir.path().to_owned() };
    let container = dir.path().join("kubepods/poduid/main-0");
    std::fs::create_dir_all(&container).unwrap();
    std::fs::write(container.join("cpu.stat"), "usage_usec 5\nuser_usec 3000000\n").unwrap();
    std::fs::write(container.join("memory.current"), "600\n").unwrap();
    std::fs::write(container.join("memory.stat"), "pgscan 21\npgsteal 20\n").unwrap();
    std::fs::write(container.join("memory.events"), "high 4\nmax 3\n").unwrap();
    std::fs::write(container.join("cgroup.procs"), format!("{}\n", std::process::id())).unwrap();
    std::fs::write(container.join("io.stat"), "7:200 rbytes=512 wbytes=0 rios=1 wios=0\n").unwrap();
    if with_sandbox {
        std::fs::create_dir_all(dir.path().join("kubepods/poduid/sandbox-0")).unwrap();
    }
    let mut sample = sample(Instant::now(), 2_500_000_000);
    sample.node.path = Some("/".to_owned());
    let pod = &mut sample.pods[0];
    pod.network_of = Some(std::process::id());
    pod.own.as_mut().unwrap().path = Some("/kubepods/poduid".to_owned());
    pod.containers[0].measured.path = Some("/kubepods/poduid/main-0".to_owned());
    pod.containers[0].init = Some(std::process::id());
    pod.containers[0].measured.usage.counters = CgroupPlace::at(&layout, "/kubepods/poduid/main-0").read().counters;
    let ooms = OomCounts::default();
    let reader = Reader::new(&layout, Path::new("/proc"), "registry/pause:3", &ooms, 0);
    let scrape = take(&reader, Vec::new(), &sample, &mut Descriptors::default());
    (dir, scrape)
}

#[tokio::test]
async fn labels_values_and_times_of_a_container() {
    let (_dir, scrape) = scrape(false);
    let text = text(&scrape);
    let labels = |more: &str| {
        let id = r#"id="/kubepods/poduid/main-0",image="registry/main:1""#;
        format!(r#"{{container="main",{more}{id},name="main-0",namespace="ns",pod="pod"}} "#)
    };
    let at = 1_767_225_700_500_u64;
    let booted = Machine::boot_time(Path::new("/proc")).unwrap();
    for line in [
        format!("container_cpu_usage_seconds_total{}2.5 {at}", labels(r#"cpu="total","#)),
        format!("container_cpu_user_seconds_total{}3 {at}", labels("")),
        format!("container_memory_working_set_bytes{}600 {at}", labels("")),
        format!("container_spec_memory_limit_bytes{}1000 {at}", labels("")),
        format!("container_memory_swap{}7 {at}", labels("")),
        format!("container_memory_pgscan_total{}21 {at}", labels("")),
        format!("container_memory_events_high_total{}4 {at}", labels("")),
        format!("container_memory_events_max_total{}3 {at}", labels("")),
        format!("container_creation_time_seconds{}1767225600 {at}", labels("")),
        format!("container_start_time_seconds{}1767225600 {at}", labels("")),
        format!("container_last_seen{}1767225700 {at}", labels("")),
        format!("container_fs_reads_bytes_total{}512 {at}", labels(r#"device="","#)),
        format!("container_threads{}3 {at}", labels("")),
        r#"container_memory_working_set_bytes{container="",id="/",image="",name="",namespace="",pod=""} 600 "#.to_owned()
            + &at.to_string(),
        r#"container_memory_working_set_bytes{container="",id="/kubepods/poduid",image="",name="",namespace="ns",pod="pod"} "#
            .to_owned()
            + &format!("600 {at}"),
        format!(
            r#"container_start_time_seconds{{container="",id="/",image="",name="",namespace="",pod=""}} {booted} {at}"#
        ),
        "container_scrape_error 0".to_owned(),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
    for (name, labels) in [
        ("container_file_descriptors", labels("")),
        ("container_sockets", labels("")),
        ("container_processes", labels("")),
        ("container_ulimits_soft", labels("").replace("pod=\"pod\"}", "pod=\"pod\",ulimit=\"max_open_files\"}")),
    ] {
        assert!(
            text.lines().any(|found| found.starts_with(&format!("{name}{labels}"))),
            "{name} is missing in\n{text}"
        );
    }
    let of_root = r#",id="/",image="",name="",namespace="",pod=""}"#;
    let sizes = text.lines().filter(|line| line.starts_with("container_fs_limit_bytes{"));
    assert!(sizes.clone().all(|line| line.contains(of_root) && line.contains(r#"device="/dev/"#)), "{text}");
    assert!(!text.contains("cfs_throttled"), "no quota, no throttling");
    assert!(!text.contains(r#"name="sandbox-0""#), "a sandbox without a cgroup has no row");
}

#[tokio::test]
async fn the_network_belongs_to_the_sandbox() {
    let (_dir, scrape) = scrape(true);
    let of_pod: Vec<&Row> = scrape.rows.iter().filter(|row| row.name == "sandbox-0").collect();
    let [row] = of_pod[..] else { panic!("one sandbox") };
    assert_eq!((row.id.as_str(), row.container.as_str()), ("/kubepods/poduid/sandbox-0", ""));
    assert_eq!(row.image, "registry/pause:3", "that of the sandbox");
    assert_eq!(row.interfaces, interfaces_of(Path::new("/proc/self")).unwrap());
    let containers = scrape.rows.iter().filter(|row| !row.container.is_empty());
    assert!(containers.map(|row| row.interfaces.len()).all(|count| count == 0));
}

#[tokio::test]
async fn containers_and_sandboxes_of_crio_have_the_names_that_it_gives() {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::V2 { mount: dir.path().to_owned() };
    let containerd = (["main", "main-0"], ["", "sandbox-0"]);
    let crio = (["main", "k8s_main_pod_ns_uid_2"], ["POD", "k8s_POD_pod_ns_uid_1"]);
    for (path, of_sandbox, (main, sandbox)) in [
        ("/kubepods/poduid/main-0", "sandbox-0", containerd),
        ("/kubepods.slice/poduid.slice/cri-containerd-main-0.scope", "cri-containerd-sandbox-0.scope", containerd),
        ("/kubepods/poduid/crio-main-0", "crio-sandbox-0", crio),
        ("/kubepods.slice/a/crio-main-0.scope", "crio-sandbox-0.scope", crio),
        ("/kubepods.slice/b/crio-main-0.scope", "crio-sandbox-0", crio),
    ] {
        let of_sandbox = format!("{}/{of_sandbox}", path.rsplit_once('/').unwrap().0);
        for path in [path, of_sandbox.as_str()] {
            std::fs::create_dir_all(dir.path().join(path.trim_start_matches('/'))).unwrap();
        }
        let processes = dir.path().join(path.trim_start_matches('/')).join("cgroup.procs");
        std::fs::write(processes, format!("{}\n", std::process::id())).unwrap();
        let mut sample = sample(Instant::now(), 1);
        let pod = &mut sample.pods[0];
        (pod.network_of, pod.sandbox_attempt) = (Some(std::process::id()), 1);
        let container = &mut pod.containers[0];
        (container.attempt, container.init) = (2, Some(std::process::id()));
        container.measured.path = Some(path.to_owned());
        let scrape = take_new(&layout, &sample, &OomCounts::default());
        let row = |id: &str| scrape.rows.iter().find(|row| row.id == id).unwrap();
        for (id, labels) in [(path, main), (of_sandbox.as_str(), sandbox)] {
            assert_eq!([row(id).container.as_str(), row(id).name.as_str()], labels, "{id}");
        }
        assert!(row(path).open.is_some() && row(&of_sandbox).open.is_none(), "open files of {path}");
    }
}

#[tokio::test]
async fn usage_by_the_runtime_has_no_cgroup() {
    let mut sample = sample(Instant::now(), 1_000_000_000);
    sample.pods[0].own = None;
    let layout = Layout::V2 { mount: "/no/such/mount".into() };
    let text = text(&take_new(&layout, &sample, &OomCounts::default()));
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("container_cpu_usage")).collect();
    let labels = r#"container="main",cpu="total",id="",image="registry/main:1",name="main-0",namespace="ns",pod="pod""#;
    assert_eq!(lines, [format!("container_cpu_usage_seconds_total{{{labels}}} 1 1767225700500")]);
    sample.pods[0].containers[0].measured.usage = CgroupUsage::default();
    assert!(take_new(&layout, &sample, &OomCounts::default()).rows.is_empty(), "not measured");
}

#[tokio::test]
async fn a_cgroup_with_several_names_has_one_row() {
    let mut sample = sample(Instant::now(), 1);
    let usage = sample.node.usage;
    sample.node.path = Some("/".to_owned());
    let named = [("kubelet", "/agent"), ("misc", "/agent"), ("runtime", "/")];
    sample.system = named.map(|(name, path)| (name, Measured::new(name, usage).at(Some(path.to_owned())))).into();
    let scrape = take_new(&Layout::V2 { mount: "/no/such/mount".into() }, &sample, &OomCounts::default());
    let of_node = scrape.rows.iter().filter(|row| row.namespace.is_empty()).map(|row| row.id.as_str());
    assert_eq!(of_node.collect::<Vec<_>>(), ["/", "/agent"]);
}

/// Dashboards of what is allocatable use them.
#[tokio::test]
async fn the_cgroup_of_all_pods_and_those_of_their_classes_have_rows() {
    let (dir, _) = scrape(false);
    let burstable = dir.path().join("kubepods/burstable");
    std::fs::create_dir_all(&burstable).unwrap();
    std::fs::write(burstable.join("cpu.stat"), "usage_usec 4000000\n").unwrap();
    std::fs::write(burstable.join("memory.current"), "70\n").unwrap();
    let mut sample = sample(Instant::now(), 1);
    sample.system[0].1.path = Some("/kubepods".to_owned());
    let scrape = take_new(&Layout::V2 { mount: dir.path().to_owned() }, &sample, &OomCounts::default());
    let text = text(&scrape);
    for id in ["/kubepods", "/kubepods/burstable"] {
        let labels = format!(r#"container="",cpu="total",id="{id}",image="",name="",namespace="",pod="""#);
        assert!(text.contains(&format!("container_cpu_usage_seconds_total{{{labels}}}")), "{id} is missing in\n{text}");
    }
    let labels = r#"{container="",id="/kubepods/burstable",image="",name="",namespace="",pod=""}"#;
    assert!(text.contains(&format!("container_memory_usage_bytes{labels} 70 ")), "{text}");
    assert!(!text.contains("besteffort"), "it has no cgroup");
}

#[tokio::test]
async fn a_container_that_has_divided_its_cgroup_has_the_processes_below() {
    let (dir, _) = scrape(false);
    let container = dir.path().join("kubepods/poduid/main-0");
    std::fs::create_dir_all(container.join("init")).unwrap();
    std::fs::write(container.join("cgroup.procs"), "").unwrap();
    std::fs::write(container.join("init/cgroup.procs"), "7\n8\n").unwrap();
    let mut sample = sample(Instant::now(), 1);
    sample.pods[0].containers[0].measured.path = Some("/kubepods/poduid/main-0".to_owned());
    let scrape = take_new(&Layout::V2 { mount: dir.path().to_owned() }, &sample, &OomCounts::default());
    let row = scrape.rows.iter().find(|row| row.container == "main").unwrap();
    assert_eq!(row.detail.processes, Some(vec![7, 8]));
}

fn take_new(layout: &Layout, sample: &Sample, ooms: &OomCounts) -> Scrape {
    take(&Reader::new(layout, Path::new("/proc"), "", ooms, 0), Vec::new(), sample, &mut Descriptors::default())
}

#[tokio::test]
async fn limits_of_a_pods_cgroup_are_read_again_after_the_agent_has_written_some() {
    let (dir, _) = scrape(false);
    let (layout, ooms) = (Layout::V2 { mount: dir.path().to_owned() }, OomCounts::default());
    let limit = |most: u64| std::fs::write(dir.path().join("kubepods/poduid/pids.max"), most.to_string()).unwrap();
    limit(1);
    std::fs::write(dir.path().join("kubepods/poduid/memory.current"), "600\n").unwrap();
    let mut sample = sample(Instant::now(), 1);
    sample.pods[0].own = OpenCgroups::of(None).find(&layout, "0::/kubepods/poduid\n", "uid");
    let most = |writes: u64| {
        let reader = Reader::new(&layout, Path::new("/proc"), "", &ooms, writes);
        let scrape = take(&reader, Vec::new(), &sample, &mut Descriptors::default());
        scrape.rows.iter().find(|row| row.id == "/kubepods/poduid").unwrap().detail.limits.tasks_max
    };
    assert_eq!(most(0), Some(1));
    limit(2);
    assert_eq!((most(0), most(1)), (Some(1), Some(2)));
}

/// Verdicts on kills in an earlier instance, a gone container and on the node.
#[tokio::test]
async fn oom_events_outlive_the_cgroup() {
    let reporter = OomReporter::default();
    let report = |container: &str, id: &str, scope| {
        let record = OomRecord::new(OomConfidence::Kernel, KernelMoment(Instant::now()));
        reporter.report(OomVerdict {
            pod: Some(PodRef { uid: "uid".into(), namespace: "ns".into(), name: "pod".into() }),
            container: Some(OomContainer { id: id.into(), name: container.to_owned() }),
            scope,
            ..decide(&record, None, false, OomTime(0))
        });
    };
    report("main", "earlier", OomScope::Container);
    report("main", "earlier", OomScope::Container);
    report("gone", "gone-0", OomScope::Pod);
    report("gone", "gone-0", OomScope::Node);

    let (dir, _) = scrape(false);
    let layout = Layout::V2 { mount: dir.path().to_owned() };
    let events = dir.path().join("kubepods/poduid/main-0/memory.events");
    std::fs::write(&events, "oom 3\noom_kill 3\n").unwrap();
    std::fs::write(events.with_file_name("memory.stat"), "anon 1\nfile 1\n").unwrap();
    let mut sample = sample(Instant::now(), 1_000_000_000);
    sample.node.path = Some("/".to_owned());
    sample.pods[0].containers[0].measured.path = Some("/kubepods/poduid/main-0".to_owned());
    let text = text(&take_new(&layout, &sample, reporter.counts()));
    let value = |container: &str, id: &str, name: &str| {
        let begin = format!(r#"container_oom_events_total{{container="{container}",id="{id}","#);
        let line = text.lines().find(|line| line.starts_with(&begin) && line.contains(&format!(r#",name="{name}","#)));
        line.unwrap_or_else(|| panic!("{begin} not in\n{text}")).split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(value("main", "/kubepods/poduid/main-0", "main-0"), "5", "two before, three by the cgroup's counter");
    assert_eq!(value("gone", "", "gone-0"), "1");
    assert_eq!(value("", "/", ""), "1");
    let of_gone: Vec<&str> = text.lines().filter(|line| line.contains(r#"container="gone""#)).collect();
    assert!(of_gone.iter().all(|line| line.starts_with("container_oom_events_total{")), "nothing else: {of_gone:?}");
}

#[test]
fn every_family_has_a_value_and_a_unique_name() {
    let row = Row {
        interfaces: vec![InterfaceUsage { name: "eth0".to_owned(), rx_packets: 4, ..InterfaceUsage::default() }],
        usage: CgroupUsage {
            cpu: Some(1),
            memory: Some(MemoryUsage::default()),
            tasks: Some(1),
            counters: FileCounters { reclaim: Some(ReclaimCounters::default()), ..FileCounters::default() },
            ..CgroupUsage::default()
        },
        detail: CgroupDetail {
            cpu_user: Some(1),
            cpu_system: Some(1),
            throttling: Some(Throttling { throttled: 1_500_000_000, ..Throttling::default() }),
            limits: CgroupLimits {
                cpu_shares: Some(1024),
                cpu_period: Some(100_000),
                cpu_quota: Some(50_000),
                memory_reservation: None,
                tasks_max: None,
            },
            memory: Some(MemoryDetail {
                kernel: Some(1),
                peak: Some(1),
                limit_hits: Some(1),
                high_hits: Some(1),
                oom_kills: Some(2),
            }),
            processes: Some(vec![1]),
            disks: vec![DiskTraffic { major: 8, minor: 1, ..DiskTraffic::default() }],
        },
        container: "main".to_owned(),
        file_systems: ["/dev/sda1", "/dev/sdb1"]
            .map(|device| FileSystem {
                device: device.to_owned(),
                traffic: Some(Traffic { reads: 7, ..Traffic::default() }),
                ..Default::default()
            })
            .into(),
        open: Some(OpenFiles { files: 3, sockets: 1, soft_limit: Some(1024) }),
        has_pressure: true,
        started_at: Some(0),
        ..Row::default()
    };
    let devices = [((8, 1), "/dev/sda1".to_owned())].into();
    let mut row = row;
    row.labels = row.base().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).join(",");
    let scrape = Scrape { rows: vec![row], at: Some(1_000_000), devices, ..Scrape::default() };
    let names: Vec<String> = scrape.families().map(|family| family.name().to_owned()).collect();
    let mut expected: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
    // The default usage has no swap.
    expected.retain(|name| *name != "container_memory_swap");
    assert!(expected.is_sorted());
    assert_eq!(names[1..names.len() - 1], expected);
    let text = text(&scrape);
    let base = r#"id="",image="""#;
    for line in [
        format!(
            r#"container_network_receive_packets_total{{container="main",{base},interface="eth0",name="",namespace="",pod=""}} 4 1"#
        ),
        format!(
            r#"container_cpu_cfs_throttled_seconds_total{{container="main",{base},name="",namespace="",pod=""}} 1.5 1"#
        ),
        format!(r#"container_oom_events_total{{container="main",{base},name="",namespace="",pod=""}} 2 1"#),
        format!(
            r#"container_fs_reads_total{{container="main",device="/dev/sda1",{base},name="",namespace="",pod=""}} 0 1"#
        ),
        format!(
            r#"container_fs_reads_total{{container="main",device="/dev/sdb1",{base},name="",namespace="",pod=""}} 7 1"#
        ),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
    assert_eq!(text.matches("container_fs_reads_total{").count(), 2, "each device once");
    assert!(
        text.contains(
            r#"device="/dev/sda1",id="",image="",major="8",minor="1",name="",namespace="",operation="Write""#
        )
    );
}

#[test]
fn the_name_of_the_distribution_is_that_of_the_node() {
    let dir = tempfile::tempdir().unwrap();
    let put = |file: &str, text: &str| {
        let file = dir.path().join(file);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    };
    assert_eq!(system(dir.path()), "Unknown");
    put("usr/lib/os-release", "NAME=\"Clear Linux OS\"\n");
    assert_eq!(system(dir.path()), "Linux");
    put("usr/lib/os-release", "NAME=\"Clear Linux OS\"\nPRETTY_NAME=\"Clear Linux OS\"\n");
    assert_eq!(system(dir.path()), "Clear Linux OS");
    put("etc/os-release", "PRETTY_NAME='Own'\n");
    assert_eq!(system(dir.path()), "Own");
}

#[test]
fn only_the_error_is_reported_after_a_failure() {
    let text = text(&Scrape::default());
    assert_eq!(text.lines().last(), Some("container_scrape_error 1"));
    assert_eq!(text.lines().filter(|line| !line.starts_with('#')).count(), 1);
}
