//! Fields of volumes, as containers see them.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::core::v1::Secret;
use keblet_tests::cluster::Tenant;
use keblet_tests::cluster::until_some;
use kube::Api;
use kube::api::DeleteParams;
use kube::api::PostParams;
use kube::runtime::watcher::Config;
use serde_json::Value;
use serde_json::json;

/// A folder of the test on the node.
fn folder(tenant: &Tenant, name: &str) -> PathBuf {
    let folder = tenant.node.folder().unwrap().join(&tenant.namespace).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// A shell that runs once with these volumes mounted under their names; returns the lines of its output.
async fn report(tenant: &Tenant, name: &str, script: &str, volumes: Value, of_pod: Value) -> Vec<String> {
    let mut spec = tenant.shell(&format!("{{ {script}; }} > /dev/termination-log 2>&1"));
    spec["restartPolicy"] = json!("Never");
    let mount = |volume: &Value| json!({ "name": volume["name"], "mountPath": format!("/{}", volume["name"].as_str().unwrap()) });
    spec["containers"][0]["volumeMounts"] = volumes.as_array().unwrap().iter().map(mount).collect();
    spec["volumes"] = volumes;
    spec.as_object_mut().unwrap().extend(of_pod.as_object().unwrap().clone());
    tenant.pod(name, spec).await.unwrap();
    let pod = tenant.until_phase(name, "Succeeded").await.unwrap();
    let state = pod.status.unwrap().container_statuses.unwrap().remove(0).state.unwrap();
    state.terminated.unwrap().message.unwrap_or_default().lines().map(str::to_owned).collect()
}

#[tokio::test]
#[ignore = "real cluster"]
async fn keys_become_files_with_their_paths_and_modes() {
    let tenant = Tenant::new_namespace("keys").await.unwrap();
    let map = json!({ "metadata": { "name": "map" }, "data": { "a": "1", "b": "2" } });
    tenant.create::<ConfigMap>(map).await.unwrap();
    let secret = json!({ "metadata": { "name": "secret" }, "stringData": { "k": "hidden", "l": "left out" } });
    tenant.create::<Secret>(secret).await.unwrap();
    let name = json!({ "path": "name", "fieldRef": { "fieldPath": "metadata.name" } });
    let requested = json!({ "containerName": "main", "resource": "requests.cpu" });
    let cpu = json!({ "path": "cpu", "mode": 0o404, "resourceFieldRef": requested });
    let volumes = json!([
        { "name": "map", "configMap": { "name": "map", "defaultMode": 0o440,
            "items": [{ "key": "a", "path": "sub/a" }, { "key": "b", "path": "b", "mode": 0o400 }] } },
        { "name": "secret", "secret": { "secretName": "secret", "defaultMode": 0o404, "items": [{ "key": "k", "path": "k" }] } },
        { "name": "down", "downwardAPI": { "defaultMode": 0o444, "items": [name, cpu] } },
        { "name": "none", "configMap": { "name": "map", "optional": true, "items": [{ "key": "absent", "path": "x" }] } },
        { "name": "gone", "configMap": { "name": "absent", "optional": true } },
    ]);
    let script = "stat -L -c '%n %a' map/sub/a map/b secret/* down/*; \
                  cat map/sub/a map/b secret/k down/name down/cpu; echo; ls none gone";
    let script = format!("cd /; {script}");
    let lines = report(&tenant, "files", &script, volumes, json!({})).await;
    let modes = ["map/sub/a 440", "map/b 400", "secret/k 404", "down/cpu 404", "down/name 444"];
    let expected = [&modes[..], &["12hiddenfiles0", "gone:", "", "none:"]].concat();
    assert_eq!(lines, expected);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn host_paths_are_made_or_checked_by_their_type() {
    let tenant = Tenant::new_namespace("host").await.unwrap();
    let host = folder(&tenant, "host");
    std::fs::write(host.join("file"), "seen\n").unwrap();
    let path =
        |name: &str, path: &Path, type_: &str| json!({ "name": name, "hostPath": { "path": path, "type": type_ } });
    let volumes = json!([
        path("dir", &host, "Directory"),
        path("file", &host.join("file"), "File"),
        path("null", Path::new("/dev/null"), "CharDevice"),
        path("made", &host.join("made/here"), "DirectoryOrCreate"),
        path("empty", &host.join("empty"), "FileOrCreate"),
        path("any", &host, ""),
    ]);
    let script =
        "cat /file /any/file; test -c /null && echo device; touch /made/x; test -s /empty || echo empty; ls /dir";
    let lines = report(&tenant, "paths", script, volumes, json!({})).await;
    assert_eq!(lines, ["seen", "seen", "device", "empty", "empty", "file", "made"]);
    assert!(host.join("made/here/x").exists());

    let mut spec = tenant.shell("sleep 3600");
    spec["volumes"] = json!([path("wrong", &host.join("file"), "Directory")]);
    spec["containers"][0]["volumeMounts"] = json!([{ "name": "wrong", "mountPath": "/wrong" }]);
    tenant.pod("wrong", spec).await.unwrap();
    let about = Config::default().fields("involvedObject.name=wrong,reason=FailedMount");
    let message = until_some(tenant.api::<Event>(), about, "the refused path", |event: &Event| event.message.clone());
    let message = message.await.unwrap();
    let expected =
        format!("hostPath type check failed: {} is not a directory, it's a File", host.join("file").display());
    assert!(message.ends_with(&expected), "{message}");
    tenant.delete_namespace().await.unwrap();
}

/// A volume of this source that is kept for a claim of the tenant; returns its name.
async fn volume(tenant: &Tenant, claim: &str, source: (&str, Value)) -> String {
    let name = format!("{}-{claim}", tenant.namespace);
    let mut object = json!({ "metadata": { "name": name }, "spec": {
        "capacity": { "storage": "1Mi" }, "accessModes": ["ReadWriteOnce"], "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain", "claimRef": { "namespace": tenant.namespace, "name": claim },
        "nodeAffinity": { "required": { "nodeSelectorTerms": [{ "matchExpressions":
            [{ "key": "kubernetes.io/hostname", "operator": "In", "values": [tenant.node.name()] }] }] } },
    } });
    object["spec"][source.0] = source.1;
    let volumes: Api<PersistentVolume> = Api::all(tenant.cluster.client());
    volumes.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    name
}

fn claim_spec() -> Value {
    json!({ "accessModes": ["ReadWriteOnce"], "storageClassName": "", "resources": { "requests": { "storage": "1Mi" } } })
}

#[tokio::test]
#[ignore = "real cluster"]
async fn claims_and_claims_of_the_pod_itself_are_mounted() {
    let tenant = Tenant::new_namespace("claims").await.unwrap();
    let (kept, scratch) = (folder(&tenant, "kept"), folder(&tenant, "scratch"));
    let names = [
        volume(&tenant, "data", ("hostPath", json!({ "path": kept }))).await,
        volume(&tenant, "user-scratch", ("local", json!({ "path": scratch }))).await,
    ];
    let claim = json!({ "metadata": { "name": "data" }, "spec": claim_spec() });
    tenant.create::<PersistentVolumeClaim>(claim).await.unwrap();
    let volumes = json!([
        { "name": "data", "persistentVolumeClaim": { "claimName": "data" } },
        { "name": "scratch", "ephemeral": { "volumeClaimTemplate": { "spec": claim_spec() } } },
    ]);
    let lines = report(&tenant, "user", "touch /data/a /scratch/b && echo written", volumes, json!({})).await;
    assert_eq!(lines, ["written"]);
    assert!(kept.join("a").exists() && scratch.join("b").exists());
    let (cluster, _) = tenant.delete_namespace().await.unwrap();
    for name in names {
        Api::<PersistentVolume>::all(cluster.client()).delete(&name, &DeleteParams::default()).await.unwrap();
    }
}

#[tokio::test]
#[ignore = "real cluster"]
async fn groups_of_files_are_changed_as_the_policy_says() {
    let tenant = Tenant::new_namespace("group").await.unwrap();
    let group = |path: &Path| std::fs::metadata(path).unwrap().gid();
    let mut names = Vec::new();
    // The directory has the group and its mode already, a file in it has another one.
    for (policy, expected) in [("OnRootMismatch", 0), ("Always", 77)] {
        let claim = policy.to_lowercase();
        let data = folder(&tenant, &claim);
        std::fs::write(data.join("f"), "").unwrap();
        std::os::unix::fs::chown(&data, None, Some(77)).unwrap();
        std::fs::set_permissions(&data, std::os::unix::fs::PermissionsExt::from_mode(0o2775)).unwrap();
        names.push(volume(&tenant, &claim, ("local", json!({ "path": data }))).await);
        let object = json!({ "metadata": { "name": claim }, "spec": claim_spec() });
        tenant.create::<PersistentVolumeClaim>(object).await.unwrap();
        let volumes = json!([{ "name": "data", "persistentVolumeClaim": { "claimName": claim } }]);
        let context = json!({ "securityContext": { "fsGroup": 77, "fsGroupChangePolicy": policy } });
        report(&tenant, &claim, "ls /data", volumes, context).await;
        assert_eq!(group(&data.join("f")), expected, "{policy}");
    }
    let (cluster, _) = tenant.delete_namespace().await.unwrap();
    for name in names {
        Api::<PersistentVolume>::all(cluster.client()).delete(&name, &DeleteParams::default()).await.unwrap();
    }
}

#[tokio::test]
#[ignore = "real cluster"]
async fn a_volume_that_outgrows_its_limit_evicts_its_pod() {
    let tenant = Tenant::new_namespace("limit").await.unwrap();
    let mut spec = tenant.shell("dd if=/dev/zero of=/data/f bs=1M count=3 2>/dev/null; sleep 3600");
    spec["volumes"] = json!([{ "name": "data", "emptyDir": { "sizeLimit": "1Mi" } }]);
    spec["containers"][0]["volumeMounts"] = json!([{ "name": "data", "mountPath": "/data" }]);
    tenant.pod("large", spec).await.unwrap();
    let status = tenant.until_phase("large", "Failed").await.unwrap().status.unwrap();
    assert_eq!(status.reason.as_deref(), Some("Evicted"));
    let message = status.message.unwrap_or_default();
    assert!(message.contains("Usage of EmptyDir volume \"data\" exceeds the limit \"1Mi\""), "{message}");
    tenant.delete_namespace().await.unwrap();
}
