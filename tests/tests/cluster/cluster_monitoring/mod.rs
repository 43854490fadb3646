//! A monitoring stack on two nodes: applied, updated, drained from a node and deleted with kubectl, while clients of its
//! services send requests. None of them fails, and nothing remains of the stack.

mod objects;
mod traffic;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::batch::v1::CronJob;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use keblet_peers::Cache;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use keblet_tests::registry::Image;
use keblet_tests::registry::Registry;
use kube::api::ListParams;
use objects::REPLICAS;
use objects::SERVICES;
use objects::Stack;
use serde_json::json;
use tokio::time::Instant;
use traffic::Traffic;

const ROLLOUTS: [&str; 3] = ["deployment/grafana", "statefulset/prometheus", "daemonset/node-exporter"];
/// Requests that each service answers after each change.
const REQUESTS: usize = 20;
/// Size of the layer of the pulled image.
const LAYER: usize = 1 << 16;
const POLL: std::time::Duration = std::time::Duration::from_millis(100);

/// Sends the list to kubectl.
async fn kubectl_with(tenant: &Tenant, arguments: &[&str], list: &str) {
    let output = tenant.kubectl().run_with(arguments, list).await.unwrap();
    assert_eq!(output.code, 0, "{arguments:?}: {}{}", output.out, output.err);
}

async fn until_rolled_out(tenant: &Tenant, nodes: &[&ClusterNode]) {
    for workload in ROLLOUTS {
        let output = tenant.kubectl().run(&["rollout", "status", workload, "--timeout=85s"]).await.unwrap();
        if output.code != 0 {
            let pods = tenant.kubectl().run(&["describe", "pods"]).await.unwrap().out;
            let logs: Vec<String> = nodes.iter().map(|node| node.log_excerpt()).collect();
            panic!("{workload}: {}{}\n{pods}\n{}", output.out, output.err, logs.join("\n"));
        }
    }
}

async fn pods(tenant: &Tenant) -> Vec<Pod> {
    tenant.api::<Pod>().list(&ListParams::default()).await.unwrap().items
}

fn app(pod: &Pod) -> &str {
    pod.metadata.labels.as_ref().unwrap()["app"].as_str()
}

/// Pods of the services by app and node, each with its restarts.
fn placed(pods: &[Pod]) -> BTreeMap<(&str, &str), Vec<i32>> {
    let mut placed: BTreeMap<_, Vec<i32>> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| SERVICES.contains(&app(pod)) && pod.metadata.deletion_timestamp.is_none()) {
        let status = pod.status.as_ref().unwrap();
        let containers = status
            .container_statuses
            .iter()
            .chain(&status.init_container_statuses)
            .flatten()
            .map(|one| one.restart_count);
        let node = pod.spec.as_ref().unwrap().node_name.as_deref().unwrap();
        placed.entry((app(pod), node)).or_default().push(containers.sum());
    }
    placed
}

/// How many pods of an app are on a node.
fn count(placed: &BTreeMap<(&str, &str), Vec<i32>>, app: &str, node: &ClusterNode) -> usize {
    placed.get(&(app, node.name())).map_or(0, Vec::len)
}

async fn check_deployed(tenant: &Tenant, registry: &Registry, nodes: [&ClusterNode; 2]) {
    let done = |job: Option<&Job>| (job?.status.as_ref()?.succeeded? == 2).then_some(());
    tenant.until("migrate", "two completions", done).await.unwrap();
    let pods = pods(tenant).await;
    let placed = placed(&pods);
    assert!(placed.values().flatten().all(|restarts| *restarts == 0), "{placed:?}");
    for node in nodes {
        assert_eq!(count(&placed, "node-exporter", node), 1, "{placed:?}");
        assert!(count(&placed, "grafana", node) >= 1, "not spread: {placed:?}");
    }
    let kubectl = tenant.kubectl();
    for ordinal in 0..REPLICAS.1 {
        let pod = format!("prometheus-{ordinal}");
        let name = kubectl.ok(&["exec", &pod, "-c", "config-reloader", "--", "hostname", "-f"]).await.unwrap();
        assert_eq!(name.trim(), format!("{pod}.prometheus.{}.svc.cluster.local", tenant.namespace));
    }
    let requests = registry.take_requests();
    let pulled = requests.iter().filter(|request| request.status == 200);
    let mut paths: Vec<&str> = pulled
        .inspect(|request| assert_eq!(request.authorization.as_deref(), Some(objects::LOGIN), "{request:?}"))
        .filter_map(|request| request.path.split('/').nth(2))
        .collect();
    paths.sort_unstable();
    paths.dedup();
    assert_eq!(paths, objects::REPOSITORIES, "{requests:?}");
}

/// All pods but the DaemonSet's leave the node, one of each app at a time.
async fn drain(tenant: &Tenant, node: &ClusterNode, other: &ClusterNode) {
    let arguments = ["drain", node.name(), "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=85s"];
    tenant.kubectl().ok(&arguments).await.unwrap_or_else(|error| panic!("{error:#}\n{}", node.log_excerpt()));
    until_rolled_out(tenant, &[node, other]).await;
    let pods = pods(tenant).await;
    let placed = placed(&pods);
    assert_eq!(count(&placed, "node-exporter", node), 1, "{placed:?}");
    for (app, replicas) in [("grafana", REPLICAS.0), ("prometheus", REPLICAS.1)] {
        let counts = [node, other].map(|node| count(&placed, app, node));
        assert_eq!(counts, [0, usize::try_from(replicas).unwrap()], "{placed:?}");
    }
    let running = node.pods().unwrap().into_iter().filter(|pod| pod.ready).map(|pod| pod.name);
    let left: Vec<String> = running.filter(|name| !name.starts_with("node-exporter-")).collect();
    assert!(left.is_empty(), "sandboxes of {left:?} are ready after the drain");
    tenant.kubectl().ok(&["uncordon", node.name()]).await.unwrap();
}

async fn until_no_pods(tenant: &Tenant, nodes: [&ClusterNode; 2]) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let left: Vec<String> = pods(tenant).await.into_iter().filter_map(|pod| pod.metadata.name).collect();
        if left.is_empty() {
            return;
        }
        let logs = || nodes.map(|node| node.log_excerpt()).join("\n");
        assert!(Instant::now() < deadline, "{left:?} are not removed\n{}", logs());
        tokio::time::sleep(POLL).await;
    }
}

/// Two nodes with the stack's label, and its namespace.
async fn prepare() -> (Tenant, Arc<ClusterNode>) {
    let cluster = Cluster::shared().await.unwrap();
    // Until a pod of the other node is there, a drained node's clients have to be served by it.
    let (first, second) =
        tokio::join!(ClusterNode::start(&cluster, json!({})), ClusterNode::start(&cluster, json!({})));
    let (first, second) = (Arc::new(first.unwrap()), Arc::new(second.unwrap()));
    let tenant = Tenant::on(cluster, first.clone(), "monitoring").await.unwrap();
    let label = format!("{}={}", objects::NODE_LABEL, tenant.namespace);
    tenant.kubectl().ok(&["label", "node", first.name(), second.name(), &label]).await.unwrap();
    (tenant, second)
}

#[tokio::test]
#[ignore = "real cluster"]
async fn a_monitoring_stack_is_deployed_updated_drained_and_deleted_without_a_failed_request() {
    let (tenant, second) = prepare().await;
    let first = tenant.node.clone();
    let nodes = [&*first, &*second];
    let Some(registry) = first.start_registry(&[objects::USER]).unwrap() else { return };
    let image = Image::new(&Cache::locate(), PROBE_IMAGE, LAYER).unwrap();
    for (repository, tag) in objects::REPOSITORIES.into_iter().flat_map(|name| [(name, "1"), (name, "2")]) {
        registry.push_as(repository, tag, &image).unwrap();
    }
    let stack = Stack { tenant: &tenant, registry: &registry };
    let traffic = Traffic::start(&tenant, &SERVICES);

    kubectl_with(&tenant, &["apply", "-f", "-"], &stack.list("1")).await;
    until_rolled_out(&tenant, &nodes).await;
    traffic.until_answered(REQUESTS).await;
    check_deployed(&tenant, &registry, nodes).await;

    kubectl_with(&tenant, &["apply", "-f", "-"], &stack.list("2")).await;
    until_rolled_out(&tenant, &nodes).await;
    traffic.until_answered(REQUESTS).await;
    assert_eq!(traffic.failures(), Vec::<String>::new(), "after the update");

    drain(&tenant, &first, &second).await;
    traffic.until_answered(REQUESTS).await;
    assert_eq!(traffic.failures(), Vec::<String>::new(), "after the drain");
    let restarts: i32 = placed(&pods(&tenant).await).values().flatten().sum();
    assert_eq!(restarts, 0, "restarts");

    let ran = |cron: Option<&CronJob>| cron?.status.as_ref()?.last_successful_time.clone();
    tenant.until("backup", "a scheduled run that succeeded", ran).await.unwrap();
    traffic.permit_end();
    kubectl_with(&tenant, &["delete", "-f", "-"], &stack.list("2")).await;
    until_no_pods(&tenant, nodes).await;
    let (answered, failures) = traffic.end();
    assert_eq!(failures, Vec::<String>::new(), "of {answered} requests");
    for node in nodes {
        node.until_nothing_remains().await.unwrap();
    }
    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    drop(node);
    for node in [first, second] {
        Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
    }
}
