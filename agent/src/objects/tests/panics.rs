//! Watches that panic.

use std::future::pending;
use std::io;

use http::Request;
use http::Response;
use kube::client::Body;
use serde_json::Value;

use super::*;
use crate::recorder::EventType;

/// Answers only which resources there are. Panics at requests whose address has this text.
fn client(panics_at: &'static str) -> Client {
    let service = tower::service_fn(move |request: Request<Body>| async move {
        let address = request.uri().to_string();
        assert!(!address.contains(panics_at), "this test makes it panic");
        if !address.ends_with("/certificates.k8s.io/v1") {
            return pending().await;
        }
        let resource =
            |name| json!({"name": name, "singularName": "", "namespaced": false, "kind": "K", "verbs": ["watch"]});
        let resources = ["clustertrustbundles", "podcertificaterequests"].map(resource);
        let list = json!({"groupVersion": "certificates.k8s.io/v1", "resources": resources});
        io::Result::Ok(Response::new(Body::from(list.to_string().into_bytes())))
    });
    Client::new(service, "default")
}

fn projecting(source: &Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"containers": [], "volumes": [{"name": "v", "projected": {"sources": [source]}}]}}))
    .expect("a pod")
}

/// The panic as it reaches the supervisor of the agent's tasks.
async fn raised(panics_at: &'static str, pod: &Pod) -> String {
    let config = ObjectsConfig {
        strategy: Strategy::Watch,
        recovered: Recovered::default(),
        sync_frequency: Duration::from_secs(60),
        clock: Clock::System,
        node: Some(watch::channel(Some(Arc::new(Node::default()))).1),
    };
    let objects = Objects::new(&client(panics_at), config);
    let mut supervised = tokio::spawn(objects.raise_panics());
    let mut registration = Registration::new("u".into());
    objects.register(pod, &mut registration);
    let key = CertificateKey { pod: "u".into(), volume: "v".to_owned(), source: 0 };
    let wanted = serde_json::from_value(json!({"signerName": "s.io/s", "keyType": "ED25519"})).expect("a projection");
    let notify = |_: EventType, _: &str, _: &str| ();
    // It starts the watch of requests, and may fail before that panics.
    let certificate = objects.pod_certificate(pod, &key, &wanted, &notify);
    let ended = tokio::time::timeout(Duration::from_secs(3600), async {
        tokio::select! {
            ended = &mut supervised => ended,
            _ = certificate => supervised.await,
        }
    });
    let panic = ended.await.expect("it ends").expect_err("a watch panics").into_panic();
    panic.downcast_ref::<String>().cloned().unwrap_or_default()
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_a_watch_reaches_the_supervisor_of_the_tasks_of_the_agent() {
    let bundle = json!({"clusterTrustBundle": {"name": "b", "path": "p"}});
    for (panics_at, pod, watch) in [
        ("/services?", pod("u", &[], &[]), "services"),
        ("/configmaps?", pod("u", &["a"], &[]), "an object"),
        ("/runtimeclasses?", with_class(Some("c")), "runtime classes"),
        ("/clustertrustbundles?", projecting(&bundle), "trust bundles"),
        ("/podcertificaterequests?", pod("u", &[], &[]), "certificate requests"),
    ] {
        assert_eq!(raised(panics_at, &pod).await, format!("watch of {watch}: this test makes it panic"));
    }
}

#[tokio::test(start_paused = true)]
async fn supervision_ends_with_the_objects() {
    let fixture = Fixture::new(Strategy::Watch);
    let supervised = tokio::spawn(fixture.objects.raise_panics());
    drop(fixture);
    supervised.await.expect("no panic");
    Objects::standalone().raise_panics().await;
}
