//! Pods of every kind that a node is taken over with.

use std::path::Path;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Secret;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::cluster::Tenant;
use serde_json::Value;
use serde_json::json;

/// Runs until SIGTERM.
pub(super) const STAY: &str = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done";

/// Pods that are Ready before a take-over and have to stay so, the DaemonSet's and static ones excepted.
pub(super) const READY: [&str; 7] = ["plain", "many", "volumes", "crashed", "host", "shared", "hooks"];

fn container(name: &str, image: &str, command: &[&str]) -> Value {
    json!({ "name": name, "image": image, "imagePullPolicy": "IfNotPresent", "command": command })
}

fn with(mut value: Value, more: Value) -> Value {
    if let (Some(value), Value::Object(more)) = (value.as_object_mut(), more) {
        value.extend(more);
    }
    value
}

/// Creates all of them, and what they refer to.
pub(super) async fn create(tenant: &Tenant, host_path: &Path) {
    create_objects(tenant).await;
    tenant.pod("plain", with(tenant.shell(STAY), json!({ "imagePullSecrets": [{ "name": "pull" }] }))).await.unwrap();
    tenant.pod("many", many(tenant)).await.unwrap();
    let volumes: Pod = serde_json::from_value(volumes(tenant, host_path)).unwrap();
    tenant.api::<Pod>().create(&kube::api::PostParams::default(), &volumes).await.unwrap();
    tenant.pod("crashed", crashed(tenant)).await.unwrap();
    tenant.pod("host", with(tenant.shell(STAY), json!({ "hostNetwork": true }))).await.unwrap();
    tenant.pod("shared", with(tenant.shell(STAY), json!({ "shareProcessNamespace": true }))).await.unwrap();
    tenant.pod("hooks", hooks(tenant, host_path)).await.unwrap();
    tenant.pod("half", half(tenant)).await.unwrap();
    let job = json!({ "template": { "spec": with(tenant.shell("exit 0"), json!({ "restartPolicy": "Never" })) } });
    tenant.create::<Job>(json!({ "metadata": { "name": "job" }, "spec": job })).await.unwrap();
    let template = json!({ "metadata": { "labels": { "app": "daemon" } }, "spec": tenant.shell(STAY) });
    let daemon = json!({ "selector": { "matchLabels": { "app": "daemon" } }, "template": template });
    tenant.create::<DaemonSet>(json!({ "metadata": { "name": "daemon" }, "spec": daemon })).await.unwrap();
}

async fn create_objects(tenant: &Tenant) {
    let map = json!({ "metadata": { "name": "map" }, "data": { "key": "map", "other": "part" } });
    tenant.create::<ConfigMap>(map).await.unwrap();
    let secret = json!({ "metadata": { "name": "secret" }, "stringData": { "key": "secret" } });
    tenant.create::<Secret>(secret).await.unwrap();
    let auths = json!({ "auths": { "registry.invalid": { "auth": "dXNlcjpwYXNz" } } });
    let pull = json!({
        "metadata": { "name": "pull" },
        "type": "kubernetes.io/dockerconfigjson",
        "stringData": { ".dockerconfigjson": auths.to_string() },
    });
    tenant.create::<Secret>(pull).await.unwrap();
}

/// Init container, sidecar, two main containers, a probe of each kind and type. Burstable.
fn many(tenant: &Tenant) -> Value {
    let get = json!({ "httpGet": { "path": "/", "port": 8080 }, "periodSeconds": 1 });
    let run = json!({ "exec": { "command": ["true"] }, "periodSeconds": 1, "timeoutSeconds": 5 });
    let open = json!({ "tcpSocket": { "port": 8080 }, "periodSeconds": 1 });
    let mut spec = tenant.shell(STAY);
    spec["initContainers"] = json!([
        container("first", keblet_peers::BUSYBOX_IMAGE, &["true"]),
        with(
            container("side", PROBE_IMAGE, &["/probe", "web", "--port", "8081"]),
            json!({
                "restartPolicy": "Always",
                "startupProbe": { "tcpSocket": { "port": 8081 }, "periodSeconds": 1 },
                "readinessProbe": { "tcpSocket": { "port": 8081 }, "periodSeconds": 1 },
            }),
        ),
    ]);
    spec["containers"] = json!([
        with(
            spec["containers"][0].clone(),
            json!({ "livenessProbe": run, "resources": { "requests": { "cpu": "10m" } } })
        ),
        with(
            container("web", PROBE_IMAGE, &["/probe", "web"]),
            json!({ "startupProbe": open, "readinessProbe": get, "livenessProbe": get }),
        ),
    ]);
    spec
}

/// A volume of each type that needs no further server, mounted, and mounted in parts. Guaranteed.
fn volumes(tenant: &Tenant, host_path: &Path) -> Value {
    let projected = json!({ "sources": [
        { "serviceAccountToken": { "path": "token" } },
        { "configMap": { "name": "map" } },
        { "downwardAPI": { "items": [{ "path": "name", "fieldRef": { "fieldPath": "metadata.name" } }] } },
    ] });
    let mark = json!({ "items": [{ "path": "mark", "fieldRef": { "fieldPath": "metadata.annotations['mark']" } }] });
    let mount = |name: &str, path: &str| json!({ "name": name, "mountPath": path });
    let part = |name: &str, path: &str, sub: &str| json!({ "name": name, "mountPath": path, "subPath": sub });
    let mut spec = tenant.shell(&format!("echo disk > /disk/file; echo memory > /memory/file; {STAY}"));
    spec["volumes"] = json!([
        { "name": "map", "configMap": { "name": "map" } },
        { "name": "secret", "secret": { "secretName": "secret" } },
        { "name": "projected", "projected": projected },
        { "name": "disk", "emptyDir": {} },
        { "name": "memory", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } },
        { "name": "host", "hostPath": { "path": host_path, "type": "Directory" } },
        { "name": "downward", "downwardAPI": mark },
    ]);
    let main = &mut spec["containers"][0];
    main["volumeMounts"] = json!([
        mount("map", "/map"),
        mount("secret", "/secret"),
        mount("projected", "/projected"),
        mount("disk", "/disk"),
        mount("memory", "/memory"),
        mount("host", "/host"),
        mount("downward", "/downward"),
        part("map", "/part-of-map", "other"),
        part("disk", "/part-of-disk", "folder"),
    ]);
    let amounts = json!({ "cpu": "20m", "memory": "32Mi" });
    main["resources"] = json!({ "requests": amounts, "limits": amounts });
    spec["securityContext"] = json!({ "fsGroup": 2000 });
    json!({ "metadata": { "name": "volumes", "annotations": { "mark": "before" } }, "spec": spec })
}

/// Its container has exited once and was restarted.
fn crashed(tenant: &Tenant) -> Value {
    let mut spec = tenant.shell("");
    let exit = ["/probe", "exit", "--code", "3", "--once-file", "/marks/once"];
    spec["containers"] = json!([with(
        container("main", PROBE_IMAGE, &exit),
        json!({ "volumeMounts": [{ "name": "marks", "mountPath": "/marks" }] }),
    )]);
    spec["volumes"] = json!([{ "name": "marks", "emptyDir": {} }]);
    spec
}

fn hooks(tenant: &Tenant, host_path: &Path) -> Value {
    let mut spec = tenant.shell(STAY);
    spec["volumes"] = json!([{ "name": "host", "hostPath": { "path": host_path } }]);
    let main = &mut spec["containers"][0];
    main["volumeMounts"] = json!([{ "name": "host", "mountPath": "/host" }]);
    let append = |hook: &str| json!({ "exec": { "command": ["sh", "-c", format!("echo {hook} >> /host/hooks")] } });
    main["lifecycle"] = json!({ "postStart": append("postStart"), "preStop": append("preStop") });
    spec
}

/// One of its containers has terminated for good.
fn half(tenant: &Tenant) -> Value {
    let mut spec = tenant.shell(STAY);
    spec["restartPolicy"] = json!("Never");
    let main = spec["containers"][0].clone();
    spec["containers"] = json!([main, container("done", keblet_peers::BUSYBOX_IMAGE, &["sh", "-c", "exit 7"])]);
    spec
}

/// A static pod; the image is its only container's.
pub(super) fn static_pod(tenant: &Tenant, name: &str, host_network: bool, mark: &str) -> Value {
    let mut main =
        container("main", PROBE_IMAGE, &["/probe", "web", "--port", if host_network { "18080" } else { "8080" }]);
    let port = if host_network { 18080 } else { 8080 };
    main["readinessProbe"] = json!({ "tcpSocket": { "port": port }, "periodSeconds": 1 });
    main["env"] = json!([{ "name": "MARK", "value": mark }]);
    main["volumeMounts"] = json!([{ "name": "scratch", "mountPath": "/scratch" }]);
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": tenant.namespace, "labels": { "app": name } },
        "spec": {
            "hostNetwork": host_network,
            "terminationGracePeriodSeconds": 5,
            "priorityClassName": "system-node-critical",
            "containers": [main],
            "volumes": [{ "name": "scratch", "emptyDir": { "medium": "Memory" } }],
        },
    })
}
