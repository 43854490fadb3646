//! Certificates of pods against the scripted API server, whose signer is the test.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use k8s_openapi::api::core::v1::PodCertificateProjection;
use k8s_openapi::jiff::Timestamp;
use secrecy::ExposeSecret as _;
use serde_json::Value;
use serde_json::json;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer as _;

use super::super::pem_blocks;
use super::Fixture;
use super::Strategy;
use super::is_notified;
use crate::objects::CertificateKey;
use crate::objects::ObjectError;
use crate::objects::Pod;
use crate::objects::PodCertificate;
use crate::objects::Registration;
use crate::recorder::EventType;

const HOUR: Duration = Duration::from_secs(3600);

/// A pod with one certificate, and the events on it.
struct Issuing {
    fixture: Fixture,
    pod: Pod,
    registration: Registration,
    events: Mutex<Vec<String>>,
}

impl Issuing {
    fn new() -> Self {
        let fixture = Fixture::new(Strategy::Watch);
        fixture.api.state().certificates.insert("v1beta1", vec!["clustertrustbundles", "podcertificaterequests"]);
        fixture.api.put("serviceaccounts/ns/sa", json!({"metadata": {"uid": "sa-uid"}}));
        let pod = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": {"serviceAccountName": "sa",
            "containers": [], "volumes": [{"name": "v", "projected": {"sources": [{"podCertificate": projection()}]}}]}});
        let pod: Pod = serde_json::from_value(pod).expect("a pod");
        let mut registration = Registration::new("u".into());
        fixture.objects.register(&pod, &mut registration);
        Self { fixture, pod, registration, events: Mutex::default() }
    }

    async fn get(&self) -> Result<PodCertificate, ObjectError> {
        let key = CertificateKey { pod: "u".into(), volume: "v".to_owned(), source: 0 };
        let wanted: PodCertificateProjection = serde_json::from_value(projection()).expect("a projection");
        let notify = |_: EventType, reason: &str, message: &str| {
            self.events.lock().expect("unpoisoned").push(format!("{reason}: {message}"));
        };
        self.fixture.objects.pod_certificate(&self.pod, &key, &wanted, &notify).await
    }

    fn events(&self) -> Vec<String> {
        std::mem::take(&mut self.events.lock().expect("unpoisoned"))
    }

    /// As metrics show them.
    fn states(&self) -> Vec<((String, &'static str), usize)> {
        self.fixture.objects.certificate_states().into_iter().collect()
    }

    fn requests(&self) -> usize {
        self.fixture.api.certificate_requests().len()
    }

    /// The signer issues a certificate for an hour that is to be replaced after half of it.
    fn issue(&self, name: &str, byte: u8) {
        let now = self.fixture.clock.wall();
        let time = |after| Timestamp::try_from(now + after).expect("in range").to_string();
        let chain = format!("noise\n{}", pem_blocks::block("CERTIFICATE", vec![byte; 9]));
        let status = json!({"conditions": [condition("Issued")], "certificateChain": chain,
            "notBefore": time(Duration::ZERO), "beginRefreshAt": time(HOUR / 2), "notAfter": time(HOUR)});
        self.fixture.api.answer_certificate_request(name, status);
    }
}

fn projection() -> Value {
    json!({"signerName": "s.io/s", "keyType": "ECDSAP256", "maxExpirationSeconds": 7200, "credentialBundlePath": "c",
        "userAnnotations": {"s.io/a": "b"}})
}

/// One certificate in this state.
fn states(state: &'static str) -> Vec<((String, &'static str), usize)> {
    vec![(("s.io/s".to_owned(), state), 1)]
}

fn condition(kind: &str) -> Value {
    json!({"type": kind, "status": "True", "reason": "Because", "message": "it is so",
        "lastTransitionTime": "2026-01-01T00:00:00Z"})
}

fn chain(byte: u8) -> String {
    pem_blocks::block("CERTIFICATE", vec![byte; 9])
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_requested_and_its_issue_announced() {
    let mut it = Issuing::new();
    assert_eq!(it.get().await.expect_err("no answer"), ObjectError::NotIssued);
    assert_eq!(it.get().await.expect_err("no answer"), ObjectError::NotIssued);
    let requests = it.fixture.api.certificate_requests();
    assert_eq!(requests.len(), 1, "one request at a time");
    let mut spec = requests[0]["spec"].clone();
    let stub = spec["stubPKCS10Request"].take();
    let stub = BASE64_STANDARD.decode(stub.as_str().expect("text")).expect("base64");
    let (_, stub) = X509CertificationRequest::from_der(&stub).expect("PKCS#10");
    assert_eq!(
        spec,
        json!({"maxExpirationSeconds": 7200, "nodeName": "n1", "nodeUID": "n-uid", "podName": "p", "podUID": "u",
            "serviceAccountName": "sa", "serviceAccountUID": "sa-uid", "signerName": "s.io/s", "stubPKCS10Request": null,
            "unverifiedUserAnnotations": {"s.io/a": "b"}})
    );
    let owners = json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}]);
    assert_eq!(requests[0]["metadata"]["ownerReferences"], owners);

    it.issue("req-0", 1);
    assert!(is_notified(&mut it.registration).await);
    let found = it.get().await.expect("issued");
    assert_eq!(found.chain, chain(1));
    let key = rcgen::KeyPair::from_pem(found.key.expose_secret()).expect("a key");
    let public = &*stub.certification_request_info.subject_pki.subject_public_key.data;
    assert_eq!(rcgen::PublicKeyData::der_bytes(&key), public, "the key of the request");
    assert_eq!(it.events(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_certificate_is_replaced_at_the_time_that_the_signer_set() {
    let mut it = Issuing::new();
    let _ = it.get().await;
    it.issue("req-0", 1);
    assert!(is_notified(&mut it.registration).await);
    let first = it.get().await.expect("issued");
    let refresh_at = first.refresh_at.expect("it is replaced");
    let wait = refresh_at.duration_since(it.fixture.clock.wall()).expect("later");
    let range = HOUR / 2 - Duration::from_secs(2)..=HOUR / 2 + Duration::from_secs(300);
    assert!(range.contains(&wait), "{wait:?}");
    tokio::time::sleep(wait).await;
    while is_notified(&mut it.registration).await {}
    let still = it.get().await.expect("the first");
    assert_eq!((still.chain, it.requests()), (chain(1), 2));
    assert_eq!(it.states(), states("fresh"));
    assert_ne!(Some(refresh_at), still.refresh_at);
    it.issue("req-1", 2);
    assert!(is_notified(&mut it.registration).await);
    let second = it.get().await.expect("the second");
    assert_eq!(second.chain, chain(2));
    assert_ne!(first.key.expose_secret(), second.key.expose_secret(), "a key of its own");
    assert_eq!(it.events(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_is_not_replaced_is_reported_once() {
    let mut it = Issuing::new();
    let _ = it.get().await;
    it.issue("req-0", 1);
    assert!(is_notified(&mut it.registration).await);
    let mut next = it.get().await.expect("issued").refresh_at;
    for expected in [
        None,
        Some("CertificateOverdueForRefresh: PodCertificate refresh overdue"),
        Some("CertificateExpired: PodCertificate expired"),
    ] {
        let wait = next.expect("a moment").duration_since(it.fixture.clock.wall()).unwrap_or_default();
        tokio::time::sleep(wait).await;
        let found = it.get().await.expect("there is no better one");
        assert_eq!(it.events(), expected.map(str::to_owned).into_iter().collect::<Vec<_>>());
        assert_eq!((found.chain, it.requests()), (chain(1), 2));
        next = found.refresh_at;
    }
    assert_eq!(next, None);
    assert_eq!(it.states(), states("expired"));
    drop(it.registration);
    assert_eq!(it.fixture.objects.certificate_states(), BTreeMap::new(), "of pods that are gone nothing is shown");
}

#[tokio::test(start_paused = true)]
async fn a_refused_certificate_is_not_requested_again() {
    for (verdict, verb) in [("Denied", "was denied"), ("Failed", "failed")] {
        let mut it = Issuing::new();
        let _ = it.get().await;
        it.fixture.api.answer_certificate_request("req-0", json!({"conditions": [condition(verdict)]}));
        assert!(is_notified(&mut it.registration).await);
        let text = it.get().await.expect_err("refused").to_string();
        let state = if verdict == "Denied" { "denied" } else { "failed" };
        let expected =
            format!("PodCertificateRequest was permanently {state}: reason=\"Because\" message=\"it is so\"");
        assert_eq!(text, expected);
        it.get().await.expect_err("refused");
        let event =
            format!("{verdict}: PodCertificateRequest ns/req-0 {verb}, reason=\"Because\", message=\"it is so\"");
        assert_eq!((it.events(), it.requests()), (vec![event], 1));
        assert_eq!(it.states(), states(state));
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_was_deleted_is_made_again() {
    let mut it = Issuing::new();
    let _ = it.get().await;
    it.fixture.api.delete("podcertificaterequests/req-0");
    assert!(is_notified(&mut it.registration).await);
    let answer = tokio::join!(it.get(), async {
        while it.requests() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        it.issue("req-0", 3);
    });
    assert_eq!(answer.0.expect("issued at once").chain, chain(3));
    // An agent that is restarted has no keys: it makes new ones.
    let again =
        Issuing { fixture: it.fixture, pod: it.pod, registration: Registration::new("u".into()), events: it.events };
    drop(it.registration);
    assert_eq!(again.get().await.expect_err("a new one"), ObjectError::NotIssued);
    assert_eq!(again.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_cannot_be_made_reports_the_cause() {
    let it = Issuing::new();
    it.fixture.api.state().certificates.clear();
    let error = it.get().await.expect_err("no API").to_string();
    assert_eq!(error, "the API server does not serve podcertificaterequests");
    assert_eq!(it.states(), states("not_yet_issued"));
    it.fixture.api.state().certificates.insert("v1", vec!["podcertificaterequests"]);
    it.fixture.api.delete("serviceaccounts/ns/sa");
    assert_eq!(it.get().await.expect_err("no account").to_string(), "not found");
    it.fixture.api.put("serviceaccounts/ns/sa", json!({"metadata": {"uid": "sa-uid"}}));
    // The node authorizer receives a pod a moment after the node does.
    let answer = tokio::join!(it.get(), async {
        while it.requests() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        it.issue("req-0", 1);
    });
    assert_eq!(answer.0.expect("issued").chain, chain(1));
}
