//! Fields of pods and containers that decide when containers are probed, restarted and killed.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::Instant;

use k8s_openapi::api::core::v1::ContainerStatus;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Pod;
use keblet_tests::cluster::Tenant;
use keblet_tests::cluster::until_gone;
use keblet_tests::cluster::until_some;
use kube::api::DeleteParams;
use kube::runtime::watcher::Config;
use serde_json::Value;
use serde_json::json;

/// Ignores SIGTERM, and so do its children.
const STUBBORN: &str = "trap '' TERM; while true; do sleep 1; done";

fn first_container(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}

/// A folder that the test's pods mount at `/out`.
fn folder(tenant: &Tenant) -> PathBuf {
    let folder = tenant.node.folder().unwrap().join(&tenant.namespace);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn with_folder(mut spec: Value, folder: &Path) -> Value {
    spec["volumes"] = json!([{ "name": "out", "hostPath": { "path": folder, "type": "Directory" } }]);
    spec["containers"][0]["volumeMounts"] = json!([{ "name": "out", "mountPath": "/out" }]);
    spec
}

#[tokio::test]
#[ignore = "real cluster"]
async fn restarts_follow_policies_and_rules() {
    let tenant = Tenant::new_namespace("restarts").await.unwrap();
    let out = folder(&tenant);
    let rule = json!([{ "action": "Restart", "exitCodes": { "operator": "In", "values": [42] } }]);
    let own = json!({ "restartPolicy": "Never", "restartPolicyRules": rule });
    // The first run exits with this code, later ones with 0.
    for (name, policy, of_container, code, phase, restarts) in [
        ("never", "Never", json!({}), 1, "Failed", 0),
        ("on-failure", "OnFailure", json!({}), 1, "Succeeded", 1),
        ("rule", "Never", own.clone(), 42, "Succeeded", 1),
        ("no-rule", "Always", own, 1, "Failed", 0),
    ] {
        let script = format!("test -e /out/{name} && exit 0; touch /out/{name}; exit {code}");
        let mut spec = with_folder(tenant.shell(&script), &out);
        spec["restartPolicy"] = json!(policy);
        spec["containers"][0].as_object_mut().unwrap().extend(of_container.as_object().unwrap().clone());
        tenant.pod(name, spec).await.unwrap();
        let pod = tenant.until_phase(name, phase).await.unwrap();
        assert_eq!(first_container(&pod).unwrap().restart_count, restarts, "{name}");
    }
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn deadlines_and_grace_periods_end_what_does_not_end_itself() {
    let tenant = Tenant::new_namespace("deadlines").await.unwrap();
    let mut limited = tenant.shell("sleep 3600");
    limited["activeDeadlineSeconds"] = json!(1);
    limited["terminationGracePeriodSeconds"] = json!(1);
    tenant.pod("limited", limited).await.unwrap();
    let status = tenant.until_phase("limited", "Failed").await.unwrap().status.unwrap();
    assert_eq!(status.reason.as_deref(), Some("DeadlineExceeded"));

    let mut stubborn = tenant.shell(STUBBORN);
    stubborn["terminationGracePeriodSeconds"] = json!(3);
    tenant.pod("stubborn", stubborn).await.unwrap();
    tenant.until_ready("stubborn").await.unwrap();
    let since = Instant::now();
    tenant.api::<Pod>().delete("stubborn", &DeleteParams::default()).await.unwrap();
    let killed = |pod: Option<&Pod>| match pod {
        // The object can be gone before this test has seen the last status.
        None => Some(None),
        Some(pod) => first_container(pod)?.state.as_ref()?.terminated.as_ref().map(|ended| Some(ended.exit_code)),
    };
    let code = tenant.until("stubborn", "killed", killed).await.unwrap();
    assert!(code.is_none_or(|code| code == 137), "{code:?}");
    assert!(since.elapsed() >= Duration::from_millis(2900), "killed after {:?}", since.elapsed());
    until_gone(&tenant.api::<Pod>(), "stubborn").await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

/// A probe that writes the time since the machine's start to a file before `then` decides.
fn probe(file: &str, then: &str, fields: Value) -> Value {
    let script = format!("cut -d' ' -f1 /proc/uptime >> /out/{file}; {then}");
    let mut probe = json!({ "exec": { "command": ["sh", "-c", script] }, "periodSeconds": 1 });
    probe.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    probe
}

/// What a probe has written.
fn runs(folder: &Path, file: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(folder.join(file)).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

#[tokio::test]
#[ignore = "real cluster"]
async fn probes_follow_their_delays_periods_and_thresholds() {
    let tenant = Tenant::new_namespace("thresholds").await.unwrap();
    let out = folder(&tenant);
    let script = format!("cut -d' ' -f1 /proc/uptime >> /out/started; {STUBBORN}");
    let mut spec = with_folder(tenant.shell(&script), &out);
    // Far longer than the test: only the probe's own period can end the container.
    spec["terminationGracePeriodSeconds"] = json!(3600);
    let main = &mut spec["containers"][0];
    let third = "test $(wc -l < /out/startup) -ge 3";
    main["startupProbe"] = probe("startup", third, json!({ "initialDelaySeconds": 2, "failureThreshold": 100 }));
    main["readinessProbe"] = probe("readiness", "true", json!({ "successThreshold": 3 }));
    let alive = "test ! -e /out/fail || { echo >> /out/failures; false; }";
    let liveness = json!({ "failureThreshold": 3, "terminationGracePeriodSeconds": 1 });
    main["livenessProbe"] = probe("liveness", alive, liveness);
    tenant.pod("probed", spec).await.unwrap();
    tenant.until_ready("probed").await.unwrap();
    let [started, startup, readiness] = ["started", "startup", "readiness"].map(|file| runs(&out, file));
    assert!(startup[0] - started[0] >= 1.9, "initialDelaySeconds: {started:?}, {startup:?}");
    // On a busy machine the command of a run may begin late, and that of the next one in time.
    assert!(startup.windows(2).all(|pair| pair[1] - pair[0] >= 0.5), "periodSeconds: {startup:?}");
    assert_eq!(startup.len(), 3, "succeeded once");
    assert!(readiness.len() >= 3 && readiness[0] >= startup[2], "successThreshold: {readiness:?} after {startup:?}");

    std::fs::write(out.join("fail"), "").unwrap();
    let restarted = |pod: Option<&Pod>| first_container(pod?).filter(|status| status.restart_count > 0).cloned();
    let status = tenant.until("probed", "restarted for liveness", restarted).await.unwrap();
    assert_eq!(status.last_state.unwrap().terminated.unwrap().exit_code, 137, "SIGTERM was ignored");
    let failures = std::fs::read_to_string(out.join("failures")).unwrap().lines().count();
    std::fs::remove_file(out.join("fail")).unwrap();
    assert!(failures >= 3, "failureThreshold: {failures}");
    let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    tenant.api::<Pod>().delete("probed", &now).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn a_probe_that_takes_longer_than_its_timeout_fails() {
    let tenant = Tenant::new_namespace("timeout").await.unwrap();
    let mut spec = tenant.shell("sleep 3600");
    spec["containers"][0]["readinessProbe"] =
        json!({ "exec": { "command": ["sleep", "60"] }, "timeoutSeconds": 1, "periodSeconds": 1 });
    tenant.pod("slow", spec).await.unwrap();
    let about = Config::default().fields("involvedObject.name=slow,reason=Unhealthy");
    let message = until_some(tenant.api::<Event>(), about, "the failed probe", |event: &Event| event.message.clone());
    let message = message.await.unwrap();
    assert!(message.contains("timed out"), "{message}");

    // So does one that fails and leaves a process behind which keeps its output open.
    let mut spec = tenant.shell("sleep 3600");
    let exec = json!({ "command": ["sh", "-c", "sleep 10 & exit 1"] });
    spec["containers"][0]["livenessProbe"] =
        json!({ "exec": exec, "timeoutSeconds": 1, "periodSeconds": 1, "failureThreshold": 1 });
    tenant.pod("forks", spec).await.unwrap();
    let restarted = |pod: Option<&Pod>| (first_container(pod?)?.restart_count > 0).then_some(());
    tenant.until("forks", "a restart", restarted).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}
