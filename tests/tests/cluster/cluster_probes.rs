//! Probes decide which pods of a Deployment are available.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Pod;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::cluster::Tenant;
use kube::api::ListParams;
use serde_json::Value;
use serde_json::json;

/// A Deployment of pods that serve HTTP on port 8080, with these probes.
fn deployment(tenant: &Tenant, name: &str, probes: &Value) -> Value {
    let mut container = json!({
        "name": "web",
        "image": PROBE_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["/probe", "web"],
        "ports": [{ "name": "http", "containerPort": 8080 }],
    });
    container.as_object_mut().unwrap().extend(probes.as_object().unwrap().clone());
    json!({
        "metadata": { "name": name },
        "spec": {
            "replicas": 2,
            "selector": { "matchLabels": { "app": name } },
            "template": {
                "metadata": { "labels": { "app": name } },
                "spec": {
                    "nodeSelector": { "kubernetes.io/hostname": tenant.node.name() },
                    "terminationGracePeriodSeconds": 5,
                    "containers": [container],
                },
            },
        },
    })
}

#[tokio::test]
#[ignore = "real cluster"]
async fn cluster_a_deployment_is_available_when_its_probes_succeed() {
    let tenant = Tenant::new_namespace("probes").await.unwrap();
    let probes = json!({
        "startupProbe": { "tcpSocket": { "port": "http" }, "periodSeconds": 1 },
        "readinessProbe": { "httpGet": { "port": "http", "path": "/" }, "periodSeconds": 2 },
        "livenessProbe": { "exec": { "command": ["/probe", "exit", "--code", "0"] }, "periodSeconds": 2, "timeoutSeconds": 5 },
    });
    tenant.create::<Deployment>(deployment(&tenant, "web", &probes)).await.unwrap();
    let available = |found: Option<&Deployment>| (found?.status.as_ref()?.available_replicas == Some(2)).then_some(());
    tenant.until("web", "two available pods", available).await.unwrap();
    for pod in tenant.api::<Pod>().list(&ListParams::default().labels("app=web")).await.unwrap() {
        let status = pod.status.unwrap().container_statuses.unwrap().remove(0);
        assert_eq!((status.started, status.ready, status.restart_count), (Some(true), true, 0));
    }
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn cluster_a_pod_whose_readiness_probe_fails_is_not_ready() {
    let tenant = Tenant::new_namespace("unready").await.unwrap();
    let probes = json!({ "readinessProbe": { "tcpSocket": { "port": 9 }, "periodSeconds": 1 } });
    tenant.create::<Deployment>(deployment(&tenant, "deaf", &probes)).await.unwrap();
    let running = |found: Option<&Deployment>| {
        let status = found?.status.as_ref()?;
        (status.replicas == Some(2) && status.unavailable_replicas == Some(2)).then_some(())
    };
    tenant.until("deaf", "two unavailable pods", running).await.unwrap();
    let pods = tenant.api::<Pod>().list(&ListParams::default().labels("app=deaf")).await.unwrap();
    let name = pods.items[0].metadata.name.clone().unwrap();
    let is_unready = |found: Option<&Pod>| {
        let status = found?.status.as_ref()?;
        let container = status.container_statuses.as_ref()?.first()?;
        container.state.as_ref()?.running.as_ref()?;
        let ready = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready")?;
        (container.started == Some(true) && !container.ready)
            .then(|| (ready.status.clone(), ready.reason.clone().unwrap_or_default()))
    };
    let ready = tenant.until(&name, "it runs and is not ready", is_unready).await.unwrap();
    assert_eq!(ready, ("False".to_owned(), "ContainersNotReady".to_owned()));
    let of_pod = ListParams::default().fields(&format!("involvedObject.name={name},reason=Unhealthy"));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    loop {
        let events = tenant.api::<Event>().list(&of_pod).await.unwrap();
        let texts = events.items.iter().filter_map(|event| event.message.as_deref());
        if texts.into_iter().any(|text| text.starts_with("Readiness probe failed: dial tcp ")) {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "no event: {:?}", events.items);
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    tenant.delete_namespace().await.unwrap();
}
