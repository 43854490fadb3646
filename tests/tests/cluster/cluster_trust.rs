//! Trust bundles and certificates of pods in projected volumes. The signer is the test.

use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures_util::StreamExt as _;
use k8s_openapi::api::certificates::v1beta1::ClusterTrustBundle;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequest;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use keblet_tests::cluster::until_some;
use kube::Api;
use kube::Client;
use kube::api::DeleteParams;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::api::PostParams;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher;
use kube::runtime::watcher::Config;
use rcgen::BasicConstraints;
use rcgen::CertificateParams;
use rcgen::IsCa;
use rcgen::Issuer;
use rcgen::KeyPair;
use rcgen::PublicKeyData as _;
use rcgen::SubjectPublicKeyInfo;
use serde_json::Value;
use serde_json::json;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer as _;

const POLL: Duration = Duration::from_millis(20);
const HOUR: Duration = Duration::from_secs(3600);

/// An authority: its certificate, PEM, and what signs with it.
fn authority() -> (String, Issuer<'static, KeyPair>) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let certificate = params.self_signed(&key).unwrap().pem();
    (certificate, Issuer::new(params, key))
}

fn bundles(tenant: &Tenant) -> Api<ClusterTrustBundle> {
    Api::all(tenant.cluster.client())
}

async fn create_bundle(tenant: &Tenant, name: &str, spec: Value) {
    let bundle = json!({ "metadata": { "name": name, "labels": { "of": tenant.namespace } }, "spec": spec });
    let bundle: ClusterTrustBundle = serde_json::from_value(bundle).unwrap();
    bundles(tenant).create(&PostParams::default(), &bundle).await.unwrap();
}

/// A pod with one projected volume, mounted at `/v`.
fn projecting(tenant: &Tenant, script: &str, sources: Value) -> Value {
    let mut pod = tenant.shell(script);
    pod["volumes"] = json!([{ "name": "v", "projected": { "sources": sources } }]);
    pod["containers"][0]["volumeMounts"] = json!([{ "name": "v", "mountPath": "/v" }]);
    pod
}

/// A file of the volume of [`projecting`], on the node.
async fn on_node(tenant: &Tenant, pod: &str, file: &str) -> PathBuf {
    let uid = tenant.api::<Pod>().get(pod).await.unwrap().metadata.uid.unwrap();
    tenant.node.node.root.join("pods").join(uid).join("volumes/kubernetes.io~projected/v").join(file)
}

/// Waits until a file on the node has such content, and returns it.
async fn until_content(tenant: &Tenant, file: PathBuf, what: &str, is: impl Fn(&str) -> bool) -> String {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let content = std::fs::read_to_string(&file).unwrap_or_default();
        if is(&content) {
            return content;
        }
        assert!(Instant::now() < deadline, "{what}: {content:?}\n{}", tenant.node.log_excerpt());
        tokio::time::sleep(POLL).await;
    }
}

#[tokio::test]
#[ignore = "real cluster"]
async fn trust_bundles_reach_running_containers() {
    let tenant = Tenant::new_namespace("trust").await.unwrap();
    let [one, two, three] = [0, 1, 2].map(|_| authority().0);
    let (plain, signer) = (format!("plain-{}", tenant.namespace), format!("{}.example/signer", tenant.namespace));
    let signed = |name: &str| format!("{}:{name}", signer.replace('/', ":"));
    create_bundle(&tenant, &plain, json!({ "trustBundle": one })).await;
    create_bundle(&tenant, &signed("a"), json!({ "signerName": signer, "trustBundle": one })).await;
    create_bundle(&tenant, &signed("b"), json!({ "signerName": signer, "trustBundle": format!("{two}{one}") })).await;
    let others = json!({ "key": "of", "operator": "NotIn", "values": [tenant.namespace] });
    let sources = json!([
        { "clusterTrustBundle": { "name": plain, "path": "plain.pem" } },
        { "clusterTrustBundle": { "signerName": signer, "labelSelector": { "matchLabels": { "of": tenant.namespace } }, "path": "ca/signed.pem" } },
        { "clusterTrustBundle": { "signerName": signer, "path": "none.pem", "optional": true } },
        { "clusterTrustBundle": { "signerName": signer, "labelSelector": { "matchExpressions": [others] }, "path": "others.pem", "optional": true } },
    ]);
    let script = "cd /v; { grep -c BEGIN plain.pem ca/signed.pem none.pem others.pem; stat -L -c '%a %u' plain.pem; } \
                  > /dev/termination-log; \
                  until test $(grep -c BEGIN ca/signed.pem) = 3; do sleep 0.05; done";
    let mut pod = projecting(&tenant, script, sources);
    pod["restartPolicy"] = json!("Never");
    pod["securityContext"] = json!({ "runAsUser": 1234 });
    tenant.pod("trusting", pod).await.unwrap();
    tenant.until_phase("trusting", "Running").await.unwrap();
    let file = on_node(&tenant, "trusting", "plain.pem").await;
    assert_eq!(std::fs::read_to_string(file).unwrap(), one);

    // A bundle that is added reaches the running container.
    create_bundle(&tenant, &signed("c"), json!({ "signerName": signer, "trustBundle": three })).await;
    let ended = tenant.until_phase("trusting", "Succeeded").await.unwrap();
    let state = ended.status.unwrap().container_statuses.unwrap().remove(0).state.unwrap();
    let message = state.terminated.unwrap().message.unwrap();
    assert_eq!(message, "plain.pem:1\nca/signed.pem:2\nnone.pem:0\nothers.pem:0\n600 1234\n");

    // A pod waits for the bundle that it names.
    let late = format!("late-{}", tenant.namespace);
    let sources = json!([{ "clusterTrustBundle": { "name": late, "path": "late.pem" } }]);
    tenant.pod("waiting", projecting(&tenant, "sleep 1000", sources)).await.unwrap();
    let failed = format!("MountVolume.SetUp failed for volume \"v\" : clustertrustbundle \"{late}\" not found");
    let says = |event: &Event| event.message.as_deref().is_some_and(|message| message == failed).then_some(());
    until_some(tenant.api::<Event>(), Config::default(), &failed, says).await.unwrap();
    create_bundle(&tenant, &late, json!({ "trustBundle": two })).await;
    tenant.until_phase("waiting", "Running").await.unwrap();
    for name in [plain, late, signed("a"), signed("b"), signed("c")] {
        bundles(&tenant).delete(&name, &DeleteParams::default()).await.unwrap();
    }
    tenant.delete_namespace().await.unwrap();
}

/// The status of a request that is granted, for two hours, and the certificate's text.
fn granted(request: &PodCertificateRequest, issuer: &Issuer<'static, KeyPair>) -> Value {
    let (_, csr) = X509CertificationRequest::from_der(&request.spec.stub_pkc_s10_request.0).unwrap();
    let key = SubjectPublicKeyInfo::from_der(csr.certification_request_info.subject_pki.raw).unwrap();
    let mut params = CertificateParams::default();
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    (params.not_before, params.not_after) = (now.into(), (now + 2 * HOUR).into());
    let chain = params.signed_by(&key, issuer).unwrap().pem();
    let time = |at: SystemTime| Timestamp::try_from(at).unwrap().to_string();
    let mut status = decided("Issued");
    status["certificateChain"] = json!(format!("a comment\n{chain}"));
    status["notBefore"] = json!(time(now));
    status["beginRefreshAt"] = json!(time(now + HOUR));
    status["notAfter"] = json!(time(now + 2 * HOUR));
    status
}

fn decided(kind: &str) -> Value {
    let now = Timestamp::now().to_string();
    json!({ "conditions": [{ "type": kind, "status": "True", "reason": "Tested", "message": "by the test", "lastTransitionTime": now }] })
}

/// Answers all requests for this signer: those of pods whose name begins with `denied` are denied.
async fn sign(client: Client, signer: String, issuer: Arc<Issuer<'static, KeyPair>>) {
    let all: Api<PodCertificateRequest> = Api::all(client.clone());
    let mut requests = pin!(watcher(all, Config::default()).default_backoff().applied_objects());
    while let Some(request) = requests.next().await {
        let Ok(request) = request else { continue };
        let is_answered = request.status.as_ref().is_some_and(|status| status.conditions.is_some());
        if request.spec.signer_name != signer || is_answered {
            continue;
        }
        assert_eq!(request.spec.max_expiration_seconds, Some(7200), "{:?}", request.spec);
        let annotations = request.spec.unverified_user_annotations.clone().unwrap_or_default();
        assert_eq!(annotations["keblet.dev/a"], "b", "{:?}", request.spec);
        let denied = request.spec.pod_name.starts_with("denied");
        let status = if denied { decided("Denied") } else { granted(&request, &issuer) };
        let namespaced: Api<PodCertificateRequest> =
            Api::namespaced(client.clone(), request.metadata.namespace.as_deref().unwrap());
        let patch = Patch::Merge(json!({ "status": status }));
        let name = request.metadata.name.as_deref().unwrap();
        namespaced.patch_status(name, &PatchParams::default(), &patch).await.unwrap();
    }
}

/// The DER of each PEM block, with its kind.
fn blocks(text: &str) -> Vec<(String, Vec<u8>)> {
    let one = |block: &str| {
        let (kind, rest) = block.split_once("-----\n").unwrap();
        let body: String = rest.split("-----END").next().unwrap().lines().collect();
        (kind.to_owned(), BASE64_STANDARD.decode(body).unwrap())
    };
    text.split("-----BEGIN ").skip(1).map(one).collect()
}

/// Checks that a bundle is a key and the certificate for it.
fn check_bundle(bundle: &str) {
    let blocks = blocks(bundle);
    assert_eq!(blocks.iter().map(|(kind, _)| kind.as_str()).collect::<Vec<_>>(), ["PRIVATE KEY", "CERTIFICATE"]);
    let key = KeyPair::from_pem(&bundle[..bundle.find("-----BEGIN CERT").unwrap()]).unwrap();
    let public = key.der_bytes();
    assert!(blocks[1].1.windows(public.len()).any(|window| window == public), "the certificate is for the key");
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pod_certificates_are_requested_renewed_and_denied() {
    let cluster = Cluster::exclusive().await.unwrap();
    let node = cluster.node().await.unwrap();
    let tenant = Tenant::on(cluster, node, "certificates").await.unwrap();
    let signer = format!("{}.example/signer", tenant.namespace);
    let signing = tokio::spawn(sign(tenant.cluster.client(), signer.clone(), Arc::new(authority().1)));
    let source = |key_type: &str, dir: &str| {
        json!({ "podCertificate": { "signerName": signer, "keyType": key_type, "maxExpirationSeconds": 7200,
            "credentialBundlePath": format!("{dir}/bundle.pem"), "keyPath": format!("{dir}/key.pem"),
            "certificateChainPath": format!("{dir}/chain.pem"), "userAnnotations": { "keblet.dev/a": "b" } } })
    };
    let types = ["ED25519", "ECDSAP256", "ECDSAP384", "ECDSAP521", "RSA3072", "RSA4096"];
    let sources = types.map(|key_type| source(key_type, key_type));
    tenant
        .pod("certified", projecting(&tenant, "stat -L -c '%a' /v/*/key.pem && sleep 1000", json!(sources)))
        .await
        .unwrap();
    tenant.until_phase("certified", "Running").await.unwrap();
    let mut first = Vec::new();
    for key_type in types {
        let read = async |file: &str| {
            let path = on_node(&tenant, "certified", &format!("{key_type}/{file}")).await;
            std::fs::read_to_string(path).unwrap()
        };
        let (bundle, key, chain) = (read("bundle.pem").await, read("key.pem").await, read("chain.pem").await);
        assert_eq!(bundle, format!("{key}{chain}"));
        check_bundle(&bundle);
        first.push(bundle);
    }

    // A restarted agent has no key in memory: it requests new certificates, for the running containers.
    tenant.node.kill_agent().unwrap();
    tenant.node.start_agent().await.unwrap();
    for (key_type, old) in types.into_iter().zip(&first) {
        let file = on_node(&tenant, "certified", &format!("{key_type}/bundle.pem")).await;
        let new = until_content(&tenant, file, "a new certificate", |text| !text.is_empty() && text != old).await;
        check_bundle(&new);
    }
    let pod = tenant.api::<Pod>().get("certified").await.unwrap();
    assert_eq!(pod.status.unwrap().container_statuses.unwrap()[0].restart_count, 0);

    tenant.pod("denied", projecting(&tenant, "true", json!([source("ED25519", "d")]))).await.unwrap();
    let denied = |event: &Event| {
        let message = event.message.as_deref().unwrap_or_default();
        (event.reason.as_deref() == Some("Denied")).then(|| message.to_owned())
    };
    let message = until_some(tenant.api::<Event>(), Config::default(), "a denial", denied).await.unwrap();
    assert!(message.ends_with(" was denied, reason=\"Tested\", message=\"by the test\""), "{message}");
    signing.abort();
    tenant.delete_namespace().await.unwrap();
}
