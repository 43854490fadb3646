//! How a node joins a cluster: with a bootstrap token, with a serving certificate that the cluster signs, and the
//! clients that it then accepts.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use keblet_tests::cluster::until_some;
use kube::Api;
use kube::api::ListParams;
use kube::runtime::watcher;
use serde_json::json;

const CLIENT_SIGNER: &str = "kubernetes.io/kube-apiserver-client-kubelet";
const SERVING_SIGNER: &str = "kubernetes.io/kubelet-serving";

/// The flags of an agent that has only a bootstrap token.
fn with_token_only(cluster: &Cluster, node: &ClusterNode) -> Vec<OsString> {
    let folder = node.folder().unwrap();
    let mut access = node.access.clone();
    access.client.kubeconfig = folder.join("made.kubeconfig");
    let mut arguments = node.node.cluster_arguments(&access);
    arguments.push(flag("bootstrap-kubeconfig", &cluster.ready().bootstrap_kubeconfig));
    arguments.push(flag("cert-dir", &folder.join("pki")));
    arguments
}

fn flag(name: &str, value: &Path) -> OsString {
    format!("--{name}={}", value.display()).into()
}

/// Number of certificate requests of a kind for the node.
async fn requests(cluster: &Cluster, node: &ClusterNode, signer: &str) -> usize {
    let api: Api<CertificateSigningRequest> = Api::all(cluster.client());
    let all = api.list(&ListParams::default().fields(&format!("spec.signerName={signer}"))).await.unwrap();
    all.into_iter().filter(|request| is_for(request, node.name())).count()
}

/// Whether the request contains the node's name; DER strings are plain bytes.
fn is_for(request: &CertificateSigningRequest, node: &str) -> bool {
    use base64::Engine as _;
    let pem = String::from_utf8_lossy(&request.spec.request.0).into_owned();
    let body: String = pem.lines().filter(|line| !line.starts_with("-----")).collect();
    let der = base64::engine::general_purpose::STANDARD.decode(body).unwrap();
    der.windows(node.len()).any(|window| window == node.as_bytes())
}

#[tokio::test]
#[ignore = "real cluster"]
async fn bootstrap_token_suffices_to_join() {
    let cluster = Cluster::shared().await.unwrap();
    let node = ClusterNode::prepare(&cluster, json!({ "rotateCertificates": true })).await.unwrap();
    node.start_agent_with(with_token_only(&cluster, &node)).await.unwrap();
    node.until_ready(&cluster).await.unwrap();
    assert!(node.folder().unwrap().join("made.kubeconfig").exists());
    assert_eq!(requests(&cluster, &node, CLIENT_SIGNER).await, 1);
    // The certificate is stored: the next start requests none.
    node.end_agent().unwrap();
    node.start_agent_with(with_token_only(&cluster, &node)).await.unwrap();
    let tenant = Tenant::on(cluster, Arc::new(node), "bootstrap").await.unwrap();
    tenant.pod("first", tenant.shell("sleep 3600")).await.unwrap();
    tenant.until_ready("first").await.unwrap();
    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    assert_eq!(requests(&cluster, &node, CLIENT_SIGNER).await, 1);
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn serving_certificate_is_used_once_approved() {
    let cluster = Cluster::shared().await.unwrap();
    let changes = json!({
        "rotateCertificates": true,
        "serverTLSBootstrap": true,
        "tlsCertFile": "",
        "tlsPrivateKeyFile": "",
    });
    let node = ClusterNode::prepare(&cluster, changes).await.unwrap();
    node.start_agent_with(with_token_only(&cluster, &node)).await.unwrap();
    node.until_ready(&cluster).await.unwrap();
    let user = format!("system:node:{}", node.name());
    let api: Api<CertificateSigningRequest> = Api::all(cluster.client());
    let config = watcher::Config::default().fields(&format!("spec.signerName={SERVING_SIGNER}"));
    let pending = |request: &CertificateSigningRequest| {
        (request.spec.username.as_deref() == Some(&user)).then(|| request.metadata.name.clone()).flatten()
    };
    let request = until_some(api, config, "a request for a serving certificate", pending).await;
    let request = request.unwrap_or_else(|error| panic!("{error:#}\n{}", node.log_excerpt()));
    let tenant = Tenant::on(cluster, Arc::new(node), "serving").await.unwrap();
    tenant.pod("talker", tenant.shell("echo hello; sleep 3600")).await.unwrap();
    tenant.until_ready("talker").await.unwrap();
    let kubectl = tenant.kubectl();
    assert_ne!(kubectl.run(&["logs", "talker"]).await.unwrap().code, 0, "served without a certificate");
    kubectl.ok(&["certificate", "approve", &request]).await.unwrap();
    let served = async {
        // There is no event when the node begins to serve with it.
        let mut tick = tokio::time::interval(Duration::from_millis(200));
        loop {
            tick.tick().await;
            let output = kubectl.run(&["logs", "talker"]).await.unwrap();
            if output.code == 0 && !output.out.is_empty() {
                return output.out;
            }
        }
    };
    let output = tokio::time::timeout(TIMEOUT, served).await;
    assert_eq!(output.unwrap_or_else(|_| panic!("not served in time\n{}", tenant.node.log_excerpt())), "hello\n");
    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}
