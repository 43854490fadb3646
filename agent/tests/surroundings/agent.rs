//! An agent with folders of its own and without pods.

use std::io::Read as _;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use keblet_skip::ports;
use serde_json::Value;
use serde_json::json;
use tempfile::TempDir;

/// Deadline of every wait.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
/// The node's name.
pub(crate) const NODE: &str = "alone";

/// A running agent. Dropping it kills it.
pub(crate) struct Agent {
    process: Child,
    /// Port of the read-only server.
    pub port: u16,
    folder: TempDir,
}

impl Agent {
    /// Starts an agent with this environment, and with these settings added to the required ones.
    pub(crate) fn start(environment: &[(&str, &str)], settings: &Value) -> Self {
        Self::start_with(environment, settings, &[])
    }

    /// As [`Agent::start`], with these flags.
    pub(crate) fn start_with(environment: &[(&str, &str)], settings: &Value, flags: &[String]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let port = ports::free();
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": format!("unix://{}", folder.path().join("none.sock").display()),
            "podLogsDir": folder.path().join("logs"),
            "failCgroupV1": false,
            "failSwapOn": false,
            "healthzPort": 0,
            "address": "127.0.0.1",
            "port": ports::free(),
            "readOnlyPort": port,
            "authentication": { "webhook": { "enabled": false } },
            "authorization": { "mode": "AlwaysAllow" },
            // The tables of the test machine must not be changed.
            "makeIPTablesUtilChains": false,
        });
        config.as_object_mut().expect("an object").extend(settings.as_object().expect("an object").clone());
        let file = folder.path().join("config.json");
        std::fs::write(&file, config.to_string()).expect("a file");
        let mut command = Command::new(env!("CARGO_BIN_EXE_keblet"));
        command.args(["run", "--hostname-override", NODE, "--config"]).arg(&file).arg("--root-dir");
        command.arg(folder.path().join("root")).arg("--cert-dir").arg(folder.path().join("pki"));
        command.env_remove("NOTIFY_SOCKET").env_remove("WATCHDOG_USEC").env_remove("WATCHDOG_PID");
        command.args(flags).envs(environment.iter().copied()).stderr(Stdio::piped());
        let process = command.spawn().expect("keblet starts");
        Self { process, port, folder }
    }

    /// Stops the agent with SIGTERM. Returns whether it exited successfully, and its output.
    pub(crate) fn end(mut self) -> (bool, String) {
        let pid = nix::unistd::Pid::from_raw(self.process.id().try_into().expect("a pid"));
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("a signal");
        self.ended()
    }

    /// Waits until it has exited by itself. Returns whether it exited successfully, and its output.
    pub(crate) fn ended(&mut self) -> (bool, String) {
        let mut output = String::new();
        let mut stderr = self.process.stderr.take().expect("a pipe");
        stderr.read_to_string(&mut output).expect("text");
        (self.process.wait().expect("an end").success(), output)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Fails only if it has exited already.
        let _ = self.process.kill();
        let _ = self.process.wait();
        keblet_skip::mounts::detach(&self.folder.path().join("root"));
    }
}

/// Waits until `condition` returns a value.
pub(crate) fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(Instant::now() < deadline, "timed out waiting for: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A socket's path in a folder of its own.
pub(crate) fn socket(folder: &Path) -> String {
    folder.join("socket").to_str().expect("a plain path").to_owned()
}
