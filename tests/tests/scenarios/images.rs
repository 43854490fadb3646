//! Pulls from a real registry that demands credentials, by a real runtime; pulls ahead; image volumes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use anyhow::ensure;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
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
use keblet_tests::pulls;
use keblet_tests::registry::Fault;
use keblet_tests::registry::Image;
use keblet_tests::registry::Registry;
use keblet_tests::registry::Request;
use keblet_tests::standalone::StandaloneNode;
use serde_json::Value;
use serde_json::json;

/// Users of the registry and their passwords.
const USERS: [(&str, &str); 2] = [("node", "secret"), ("plugin", "secret")];
/// Size of the layer of an image.
const LAYER: usize = 1 << 16;

fn image() -> Result<Image> {
    Image::new(&Cache::locate(), PROBE_IMAGE, LAYER)
}

/// `Authorization` of a user.
fn basic(user: &str, password: &str) -> String {
    format!("Basic {}", encoded(user, password))
}

/// User and password as docker's configuration has them.
fn encoded(user: &str, password: &str) -> String {
    BASE64_STANDARD.encode(format!("{user}:{password}"))
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
    let mut node = StandaloneNode::new()?;
    let Some(registry) = Registry::start(&mut node.containerd, &USERS)? else { return Ok(()) };
    let users = [("filed", encoded("node", "secret")), ("guessed", encoded("node", "guess"))];
    let auths = users.map(|(repository, auth)| (registry.repository(repository), json!({ "auth": auth })));
    let config = json!({ "auths": serde_json::Map::from_iter(auths) });
    fs::write(node.layout.root.join("config.json"), config.to_string())?;
    node.flags = configure_plugin(&node.containerd.ready().dir.clone(), &registry)?;
    let (mut right, wrong) = (Vec::new(), ["guessed", "closed"]);
    for repository in ["filed", "plugged"] {
        let image = image()?;
        registry.push(repository, &image)?;
        right.push((repository, image));
    }
    for repository in wrong {
        registry.push(repository, &image()?)?;
    }
    for repository in ["filed", "plugged", "guessed", "closed"] {
        let pod = pulls::pod(&node, repository, &registry.image(repository), "IfNotPresent");
        node.layout.write_manifest(repository, &pod)?;
    }
    node.start()?;
    for (repository, image) in &right {
        pulls::until_pulled(&mut node, repository, &registry.image(repository), image.digest())?;
    }
    for repository in wrong {
        let error = pulls::until_backed_off(&mut node, repository, &registry.image(repository))?;
        ensure!(error.contains("uthoriz"), "{repository}: {error}");
        pulls::never_ran(&mut node, repository)?;
    }
    node.until_true("the records", |node| {
        let names = ["filed", "plugged"].map(|repository| registry.repository(repository));
        Ok(open_to_all(&node.layout.root)? == names)
    })?;
    let requests = registry.take_requests();
    for (repository, login, status) in [
        ("filed", Some(basic("node", "secret")), 200),
        ("plugged", Some(basic("plugin", "secret")), 200),
        ("guessed", Some(basic("node", "guess")), 401),
        ("closed", None, 401),
    ] {
        let manifest = format!("/v2/{repository}/manifests/");
        let answered = |request: &Request| {
            request.path.starts_with(&manifest) && request.authorization == login && request.status == status
        };
        ensure!(requests.iter().any(answered), "{repository}: {requests:?}");
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
async fn pull_secrets_are_tried_and_a_failing_registry_is_reported() -> Result<()> {
    let mut containerd = PrivateContainerd::start(&Cache::locate(), &Options::default())?;
    let Some(registry) = Registry::start(&mut containerd, &USERS)? else { return Ok(()) };
    for (repository, fault) in [("app", None), ("half", Some(Fault::HalfLayer)), ("wrong", Some(Fault::WrongLayer))] {
        registry.push(repository, &image()?)?;
        fault.into_iter().for_each(|fault| registry.set_fault(repository, fault));
    }
    let endpoint: RuntimeEndpoint = containerd.endpoint().parse()?;
    let images = Images::new(Runtime::new(&endpoint, None, RuntimeOptions::default()), PullLimits::default());
    let sandbox = cri::PodSandboxConfig::default();
    let credentials = async |repository: &str| {
        let secrets = [("wrong", "guess"), ("right", "secret")]
            .map(|(name, password)| pull_secret(&registry.repository(repository), name, password));
        images.credentials().matching(&registry.image(repository), &Pod::default(), &secrets).await.unwrap()
    };
    for (repository, part) in [("half", "EOF"), ("wrong", "digest")] {
        let image = registry.image(repository);
        let pulled = images.pull(&image, &sandbox, &credentials(repository).await[1..]).await;
        let error = pulled.err().unwrap_or_else(|| panic!("{repository}: pulled")).to_string();
        assert!(error.contains(part), "{repository}: {error}");
        assert!(images.inspect(&image, None).await?.is_none(), "nothing half made is left");
    }

    let image = registry.image("app");
    let error = images.pull(&image, &sandbox, &[]).await.unwrap_err().to_string();
    assert!(error.contains("uthoriz"), "{error}");
    let pulled = images.pull(&image, &sandbox, &credentials("app").await).await?;
    let CredentialSource::Secret(used) = &pulled.source else { panic!("{pulled:?}") };
    assert_eq!(used.name, "right");
    let found = images.inspect(&image, None).await?.expect("the image is there");
    assert_eq!(found.image_ref, pulled.image_ref, "records and lookups agree on the id");
    containerd.stop()
}

#[test]
#[ignore = "real runtime"]
fn an_image_is_pulled_while_an_init_container_runs() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let Some(registry) = Registry::start(&mut node.containerd, &[])? else { return Ok(()) };
    registry.push("later", &image()?)?;
    let config = node.containerd.ready().dir.join("keblet.yaml");
    let settings = "apiVersion: keblet.dev/v1alpha1\nkind: KebletConfiguration\nimages: {prefetch: true}\n";
    fs::write(&config, settings)?;
    node.flags = vec![format!("--keblet-config={}", config.display())];
    let (name, go, image) = ("patient", node.stamp("go"), registry.image("later"));
    let mut pod = pulls::pod(&node, name, &image, "IfNotPresent");
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
