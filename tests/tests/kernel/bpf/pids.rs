//! A PID that is reused by a second process.

use keblet::kernel::pidfd;
use keblet::kernel::pidfd::PinError;
use nix::libc;
use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use crate::support::DEADLINE;
use crate::support::TestCgroup;
use crate::support::exit_of;
use crate::support::load;
use crate::support::machine_lacks;

/// A child process with the requested PID, which sleeps until it is killed. Killed and reaped on drop.
struct Sleeper(Pid);

impl Sleeper {
    fn with_pid(pid: u32) -> Self {
        /// `struct clone_args` up to `set_tid_size`.
        #[derive(Default)]
        #[repr(C)]
        struct CloneArgs {
            flags: u64,
            pidfd: u64,
            child_tid: u64,
            parent_tid: u64,
            exit_signal: u64,
            stack: u64,
            stack_size: u64,
            tls: u64,
            set_tid: u64,
            set_tid_size: u64,
        }
        let tids = [pid as libc::pid_t];
        let args = CloneArgs {
            exit_signal: libc::SIGCHLD as u64,
            set_tid: tids.as_ptr() as u64,
            set_tid_size: 1,
            ..CloneArgs::default()
        };
        // SAFETY: without CLONE_VM this forks; both structures outlive the call.
        let result = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) };
        if result == 0 {
            loop {
                // SAFETY: the forked child of a threaded process may only make system calls, and this is one.
                unsafe { libc::syscall(libc::SYS_pause) };
            }
        }
        assert_eq!(result, i64::from(pid), "{}", std::io::Error::last_os_error());
        Self(Pid::from_raw(result as i32))
    }

    fn end(self) {}
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGKILL);
        let _ = waitpid(self.0, None);
    }
}

#[tokio::test]
#[ignore = "needs root and BPF"]
async fn reused_pid_is_a_different_process() {
    if machine_lacks().is_some() {
        return;
    }
    let cgroup = TestCgroup::new();
    let mut loaded = load(&cgroup.hierarchy).await;
    let mut first = cgroup.shell("exit 11");
    let pid = first.pid();
    let pinned = pidfd::pin(pid).expect("it runs");
    loaded.probes.watch_cgroup(cgroup.id(), true).expect("room");
    first.go();
    assert_eq!(first.wait(), 11);
    assert!(matches!(pidfd::pin(pid), Err(PinError::AlreadyGone { .. })));

    let second = Sleeper::with_pid(pid);
    let pinned_again = pidfd::pin(pid).expect("the second one runs");
    // The first descriptor still refers to the first process.
    tokio::time::timeout(DEADLINE, pinned.gone()).await.expect("the first exited").expect("readable");
    assert!(!pinned_again.facts().cgroups.contains("keblet-test"), "facts are the second one's own");

    let exit = exit_of(&mut loaded.records, pid).await;
    assert_eq!(exit.status.code(), 11);

    // The second process is in no watched cgroup: its exit is not reported.
    second.end();
    tokio::time::timeout(DEADLINE, pinned_again.gone()).await.expect("killed").expect("readable");
    let mut last = cgroup.shell("exit 12");
    last.go();
    let next = tokio::time::timeout(DEADLINE, loaded.records.next()).await.expect("in time").expect("readable");
    match next {
        keblet::kernel::bpf::ProbeOutput::Record(keblet::kernel::bpf::KernelRecord::Exit(exit)) => {
            assert_eq!((exit.pid, exit.status.code()), (last.pid(), 12));
        }
        other => panic!("not the last one's exit: {other:?}"),
    }
}
