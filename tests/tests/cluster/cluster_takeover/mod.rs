//! A node is taken over: upstream's kubelet, keblet in its place, the kubelet again, with pods of every kind running.
//!
//! All agents use the same folders, runtime, configuration and identity. What each of them must not touch is compared
//! before and after: containers with ids and PIDs, statuses, mounts, files, events.

mod pods;
mod state;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use futures_util::StreamExt as _;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::api::core::v1::Pod;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use kube::api::DeleteParams;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher;
use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use serde_json::json;
use state::State;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A kubelet shows containers as not ready that started less than 10 s before itself, until they were probed.
const SETTLED: Duration = Duration::from_secs(11);
const POLL: Duration = Duration::from_millis(50);
/// Static pod whose manifest is changed.
const EDITED: &str = "static-edited";
/// Annotation that the pod `volumes` has in a file.
const MARK: &str = "mark";

/// Records every state in which a pod that was Ready is not, and in which the node is not.
struct FlapWatch {
    found: watch::Receiver<Vec<String>>,
    tasks: Vec<JoinHandle<()>>,
}

impl FlapWatch {
    /// Pods named `excepted` may become not Ready.
    fn start(tenant: &Tenant, excepted: &[&str]) -> Self {
        let (sender, found) = watch::channel(Vec::new());
        let sender = Arc::new(sender);
        let mut pods =
            Box::pin(watcher(tenant.api::<Pod>(), watcher::Config::default()).default_backoff().applied_objects());
        let excepted: Vec<String> = excepted.iter().map(|&name| name.to_owned()).collect();
        let of_pods = sender.clone();
        let pods = tokio::spawn(async move {
            let mut ready = std::collections::BTreeSet::new();
            while let Some(pod) = pods.next().await {
                let Ok(pod) = pod else { continue };
                let name = pod.metadata.name.clone().unwrap_or_default();
                let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
                let is_ready = conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True");
                if is_ready {
                    ready.insert(name);
                } else if ready.contains(&name) && !excepted.iter().any(|other| name.contains(other)) {
                    let status = serde_json::to_string(&pod.status).unwrap_or_default();
                    of_pods.send_modify(|found| found.push(format!("{name} is not Ready: {status}")));
                }
            }
        });
        let node = watcher::Config::default().fields(&format!("metadata.name={}", tenant.node.name()));
        let nodes = kube::Api::<NodeObject>::all(tenant.cluster.client());
        let mut nodes = Box::pin(watcher(nodes, node).default_backoff().applied_objects());
        let node = tokio::spawn(async move {
            while let Some(node) = nodes.next().await {
                let Ok(node) = node else { continue };
                let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
                for ready in conditions.iter().filter(|one| one.type_ == "Ready" && one.status != "True") {
                    sender.send_modify(|found| found.push(format!("the node is not Ready: {:?}", ready.message)));
                }
            }
        });
        Self { found, tasks: vec![pods, node] }
    }

    fn end(self) -> Vec<String> {
        self.tasks.iter().for_each(JoinHandle::abort);
        self.found.borrow().clone()
    }
}

fn kubelet() -> Option<PathBuf> {
    let kubelet = keblet_peers::find_programs().unwrap().join("kubelet");
    if !kubelet.exists() {
        keblet_skip::skip(&format!("needs {}: run `cargo xtask peers`", kubelet.display()));
        return None;
    }
    Some(kubelet)
}

/// A tenant on a node that upstream's kubelet runs.
async fn kubelet_node(kubelet: &std::path::Path) -> Tenant {
    let cluster = Cluster::shared().await.unwrap();
    // Frequent syncs, so that all pods are synced while they are compared.
    let changes = json!({ "syncFrequency": "1s", "fileCheckFrequency": "1s" });
    let node = ClusterNode::start_other(&cluster, kubelet, changes).await.unwrap();
    Tenant::on(cluster, Arc::new(node), "takeover").await.unwrap()
}

fn restarts(pod: &Pod) -> i32 {
    let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    statuses.map(|status| status.restart_count).sum()
}

async fn until_restarts(tenant: &Tenant, pod: &str, count: i32) {
    let restarted = |pod: Option<&Pod>| {
        let pod = pod?;
        let ready = pod.status.as_ref()?.container_statuses.as_ref()?.iter().all(|status| status.ready);
        (restarts(pod) == count && ready).then_some(())
    };
    tenant.until(pod, &format!("{count} restarts"), restarted).await.unwrap();
}

/// Waits until every pod is in the state that is compared.
async fn until_all_run(tenant: &Tenant, statics: &[&str]) {
    for pod in pods::READY {
        tenant.until_ready(pod).await.unwrap();
    }
    for name in statics {
        tenant.until_ready(&mirror(tenant, name)).await.unwrap();
    }
    let done = |job: Option<&Job>| (job?.status.as_ref()?.succeeded? == 1).then_some(());
    tenant.until("job", "succeeded", done).await.unwrap();
    let runs = |set: Option<&DaemonSet>| (set?.status.as_ref()?.number_ready >= 1).then_some(());
    tenant.until("daemon", "ready", runs).await.unwrap();
    let ready = |set: Option<&Deployment>| (set?.status.as_ref()?.ready_replicas? == pods::REPLICAS).then_some(());
    tenant.until("replicas", "ready", ready).await.unwrap();
    pods::resize(tenant).await;
    let ended = |pod: Option<&Pod>| {
        let statuses = pod?.status.as_ref()?.container_statuses.as_ref()?;
        let ended =
            statuses.iter().filter(|status| status.state.iter().any(|state| state.terminated.is_some())).count();
        (ended == 1).then_some(())
    };
    tenant.until("half", "one container ended", ended).await.unwrap();
    until_restarts(tenant, "crashed", 1).await;
}

/// Waits until no container has started too recently for a kubelet to keep its readiness.
async fn until_settled(tenant: &Tenant) {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let started = |pod: &keblet_peers::PodView| pod.containers.iter().map(|one| one.started_at).max().unwrap_or(0);
        let last = tenant.node.pods().unwrap().iter().map(started).max().unwrap_or(0);
        if now.saturating_sub(Duration::from_nanos(u64::try_from(last).unwrap())) > SETTLED {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "containers are started again and again");
        tokio::time::sleep(POLL).await;
    }
}

fn mirror(tenant: &Tenant, name: &str) -> String {
    format!("{name}-{}", tenant.node.name())
}

/// Proves that the agent has synced the pods: a new one runs, and a changed annotation is in a volume.
async fn until_synced(tenant: &Tenant, stage: &str) {
    tenant.pod(&format!("new-{stage}"), tenant.shell(pods::STAY)).await.unwrap();
    tenant.until_ready(&format!("new-{stage}")).await.unwrap();
    let change = json!({ "metadata": { "annotations": { MARK: stage } } });
    let pods = tenant.api::<Pod>();
    let pod = pods.patch("volumes", &PatchParams::default(), &Patch::Merge(&change)).await.unwrap();
    let uid = pod.metadata.uid.unwrap();
    let file = format!("pods/{uid}/volumes/kubernetes.io~downward-api/downward/{MARK}");
    let file = tenant.node.node.root.join(file);
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while std::fs::read_to_string(&file).unwrap() != stage {
        assert!(tokio::time::Instant::now() < deadline, "the volume is not refreshed; {}", tenant.node.log_excerpt());
        tokio::time::sleep(POLL).await;
    }
}

/// A container of the pod is killed and restarted with the next number.
async fn restart_crashed(tenant: &Tenant, count: i32) {
    let state = State::read(tenant).await;
    kill(Pid::from_raw(state.pid("crashed", "main")), Signal::SIGKILL).unwrap();
    until_restarts(tenant, "crashed", count).await;
    let status = State::read(tenant).await.pod("crashed")["containerStatuses"][0].clone();
    assert_eq!(status["lastState"]["terminated"]["exitCode"], 137, "{status:#}");
}

/// An adopted static pod is replaced when its file changes, and ends when it is removed.
async fn replace_edited(tenant: &Tenant) {
    let sandbox = |pods: Vec<keblet_peers::PodView>| {
        let name = mirror(tenant, EDITED);
        pods.into_iter().find(|pod| pod.name == name && pod.ready).map(|pod| pod.id)
    };
    let adopted = sandbox(tenant.node.pods().unwrap()).unwrap();
    tenant.node.node.write_manifest(EDITED, &pods::static_pod(tenant, EDITED, false, "second")).unwrap();
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    while sandbox(tenant.node.pods().unwrap()).is_none_or(|id| id == adopted) {
        assert!(tokio::time::Instant::now() < deadline, "not replaced; {}", tenant.node.log_excerpt());
        tokio::time::sleep(POLL).await;
    }
    tenant.node.node.remove_manifest(EDITED).unwrap();
    let gone = |pod: Option<&Pod>| pod.is_none().then_some(());
    tenant.until(&mirror(tenant, EDITED), "removal", gone).await.unwrap();
}

/// Replaces the running agent by another one, and returns what has changed.
async fn swap(tenant: &Tenant, stage: &str, start: impl AsyncFnOnce(&ClusterNode)) -> Vec<String> {
    until_settled(tenant).await;
    let before = State::read(tenant).await;
    tenant.node.end_agent().unwrap();
    let new = format!("new-{stage}");
    let flaps = FlapWatch::start(tenant, &[&new]);
    start(&tenant.node).await;
    until_synced(tenant, stage).await;
    let mut found = State::read(tenant).await.differences_to(&before, &[&new, "downward"]);
    found.extend(flaps.end());
    found.into_iter().map(|line| format!("{stage}: {line}")).collect()
}

#[tokio::test]
#[ignore = "real cluster"]
async fn a_kubelets_node_is_taken_over_and_handed_back_without_touching_a_pod() {
    let Some(kubelet) = kubelet() else { return };
    let tenant = kubelet_node(&kubelet).await;
    let folder = tenant.node.folder().unwrap().join("host-path");
    std::fs::create_dir_all(&folder).unwrap();
    let statics = ["static", "static-host", EDITED];
    for name in statics {
        let pod = pods::static_pod(&tenant, name, name == "static-host", "first");
        tenant.node.node.write_manifest(name, &pod).unwrap();
    }
    pods::create(&tenant, &folder).await;
    until_all_run(&tenant, &statics).await;

    let mut found = swap(&tenant, "keblet", async |node| node.start_agent().await.unwrap()).await;
    restart_crashed(&tenant, 2).await;
    replace_edited(&tenant).await;
    let statics = ["static", "static-host"];
    // A second keblet knows what the first one has adopted.
    found.extend(swap(&tenant, "again", async |node| node.start_agent().await.unwrap()).await);
    found.extend(swap(&tenant, "kubelet", async |node| node.start_other_agent(&kubelet).unwrap()).await);
    // A kubelet that starts posts its Node as not Ready until it has read its CSINode, computes the first statuses of static
    // pods without their mirror pods, and may drop the addresses of pods that have ended. One before 1.37 says no reason why
    // their sandbox is not ready.
    let kubelets_own = ["kubelet: the node", "kubelet: static-", "kubelet: status of static-"];
    let is_own = |line: &str| {
        let is_address = line.starts_with("kubelet: status of job-") && line.contains(".podIP");
        let is_reason = line.contains("PodSandboxNotReady") || line.contains("pod sandbox is not ready");
        is_address || is_reason || kubelets_own.iter().any(|own| line.starts_with(own))
    };
    found.retain(|line| !is_own(line));
    assert!(found.is_empty(), "changed:\n{}", found.join("\n"));
    restart_crashed(&tenant, 3).await;
    let hooks = std::fs::read_to_string(folder.join("hooks")).unwrap();
    assert_eq!(hooks, "postStart\n", "hooks ran again");
    check_nothing_leaks(tenant, &statics).await;
}

/// The kubelet ends all pods, those that keblet has started too, and nothing of them is left.
async fn check_nothing_leaks(tenant: Tenant, statics: &[&str]) {
    let node = tenant.node.clone();
    let mirrors: Vec<String> = statics.iter().map(|name| mirror(&tenant, name)).collect();
    for name in statics {
        node.node.remove_manifest(name).unwrap();
    }
    for mirror in &mirrors {
        tenant.until(mirror, "removal", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    }
    tenant.api::<DaemonSet>().delete("daemon", &DeleteParams::background()).await.unwrap();
    let namespace = tenant.namespace.clone();
    let (cluster, tenants_node) = tenant.delete_namespace().await.unwrap();
    drop(tenants_node);
    pods::delete_cluster_objects(&cluster, &namespace).await;
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let mounts = state::mounts(&node.node.root);
        let folders: Vec<_> = std::fs::read_dir(node.node.root.join("pods")).unwrap().flatten().collect();
        let running = node.pods().unwrap().into_iter().filter(|pod| pod.namespace == namespace && pod.ready).count();
        if mounts.is_empty() && folders.is_empty() && running == 0 {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "left: {mounts:?} {folders:?}, {running} sandboxes");
        tokio::time::sleep(POLL).await;
    }
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}
