//! The private runtime runs pods, executes commands, and leaves nothing behind however its user exits.
#![expect(clippy::unwrap_used, reason = "a failed assumption is what a test is for")]

use std::fs;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Read as _;
use std::io::Write as _;
use std::net::TcpStream;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::ChildStdout;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use keblet_peers::Cache;
use keblet_peers::Options;
use keblet_peers::PROBE_IMAGE;
use keblet_peers::PrivateContainerd;
use keblet_peers::Ready;
use keblet_proto::cri::v1::ContainerConfig;
use keblet_proto::cri::v1::ContainerMetadata;
use keblet_proto::cri::v1::CreateContainerRequest;
use keblet_proto::cri::v1::ImageSpec;
use keblet_proto::cri::v1::LinuxPodSandboxConfig;
use keblet_proto::cri::v1::PodSandboxConfig;
use keblet_proto::cri::v1::PodSandboxMetadata;
use keblet_proto::cri::v1::PodSandboxStatusRequest;
use keblet_proto::cri::v1::RunPodSandboxRequest;
use keblet_proto::cri::v1::StartContainerRequest;
use keblet_proto::cri::v1::runtime_service_client::RuntimeServiceClient;
use tonic::transport::Channel;
use tonic::transport::Endpoint;

const TIMEOUT: Duration = Duration::from_secs(20);

fn options() -> Options {
    let supervisor = Some(PathBuf::from(env!("CARGO_BIN_EXE_private-containerd")));
    Options { supervisor, ..Options::default() }
}

async fn connect(ready: &Ready) -> RuntimeServiceClient<Channel> {
    let address = format!("unix:{}", ready.socket.display());
    RuntimeServiceClient::new(Endpoint::from_shared(address).unwrap().connect().await.unwrap())
}

/// Runs a pod of one container and returns its address.
async fn run_pod(ready: &Ready, name: &str, command: &[&str]) -> String {
    let mut cri = connect(ready).await;
    let sandbox = PodSandboxConfig {
        metadata: Some(PodSandboxMetadata {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            namespace: "default".to_owned(),
            attempt: 0,
        }),
        linux: Some(LinuxPodSandboxConfig {
            cgroup_parent: format!("{}/{name}", ready.cgroup_root),
            ..Default::default()
        }),
        ..Default::default()
    };
    let run = RunPodSandboxRequest { config: Some(sandbox.clone()), ..Default::default() };
    let pod = cri.run_pod_sandbox(run).await.unwrap().into_inner().pod_sandbox_id;
    let config = ContainerConfig {
        metadata: Some(ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
        image: Some(ImageSpec { image: PROBE_IMAGE.to_owned(), ..Default::default() }),
        command: command.iter().map(|&word| word.to_owned()).collect(),
        ..Default::default()
    };
    let create =
        CreateContainerRequest { pod_sandbox_id: pod.clone(), config: Some(config), sandbox_config: Some(sandbox) };
    let container_id = cri.create_container(create).await.unwrap().into_inner().container_id;
    cri.start_container(StartContainerRequest { container_id }).await.unwrap();
    let status = PodSandboxStatusRequest { pod_sandbox_id: pod, ..Default::default() };
    let status = cri.pod_sandbox_status(status).await.unwrap().into_inner().status.unwrap();
    status.network.unwrap().ip
}

fn get(address: &str) -> String {
    let deadline = Instant::now() + TIMEOUT;
    let mut stream = loop {
        match TcpStream::connect(address) {
            Ok(stream) => break stream,
            Err(error) if Instant::now() > deadline => panic!("{address}: {error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    stream.write_all(b"GET / HTTP/1.1\r\nHost: pod\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Looks for resources independently of the supervisor.
fn assert_nothing_left(ready: &Ready) {
    assert!(!ready.dir.exists(), "{} is left", ready.dir.display());
    assert!(!Path::new("/sys/class/net").join(&ready.bridge).exists(), "{} is left", ready.bridge);
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let dir = ready.dir.display().to_string();
    assert!(!mounts.contains(&dir), "mounts are left:\n{mounts}");
    for hierarchy in fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
        let cgroup = hierarchy.path().join(ready.cgroup_root.trim_start_matches('/'));
        assert!(!cgroup.exists(), "{} is left", cgroup.display());
    }
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let command = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        assert!(!command.contains(&dir), "process is left: {command}");
    }
}

#[tokio::test]
#[ignore = "needs root and `cargo xtask setup`"]
async fn pods_run_serve_and_are_removed() {
    let mut containerd = PrivateContainerd::start(&Cache::locate(), &options()).unwrap();
    let mut user = Command::new("sleep").arg("600").spawn().unwrap();
    containerd.adopt(user.id()).unwrap();
    let ready = containerd.ready().clone();
    let address = run_pod(&ready, "web", &["/probe", "web", "--port", "8080"]).await;
    let answer = get(&format!("{address}:8080"));
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    containerd.stop().unwrap();
    assert_nothing_left(&ready);
    assert!(!user.wait().unwrap().success());
}

#[tokio::test]
#[ignore = "needs root and `cargo xtask setup`"]
async fn containers_survive_a_containerd_restart() {
    let mut containerd = PrivateContainerd::start(&Cache::locate(), &options()).unwrap();
    let ready = containerd.ready().clone();
    let address = run_pod(&ready, "web", &["/probe", "web", "--port", "8080"]).await;
    containerd.kill().unwrap();
    assert!(!Path::new(&format!("/proc/{}", ready.pid)).exists());
    containerd.pods().unwrap_err();
    assert!(get(&format!("{address}:8080")).starts_with("HTTP/1.1 200 OK\r\n"));
    containerd.restart().unwrap();
    assert_ne!(containerd.ready().pid, ready.pid);
    let pods = containerd.pods().unwrap();
    assert_eq!(pods.len(), 1);
    assert_eq!(pods[0].ip, address);
    let main = pods[0].latest("main").unwrap();
    assert_eq!((main.state.as_str(), main.attempt), ("running", 0));
    assert!(Path::new(&format!("/proc/{}", main.pid.unwrap())).exists());
    containerd.stop().unwrap();
    assert_nothing_left(&ready);
}

/// A supervisor as a process of the test, its answers, and its runtime.
fn supervisor() -> (Child, BufReader<ChildStdout>, Ready) {
    let mut supervisor = Command::new(env!("CARGO_BIN_EXE_private-containerd"))
        .arg("--cache")
        .arg(Cache::locate().root())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a supervisor");
    let mut answers = BufReader::new(supervisor.stdout.take().expect("a pipe"));
    let mut line = String::new();
    answers.read_line(&mut line).expect("an answer");
    (supervisor, answers, serde_json::from_str(&line).expect("what is ready"))
}

#[tokio::test]
#[ignore = "needs root and `cargo xtask setup`"]
async fn resources_are_removed_when_the_owner_is_killed() {
    let (mut supervisor, mut answers, ready) = supervisor();
    for name in ["one", "two", "three"] {
        run_pod(&ready, name, &["/probe", "run"]).await;
    }
    // The pipes of a killed user are closed without a command; and its runtime may have exited already.
    writeln!(supervisor.stdin.as_mut().unwrap(), "kill").unwrap();
    let mut line = String::new();
    answers.read_line(&mut line).unwrap();
    assert_eq!(line, "{\"ok\":null}\n");
    drop(answers);
    drop(supervisor.stdin.take());
    assert!(supervisor.wait().unwrap().success());
    assert_nothing_left(&ready);
}

#[tokio::test]
#[ignore = "needs root and `cargo xtask setup`"]
async fn the_next_runtime_removes_what_a_killed_supervisor_has_left() {
    let (mut supervisor, _, killed) = supervisor();
    run_pod(&killed, "web", &["/probe", "run"]).await;
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    assert!(Path::new("/sys/class/net").join(&killed.bridge).exists(), "there is something to remove");
    let containerd = PrivateContainerd::start(&Cache::locate(), &options()).unwrap();
    // Another test's runtime may be removing the same. The bridge goes last.
    let deadline = Instant::now() + TIMEOUT;
    while Path::new("/sys/class/net").join(&killed.bridge).exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_nothing_left(&killed);
    assert!(containerd.ready().socket.exists(), "the runtime that runs has kept its own");
    containerd.stop().unwrap();
}

#[test]
fn missing_cache_error_names_the_setup_command() {
    let error = PrivateContainerd::start(&Cache::at("/nowhere"), &options()).unwrap_err();
    assert!(error.to_string().contains("cargo xtask setup"), "{error:#}");
}
