//! ConfigMaps, Secrets and tokens in environments and volumes: present when the pod starts, updated when they change,
//! and taken from the cache while the API server is unavailable.

use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;
use std::time::Instant;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use k8s_openapi::api::authentication::v1::TokenReview;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Secret;
use keblet_peers::Part;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use kube::Api;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::api::PostParams;
use serde_json::Value;
use serde_json::json;

const POLL: Duration = Duration::from_millis(20);

/// A shell that runs once, with these volumes mounted under their names.
fn once(tenant: &Tenant, script: &str, volumes: Value) -> Value {
    let mut pod = tenant.shell(script);
    pod["restartPolicy"] = json!("Never");
    let names = volumes.as_array().unwrap().iter().map(|volume| volume["name"].clone());
    let mount = |name: Value| json!({ "name": name, "mountPath": format!("/{}", name.as_str().unwrap()) });
    pod["containers"][0]["volumeMounts"] = names.map(mount).collect();
    pod["volumes"] = volumes;
    pod
}

/// The termination message of the pod's container.
async fn termination_message(tenant: &Tenant, pod: &str) -> String {
    let pod = tenant.until_phase(pod, "Succeeded").await.unwrap();
    let status = pod.status.unwrap().container_statuses.unwrap().remove(0);
    assert_eq!(status.restart_count, 0);
    status.state.unwrap().terminated.unwrap().message.unwrap_or_default()
}

async fn config_map(tenant: &Tenant, name: &str, data: Value) {
    tenant.create::<ConfigMap>(json!({ "metadata": { "name": name }, "data": data })).await.unwrap();
}

async fn change(tenant: &Tenant, name: &str, data: Value) {
    let patch = Patch::Merge(json!({ "data": data }));
    tenant.api::<ConfigMap>().patch(name, &PatchParams::default(), &patch).await.unwrap();
}

/// Path of a volume of the pod on the node.
async fn on_node(tenant: &Tenant, pod: &str, plugin: &str, volume: &str) -> PathBuf {
    let uid = tenant.api::<Pod>().get(pod).await.unwrap().metadata.uid.unwrap();
    tenant.node.node.root.join("pods").join(uid).join("volumes").join(format!("kubernetes.io~{plugin}")).join(volume)
}

/// Waits until a file on the node has this content.
async fn until_content(tenant: &Tenant, file: &Path, text: &str) {
    let deadline = Instant::now() + TIMEOUT;
    while std::fs::read_to_string(file).ok().as_deref() != Some(text) {
        let content = std::fs::read_to_string(file);
        assert!(Instant::now() < deadline, "{} contains {content:?}\n{}", file.display(), tenant.node.log_excerpt());
        tokio::time::sleep(POLL).await;
    }
}

#[tokio::test]
#[ignore = "real cluster"]
async fn config_maps_and_secrets_reach_environment_and_volumes() {
    let tenant = Tenant::new_namespace("objects").await.unwrap();
    config_map(&tenant, "map", json!({ "a": "1", "B": "two" })).await;
    let secret = json!({ "metadata": { "name": "secret" }, "immutable": true, "stringData": { "k": "hidden" } });
    tenant.create::<Secret>(secret).await.unwrap();
    let script = "cd /; { echo $A $K $P_B $S_k $GONE $NONE $KUBERNETES_SERVICE_PORT; \
                  cat map/a both/sub/k both/sub/b both/labels; echo; \
                  stat -L -c '%a %u %g' both/sub/k map/B; ls none; touch both/x 2>/dev/null || echo read-only; \
                  grep -c ' /both tmpfs' /proc/mounts; } > /dev/termination-log";
    let projected = json!({ "defaultMode": 0o400, "sources": [
        { "secret": { "name": "secret", "items": [{ "key": "k", "path": "sub/k" }] } },
        { "secret": { "name": "absent", "optional": true } },
        { "configMap": { "name": "map", "items": [{ "key": "B", "path": "sub/b" }] } },
        { "configMap": { "name": "absent", "optional": true } },
        { "downwardAPI": { "items": [{ "path": "labels", "mode": 0o444, "fieldRef": { "fieldPath": "metadata.labels" } }] } },
    ] });
    let volumes = json!([
        { "name": "map", "configMap": { "name": "map" } },
        { "name": "none", "secret": { "secretName": "absent", "optional": true } },
        { "name": "both", "projected": projected },
    ]);
    let mut pod = once(&tenant, script, volumes);
    pod["securityContext"] = json!({ "fsGroup": 77 });
    pod["containers"][0]["env"] = json!([
        { "name": "A", "valueFrom": { "configMapKeyRef": { "name": "map", "key": "a" } } },
        { "name": "K", "valueFrom": { "secretKeyRef": { "name": "secret", "key": "k" } } },
        { "name": "GONE", "valueFrom": { "secretKeyRef": { "name": "absent", "key": "k", "optional": true } } },
        { "name": "NONE", "valueFrom": { "configMapKeyRef": { "name": "map", "key": "absent", "optional": true } } },
    ]);
    pod["containers"][0]["envFrom"] = json!([
        { "prefix": "P_", "configMapRef": { "name": "map" } },
        { "prefix": "S_", "secretRef": { "name": "secret" } },
        { "configMapRef": { "name": "absent", "optional": true } },
        { "secretRef": { "name": "absent", "optional": true } },
    ]);
    tenant.pod("all", pod).await.unwrap();
    let expected = "1 hidden two hidden 443\n1hiddentwoapp=\"all\"\n440 0 77\n644 0 77\nread-only\n1\n";
    assert_eq!(termination_message(&tenant, "all").await, expected);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn config_map_change_reaches_a_running_container() {
    let tenant = Tenant::new_namespace("change").await.unwrap();
    config_map(&tenant, "map", json!({ "k": "1", "gone": "" })).await;
    // Names that are gone are removed after the content has changed.
    let script = "until grep -q 2 /map/k && [ ! -L /map/gone ]; do sleep 0.02; done; \
                  { cat /map/k /map/new; ls /map; cat /part; } > /dev/termination-log";
    let mut pod = once(&tenant, script, json!([{ "name": "map", "configMap": { "name": "map" } }]));
    let part = json!({ "name": "map", "mountPath": "/part", "subPath": "k" });
    pod["containers"][0]["volumeMounts"].as_array_mut().unwrap().push(part);
    tenant.pod("watcher", pod).await.unwrap();
    tenant.until_phase("watcher", "Running").await.unwrap();
    let file = on_node(&tenant, "watcher", "configmap", "map").await.join("k");
    until_content(&tenant, &file, "1").await;
    let began = Instant::now();
    change(&tenant, "map", json!({ "k": "2", "new": "3", "gone": null })).await;
    until_content(&tenant, &file, "2").await;
    // The kubelet needs a minute and more; ten seconds allow for a busy machine.
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!(termination_message(&tenant, "watcher").await, "23k\nnew\n1", "a subPath mount is not updated");
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pod_waits_for_a_missing_config_map() {
    let tenant = Tenant::new_namespace("late").await.unwrap();
    let print = "cat /late/k > /dev/termination-log";
    tenant
        .pod("volume", once(&tenant, print, json!([{ "name": "late", "configMap": { "name": "late" } }])))
        .await
        .unwrap();
    let mut by_env = once(&tenant, "echo -n $k > /dev/termination-log", json!([]));
    by_env["containers"][0]["envFrom"] = json!([{ "configMapRef": { "name": "late" } }]);
    tenant.pod("env", by_env).await.unwrap();
    let waiting = |pod: Option<&Pod>| {
        let state = pod?.status.as_ref()?.container_statuses.as_ref()?.first()?.state.as_ref()?.waiting.clone()?;
        Some((state.reason.unwrap_or_default(), state.message.unwrap_or_default()))
    };
    let missing = ("CreateContainerConfigError".to_owned(), "configmap \"late\" not found".to_owned());
    let is_missing = |pod: Option<&Pod>| (waiting(pod)? == missing).then_some(());
    tenant.until("env", "waiting for the ConfigMap", is_missing).await.unwrap();
    let creating = |pod: Option<&Pod>| (waiting(pod)?.0 == "ContainerCreating").then_some(());
    tenant.until("volume", "waiting for the ConfigMap", creating).await.unwrap();
    let expected = "MountVolume.SetUp failed for volume \"late\" : configmap \"late\" not found";
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let events = tenant.api::<Event>().list(&Default::default()).await.unwrap();
        let reported = |event: &Event| {
            let message = event.message.as_deref() == Some(expected) && event.reason.as_deref() == Some("FailedMount");
            message && event.involved_object.name.as_deref() == Some("volume")
        };
        if events.items.iter().any(reported) {
            break;
        }
        assert!(Instant::now() < deadline, "no event: {expected}");
        tokio::time::sleep(POLL).await;
    }
    config_map(&tenant, "late", json!({ "k": "here" })).await;
    assert_eq!(termination_message(&tenant, "volume").await, "here");
    assert_eq!(termination_message(&tenant, "env").await, "here");
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn projected_token_has_requested_audience_and_owner() {
    let tenant = Tenant::new_namespace("token").await.unwrap();
    let source = json!({ "serviceAccountToken": { "path": "t", "audience": "vault", "expirationSeconds": 600 } });
    let volumes = json!([{ "name": "v", "projected": { "sources": [source] } }]);
    let script = "{ stat -L -c '%a %u' /v/t; cat /v/t; } > /dev/termination-log";
    let mut pod = once(&tenant, script, volumes);
    pod["securityContext"] = json!({ "runAsUser": 1234 });
    tenant.pod("bearer", pod).await.unwrap();
    let message = termination_message(&tenant, "bearer").await;
    let (file, token) = message.split_once('\n').unwrap();
    assert_eq!(file, "600 1234");
    let claims = BASE64_URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap();
    let claims: Value = serde_json::from_slice(&claims).unwrap();
    assert_eq!(claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap(), 600, "{claims}");
    let review = json!({ "metadata": {}, "spec": { "token": token, "audiences": ["vault"] } });
    let review: TokenReview = serde_json::from_value(review).unwrap();
    let api: Api<TokenReview> = Api::all(tenant.cluster.client());
    let status = api.create(&PostParams::default(), &review).await.unwrap().status.unwrap();
    assert_eq!(status.authenticated, Some(true), "{:?}", status.error);
    let user = status.user.unwrap();
    assert_eq!(user.username.unwrap(), format!("system:serviceaccount:{}:default", tenant.namespace));
    assert_eq!(user.extra.unwrap()["authentication.kubernetes.io/pod-name"], ["bearer"]);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn oversized_environment_is_reported_and_affects_no_other_pod() {
    let tenant = Tenant::new_namespace("oversized").await.unwrap();
    config_map(&tenant, "map", json!({ "k": "1" })).await;
    let value = "x".repeat(200_000);
    let mut huge = once(&tenant, "true", json!([]));
    huge["containers"][0]["env"] =
        json!((0..5).map(|n| json!({ "name": format!("V{n}"), "value": value })).collect::<Vec<_>>());
    tenant.pod("huge", huge).await.unwrap();
    let reported = |pod: Option<&Pod>| {
        let state = pod?.status.as_ref()?.container_statuses.as_ref()?.first()?.state.as_ref()?.waiting.clone()?;
        (state.reason? == "CreateContainerConfigError").then_some(state.message.unwrap_or_default())
    };
    let message = tenant.until("huge", "refused", reported).await.unwrap();
    assert!(message.contains("environment variable \"V0\" takes 200004 bytes"), "{message}");
    // 1 MB, the largest environment of a process, is passed.
    let mut large = once(&tenant, "env | wc -c > /dev/termination-log", json!([]));
    let value = "x".repeat(100_000);
    large["containers"][0]["env"] =
        json!((0..10).map(|n| json!({ "name": format!("V{n}"), "value": value })).collect::<Vec<_>>());
    tenant.pod("large", large).await.unwrap();
    let size: usize = termination_message(&tenant, "large").await.trim().parse().unwrap();
    assert!(size > 1_000_000, "{size}");
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn container_restarts_with_cached_objects_while_the_api_server_is_down() {
    let cluster = Cluster::exclusive().await.unwrap();
    let node = cluster.node().await.unwrap();
    let tenant = Tenant::on(cluster, node, "unavailable").await.unwrap();
    let folder = tenant.node.folder().unwrap().join(&tenant.namespace);
    std::fs::create_dir_all(&folder).unwrap();
    config_map(&tenant, "map", json!({ "k": "known" })).await;
    let script = "n=$(ls /dir | grep -c run); echo -n $k > /dir/run-$n; cat /map/k >> /dir/run-$n; \
                  until test -e /dir/go-$n; do sleep 0.05; done";
    let volumes = json!([
        { "name": "map", "configMap": { "name": "map" } },
        { "name": "dir", "hostPath": { "path": folder, "type": "Directory" } },
    ]);
    let mut pod = once(&tenant, script, volumes);
    pod["restartPolicy"] = json!("Always");
    pod["containers"][0]["envFrom"] = json!([{ "configMapRef": { "name": "map" } }]);
    tenant.pod("again", pod).await.unwrap();
    until_content(&tenant, &folder.join("run-0"), "knownknown").await;
    tenant.cluster.on_control_plane(|plane| plane.kill(Part::ApiServer)).await.unwrap();
    std::fs::write(folder.join("go-0"), "").unwrap();
    until_content(&tenant, &folder.join("run-1"), "knownknown").await;
    tenant.cluster.on_control_plane(|plane| plane.start_part(Part::ApiServer)).await.unwrap();
    change(&tenant, "map", json!({ "k": "new" })).await;
    let file = on_node(&tenant, "again", "configmap", "map").await.join("k");
    until_content(&tenant, &file, "new").await;

    // A restarted agent finds the volume and keeps it up to date.
    let version = std::fs::read_link(file.with_file_name("..data")).unwrap();
    tenant.node.kill_agent().unwrap();
    tenant.node.start_agent().await.unwrap();
    tenant.pod("probe", once(&tenant, "true", json!([]))).await.unwrap();
    tenant.until_phase("probe", "Succeeded").await.unwrap();
    assert_eq!(std::fs::read_link(file.with_file_name("..data")).unwrap(), version);
    change(&tenant, "map", json!({ "k": "newer" })).await;
    until_content(&tenant, &file, "newer").await;
    let volume = file.parent().unwrap().to_owned();
    tenant.delete_namespace().await.unwrap();
    assert!(!volume.exists(), "the volume was not removed with its pod");
}
