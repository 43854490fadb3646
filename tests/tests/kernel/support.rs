//! Cgroups, processes and loaded probes of one test, removed with it.

use std::fs;
use std::io::Read as _;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::time::Instant;

use keblet::cgroups::Hierarchy;
use keblet::cgroups::HierarchyKind;
use keblet::kernel::bpf;
use keblet::kernel::bpf::CgroupId;
use keblet::kernel::bpf::Exit;
use keblet::kernel::bpf::KernelRecord;
use keblet::kernel::bpf::Loaded;
use keblet::kernel::bpf::Options;
use keblet::kernel::bpf::ProbeOutput;
use keblet::kernel::bpf::Records;
use keblet_tests::observer;
use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;

/// Generous: everything here takes milliseconds, unless the machine is busy.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// The reason why this machine cannot run the tests, which then are skipped.
pub(crate) fn machine_lacks() -> Option<String> {
    let lack = observer::lacks_for_probes()?;
    keblet_skip::skip(&format!("this machine cannot run kernel tests: {lack}"));
    Some(lack)
}

/// Probes with default sizes; see [`load_with`].
pub(crate) async fn load(hierarchy: &Hierarchy) -> Loaded {
    load_with(Options::new(hierarchy.clone())).await
}

/// Probes with `options`; every one must be up.
pub(crate) async fn load_with(options: Options) -> Loaded {
    let loaded = bpf::load(options).await.expect("the probes load");
    for probe in &loaded.status {
        assert_eq!(probe.down, None, "{}", probe.program);
    }
    loaded
}

/// The next record for which `matches` returns a value. Fails after [`DEADLINE`], and on losses.
pub(crate) async fn next<T>(records: &mut Records, what: &str, matches: impl Fn(KernelRecord) -> Option<T>) -> T {
    let search = async {
        loop {
            match records.next().await.expect("ring buffers are readable") {
                ProbeOutput::Record(record) => {
                    if let Some(found) = matches(record) {
                        return found;
                    }
                }
                ProbeOutput::Lost(losses) => panic!("lost {losses:?} while waiting for {what}"),
            }
        }
    };
    tokio::time::timeout(DEADLINE, search).await.unwrap_or_else(|_| panic!("no record of {what}"))
}

/// The exit record of `pid`.
pub(crate) async fn exit_of(records: &mut Records, pid: u32) -> Exit {
    next(records, &format!("the exit of {pid}"), |record| match record {
        KernelRecord::Exit(exit) if exit.pid == pid => Some(exit),
        _ => None,
    })
    .await
}

/// A cgroup of the test, in the hierarchy that the probes use. Removed on drop, with its children.
pub(crate) struct TestCgroup {
    pub hierarchy: Hierarchy,
    pub path: String,
}

impl TestCgroup {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let hierarchy = Hierarchy::find().expect("checked before");
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = hierarchy.root.trim_end_matches('/').to_owned();
        let path = format!("{root}/keblet-test-{}-{number}", std::process::id());
        let cgroup = Self { hierarchy, path };
        fs::create_dir(cgroup.directory()).expect("the test's cgroup can be created");
        cgroup
    }

    /// A cgroup below this one, removed with it.
    pub(crate) fn child(&self, name: &str) -> Self {
        if self.hierarchy.kind == HierarchyKind::Unified {
            // Fails where the controller is not available; then limits cannot be set.
            let _ = fs::write(self.directory().join("cgroup.subtree_control"), "+memory");
        }
        let child = Self { hierarchy: self.hierarchy.clone(), path: format!("{}/{name}", self.path) };
        fs::create_dir(child.directory()).expect("a child cgroup can be created");
        child
    }

    pub(crate) fn directory(&self) -> PathBuf {
        self.hierarchy.directory(&self.path).expect("the hierarchy is mounted")
    }

    pub(crate) fn id(&self) -> CgroupId {
        self.hierarchy.id_of(&self.path).expect("it exists")
    }

    pub(crate) fn limit_memory(&self, bytes: u64) {
        let file = match self.hierarchy.kind {
            HierarchyKind::V1(_) => "memory.limit_in_bytes",
            HierarchyKind::Unified => "memory.max",
        };
        fs::write(self.directory().join(file), bytes.to_string()).expect("the memory controller works");
    }

    /// A shell that has entered the cgroup and waits for [`Running::go`] to run `script`.
    pub(crate) fn shell(&self, script: &str) -> Running {
        let directory = self.directory();
        let enter = format!(
            "echo $$ > {}/cgroup.procs && echo in && exec > /dev/null && read go && {script}",
            directory.display()
        );
        let mut child = Command::new("sh")
            .args(["-c", &enter])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("sh starts");
        let mut entered = [0; 3];
        child.stdout.take().expect("piped").read_exact(&mut entered).expect("the shell enters its cgroup");
        Running { child }
    }

    fn processes(&self) -> Vec<i32> {
        let text = fs::read_to_string(self.directory().join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        let deadline = Instant::now() + DEADLINE;
        for (_, child) in self.hierarchy.children(&self.path) {
            drop(Self { hierarchy: self.hierarchy.clone(), path: child });
        }
        while self.directory().exists() && fs::remove_dir(self.directory()).is_err() {
            for pid in self.processes() {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            if Instant::now() > deadline {
                eprintln!("cgroup {} could not be removed", self.path);
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A shell that waits for a line before it goes on. Killed and reaped on drop.
pub(crate) struct Running {
    child: Child,
}

impl Running {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Starts the script.
    pub(crate) fn go(&mut self) {
        let mut input = self.child.stdin.take().expect("still waiting");
        input.write_all(b"go\n").expect("the shell reads");
    }

    /// Waits for the exit: code, or 128 + signal.
    pub(crate) fn wait(&mut self) -> i32 {
        let status = self.child.wait().expect("a child process");
        status.code().or(status.signal().map(|signal| 128 + signal)).expect("ended")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("a child process");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
