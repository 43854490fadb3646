//! The static pods of the demo.

use std::path::Path;

use keblet_peers::PROBE_IMAGE;
use serde_json::Value;
use serde_json::json;

/// The node's name, which the agent appends to the names of static pods.
pub(super) const NODE: &str = "demo";
/// Port of the web pod.
pub(super) const WEB_PORT: u16 = 8080;
/// Exit code of the crashing pod.
pub(super) const CRASH_CODE: i64 = 3;
/// The chain's init containers, in order.
pub(super) const CHAIN: [&str; 3] = ["first", "second", "third"];

const STAMPS: &str = "/stamps";

/// A static pod and the name of its file.
pub(super) struct StaticPod {
    /// The pod's name.
    pub name: &'static str,
    /// The pod.
    pub manifest: Value,
}

/// All pods; their containers write stamp files into the folder.
pub(super) fn all(stamps: &Path) -> Vec<StaticPod> {
    let port = WEB_PORT.to_string();
    let stamp = |name: &str| format!("{STAMPS}/{name}");
    let code = CRASH_CODE.to_string();
    let crash = [
        "exit",
        "--code",
        &code,
        "--after-ms",
        "1500",
        "--stamp",
        &stamp("crash"),
        "--once-file",
        &stamp("crash-once"),
    ];
    let oom = json!({ "resources": { "limits": { "memory": "32Mi" }, "requests": { "memory": "32Mi" } } });
    let chain: Vec<Value> = CHAIN
        .iter()
        .map(|name| container(name, &["exit", "--code", "0", "--stamp", &stamp(&format!("chain-{name}"))], &json!({})))
        .collect();
    let none = json!({});
    vec![
        pod("web", stamps, &[container("main", &["web", "--port", &port], &none)], &[]),
        pod("crash", stamps, &[container("main", &crash, &none)], &[]),
        pod("oom", stamps, &[container("main", &["oom", "--mb", "64", "--child"], &oom)], &[]),
        pod("chain", stamps, &[container("main", &["run", "--stamp", &stamp("chain-main")], &none)], &chain),
        pod("gone", stamps, &[container("main", &["run"], &none)], &[]),
    ]
}

fn pod(name: &'static str, stamps: &Path, containers: &[Value], inits: &[Value]) -> StaticPod {
    let manifest = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 5,
            "dnsPolicy": "Default",
            "initContainers": inits,
            "containers": containers,
            "volumes": [{ "name": "stamps", "hostPath": { "path": stamps, "type": "Directory" } }],
        },
    });
    StaticPod { name, manifest }
}

fn container(name: &str, arguments: &[&str], changes: &Value) -> Value {
    let command: Vec<&str> = std::iter::once("/probe").chain(arguments.iter().copied()).collect();
    let mut container = json!({
        "name": name,
        "image": PROBE_IMAGE,
        "imagePullPolicy": "Never",
        "command": command,
        "volumeMounts": [{ "name": "stamps", "mountPath": STAMPS }],
    });
    if let (Some(fields), Some(changes)) = (container.as_object_mut(), changes.as_object()) {
        fields.extend(changes.clone());
    }
    container
}
