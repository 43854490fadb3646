//! The objects that a fresh cluster gets before its first node. Pure.

use serde_json::Value;
use serde_json::json;

use crate::layout::Layout;

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";

/// An object and where to create it.
pub(crate) struct Object {
    /// The collection's path.
    pub path: &'static str,
    /// What to create.
    pub body: Value,
}

/// A bootstrap token, with the right to request a node's client certificate, which is approved automatically.
pub(crate) fn bootstrap(id: &str, secret: &str) -> Vec<Object> {
    let token = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": { "name": format!("bootstrap-token-{id}"), "namespace": "kube-system" },
        "type": "bootstrap.kubernetes.io/token",
        "stringData": {
            "token-id": id,
            "token-secret": secret,
            "usage-bootstrap-authentication": "true",
            "usage-bootstrap-signing": "true",
        },
    });
    let approve = "system:certificates.k8s.io:certificatesigningrequests";
    vec![
        Object { path: "/api/v1/namespaces/kube-system/secrets", body: token },
        bind("keblet:bootstrap", "system:node-bootstrapper", "system:bootstrappers"),
        bind("keblet:approve-bootstrap", &format!("{approve}:nodeclient"), "system:bootstrappers"),
        bind("keblet:approve-renewal", &format!("{approve}:selfnodeclient"), "system:nodes"),
    ]
}

/// The objects by which the API server forwards metrics requests to metrics-server, which does not run in a pod.
pub(crate) fn metrics(layout: &Layout, ca: &str) -> Vec<Object> {
    let service = json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": "metrics-server", "namespace": "kube-system" },
        // An endpoint may not be a loopback address, but a host name that resolves to one.
        "spec": { "type": "ExternalName", "externalName": layout.address.to_string() },
    });
    let api = json!({
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": { "name": "v1beta1.metrics.k8s.io" },
        "spec": {
            "group": "metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "service": {
                "name": "metrics-server",
                "namespace": "kube-system",
                "port": layout.ports.metrics_server,
            },
            "caBundle": ca,
        },
    });
    vec![
        Object { path: "/api/v1/namespaces/kube-system/services", body: service },
        Object { path: "/apis/apiregistration.k8s.io/v1/apiservices", body: api },
    ]
}

fn bind(name: &str, role: &str, group: &str) -> Object {
    let api = "rbac.authorization.k8s.io";
    let body = json!({
        "apiVersion": format!("{api}/v1"),
        "kind": "ClusterRoleBinding",
        "metadata": { "name": name },
        "roleRef": { "apiGroup": api, "kind": "ClusterRole", "name": role },
        "subjects": [{ "apiGroup": api, "kind": "Group", "name": group }],
    });
    Object { path: RBAC, body }
}
