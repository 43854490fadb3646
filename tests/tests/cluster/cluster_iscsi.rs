//! Volumes that the control plane attaches: an iSCSI disk that no target has. What follows needs a target, see
//! `scenarios/iscsi.rs`.

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod;
use keblet_tests::cluster::Tenant;
use keblet_tests::cluster::until;
use keblet_tests::cluster::until_gone;
use keblet_tests::cluster::until_some;
use kube::Api;
use kube::api::DeleteParams;
use kube::runtime::watcher::Config;
use serde_json::json;

/// Whether the Node reports the volume, and whether the control plane has attached it.
fn state(node: &Node, volume: &str) -> (bool, bool) {
    let status = node.status.clone().unwrap_or_default();
    let is_in_use = status.volumes_in_use.iter().flatten().any(|name| name == volume);
    (is_in_use, status.volumes_attached.iter().flatten().any(|attached| attached.name == volume))
}

#[tokio::test]
#[ignore = "real cluster"]
async fn a_disk_is_in_use_and_attached_until_its_pod_is_gone() {
    let tenant = Tenant::new_namespace("iscsi").await.unwrap();
    let target = format!("iqn.2001-04.com.example:{}", tenant.namespace);
    let mut pod = tenant.shell("true");
    pod["volumes"] = json!([{ "name": "v", "iscsi": { "targetPortal": "127.0.0.1:1", "iqn": target, "lun": 0 } }]);
    pod["containers"][0]["volumeMounts"] = json!([{ "name": "v", "mountPath": "/v" }]);
    tenant.pod("using", pod).await.unwrap();
    let nodes: Api<Node> = Api::all(tenant.cluster.client());
    let volume = format!("kubernetes.io/iscsi/127.0.0.1:1:{target}:0");
    let attached = |node: Option<&Node>| (state(node?, &volume) == (true, true)).then_some(());
    until(&nodes, tenant.node.name(), "the volume in use and attached", attached).await.unwrap();

    // Only now the agent tries: there is no iscsiadm, or no portal listens.
    let about = Config::default().fields("involvedObject.name=using,reason=FailedMount");
    let is_tried = |event: &Event| {
        let message = event.message.as_deref()?;
        message.starts_with("MountVolume.WaitForAttach failed for volume \"v\" : ").then_some(())
    };
    until_some(tenant.api::<Event>(), about, "the event of the attempt", is_tried).await.unwrap();

    let pods = tenant.api::<Pod>();
    pods.delete("using", &DeleteParams::default()).await.unwrap();
    until_gone(&pods, "using").await.unwrap();
    let detached = |node: Option<&Node>| (state(node?, &volume) == (false, false)).then_some(());
    until(&nodes, tenant.node.name(), "the volume neither in use nor attached", detached).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}
