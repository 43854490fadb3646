//! Trust bundles against the scripted API server.

use std::time::Duration;

use serde_json::Value;
use serde_json::json;

use super::super::pem_blocks;
use super::Fixture;
use super::Strategy;
use super::is_notified;
use crate::objects::Pod;
use crate::objects::Registration;

fn pem(byte: u8) -> String {
    pem_blocks::block("CERTIFICATE", vec![byte; 9])
}

fn fixture(versions: &[&'static str]) -> Fixture {
    let fixture = Fixture::new(Strategy::Watch);
    for version in versions {
        fixture.api.state().certificates.insert(version, vec!["clustertrustbundles"]);
    }
    fixture
}

fn put(fixture: &Fixture, name: &str, signer: &str, text: &str) {
    let bundle = json!({"metadata": {"name": name}, "spec": {"signerName": signer, "trustBundle": text}});
    fixture.api.put_certificate_object("clustertrustbundles", "ClusterTrustBundle", bundle);
}

fn register(fixture: &Fixture, sources: Value) -> Registration {
    let pod = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
        "spec": {"containers": [], "volumes": [{"name": "v", "projected": {"sources": sources}}]}});
    let pod: Pod = serde_json::from_value(pod).expect("a pod");
    let mut registration = Registration::new("u".into());
    fixture.objects.register(&pod, &mut registration);
    registration
}

async fn anchors(fixture: &Fixture, wanted: Value) -> Result<String, String> {
    let mut wanted = wanted;
    wanted["path"] = json!("p");
    let wanted = serde_json::from_value(wanted).expect("a projection");
    fixture.objects.trust_anchors(&wanted).await.map_err(|error| error.to_string())
}

#[tokio::test(start_paused = true)]
async fn changes_of_trust_bundles_reach_the_pods_that_use_them() {
    let fixture = fixture(&["v1beta1"]);
    put(&fixture, "s.io:s:1", "s.io/s", &pem(1));
    let by_signer = || json!({"signerName": "s.io/s", "labelSelector": {}});
    let mut user = register(&fixture, json!([{"clusterTrustBundle": {"path": "p", "name": "late"}}]));
    let mut other = register(&fixture, json!([{"configMap": {"name": "m"}}]));
    assert_eq!(anchors(&fixture, by_signer()).await, Ok(pem(1)));
    let missing = anchors(&fixture, json!({"name": "late"})).await;
    assert_eq!(missing, Err("clustertrustbundle \"late\" not found".to_owned()));
    assert_eq!(anchors(&fixture, json!({"name": "late", "optional": true})).await, Ok(String::new()));
    let lists = fixture.api.take_requests().into_iter().filter(|request| request.contains("clustertrustbundles?"));
    assert_eq!(lists.count(), 1, "one watch of all");
    while is_notified(&mut user).await {}

    put(&fixture, "late", "", &pem(2));
    assert!(is_notified(&mut user).await);
    assert_eq!(anchors(&fixture, json!({"name": "late"})).await, Ok(pem(2)));
    put(&fixture, "late", "", &pem(2));
    assert!(!is_notified(&mut user).await, "the same again");
    put(&fixture, "s.io:s:2", "s.io/s", &pem(3));
    assert!(is_notified(&mut user).await);
    assert_eq!(anchors(&fixture, by_signer()).await.expect("two").matches("BEGIN").count(), 2);
    fixture.api.delete("clustertrustbundles/late");
    assert!(is_notified(&mut user).await);
    anchors(&fixture, json!({"name": "late"})).await.expect_err("gone");
    assert!(!is_notified(&mut other).await, "it has none");
}

#[tokio::test(start_paused = true)]
async fn the_version_of_trust_bundles_is_discovered() {
    for (versions, expected) in
        [(&["v1", "v1beta1"][..], "v1"), (&["v1alpha1", "v1beta1"][..], "v1beta1"), (&["v1alpha1"][..], "v1alpha1")]
    {
        let fixture = fixture(versions);
        put(&fixture, "b", "", &pem(1));
        let _user = register(&fixture, json!([{"clusterTrustBundle": {"path": "p", "name": "b"}}]));
        assert_eq!(anchors(&fixture, json!({"name": "b"})).await, Ok(pem(1)));
        let watched = format!("GET /apis/certificates.k8s.io/{expected}/clustertrustbundles?");
        let requests = fixture.api.take_requests();
        assert!(requests.iter().any(|request| request.starts_with(&watched)), "{requests:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_the_api_only_optional_trust_bundles_are_empty() {
    let fixture = fixture(&[]);
    let mut user = register(&fixture, json!([{"clusterTrustBundle": {"path": "p", "name": "b"}}]));
    let missing = anchors(&fixture, json!({"name": "b"})).await;
    assert_eq!(missing, Err("the API server does not serve clustertrustbundles".to_owned()));
    assert_eq!(anchors(&fixture, json!({"name": "b", "optional": true})).await, Ok(String::new()));
    // The API server is upgraded.
    put(&fixture, "b", "", &pem(1));
    fixture.api.state().certificates.insert("v1", vec!["clustertrustbundles"]);
    tokio::time::timeout(Duration::from_secs(120), user.changed()).await.expect("notified");
    assert_eq!(anchors(&fixture, json!({"name": "b"})).await, Ok(pem(1)));
    // One that cannot be asked may have them.
    let fixture = self::fixture(&["v1"]);
    fixture.api.away(true);
    let error = anchors(&fixture, json!({"name": "b", "optional": true})).await.expect_err("unknown");
    assert!(error.starts_with("failed to sync clustertrustbundle cache: "), "{error}");
}
