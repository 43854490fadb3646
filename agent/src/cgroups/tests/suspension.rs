//! The suspension of pods, on the machine's v2 hierarchy: its freezer needs no controllers.

use std::ffi::OsStr;
use std::io::BufRead as _;
use std::io::BufReader;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Child;
use std::process::Stdio;
use std::time::Duration;

use super::*;
use crate::cgroups::freezer;

const UID: &str = "u-1";
/// Ends with 7 when it is to stop.
const SCRIPT: &str = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done";
const HOUR: Duration = Duration::from_secs(3600);

/// A pod with one process, in an own subtree of the machine's v2 hierarchy, which may be mounted beside those of v1.
struct RunningPod {
    own: OwnSubtree,
    cgroups: Cgroups,
    path: String,
    process: Child,
}

impl RunningPod {
    /// `None` without root or cgroup v2.
    fn make(name: &str) -> Option<Self> {
        let mut mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new).into_iter();
        let mount = mounts.find(|mount| mount.join("cgroup.controllers").exists() && nix::unistd::geteuid().is_root());
        let Some(mount) = mount else {
            keblet_skip::skip("needs root and cgroup v2");
            return None;
        };
        let root = CgroupName::parse(&format!("keblet-test-{name}-{}", std::process::id())).expect("a name");
        let own = OwnSubtree { layout: Layout::V2 { mount: mount.to_owned() }, root };
        let cgroups = Cgroups::new(own.layout.clone(), Driver::Cgroupfs, own.root.clone()).expect("cgroupfs");
        let path = cgroups.parent_for_runtime(QosClass::Burstable, UID).expect("a path");
        files::create(&own.layout, &path).expect("root may make cgroups");
        let mut process = Command::new("sh").args(["-c", SCRIPT]).stdout(Stdio::piped()).spawn().expect("a process");
        let mut ready = String::new();
        BufReader::new(process.stdout.take().expect("piped")).read_line(&mut ready).expect("a line");
        let pod = Self { own, cgroups, path, process };
        std::fs::write(below(mount, &pod.path).join("cgroup.procs"), pod.process.id().to_string()).expect("it moves");
        Some(pod)
    }

    fn suspend(&self, duration: Duration) {
        self.cgroups.suspend_pod(QosClass::Burstable, UID, duration);
    }

    async fn until_suspended(&self, is_suspended: bool) {
        let wanted = if is_suspended { "1" } else { "0" };
        let reached = async {
            while self.own.read("memory", &self.path, "cgroup.freeze") != wanted {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), reached).await.expect("reached");
    }
}

impl Drop for RunningPod {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        // Its last child ends by itself, and the cgroup can be removed.
        let deadline = std::time::Instant::now() + Duration::from_secs(5);
        while !files::pids(&self.own.layout, &self.path).is_empty() && std::time::Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_suspended_for_a_while() {
    let Some(pod) = RunningPod::make("suspended") else { return };
    pod.suspend(Duration::from_secs(1));
    pod.until_suspended(true).await;
    pod.until_suspended(false).await;
}

#[tokio::test]
async fn a_suspended_pod_is_resumed_when_it_is_to_stop() {
    let Some(mut pod) = RunningPod::make("stopped") else { return };
    pod.suspend(HOUR);
    pod.until_suspended(true).await;
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pod.process.id()).expect("a pid"));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("it exists");
    pod.until_suspended(false).await;
    assert_eq!(pod.process.wait().expect("its end").code(), Some(7), "by itself");
}

#[tokio::test]
async fn a_suspended_pod_can_be_killed() {
    let Some(mut pod) = RunningPod::make("killed") else { return };
    pod.suspend(HOUR);
    pod.until_suspended(true).await;
    assert!(pod.cgroups.kill_pod(QosClass::Burstable, UID).await.expect("killed"));
    assert_eq!(pod.process.wait().expect("its end").signal(), Some(9));
    assert!(!pod.cgroups.kill_pod(QosClass::Burstable, UID).await.expect("nothing is left"));
}

#[test]
fn of_many_suspended_processes_the_first_of_each_container_are_checked() {
    let mount = tempfile::tempdir().expect("a folder");
    // More than the kernel ever has.
    let pids: String = (5_000_000..5_010_000).map(|pid| format!("{pid}\n")).collect();
    for (container, pids) in [("a", pids.as_str()), ("b", "6000000\n")] {
        let cgroup = mount.path().join("pod").join(container);
        std::fs::create_dir_all(&cgroup).expect("a folder");
        std::fs::write(cgroup.join("cgroup.procs"), pids).expect("a file");
    }
    let layout = Layout::V2 { mount: mount.path().to_owned() };
    let mut asked = Vec::new();
    let is_found = freezer::is_any(&layout, "/pod", |pid| {
        asked.push(pid);
        false
    });
    assert!(!is_found);
    asked.sort_unstable();
    assert_eq!((asked.len(), asked[0], asked[1023], asked[1024]), (1025, 5_000_000, 5_001_023, 6_000_000));
    assert_eq!(files::pids(&layout, "/pod").len(), 10_001, "all are to be killed");
}

#[test]
fn cgroups_that_a_container_has_named_are_found_and_removed() {
    let mount = tempfile::tempdir().expect("a folder");
    let cgroup = mount.path().join("pod/a").join(OsStr::from_bytes(b"\xff"));
    std::fs::create_dir_all(&cgroup).expect("folders");
    std::fs::write(cgroup.join("cgroup.procs"), "6000000\n").expect("a file");
    let layout = Layout::V2 { mount: mount.path().to_owned() };
    let found: Vec<i32> = files::pids(&layout, "/pod").into_iter().collect();
    assert_eq!(found, [6_000_000], "it is to be killed");
    // Files of the kernel do not keep a cgroup.
    std::fs::remove_file(cgroup.join("cgroup.procs")).expect("removed");
    files::remove(&layout, "/pod").expect("removed");
    assert!(!mount.path().join("pod").exists());
}

#[test]
fn no_pod_is_suspended_after_the_end_of_the_agent_has_resumed_all() {
    // One thread for file calls, which it makes in the order of their requests.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().max_blocking_threads(1).build();
    runtime.expect("a runtime").block_on(async {
        let mount = tempfile::tempdir().expect("a folder");
        let layout = Layout::V2 { mount: mount.path().to_owned() };
        let cgroups = Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
        let path = cgroups.parent_for_runtime(QosClass::Burstable, UID).expect("a path");
        let file = below(mount.path(), &path).join("cgroup.freeze");
        std::fs::create_dir_all(file.parent().expect("a folder")).expect("folders");
        std::fs::write(&file, "0").expect("a file");
        // The request to suspend it comes when suspended pods are looked for already.
        cgroups.suspend_pod(QosClass::Burstable, UID, HOUR);
        cgroups.resume_pods().await;
        tokio::task::spawn_blocking(|| ()).await.expect("all requests were carried out");
        assert_eq!(std::fs::read_to_string(&file).expect("a file"), "0");
    });
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_an_agent_left_suspended_is_resumed() {
    let Some(pod) = RunningPod::make("resumed") else { return };
    pod.suspend(HOUR);
    pod.until_suspended(true).await;
    Cgroups::resume_pods_of_any_driver(&pod.own.layout, &pod.own.root).await;
    pod.until_suspended(false).await;
}
