//! Whole passes against a scripted runtime: what is asked, what is removed, which events follow.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Mutex;

use futures_util::FutureExt as _;
use keblet_proto::cri::v1 as cri;
use prost::Message as _;
use tonic::Status;

use super::*;
use crate::images::AccessRecords;
use crate::images::PullError;
use crate::images::PullLimits;
use crate::images::VerificationPolicy;
use crate::recorder::testing::RecordedEvents;
use crate::recorder::testing::listening;
use crate::runtime::Runtime;
use crate::runtime::RuntimeOptions;
use crate::runtime::tests::server::Socket;
use crate::runtime::tests::server::say;
use crate::runtime::tests::server::script;

const MINUTE: Duration = Duration::from_secs(60);

/// What the runtime has and what it was asked for.
#[derive(Default)]
struct Node {
    images: Vec<cri::Image>,
    containers: Vec<cri::Container>,
    /// Images mounted by containers, by container.
    mounts: BTreeMap<String, String>,
    sandbox_image: &'static str,
    /// RemoveImage fails for these.
    stuck: Vec<&'static str>,
    mountpoint: &'static str,
    statuses_fail: bool,
    /// A container that is listed, and removed before its status is requested.
    gone: &'static str,
    asked: Vec<String>,
}

struct Bench {
    node: Arc<Mutex<Node>>,
    gc: Arc<ImageGc>,
    dir: tempfile::TempDir,
    metrics: Arc<Metrics>,
    events: RecordedEvents,
}

fn image(id: &str, size: u64) -> cri::Image {
    cri::Image { id: id.to_owned(), size, ..Default::default() }
}

fn container(id: &str, image: &str) -> cri::Container {
    cri::Container { id: id.to_owned(), image_id: image.to_owned(), ..Default::default() }
}

fn answer(node: &mut Node, method: &str, body: prost::bytes::Bytes) -> crate::runtime::tests::server::Answer {
    node.asked.push(method.to_owned());
    match method {
        "ListImages" => say(&cri::ListImagesResponse { images: node.images.clone() }),
        "ListContainers" => say(&cri::ListContainersResponse { containers: node.containers.clone() }),
        "ContainerStatus" if node.statuses_fail => Err(Status::unknown("broken")),
        "ContainerStatus" => {
            let id = cri::ContainerStatusRequest::decode(body).expect("a request").container_id;
            if id == node.gone {
                return Err(Status::not_found(id));
            }
            let mounted = node.mounts.get(&id).map(|image| cri::Mount {
                image: Some(cri::ImageSpec { image: image.clone(), ..Default::default() }),
                ..Default::default()
            });
            let metadata = Some(cri::ContainerMetadata { name: id.clone(), ..Default::default() });
            let mounts = mounted.into_iter().collect();
            let status = Some(cri::ContainerStatus { id, metadata, mounts, ..Default::default() });
            say(&cri::ContainerStatusResponse { status, ..Default::default() })
        }
        "Status" => {
            let config = format!(r#"{{"sandboxImage": "{}"}}"#, node.sandbox_image);
            say(&cri::StatusResponse {
                status: Some(cri::RuntimeStatus::default()),
                info: [("config".to_owned(), config)].into(),
                ..Default::default()
            })
        }
        "RemoveImage" => {
            let request = cri::RemoveImageRequest::decode(body).expect("a request");
            let id = request.image.expect("an image").image;
            if node.stuck.contains(&id.as_str()) {
                return Err(Status::unknown("in use"));
            }
            node.images.retain(|image| image.id != id);
            node.asked.push(id);
            say(&cri::RemoveImageResponse {})
        }
        "ImageFsInfo" => say(&cri::ImageFsInfoResponse {
            image_filesystems: vec![cri::FilesystemUsage {
                fs_id: Some(cri::FilesystemIdentifier { mountpoint: node.mountpoint.to_owned() }),
                ..Default::default()
            }],
            ..Default::default()
        }),
        _ => Err(Status::unimplemented(method.to_owned())),
    }
}

impl Bench {
    fn new(policy: GcPolicy, node: Node) -> Self {
        let (socket, node) = (Socket::default(), Arc::new(Mutex::new(node)));
        let answering = node.clone();
        socket.serve(script(move |method, body| answer(&mut answering.lock().expect("not poisoned"), method, body)));
        let runtime =
            Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
        let ((recorder, events), metrics) = (listening(), Metrics::new());
        let dir = tempfile::tempdir().expect("a folder");
        let access = AccessRecords::open(dir.path(), VerificationPolicy::default(), metrics.clone()).expect("opened");
        let images = Images::new(runtime, PullLimits { parallel: None, per_second: 0, burst: 0 });
        let images = Arc::new(images.with_access(access));
        let gc = Arc::new(ImageGc::new(images, policy, recorder, metrics.clone()));
        Self { node, gc, dir, metrics, events }
    }

    fn asked(&self, method: &str) -> usize {
        self.node.lock().expect("not poisoned").asked.iter().filter(|asked| *asked == method).count()
    }

    fn remaining(&self) -> Vec<String> {
        self.node.lock().expect("not poisoned").images.iter().map(|image| image.id.clone()).collect()
    }

    fn shows(&self, line: &str) -> bool {
        self.metrics.render().expect("metrics").lines().any(|found| found == line)
    }
}

/// Any usage is above the threshold.
fn always_full() -> GcPolicy {
    GcPolicy { high: 0, low: 0, ..GcPolicy::default() }
}

#[tokio::test(start_paused = true)]
async fn unused_images_are_removed_once_they_are_old_enough() {
    let images = vec![image("unused", 7), image("stuck", 9), image("web", 1), image("data", 2)];
    let node = Node {
        images,
        containers: vec![container("c1", "web")],
        mounts: [("c1".to_owned(), "data".to_owned())].into(),
        stuck: vec!["stuck"],
        ..Node::default()
    };
    let bench = Bench::new(GcPolicy::default(), node);
    let changes = bench.gc.images.changes();
    assert_eq!(bench.gc.remove_unused(2 * MINUTE).await, Ok(RemovedImages::default()), "all are new to the agent");
    assert_eq!(bench.asked("ContainerStatus"), 0, "nothing was to be removed");
    assert!(!changes.has_changed().expect("open"));
    tokio::time::advance(2 * MINUTE).await;
    let failed = bench.gc.remove_unused(2 * MINUTE).await.expect_err("one is stuck");
    let text = "wanted to free 9223372036854775807 bytes, but freed 7 bytes space with errors in image deletion: \
                rpc error: code = Unknown desc = in use";
    assert_eq!(failed.to_string(), text);
    assert_eq!(bench.remaining(), ["stuck", "web", "data"], "the failure of one does not keep the other");
    assert!(changes.has_changed().expect("open"), "the Node no longer lists it");
    assert!(bench.shows("kubelet_image_garbage_collected_total{reason=\"space\"} 1"));
    assert!(bench.shows("keblet_images{in_use=\"true\"} 1"), "{}", bench.metrics.render().expect("metrics"));
}

#[tokio::test(start_paused = true)]
async fn pinned_images_and_the_sandbox_image_stay() {
    let pinned = cri::Image { pinned: true, ..image("pinned", 1) };
    let pause = cri::Image { repo_tags: vec!["pause:3".to_owned()], ..image("pause", 1) };
    let images = vec![pinned, pause, image("old", 1)];
    let bench = Bench::new(GcPolicy::default(), Node { images, sandbox_image: "pause:3", ..Node::default() });
    bench.gc.remove_unused(Duration::ZERO).await.expect("removed");
    assert_eq!(bench.remaining(), ["pinned", "pause"]);
}

#[tokio::test(start_paused = true)]
async fn an_image_without_an_id_is_reported_and_stays() {
    let images = vec![image("", 7), image("old", 1)];
    let mut bench = Bench::new(GcPolicy::default(), Node { images, ..Node::default() });
    assert_eq!(bench.gc.remove_unused(Duration::ZERO).await, Ok(RemovedImages { count: 1, bytes: 1 }));
    assert_eq!(bench.remaining(), [""]);
    assert_eq!(bench.events.take(), ["node W InvalidImageID: ImageID is not valid, skipping, image: "]);
}

#[tokio::test(start_paused = true)]
async fn no_image_is_removed_if_its_use_is_unknown() {
    let containers = vec![container("c1", "web")];
    let node = Node { images: vec![image("old", 1)], containers, statuses_fail: true, ..Node::default() };
    let bench = Bench::new(GcPolicy::default(), node);
    let failed = bench.gc.remove_unused(Duration::ZERO).await.expect_err("unknown");
    assert_eq!(failed.to_string(), "get container status: rpc error: code = Unknown desc = broken");
    assert_eq!(bench.asked("RemoveImage"), 0);
}

/// Else a node that is short of disk space would not get any while containers come and go.
#[tokio::test(start_paused = true)]
async fn a_container_that_is_removed_meanwhile_does_not_fail_the_removal() {
    let node = Node {
        images: vec![image("web", 1), image("data", 1), image("old", 1)],
        containers: vec![container("gone", "web"), container("c1", "web")],
        mounts: [("c1".to_owned(), "data".to_owned())].into(),
        gone: "gone",
        ..Node::default()
    };
    let bench = Bench::new(GcPolicy::default(), node);
    assert_eq!(bench.gc.remove_unused(Duration::ZERO).await, Ok(RemovedImages { count: 1, bytes: 1 }));
    assert_eq!(bench.remaining(), ["web", "data"]);
}

/// The removal that a full disk waits for does not wait for one container after another.
#[tokio::test(start_paused = true)]
async fn statuses_of_containers_are_requested_a_few_at_a_time() {
    let containers = (0..80).map(|number| container(&number.to_string(), "web")).collect();
    let mounts = [("79".to_owned(), "data".to_owned())].into();
    let (socket, node) = (Socket::default(), Mutex::new(Node { containers, mounts, ..Node::default() }));
    socket.serve(Arc::new(move |method: &str, body| {
        let answered = answer(&mut node.lock().expect("not poisoned"), method, body);
        let takes = Duration::from_secs(u64::from(method == "ContainerStatus"));
        async move {
            tokio::time::sleep(takes).await;
            answered
        }
        .boxed()
    }));
    let runtime =
        Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
    let began = Instant::now();
    let mounted = observe::mounted(&runtime).await.expect("answers");
    assert_ne!(mounted, Mounted::default(), "the image of the last container is known");
    assert_eq!(began.elapsed().as_secs(), 10, "eight at a time, each of which takes a second");
}

#[tokio::test(start_paused = true)]
async fn an_image_whose_status_a_worker_requested_during_the_pass_stays() {
    let bench = Bench::new(GcPolicy::default(), Node { images: vec![image("old", 1)], ..Node::default() });
    let info = crate::images::ImageInfo { image_ref: "old".into(), uid: None, username: String::new(), size: 1 };
    bench.gc.images.set_cached("pod", "old:1", info, Instant::now());
    bench.gc.observe(None).await.expect("observed");
    let begun = Instant::now();
    assert!(bench.gc.images.cached("pod", "old:1", begun).is_some());
    assert_eq!(bench.gc.remove_for_space(Duration::ZERO, begun, u64::MAX).await.expect("asked").removed.count, 0);
    tokio::time::advance(MINUTE).await;
    let removal = bench.gc.remove_for_space(Duration::ZERO, Instant::now(), u64::MAX).await.expect("asked");
    assert_eq!(removal.removed.count, 1);
    assert!(bench.gc.images.cached("pod", "old:1", Instant::now()).is_none(), "the entry was removed with the image");
}

#[tokio::test(start_paused = true)]
async fn access_records_stay_as_long_as_their_images() {
    use sha2::Digest as _;

    let container = vec![container("c1", "web")];
    let node = Node { images: vec![image("web", 1), image("new", 1)], containers: container, ..Node::default() };
    let bench = Bench::new(GcPolicy::default(), node);
    let file = |id: &str| {
        let hash: String = sha2::Sha256::digest(id).iter().map(|byte| format!("{byte:02x}")).collect();
        bench.dir.path().join(format!("image_manager/pulled/sha256-{hash}"))
    };
    for id in ["web", "new", "gone"] {
        let record = serde_json::json!({"kind": "ImagePulledRecord", "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "lastUpdatedTime": "2020-01-02T03:04:05Z", "imageRef": id});
        std::fs::write(file(id), record.to_string()).expect("written");
    }
    bench.gc.remove_unused(Duration::from_secs(3600)).await.expect("nothing to remove");
    assert_eq!(["web", "new", "gone"].map(|id| file(id).exists()), [true, true, false]);
}

#[tokio::test(start_paused = true)]
async fn an_image_that_was_there_before_a_cancelled_pull_of_its_name_stays_preloaded() {
    let bench = Bench::new(GcPolicy::default(), Node { images: vec![image("old", 1)], ..Node::default() });
    bench.gc.observe(None).await.expect("observed");
    tokio::time::advance(MINUTE).await;
    let images = &bench.gc.images;
    images.access().expect("records").begin("app:1").await.expect("written");
    images.record_pull("app:1", Err(&PullError::Cancelled { asked: Some(Instant::now()) })).await;
    for (id, expected) in [("old", true), ("new", false)] {
        let presented = async || Ok::<_, Infallible>(Vec::new());
        assert_eq!(images.may_use("app:1", id, presented).await.expect("infallible"), expected, "{id}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_is_reported_when_unused_images_are_not_enough() {
    let node = Node { images: vec![image("old", 7)], mountpoint: "/", ..Node::default() };
    let mut bench = Bench::new(always_full(), node);
    let failed = bench.gc.pass(Instant::now()).await.expect_err("the image is new");
    let GcError::NotEnough { freed: 0, .. } = failed else { panic!("{failed}") };
    let [event] = &bench.events.take()[..] else { panic!("one event") };
    assert!(event.starts_with("node W FreeDiskSpaceFailed: Insufficient free disk space on the node's"), "{event}");
    tokio::time::advance(5 * MINUTE).await;
    let failed = bench.gc.pass(Instant::now()).await.expect_err("too little");
    assert!(matches!(failed, GcError::NotEnough { freed: 7, .. }) && bench.remaining().is_empty(), "{failed}");
}

#[tokio::test(start_paused = true)]
async fn no_more_images_are_removed_than_needed() {
    // Each is larger than any disk.
    let images = vec![image("recent", 1 << 60), image("unused", 1 << 60)];
    let mut bench = Bench::new(always_full(), Node { images, mountpoint: "/", ..Node::default() });
    bench.gc.observe(None).await.expect("observed");
    let info = crate::images::ImageInfo { image_ref: "recent".into(), uid: None, username: String::new(), size: 1 };
    bench.gc.images.set_cached("pod", "recent:1", info, Instant::now());
    tokio::time::advance(5 * MINUTE).await;
    bench.gc.pass(Instant::now()).await.expect("enough is freed");
    assert_eq!(bench.remaining(), ["recent"]);
    assert!(bench.events.take().is_empty());
}

#[tokio::test(start_paused = true)]
async fn disks_without_size_or_runtimes_without_disks_fail_the_pass() {
    for (mountpoint, expected) in [
        ("/proc", "invalid capacity 0 on image filesystem"),
        ("", "imageFs information is unavailable"),
        ("/no/such/folder", "get filesystem info: cannot read the size of /no/such/folder"),
    ] {
        let mut bench = Bench::new(always_full(), Node { mountpoint, ..Node::default() });
        let failed = bench.gc.pass(Instant::now()).await.expect_err("no size");
        assert_eq!(failed.to_string(), expected);
        let event = "node W InvalidDiskCapacity: invalid capacity 0 on image filesystem".to_owned();
        assert_eq!(bench.events.take(), if mountpoint == "/proc" { vec![event] } else { Vec::new() });
    }
}

/// The runtime may be restarted with another directory for its images.
#[tokio::test(start_paused = true)]
async fn the_file_system_that_the_runtime_reports_now_is_measured() {
    let bench = Bench::new(always_full(), Node { mountpoint: "/proc", ..Node::default() });
    let failed = bench.gc.pass(Instant::now()).await.expect_err("it has no size");
    assert!(matches!(failed, GcError::InvalidCapacity), "{failed}");
    bench.node.lock().expect("not poisoned").mountpoint = "/";
    let failed = bench.gc.pass(Instant::now()).await.expect_err("there is no image");
    assert!(matches!(failed, GcError::NotEnough { freed: 0, .. }), "{failed}");
}

#[tokio::test(start_paused = true)]
async fn what_is_mounted_and_the_sandbox_image_do_not_expire() {
    let pause = cri::Image { repo_tags: vec!["pause:3".to_owned()], ..image("pause", 1) };
    let node = Node {
        images: vec![image("web", 1), image("data", 1), pause, image("old", 1)],
        containers: vec![container("c1", "web")],
        mounts: [("c1".to_owned(), "data".to_owned())].into(),
        sandbox_image: "pause:3",
        mountpoint: "/",
        ..Node::default()
    };
    // Whatever the usage of the disk.
    let policy = GcPolicy { high: 100, max_age: 60 * MINUTE, ..GcPolicy::default() };
    let bench = Bench::new(policy, node);
    let started = Instant::now();
    tokio::time::advance(60 * MINUTE).await;
    bench.gc.pass(started).await.expect("observed");
    assert_eq!(bench.asked("RemoveImage"), 0, "the agent has not run for longer than the age");
    tokio::time::advance(MINUTE).await;
    bench.gc.pass(started).await.expect("removed");
    assert_eq!(bench.remaining(), ["web", "data", "pause"]);
}

#[tokio::test(start_paused = true)]
async fn images_expire_and_repeated_failures_are_reported() {
    let policy = GcPolicy { max_age: 60 * MINUTE, ..GcPolicy::default() };
    let node = Node { images: vec![image("new", 1)], stuck: vec!["new"], mountpoint: "/", ..Node::default() };
    let mut bench = Bench::new(policy, node);
    let collecting = tokio::spawn({
        let gc = bench.gc.clone();
        async move { gc.run().await }
    });
    let until = async |bench: &Bench, method: &str, count: usize| {
        let deadline = Instant::now() + 120 * MINUTE;
        while bench.asked(method) < count {
            assert!(Instant::now() < deadline, "{method} was not called {count} times");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(bench.shows("keblet_image_bytes{in_use=\"false\"} 1"), "observed when the agent starts");
    tokio::time::sleep(59 * MINUTE).await;
    assert_eq!((bench.asked("RemoveImage"), bench.asked("ImageFsInfo")), (0, 12), "every five minutes");
    until(&bench, "RemoveImage", 1).await;
    assert!(bench.events.take().is_empty(), "the first failure in a row is not reported");
    let space_steps = bench.asked("ImageFsInfo");
    until(&bench, "RemoveImage", 2).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(bench.asked("ImageFsInfo"), space_steps, "a failure ends the pass before its space step");
    let text = "node W ImageGCFailed: wanted to free images older than 1h0m0s, encountered errors in image deletion: \
                rpc error: code = Unknown desc = in use";
    assert_eq!(bench.events.take(), [text]);
    bench.node.lock().expect("not poisoned").stuck.clear();
    until(&bench, "RemoveImage", 3).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(bench.remaining().is_empty() && bench.events.take().is_empty());
    assert!(bench.shows("kubelet_image_garbage_collected_total{reason=\"age\"} 1"));
    {
        let mut node = bench.node.lock().expect("not poisoned");
        node.images.push(image("next", 1));
        node.stuck.push("next");
    }
    until(&bench, "RemoveImage", 4).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(bench.events.take().is_empty(), "after a success the next failure is the first in a row");
    collecting.abort();
}

#[tokio::test(start_paused = true)]
async fn without_thresholds_images_get_old_until_the_eviction_manager_needs_their_space() {
    let node = Node { images: vec![image("old", 7)], mountpoint: "/", ..Node::default() };
    let bench = Bench::new(GcPolicy::default(), node);
    let observing = tokio::spawn({
        let gc = bench.gc.clone();
        async move { gc.run().await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(bench.shows("keblet_images{in_use=\"false\"} 1"), "observed when the agent starts");
    tokio::time::sleep(16 * MINUTE).await;
    assert_eq!((bench.asked("ListImages"), bench.asked("ImageFsInfo")), (4, 0), "observed every five minutes");
    assert_eq!(bench.remaining(), ["old"]);
    assert_eq!(bench.gc.remove_unused(2 * MINUTE).await, Ok(RemovedImages { count: 1, bytes: 7 }));
    observing.abort();
}
