//! Pulls from a registry that demands credentials, by a real runtime; image volumes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use anyhow::ensure;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Secret;
use keblet::images::CredentialSource;
use keblet::images::Images;
use keblet::images::PullLimits;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeEndpoint;
use keblet::runtime::RuntimeOptions;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_peers::Cache;
use keblet_peers::Options;
use keblet_peers::PROBE_IMAGE;
use keblet_peers::PrivateContainerd;
use keblet_proto::cri::v1 as cri;
use keblet_tests::registry::Fault;
use keblet_tests::registry::Registry;
use keblet_tests::registry::Request;
use keblet_tests::standalone::StandaloneNode;
use serde_json::Value;
use serde_json::json;

/// `node:secret`.
const NODE: &str = "Basic bm9kZTpzZWNyZXQ=";
/// `plugin:secret`.
const PLUGIN: &str = "Basic cGx1Z2luOnNlY3JldA==";

fn write_pulled_pod(node: &StandaloneNode, name: &str, image: &str) -> Result<()> {
    let mut pod = node.pod(name, &["run", "--stamp", &node.stamp(name)]);
    pod["spec"]["containers"][0]["image"] = json!(image);
    pod["spec"]["containers"][0]["imagePullPolicy"] = json!("IfNotPresent");
    node.layout.write_manifest(name, &pod)
}

/// A credential plugin that is a shell command; returns the agent's flags.
fn configure_plugin(dir: &Path, registry: &Registry) -> Result<Vec<String>> {
    let (bin, config) = (dir.join("plugins"), dir.join("plugins.json"));
    fs::create_dir(&bin)?;
    symlink("/bin/sh", bin.join("plugin"))?;
    let answer = json!({"kind": "CredentialProviderResponse", "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "cacheKeyType": "Image", "auth": {registry.repository("plugged"): {"username": "plugin", "password": "secret"}}});
    let provider = json!({"name": "plugin", "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "matchImages": [registry.repository("plugged")], "defaultCacheDuration": "1m",
        "args": ["-c", format!("cat > /dev/null; echo '{answer}'")]});
    let all =
        json!({"kind": "CredentialProviderConfig", "apiVersion": "kubelet.config.k8s.io/v1", "providers": [provider]});
    fs::write(&config, all.to_string())?;
    let [config, bin] = [config, bin].map(|path| path.display().to_string());
    Ok(vec![
        format!("--image-credential-provider-config={config}"),
        format!("--image-credential-provider-bin-dir={bin}"),
    ])
}

/// The names of images that all pods of the node may use, by the access records.
fn open_to_all(root: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(root.join("image_manager/pulled"))? {
        let record: Value = serde_json::from_slice(&fs::read(entry?.path())?)?;
        let mapping = record["credentialMapping"].as_object().cloned().unwrap_or_default();
        names.extend(
            mapping.into_iter().filter(|(_, access)| access["nodePodsAccessible"] == true).map(|(name, _)| name),
        );
    }
    names.sort();
    Ok(names)
}

#[test]
#[ignore = "real runtime"]
fn private_images_are_pulled_with_credentials_of_files_and_plugins() -> Result<()> {
    let registry = Registry::start(&Cache::locate(), PROBE_IMAGE)?;
    for (repository, login) in [("filed", NODE), ("plugged", PLUGIN), ("closed", "Basic bm9ib2R5")] {
        registry.demand(repository, login);
    }
    let mut node = StandaloneNode::new()?;
    let auths = json!({"auths": {registry.repository("filed"): {"auth": NODE.trim_start_matches("Basic ")}}});
    fs::write(node.layout.root.join("config.json"), auths.to_string())?;
    node.flags = configure_plugin(&node.containerd.ready().dir.clone(), &registry)?;
    for repository in ["filed", "plugged", "closed"] {
        write_pulled_pod(&node, repository, &registry.image(repository))?;
    }
    node.start()?;
    node.until_running("filed")?;
    node.until_running("plugged")?;
    let waiting = node.until("the failure", |node| {
        let waiting = node.status("closed")["containerStatuses"][0]["state"]["waiting"].clone();
        let failed = matches!(waiting["reason"].as_str(), Some("ErrImagePull" | "ImagePullBackOff"));
        Ok(failed.then_some(waiting))
    })?;
    ensure!(waiting["message"].as_str().is_some_and(|text| text.contains("uthoriz")), "{waiting}");
    node.until_true("the records", |node| {
        let names = ["filed", "plugged"].map(|repository| registry.repository(repository));
        Ok(open_to_all(&node.layout.root)? == names)
    })?;
    let requests = registry.take_requests();
    for (repository, login) in [("filed", NODE), ("plugged", PLUGIN)] {
        let manifest = format!("/v2/{repository}/manifests/");
        let served = |request: &Request| {
            let is_login = request.authorization.as_deref() == Some(login);
            request.path.starts_with(&manifest) && is_login && request.status == 200
        };
        ensure!(requests.iter().any(served), "{requests:?}");
    }
    node.stop()
}

/// A pull secret with a user for one repository.
fn pull_secret(repository: &str, name: &str, password: &str) -> Arc<Secret> {
    let config = json!({"auths": {repository: {"username": "node", "password": password}}});
    let mut secret = Secret { type_: Some("kubernetes.io/dockerconfigjson".to_owned()), ..Secret::default() };
    secret.metadata.name = Some(name.to_owned());
    secret.data = Some([(".dockerconfigjson".to_owned(), ByteString(config.to_string().into_bytes()))].into());
    Arc::new(secret)
}

#[tokio::test]
#[ignore = "real runtime"]
async fn pull_secrets_are_tried_and_a_failing_registry_is_reported() {
    let containerd = PrivateContainerd::start(&Cache::locate(), &Options::default()).unwrap();
    let endpoint: RuntimeEndpoint = containerd.endpoint().parse().unwrap();
    let images = Images::new(Runtime::new(&endpoint, None, RuntimeOptions::default()), PullLimits::default());
    let sandbox = cri::PodSandboxConfig::default();
    let credentials = async |registry: &Registry, image: &str| {
        registry.demand("app", NODE);
        let secrets = [("wrong", "guess"), ("right", "secret")]
            .map(|(name, password)| pull_secret(&registry.repository("app"), name, password));
        images.credentials().matching(image, &Pod::default(), &secrets).await.unwrap()
    };

    for (fault, part) in [
        (Fault::Status(500), "500"),
        (Fault::Status(503), "503"),
        (Fault::Status(429), "429"),
        (Fault::HalfBlob, "EOF"),
        (Fault::WrongContent, "digest"),
    ] {
        // Each has its own image: the runtime keeps what it has received of a blob, wrong content too.
        let registry = Registry::start(&Cache::locate(), PROBE_IMAGE).unwrap();
        let image = registry.image("app");
        let both = credentials(&registry, &image).await;
        // The runtime itself repeats some requests: the fault lasts for several of them.
        (0..20).for_each(|_| registry.fail(fault));
        let pulled = images.pull(&image, &sandbox, &both[1..]).await;
        let error = pulled.err().unwrap_or_else(|| panic!("{fault:?}: pulled")).to_string();
        assert!(error.contains(part), "{fault:?}: {error}");
        assert!(images.inspect(&image, None).await.unwrap().is_none(), "nothing half made is left");
    }

    let registry = Registry::start(&Cache::locate(), PROBE_IMAGE).unwrap();
    let image = registry.image("app");
    let both = credentials(&registry, &image).await;
    let error = images.pull(&image, &sandbox, &[]).await.unwrap_err().to_string();
    assert!(error.contains("uthoriz"), "{error}");
    let pulled = images.pull(&image, &sandbox, &both).await.unwrap();
    let CredentialSource::Secret(used) = &pulled.source else { panic!("{pulled:?}") };
    assert_eq!(used.name, "right");
    let found = images.inspect(&image, None).await.unwrap().unwrap();
    assert_eq!(found.image_ref, pulled.image_ref, "records and lookups agree on the id");
    containerd.stop().unwrap();
}

#[test]
#[ignore = "real runtime"]
fn an_image_is_pulled_while_an_init_container_runs() -> Result<()> {
    let registry = Registry::start(&Cache::locate(), PROBE_IMAGE)?;
    let mut node = StandaloneNode::new()?;
    let config = node.containerd.ready().dir.join("keblet.yaml");
    let settings = "apiVersion: keblet.dev/v1alpha1\nkind: KebletConfiguration\nimages: {prefetch: true}\n";
    fs::write(&config, settings)?;
    node.flags = vec![format!("--keblet-config={}", config.display())];
    let (name, go, image) = ("patient", node.stamp("go"), registry.image("later"));
    let mut pod = node.pod(name, &["run", "--stamp", &node.stamp(name)]);
    pod["spec"]["containers"][0]["image"] = json!(image);
    pod["spec"]["containers"][0]["imagePullPolicy"] = json!("IfNotPresent");
    let mut init = pod["spec"]["containers"][0].clone();
    init["name"] = json!("waiting");
    init["image"] = json!(BUSYBOX_IMAGE);
    init["command"] = json!(["sh", "-c", format!("until test -e {go}; do sleep 0.05; done")]);
    pod["spec"]["initContainers"] = json!([init]);
    node.layout.write_manifest(name, &pod)?;
    node.start()?;
    let is_blob = |request: &Request| request.path.starts_with("/v2/later/blobs/") && request.status == 200;
    node.until_true("the pull", |_| Ok(registry.take_requests().iter().any(is_blob)))?;
    let early = node.log_contains(&["Pulling image", &image]);
    ensure!(!early, "an event before the container's turn");
    ensure!(!node.has_started(name), "the init container has ended");
    fs::write(&go, "")?;
    node.until_running(name)?;
    for event in ["Pulling image", "Successfully pulled image"] {
        node.until_true(event, |node| Ok(node.log_contains(&[event, &image])))?;
    }
    let after = registry.take_requests();
    ensure!(!after.iter().any(|request| request.path.starts_with("/v2/later/manifests/")), "pulled once: {after:?}");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn an_image_is_mounted_as_a_volume() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let (name, stamp) = ("reader", node.stamp("reader"));
    let script = format!("[ -x /data/probe ] && ! touch /data/x && echo start 1 > {stamp}; exec sleep 3600");
    let mut pod = node.pod(name, &["run", "--stamp", &stamp]);
    let container = &mut pod["spec"]["containers"][0];
    container["image"] = json!(BUSYBOX_IMAGE);
    container["command"] = json!(["sh", "-c", script]);
    let mounts = container["volumeMounts"].as_array_mut().unwrap();
    mounts.push(json!({"name": "data", "mountPath": "/data"}));
    let volumes = pod["spec"]["volumes"].as_array_mut().unwrap();
    volumes.push(json!({"name": "data", "image": {"reference": PROBE_IMAGE, "pullPolicy": "Never"}}));
    node.layout.write_manifest(name, &pod)?;
    node.start()?;
    if Cache::locate().containerd_bin() == Cache::locate().containerd_2().join("usr/bin") {
        node.until_running(name)?;
    } else {
        // containerd 1.7 does not know the field.
        node.until_true("the error", |node| {
            let waiting = node.status("reader")["containerStatuses"][0]["state"]["waiting"].clone();
            Ok(waiting["reason"] == "CreateContainerError")
        })?;
    }
    node.stop()
}
