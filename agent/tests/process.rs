//! The binary as a process: exit codes, signals, output.

use std::io::Read as _;
use std::net::Ipv4Addr;
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::Output;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use keblet_skip::ports;
use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;

fn keblet(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_keblet"));
    command.args(arguments);
    command
}

fn output(mut command: Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A configuration file in this folder with these settings, with the folder of logs in it, which has no flag, and without
/// chains of iptables: the tables of the test machine must not be changed.
fn own_folders(folder: &Path, settings: &str) -> PathBuf {
    let file = folder.join("kubelet.yaml");
    let kind = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration";
    let logs = folder.join("logs");
    let own = format!("podLogsDir: {}\nmakeIPTablesUtilChains: false", logs.display());
    std::fs::write(&file, format!("{kind}\n{own}\n{settings}\n")).expect("a file");
    file
}

#[test]
fn exit_codes() {
    let code = |arguments: &[&str]| output(keblet(arguments)).status.code();
    assert_eq!(code(&["version"]), Some(0));
    assert_eq!(code(&["run", "--help"]), Some(0));
    assert_eq!(code(&["run", "--no-such-flag"]), Some(2));
    assert_eq!(code(&["run", "--port=x"]), Some(2));
    assert_eq!(code(&["run", "--port=70000"]), Some(3));
    assert_eq!(code(&["config", "check", "--config=/nonexistent.yaml"]), Some(3));
    assert_eq!(code(&["config", "check", "--ignore-host"]), Some(0));
}

#[test]
fn errors_are_printed_once_with_their_location() {
    let missing = output(keblet(&["config", "explain", "--config=/nonexistent.yaml"]));
    assert_eq!(stderr(&missing), "keblet: cannot read /nonexistent.yaml: No such file or directory (os error 2)\n");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kubelet.yaml");
    std::fs::write(&file, "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPodz: 1\n")
        .unwrap();
    let bad = output(keblet(&["run", "--config", file.to_str().unwrap()]));
    let expected = format!("keblet: {}:3: maxPodz: unknown field; did you mean maxPods?\n", file.display());
    assert_eq!((bad.status.code(), stderr(&bad)), (Some(3), expected));
}

#[test]
fn what_this_host_cannot_honour_is_an_error_of_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    let mut command = keblet(&["run", "--fail-cgroupv1=false", "--fail-swap-on=false"]);
    command.arg(format!("--config={}", own_folders(folder.path(), "").display()));
    command.arg("--system-reserved=memory=1Ei").arg(format!("--root-dir={}", root.display()));
    command.arg(format!("--cert-dir={}", folder.path().join("pki").display()));
    command.arg(format!("--container-runtime-endpoint=unix://{}", folder.path().join("no.sock").display()));
    command.arg(format!("--port={}", ports::free()));
    let refused = output(command);
    keblet_skip::mounts::detach(&root);
    assert_eq!(refused.status.code(), Some(3), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("systemReserved"), "{}", stderr(&refused));
}

#[test]
fn called_as_kubelet() {
    let mut command = keblet(&["--version"]);
    command.arg0("/usr/bin/kubelet");
    assert_eq!(String::from_utf8_lossy(&output(command).stdout), "Kubernetes v1.36.3\n");
}

/// Kills the agent with this root directory, also when a test fails.
struct Agent(Child, PathBuf);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
        keblet_skip::mounts::detach(&self.1);
    }
}

#[test]
fn runs_without_a_runtime_and_ends_on_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let port = ports::free();
    let mut command = keblet(&["run", "--fail-cgroupv1=false", "--fail-swap-on=false", "--read-only-port=0"]);
    let access = "authentication: { webhook: { enabled: false } }\nauthorization: { mode: AlwaysAllow }";
    command.arg(format!("--config={}", own_folders(folder.path(), access).display()));
    let root = folder.path().join("root");
    command.arg(format!("--root-dir={}", root.display()));
    command.arg(format!("--container-runtime-endpoint=unix://{}", folder.path().join("no.sock").display()));
    command.arg(format!("--port={}", ports::free())).arg(format!("--healthz-port={port}"));
    command.arg(format!("--cert-dir={}", folder.path().join("pki").display()));
    let mut agent = Agent(command.stderr(Stdio::piped()).spawn().unwrap(), root);

    let deadline = Instant::now() + Duration::from_secs(30);
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        assert_eq!(agent.0.try_wait().unwrap(), None, "the agent exited by itself");
        assert!(Instant::now() < deadline, "the health server does not respond");
        std::thread::sleep(Duration::from_millis(10));
    }
    kill(Pid::from_raw(agent.0.id().cast_signed()), Signal::SIGTERM).unwrap();
    let status = loop {
        if let Some(status) = agent.0.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "the agent does not exit");
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut output_text = String::new();
    agent.0.stderr.take().unwrap().read_to_string(&mut output_text).unwrap();
    assert_eq!(status.code(), Some(0), "{output_text}");
    assert!(output_text.contains("shutting down"), "{output_text}");
    let shown: Vec<_> = output_text.lines().filter(|line| line.contains("Effective KubeletConfiguration")).collect();
    assert_eq!(shown.len(), 1, "{output_text}");
    for field in ["kind: KubeletConfiguration\\n", "eventBurst: 100\\n", "kind: KebletConfiguration\\n"] {
        assert!(shown[0].contains(field), "{field} is missing in {}", shown[0]);
    }
}
