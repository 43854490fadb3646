//! Child processes of the test.

use std::process::Command;
use std::process::Stdio;
use std::time::Duration;

use tokio::time::timeout;

use super::*;

const DEADLINE: Duration = Duration::from_secs(10);

fn register(fd: PidFd) -> AsyncFd<PidFd> {
    // SAFETY: a `PidFd` owns its descriptor, keeps it open until it is dropped, and always names the same one.
    unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }.expect("registered")
}

fn sleeper() -> std::process::Child {
    Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().expect("sleep starts")
}

#[tokio::test]
async fn a_running_process_is_pinned_until_it_ends() {
    let mut child = sleeper();
    let pinned = pin(child.id()).expect("it lives");
    assert_eq!(pinned.pid(), child.id());
    assert!(!pinned.is_pid_ns_init());
    assert_eq!(pinned.exit_status(), None);
    assert!(timeout(Duration::from_millis(20), pinned.gone()).await.is_err(), "gone while it runs");

    child.kill().expect("our own child");
    timeout(DEADLINE, pinned.gone()).await.expect("it ends in time").expect("readable");
    // A second call returns the same.
    timeout(DEADLINE, pinned.gone()).await.expect("still").expect("readable");
    child.wait().expect("reaped");
    if let Some(status) = pinned.exit_status() {
        assert_eq!(status, ExitStatus::Signal(9));
    }
}

#[tokio::test]
async fn a_zombie_and_a_reaped_process_are_gone() {
    let mut child = Command::new("true").spawn().expect("true starts");
    let fd = PidFd::open(child.id()).expect("not reaped yet");
    let waiting = register(fd);
    timeout(DEADLINE, waiting.readable()).await.expect("it ends in time").expect("readable").retain_ready();
    assert!(matches!(pin(child.id()), Err(PinError::AlreadyGone { .. })), "a zombie is gone");
    child.wait().expect("reaped");
    assert!(matches!(pin(child.id()), Err(PinError::AlreadyGone { .. })), "a reaped process is gone");
    if let Some(status) = waiting.get_ref().exit_status() {
        assert_eq!(status, ExitStatus::Code(0));
    }
}

#[tokio::test]
async fn missing_processes_are_errors() {
    assert!(matches!(pin(u32::MAX), Err(PinError::AlreadyGone { pid: u32::MAX })));
    assert!(matches!(pin(i32::MAX as u32), Err(PinError::AlreadyGone { .. })));
    assert!(matches!(pin(0), Err(PinError::System { pid: 0, .. })));
}

#[tokio::test]
async fn a_thread_is_an_error() {
    let (tid_out, tid_in) = std::sync::mpsc::channel();
    let (done_out, done_in) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        tid_out.send(nix::unistd::gettid().as_raw() as u32).expect("the test waits");
        let _ = done_in.recv();
    });
    let tid = tid_in.recv().expect("the thread sends");
    assert!(matches!(pin(tid), Err(PinError::Thread { .. })));
    drop(done_out);
    thread.join().expect("ended");
}
