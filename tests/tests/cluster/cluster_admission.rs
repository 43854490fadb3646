//! Pods that the API server accepts and the node has to reject: status and event have the reason.

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Pod;
use keblet_tests::cluster::Tenant;
use kube::api::ListParams;
use serde_json::Value;
use serde_json::json;

/// Name of the pod, fields of its spec, reason and message.
fn rejected() -> [(&'static str, Value, &'static str, &'static str); 2] {
    let sysctls = json!([{ "name": "kernel.msgmax", "value": "65536" }]);
    [
        (
            "unsafe-sysctl",
            json!({ "securityContext": { "sysctls": sysctls } }),
            "SysctlForbidden",
            "forbidden sysctl: \"kernel.msgmax\" not allowlisted",
        ),
        (
            "foreign-os",
            json!({ "os": { "name": "windows" } }),
            "PodOSNotSupported",
            "Failed to admit pod as the OS field doesn't match node OS",
        ),
    ]
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pods_that_the_node_cannot_honour_are_rejected_with_upstreams_reason() {
    let tenant = Tenant::new_namespace("admission").await.unwrap();
    for (name, fields, reason, message) in rejected() {
        let mut spec = tenant.shell("sleep 3600");
        spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        tenant.pod(name, spec).await.unwrap();
        let pod = tenant.until_phase(name, "Failed").await.unwrap();
        let status = pod.status.unwrap();
        let expected = format!("Pod was rejected: {message}");
        assert_eq!((status.reason.as_deref(), status.message), (Some(reason), Some(expected)), "{name}");
        assert!(status.container_statuses.unwrap_or_default().is_empty(), "{name} never ran");
        let about = ListParams::default().fields(&format!("involvedObject.name={name},reason={reason}"));
        let mut events = Vec::new();
        for _ in 0..100 {
            events = tenant.api::<Event>().list(&about).await.unwrap().items;
            if !events.is_empty() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        assert_eq!(events.first().and_then(|event| event.message.as_deref()), Some(message), "{name}");
    }
    let safe = json!([{ "name": "net.ipv4.ip_unprivileged_port_start", "value": "0" }]);
    let mut spec = tenant.shell("sleep 3600");
    spec["securityContext"] = json!({ "sysctls": safe });
    tenant.create::<Pod>(json!({ "metadata": { "name": "safe-sysctl" }, "spec": spec })).await.unwrap();
    tenant.until_ready("safe-sysctl").await.unwrap();
    tenant.delete_namespace().await.unwrap();
}
