//! Pods of every kind that a node is taken over with.

use std::path::Path;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::node::v1::RuntimeClass;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::Tenant;
use kube::Api;
use kube::api::DeleteParams;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::api::PostParams;
use serde_json::Value;
use serde_json::json;

/// Runs until SIGTERM.
pub(super) const STAY: &str = "trap 'exit 0' TERM; while :; do sleep 1 & wait $!; done";

/// Pods that are Ready before a take-over and have to stay so, those of workloads and static ones excepted.
pub(super) const READY: [&str; 10] =
    ["plain", "many", "volumes", "crashed", "host", "shared", "hooks", "claimed", "classed", "resized"];
/// Pods of the Deployment.
pub(super) const REPLICAS: i32 = 4;
/// What pod `resized` requests in the end.
const RESIZED: &str = "30m";

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
    create_cluster_objects(tenant, &host_path.with_file_name("claimed")).await;
    tenant.pod("plain", with(tenant.shell(STAY), json!({ "imagePullSecrets": [{ "name": "pull" }] }))).await.unwrap();
    tenant.pod("many", many(tenant)).await.unwrap();
    let volumes: Pod = serde_json::from_value(volumes(tenant, host_path)).unwrap();
    tenant.api::<Pod>().create(&PostParams::default(), &volumes).await.unwrap();
    tenant.pod("crashed", crashed(tenant)).await.unwrap();
    tenant.pod("host", with(tenant.shell(STAY), json!({ "hostNetwork": true }))).await.unwrap();
    tenant.pod("shared", with(tenant.shell(STAY), json!({ "shareProcessNamespace": true }))).await.unwrap();
    tenant.pod("hooks", hooks(tenant, host_path)).await.unwrap();
    tenant.pod("half", half(tenant)).await.unwrap();
    tenant.pod("claimed", claimed(tenant)).await.unwrap();
    let class = json!({ "runtimeClassName": cluster_object(&tenant.namespace) });
    tenant.pod("classed", with(tenant.shell(STAY), class)).await.unwrap();
    let mut requesting = tenant.shell(STAY);
    requesting["containers"][0]["resources"] = json!({ "requests": { "cpu": "20m" } });
    tenant.pod("resized", requesting).await.unwrap();
    tenant.create::<Deployment>(deployment(tenant)).await.unwrap();
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

/// Name of objects that do not belong to the namespace.
fn cluster_object(namespace: &str) -> String {
    format!("{namespace}-object")
}

/// A volume in this folder of the node, with a claim, and a runtime class.
async fn create_cluster_objects(tenant: &Tenant, folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let name = cluster_object(&tenant.namespace);
    let here = json!({ "key": "kubernetes.io/hostname", "operator": "In", "values": [tenant.node.name()] });
    let volume = json!({ "metadata": { "name": name }, "spec": {
        "capacity": { "storage": "1Mi" }, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain", "local": { "path": folder },
        "claimRef": { "namespace": tenant.namespace, "name": "claim" },
        "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions": [here] }] } },
    } });
    let volumes: Api<PersistentVolume> = Api::all(tenant.cluster.client());
    volumes.create(&PostParams::default(), &serde_json::from_value(volume).unwrap()).await.unwrap();
    let claim = json!({
        "accessModes": ["ReadWriteOnce"], "storageClassName": "", "resources": { "requests": { "storage": "1Mi" } },
    });
    let claim = json!({ "metadata": { "name": "claim" }, "spec": claim });
    tenant.create::<PersistentVolumeClaim>(claim).await.unwrap();
    let class = json!({ "metadata": { "name": name }, "handler": "runc" });
    let classes: Api<RuntimeClass> = Api::all(tenant.cluster.client());
    classes.create(&PostParams::default(), &serde_json::from_value(class).unwrap()).await.unwrap();
}

/// Deletes the objects that do not belong to the namespace.
pub(super) async fn delete_cluster_objects(cluster: &Cluster, namespace: &str) {
    let (name, now) = (cluster_object(namespace), DeleteParams::default());
    Api::<PersistentVolume>::all(cluster.client()).delete(&name, &now).await.unwrap();
    Api::<RuntimeClass>::all(cluster.client()).delete(&name, &now).await.unwrap();
}

fn claimed(tenant: &Tenant) -> Value {
    let mut spec = tenant.shell(&format!("echo kept > /data/file; {STAY}"));
    spec["volumes"] = json!([{ "name": "data", "persistentVolumeClaim": { "claimName": "claim" } }]);
    spec["containers"][0]["volumeMounts"] = json!([{ "name": "data", "mountPath": "/data" }]);
    spec
}

fn deployment(tenant: &Tenant) -> Value {
    let mut spec = tenant.shell("");
    let ready = json!({ "httpGet": { "path": "/", "port": 8080 }, "periodSeconds": 1 });
    let drained = json!({ "preStop": { "sleep": { "seconds": 1 } } });
    let fields = json!({ "readinessProbe": ready, "lifecycle": drained });
    spec["containers"] = json!([with(container("main", PROBE_IMAGE, &["/probe", "web"]), fields)]);
    let labels = json!({ "app": "replicas" });
    let template = json!({ "metadata": { "labels": labels }, "spec": spec });
    let spec = json!({ "replicas": REPLICAS, "selector": { "matchLabels": labels }, "template": template });
    json!({ "metadata": { "name": "replicas" }, "spec": spec })
}

/// Resizes pod `resized` in place.
pub(super) async fn resize(tenant: &Tenant) {
    let resources = json!({ "requests": { "cpu": RESIZED } });
    let patch = json!({ "spec": { "containers": [{ "name": "main", "resources": resources }] } });
    let pods = tenant.api::<Pod>();
    pods.patch_subresource("resize", "resized", &PatchParams::default(), &Patch::Strategic(patch)).await.unwrap();
    let is_resized = |pod: Option<&Pod>| {
        let status = pod?.status.as_ref()?;
        let shown = status.container_statuses.as_ref()?.first()?.resources.as_ref()?;
        let is_open = status.conditions.iter().flatten().any(|one| one.type_.starts_with("PodResize"));
        (shown.requests.as_ref()?.get("cpu")?.0 == RESIZED && !is_open).then_some(())
    };
    tenant.until("resized", "another request", is_resized).await.unwrap();
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
