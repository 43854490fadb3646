//! The manager on this machine's v1 hierarchies (as root, in a subtree of its own), and on a fixture of v2.

mod counts;
mod slices;
mod suspension;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::Mutex;

use tracing::Level;

use super::files;
use super::layout::below;
use super::*;
use crate::model::QosClass;
use crate::model::testing::LogCount;

fn detected() -> Layout {
    Hierarchies::detect().expect("the machine has cgroups").layout
}

/// Requests of Burstable pods that the test sets.
#[derive(Debug)]
struct Requests(Mutex<Requested>);

impl Requests {
    fn new(milli_cpu: i64, is_complete: bool) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Requested { burstable_milli_cpu: milli_cpu, is_complete, ..Requested::default() })))
    }

    fn set(&self, milli_cpu: i64) {
        let requested = Requested { burstable_milli_cpu: milli_cpu, is_complete: true, ..Requested::default() };
        *self.0.lock().expect("unpoisoned") = requested;
    }
}

impl PodRequests for Requests {
    fn requested(&self) -> Requested {
        *self.0.lock().expect("unpoisoned")
    }
}

fn values() -> CgroupValues {
    CgroupValues {
        cpu_shares: 1024,
        cpu_max: Some((50_500, 100_000)),
        memory_max: Some(64 << 20),
        pids: Some(100),
        ..CgroupValues::default()
    }
}

/// A subtree of the machine's v1 hierarchies, removed when dropped.
struct OwnSubtree {
    layout: Layout,
    root: CgroupName,
}

impl OwnSubtree {
    /// `None` without root or on cgroup v2.
    fn make(name: &str) -> Option<Self> {
        let layout = detected();
        if layout.is_v2() || !nix::unistd::geteuid().is_root() {
            keblet_skip::skip("needs root and cgroup v1");
            return None;
        }
        let root = CgroupName::parse(&format!("keblet-test-{name}-{}", std::process::id())).expect("a name");
        files::create(&layout, &root.path(Driver::Cgroupfs)).expect("root may make cgroups");
        Some(Self { layout, root })
    }

    fn read(&self, controller: &str, path: &str, file: &str) -> String {
        let mount = self.layout.mount_of(controller).expect("the controller is mounted");
        std::fs::read_to_string(below(mount, path).join(file)).expect("the file").trim().to_owned()
    }
}

impl Drop for OwnSubtree {
    fn drop(&mut self) {
        if let Err(error) = files::remove(&self.layout, &self.root.path(Driver::Cgroupfs)) {
            eprintln!("left behind: {error}");
        }
    }
}

#[tokio::test]
async fn creates_limits_and_destroys_a_pod_cgroup_on_v1() {
    let Some(own) = OwnSubtree::make("life") else { return };
    let requests = Requests::new(1500, true);
    let cgroups = Cgroups::new(own.layout.clone(), Driver::Cgroupfs, own.root.clone()).expect("cgroupfs");
    let cgroups = cgroups.with_requests(requests.clone(), QosPolicy::default());
    cgroups.ensure_tree().await.expect("the tree");
    assert!(!cgroups.pod_exists(QosClass::Burstable, "u-1"));
    cgroups.ensure_pod(QosClass::Burstable, "u-1", &values()).await.expect("a pod");
    assert!(cgroups.pod_exists(QosClass::Burstable, "u-1"));
    let path = cgroups.parent_for_runtime(QosClass::Burstable, "u-1").expect("a path");
    assert!(path.ends_with("/kubepods/burstable/podu-1"), "{path}");
    assert_eq!(own.read("cpu", &path, "cpu.shares"), "1024");
    assert_eq!(own.read("cpu", &path, "cpu.cfs_quota_us"), "50500");
    assert_eq!(own.read("memory", &path, "memory.limit_in_bytes"), (64u64 << 20).to_string());
    assert_eq!(own.read("pids", &path, "pids.max"), "100");
    assert!(!own.read("cpuset", &path, "cpuset.cpus").is_empty());
    let class = own.root.class(QosClass::Burstable).path(Driver::Cgroupfs);
    assert_eq!(own.read("cpu", &class, "cpu.shares"), "1536");

    // An existing cgroup is not changed.
    let other = CgroupValues { cpu_shares: 7, ..values() };
    cgroups.ensure_pod(QosClass::Burstable, "u-1", &other).await.expect("it exists");
    assert_eq!(own.read("cpu", &path, "cpu.shares"), "1024");
    assert_eq!(cgroups.pods(), BTreeMap::from([("u-1".to_owned(), QosClass::Burstable)]));

    let mut child = Command::new("sleep").arg("600").spawn().expect("a process");
    for mount in own.layout.mounts() {
        let nested = below(mount, &path).join("container");
        std::fs::create_dir(&nested).expect("a container's cgroup");
        let cpuset =
            |file: &str, from: &Path| std::fs::read_to_string(from.join(file)).map(|text| (file.to_owned(), text));
        for (file, text) in
            ["cpuset.cpus", "cpuset.mems"].iter().filter_map(|file| cpuset(file, &below(mount, &path)).ok())
        {
            std::fs::write(nested.join(file), text).expect("a cpuset");
        }
        std::fs::write(nested.join("cgroup.procs"), child.id().to_string()).expect("the process moves");
    }
    requests.set(0);
    cgroups.destroy_pod(QosClass::Burstable, "u-1").await.expect("gone");
    let status = child.wait().expect("its end");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    assert!(cgroups.pods().is_empty());
    assert_eq!(own.read("cpu", &class, "cpu.shares"), "2");
    cgroups.destroy_tree().await.expect("gone");
    for mount in own.layout.mounts() {
        assert_eq!(files::subdirs(&below(mount, &own.root.path(Driver::Cgroupfs))), Vec::<String>::new());
    }
}

/// The kernel rounds what it is given; a value that it has rounded is not another one.
#[tokio::test]
async fn values_that_v1_has_accepted_are_not_written_again() {
    let Some(own) = OwnSubtree::make("same") else { return };
    let cgroups = Cgroups::new(own.layout.clone(), Driver::Cgroupfs, own.root.clone()).expect("cgroupfs");
    let pages = |bytes| std::path::Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").exists().then_some(bytes);
    let limits = CgroupValues {
        memory_max: Some((64 << 20) + 5000),
        memory_min: Some(1 << 20),
        hugepages: pages(UNLIMITED).map(|bytes| (2 << 20, bytes)).into_iter().collect(),
        ..values()
    };
    for (values, expected) in [(&limits, true), (&limits, false), (&values(), true), (&values(), false)] {
        let changed = cgroups.update_existing(&own.root, values).await.expect("accepted");
        assert_eq!(changed, expected, "{values:?}");
    }
    assert_eq!(
        own.read("memory", &own.root.path(Driver::Cgroupfs), "memory.limit_in_bytes"),
        (64u64 << 20).to_string()
    );
    let unlimited = CgroupValues { cpu_max: Some((-1, 100_000)), pids: Some(-1), ..CgroupValues::default() };
    assert!(cgroups.update_existing(&own.root, &unlimited).await.expect("accepted"));
    assert!(!cgroups.update_existing(&own.root, &unlimited).await.expect("read"));
}

#[tokio::test]
async fn a_v1_machine_without_the_memory_controller_has_no_tree() {
    let dir = tempfile::tempdir().expect("a folder");
    let controllers = ["cpu", "cpuacct", "cpuset"].map(|name| (name.to_owned(), dir.path().to_owned()));
    let layout = Layout::V1 { controllers: controllers.into(), unified: None };
    let cgroups = Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    let error = cgroups.ensure_tree().await.expect_err("no memory controller").to_string();
    assert_eq!(error, "system validation failed - Following Cgroup subsystem not mounted: [memory]");
}

#[test]
fn cpu_limits_need_the_files_of_quotas_on_v1() {
    let dir = tempfile::tempdir().expect("a folder");
    let mount = dir.path().to_owned();
    let layout = Layout::V1 { controllers: [("cpu".to_owned(), mount.clone())].into(), unified: None };
    for (file, expected) in [("cpu.shares", false), ("cpu.cfs_period_us", false), ("cpu.cfs_quota_us", true)] {
        std::fs::write(mount.join(file), "").expect("a file");
        assert_eq!(layout.limits_cpu(), expected, "with {file}");
    }
    assert!(Layout::V2 { mount }.limits_cpu());
}

#[tokio::test]
async fn a_missing_root_is_reported() {
    let layout = detected();
    let root = CgroupName::parse("/keblet-test-not-there").expect("a name");
    let cgroups = Cgroups::new(layout, Driver::Cgroupfs, root).expect("cgroupfs");
    let error = cgroups.ensure_tree().await.expect_err("no such root").to_string();
    assert!(error.starts_with("cgroup [\"keblet-test-not-there\"] has some missing "), "{error}");
}

/// The folder enables no controllers, as the kernel for a cgroup whose parent has processes.
#[tokio::test]
async fn a_tree_without_controllers_is_reported() {
    let fixture = V2Fixture::make();
    let cgroups = Cgroups::new(fixture.layout(), Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    for (level, name) in [("/kubepods", "\"kubepods\""), ("/kubepods/burstable", "\"kubepods\" \"burstable\"")] {
        let error = cgroups.ensure_tree().await.expect_err("no controllers").to_string();
        assert_eq!(error, format!("cgroup [{name}] has some missing controllers: cpu, cpuset, memory, pids"));
        fixture.settle(level);
    }
    files::create(&fixture.layout(), "/kubepods/besteffort").expect("a folder");
    fixture.settle("/kubepods/besteffort");
    cgroups.ensure_tree().await.expect("complete");
}

#[tokio::test]
async fn a_directory_that_cannot_be_created_fails_the_pod() {
    let dir = tempfile::tempdir().expect("a folder");
    std::fs::write(dir.path().join("cpu"), "").expect("a file where a folder should be");
    let controllers = BTreeMap::from([("cpu".to_owned(), dir.path().join("cpu"))]);
    let layout = Layout::V1 { controllers, unified: None };
    let cgroups = Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    let error = cgroups.ensure_pod(QosClass::BestEffort, "u", &values()).await.expect_err("refused").to_string();
    assert!(error.starts_with("cannot create ") && error.contains("/cpu/kubepods: Not a directory"), "{error}");
}

/// A folder that looks like a v2 hierarchy; `settle` adds the files that the kernel creates in new cgroups.
struct V2Fixture(tempfile::TempDir);

impl V2Fixture {
    const CONTROLLERS: &str = "cpuset cpu io memory pids\n";

    fn make() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::write(dir.path().join("cgroup.controllers"), Self::CONTROLLERS).expect("a file");
        Self(dir)
    }

    fn layout(&self) -> Layout {
        Layout::V2 { mount: self.0.path().to_owned() }
    }

    fn settle(&self, path: &str) {
        let mut dir = self.0.path().to_owned();
        for component in path.split('/').filter(|component| !component.is_empty()) {
            dir.push(component);
            std::fs::write(dir.join("cgroup.controllers"), Self::CONTROLLERS).expect("a file");
            for (file, default) in [
                ("cpu.max", "max 100000\n"),
                ("cpu.weight", "100\n"),
                ("cpuset.cpus", "\n"),
                ("memory.low", "0\n"),
                ("memory.max", "max\n"),
                ("memory.min", "0\n"),
                ("pids.max", "max\n"),
            ] {
                if !dir.join(file).exists() {
                    std::fs::write(dir.join(file), default).expect("a file");
                }
            }
        }
    }

    fn read(&self, path: &str) -> Option<String> {
        std::fs::read_to_string(self.0.path().join(path)).ok()
    }
}

#[tokio::test]
async fn writes_the_limits_of_a_pod_on_v2() {
    let fixture = V2Fixture::make();
    let path = "/kubepods/podu-1";
    files::create(&fixture.layout(), path).expect("folders");
    for level in ["", "kubepods/"] {
        let enabled = fixture.read(&format!("{level}cgroup.subtree_control"));
        assert_eq!(enabled.as_deref(), Some("+cpuset +cpu +io +memory +pids"), "{level}");
    }
    assert_eq!(fixture.read("kubepods/podu-1/cgroup.subtree_control"), None);
    assert_eq!(files::missing(&fixture.layout(), path), ["cpu", "cpuset", "memory", "pids"]);
    fixture.settle(path);
    let cgroups = Cgroups::new(fixture.layout(), Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    assert!(cgroups.pod_exists(QosClass::Guaranteed, "u-1"));
    let with_hugepages = CgroupValues { hugepages: [(2 << 20, 0)].into(), ..values() };
    cgroups.update_pod(QosClass::Guaranteed, "u-1", &with_hugepages).await.expect("values");
    let read = |file: &str| fixture.read(&format!("kubepods/podu-1/{file}"));
    assert_eq!(read("cpu.weight").as_deref(), Some("39"));
    assert_eq!(read("cpu.max").as_deref(), Some("50500 100000"));
    assert_eq!(read("memory.max").as_deref(), Some("67108864"));
    assert_eq!(read("pids.max").as_deref(), Some("100"));
    assert_eq!(read("hugetlb.2MB.max"), None, "the controller is not there");
}

#[tokio::test]
async fn each_write_of_limits_is_counted_also_one_that_fails_in_part() {
    let fixture = V2Fixture::make();
    files::create(&fixture.layout(), "/kubepods/podu-1").expect("folders");
    fixture.settle("/kubepods/podu-1");
    let writes = LimitWrites::default();
    let cgroups = Cgroups::new(fixture.layout(), Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    let cgroups = cgroups.with_limit_writes(writes.clone());
    cgroups.pod_changes(QosClass::Guaranteed, "u-1", &values()).await.expect("read");
    assert_eq!(writes.count(), 0, "values were only read");
    cgroups.update_pod(QosClass::Guaranteed, "u-1", &values()).await.expect("values");
    assert_eq!(writes.count(), 1);
    let refused = fixture.0.path().join("kubepods/podu-1/pids.max");
    std::fs::remove_file(&refused).expect("a file");
    std::fs::create_dir(&refused).expect("a folder that cannot be written");
    cgroups.update_pod(QosClass::Guaranteed, "u-1", &values()).await.expect_err("refused");
    assert_eq!(writes.count(), 2);
}

#[tokio::test]
async fn only_differing_values_are_written_on_v2() {
    let fixture = V2Fixture::make();
    files::create(&fixture.layout(), "/kubepods").expect("folders");
    let cgroups = Cgroups::new(fixture.layout(), Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    let kubepods = CgroupName::default().kubepods();
    let error = cgroups.update_existing(&kubepods, &values()).await.expect_err("no controllers").to_string();
    assert_eq!(error, "cgroup [\"kubepods\"] has some missing controllers: cpu, cpuset, memory, pids");
    fixture.settle("/kubepods");
    let limits = CgroupValues { memory_min: Some(4096), cpus: Some("0-1".to_owned()), ..values() };
    assert!(cgroups.update_existing(&kubepods, &limits).await.expect("accepted"));
    let read = |file: &str| fixture.read(&format!("kubepods/{file}")).map(|text| text.trim().to_owned());
    let now = ["cpu.weight", "cpu.max", "memory.max", "memory.min", "pids.max", "cpuset.cpus"].map(read);
    assert_eq!(now.map(Option::unwrap_or_default), ["39", "50500 100000", "67108864", "4096", "100", "0-1"]);
    assert!(!cgroups.update_existing(&kubepods, &limits).await.expect("read"));
}

#[tokio::test]
async fn the_memory_of_qos_classes_is_protected_and_only_raised_until_all_pods_are_known() {
    let fixture = V2Fixture::make();
    files::create(&fixture.layout(), "/kubepods/burstable").expect("folders");
    fixture.settle("/kubepods/burstable");
    let requests = Requests::new(100, false);
    let requested = |guaranteed_memory, burstable_memory, is_complete| {
        let all = Requested { burstable_milli_cpu: 100, guaranteed_memory, burstable_memory, is_complete };
        *requests.0.lock().expect("unpoisoned") = all;
    };
    let policy = QosPolicy { protects_memory: true, ..QosPolicy::default() };
    let cgroups = Cgroups::new(fixture.layout(), Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    let cgroups = cgroups.with_requests(requests.clone(), policy);
    let protected = || {
        let files = ["kubepods/memory.min", "kubepods/memory.low", "kubepods/burstable/memory.low"];
        files.map(|file| fixture.read(file).expect("a file").trim().to_owned())
    };
    requested(8192, 4096, false);
    assert!(!cgroups.update_qos_classes().await);
    assert_eq!(protected(), ["12288", "4096", "4096"]);
    requested(0, 8192, false);
    cgroups.update_qos_classes().await;
    assert_eq!(protected(), ["12288", "8192", "8192"], "only raised");
    requested(0, 4096, true);
    assert!(cgroups.update_qos_classes().await);
    assert_eq!(protected(), ["4096", "4096", "4096"]);
    cgroups.clear_memory_protection().await;
    assert_eq!(protected(), ["0", "0", "0"]);
}

/// They are written whenever a pod comes or goes, and every minute.
#[tokio::test]
async fn a_qos_class_that_cannot_be_written_is_logged_once() {
    let warned = LogCount::start("keblet::cgroups::qos", Level::WARN);
    let fixture = V2Fixture::make();
    files::create(&fixture.layout(), "/kubepods/burstable").expect("folders");
    fixture.settle("/kubepods/burstable");
    let cgroups = Cgroups::new(fixture.layout(), Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
    let cgroups = cgroups.with_requests(Requests::new(1500, true), QosPolicy::default());
    let file = fixture.0.path().join("kubepods/burstable/cpu.weight");
    for lines in [1, 2] {
        // A number that can be read, and that the kernel lets no user write.
        std::fs::remove_file(&file).expect("a file");
        std::os::unix::fs::symlink("/proc/sys/kernel/ngroups_max", &file).expect("a link");
        for _ in 0..5 {
            cgroups.update_qos_classes().await;
        }
        assert_eq!(warned.lines(), lines);
        std::fs::remove_file(&file).expect("a link");
        std::fs::write(&file, "100\n").expect("a file");
        cgroups.update_qos_classes().await;
    }
}

/// With requests kept in memory only, a restart after three pods of 1500m in total, followed by one more pod of 100m, would
/// leave the class with the weight of 100m.
#[tokio::test]
async fn the_burstable_weight_survives_a_restart_and_a_takeover() {
    let fixture = V2Fixture::make();
    let class = "kubepods/burstable";
    files::create(&fixture.layout(), class).expect("folders");
    fixture.settle(class);
    let weight = || fixture.read(&format!("{class}/cpu.weight")).map(|text| text.trim().to_owned());
    let started = |requests: &Arc<Requests>| {
        let cgroups = Cgroups::new(fixture.layout(), Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
        cgroups.with_requests(requests.clone(), QosPolicy::default())
    };
    let expected = |milli_cpu| Some(arithmetic::weight(arithmetic::shares(milli_cpu)).to_string());

    let first = started(&Requests::new(1500, true));
    first.ensure_pod(QosClass::Burstable, "u-1", &values()).await.expect("a pod");
    assert_eq!(weight(), expected(1500));

    // A new process that has one pod so far must not take the share of those that it does not have yet.
    let requests = Requests::new(100, false);
    let second = started(&requests);
    second.ensure_pod(QosClass::Burstable, "u-2", &values()).await.expect("a pod");
    assert_eq!(weight(), expected(1500));
    assert!(!second.update_qos_classes().await, "asked again until all sources are read");
    requests.set(1600);
    assert!(second.update_qos_classes().await);
    assert_eq!(weight(), expected(1600));

    // Pods that ended count no longer.
    requests.set(100);
    second.destroy_pod(QosClass::Burstable, "u-1").await.expect("gone");
    assert_eq!(weight(), expected(100));
}
