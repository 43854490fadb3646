//! The cache, what image calls carry, and what became of the pulls of an earlier run.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::FutureExt as _;
use k8s_openapi::api::core::v1::Pod;
use prost::Message as _;
use tonic::Status;

use super::cache::ImageCache;
use super::credentials::testing::secret;
use super::*;
use crate::metrics::Metrics;
use crate::runtime::RuntimeOptions;
use crate::runtime::tests::server::Socket;
use crate::runtime::tests::server::say;
use crate::runtime::tests::server::script;

fn info(image_ref: &str) -> ImageInfo {
    ImageInfo { image_ref: image_ref.into(), uid: None, username: String::new(), size: 1 }
}

#[tokio::test(start_paused = true)]
async fn the_cache_is_per_pod_and_entries_grow_stale() {
    let mut cache = ImageCache::default();
    let now = Instant::now();
    cache.insert("u1", "app:1", info("x"), now);
    cache.insert("u2", "app:1", info("x"), now);
    cache.insert("u2", "side:1", info("y"), now);
    assert_eq!(cache.get("u1", "app:1", now), Some(CachedImage { info: info("x"), stale: false }));
    assert_eq!(cache.get("u1", "app:2", now), None);
    let later = now + Duration::from_secs(61);
    assert!(cache.get("u1", "app:1", later).expect("kept").stale);
    cache.remove_image("app:1");
    assert_eq!(cache.get("u1", "app:1", now), None);
    assert_eq!(cache.get("u2", "app:1", now), None);
    assert!(cache.get("u2", "side:1", now).is_some());
    cache.remove_pod("u2");
    assert_eq!(cache.get("u2", "side:1", now), None);
}

#[tokio::test]
async fn image_calls_carry_the_pods_annotations() {
    let (socket, specs) = (Socket::default(), Arc::new(Mutex::new(Vec::new())));
    let seen = specs.clone();
    socket.serve(script(move |method, message| {
        let spec = match method {
            "ImageStatus" => cri::ImageStatusRequest::decode(message).expect("a request").image,
            "PullImage" => cri::PullImageRequest::decode(message).expect("a request").image,
            _ => return Err(Status::unimplemented(method.to_owned())),
        };
        seen.lock().expect("unpoisoned").push(spec.expect("an image"));
        match method {
            "ImageStatus" => say(&cri::ImageStatusResponse::default()),
            _ => say(&cri::PullImageResponse { image_ref: "sha256:1".into() }),
        }
    }));
    let runtime =
        Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
    let images = Images::new(runtime, PullLimits::default());
    let annotations = BTreeMap::from([("example.com/mirror".to_owned(), "near".to_owned())]);
    images.inspect("app:1", Some(&annotations)).await.expect("answered");
    let sandbox = cri::PodSandboxConfig { annotations: annotations.clone(), ..Default::default() };
    images.pull("app:1", &sandbox, &[]).await.expect("pulled");
    let expected = cri::ImageSpec { image: "app:1".into(), annotations, ..Default::default() };
    assert_eq!(*specs.lock().expect("unpoisoned"), [expected.clone(), expected]);
}

#[tokio::test(start_paused = true)]
async fn a_pull_with_several_credentials_counts_once() {
    let (socket, users) = (Socket::default(), Arc::new(Mutex::new(Vec::new())));
    let seen = users.clone();
    socket.serve(script(move |_, message| {
        let auth = cri::PullImageRequest::decode(message).expect("a request").auth;
        seen.lock().expect("unpoisoned").push(auth.expect("a credential").username);
        Err(Status::unknown("denied"))
    }));
    let runtime =
        Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
    let images = Images::new(runtime, PullLimits { parallel: Some(1), per_second: 1, burst: 1 });
    let secrets = ["a", "b", "c"].map(|user| secret(user, &serde_json::json!({"auths": {"r.io": {"username": user}}})));
    let credentials = images.credentials().matching("r.io/app:1", &Pod::default(), &secrets).await.expect("valid");
    let sandbox = cri::PodSandboxConfig::default();
    let error = images.pull("r.io/app:1", &sandbox, &credentials).await.expect_err("denied").to_string();
    assert_eq!(
        (error.as_str(), users.lock().expect("unpoisoned").as_slice()),
        ("denied", ["a", "b", "c"].map(String::from).as_slice())
    );
    let error = images.pull("r.io/app:1", &sandbox, &credentials).await.expect_err("too many").to_string();
    assert_eq!(error, "pull QPS exceeded");
}

/// Else pods with a secret that the registry refuses could use the image.
#[tokio::test]
async fn a_pull_has_the_source_of_the_credential_that_worked() {
    let (socket, users) = (Socket::default(), Arc::new(Mutex::new(Vec::new())));
    let seen = users.clone();
    socket.serve(script(move |_, message| {
        let auth = cri::PullImageRequest::decode(message).expect("a request").auth;
        let user = auth.expect("a credential").username;
        seen.lock().expect("unpoisoned").push(user.clone());
        match user.as_str() {
            "b" => say(&cri::PullImageResponse { image_ref: "sha256:1".into() }),
            _ => Err(Status::unknown("denied")),
        }
    }));
    let runtime =
        Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
    let images = Images::new(runtime, PullLimits::default());
    let secrets = ["a", "b", "c"].map(|user| secret(user, &serde_json::json!({"auths": {"r.io": {"username": user}}})));
    let credentials = images.credentials().matching("r.io/app:1", &Pod::default(), &secrets).await.expect("valid");
    let pulled = images.pull("r.io/app:1", &cri::PodSandboxConfig::default(), &credentials).await.expect("pulled");
    assert_eq!(*users.lock().expect("unpoisoned"), ["a", "b"], "the others are not tried");
    let CredentialSource::Secret(used) = pulled.source else { panic!("a secret") };
    assert_eq!((used.namespace.as_str(), used.name.as_str()), ("ns", "b"));
}

/// A runtime that answers PullImage with `image_ref`, and ImageStatus with the image of this id; and the names that it was
/// asked for by ImageStatus.
fn answering(image_ref: &'static str, id: Result<Option<&'static str>, Status>) -> (Images, Arc<Mutex<Vec<String>>>) {
    let (socket, asked) = (Socket::default(), Arc::new(Mutex::new(Vec::new())));
    let seen = asked.clone();
    socket.serve(script(move |method, message| {
        if method == "PullImage" {
            return say(&cri::PullImageResponse { image_ref: image_ref.into() });
        }
        let spec = cri::ImageStatusRequest::decode(message).expect("a request").image;
        seen.lock().expect("unpoisoned").push(spec.expect("an image").image);
        let image = id.clone()?.map(|id| cri::Image { id: id.into(), ..Default::default() });
        say(&cri::ImageStatusResponse { image, ..Default::default() })
    }));
    let runtime =
        Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
    (Images::new(runtime, PullLimits::default()), asked)
}

#[tokio::test]
async fn a_pulled_image_has_its_id_whatever_the_runtime_answers() {
    const DIGITS: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const NAMED: &str = "r.io/app@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    for (answer, id, expected, asks) in [
        ("sha256:1", Ok(Some("other")), "sha256:1", false),
        (DIGITS, Ok(Some("other")), DIGITS, false),
        (NAMED, Ok(Some(DIGITS)), DIGITS, true),
        // A pull does not fail for lack of an id.
        (NAMED, Ok(Some("")), NAMED, true),
        (NAMED, Ok(None), NAMED, true),
        (NAMED, Err(Status::internal("broken")), NAMED, true),
    ] {
        let (images, asked) = answering(answer, id);
        let pulled = images.pull("r.io/app:1", &cri::PodSandboxConfig::default(), &[]).await.expect("pulled");
        assert_eq!(pulled.image_ref, expected, "{answer}");
        let names = if asks { vec![answer.to_owned()] } else { Vec::new() };
        assert_eq!(*asked.lock().expect("unpoisoned"), names, "{answer}");
    }
}

/// Of a pull ahead the container is created when the pod's init containers have ended.
#[tokio::test]
async fn a_pulled_image_is_not_older_than_its_pull_for_garbage_collection() {
    let (images, _) = answering("sha256:1", Ok(None));
    let began = Instant::now();
    images.pull("r.io/app:1", &cri::PodSandboxConfig::default(), &[]).await.expect("pulled");
    assert!(images.records().is_used_since("sha256:1", began));
}

/// The Node is updated for it.
#[tokio::test]
async fn only_a_pull_that_succeeds_changes_the_images_of_the_node() {
    for (images, expected) in [(answering("sha256:1", Ok(None)).0, true), (having(&["app:1"]), false)] {
        let changes = images.changes();
        let pulled = images.pull("app:1", &cri::PodSandboxConfig::default(), &[]).await;
        assert_eq!((pulled.is_ok(), changes.has_changed().expect("open")), (expected, expected));
    }
}

#[tokio::test]
async fn an_image_is_verified_although_the_runtime_answered_its_pull_with_a_name() {
    const IMAGE: &str = "r.io/app:1";
    let dir = tempfile::tempdir().expect("a folder");
    let access = AccessRecords::open(dir.path(), VerificationPolicy::default(), Metrics::new()).expect("opened");
    let images = answering("r.io/app@sha256:1", Ok(Some("id"))).0.with_access(access);
    let access = images.access().expect("records");
    let secrets = [secret("s", &serde_json::json!({"auths": {"r.io": {"username": "u"}}}))];
    let credentials = images.credentials().matching(IMAGE, &Pod::default(), &secrets).await.expect("valid");
    access.begin(IMAGE).await.expect("written");
    let pulled = images.pull(IMAGE, &cri::PodSandboxConfig::default(), &credentials).await.expect("pulled");
    images.record_pull(IMAGE, Ok(&pulled)).await;
    for (presented, expected) in [(vec![pulled.source], true), (Vec::new(), false)] {
        let asked = async || Ok::<_, Infallible>(presented);
        assert_eq!(access.may_use(IMAGE, "id", None, asked).await.expect("infallible"), expected);
    }
}

/// A runtime that has the images of these names, and only reports their ids.
fn having(names: &'static [&'static str]) -> Images {
    let socket = Socket::default();
    socket.serve(script(move |method, message| {
        if method != "ImageStatus" {
            return Err(Status::unimplemented(method.to_owned()));
        }
        let asked = cri::ImageStatusRequest::decode(message).expect("a request").image.expect("an image").image;
        let image = names.contains(&asked.as_str());
        let image = image.then(|| cri::Image { id: format!("id of {asked}"), ..Default::default() });
        say(&cri::ImageStatusResponse { image, ..Default::default() })
    }));
    let runtime =
        Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
    Images::new(runtime, PullLimits::default())
}

#[tokio::test]
async fn an_image_that_arrived_before_the_agent_was_killed_is_verified_whatever_the_runtime_calls_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let open = || AccessRecords::open(dir.path(), VerificationPolicy::default(), Metrics::new()).expect("opened");
    for image in ["me/app:1", "app", "absent:1"] {
        open().begin(image).await.expect("written");
    }
    // The runtime lists docker.io/me/app:1 and docker.io/library/app:latest.
    let images = having(&["me/app:1", "app:latest"]).with_access(open());
    images.recover().await;
    let access = images.access().expect("records");
    for (image, id, expected) in [
        ("me/app:1", "id of me/app:1", false),
        ("app", "id of app:latest", false),
        ("absent:1", "imported since", true),
    ] {
        // The registry refuses a pod without credentials.
        access.begin(image).await.expect("written");
        access.not_pulled(image).await;
        let asked = async || Ok::<_, Infallible>(Vec::new());
        assert_eq!(access.may_use(image, id, None, asked).await.expect("infallible"), expected, "{image}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_image_is_verified_although_the_runtime_was_not_there_when_the_agent_started() {
    let dir = tempfile::tempdir().expect("a folder");
    let open = || AccessRecords::open(dir.path(), VerificationPolicy::default(), Metrics::new()).expect("opened");
    for image in ["late:1", "never:1"] {
        open().begin(image).await.expect("written");
    }
    let images = having(&["late:1"]).with_access(open());
    let access = images.access().expect("records");
    for (image, expected) in [("late:1", false), ("never:1", true)] {
        // The registry refuses a pod without credentials.
        access.begin(image).await.expect("written");
        images.record_pull(image, Err(&PullError::RateExceeded)).await;
        let asked = async || Ok::<_, Infallible>(Vec::new());
        let id = format!("id of {image}");
        assert_eq!(access.may_use(image, &id, None, asked).await.expect("infallible"), expected, "{image}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pull_that_is_cancelled_before_the_call_leaves_no_intent() {
    let (dir, socket) = (tempfile::tempdir().expect("a folder"), Socket::default());
    socket.serve(Arc::new(|_, _| std::future::pending().boxed()));
    let runtime =
        Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
    let access = AccessRecords::open(dir.path(), VerificationPolicy::default(), Metrics::new()).expect("opened");
    let images = Images::new(runtime, PullLimits::default()).with_access(access);
    let access = images.access().expect("records");
    for image in ["first:1", "second:1"] {
        access.begin(image).await.expect("written");
    }
    let (cancelled, sandbox, none) = (CancellationToken::new(), cri::PodSandboxConfig::default(), []);
    let cancel = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        cancelled.cancel();
    };
    // One at a time.
    let (first, second, ()) = tokio::join!(
        images.pull_unless(&cancelled, "first:1", &sandbox, &none),
        images.pull_unless(&cancelled, "second:1", &sandbox, &none),
        cancel,
    );
    images.record_pull("first:1", first.as_ref()).await;
    images.record_pull("second:1", second.as_ref()).await;
    assert_eq!(access.unsettled().await, ["first:1"]);
    assert_eq!(std::fs::read_dir(dir.path().join("image_manager/pulling")).expect("listed").count(), 1);
}

#[tokio::test]
async fn an_image_is_verified_that_a_cancelled_pull_brings_after_another_one_has_failed() {
    let dir = tempfile::tempdir().expect("a folder");
    let access = AccessRecords::open(dir.path(), VerificationPolicy::default(), Metrics::new()).expect("opened");
    let images = having(&[]).with_access(access);
    let access = images.access().expect("records");
    for outcome in [PullError::Cancelled { asked: Some(Instant::now()) }, PullError::RateExceeded] {
        access.begin("app:1").await.expect("written");
        images.record_pull("app:1", Err(&outcome)).await;
    }
    let asked = async || Ok::<_, Infallible>(Vec::new());
    assert!(!images.may_use("app:1", "arrived since", asked).await.expect("infallible"));
}

#[tokio::test(start_paused = true)]
async fn intents_of_cancelled_pulls_are_removed_when_the_runtime_has_ended_them() {
    let dir = tempfile::tempdir().expect("a folder");
    let access = AccessRecords::open(dir.path(), VerificationPolicy::default(), Metrics::new()).expect("opened");
    let images = having(&["arrived:1"]).with_access(access);
    let access = images.access().expect("records");
    for image in ["arrived:1", "absent:1"] {
        access.begin(image).await.expect("written");
        images.record_pull(image, Err(&PullError::Cancelled { asked: Some(Instant::now()) })).await;
    }
    images.settle_cancelled().await;
    assert_eq!(access.unsettled().await.len(), 2, "it may go on with them");
    tokio::time::advance(LONGEST_PULL).await;
    images.settle_cancelled().await;
    assert_eq!(std::fs::read_dir(dir.path().join("image_manager/pulling")).expect("listed").count(), 0);
    for (image, expected) in [("arrived:1", false), ("absent:1", true)] {
        let asked = async || Ok::<_, Infallible>(Vec::new());
        let may_use = images.may_use(image, &format!("id of {image}"), asked).await.expect("infallible");
        assert_eq!(may_use, expected, "{image}");
    }
}
