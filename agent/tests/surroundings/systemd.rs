//! READY=1 and the watchdog, on a real notification socket.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;
use std::time::Instant;

use serde_json::json;

use super::agent::Agent;
use super::agent::DEADLINE;
use super::agent::socket;

/// The notification socket of a service manager.
struct Manager {
    folder: tempfile::TempDir,
    socket: UnixDatagram,
}

impl Manager {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = UnixDatagram::bind(socket(folder.path())).expect("a socket");
        socket.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        Self { folder, socket }
    }

    fn receive(&self) -> String {
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
    let mut received = vec![manager.receive(), manager.receive()];
    received.sort();
    assert_eq!(received, ["READY=1\n", "WATCHDOG=1\n"], "the first health check is immediate");
    let since = Instant::now();
    assert_eq!(manager.receive(), "WATCHDOG=1\n");
    assert_eq!(manager.receive(), "WATCHDOG=1\n");
    assert!(since.elapsed() > Duration::from_millis(800), "twice 600 ms: {:?}", since.elapsed());
    let ending = std::thread::spawn(|| agent.end());
    while manager.receive() != "STOPPING=1\n" {}
    let (success, output) = ending.join().expect("an end");
    assert!(success, "{output}");
}

#[test]
fn a_watchdog_for_another_process_is_left_alone() {
    let manager = Manager::new();
    let path = socket(manager.folder.path());
    let environment = [("NOTIFY_SOCKET", path.as_str()), ("WATCHDOG_USEC", "1200000"), ("WATCHDOG_PID", "1")];
    let agent = Agent::start(&environment, &json!({}));
    assert_eq!(manager.receive(), "READY=1\n");
    manager.socket.set_read_timeout(Some(Duration::from_millis(1300))).expect("a timeout");
    assert!(manager.socket.recv(&mut [0; 256]).is_err(), "no watchdog notification is sent");
    let (success, output) = agent.end();
    assert!(success, "{output}");
}

#[test]
fn invalid_settings_fail_the_start() {
    let table = [
        ("1000000", "create health checker: configure watchdog timeout too small: 1s"),
        ("soon", "create health checker: configure watchdog: error converting WATCHDOG_USEC"),
        ("0", "create health checker: configure watchdog: error WATCHDOG_USEC must be a positive number"),
    ];
    for (timeout, message) in table {
        let mut agent = Agent::start(&[("WATCHDOG_USEC", timeout)], &json!({}));
        let (success, output) = agent.ended();
        assert!(!success && output.contains(message), "{timeout}: {output}");
    }
}
