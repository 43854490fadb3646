//! The client against a server over in-memory pipes, on paused time.

mod events;
pub(crate) mod server;
mod state;

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::FutureExt;
use keblet_proto::cri::v1 as cri;
use prost::Message;
use tokio::time::Instant;
use tonic::Code;
use tonic::Status;

use super::*;
use server::Script;
use server::Socket;
use server::say;
use server::say_all;
use server::script;

fn client(socket: &Socket) -> Runtime {
    client_with(socket, RuntimeOptions::default())
}

fn client_with(socket: &Socket, options: RuntimeOptions) -> Runtime {
    let socket = socket.clone();
    Runtime::with_connector("unix:///run/test.sock", move || socket.clone().connect(), options)
}

fn serving(script: Script) -> (Socket, Runtime) {
    let socket = Socket::default();
    socket.serve(script);
    (socket.clone(), client(&socket))
}

fn unimplemented() -> server::Answer {
    Err(Status::unimplemented("unknown method"))
}

#[derive(Default)]
struct Calls(Mutex<Vec<FinishedCall>>);

impl CallObserver for Calls {
    fn finished(&self, call: FinishedCall) {
        self.0.lock().unwrap().push(call);
    }
}

#[tokio::test(start_paused = true)]
async fn calls_have_the_kubelets_deadlines() {
    let socket = Socket::default();
    socket.serve(Arc::new(|_, _| std::future::pending().boxed()));
    let calls = Arc::new(Calls::default());
    let runtime = client_with(&socket, RuntimeOptions { observer: calls.clone(), ..RuntimeOptions::default() });
    let seconds = Duration::from_secs;

    let start = Instant::now();
    let (version, run, stop, exec) = tokio::join!(
        runtime.version().map(|r| (r.unwrap_err(), start.elapsed())),
        runtime.run_pod_sandbox(Default::default(), "").map(|r| (r.unwrap_err(), start.elapsed())),
        runtime.stop_container("c", seconds(30)).map(|r| (r.unwrap_err(), start.elapsed())),
        runtime.exec_sync("c", vec![], seconds(7)).map(|r| (r.unwrap_err(), start.elapsed())),
    );
    for ((error, after), deadline) in [(version, 120), (run, 240), (stop, 150), (exec, 127)] {
        assert!(error.is_deadline() && !error.is_unreachable(), "{error}");
        assert_eq!(after.as_secs(), deadline, "{error}");
    }

    let observed = calls.0.lock().unwrap().clone();
    let stop = observed.iter().find(|c| c.operation == Operation::StopContainer).expect("observed");
    assert_eq!((stop.error, stop.duration.as_secs()), (Some(Code::DeadlineExceeded), 150));
    assert_eq!(observed.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_grace_period_beyond_all_clocks_is_a_long_one() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let recorded = asked.clone();
    let (_socket, runtime) = serving(script(move |_, body| {
        recorded.lock().unwrap().push(cri::StopContainerRequest::decode(body).unwrap().timeout);
        say(&cri::StopContainerResponse::default())
    }));
    for seconds in [i64::MAX.unsigned_abs(), u64::MAX] {
        runtime.stop_container("c", Duration::from_secs(seconds)).await.unwrap();
    }
    assert_eq!(*asked.lock().unwrap(), [10 * 365 * 24 * 3600; 2]);
}

#[tokio::test(start_paused = true)]
async fn pulls_and_unlimited_commands_have_none() {
    let (_socket, runtime) = serving(Arc::new(|_, _| std::future::pending().boxed()));
    let day = Duration::from_secs(86_400);
    let image = cri::ImageSpec { image: "a".to_owned(), ..Default::default() };
    let (pull, exec) = tokio::join!(
        tokio::time::timeout(day, runtime.pull_image(image, None, None)),
        tokio::time::timeout(day, runtime.exec_sync("c", vec![], Duration::ZERO)),
    );
    assert!(pull.is_err(), "{pull:?}");
    assert!(exec.is_err(), "{exec:?}");
}

#[tokio::test(start_paused = true)]
async fn an_error_keeps_code_and_message() {
    let (_socket, runtime) = serving(script(|_, _| Err(Status::not_found("no container \"c1\""))));
    let error = runtime.start_container("c1").await.unwrap_err();
    assert!(error.is_not_found() && !error.is_unreachable() && !error.is_unimplemented());
    assert_eq!(error.code(), Code::NotFound);
    assert_eq!(error.message(), "no container \"c1\"");
    assert_eq!(error.to_string(), "StartContainer c1: no container \"c1\" (NotFound)");
    assert_eq!(error.rpc_text(), "rpc error: code = NotFound desc = no container \"c1\"");
}

#[tokio::test(start_paused = true)]
async fn an_answer_without_its_essentials_is_an_error() {
    let (_socket, runtime) = serving(script(|_, _| say(&cri::VersionRequest::default())));
    let status = runtime.container_status("c1", true).await.unwrap_err();
    assert_eq!(status.to_string(), "ContainerStatus c1: the answer lacks status");
    let metadata =
        Some(cri::PodSandboxMetadata { namespace: "default".to_owned(), name: "web".to_owned(), ..Default::default() });
    let config = cri::PodSandboxConfig { metadata, ..Default::default() };
    let run = runtime.run_pod_sandbox(config, "").await.unwrap_err();
    assert_eq!(run.to_string(), "RunPodSandbox default/web: the answer lacks pod_sandbox_id");
}

fn containers(count: usize, bytes_each: usize) -> cri::ListContainersResponse {
    let container = cri::Container { id: "x".repeat(bytes_each), ..Default::default() };
    cri::ListContainersResponse { containers: vec![container; count] }
}

#[tokio::test(start_paused = true)]
async fn messages_up_to_16_mib_pass() {
    let (_socket, runtime) = serving(script(|method, message| {
        let filter = match method {
            "ListContainers" => cri::ListContainersRequest::decode(message).unwrap().filter.unwrap(),
            method => panic!("unexpected {method}"),
        };
        let mib = if filter.id == "large" { 17 } else { 15 };
        say(&containers(mib, 1 << 20))
    }));
    assert_eq!(runtime.list_containers(Default::default()).await.unwrap().len(), 15);

    let large = cri::ContainerFilter { id: "large".to_owned(), ..Default::default() };
    let error = runtime.list_containers(large).await.unwrap_err();
    assert_eq!(error.code(), Code::OutOfRange, "{error}");
    assert!(error.to_string().contains("message length too large"), "{error}");

    let sent = runtime.exec_sync("c", vec!["x".repeat(17 << 20)], Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(sent.code(), Code::OutOfRange, "{sent}");
}

#[tokio::test(start_paused = true)]
async fn a_call_after_the_server_vanished_fails_at_once_and_the_first_one_after_its_return_connects() {
    let version = script(|_, _| say(&cri::VersionResponse { runtime_name: "r".to_owned(), ..Default::default() }));
    let (socket, runtime) = serving(version.clone());
    runtime.version().await.unwrap();
    runtime.clone().version().await.unwrap();
    assert_eq!(socket.connections(), 1, "clones share the connection");

    socket.vanish();
    let start = Instant::now();
    for _ in 0..3 {
        let error = runtime.version().await.unwrap_err();
        assert!(error.is_unreachable(), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());

    socket.serve(version);
    runtime.version().await.unwrap();
    assert_eq!(socket.connections(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_call_in_flight_when_the_server_vanishes_fails_at_once() {
    let (socket, runtime) = serving(Arc::new(|_, _| std::future::pending().boxed()));
    let call = tokio::spawn(async move { runtime.start_container("c").await });
    while socket.connections() == 0 {
        tokio::task::yield_now().await;
    }
    let start = Instant::now();
    socket.vanish();
    let error = call.await.unwrap().unwrap_err();
    assert!(error.is_unreachable(), "{error}");
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn until_ready_goes_on_for_ever_but_never_waits_long() {
    let socket = Socket::default();
    let runtime = client(&socket);
    let ready = tokio::spawn(async move { runtime.until_ready().await });
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert!(!ready.is_finished());

    socket.serve(script(|_, _| say(&cri::VersionResponse { version: "0.1.0".to_owned(), ..Default::default() })));
    let start = Instant::now();
    assert_eq!(ready.await.unwrap().version, "0.1.0");
    assert!(start.elapsed() <= Duration::from_secs(3), "{:?}", start.elapsed());
}

#[tokio::test]
async fn an_absent_socket_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let endpoint: RuntimeEndpoint = format!("unix://{}/no.sock", folder.path().display()).parse().unwrap();
    let runtime = Runtime::new(&endpoint, None, RuntimeOptions::default());
    let error = runtime.status(false).await.unwrap_err();
    assert!(error.is_unreachable());
    assert_eq!(
        error.to_string(),
        format!("Status: runtime at {endpoint} does not answer: No such file or directory (os error 2)")
    );
}

#[tokio::test]
async fn images_may_have_another_endpoint() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| format!("unix://{}/{name}.sock", folder.path().display()).parse::<RuntimeEndpoint>().unwrap();
    let (runtime_at, images_at) = (at("runtime"), at("images"));
    let runtime = Runtime::new(&runtime_at, Some(&images_at), RuntimeOptions::default());
    let image_error = runtime.image_fs_info().await.unwrap_err().to_string();
    assert!(image_error.contains(&images_at.to_string()), "{image_error}");
    let version_error = runtime.version().await.unwrap_err().to_string();
    assert!(version_error.contains(&runtime_at.to_string()), "{version_error}");
}

#[tokio::test(start_paused = true)]
async fn features_of_a_plain_runtime() {
    let (_socket, runtime) = serving(script(|method, _| match method {
        "Version" => say(&cri::VersionResponse {
            runtime_name: "containerd".to_owned(),
            runtime_version: "1.7.24".to_owned(),
            ..Default::default()
        }),
        "ListPodSandbox" => say(&cri::ListPodSandboxResponse { items: vec![Default::default(); 2] }),
        _ => unimplemented(),
    }));
    let features = runtime.features().await.unwrap();
    let expected = Features {
        runtime_name: "containerd".to_owned(),
        runtime_version: "1.7.24".to_owned(),
        cgroup_driver: None,
        streaming_lists: false,
    };
    assert_eq!(features, expected);
    assert_eq!(runtime.list_pod_sandboxes(Default::default()).await.unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn features_of_a_recent_runtime() {
    let (socket, runtime) = serving(script(|method, _| match method {
        "Version" => say(&cri::VersionResponse::default()),
        "RuntimeConfig" => {
            let linux = cri::LinuxRuntimeConfiguration { cgroup_driver: cri::CgroupDriver::Cgroupfs as i32 };
            say(&cri::RuntimeConfigResponse { linux: Some(linux) })
        }
        "StreamPodSandboxes" => say_all::<cri::StreamPodSandboxesResponse>([]),
        "StreamContainers" => {
            let portion = |n| cri::StreamContainersResponse { containers: containers(n, 10 << 20).containers };
            say_all(&[portion(1), portion(1)])
        }
        "StreamImages" => Ok(Box::pin(futures_util::stream::iter([
            Ok(cri::StreamImagesResponse { images: vec![cri::Image::default()] }.encode_to_vec().into()),
            Err(Status::internal("the rest is lost")),
        ]))),
        _ => unimplemented(),
    }));
    let features = runtime.features().await.unwrap();
    assert_eq!(features.cgroup_driver, Some(cri::CgroupDriver::Cgroupfs));
    assert!(features.streaming_lists);

    let runtime = client_with(&socket, RuntimeOptions { streams_lists: true, ..RuntimeOptions::default() });
    let listed = runtime.list_containers(Default::default()).await.unwrap();
    assert_eq!(listed.len(), 2, "20 MiB in two portions");
    let broken = runtime.list_images(None).await.unwrap_err();
    assert_eq!(broken.code(), Code::Internal, "half a list is none: {broken}");
}

#[tokio::test(start_paused = true)]
async fn lists_of_a_service_that_does_not_stream_are_whole() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let asked = calls.clone();
    let (socket, by_default) = serving(script(move |method, _| {
        asked.lock().unwrap().push(method.to_owned());
        match method {
            "ListContainers" => say(&cri::ListContainersResponse::default()),
            "StreamImages" => say_all::<cri::StreamImagesResponse>([]),
            _ => unimplemented(),
        }
    }));
    by_default.list_containers(Default::default()).await.unwrap();
    let runtime = client_with(&socket, RuntimeOptions { streams_lists: true, ..RuntimeOptions::default() });
    for _ in 0..2 {
        runtime.list_containers(Default::default()).await.unwrap();
    }
    runtime.list_images(None).await.unwrap();
    let asked = calls.lock().unwrap().clone();
    assert_eq!(asked, ["ListContainers", "StreamContainers", "ListContainers", "ListContainers", "StreamImages"]);
}

#[tokio::test(start_paused = true)]
async fn an_unknown_cgroup_driver_is_not_taken_for_another() {
    let (_socket, runtime) = serving(script(|_, _| {
        let linux = cri::LinuxRuntimeConfiguration { cgroup_driver: 7 };
        say(&cri::RuntimeConfigResponse { linux: Some(linux) })
    }));
    let error = runtime.runtime_config().await.unwrap_err();
    assert_eq!(error.to_string(), "RuntimeConfig: the answer lacks a known cgroup driver");
}

#[tokio::test(start_paused = true)]
async fn every_kind_of_call_can_be_spawned() {
    let runtime = client(&Socket::default());
    let mut tasks = tokio::task::JoinSet::new();
    let (a, b, c, d, e) = (runtime.clone(), runtime.clone(), runtime.clone(), runtime.clone(), runtime);
    tasks.spawn(async move { a.list_pod_sandboxes(Default::default()).await.is_err() });
    tasks.spawn(async move { b.list_containers(Default::default()).await.is_err() });
    tasks.spawn(async move { c.list_images(None).await.is_err() });
    tasks.spawn(async move { d.container_events().await.is_err() });
    tasks.spawn(async move { e.features().await.is_err() });
    assert_eq!(tasks.join_all().await, [true; 5]);
}

#[tokio::test(start_paused = true)]
async fn calls_are_small_enough_to_nest() {
    let runtime = client(&Socket::default());
    let sizes = [
        size_of_val(&runtime.run_pod_sandbox(Default::default(), "")),
        size_of_val(&runtime.create_container("", Default::default(), Default::default())),
        size_of_val(&runtime.pull_image(Default::default(), None, None)),
        size_of_val(&runtime.container_events()),
    ];
    assert!(sizes.iter().all(|size| *size < 8 << 10), "{sizes:?}");
}
