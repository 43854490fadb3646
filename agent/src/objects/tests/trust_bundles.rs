//! Trust bundles against the scripted API server.

use std::time::Duration;

use serde_json::Value;
use serde_json::json;

use super::super::pem_blocks;
use super::Room;
use super::Strategy;
use super::is_notified;
use crate::objects::Pod;
use crate::objects::Registration;

fn pem(byte: u8) -> String {
    pem_blocks::block("CERTIFICATE", vec![byte; 9])
}

fn room(versions: &[&'static str]) -> Room {
    let room = Room::new(Strategy::Watch);
    for version in versions {
        room.api.state().certificates.insert(version, vec!["clustertrustbundles"]);
    }
    room
}

fn put(room: &Room, name: &str, signer: &str, text: &str) {
    let bundle = json!({"metadata": {"name": name}, "spec": {"signerName": signer, "trustBundle": text}});
    room.api.put_certificate_object("clustertrustbundles", "ClusterTrustBundle", bundle);
}

fn register(room: &Room, sources: Value) -> Registration {
    let pod = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"containers": [], "volumes": [{"name": "v", "projected": {"sources": sources}}]}});
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    let mut registration = Registration::new("u".into());
    room.objects.register(&pod, &mut registration);
    registration
}

async fn anchors(room: &Room, wanted: Value) -> Result<String, String> {
    let mut wanted = wanted;
    wanted["path"] = json!("p");
    let wanted = serde_json::from_value(wanted).expect("a projection");
    room.objects.trust_anchors(&wanted).await.map_err(|error| error.to_string())
}

#[tokio::test(start_paused = true)]
async fn changes_of_trust_bundles_reach_the_pods_that_use_them() {
    let room = room(&["v1beta1"]);
    put(&room, "s.io:s:1", "s.io/s", &pem(1));
    let by_signer = || json!({"signerName": "s.io/s", "labelSelector": {}});
    let mut user = register(&room, json!([{"clusterTrustBundle": {"path": "p", "name": "late"}}]));
    let mut other = register(&room, json!([{"configMap": {"name": "m"}}]));
    assert_eq!(anchors(&room, by_signer()).await, Ok(pem(1)));
    let missing = anchors(&room, json!({"name": "late"})).await;
    assert_eq!(missing, Err("clustertrustbundle \"late\" not found".to_owned()));
    assert_eq!(anchors(&room, json!({"name": "late", "optional": true})).await, Ok(String::new()));
    let lists = room.api.take_requests().into_iter().filter(|request| request.contains("clustertrustbundles?"));
    assert_eq!(lists.count(), 1, "one watch of all");
    while is_notified(&mut user).await {}

    put(&room, "late", "", &pem(2));
    assert!(is_notified(&mut user).await);
    assert_eq!(anchors(&room, json!({"name": "late"})).await, Ok(pem(2)));
    put(&room, "late", "", &pem(2));
    assert!(!is_notified(&mut user).await, "the same again");
    put(&room, "s.io:s:2", "s.io/s", &pem(3));
    assert!(is_notified(&mut user).await);
    assert_eq!(anchors(&room, by_signer()).await.expect("two").matches("BEGIN").count(), 2);
    room.api.delete("clustertrustbundles/late");
    assert!(is_notified(&mut user).await);
    anchors(&room, json!({"name": "late"})).await.expect_err("gone");
    assert!(!is_notified(&mut other).await, "it has none");
}

#[tokio::test(start_paused = true)]
async fn the_version_of_trust_bundles_is_discovered() {
    for (versions, expected) in
        [(&["v1", "v1beta1"][..], "v1"), (&["v1alpha1", "v1beta1"][..], "v1beta1"), (&["v1alpha1"][..], "v1alpha1")]
    {
        let room = room(versions);
        put(&room, "b", "", &pem(1));
        let _user = register(&room, json!([{"clusterTrustBundle": {"path": "p", "name": "b"}}]));
        assert_eq!(anchors(&room, json!({"name": "b"})).await, Ok(pem(1)));
        let watched = format!("GET /apis/certificates.k8s.io/{expected}/clustertrustbundles?");
        let requests = room.api.take_requests();
        assert!(requests.iter().any(|request| request.starts_with(&watched)), "{requests:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_the_api_only_optional_trust_bundles_are_empty() {
    let room = room(&[]);
    let mut user = register(&room, json!([{"clusterTrustBundle": {"path": "p", "name": "b"}}]));
    let missing = anchors(&room, json!({"name": "b"})).await;
    assert_eq!(missing, Err("the API server does not serve clustertrustbundles".to_owned()));
    assert_eq!(anchors(&room, json!({"name": "b", "optional": true})).await, Ok(String::new()));
    // The API server is upgraded.
    put(&room, "b", "", &pem(1));
    room.api.state().certificates.insert("v1", vec!["clustertrustbundles"]);
    tokio::time::timeout(Duration::from_secs(120), user.changed()).await.expect("notified");
    assert_eq!(anchors(&room, json!({"name": "b"})).await, Ok(pem(1)));
    // One that cannot be asked may have them.
    let room = self::room(&["v1"]);
    room.api.away(true);
    let error = anchors(&room, json!({"name": "b", "optional": true})).await.expect_err("unknown");
    assert!(error.starts_with("failed to sync clustertrustbundle cache: "), "{error}");
}
