//! Credentials that the API server rejects: the node reports it once, limits its retries, keeps its pods, and resumes
//! as soon as it has valid credentials.

use std::ffi::OsString;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ServiceAccount;
use keblet_peers::Credentials;
use keblet_peers::Identity;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::Tenant;
use kube::api::DeleteParams;
use serde_json::Value;
use serde_json::json;

const REFUSED: &str = "rejects our credentials (401 Unauthorized)";
const ACCEPTED: &str = "accepts our credentials again";
/// Listen address of all nodes on their own addresses.
const READ_ONLY_PORT: u16 = 10255;
/// More than the retries of all loops of a node, less than a busy loop.
const REFUSALS_PER_SECOND: f64 = 10.0;
/// Loops that try at the same time are no busy loop.
const MEASURED: Duration = Duration::from_secs(3);
/// Longer than the longest pause of each loop.
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);

/// A node with short heartbeat periods, so that it detects changes soon.
async fn prepare(cluster: &Cluster, more: Value) -> Arc<ClusterNode> {
    let mut changes = json!({
        "readOnlyPort": READ_ONLY_PORT,
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
    });
    changes.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    Arc::new(ClusterNode::prepare(cluster, changes).await.unwrap())
}

/// Writes a kubeconfig for a user chosen by the test.
fn kubeconfig(cluster: &Cluster, node: &ClusterNode, user: Value) -> PathBuf {
    let ready = cluster.ready();
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "c", "cluster": { "server": ready.server, "certificate-authority": ready.ca } }],
        "users": [{ "name": "u", "user": user }],
        "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
        "current-context": "c",
    });
    let file = node.folder().unwrap().join("own.kubeconfig");
    std::fs::write(&file, config.to_string()).unwrap();
    file
}

/// The flags of a node with this kubeconfig.
fn arguments(node: &ClusterNode, kubeconfig: &Path) -> Vec<OsString> {
    let mut access = node.access.clone();
    access.client.kubeconfig = kubeconfig.to_owned();
    let mut arguments = node.node.cluster_arguments(&access);
    arguments.push(flag("cert-dir", &node.folder().unwrap().join("pki")));
    arguments
}

fn flag(name: &str, value: &Path) -> OsString {
    format!("--{name}={}", value.display()).into()
}

/// A client certificate of the node that expires in so many seconds; negative for an expired one.
async fn certificate(cluster: &Cluster, node: &ClusterNode, age: u64, left: i64) -> Credentials {
    let now = SystemTime::now();
    let span = Duration::from_secs(left.unsigned_abs());
    let identity = Identity {
        common_name: format!("system:node:{}", node.name()),
        group: Some("system:nodes".to_owned()),
        not_before: Some(now - Duration::from_secs(age)),
        not_after: Some(if left < 0 { now - span } else { now + span }),
        ..Identity::default()
    };
    cluster.on_control_plane(move |plane| plane.issue(&identity)).await.unwrap()
}

/// Writes a pair where the kubeconfig refers to it. The key is written second, so the two do not match for a moment.
fn put(pair: &Credentials, (certificate, key): &(PathBuf, PathBuf)) {
    std::fs::copy(&pair.certificate, certificate).unwrap();
    std::fs::copy(&pair.key, key).unwrap();
}

/// Number of rejected requests since the agent started.
async fn refusals(node: &ClusterNode) -> f64 {
    let url = format!("http://{}:{READ_ONLY_PORT}/metrics", node.access.address);
    let text = reqwest::Client::builder().no_proxy().build().unwrap().get(url).send().await.unwrap().text().await;
    let text = text.unwrap();
    let counts =
        text.lines().filter(|line| line.starts_with("rest_client_requests_total{") && line.contains("\"401\""));
    counts.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

/// Rejected requests per second of a node that has reported one. Measured until it has tried again and [`MEASURED`] has
/// passed.
async fn refusal_rate(node: &ClusterNode) -> f64 {
    let (before, began) = (refusals(node).await, Instant::now());
    assert!(before > 0.0, "no rejected request is counted");
    loop {
        let (more, passed) = (refusals(node).await - before, began.elapsed());
        if more > 0.0 && passed >= MEASURED {
            return more / passed.as_secs_f64();
        }
        assert!(passed < RETRY_TIMEOUT, "the node does not try again");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// A pod whose process exits with code 3 when a file appears.
async fn pod_that_exits_on_request(tenant: &Tenant) -> PathBuf {
    let folder = tenant.node.folder().unwrap().join("reported");
    std::fs::create_dir_all(&folder).unwrap();
    let script = format!("until test -e {}/go; do sleep 0.1; done; exit 3", folder.display());
    let mut pod = tenant.shell(&script);
    pod["restartPolicy"] = json!("Never");
    pod["volumes"] = json!([{ "name": "dir", "hostPath": { "path": folder, "type": "Directory" } }]);
    pod["containers"][0]["volumeMounts"] = json!([{ "name": "dir", "mountPath": folder }]);
    tenant.pod("waiting", pod).await.unwrap();
    tenant.until_ready("waiting").await.unwrap();
    folder.join("go")
}

/// The running containers.
fn running(tenant: &Tenant) -> Vec<String> {
    let pods = tenant.node.pods().unwrap().into_iter().filter(|pod| pod.namespace == tenant.namespace);
    pods.flat_map(|pod| pod.containers).filter(|one| one.state == "running").map(|one| one.id).collect()
}

/// Checks that the pod is unchanged, creates its file, and waits until its exit is reported.
async fn until_exit_is_reported(tenant: &Tenant, go: &Path, before: &[String]) {
    assert_eq!(running(tenant), before, "no container was restarted");
    std::fs::write(go, "").unwrap();
    let pod = tenant.until_phase("waiting", "Failed").await.unwrap();
    let state = pod.status.unwrap().container_statuses.unwrap()[0].state.clone().unwrap();
    assert_eq!(state.terminated.unwrap().exit_code, 3);
}

async fn stop_and_remove(tenant: Tenant) {
    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn rejected_token_is_retried_and_reread_from_its_file() {
    let cluster = Cluster::shared().await.unwrap();
    let node = prepare(&cluster, json!({})).await;
    let tenant = Tenant::on(cluster, node.clone(), "token").await.unwrap();
    let kubectl = tenant.kubectl();
    let mut bind = vec!["create".to_owned(), "clusterrolebinding".to_owned(), tenant.namespace.clone()];
    bind.push("--clusterrole=cluster-admin".to_owned());
    for name in ["first", "second"] {
        tenant.create::<ServiceAccount>(json!({ "metadata": { "name": name } })).await.unwrap();
        bind.push(format!("--serviceaccount={}:{name}", tenant.namespace));
    }
    kubectl.ok(&bind.iter().map(String::as_str).collect::<Vec<_>>()).await.unwrap();
    let file = node.folder().unwrap().join("token");
    std::fs::write(&file, "unknown.token").unwrap();
    let access = kubeconfig(&tenant.cluster, &node, json!({ "tokenFile": file }));
    node.start_agent_with(arguments(&node, &access)).await.unwrap();
    let pid = node.agent_pid().unwrap();

    node.until_logged(&format!("{REFUSED}, token file {}", file.display()), 1).await.unwrap();
    let rate = refusal_rate(&node).await;
    assert!(rate < REFUSALS_PER_SECOND, "{rate} requests per second were rejected");
    std::fs::write(&file, kubectl.ok(&["create", "token", "first"]).await.unwrap()).unwrap();
    node.until_ready(&tenant.cluster).await.unwrap();

    // Rejected while pods run, as its service account is deleted; the API server caches tokens for ten seconds.
    let go = pod_that_exits_on_request(&tenant).await;
    let before = running(&tenant);
    tenant.api::<ServiceAccount>().delete("first", &DeleteParams::default()).await.unwrap();
    node.until_logged(REFUSED, 2).await.unwrap();
    let rate = refusal_rate(&node).await;
    assert!(rate < REFUSALS_PER_SECOND, "{rate} requests per second were rejected");
    std::fs::write(&file, kubectl.ok(&["create", "token", "second"]).await.unwrap()).unwrap();
    let log = node.until_logged(ACCEPTED, 2).await.unwrap();
    until_exit_is_reported(&tenant, &go, &before).await;
    assert_eq!(log.matches(REFUSED).count(), 2, "reported once each time:\n{log}");
    assert_eq!(node.agent_pid().unwrap(), pid);
    kubectl.ok(&["delete", "clusterrolebinding", &tenant.namespace]).await.unwrap();
    drop(node);
    stop_and_remove(tenant).await;
}

#[tokio::test]
#[ignore = "real cluster"]
async fn expired_client_certificate_is_reported_and_reread_from_its_file() {
    let cluster = Cluster::shared().await.unwrap();
    let node = prepare(&cluster, json!({})).await;
    let folder = node.folder().unwrap();
    let files = (folder.join("own.crt"), folder.join("own.key"));
    put(&certificate(&cluster, &node, 3600, -60).await, &files);
    let user = json!({ "client-certificate": files.0, "client-key": files.1 });
    node.start_agent_with(arguments(&node, &kubeconfig(&cluster, &node, user))).await.unwrap();
    let pid = node.agent_pid().unwrap();

    let named = format!("{REFUSED}, client certificate {}, expired at 2", files.0.display());
    node.until_logged(&named, 1).await.unwrap();
    let rate = refusal_rate(&node).await;
    assert!(rate < REFUSALS_PER_SECOND, "{rate} requests per second were rejected");
    // A valid one, which expires while pods run.
    put(&certificate(&cluster, &node, 3600, 40).await, &files);
    node.until_ready(&cluster).await.unwrap();
    let tenant = Tenant::on(cluster, node.clone(), "expired").await.unwrap();
    let go = pod_that_exits_on_request(&tenant).await;
    let before = running(&tenant);
    node.until_logged(&named, 2).await.unwrap();
    put(&certificate(&tenant.cluster, &node, 3600, 3600).await, &files);
    let log = node.until_logged(ACCEPTED, 2).await.unwrap();
    until_exit_is_reported(&tenant, &go, &before).await;
    assert_eq!(log.matches(REFUSED).count(), 2, "reported once each time:\n{log}");
    assert_eq!(node.agent_pid().unwrap(), pid);
    drop(node);
    stop_and_remove(tenant).await;
}

#[tokio::test]
#[ignore = "real cluster"]
async fn expired_client_certificate_triggers_bootstrap() {
    let cluster = Cluster::shared().await.unwrap();
    let node = prepare(&cluster, json!({ "rotateCertificates": true })).await;
    let expired = certificate(&cluster, &node, 3600, -60).await;
    let user = json!({ "client-certificate": expired.certificate, "client-key": expired.key });
    let mut flags = arguments(&node, &kubeconfig(&cluster, &node, user));
    flags.push(flag("bootstrap-kubeconfig", &cluster.ready().bootstrap_kubeconfig));
    node.start_agent_with(flags).await.unwrap();
    node.until_ready(&cluster).await.unwrap();
    let pki = node.folder().unwrap().join("pki/kubelet-client-current.pem");
    let written = std::fs::read_to_string(node.folder().unwrap().join("own.kubeconfig")).unwrap();
    assert!(pki.exists() && written.contains(pki.to_str().unwrap()), "{written}");
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn watches_continue_with_a_rotated_client_certificate() {
    let cluster = Cluster::shared().await.unwrap();
    let node = prepare(&cluster, json!({ "rotateCertificates": true })).await;
    // Nine tenths of its validity have passed, so that it is renewed at once.
    let left = 30;
    let old = certificate(&cluster, &node, 10 * left, left.cast_signed()).await;
    let end = SystemTime::now() + Duration::from_secs(left);
    let user = json!({ "client-certificate": old.certificate, "client-key": old.key });
    node.start_agent_with(arguments(&node, &kubeconfig(&cluster, &node, user))).await.unwrap();
    node.until_ready(&cluster).await.unwrap();
    let tenant = Tenant::on(cluster, node.clone(), "rotated").await.unwrap();
    let go = pod_that_exits_on_request(&tenant).await;
    let before = running(&tenant);
    // From then on requests with the old certificate are rejected.
    tokio::time::sleep(end.duration_since(SystemTime::now()).unwrap_or_default()).await;
    tenant.pod("later", tenant.shell("sleep 3600")).await.unwrap();
    tenant.until_ready("later").await.unwrap();
    tenant.api::<Pod>().delete("later", &DeleteParams::default().grace_period(1)).await.unwrap();
    tenant.until("later", "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    until_exit_is_reported(&tenant, &go, &before).await;
    let log = node.log();
    assert!(!log.contains(REFUSED), "{log}");
    drop(node);
    stop_and_remove(tenant).await;
}
