//! A control plane that is killed, suspended or loses history, and an agent that is killed: no pod is lost or restarted
//! without need, and the last status reaches the API server.

use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::Instant;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Pod;
use keblet_peers::Part;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use kube::api::DeleteParams;
use serde_json::Value;
use serde_json::json;

const POLL: Duration = Duration::from_millis(50);

/// A test with a control plane of its own, and a folder that pods mount under the same path.
async fn exclusive_tenant(name: &str) -> (Tenant, PathBuf) {
    let cluster = Cluster::exclusive().await.unwrap();
    let node = cluster.node().await.unwrap();
    let tenant = Tenant::on(cluster, node, name).await.unwrap();
    let folder = tenant.node.folder().unwrap().join(&tenant.namespace);
    std::fs::create_dir_all(&folder).unwrap();
    (tenant, folder)
}

/// A shell that mounts the folder, with `restartPolicy: Never`. It is bound to the node already: after some outages the
/// scheduler pauses for up to a minute before it watches again.
fn shell(tenant: &Tenant, folder: &PathBuf, script: &str) -> Value {
    let mut pod = tenant.shell(&script.replace("$DIR", folder.to_str().unwrap()));
    pod["nodeName"] = json!(tenant.node.name());
    pod["restartPolicy"] = json!("Never");
    pod["volumes"] = json!([{ "name": "dir", "hostPath": { "path": folder, "type": "Directory" } }]);
    pod["containers"][0]["volumeMounts"] = json!([{ "name": "dir", "mountPath": folder }]);
    pod
}

async fn kill_api_server(tenant: &Tenant) {
    tenant.cluster.on_control_plane(|plane| plane.kill(Part::ApiServer)).await.unwrap();
}

async fn start_api_server(tenant: &Tenant) {
    tenant.cluster.on_control_plane(|plane| plane.start_part(Part::ApiServer)).await.unwrap();
}

/// The runtime's containers of the namespace: by pod and name, each instance's attempt, id and state.
fn containers(tenant: &Tenant) -> BTreeMap<String, Vec<(u32, String, String)>> {
    let mut all: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for pod in tenant.node.pods().unwrap().into_iter().filter(|pod| pod.namespace == tenant.namespace) {
        for one in pod.containers {
            all.entry(format!("{}/{}", pod.name, one.name)).or_default().push((one.attempt, one.id, one.state));
        }
    }
    all
}

/// Waits for a condition on the node, as the API server is not available.
async fn until_on_node(tenant: &Tenant, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "timed out waiting for: {what}\n{}", tenant.node.log_excerpt());
        tokio::time::sleep(POLL).await;
    }
}

/// Waits until the shell has set its SIGTERM handler; before that, PID 1 ignores the signal.
async fn until_listening(tenant: &Tenant, dir: &Path) {
    until_on_node(tenant, "a shell that listens", || dir.join("up").exists()).await;
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pending_pod_starts_while_the_api_server_is_down() {
    let (tenant, dir) = exclusive_tenant("pending").await;
    let mut pod = shell(&tenant, &dir, "touch $DIR/started; sleep 3600");
    let mut init = pod["containers"][0].clone();
    init["name"] = json!("wait");
    init["command"][2] = json!(format!("touch {0}/waiting; until test -e {0}/go; do sleep 0.05; done", dir.display()));
    pod["initContainers"] = json!([init]);
    tenant.pod("slow", pod).await.unwrap();
    until_on_node(&tenant, "the init container", || dir.join("waiting").exists()).await;
    kill_api_server(&tenant).await;
    std::fs::write(dir.join("go"), "").unwrap();
    until_on_node(&tenant, "the main container", || dir.join("started").exists()).await;
    start_api_server(&tenant).await;
    let pod = tenant.until_ready("slow").await.unwrap();
    let status = pod.status.unwrap();
    let counts: Vec<i32> = [status.init_container_statuses, status.container_statuses]
        .into_iter()
        .flatten()
        .flatten()
        .map(|one| one.restart_count)
        .collect();
    assert_eq!(counts, [0, 0]);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pod_created_before_an_api_server_crash_runs_afterwards() {
    let (tenant, dir) = exclusive_tenant("created").await;
    tenant.pod("early", shell(&tenant, &dir, "sleep 3600")).await.unwrap();
    kill_api_server(&tenant).await;
    start_api_server(&tenant).await;
    tenant.until_ready("early").await.unwrap();
    let found = containers(&tenant);
    assert_eq!(found["early/main"].len(), 1, "{found:?}");
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn exits_while_the_api_server_is_down_are_reported_later() {
    let (tenant, dir) = exclusive_tenant("running").await;
    let wait = "until test -e $DIR/go; do sleep 0.05; done";
    tenant.pod("once", shell(&tenant, &dir, &format!("{wait}; exit 6"))).await.unwrap();
    let again = format!("test -e $DIR/again && {{ touch $DIR/second; sleep 3600; }}; {wait}; touch $DIR/again; exit 1");
    let mut always = shell(&tenant, &dir, &again);
    always["restartPolicy"] = json!("Always");
    tenant.pod("always", always).await.unwrap();
    tenant.pod("calm", shell(&tenant, &dir, "sleep 3600")).await.unwrap();
    for name in ["once", "always", "calm"] {
        tenant.until_ready(name).await.unwrap();
    }
    let before = containers(&tenant);
    kill_api_server(&tenant).await;
    std::fs::write(dir.join("go"), "").unwrap();
    until_on_node(&tenant, "the second instance", || dir.join("second").exists()).await;
    start_api_server(&tenant).await;
    let pod = tenant.until_phase("once", "Failed").await.unwrap();
    let state = pod.status.unwrap().container_statuses.unwrap()[0].state.clone().unwrap();
    assert_eq!(state.terminated.unwrap().exit_code, 6);
    let restarted = |pod: Option<&Pod>| {
        let status = pod?.status.as_ref()?.container_statuses.as_ref()?.first()?;
        (status.restart_count == 1 && status.ready).then_some(())
    };
    tenant.until("always", "its restart reported", restarted).await.unwrap();
    let after = containers(&tenant);
    assert_eq!(after["calm/main"], before["calm/main"]);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pod_terminated_while_the_api_server_is_down_is_deleted_afterwards() {
    let (tenant, dir) = exclusive_tenant("terminating").await;
    let script = "trap 'touch $DIR/reported; until test -e $DIR/go; do sleep 0.05; done; exit 0' TERM; \
                  touch $DIR/up; while :; do sleep 0.05; done";
    let mut pod = shell(&tenant, &dir, script);
    pod["terminationGracePeriodSeconds"] = json!(300);
    tenant.pod("leaving", pod).await.unwrap();
    until_listening(&tenant, &dir).await;
    tenant.api::<Pod>().delete("leaving", &DeleteParams::default()).await.unwrap();
    until_on_node(&tenant, "SIGTERM", || dir.join("reported").exists()).await;
    kill_api_server(&tenant).await;
    std::fs::write(dir.join("go"), "").unwrap();
    let running = || containers(&tenant).values().flatten().any(|(_, _, state)| state == "running");
    until_on_node(&tenant, "the container's end", || !running()).await;
    start_api_server(&tenant).await;
    tenant.until("leaving", "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn api_server_restart_does_not_shorten_the_grace_period() {
    let (tenant, dir) = exclusive_tenant("grace").await;
    let script = "trap 'echo >> $DIR/reported' TERM; touch $DIR/up; until test -e $DIR/go; do sleep 0.05; done; exit 0";
    let mut pod = shell(&tenant, &dir, script);
    pod["terminationGracePeriodSeconds"] = json!(300);
    tenant.pod("slow", pod).await.unwrap();
    until_listening(&tenant, &dir).await;
    tenant.api::<Pod>().delete("slow", &DeleteParams::default()).await.unwrap();
    until_on_node(&tenant, "SIGTERM", || dir.join("reported").exists()).await;
    kill_api_server(&tenant).await;
    start_api_server(&tenant).await;
    // When another pod runs, the agent has received this one's update again.
    tenant.pod("other", shell(&tenant, &dir, "sleep 3600")).await.unwrap();
    tenant.until_ready("other").await.unwrap();
    assert_eq!(containers(&tenant)["slow/main"].iter().filter(|(_, _, state)| state == "running").count(), 1);
    std::fs::write(dir.join("go"), "").unwrap();
    tenant.until("slow", "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    assert_eq!(std::fs::read_to_string(dir.join("reported")).unwrap(), "\n", "one SIGTERM was sent");
    tenant.delete_namespace().await.unwrap();
}

/// The API server is killed at any moment between a pod's creation and its start, and during the termination of
/// another.
#[tokio::test]
#[ignore = "real cluster"]
async fn api_server_crash_at_any_moment_affects_no_pod() {
    let (tenant, dir) = exclusive_tenant("moments").await;
    let pod = || shell(&tenant, &dir, "trap 'exit 0' TERM; while :; do sleep 0.05; done");
    tenant.pod("pod-0", pod()).await.unwrap();
    tenant.until_ready("pod-0").await.unwrap();
    for (round, millis) in [30, 90, 250].into_iter().enumerate() {
        let (old, new) = (format!("pod-{round}"), format!("pod-{}", round + 1));
        tenant.pod(&new, pod()).await.unwrap();
        tenant.api::<Pod>().delete(&old, &DeleteParams::default()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(millis)).await;
        kill_api_server(&tenant).await;
        start_api_server(&tenant).await;
        let ready = tenant.until_ready(&new).await.unwrap();
        assert_eq!(ready.status.unwrap().container_statuses.unwrap()[0].restart_count, 0, "after {millis} ms");
        assert_eq!(containers(&tenant)[&format!("{new}/main")].len(), 1, "after {millis} ms");
        tenant.until(&old, "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    }
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn failed_pull_while_the_api_server_is_down_is_reported_later() {
    let (tenant, dir) = exclusive_tenant("pulling").await;
    // A registry that delays its response, and then closes the connection.
    let registry = tokio::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let mut pod = shell(&tenant, &dir, "true");
    pod["containers"][0]["image"] = json!(format!("{}/slow:1", registry.local_addr().unwrap()));
    pod["containers"][0]["imagePullPolicy"] = json!("Always");
    tenant.pod("waits", pod).await.unwrap();
    let pull = tokio::time::timeout(TIMEOUT, registry.accept()).await;
    let pull = pull.unwrap_or_else(|_| panic!("no pull; {}", tenant.node.log_excerpt())).unwrap();
    kill_api_server(&tenant).await;
    drop((registry, pull));
    start_api_server(&tenant).await;
    let failed = |pod: Option<&Pod>| {
        let state = pod?.status.as_ref()?.container_statuses.as_ref()?.first()?.state.clone()?;
        state.waiting?.reason.filter(|reason| ["ErrImagePull", "ImagePullBackOff"].contains(&reason.as_str()))
    };
    tenant.until("waits", "a failed pull", failed).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pod_deleted_while_disconnected_terminates_after_reconnect() {
    let (tenant, dir) = exclusive_tenant("disconnected").await;
    tenant.pod("running", shell(&tenant, &dir, "trap 'exit 0' TERM; while :; do sleep 0.05; done")).await.unwrap();
    tenant.until_ready("running").await.unwrap();
    tenant.node.kill_agent().unwrap();
    tenant.api::<Pod>().delete("running", &DeleteParams::default()).await.unwrap();
    kill_api_server(&tenant).await;
    tenant.node.start_agent().await.unwrap();
    start_api_server(&tenant).await;
    tenant.until("running", "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn hanging_api_server_delays_no_container() {
    let (tenant, dir) = exclusive_tenant("hanging").await;
    let script = "n=$(ls $DIR | wc -l); touch $DIR/run-$n; test $n -gt 0 && sleep 3600; exit 1";
    let mut pod = shell(&tenant, &dir, script);
    pod["restartPolicy"] = json!("Always");
    tenant.pod("restless", pod).await.unwrap();
    until_on_node(&tenant, "the first run", || dir.join("run-0").exists()).await;
    tenant.cluster.on_control_plane(|plane| plane.freeze(Part::ApiServer)).await.unwrap();
    until_on_node(&tenant, "the second run", || dir.join("run-1").exists()).await;
    tenant.cluster.on_control_plane(|plane| plane.thaw(Part::ApiServer)).await.unwrap();
    tenant.until_ready("restless").await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn compacted_watch_history_is_relisted() {
    let (tenant, dir) = exclusive_tenant("compacted").await;
    tenant.pod("before", shell(&tenant, &dir, "sleep 3600")).await.unwrap();
    tenant.until_ready("before").await.unwrap();
    let before = containers(&tenant);
    // Objects are changed while the agent is disconnected, and then the history is compacted.
    let map = json!({ "metadata": { "name": "later" }, "data": { "key": "value" } });
    tenant.create::<ConfigMap>(map).await.unwrap();
    kill_api_server(&tenant).await;
    let revision = tenant.cluster.on_control_plane(|plane| plane.compact()).await.unwrap();
    assert!(revision > 0);
    start_api_server(&tenant).await;
    // A new pod starts, a deleted one is removed, and the one in between is unchanged.
    tenant.pod("after", shell(&tenant, &dir, "sleep 3600")).await.unwrap();
    tenant.until_ready("after").await.unwrap();
    assert_eq!(containers(&tenant)["before/main"], before["before/main"]);
    tenant.api::<Pod>().delete("before", &DeleteParams::default().grace_period(1)).await.unwrap();
    tenant.until("before", "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn agent_restart_changes_no_pod() {
    let (tenant, dir) = exclusive_tenant("restart").await;
    let mut served = shell(&tenant, &dir, "while :; do sleep 1; done");
    served["restartPolicy"] = json!("Always");
    for name in ["one", "two", "three"] {
        tenant.pod(name, served.clone()).await.unwrap();
    }
    for name in ["one", "two", "three"] {
        tenant.until_ready(name).await.unwrap();
    }
    let before = containers(&tenant);
    for (round, gently) in [("gently", true), ("brutally", false)] {
        if gently {
            tenant.node.end_agent().unwrap();
        } else {
            tenant.node.kill_agent().unwrap();
        }
        tenant.node.start_agent().await.unwrap();
        // When a new pod runs and an old one can be deleted, the agent has processed all others too.
        tenant.pod(round, shell(&tenant, &dir, "sleep 3600")).await.unwrap();
        tenant.until_ready(round).await.unwrap();
        tenant.api::<Pod>().delete(round, &DeleteParams::default().grace_period(1)).await.unwrap();
        tenant.until(round, "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
        for name in ["one", "two", "three"] {
            let pod = tenant.until_ready(name).await.unwrap();
            assert_eq!(pod.status.unwrap().container_statuses.unwrap()[0].restart_count, 0, "{name}, {round}");
        }
        let mut after = containers(&tenant);
        after.retain(|name, _| before.contains_key(name));
        assert_eq!(after, before, "{round}");
    }
    tenant.delete_namespace().await.unwrap();
}
