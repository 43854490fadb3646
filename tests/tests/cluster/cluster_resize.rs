//! In-place resizes through the subresource of the API server (KEP-1287): cgroups of pod and container, the process that
//! goes on, conditions and status.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCondition;
use keblet_tests::cgroups::CgroupFiles;
use keblet_tests::cluster::Tenant;
use kube::Api;
use kube::api::Patch;
use kube::api::PatchParams;
use serde_json::Value;
use serde_json::json;

/// Changes the resources of the container `main`.
async fn resize(tenant: &Tenant, pod: &str, resources: Value) -> Pod {
    let patch = json!({ "spec": { "containers": [{ "name": "main", "resources": resources }] } });
    let patch = Patch::Strategic(patch);
    tenant.api::<Pod>().patch_subresource("resize", pod, &PatchParams::default(), &patch).await.unwrap()
}

pub(crate) fn condition<'a>(pod: &'a Pod, type_: &str) -> Option<&'a PodCondition> {
    pod.status.as_ref()?.conditions.iter().flatten().find(|condition| condition.type_ == type_)
}

/// The pod, once its container has these resources and no resize is left to do.
async fn until_resized(tenant: &Tenant, name: &str, resources: &Value) -> Pod {
    let is_resized = |pod: &Pod| {
        let container = pod.status.as_ref().and_then(|status| status.container_statuses.as_ref()?.first());
        let shown = container.map(|container| serde_json::to_value(&container.resources).unwrap());
        let is_settled =
            ["PodResizePending", "PodResizeInProgress"].iter().all(|type_| condition(pod, type_).is_none());
        shown.as_ref() == Some(resources) && is_settled
    };
    let pick = |pod: Option<&Pod>| pod.filter(|pod| is_resized(pod)).cloned();
    tenant.until(name, "resized", pick).await.unwrap()
}

/// Pid of the pod's container on this machine.
pub(crate) fn pid(tenant: &Tenant, name: &str) -> i32 {
    let pods = tenant.node.pods().unwrap().into_iter();
    let mut ours = pods.filter(|pod| pod.namespace == tenant.namespace && pod.name == name);
    let containers = ours.next().unwrap().containers;
    containers.into_iter().find(|container| container.state == "running").and_then(|container| container.pid).unwrap()
}

#[tokio::test]
#[ignore = "real cluster"]
async fn a_pod_is_resized_without_a_restart_and_an_impossible_resize_waits() {
    let tenant = Tenant::new_namespace("resize").await.unwrap();
    let mut spec = tenant.shell("sleep 3600");
    let resources = |cpu: &str, limit: &str, memory: &str| json!({ "requests": { "cpu": cpu, "memory": "32Mi" }, "limits": { "cpu": limit, "memory": memory } });
    spec["containers"][0]["resources"] = resources("100m", "200m", "64Mi");
    tenant.pod("one", spec).await.unwrap();
    tenant.until_ready("one").await.unwrap();
    let files = CgroupFiles::of_machine().unwrap();
    let process = pid(&tenant, "one");
    let container = files.of_process(process).unwrap();
    let of_pod = container.rsplit_once('/').unwrap().0.to_owned();
    let values = || {
        [&container, &of_pod]
            .map(|path| (files.quota(path).unwrap(), files.memory(path).unwrap().map(|bytes| bytes >> 20)))
    };
    assert_eq!(values(), [(Some(20_000), Some(64)); 2]);

    let larger = resources("300m", "500m", "128Mi");
    let resized = resize(&tenant, "one", larger.clone()).await;
    let pod = until_resized(&tenant, "one", &larger).await;
    assert_eq!(values(), [(Some(50_000), Some(128)); 2]);
    let status = pod.status.as_ref().unwrap();
    assert_eq!(serde_json::to_value(&status.allocated_resources).unwrap(), larger["requests"]);
    assert_eq!(serde_json::to_value(&status.resources).unwrap(), larger);
    assert_eq!(status.observed_generation, resized.metadata.generation);
    let shown = &status.container_statuses.as_ref().unwrap()[0];
    assert_eq!(serde_json::to_value(&shown.allocated_resources).unwrap(), larger["requests"]);
    assert_eq!(shown.restart_count, 0);

    let smaller = resources("50m", "100m", "96Mi");
    resize(&tenant, "one", smaller.clone()).await;
    until_resized(&tenant, "one", &smaller).await;
    assert_eq!(values(), [(Some(10_000), Some(96)); 2]);

    // All that the node has, of which another pod holds some: it waits, with the node's reason, until it is taken back.
    let mut other = tenant.shell("sleep 3600");
    other["containers"][0]["resources"] = resources("50m", "100m", "64Mi");
    tenant.pod("other", other).await.unwrap();
    tenant.until_ready("other").await.unwrap();
    let node = Api::<Node>::all(tenant.cluster.client()).get(tenant.node.name()).await.unwrap();
    let all = node.status.unwrap().allocatable.unwrap()["cpu"].0.clone();
    let generation = resize(&tenant, "one", resources(&all, &all, "96Mi")).await.metadata.generation;
    let pending = |pod: Option<&Pod>| pod.and_then(|pod| condition(pod, "PodResizePending")).cloned();
    let pending = tenant.until("one", "a pending resize", pending).await.unwrap();
    assert_eq!((pending.reason.as_deref(), pending.observed_generation), (Some("Deferred"), generation));
    let message = pending.message.unwrap();
    assert!(message.starts_with("Node didn't have enough resource: cpu, requested: "), "{message}");
    assert_eq!(values(), [(Some(10_000), Some(96)); 2]);
    resize(&tenant, "one", smaller.clone()).await;
    until_resized(&tenant, "one", &smaller).await;
    assert_eq!(pid(&tenant, "one"), process, "the process was not restarted");
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn a_resize_restarts_the_container_where_its_policy_says_so() {
    let tenant = Tenant::new_namespace("policy").await.unwrap();
    let mut spec = tenant.shell("sleep 3600");
    let resources = |cpu: &str, memory: &str| json!({ "requests": { "cpu": cpu, "memory": memory }, "limits": { "cpu": cpu, "memory": memory } });
    let main = &mut spec["containers"][0];
    main["resources"] = resources("50m", "64Mi");
    main["resizePolicy"] = json!([
        { "resourceName": "cpu", "restartPolicy": "NotRequired" },
        { "resourceName": "memory", "restartPolicy": "RestartContainer" },
    ]);
    spec["terminationGracePeriodSeconds"] = json!(1);
    tenant.pod("one", spec).await.unwrap();
    tenant.until_ready("one").await.unwrap();
    let restarts = |pod: &Pod| pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap()[0].restart_count;
    let more_cpu = resources("100m", "64Mi");
    resize(&tenant, "one", more_cpu.clone()).await;
    assert_eq!(restarts(&until_resized(&tenant, "one", &more_cpu).await), 0);
    let more_memory = resources("100m", "96Mi");
    resize(&tenant, "one", more_memory.clone()).await;
    assert_eq!(restarts(&until_resized(&tenant, "one", &more_memory).await), 1);
    let files = CgroupFiles::of_machine().unwrap();
    let container = files.of_process(pid(&tenant, "one")).unwrap();
    assert_eq!(files.memory(&container).unwrap().map(|bytes| bytes >> 20), Some(96));
    tenant.delete_namespace().await.unwrap();
}
