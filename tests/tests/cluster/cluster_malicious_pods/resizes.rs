//! In-place resizes that cannot be done as they are requested: a condition and an event have the reason, the container
//! runs on, no other pod is disturbed, and nothing is left of the pods.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Node;
use keblet_tests::cgroups::CgroupFiles;
use kube::Api;

use super::*;
use crate::cluster_resize::condition;
use crate::cluster_resize::pid;

/// What becomes of a resize.
enum Outcome {
    /// The condition PodResizeInProgress has an error that begins so.
    Fails(&'static str),
    /// The condition PodResizePending has the reason Deferred and a message that begins so.
    Waits(&'static str),
    /// It is done.
    Done,
    /// It is done or fails, as the runtime decides.
    Decided,
}

struct Row {
    pod: Value,
    resources: Value,
    outcome: Outcome,
}

impl Row {
    fn name(&self) -> &str {
        self.pod["metadata"]["name"].as_str().unwrap()
    }

    /// Resizes the running pod, and waits for the outcome and its event.
    async fn resizes(&self, tenant: &Tenant) {
        let name = self.name();
        let before = tenant.until_ready(name).await.unwrap();
        let generation = resize(tenant, name, &self.resources).await.unwrap().metadata.generation;
        let settled = |pod: Option<&Pod>| pod.filter(|pod| self.is_settled(pod, generation)).cloned();
        let after = tenant.until(name, "the outcome of its resize", settled).await.unwrap();
        match self.outcome {
            Outcome::Fails(message) => until_event(tenant, name, "ResizeError", message).await,
            Outcome::Waits(message) => until_event(tenant, name, "ResizeDeferred", message).await,
            Outcome::Done => until_event(tenant, name, "ResizeCompleted", "Pod resize completed: {").await,
            // The kernel may end a container with so little memory.
            Outcome::Decided => return,
        }
        assert_eq!(continuity(&after), continuity(&before), "{name} was disturbed");
    }

    fn is_settled(&self, pod: &Pod, generation: Option<i64>) -> bool {
        let has = |type_: &str, reason: &str, message: &str| {
            condition(pod, type_).is_some_and(|found| {
                let says = found.message.as_deref().is_some_and(|text| text.starts_with(message));
                found.reason.as_deref() == Some(reason) && says && found.observed_generation == generation
            })
        };
        match self.outcome {
            Outcome::Fails(message) => has("PodResizeInProgress", "Error", message),
            Outcome::Waits(message) => has("PodResizePending", "Deferred", message),
            Outcome::Done => is_done(pod, generation, &self.resources),
            Outcome::Decided => has("PodResizeInProgress", "Error", "") || is_done(pod, generation, &self.resources),
        }
    }
}

/// The agent has seen the resize, what it requests is allocated, and nothing of it is left to do.
fn is_done(pod: &Pod, generation: Option<i64>, resources: &Value) -> bool {
    let Some(status) = &pod.status else { return false };
    let container = status.container_statuses.iter().flatten().next();
    let allocated = container.map(|container| serde_json::to_value(&container.allocated_resources).unwrap());
    let is_left = ["PodResizePending", "PodResizeInProgress"].iter().any(|type_| condition(pod, type_).is_some());
    status.observed_generation == generation && allocated.as_ref() == Some(&resources["requests"]) && !is_left
}

/// Changes the resources of the container `main`.
async fn resize(tenant: &Tenant, name: &str, resources: &Value) -> Result<Pod, kube::Error> {
    let patch = json!({ "spec": { "containers": [{ "name": "main", "resources": resources }] } });
    tenant.api::<Pod>().patch_subresource("resize", name, &PatchParams::default(), &Patch::Strategic(&patch)).await
}

/// Requests of CPU and memory, and their limits.
fn resources([cpu, memory]: [&str; 2], [cpu_limit, memory_limit]: [&str; 2]) -> Value {
    json!({
        "requests": { "cpu": cpu, "memory": memory },
        "limits": { "cpu": cpu_limit, "memory": memory_limit },
    })
}

/// The resources before a resize: Burstable.
fn first() -> Value {
    resources(["10m", "8Mi"], ["100m", "96Mi"])
}

/// `all_cpu` is what the node can allocate.
fn rows(tenant: &Tenant, all_cpu: &str) -> Vec<Row> {
    let row = |name: &str, fields: Value, resources: Value, outcome: Outcome| {
        let mut pod = bound(tenant, name, json!({ "resources": first() }), json!({}));
        pod["spec"]["containers"][0].as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        Row { pod, resources, outcome }
    };
    let fill = "dd if=/dev/zero of=/dev/shm/x bs=1M count=40 && touch /dev/shm/full; sleep 3600";
    let uses_memory = json!({
        "command": ["sh", "-c", fill],
        "readinessProbe": { "exec": { "command": ["test", "-e", "/dev/shm/full"] }, "periodSeconds": 1 },
    });
    let in_use = || Outcome::Fails("cannot decrease memory limits: ");
    let no_room = Outcome::Waits("Node didn't have enough resource: cpu, requested: ");
    vec![
        row("memory-in-use", uses_memory, resources(["10m", "8Mi"], ["100m", "16Mi"]), in_use()),
        row("memory-of-a-byte", json!({}), resources(["10m", "1"], ["100m", "1"]), in_use()),
        row("memory-of-a-few-pages", json!({}), resources(["10m", "4Mi"], ["100m", "4Mi"]), Outcome::Decided),
        row("all-of-the-node", json!({}), resources([all_cpu, "8Mi"], [all_cpu, "96Mi"]), no_room),
        row("least-cpu", json!({}), resources(["1m", "8Mi"], ["1m", "96Mi"]), Outcome::Done),
    ]
}

/// A Guaranteed pod cannot become one of another class, and none can be larger than its node.
async fn refuses_another_class_or_size(tenant: &Tenant) {
    let same = resources(["10m", "16Mi"], ["10m", "16Mi"]);
    tenant.create::<Pod>(bound(tenant, "guaranteed", json!({ "resources": same }), json!({}))).await.unwrap();
    let before = tenant.until_ready("guaranteed").await.unwrap();
    let refused = resize(tenant, "guaranteed", &resources(["10m", "16Mi"], ["20m", "16Mi"])).await.unwrap_err();
    assert!(refused.to_string().contains("Pod QOS Class may not change as a result of resizing"), "{refused}");
    let endless = ["1M", "9000Pi"];
    let refused = resize(tenant, "guaranteed", &resources(endless, endless)).await.unwrap_err();
    assert!(refused.to_string().contains("node didn't have enough allocatable resources: cpu"), "{refused}");
    let after = tenant.api::<Pod>().get("guaranteed").await.unwrap();
    assert_eq!(continuity(&after), continuity(&before));
    assert!(condition(&after, "PodResizePending").is_none());
}

/// A container that waits to be restarted has its new resources allocated at once.
async fn is_done_in_a_crash_loop(tenant: &Tenant) {
    let fields = json!({ "command": ["false"], "resources": first() });
    tenant.create::<Pod>(bound(tenant, "crashes", fields, json!({}))).await.unwrap();
    let waits = |pod: Option<&Pod>| {
        let container = pod?.status.as_ref()?.container_statuses.as_ref()?.first()?;
        let reason = container.state.as_ref()?.waiting.as_ref()?.reason.as_deref()?;
        (reason == "CrashLoopBackOff").then_some(())
    };
    tenant.until("crashes", "its back-off", waits).await.unwrap();
    let larger = resources(["20m", "16Mi"], ["200m", "128Mi"]);
    let generation = resize(tenant, "crashes", &larger).await.unwrap().metadata.generation;
    let done = |pod: Option<&Pod>| pod.filter(|pod| is_done(pod, generation, &larger)).map(|_| ());
    tenant.until("crashes", "resized", done).await.unwrap();
    tenant.until("crashes", "its back-off again", waits).await.unwrap();
}

/// A pod that terminates is not restarted for a resize.
async fn is_not_restarted_while_it_terminates(tenant: &Tenant) {
    let script = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done";
    let fields = json!({
        "command": ["sh", "-c", script],
        "resources": first(),
        "resizePolicy": [{ "resourceName": "memory", "restartPolicy": "RestartContainer" }],
        // Long enough for the event and the resize on a busy machine.
        "lifecycle": { "preStop": { "sleep": { "seconds": 10 } } },
    });
    let grace = json!({ "terminationGracePeriodSeconds": 20 });
    tenant.create::<Pod>(bound(tenant, "terminates", fields, grace)).await.unwrap();
    tenant.until_ready("terminates").await.unwrap();
    tenant.api::<Pod>().delete("terminates", &DeleteParams::default()).await.unwrap();
    until_event(tenant, "terminates", "Killing", "Stopping container main").await;
    resize(tenant, "terminates", &resources(["10m", "8Mi"], ["100m", "128Mi"])).await.unwrap();
    let mut instances = BTreeSet::new();
    let gone = |pod: Option<&Pod>| {
        let Some(pod) = pod else { return Some(()) };
        let container = pod.status.as_ref()?.container_statuses.as_ref()?.first()?;
        instances.extend(container.container_id.clone());
        None
    };
    tenant.until("terminates", "gone", gone).await.unwrap();
    assert_eq!(instances.len(), 1, "it was restarted: {instances:?}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn malicious_resizes_are_reported_and_leave_nothing() {
    let tenant = alone_on_a_node("resizes").await;
    let agent = tenant.node.agent_pid().unwrap();
    tenant.pod("calm", tenant.shell("sleep 3600")).await.unwrap();
    let calm = tenant.until_ready("calm").await.unwrap();
    let node = Api::<Node>::all(tenant.cluster.client()).get(tenant.node.name()).await.unwrap();
    let rows = rows(&tenant, &node.status.unwrap().allocatable.unwrap()["cpu"].0);
    for row in &rows {
        tenant.create::<Pod>(row.pod.clone()).await.unwrap();
    }
    tokio::join!(
        join_all(rows.iter().map(|row| row.resizes(&tenant))),
        refuses_another_class_or_size(&tenant),
        is_done_in_a_crash_loop(&tenant),
        is_not_restarted_while_it_terminates(&tenant),
    );
    let files = CgroupFiles::of_machine().unwrap();
    let cgroup = files.of_process(pid(&tenant, "least-cpu")).unwrap();
    // A limit of 1m would be a quota of 100 µs, and the kernel's least is 1 ms.
    assert_eq!(files.quota(&cgroup).unwrap(), Some(1_000));
    leave_nothing(&tenant, &calm).await;
    assert_eq!(tenant.node.agent_pid().unwrap(), agent);
    assert_unforged(&tenant.node);
    leave(tenant).await;
}
