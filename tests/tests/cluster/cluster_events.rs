//! Events of pods and the node, as `kubectl describe` shows them.

use std::collections::BTreeSet;

use anyhow::Result;
use anyhow::ensure;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Pod;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use kube::Api;
use kube::api::ListParams;
use serde_json::json;
use tokio::time::Instant;

/// Waits until the object's events satisfy `enough`, and returns them.
async fn events(api: &Api<Event>, object: &str, enough: impl Fn(&[Event]) -> bool) -> Result<Vec<Event>> {
    let deadline = Instant::now() + TIMEOUT;
    let of = ListParams::default().fields(&format!("involvedObject.name={object}"));
    loop {
        let found = api.list(&of).await?.items;
        if enough(&found) {
            return Ok(found);
        }
        ensure!(Instant::now() < deadline, "last events of {object}: {:#?}", shown(&found));
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
}

fn shown(events: &[Event]) -> BTreeSet<String> {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let line = |event: &Event| {
        let path = text(&event.involved_object.field_path);
        format!("{path} {} {}: {}", text(&event.type_), text(&event.reason), text(&event.message))
    };
    events.iter().map(line).collect()
}

fn has(events: &[Event], reason: &str) -> bool {
    events.iter().any(|event| event.reason.as_deref() == Some(reason))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn pod_lifecycle_events_are_recorded() -> Result<()> {
    let tenant = Tenant::new_namespace("events").await?;
    let mut spec = tenant.shell("trap 'exit 0' TERM; sleep 3600 & wait");
    let mut first = spec["containers"][0].clone();
    first["name"] = json!("first");
    first["command"] = json!(["true"]);
    spec["initContainers"] = json!([first]);
    let pod = tenant.pod("lifecycle", spec).await?;
    tenant.until_ready("lifecycle").await?;
    tenant.kubectl().ok(&["delete", "pod", "lifecycle", "--wait=false"]).await?;
    let api = tenant.api::<Event>();
    let reported = events(&api, "lifecycle", |events| has(events, "Killing")).await?;
    let shown = shown(&reported);
    let pulled = format!("Container image {BUSYBOX_IMAGE:?} already present on machine and can be accessed by the pod");
    for line in [
        format!("spec.initContainers{{first}} Normal Pulled: {pulled}"),
        "spec.initContainers{first} Normal Created: Container created".to_owned(),
        "spec.initContainers{first} Normal Started: Container started".to_owned(),
        format!("spec.containers{{main}} Normal Pulled: {pulled}"),
        "spec.containers{main} Normal Created: Container created".to_owned(),
        "spec.containers{main} Normal Started: Container started".to_owned(),
        "spec.containers{main} Normal Killing: Stopping container main".to_owned(),
    ] {
        ensure!(shown.contains(&line), "{line} is missing: {shown:#?}");
    }
    for event in reported.iter().filter(|event| event.reporting_component.as_deref() == Some("kubelet")) {
        ensure!(event.involved_object.uid == pod.metadata.uid, "{event:?}");
        let host = event.source.as_ref().and_then(|source| source.host.as_deref());
        ensure!(host == Some(tenant.node.name()) && event.reporting_instance.as_deref() == host, "{event:?}");
    }
    tenant.delete_namespace().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn crash_loop_events_are_aggregated() -> Result<()> {
    let tenant = Tenant::new_namespace("crash").await?;
    tenant.pod("crash", tenant.shell("exit 7")).await?;
    let counted = |events: &[Event]| {
        let again = |event: &Event| event.reason.as_deref() == Some("Started") && event.count > Some(1);
        has(events, "BackOff") && events.iter().any(again)
    };
    let reported = events(&tenant.api(), "crash", counted).await?;
    let uid = tenant.api::<Pod>().get("crash").await?.metadata.uid.unwrap_or_default();
    let message = format!("Back-off restarting failed container main in pod crash_{}({uid})", tenant.namespace);
    ensure!(reported.iter().any(|event| event.message.as_deref() == Some(&message)), "{:#?}", shown(&reported));
    tenant.delete_namespace().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn node_start_events_are_recorded() -> Result<()> {
    let tenant = Tenant::new_namespace("node-events").await?;
    let api = Api::<Event>::namespaced(tenant.cluster.client(), "default");
    let reported =
        events(&api, tenant.node.name(), |events| has(events, "Starting") && has(events, "NodeReady")).await?;
    let shown = shown(&reported);
    ensure!(shown.contains(" Normal Starting: Starting kubelet."), "{shown:#?}");
    tenant.delete_namespace().await?;
    Ok(())
}
