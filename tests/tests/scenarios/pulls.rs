//! Pulls by a real runtime from a real registry that is slow, fails, or has other content than before or than it says.

use std::time::Duration;

use anyhow::Result;
use anyhow::ensure;
use keblet_peers::Cache;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::pulls;
use keblet_tests::registry::Fault;
use keblet_tests::registry::Image;
use keblet_tests::registry::Registry;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::kill;
use serde_json::Value;
use serde_json::json;

/// Deadline of runtime calls, which must not be one of pulls.
const REQUEST_TIMEOUT: &str = "10s";
/// Longer than this deadline.
const SLOW: Duration = Duration::from_secs(12);
/// Size of the layer of an image.
const SMALL: usize = 1 << 20;
/// Of a layer that does not fit into the buffers of two connections.
const LARGE: usize = 24 << 20;

/// Repositories whose next pull succeeds when the fault is removed, and a word of the runtime's error until then.
const TRANSIENT: [(&str, Fault, &str); 5] = [
    ("half", Fault::HalfLayer, "EOF"),
    ("refused", Fault::Status(401), "uthoriz"),
    ("limited", Fault::Status(429), "429"),
    ("broken", Fault::Status(500), "500"),
    ("unavailable", Fault::Status(503), "503"),
];
/// A digest that no content has.
const ABSENT: &str = "sha256:0000000000000000000000000000000000000000000000000000000000000000";

/// Pulls at the same time, as many as there are pods.
fn parallel() -> Value {
    json!({ "serializeImagePulls": false, "registryPullQPS": 0, "runtimeRequestTimeout": REQUEST_TIMEOUT })
}

fn image() -> Result<Image> {
    Image::new(&Cache::locate(), PROBE_IMAGE, SMALL)
}

fn write_pod(node: &StandaloneNode, name: &str, image: &str, policy: &str) -> Result<()> {
    node.layout.write_manifest(name, &pulls::pod(node, name, image, policy))
}

#[test]
#[ignore = "real runtime"]
fn failed_pulls_are_reported_and_repeated_while_others_succeed() -> Result<()> {
    let mut node = StandaloneNode::with(parallel())?;
    let Some(registry) = Registry::start(&mut node.containerd, &[])? else { return Ok(()) };
    let (plain, slow) = (image()?, image()?);
    registry.push("plain", &plain)?;
    registry.push("slow", &slow)?;
    registry.set_fault("slow", Fault::Slow(SLOW));
    let mut transient = Vec::new();
    for (name, fault, word) in TRANSIENT {
        let image = image()?;
        registry.push(name, &image)?;
        registry.set_fault(name, fault);
        transient.push((name, image, word));
    }
    for name in ["plain", "slow"].into_iter().chain(TRANSIENT.map(|(name, ..)| name)) {
        write_pod(&node, name, &registry.image(name), "IfNotPresent")?;
    }
    node.start()?;
    pulls::until_pulled(&mut node, "plain", &registry.image("plain"), plain.digest())?;
    ensure!(node.starts("slow") == 0, "the pull of another pod waited for the slow one");
    for (name, _, word) in &transient {
        let error = pulls::until_backed_off(&mut node, name, &registry.image(name))?;
        ensure!(error.contains(word), "{name}: {error}");
        registry.remove_fault(name);
    }
    let took = pulls::until_pulled(&mut node, "slow", &registry.image("slow"), slow.digest())?;
    ensure!(took > SLOW.as_secs_f64(), "{took} s");
    for (name, image, _) in &transient {
        pulls::until_pulled(&mut node, name, &registry.image(name), image.digest())?;
    }
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn content_that_is_not_what_a_digest_says_never_runs() -> Result<()> {
    let mut node = StandaloneNode::with(parallel())?;
    let Some(registry) = Registry::start(&mut node.containerd, &[])? else { return Ok(()) };
    let (layer, manifest, pinned) = (image()?, image()?, image()?);
    registry.push("layer", &layer)?;
    registry.set_fault("layer", Fault::WrongLayer);
    registry.push("manifest", &manifest)?;
    registry.set_fault("manifest", Fault::WrongManifest);
    registry.push("pinned", &pinned)?;
    let by_digest = |repository: &str, digest: &str| format!("{}@{digest}", registry.repository(repository));
    let wrong = [
        ("layer", registry.image("layer"), "digest"),
        ("manifest", by_digest("manifest", manifest.digest()), "digest"),
        ("absent", by_digest("pinned", ABSENT), "not found"),
    ];
    for (name, image, _) in &wrong {
        write_pod(&node, name, image, "IfNotPresent")?;
    }
    let right = by_digest("pinned", pinned.digest());
    write_pod(&node, "pinned", &right, "IfNotPresent")?;
    node.start()?;
    pulls::until_pulled(&mut node, "pinned", &right, pinned.digest())?;
    for (name, image, word) in &wrong {
        let error = pulls::until_backed_off(&mut node, name, image)?;
        ensure!(error.contains(word), "{name}: {error}");
        pulls::never_ran(&mut node, name)?;
    }
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn a_tag_that_moved_is_pulled_again_by_policy_always_only() -> Result<()> {
    let mut node = StandaloneNode::with(parallel())?;
    let Some(registry) = Registry::start(&mut node.containerd, &[])? else { return Ok(()) };
    let (old, new) = (image()?, image()?);
    let pods = [("always", "Always"), ("kept", "IfNotPresent")];
    for (name, policy) in pods {
        registry.push(name, &old)?;
        write_pod(&node, name, &registry.image(name), policy)?;
    }
    node.start()?;
    for (name, _) in pods {
        pulls::until_pulled(&mut node, name, &registry.image(name), old.digest())?;
        registry.push(name, &new)?;
    }
    registry.take_requests();
    for (name, _) in pods {
        let container = node.until_running(name)?;
        pulls::until_runs_image(&mut node, name, old.digest())?;
        kill(&container)?;
    }
    node.until_true("both were started again", |node| Ok(pods.iter().all(|(name, _)| node.starts(name) == 2)))?;
    pulls::until_runs_image(&mut node, "always", new.digest())?;
    pulls::until_runs_image(&mut node, "kept", old.digest())?;
    let requests = registry.take_requests();
    ensure!(!requests.iter().any(|request| request.path.starts_with("/v2/kept/")), "{requests:?}");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn a_registry_that_dies_in_the_middle_of_a_pull_is_asked_again() -> Result<()> {
    let mut node = StandaloneNode::with(parallel())?;
    let Some(mut registry) = Registry::start(&mut node.containerd, &[])? else { return Ok(()) };
    let (steady, cut) = (image()?, Image::new(&Cache::locate(), PROBE_IMAGE, LARGE)?);
    registry.push("steady", &steady)?;
    registry.push("cut", &cut)?;
    registry.set_fault("cut", Fault::Held);
    for name in ["steady", "cut"] {
        write_pod(&node, name, &registry.image(name), "IfNotPresent")?;
    }
    node.start()?;
    pulls::until_pulled(&mut node, "steady", &registry.image("steady"), steady.digest())?;
    node.until_true("the pull is in the middle of a layer", |_| Ok(registry.is_held("cut")))?;
    registry.kill()?;
    registry.remove_fault("cut");
    let error = pulls::until_backed_off(&mut node, "cut", &registry.image("cut"))?;
    ensure!(error.contains("EOF"), "{error}");
    // Containers of images that are there need no registry.
    kill(&node.until_running("steady")?)?;
    node.until_true("steady was started again", |node| Ok(node.starts("steady") == 2))?;
    registry.restart(&mut node.containerd)?;
    pulls::until_pulled(&mut node, "cut", &registry.image("cut"), cut.digest())?;
    node.stop()
}
