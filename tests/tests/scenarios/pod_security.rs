//! Security profiles, SELinux labels, out-of-memory scores and stop signals of containers on a real runtime: what the kernel
//! enforces, or where it cannot, what the runtime has received. Tests with `vm_` in their name need all capabilities and a
//! kernel with AppArmor, so that they run in the emulated machine only (`cargo xtask vm test cgroupfs`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_peers::Options;
use keblet_proto::cri::v1::ContainerStatusRequest;
use keblet_proto::cri::v1::PodSandboxStatusRequest;
use keblet_proto::cri::v1::runtime_service_client::RuntimeServiceClient;
use keblet_tests::standalone::StandaloneNode;
use serde_json::Value;
use serde_json::json;
use tonic::transport::Endpoint;

use crate::pod_fields::report;
use crate::storage::run;

/// The name of an AppArmor profile that permits all but writing a file.
const APP_ARMOR: &str = "keblet-denies-a-write";

/// What containerd reports in a verbose status of a sandbox or a container, beyond the CRI: `config` is what it has received
/// from the agent.
fn verbose_info(info: &BTreeMap<String, String>) -> Result<Value> {
    let text = info.get("info").context("the status has no information")?;
    serde_json::from_str(text).with_context(|| format!("cannot read {text}"))
}

/// SELinux labels that the runtime has received: of the pod's sandbox, and of the running container of each name.
fn selinux_labels(node: &mut StandaloneNode, pod: &str, containers: &[&str]) -> Result<Vec<Value>> {
    let sandbox = node.until("all containers running", |node| {
        let Some(found) = node.sandboxes(pod)?.pop() else { return Ok(None) };
        let runs = |name: &&str| found.latest(name).is_some_and(|container| container.state == "running");
        Ok(containers.iter().all(runs).then_some(found))
    })?;
    let address = format!("unix:{}", node.containerd.ready().socket.display());
    let label = |info: Value| info["config"]["linux"]["security_context"]["selinux_options"].clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut client = RuntimeServiceClient::new(Endpoint::from_shared(address)?.connect().await?);
        let request = PodSandboxStatusRequest { pod_sandbox_id: sandbox.id.clone(), verbose: true };
        let status = client.pod_sandbox_status(request).await?.into_inner();
        let mut labels = vec![label(verbose_info(&status.info)?)];
        for name in containers {
            let container_id = sandbox.latest(name).with_context(|| format!("no container {name}"))?.id.clone();
            let request = ContainerStatusRequest { container_id, verbose: true };
            let status = client.container_status(request).await?.into_inner();
            labels.push(label(verbose_info(&status.info)?));
        }
        anyhow::Ok(labels)
    })
}

/// The runtime ignores labels while SELinux is off, so that the pod runs.
#[test]
#[ignore = "real runtime"]
fn the_runtime_gets_the_selinux_label_of_the_container_or_else_of_the_pod() -> Result<()> {
    let of_pod = json!({ "user": "system_u", "role": "system_r", "type": "container_t", "level": "s0:c1,c2" });
    let own = json!({ "user": "user_u", "role": "user_r", "type": "spc_t", "level": "s0:c3,c4" });
    let mut node = StandaloneNode::new()?;
    let mut pod = node.pod("labelled", &["run"]);
    let mut inheriting = pod["spec"]["containers"][0].clone();
    inheriting["name"] = json!("inheriting");
    pod["spec"]["securityContext"] = json!({ "seLinuxOptions": of_pod });
    pod["spec"]["containers"][0]["securityContext"] = json!({ "seLinuxOptions": own });
    pod["spec"]["containers"].as_array_mut().context("containers")?.push(inheriting);
    node.layout.write_manifest("labelled", &pod)?;
    node.start()?;
    let labels = selinux_labels(&mut node, "labelled", &["main", "inheriting"])?;
    ensure!(labels == [of_pod.clone(), own, of_pod], "{labels:#?}");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn a_seccomp_profile_of_the_node_is_enforced() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let profile = node.layout.root.join("seccomp/profiles/no-mkdir.json");
    fs::create_dir_all(profile.parent().context("a folder")?)?;
    let rule = json!({ "names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO" });
    fs::write(&profile, json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule] }).to_string())?;
    node.start()?;
    let localhost = json!({ "type": "Localhost", "localhostProfile": "profiles/no-mkdir.json" });
    let own = json!({ "securityContext": { "seccompProfile": localhost } });
    let script = "mkdir /denied; touch /allowed && echo touched";
    let report = report(&mut node, "filtered", json!({}), own, script)?;
    let expected = ["mkdir: can't create directory '/denied': Operation not permitted", "touched"];
    ensure!(report.lines == expected, "{report:#?}");
    node.stop()
}

/// A runtime with the field sends the signal and reports it. containerd up to 2.1 drops the field and sends the signal of
/// the image, which the status must not show as the container's.
#[test]
#[ignore = "real runtime"]
fn a_container_is_stopped_by_the_signal_that_its_status_has() -> Result<()> {
    let mut node = StandaloneNode::with(json!({ "featureGates": { "ContainerStopSignals": true } }))?;
    let stamp = node.stamp("stopped");
    let on = |signal: &str| format!("trap 'echo {signal} 2 >> {stamp}; exit 0' {signal};");
    let script = format!("{} {} echo start 1 >> {stamp}; while :; do sleep 0.1; done", on("TERM"), on("USR1"));
    let mut pod = node.pod("stopped", &[]);
    pod["spec"]["os"] = json!({ "name": "linux" });
    let main = &mut pod["spec"]["containers"][0];
    main["image"] = json!(BUSYBOX_IMAGE);
    main["command"] = json!(["sh", "-c", script]);
    main["lifecycle"] = json!({ "stopSignal": "SIGUSR1" });
    node.layout.write_manifest("stopped", &pod)?;
    node.start()?;
    node.until_running("stopped")?;
    let status = node.until("the running container in the status", |node| {
        let status = node.status("stopped")["containerStatuses"][0].clone();
        Ok(status["state"]["running"].is_object().then_some(status))
    })?;
    node.layout.remove_manifest("stopped")?;
    let received = node.until("the signal", |node| {
        Ok(node.stamps_of("stopped").into_iter().map(|(word, _)| word).find(|word| word != "start"))
    })?;
    let expected = match status["stopSignal"].as_str() {
        Some(reported) => {
            ensure!(reported == "SIGUSR1", "{status}");
            "USR1"
        }
        None => "TERM",
    };
    ensure!(received == expected, "{received} is not {expected}: {status}");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn vm_only_a_node_critical_pod_is_protected_from_out_of_memory_kills() -> Result<()> {
    let mut node = StandaloneNode::on(Options { unrestricted: true, ..Options::default() }, json!({}))?;
    node.start()?;
    for (name, fields, score) in [
        ("plain", json!({}), "1000"),
        ("of-cluster", json!({ "priorityClassName": "system-cluster-critical" }), "1000"),
        ("of-node", json!({ "priorityClassName": "system-node-critical" }), "-997"),
    ] {
        let report = report(&mut node, name, fields, json!({}), "cat /proc/self/oom_score_adj")?;
        ensure!(report.lines == [score], "{name}: {report:#?}");
    }
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn vm_an_app_armor_profile_of_the_node_is_enforced() -> Result<()> {
    if !Path::new("/sys/kernel/security/apparmor").exists() {
        run("mount", &["-t", "securityfs", "securityfs", "/sys/kernel/security"])?;
    }
    // Before the agent and the runtime, which detect AppArmor when they start.
    let mut node = StandaloneNode::on(Options { unrestricted: true, ..Options::default() }, json!({}))?;
    let file = node.stamps.join("profile");
    let rules = "file,\n  capability,\n  signal,\n  ptrace,\n  deny /denied w,";
    fs::write(&file, format!("profile {APP_ARMOR} flags=(attach_disconnected) {{\n  {rules}\n}}\n"))?;
    run("apparmor_parser", &["--replace", "--skip-cache", &file.to_string_lossy()])?;
    node.start()?;
    let localhost = json!({ "type": "Localhost", "localhostProfile": APP_ARMOR });
    let own = json!({ "securityContext": { "appArmorProfile": localhost } });
    let script = "cat /proc/self/attr/current; touch /denied; touch /allowed && echo touched";
    let report = report(&mut node, "confined", json!({}), own, script)?;
    let confined = format!("{APP_ARMOR} (enforce)");
    ensure!(report.lines == [confined.as_str(), "touch: /denied: Permission denied", "touched"], "{report:#?}");
    node.stop()
}
