//! Images that are pulled ahead, while an init container runs.

use k8s_openapi::api::core::v1::LocalObjectReference;

use super::*;
use crate::images::CredentialSource;
use crate::images::SecretUse;

fn prefetching() -> Node {
    let mut node = Node::new();
    let limits = PullLimits { per_second: 0, ..PullLimits::default() };
    let access =
        AccessRecords::open(&node.path("images"), VerificationPolicy::default(), Metrics::new()).expect("opened");
    let images = Images::new(node.runtime.client(), limits).with_access(access).with_prefetch(true);
    node.ctx.images = Arc::new(images);
    node.has_image("app:1", "sha256:here");
    node
}

fn with_init() -> Pod {
    let mut later = container("c");
    later["image"] = json!("far:1");
    pod(json!({"initContainers": [container("i")], "containers": [later]}))
}

async fn start_init(node: &Node, pod: &Pod) {
    let init = start(ContainerClass::Init, 0, "i", None);
    let outcome = execute(&node.ctx, pod, &actions(keep(), vec![init]), &running(&[])).await;
    assert!(outcome.is_ok(), "{:?}", outcome.errors);
}

async fn start_main(node: &Node, pod: &Pod) -> Result<ContainerId, StartFailure> {
    let outcome = execute(&node.ctx, pod, &actions(keep(), vec![regular(0, "c")]), &running(&[])).await;
    outcome.starts.into_iter().next().expect("a start").result
}

/// Waits until the runtime was asked to pull the image, with paused time.
async fn until_pulled(node: &Node) {
    let asked = async {
        while !node.runtime.state().calls.iter().any(|call| call == "PullImage far:1") {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), asked).await.expect("a pull");
}

#[tokio::test(start_paused = true)]
async fn an_image_is_pulled_ahead_and_reported_at_its_turn() {
    let mut node = prefetching();
    node.runtime.state().registry.insert("far:1".into(), image("sha256:far"));
    let pod = with_init();
    start_init(&node, &pod).await;
    until_pulled(&node).await;
    let events = node.events.take();
    assert!(!events.iter().any(|event| event.contains("far:1")), "its turn has not come: {events:?}");
    node.runtime.take_calls();

    start_main(&node, &pod).await.expect("started");
    assert_eq!(node.runtime.take_calls(), ["ImageStatus far:1", "CreateContainer c/0", "StartContainer c-0"]);
    let events: Vec<String> = node.events.take();
    let reasons: Vec<&str> = events
        .iter()
        .filter_map(|event| {
            event.split([' ', ':']).find(|word| ["Pulling", "Pulled", "Created", "Started"].contains(word))
        })
        .collect();
    assert_eq!(reasons, ["Pulling", "Pulled", "Created", "Started"], "{events:?}");
    assert!(events.iter().any(|event| event.contains("Successfully pulled image \"far:1\"")), "{events:?}");
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_failed_ahead_is_made_at_its_turn() {
    let mut node = prefetching();
    let pod = with_init();
    start_init(&node, &pod).await;
    until_pulled(&node).await;
    node.runtime.take_calls();
    node.events.take();
    let failure = start_main(&node, &pod).await.expect_err("it is nowhere");
    assert_eq!(failure.token, "ErrImagePull");
    assert_eq!(node.runtime.take_calls(), ["ImageStatus far:1", "PullImage far:1"]);
    let pulling = node.events.take().into_iter().filter(|event| event.contains(" Pulling")).count();
    assert_eq!(pulling, 1);
}

/// Another pod has pulled another image of the name since, with a secret of its own.
#[tokio::test(start_paused = true)]
async fn an_image_that_was_replaced_since_it_was_pulled_ahead_is_verified() {
    let node = prefetching();
    node.runtime.state().registry.insert("far:1".into(), image("sha256:far"));
    let pod = with_init();
    start_init(&node, &pod).await;
    until_pulled(&node).await;
    node.runtime.state().registry.clear();
    node.has_image("far:1", "sha256:newer");
    let access = node.ctx.images.access().expect("records");
    access.begin("far:1").await.expect("written");
    let secret =
        SecretUse { uid: "u".into(), namespace: "other".into(), name: "s".into(), credential_hash: "h".into() };
    access.pulled("far:1", "sha256:newer", &CredentialSource::Secret(secret)).await;
    let failure = start_main(&node, &pod).await.expect_err("the pod has no such secret");
    assert_eq!(failure.token, "ErrImagePull");
}

/// Its registry does not answer. Pulls are serialized.
#[tokio::test(start_paused = true)]
async fn a_pull_ahead_ends_with_its_pod() {
    let node = prefetching();
    node.runtime.state().pulls.insert("far:1".into(), Duration::from_secs(600));
    node.runtime.state().registry.insert("near:1".into(), image("sha256:near"));
    let pod = with_init();
    start_init(&node, &pod).await;
    until_pulled(&node).await;
    let began = Instant::now();
    node.ctx.images.remove_cached_pod("uid");
    let near = node.ctx.images.pull("near:1", &cri::PodSandboxConfig::default(), &[]).await;
    assert_eq!(near.expect("pulled").image_ref, "sha256:near");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_terminated_does_not_wait_for_the_secrets_of_later_images() {
    let (mut node, mut pod) = (prefetching(), with_init());
    let secret = LocalObjectReference { name: "s".into() };
    pod.spec.as_mut().expect("a spec").image_pull_secrets = Some(vec![secret]);
    let (api, _registration) = image_access::unanswered(&mut node, &pod).await;
    let plan = actions(keep(), vec![start(ContainerClass::Init, 0, "i", None)]);
    let (since, terminated) = (Instant::now(), tokio::time::sleep(Duration::from_secs(3)));
    let outcome = execute_observed(&node.ctx, &pass(&pod, &running(&[])), &plan, &|_| {}, terminated).await;
    assert_eq!(since.elapsed().as_secs(), 3);
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(api.take_requests(), ["GET /api/v1/namespaces/ns/secrets/s?"]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_pulled_ahead_unless_it_is_configured() {
    let node = Node::new();
    node.has_image("app:1", "sha256:here");
    node.runtime.state().registry.insert("far:1".into(), image("sha256:far"));
    let pod = with_init();
    start_init(&node, &pod).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!node.runtime.take_calls().iter().any(|call| call.contains("far:1")));
}
