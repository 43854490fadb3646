//! The handler as a client sees it, against a scripted runtime.

use std::fs::File;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use axum::body::Bytes;
use futures_util::TryStreamExt as _;
use http_body_util::BodyExt as _;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::jiff::Timestamp;
use keblet_proto::cri::v1 as cri;
use serde_json::json;
use tonic::Status;
use tower::ServiceExt as _;

use super::super::PodLookup;
use super::*;
use crate::model::ContainerState;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::testing;
use crate::runtime::Runtime;
use crate::runtime::RuntimeOptions;
use crate::runtime::tests::server::Socket;
use crate::runtime::tests::server::say;
use crate::runtime::tests::server::script;

const TIMEOUT: Duration = Duration::from_secs(30);

/// A container `main` of pod `ns/pod`, running, whose log is a file of the test.
struct Node {
    router: Router,
    dir: tempfile::TempDir,
    snapshot: Arc<Mutex<PodSnapshot>>,
}

impl Node {
    fn new() -> Self {
        Self::with(json!({"running": {}}), false)
    }

    fn with(state: serde_json::Value, split_streams: bool) -> Self {
        Self::of(json!({ "state": state }), split_streams)
    }

    /// With these fields of the container's status. The log of container `main-N` is `N.log`.
    fn of(mut status: serde_json::Value, split_streams: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        File::create(dir.path().join("0.log")).unwrap();
        let snapshot = Arc::new(Mutex::new(testing::snapshot(vec![testing::running("main", 0)])));
        let mut pod = testing::pod("Always", &[], &["main"]);
        let others = json!({"name": "main", "ready": true, "restartCount": 0, "image": "i", "imageID": "",
            "containerID": "fake://main-0"});
        status.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
        pod.status = serde_json::from_value(json!({ "containerStatuses": [status] })).unwrap();
        let (pod, cached) = (Arc::new(pod), snapshot.clone());
        let pods = Arc::new(OnePod { pod, snapshot: cached });
        let containers = Containers { pods, runtime: runtime(dir.path().to_owned()) };
        Self { router: router(containers, split_streams), dir, snapshot }
    }

    async fn get(&self, path_and_query: &str) -> Response {
        let request = axum::http::Request::get(path_and_query).body(Body::empty()).unwrap();
        self.router.clone().oneshot(request).await.unwrap()
    }

    async fn text(&self, path_and_query: &str) -> (u16, String) {
        let response = self.get(path_and_query).await;
        let status = response.status().as_u16();
        let chunks = response.into_body().into_data_stream();
        // Each chunk is dropped once it is copied, as a server drops it when it was sent.
        let text = chunks.try_fold(Vec::new(), async |text, chunk| Ok([text, chunk.to_vec()].concat()));
        let text = tokio::time::timeout(TIMEOUT, text).await.expect("an end").unwrap();
        (status, String::from_utf8(text).unwrap())
    }

    fn log(&self) -> File {
        File::options().append(true).open(self.dir.path().join("0.log")).unwrap()
    }

    fn end_container(&self) {
        self.snapshot.lock().unwrap().containers[0].state = ContainerState::Exited;
    }
}

struct OnePod {
    pod: Pod,
    snapshot: Arc<Mutex<PodSnapshot>>,
}

impl PodLookup for OnePod {
    fn pod(&self, namespace: &str, name: &str) -> Option<Pod> {
        (namespace == "ns" && name == "pod").then(|| self.pod.clone())
    }

    fn status(&self, pod: &Pod) -> PodStatus {
        pod.status.clone().unwrap_or_default()
    }

    fn snapshot(&self, _: &PodUid) -> Option<Arc<PodSnapshot>> {
        Some(Arc::new(self.snapshot.lock().unwrap().clone()))
    }
}

fn runtime(logs: PathBuf) -> Runtime {
    let socket = Socket::default();
    socket.serve(script(move |method, message| {
        assert_eq!(method, "ContainerStatus");
        let asked = <cri::ContainerStatusRequest as prost::Message>::decode(message).unwrap();
        let Some(number) = asked.container_id.strip_prefix("main-") else {
            return Err(Status::not_found("no such id"));
        };
        let log = logs.join(format!("{number}.log"));
        say(&cri::ContainerStatusResponse {
            status: Some(cri::ContainerStatus {
                metadata: Some(cri::ContainerMetadata::default()),
                log_path: log.to_string_lossy().into_owned(),
                ..Default::default()
            }),
            ..Default::default()
        })
    }));
    Runtime::with_connector("unix:///run/test.sock", move || socket.clone().connect(), RuntimeOptions::default())
}

fn line(n: usize) -> String {
    format!("2026-01-01T00:00:00.{:09}Z stdout F line {n}\n", n % 1_000_000_000)
}

async fn piece(body: &mut Body) -> Option<Bytes> {
    let frame = tokio::time::timeout(TIMEOUT, body.frame()).await.expect("a piece in time");
    frame.map(|frame| frame.unwrap().into_data().unwrap())
}

/// Pieces until `wanted` bytes are there.
async fn bytes(body: &mut Body, wanted: usize) -> String {
    let mut all = Vec::new();
    while all.len() < wanted {
        all.extend_from_slice(&piece(body).await.expect("more to come"));
    }
    String::from_utf8(all).unwrap()
}

const PATH: &str = "/containerLogs/ns/pod/main";

#[tokio::test]
async fn the_query_selects_the_lines() {
    let node = Node::new();
    (1..=3).for_each(|n| node.log().write_all(line(n).as_bytes()).unwrap());
    assert_eq!(node.text(PATH).await, (200, "line 1\nline 2\nline 3\n".to_owned()));
    assert_eq!(node.text(&format!("{PATH}?tailLines=1")).await, (200, "line 3\n".to_owned()));
    assert_eq!(node.text(&format!("{PATH}?limitBytes=9")).await, (200, "line 1\nli".to_owned()));
    assert_eq!(
        node.text(&format!("{PATH}?stream=All&tailLines=1")).await,
        (200, "line 3\n".to_owned()),
        "one stream alone has a gate"
    );
    let stamped = format!("{PATH}?timestamps=true&tailLines=1");
    assert_eq!(node.text(&stamped).await, (200, "2026-01-01T00:00:00.000000003Z line 3\n".to_owned()));
    assert_eq!(node.text(&format!("{PATH}?sinceTime=2026-01-01T00:00:00.000000002Z")).await.1, "line 2\nline 3\n");
}

#[tokio::test]
async fn seconds_count_back_from_the_request() {
    let node = Node::new();
    for (age, text) in [(100, "old"), (10, "new")] {
        let time = Timestamp::from_second(Timestamp::now().as_second() - age).unwrap();
        writeln!(node.log(), "{time} stdout F {text}").unwrap();
    }
    assert_eq!(node.text(&format!("{PATH}?sinceSeconds=60")).await, (200, "new\n".to_owned()));
    assert_eq!(node.text(&format!("{PATH}?sinceSeconds=1000")).await, (200, "old\nnew\n".to_owned()));
}

#[tokio::test]
async fn the_previous_instance_has_a_log_of_its_own() {
    let before = json!({"terminated": {"exitCode": 1, "containerID": "fake://main-1"}});
    let node = Node::of(json!({"state": {"running": {}}, "lastState": before}), false);
    std::fs::write(node.dir.path().join("1.log"), line(1)).unwrap();
    node.log().write_all(line(2).as_bytes()).unwrap();
    assert_eq!(node.text(&format!("{PATH}?previous=true")).await, (200, "line 1\n".to_owned()));
    assert_eq!(node.text(PATH).await, (200, "line 2\n".to_owned()));
}

#[tokio::test]
async fn a_container_that_the_runtime_has_removed_has_no_log() {
    let node = Node::with(json!({"terminated": {"exitCode": 0, "containerID": "fake://gone"}}), true);
    let text = "unable to retrieve container logs for fake://gone";
    assert_eq!(node.text(PATH).await, (200, text.to_owned()));
    assert_eq!(node.text(&format!("{PATH}?stream=Stderr")).await, (400, text.to_owned()));
}

#[tokio::test]
async fn invalid_requests_are_refused() {
    let node = Node::new();
    for (path, status, text) in [
        ("/containerLogs/ns/other/main", 404, "pod \"other\" does not exist"),
        ("/containerLogs/ns/pod/other", 404, "container \"other\" not found in pod \"pod\""),
        ("/containerLogs/ns/other/main?tailLines=x", 400, "{\"message\": \"Unable to decode query.\"}"),
        ("/containerLogs/ns/pod/main?tailLines=x", 400, "{\"message\": \"Unable to decode query.\"}"),
        ("/containerLogs/ns/pod/main?tailLines=-1", 422, "{\"message\": \"Invalid request.\"}"),
        (
            "/containerLogs/ns/pod/main?previous=true",
            400,
            "previous terminated container \"main\" in pod \"pod\" not found",
        ),
        (
            "/containerLogs/ns/pod/main?stream=Stderr",
            400,
            "unable to return the given log stream: \"Stderr\". Please enable PodLogsQuerySplitStreams feature gate in \
             kubelet",
        ),
    ] {
        assert_eq!(node.text(path).await, (status, text.to_owned()), "{path}");
    }
    let waiting = Node::with(json!({"waiting": {"reason": "ErrImagePull"}}), false);
    let text = "container \"main\" in pod \"pod\" is waiting to start: image can't be pulled";
    assert_eq!(waiting.text(PATH).await, (400, text.to_owned()));
}

#[tokio::test]
async fn errors_after_the_status_are_text() {
    let node = Node::with(json!({"running": {}}), true);
    std::fs::remove_file(node.dir.path().join("0.log")).unwrap();
    let (status, text) = node.text(PATH).await;
    assert!(status == 200 && text.starts_with("failed to try resolving symlinks in path "), "{status} {text}");
    let (status, _) = node.text(&format!("{PATH}?stream=Stderr")).await;
    assert_eq!(status, 400, "nothing was written to the standard output before");
    std::fs::write(node.dir.path().join("0.log"), "no log\n").unwrap();
    let expected = "failed to get parse function: unsupported log format: \"no log\\n\"";
    assert_eq!(node.text(PATH).await, (200, expected.to_owned()));
}

/// A container that mounts the directory of logs can replace its own.
#[tokio::test]
async fn only_regular_files_are_opened() {
    let node = Node::new();
    let log = node.dir.path().join("0.log");
    std::fs::remove_file(&log).unwrap();
    nix::unistd::mkfifo(&log, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let pipe = log.canonicalize().unwrap();
    let answers = async {
        for _ in 0..100 {
            for query in ["", "?follow=true", "?tailLines=1"] {
                let refused = format!("failed to open log file \"{}\": not a regular file", pipe.display());
                assert_eq!(node.text(&format!("{PATH}{query}")).await, (200, refused));
            }
        }
    };
    tokio::time::timeout(TIMEOUT, answers).await.expect("no answer waits for a writer");
    std::fs::remove_file(&log).unwrap();
    std::os::unix::fs::symlink("/dev/zero", &log).unwrap();
    let refused = "failed to open log file \"/dev/zero\": not a regular file";
    assert_eq!(node.text(&format!("{PATH}?limitBytes=100")).await, (200, refused.to_owned()));
}

#[tokio::test]
async fn one_stream_of_two() {
    let node = Node::with(json!({"running": {}}), true);
    node.log().write_all(line(1).as_bytes()).unwrap();
    node.log().write_all(line(2).replace("stdout", "stderr").as_bytes()).unwrap();
    assert_eq!(node.text(&format!("{PATH}?stream=Stderr")).await.1, "line 2\n");
    assert_eq!(node.text(&format!("{PATH}?stream=Stdout")).await.1, "line 1\n");
}

#[tokio::test]
async fn a_follower_receives_new_lines_until_the_container_exits() {
    let node = Node::new();
    node.log().write_all(line(1).as_bytes()).unwrap();
    let mut body = node.get(&format!("{PATH}?follow=true")).await.into_body();
    assert_eq!(bytes(&mut body, 7).await, "line 1\n");
    node.log().write_all(line(2).as_bytes()).unwrap();
    assert_eq!(bytes(&mut body, 7).await, "line 2\n");
    let path = node.dir.path().join("0.log");
    std::fs::rename(&path, node.dir.path().join("0.log.20260101-000000")).unwrap();
    std::fs::write(&path, line(3)).unwrap();
    assert_eq!(bytes(&mut body, 7).await, "line 3\n", "the log was rotated");
    node.end_container();
    node.log().write_all(line(4).trim_end().as_bytes()).unwrap();
    assert_eq!(bytes(&mut body, 6).await, "line 4", "what was written last, without its end");
    assert_eq!(piece(&mut body).await, None);
}

/// The follower's last read of the old file and of the folder are before the exit.
#[tokio::test]
async fn a_log_that_is_rotated_as_its_container_exits_is_followed_to_its_end() {
    let node = Node::new();
    node.log().write_all(line(1).as_bytes()).unwrap();
    let mut body = node.get(&format!("{PATH}?follow=true")).await.into_body();
    assert_eq!(bytes(&mut body, 7).await, "line 1\n");
    node.log().write_all(line(2).as_bytes()).unwrap();
    let path = node.dir.path().join("0.log");
    std::fs::rename(&path, node.dir.path().join("0.log.20260101-000000")).unwrap();
    std::fs::write(&path, line(3)).unwrap();
    node.end_container();
    assert_eq!(bytes(&mut body, 14).await, "line 2\nline 3\n");
    assert_eq!(piece(&mut body).await, None);
}

#[tokio::test]
async fn an_exit_reported_only_by_the_kernel_does_not_end_the_log() {
    let node = Node::new();
    let dead = testing::proven("main", 0, Some(0));
    node.snapshot.lock().unwrap().containers[0] = dead;
    let mut body = node.get(&format!("{PATH}?follow=true")).await.into_body();
    let waiting = tokio::time::timeout(Duration::from_millis(50), body.frame());
    assert!(waiting.await.is_err(), "the runtime may still be writing");
    node.log().write_all(line(1).as_bytes()).unwrap();
    assert_eq!(bytes(&mut body, 7).await, "line 1\n");
    node.end_container();
    node.snapshot.lock().unwrap().containers[0].proven = None;
    assert_eq!(piece(&mut body).await, None);
}

#[tokio::test]
async fn a_log_requested_after_the_exit_is_complete() {
    let node = Node::new();
    write!(node.log(), "{}", line(1)).unwrap();
    node.snapshot.lock().unwrap().containers[0] = testing::proven("main", 0, Some(0));
    let asked = node.text("/containerLogs/ns/pod/main?tailLines=1");
    let reported = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        write!(node.log(), "{}", line(2)).unwrap();
        node.snapshot.lock().unwrap().containers[0].proven = None;
    };
    let (answer, ()) = tokio::join!(asked, reported);
    assert_eq!(answer, (200, "line 2\n".to_owned()), "the runtime wrote it after the exit was known");
    // A runtime that never reports the exit delays the response for a bounded time.
    node.snapshot.lock().unwrap().containers[0] = testing::proven("main", 0, Some(0));
    assert_eq!(node.text("/containerLogs/ns/pod/main").await.1, "line 1\nline 2\n");
}

#[tokio::test]
async fn a_tail_of_zero_returns_only_new_lines() {
    let node = Node::new();
    node.log().write_all(line(1).as_bytes()).unwrap();
    assert_eq!(node.text(&format!("{PATH}?tailLines=0")).await, (200, String::new()));
    let mut body = node.get(&format!("{PATH}?tailLines=0&follow=1")).await.into_body();
    node.log().write_all(line(2).as_bytes()).unwrap();
    assert_eq!(bytes(&mut body, 7).await, "line 2\n");
}

/// The file is not read for a client that does not read; other clients get every line of a busy log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_client_does_not_block_others() {
    let node = Node::new();
    let slow: Vec<Response> = {
        let mut all = Vec::new();
        for _ in 0..50 {
            all.push(node.get(&format!("{PATH}?follow=true")).await);
        }
        all
    };
    let mut quick = node.get(&format!("{PATH}?follow=true")).await.into_body();
    let mut log = node.log();
    let lines = 20_000;
    let writing = tokio::task::spawn_blocking(move || {
        for chunk in (0..lines).collect::<Vec<usize>>().chunks(100) {
            log.write_all(chunk.iter().map(|n| line(*n)).collect::<String>().as_bytes()).unwrap();
        }
    });
    let expected: String = (0..lines).map(|n| format!("line {n}\n")).collect();
    assert_eq!(bytes(&mut quick, expected.len()).await, expected);
    writing.await.unwrap();
    let mut late = slow.into_iter().next().unwrap().into_body();
    let begin = piece(&mut late).await.unwrap();
    assert!(begin.len() <= 8 * 1024 && expected.as_bytes().starts_with(&begin), "it is read for one step at a time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_followers() {
    use nix::sys::resource::Resource;
    use nix::sys::resource::getrlimit;
    use nix::sys::resource::setrlimit;
    // Each holds the log open.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
    let node = Node::new();
    let mut bodies = Vec::new();
    for _ in 0..1000 {
        bodies.push(node.get(&format!("{PATH}?follow=true")).await.into_body());
    }
    let tasks: Vec<_> =
        bodies.into_iter().map(|mut body| tokio::spawn(async move { bytes(&mut body, 14).await })).collect();
    node.log().write_all(line(1).as_bytes()).unwrap();
    node.log().write_all(line(2).as_bytes()).unwrap();
    for task in tasks {
        assert_eq!(task.await.unwrap(), "line 1\nline 2\n");
    }
}
