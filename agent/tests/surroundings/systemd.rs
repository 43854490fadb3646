//! READY=1 and the watchdog, on a real notification socket.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;
use std::time::Instant;

use serde_json::json;

use super::agent::Agent;
use super::agent::PATIENCE;
use super::agent::socket;

/// What systemd would hear.
struct Manager {
    folder: tempfile::TempDir,
    socket: UnixDatagram,
}

impl Manager {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = UnixDatagram::bind(socket(folder.path())).expect("a socket");
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Self { folder, socket }
    }

    fn heard(&self) -> String {
        let mut buffer = [0; 256];
        let length = self.socket.recv(&mut buffer).expect("a notification");
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    }
}

#[test]
fn ready_then_quiet_at_half_the_timeout_then_stopping() {
    let manager = Manager::new();
    let path = socket(manager.folder.path());
    let agent = Agent::start(&[("NOTIFY_SOCKET", &path), ("WATCHDOG_USEC", "1200000")], &json!({}));
    let mut heard = vec![manager.heard(), manager.heard()];
    heard.sort();
    assert_eq!(heard, ["READY=1\n", "WATCHDOG=1\n"], "the first look is at once");
    let since = Instant::now();
    assert_eq!(manager.heard(), "WATCHDOG=1\n");
    assert_eq!(manager.heard(), "WATCHDOG=1\n");
    assert!(since.elapsed() > Duration::from_millis(800), "twice 600 ms: {:?}", since.elapsed());
    let ending = std::thread::spawn(|| agent.end());
    while manager.heard() != "STOPPING=1\n" {}
    let (well, said) = ending.join().expect("an end");
    assert!(well, "{said}");
}

#[test]
fn a_watchdog_for_another_process_is_left_alone() {
    let manager = Manager::new();
    let path = socket(manager.folder.path());
    let environment = [("NOTIFY_SOCKET", path.as_str()), ("WATCHDOG_USEC", "1200000"), ("WATCHDOG_PID", "1")];
    let agent = Agent::start(&environment, &json!({}));
    assert_eq!(manager.heard(), "READY=1\n");
    manager.socket.set_read_timeout(Some(Duration::from_millis(1300))).expect("a timeout");
    assert!(manager.socket.recv(&mut [0; 256]).is_err(), "nobody waits for more");
    let (well, said) = agent.end();
    assert!(well, "{said}");
}

#[test]
fn bad_settings_end_the_start() {
    let table = [
        ("1000000", "create health checker: configure watchdog timeout too small: 1s"),
        ("soon", "create health checker: configure watchdog: error converting WATCHDOG_USEC"),
        ("0", "create health checker: configure watchdog: error WATCHDOG_USEC must be a positive number"),
    ];
    for (timeout, complaint) in table {
        let mut agent = Agent::start(&[("WATCHDOG_USEC", timeout)], &json!({}));
        let (well, said) = agent.ended();
        assert!(!well && said.contains(complaint), "{timeout}: {said}");
    }
}
