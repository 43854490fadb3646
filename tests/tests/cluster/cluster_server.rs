//! The agent's main port in a cluster: through the API server's proxy, and with tokens authorized by RBAC.

use std::time::Duration;

use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use serde_json::Value;

/// Response of the node through the API server's proxy.
async fn proxied(tenant: &Tenant, path: &str) -> String {
    let path = format!("/api/v1/nodes/{}/proxy{path}", tenant.node.name());
    let response = tenant.kubectl().ok(&["get", "--raw", &path]).await;
    response.unwrap_or_else(|error| panic!("{path}: {error:#}\n{}", tenant.node.log_excerpt()))
}

#[tokio::test]
#[ignore = "real cluster"]
async fn api_server_proxy_reaches_every_endpoint() {
    let tenant = Tenant::new_namespace("pages").await.unwrap();
    tenant.pod("web", tenant.shell("sleep 1000")).await.unwrap();
    let pod = tenant.until_ready("web").await.unwrap();
    assert_eq!(proxied(&tenant, "/healthz").await, "ok");

    let list: Value = serde_json::from_str(&proxied(&tenant, "/pods").await).unwrap();
    let ours = |list: &Value| {
        let items = list["items"].as_array().unwrap().clone();
        items.into_iter().find(|item| item["metadata"]["uid"].as_str() == pod.metadata.uid.as_deref())
    };
    assert_eq!((list["kind"].as_str(), list["apiVersion"].as_str()), (Some("PodList"), Some("v1")));
    let shown = ours(&list).expect("the pod is listed");
    assert_eq!(shown["spec"]["containers"][0]["name"], "main");

    let running: Value = serde_json::from_str(&proxied(&tenant, "/runningpods/").await).unwrap();
    let shown = ours(&running).expect("the pod runs");
    let names: Vec<_> = shown["metadata"].as_object().unwrap().keys().cloned().collect();
    assert_eq!(names, ["name", "namespace", "uid"]);

    let configz: Value = serde_json::from_str(&proxied(&tenant, "/configz").await).unwrap();
    assert_eq!(configz["kubeletconfig"]["authorization"]["mode"], "Webhook");
    assert_eq!(configz["kubeletconfig"]["kind"], "KubeletConfiguration");

    let metrics = proxied(&tenant, "/metrics").await;
    let line = format!("kubelet_node_name{{node=\"{}\"}} 1", tenant.node.name());
    assert!(metrics.lines().any(|found| found == line), "{line} is missing");
    for (path, expected) in [
        ("/metrics/cadvisor", "machine_cpu_cores{"),
        ("/metrics/probes", "process_start_time_seconds"),
        ("/metrics/slis", "kubernetes_healthcheck{"),
        ("/flagz", "hostname-override="),
        ("/statusz", "Emulation version"),
    ] {
        let page = proxied(&tenant, path).await;
        assert!(page.contains(expected), "{path} has no {expected}:\n{page}");
    }
    tenant.delete_namespace().await.unwrap();
}

/// Token of a service account, with a role that may `get` this subresource of nodes, if one is given.
async fn account(tenant: &Tenant, name: &str, subresource: &str) -> String {
    let (kubectl, namespace) = (tenant.kubectl(), &tenant.namespace);
    let (role, account) = (format!("{namespace}-{name}"), format!("{namespace}:{name}"));
    kubectl.ok(&["create", "serviceaccount", name]).await.unwrap();
    if !subresource.is_empty() {
        let resource = format!("--resource=nodes/{subresource}");
        kubectl.ok(&["create", "clusterrole", &role, "--verb=get", &resource]).await.unwrap();
        let (to, subject) = (format!("--clusterrole={role}"), format!("--serviceaccount={account}"));
        kubectl.ok(&["create", "clusterrolebinding", &role, &to, &subject]).await.unwrap();
        // The authorizer receives it by a watch; the agent caches earlier decisions.
        let (what, subject) = (format!("--subresource={subresource}"), format!("--as=system:serviceaccount:{account}"));
        let may = async {
            while kubectl.run(&["auth", "can-i", "get", "nodes", &what, &subject]).await.unwrap().code != 0 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, may).await.expect("the role is in effect");
    }
    kubectl.ok(&["create", "token", name]).await.unwrap().trim().to_owned()
}

#[tokio::test]
#[ignore = "real cluster"]
async fn bearer_tokens_are_authorised_by_rbac() {
    let tenant = Tenant::new_namespace("tokens").await.unwrap();
    let authority = std::fs::read(&tenant.node.access.client_ca).unwrap();
    let client = reqwest::Client::builder()
        .tls_certs_only([reqwest::Certificate::from_pem(&authority).unwrap()])
        .build()
        .unwrap();
    let port = 10250;
    let get = async |path: &str, token: Option<&str>| {
        let request = client.get(format!("https://{}:{port}{path}", tenant.node.access.address));
        let request = match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        let response = request.send().await.unwrap_or_else(|error| panic!("{error:?}\n{}", tenant.node.log_excerpt()));
        (response.status().as_u16(), response.text().await.unwrap())
    };
    assert_eq!(get("/pods", None).await, (401, "Unauthorized".to_owned()));
    assert_eq!(get("/pods", Some("made.up.token")).await, (401, "Unauthorized".to_owned()));
    assert_eq!(get("/nope", None).await.0, 404);

    let unprivileged = account(&tenant, "unprivileged", "").await;
    let user = format!("system:serviceaccount:{}:unprivileged", tenant.namespace);
    let forbidden = format!("Forbidden (user={user}, verb=get, resource=nodes, subresource(s)=[pods proxy])\n");
    assert_eq!(get("/pods", Some(&unprivileged)).await, (403, forbidden));

    for (name, subresource, open) in [
        ("meter", "metrics", &["/metrics", "/metrics/cadvisor"][..]),
        ("lister", "pods", &["/pods"]),
        ("proxy", "proxy", &["/pods", "/healthz", "/configz"]),
    ] {
        let token = account(&tenant, name, subresource).await;
        for path in ["/metrics", "/metrics/cadvisor", "/pods", "/healthz", "/configz", "/stats/summary"] {
            let expected = if open.contains(&path) { 200 } else { 403 };
            let (status, body) = get(path, Some(&token)).await;
            assert_eq!(status, expected, "{path} with {subresource}: {body}");
        }
    }
    tenant.delete_namespace().await.unwrap();
}
