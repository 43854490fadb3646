//! Authentication and authorization of the node's server over all its paths, with the real API server's RBAC; and
//! requests of pods that must not affect others.

use k8s_openapi::api::core::v1::Pod;
use keblet_peers::Identity;
use keblet_tests::cluster::Tenant;
use reqwest::Certificate;
use reqwest::Client;
use reqwest::Method;
use serde_json::json;

/// Every path that requires authentication.
const PATHS: &[(&str, &str)] = &[
    ("GET", "/pods"),
    ("GET", "/runningpods/"),
    ("GET", "/healthz"),
    ("GET", "/healthz/ping"),
    ("GET", "/healthz/log"),
    ("GET", "/healthz/syncloop"),
    ("GET", "/configz"),
    ("GET", "/flagz"),
    ("GET", "/statusz"),
    ("GET", "/metrics"),
    ("GET", "/metrics/cadvisor"),
    ("GET", "/metrics/resource"),
    ("GET", "/metrics/probes"),
    ("GET", "/stats/summary"),
    ("POST", "/stats/summary"),
    ("GET", "/logs/"),
    ("GET", "/containerLogs/default/pod/main"),
    ("POST", "/run/default/pod/main"),
    ("GET", "/exec/default/pod/main"),
    ("POST", "/exec/default/pod/main"),
    ("POST", "/exec/default/pod/uid/main"),
    ("GET", "/attach/default/pod/main"),
    ("POST", "/attach/default/pod/main"),
    ("GET", "/portForward/default/pod"),
    ("POST", "/portForward/default/pod"),
    ("POST", "/checkpoint/default/pod/main"),
    ("GET", "/debug/pprof/heap"),
    ("PUT", "/debug/flags/v"),
    ("DELETE", "/pods"),
    ("PATCH", "/exec/a"),
];

/// An HTTPS client that trusts the cluster's CA, with or without a client certificate.
async fn client(tenant: &Tenant, identity: Option<Identity>) -> Client {
    let ca = std::fs::read(&tenant.cluster.ready().ca).unwrap();
    let mut builder = Client::builder().no_proxy().tls_certs_only([Certificate::from_pem(&ca).unwrap()]);
    if let Some(identity) = identity {
        let files = tenant.cluster.on_control_plane(move |plane| plane.issue(&identity)).await.unwrap();
        let pem = [std::fs::read(files.certificate).unwrap(), std::fs::read(files.key).unwrap()].concat();
        builder = builder.identity(reqwest::Identity::from_pem(&pem).unwrap());
    }
    builder.build().unwrap()
}

async fn status(tenant: &Tenant, client: &Client, method: &str, path: &str) -> u16 {
    let url = format!("https://{}:10250{path}", tenant.node.access.address);
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    client.request(method, &url).send().await.unwrap_or_else(|error| panic!("{url}: {error:?}")).status().as_u16()
}

#[tokio::test]
#[ignore = "real cluster"]
async fn every_endpoint_requires_authentication_and_authorisation() {
    let tenant = Tenant::new_namespace("access").await.unwrap();
    let anonymous = client(&tenant, None).await;
    let unprivileged =
        client(&tenant, Some(Identity { common_name: "unprivileged".to_owned(), ..Identity::default() })).await;
    for (method, path) in PATHS {
        assert_eq!(status(&tenant, &anonymous, method, path).await, 401, "unknown: {method} {path}");
        assert_eq!(status(&tenant, &unprivileged, method, path).await, 403, "unauthorized: {method} {path}");
    }
    let masters = Identity {
        common_name: "an administrator".to_owned(),
        group: Some("system:masters".to_owned()),
        ..Identity::default()
    };
    let admin = client(&tenant, Some(masters)).await;
    for path in ["/pods", "/runningpods/", "/healthz", "/configz", "/metrics", "/metrics/resource", "/stats/summary"] {
        assert_eq!(status(&tenant, &admin, "GET", path).await, 200, "{path}");
    }
    // Unknown paths are rejected before authentication.
    for path in ["/", "/nope", "/configz/"] {
        assert_eq!(status(&tenant, &anonymous, "GET", path).await, 404, "{path}");
    }
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn oversized_environment_fails_only_its_own_pod() {
    let tenant = Tenant::new_namespace("greedy").await.unwrap();
    let mut pod = tenant.shell("sleep 3600");
    pod["restartPolicy"] = json!("Never");
    pod["containers"][0]["env"] = json!([{ "name": "HUGE", "value": "x".repeat(900 << 10) }]);
    tenant.pod("greedy", pod).await.unwrap();
    // Longer than the kernel's limit of a single string (MAX_ARG_STRLEN), so the container cannot start.
    let refused = |pod: Option<&Pod>| {
        let state = pod?.status.as_ref()?.container_statuses.as_ref()?.first()?.state.clone()?;
        let waiting = state.waiting.and_then(|waiting| waiting.reason);
        let ended = state.terminated.and_then(|ended| ended.reason);
        waiting.filter(|reason| reason != "ContainerCreating").or(ended)
    };
    let reason = tenant.until("greedy", "refused", refused).await.unwrap();
    let reasons = ["CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError", "Error"];
    assert!(reasons.contains(&reason.as_str()), "{reason}");
    tenant.pod("modest", tenant.shell("sleep 3600")).await.unwrap();
    tenant.until_ready("modest").await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn termination_message_cannot_break_the_status() {
    let tenant = Tenant::new_namespace("messages").await.unwrap();
    // Longer than a message may be, then control sequences, all kinds of line ends, and invalid UTF-8.
    let script = r"head -c 100000 /dev/zero | tr '\0' 'm' > /dev/termination-log; \
                   printf '\033[31mred\r\nline\377\n' >> /dev/termination-log; exit 9";
    let mut pod = tenant.shell(script);
    pod["restartPolicy"] = json!("Never");
    tenant.pod("loud", pod).await.unwrap();
    let pod = tenant.until_phase("loud", "Failed").await.unwrap();
    let state = pod.status.unwrap().container_statuses.unwrap()[0].state.clone().unwrap().terminated.unwrap();
    assert_eq!(state.exit_code, 9);
    let message = state.message.unwrap();
    // The end is kept; an invalid byte becomes a replacement character.
    assert!(message.len() <= 4096 + "\u{fffd}".len(), "{} bytes", message.len());
    assert!(message.ends_with("m\u{1b}[31mred\r\nline\u{fffd}\n"), "{message:?}");
    tenant.delete_namespace().await.unwrap();
}
