//! The private control plane serves, executes commands, and leaves nothing behind however its user exits.
#![expect(clippy::unwrap_used, reason = "a failed assumption is what a test is for")]

use std::fs;
use std::io::BufRead as _;
use std::io::BufReader;
use std::net::IpAddr;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;
use std::time::SystemTime;

use keblet_peers::ControlPlane;
use keblet_peers::ControlPlaneOptions;
use keblet_peers::ControlPlaneReady;
use keblet_peers::Identity;
use keblet_peers::Part;
use keblet_peers::find_programs;

fn supervisor() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_private-control-plane"))
}

fn start() -> ControlPlane {
    let options = ControlPlaneOptions { supervisor: Some(supervisor()), ..ControlPlaneOptions::default() };
    ControlPlane::start(&options).unwrap()
}

/// Output of kubectl, and whether it succeeded.
fn kubectl(ready: &ControlPlaneReady, kubeconfig: &Path, arguments: &[&str]) -> (bool, String) {
    let output = Command::new(ready.kubectl())
        .args(arguments)
        .env("KUBECONFIG", kubeconfig)
        .env("HOME", &ready.dir)
        .output()
        .unwrap();
    let output_text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&output_text).into_owned())
}

/// Looks for resources independently of the supervisor.
fn assert_nothing_left(ready: &ControlPlaneReady) {
    assert!(!ready.dir.exists(), "{} is left", ready.dir.display());
    let dir = ready.dir.display().to_string();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let command = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        assert!(!command.contains(&dir), "process is left: {command}");
    }
}

#[test]
#[ignore = "real cluster"]
fn cluster_components_keep_state_over_a_kill() {
    let mut plane = start();
    let ready = plane.ready().clone();
    let admin = ready.kubeconfig.clone();
    let (created, output_text) = kubectl(&ready, &admin, &["create", "configmap", "memory"]);
    assert!(created, "{output_text}");
    plane.kill(Part::ApiServer).unwrap();
    assert!(!kubectl(&ready, &admin, &["get", "configmap", "memory"]).0);
    let error = plane.kill(Part::ApiServer).unwrap_err();
    assert_eq!(format!("{error:#}"), "cannot kill kube-apiserver: it is not running");
    plane.start_part(Part::ApiServer).unwrap();
    let (found, output_text) = kubectl(&ready, &admin, &["get", "configmap", "memory"]);
    assert!(found, "{output_text}");
    for part in [Part::ControllerManager, Part::Scheduler, Part::Etcd] {
        plane.stop_part(part).unwrap();
        plane.start_part(part).unwrap();
    }
    let first = plane.compact().unwrap();
    let (created, output_text) = kubectl(&ready, &admin, &["create", "configmap", "more"]);
    assert!(created, "{output_text}");
    assert!(plane.compact().unwrap() > first);
    plane.stop().unwrap();
    assert_nothing_left(&ready);
}

#[test]
#[ignore = "real cluster"]
fn cluster_identities_have_their_permissions() {
    let mut plane = start();
    let ready = plane.ready().clone();
    let address: IpAddr = "10.0.0.9".parse().unwrap();
    let node = plane.node("n1", address).unwrap();
    let may = |who: &Path, what: &[&str]| kubectl(&ready, who, &[&["auth", "can-i"], what].concat());
    assert!(may(&ready.kubeconfig, &["*", "*"]).0);
    assert!(may(&node.client.kubeconfig, &["create", "nodes"]).0);
    assert!(!may(&node.client.kubeconfig, &["delete", "deployments"]).0);
    assert!(may(&ready.bootstrap_kubeconfig, &["create", "certificatesigningrequests"]).0);
    assert!(!may(&ready.bootstrap_kubeconfig, &["list", "pods"]).0);
    let an_hour_ago = SystemTime::now() - Duration::from_secs(3600);
    let expired = Identity {
        common_name: "late".to_owned(),
        group: Some("system:masters".to_owned()),
        not_before: Some(an_hour_ago - Duration::from_secs(3600)),
        not_after: Some(an_hour_ago),
        ..Identity::default()
    };
    let late = plane.issue(&expired).unwrap();
    let (served, output_text) = kubectl(&ready, &late.kubeconfig, &["get", "nodes"]);
    assert!(!served, "an expired certificate was accepted: {output_text}");
    plane.stop().unwrap();
    assert_nothing_left(&ready);
}

#[test]
#[ignore = "real cluster"]
fn cluster_is_removed_when_the_owner_is_killed() {
    let mut supervisor = Command::new(supervisor())
        .arg("--programs")
        .arg(find_programs().unwrap())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut answers = BufReader::new(supervisor.stdout.take().unwrap());
    let mut line = String::new();
    answers.read_line(&mut line).unwrap();
    let ready: ControlPlaneReady = serde_json::from_str(&line).unwrap();
    assert!(ready.dir.exists());
    // The pipes of a killed user are closed without a command.
    drop(answers);
    drop(supervisor.stdin.take());
    assert!(supervisor.wait().unwrap().success());
    assert_nothing_left(&ready);
}

#[test]
fn missing_programs_error_names_the_build_command() {
    let options = ControlPlaneOptions { programs: Some("/nowhere".into()), ..ControlPlaneOptions::default() };
    let error = ControlPlane::start(&options).unwrap_err();
    assert!(error.to_string().contains("/nowhere/etcd is missing: run `cargo xtask peers`"), "{error:#}");
}
