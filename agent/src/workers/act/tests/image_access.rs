//! Credentials of pods, and which pods may use images that are on the node.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tonic::Status;

use super::*;
use crate::apiserver::recovery::Recovered;
use crate::objects::Objects;
use crate::objects::ObjectsConfig;
use crate::objects::Registration;
use crate::objects::Strategy;
use crate::objects::tests::api::Api;

const IMAGE: &str = "r.io/app:1";

/// Secrets by name, each with a user for `r.io`. A user that is empty makes a secret without valid content.
fn give_secrets(node: &mut Node, pod: &Pod, secrets: &[(&str, &str)]) -> Registration {
    let api = Api::new(node.ctx.clock);
    for (name, user) in secrets {
        let config = json!({"auths": {"r.io": {"username": user, "password": "p"}}}).to_string();
        let config = if user.is_empty() { "hunter2" } else { config.as_str() };
        api.put(
            &format!("secrets/ns/{name}"),
            json!({"metadata": {"uid": format!("uid-{name}")}, "type": "kubernetes.io/dockerconfigjson",
                "data": {".dockerconfigjson": STANDARD.encode(config)}}),
        );
    }
    register(node, pod, &api)
}

/// The pod's secrets are read from this API server.
fn register(node: &mut Node, pod: &Pod, api: &Api) -> Registration {
    let (clock, strategy, recovered) = (node.ctx.clock, Strategy::Get, Recovered::default());
    let config = ObjectsConfig { strategy, recovered, sync_frequency: Duration::from_secs(60), clock, node: None };
    node.ctx.objects = Objects::new(&api.client(), config);
    let mut registration = Registration::new("uid".into());
    node.ctx.objects.register(pod, &mut registration);
    registration
}

/// An API server that the pod's objects are to be read from and that does not answer, except for services.
pub(super) async fn unanswered(node: &mut Node, pod: &Pod) -> (Api, Registration) {
    let api = Api::new(node.ctx.clock);
    let registration = register(node, pod, &api);
    node.ctx.objects.service_variables("ns", true, true).await.expect("listed");
    api.state().delay = Duration::from_secs(600);
    (api, registration)
}

/// A pod with these pull secrets.
fn with_secrets(uid: &str, policy: &str, secrets: &[&str]) -> Pod {
    let secrets: Vec<Value> = secrets.iter().map(|name| json!({"name": name})).collect();
    let containers = json!([{"name": "c", "image": IMAGE, "imagePullPolicy": policy}]);
    let mut pod = pod(json!({"containers": containers, "imagePullSecrets": secrets}));
    pod.metadata.uid = Some(uid.to_owned());
    pod
}

async fn started(node: &Node, pod: &Pod) -> Result<ContainerId, StartFailure> {
    let outcome = execute(&node.ctx, pod, &actions(keep(), vec![regular(0, "c")]), &running(&[])).await;
    outcome.starts.into_iter().next().expect("a start").result
}

fn published(node: &Node) {
    node.runtime.state().registry.insert(IMAGE.into(), image("sha256:app"));
}

/// The pulls among the runtime's calls.
fn pulls(node: &Node) -> Vec<String> {
    node.runtime.take_calls().into_iter().filter(|call| call.starts_with("PullImage")).collect()
}

#[tokio::test(start_paused = true)]
async fn credentials_are_tried_in_turn_and_the_one_that_works_is_recorded() {
    let mut node = Node::new();
    published(&node);
    let owner = with_secrets("uid", "IfNotPresent", &["s1", "", "s2"]);
    let _registration = give_secrets(&mut node, &owner, &[("s1", "one"), ("s2", "two")]);
    node.runtime.fail("PullImage", Status::unknown("denied"));
    started(&node, &owner).await.expect("started");
    assert_eq!(pulls(&node), ["PullImage r.io/app:1 as one", "PullImage r.io/app:1 as two"]);

    let folder = node.path("image_manager/pulled");
    let files: Vec<_> = std::fs::read_dir(folder).expect("listed").flatten().collect();
    let record: Value = serde_json::from_slice(&std::fs::read(files[0].path()).expect("read")).expect("JSON");
    assert_eq!(record["imageRef"], "sha256:app");
    let secrets = record["credentialMapping"]["r.io/app"]["kubernetesSecrets"].as_array().expect("secrets");
    assert_eq!((files.len(), secrets.len(), &secrets[0]["name"]), (1, 1, &json!("s2")));
    assert_eq!(std::fs::read_dir(node.path("image_manager/pulling")).expect("listed").count(), 0);

    started(&node, &owner).await.expect("its secret is recorded");
    assert!(pulls(&node).is_empty());
    let stranger = with_secrets("stranger", "Never", &[]);
    let failure = started(&node, &stranger).await.expect_err("not shown to others");
    let message = "Container image \"r.io/app:1\" is not present with pull policy of Never";
    assert_eq!((failure.token.as_str(), failure.message.as_str()), ("ErrImageNeverPull", message));
    node.runtime.fail("PullImage", Status::unknown("denied"));
    let stranger = with_secrets("stranger", "IfNotPresent", &[]);
    let failure = started(&node, &stranger).await.expect_err("the registry refuses");
    assert_eq!((failure.token.as_str(), failure.message.as_str()), ("ErrImagePull", "denied"));
    assert_eq!(pulls(&node), ["PullImage r.io/app:1"]);
}

/// The runtime had pulled the image when the call was given up.
#[tokio::test(start_paused = true)]
async fn an_image_whose_pod_was_terminated_during_the_pull_is_verified() {
    let mut node = Node::new();
    published(&node);
    node.runtime.state().pulls.insert(IMAGE.into(), Duration::from_secs(600));
    let owner = with_secrets("uid", "IfNotPresent", &["s1"]);
    let _registration = give_secrets(&mut node, &owner, &[("s1", "one")]);
    let (plan, terminated) = (actions(keep(), vec![regular(0, "c")]), tokio::time::sleep(Duration::from_secs(3)));
    let _ = execute_observed(&node.ctx, &pass(&owner, &running(&[])), &plan, &|_| {}, terminated).await;
    assert_eq!(pulls(&node), ["PullImage r.io/app:1 as one"]);
    node.has_image(IMAGE, "sha256:app");
    node.runtime.state().pulls.clear();

    let failure = started(&node, &with_secrets("stranger", "Never", &[])).await.expect_err("not shown to others");
    assert_eq!(failure.token, "ErrImageNeverPull");
    node.runtime.fail("PullImage", Status::unknown("denied"));
    let failure = started(&node, &with_secrets("stranger", "IfNotPresent", &[])).await.expect_err("refused");
    assert_eq!((failure.token.as_str(), failure.message.as_str()), ("ErrImagePull", "denied"));
    assert_eq!(pulls(&node), ["PullImage r.io/app:1"]);
    let failure = started(&node, &with_secrets("other", "Never", &[])).await.expect_err("nor when that has failed");
    assert_eq!(failure.token, "ErrImageNeverPull");

    tokio::time::advance(Duration::from_secs(60)).await;
    started(&node, &owner).await.expect("its credentials are accepted");
    assert_eq!(pulls(&node), ["PullImage r.io/app:1 as one"]);
    assert_eq!(std::fs::read_dir(node.path("image_manager/pulling")).expect("listed").count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_terminated_does_not_wait_for_its_credentials() {
    // Before the pull, and after one that failed without them, to report those that cannot be read.
    for (seconds, reads, pulled) in [(3, 1, 0), (13, 2, 1)] {
        let mut node = Node::new();
        let pod = with_secrets("uid", "IfNotPresent", &["s1"]);
        let (api, _registration) = unanswered(&mut node, &pod).await;
        let plan = actions(keep(), vec![regular(0, "c")]);
        let (since, terminated) = (Instant::now(), tokio::time::sleep(Duration::from_secs(seconds)));
        let outcome = execute_observed(&node.ctx, &pass(&pod, &running(&[])), &plan, &|_| {}, terminated).await;
        assert_eq!(since.elapsed().as_secs(), seconds);
        assert_eq!(api.take_requests(), vec!["GET /api/v1/namespaces/ns/secrets/s1?"; reads]);
        assert_eq!(tokens(&outcome), [("c", "ErrImagePull")]);
        assert_eq!(pulls(&node).len(), pulled);
    }
}

#[tokio::test(start_paused = true)]
async fn a_secret_that_is_named_many_times_is_tried_once() {
    let mut node = Node::new();
    published(&node);
    let pod = with_secrets("uid", "Always", &[vec!["s1", "s2", "none"], vec!["s1"; 100], vec!["none"]].concat());
    let _registration = give_secrets(&mut node, &pod, &[("s1", "one"), ("s2", "two")]);
    for _ in 0..2 {
        node.runtime.fail("PullImage", Status::unknown("denied"));
    }
    started(&node, &pod).await.expect_err("no other credentials");
    assert_eq!(pulls(&node), ["PullImage r.io/app:1 as one", "PullImage r.io/app:1 as two"], "in their order");
    let events = node.events.take();
    assert!(events.iter().any(|event| event.contains("image pull secrets (none);")), "{events:?}");
}

#[tokio::test(start_paused = true)]
async fn errors_of_several_credentials_are_joined() {
    let (a, b) = ("a", "RegistryUnavailable: b");
    for (errors, token, message) in [
        ([a, a], "ErrImagePull", "a"),
        ([a, b], "ErrImagePull", "[a, RegistryUnavailable: b]"),
        ([b, a], "ErrImagePull", "[RegistryUnavailable: b, a]"),
        ([b, b], "RegistryUnavailable", "image pull failed for r.io/app:1 because the registry is unavailable: b"),
    ] {
        let mut node = Node::new();
        let pod = with_secrets("uid", "Always", &["s1", "s2"]);
        let _registration = give_secrets(&mut node, &pod, &[("s1", "one"), ("s2", "two")]);
        for error in errors {
            node.runtime.fail("PullImage", Status::unknown(error));
        }
        let failure = started(&node, &pod).await.expect_err("failed");
        assert_eq!((failure.token.as_str(), failure.message.as_str()), (token, message));
        assert_eq!(pulls(&node).len(), 2, "none without credentials");
    }
}

#[tokio::test(start_paused = true)]
async fn missing_secrets_are_reported_after_a_failed_pull() {
    let mut node = Node::new();
    let pod = with_secrets("uid", "IfNotPresent", &["s1", "none", "gone"]);
    let _registration = give_secrets(&mut node, &pod, &[("s1", "one")]);
    started(&node, &pod).await.expect_err("not in the registry");
    let expected = "pod W FailedToRetrieveImagePullSecret: Unable to retrieve some image pull secrets (none, gone); \
                    attempting to pull the image may not succeed.";
    let reported = |events: Vec<String>| events.iter().filter(|event| event.contains("Unable to retrieve")).count();
    let events = node.events.take();
    assert!(events.iter().any(|event| event == expected), "{events:?}");
    started(&node, &pod).await.expect_err("held back");
    assert_eq!(reported(node.events.take()), 0, "no pull, no event");
    tokio::time::advance(Duration::from_secs(11)).await;
    published(&node);
    started(&node, &pod).await.expect("pulled");
    assert_eq!(reported(node.events.take()), 0, "nor after a success");
}

#[tokio::test(start_paused = true)]
async fn a_broken_secret_fails_the_start_without_a_call() {
    let mut node = Node::new();
    let pod = with_secrets("uid", "Always", &["s1", "s2"]);
    let _registration = give_secrets(&mut node, &pod, &[("s1", "one"), ("s2", "")]);
    let failure = started(&node, &pod).await.expect_err("failed");
    let text = "pull secret ns/s2: invalid docker configuration at line 1, column 1";
    assert_eq!((failure.token.as_str(), failure.message.as_str()), (text, text));
    assert_eq!(node.runtime.take_calls(), [""; 0]);
    assert_eq!(node.events.take(), [format!("pod spec.containers{{c}} W Failed: Error: {text}")]);
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_cannot_be_recorded_is_not_begun() {
    let node = Node::new();
    published(&node);
    std::fs::remove_dir_all(node.path("image_manager")).expect("removed");
    std::fs::write(node.path("image_manager"), "").expect("written");
    let failure = started(&node, &with_secrets("uid", "Always", &[])).await.expect_err("failed");
    assert!(failure.token.starts_with("failed to record image pull intent: "), "{}", failure.token);
    let message = format!("Failed to record image pull intent for container image \"r.io/app:1\": {}", failure.token);
    assert_eq!(failure.message, message);
    assert_eq!(pulls(&node), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn without_records_every_pod_may_use_an_image() {
    let mut node = Node::new();
    node.ctx.images = Arc::new(Images::new(node.runtime.client(), PullLimits::default()));
    node.has_image(IMAGE, "sha256:app");
    started(&node, &with_secrets("uid", "Never", &[])).await.expect("started");
    let expected = r#"pod spec.containers{c} N Pulled: Container image "r.io/app:1" already present on machine"#;
    assert_eq!(node.events.take()[0], expected);
}
