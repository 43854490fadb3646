//! The simulated runtime behaves as the real one.

use std::time::Duration;

use keblet_proto::cri::v1;
use keblet_proto::cri::v1::ContainerEventType::*;
use keblet_proto::cri::v1::ContainerState;
use keblet_proto::cri::v1::ContainerState::*;
use keblet_tests::cri::client::Client;
use keblet_tests::cri::client::container;
use keblet_tests::cri::client::sandbox;
use keblet_tests::cri::*;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio::time::timeout;
use tonic::Code;

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) fn node() -> (SimRuntime, Client) {
    node_with(Options::default())
}

pub(crate) fn node_with(options: Options) -> (SimRuntime, Client) {
    let sim = SimRuntime::new(options);
    sim.images(|images| images.store("busybox", 1 << 20));
    let client = Client::new(sim.memory().channel());
    (sim, client)
}

async fn state(client: &mut Client, id: &str) -> ContainerState {
    client.status(id).await.expect("status").0.state()
}

#[tokio::test(start_paused = true)]
async fn kernel_records_an_exit_before_the_runtime_reports_it() {
    let (sim, mut client) = node();
    let mut facts = sim.kernel().subscribe();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let id = client.launch(&pod, container("main", 0, "exit 3 100ms")).await.expect("launch");
    let (status, info) = client.status(&id).await.expect("status");
    assert_eq!(status.state(), ContainerRunning);
    let pid = u32::try_from(info["pid"].as_u64().expect("pid")).expect("small");
    let pinned = sim.kernel().open(pid).expect("alive");
    assert_eq!(pinned.cgroup, format!("/kubepods/besteffort/podweb-uid/{id}"));

    let KernelFact::Exit(exit) = facts.recv().await.expect("fact") else { panic!("no OOM here") };
    let exited_at = Instant::now();
    assert_eq!((exit.pid, exit.exit, exit.ns_init, exit.at), (pid, Exit::Code(3), true, exited_at));
    pinned.gone().await;
    assert!(
        exited_at.elapsed() >= Duration::from_micros(400) && exited_at.elapsed() < ms(2),
        "{:?}",
        exited_at.elapsed()
    );
    assert!(sim.kernel().open(pid).is_none());
    sleep(ms(30)).await;
    assert_eq!(state(&mut client, &id).await, ContainerRunning, "the runtime has not reported it yet");
    sleep(ms(20)).await;
    let (status, info) = client.status(&id).await.expect("status");
    assert_eq!((status.state(), status.exit_code, status.reason.as_str()), (ContainerExited, 3, "Error"));
    assert_eq!(status.finished_at, sim.clock().unix_ns(exited_at), "the time of the exit, not of the report");
    assert_eq!(info["pid"], 0);
}

#[tokio::test(start_paused = true)]
async fn events_carry_the_sandbox_and_all_its_containers() {
    let (_sim, mut client) = node();
    let mut events = client.events().await.expect("events");
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let id = client.launch(&pod, container("main", 0, "exit 0 10ms")).await.expect("launch");
    let mut seen = Vec::new();
    for _ in 0..5 {
        let event = events.message().await.expect("stream").expect("event");
        let states: Vec<_> = event.containers_statuses.iter().map(|status| status.state()).collect();
        let sandbox_id = event.pod_sandbox_status.as_ref().expect("sandbox").id.clone();
        assert_eq!(sandbox_id, pod);
        seen.push((event.container_event_type(), event.container_id == pod, states));
    }
    let expected = [
        (ContainerCreatedEvent, true, vec![]),
        (ContainerStartedEvent, true, vec![]),
        (ContainerCreatedEvent, false, vec![ContainerCreated]),
        (ContainerStartedEvent, false, vec![ContainerRunning]),
        (ContainerStoppedEvent, false, vec![ContainerExited]),
    ];
    assert_eq!(seen, expected);
    client.remove(&id).await.expect("remove");
    let event = events.message().await.expect("stream").expect("event");
    assert_eq!((event.container_event_type(), event.containers_statuses), (ContainerDeletedEvent, vec![]));
}

#[tokio::test(start_paused = true)]
async fn names_are_reserved_until_removal() {
    let (_sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let refused = client.run_sandbox(sandbox("web", 0)).await.expect_err("held");
    assert_eq!(refused.code(), Code::Unknown);
    let name = "web_default_web-uid_0";
    assert_eq!(
        refused.message(),
        format!("failed to reserve sandbox name {name:?}: name {name:?} is reserved for {pod:?}")
    );
    let id = client.launch(&pod, container("main", 0, "exit 0")).await.expect("launch");
    sleep(ms(100)).await;
    let refused = client.create(&pod, container("main", 0, "run")).await.expect_err("held by the exited one");
    let name = "main_web_default_web-uid_0";
    assert_eq!(
        refused.message(),
        format!("failed to reserve container name {name:?}: name {name:?} is reserved for {id:?}")
    );
    client.remove(&id).await.expect("remove");
    client.create(&pod, container("main", 0, "run")).await.expect("free again");
}

#[tokio::test(start_paused = true)]
async fn stop_sends_sigterm_then_sigkill_after_the_grace_period() {
    let (sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let polite = client.launch(&pod, container("polite", 0, "term 1s")).await.expect("launch");
    let stubborn = client.launch(&pod, container("stubborn", 0, "term ignore")).await.expect("launch");
    let begin = Instant::now();
    client.stop(&polite, 30).await.expect("stop");
    assert!((ms(1050)..ms(1080)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    assert_eq!(client.status(&polite).await.expect("status").0.exit_code, 0);
    let begin = Instant::now();
    client.stop(&stubborn, 7).await.expect("stop");
    assert!((ms(7050)..ms(7080)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    assert_eq!(client.status(&stubborn).await.expect("status").0.exit_code, 137);
    client.stop(&stubborn, 7).await.expect("stopping an exited container succeeds");
    client.stop("nowhere", 7).await.expect("stopping an unknown container succeeds");
    assert_eq!(sim.trace(Trace::live_count), 0);
}

#[tokio::test(start_paused = true)]
async fn stopping_a_sandbox_stops_its_containers() {
    let (sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let id = client.launch(&pod, container("main", 0, "term ignore")).await.expect("launch");
    client.stop_sandbox(&pod).await.expect("stop");
    assert_eq!(sim.sandboxes("web")[0].state(), v1::PodSandboxState::SandboxNotready);
    assert_eq!(client.status(&id).await.expect("status").0.exit_code, 137);
    let refused = client.launch(&pod, container("main", 1, "run")).await.expect_err("not ready");
    assert!(refused.message().contains("sandbox container is not running"), "{refused}");
    client.remove_sandbox(&pod).await.expect("remove");
    assert_eq!(client.status(&id).await.expect_err("removed").code(), Code::NotFound);
    assert_eq!(sim.kernel().alive(), 0);
}

#[tokio::test(start_paused = true)]
async fn failed_start_leaves_an_exited_container() {
    let (_sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let id = client.create(&pod, container("main", 0, "exit soon")).await.expect("create");
    let refused = client.start(&id).await.expect_err("malformed");
    assert!(refused.message().contains("exit: \"soon\" is not a number in range"), "{refused}");
    let (status, _) = client.status(&id).await.expect("status");
    assert_eq!((status.state(), status.exit_code, status.reason.as_str()), (ContainerExited, 128, "StartError"));
    let refused = client.start(&id).await.expect_err("only once");
    assert!(refused.message().contains("container is in CONTAINER_EXITED state"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn call_completes_after_the_client_timed_out() {
    let (sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let id = client.create(&pod, container("main", 0, "run")).await.expect("create");
    sim.faults(|f| f.add(CallFault::on(Method::StartContainer, FaultKind::Slow(ms(5000))).about("main_web")));
    timeout(ms(100), client.start(&id)).await.expect_err("slow");
    assert_eq!(state(&mut client, &id).await, ContainerCreated);
    sim.until("started after all", ms(6000), |l| l.live("web", "main").is_some()).await.expect("effect");
}

#[tokio::test(start_paused = true)]
async fn calls_fail_before_or_after_taking_effect() {
    let (sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    for (fault, created) in [
        (FaultKind::Fail(Code::Unknown, "no".to_owned()), 0),
        (FaultKind::FailAfter(Code::Unknown, "no".to_owned()), 1),
    ] {
        sim.faults(|f| f.add(CallFault::on(Method::CreateContainer, fault).times(1)));
        let refused = client.create(&pod, container("main", 0, "run")).await.expect_err("faulty");
        assert_eq!(refused.message(), "no");
        assert_eq!(sim.statuses("web").len(), created);
    }
    sim.faults(|f| f.add(CallFault::on(Method::ListContainers, FaultKind::Hang)));
    timeout(Duration::from_secs(3600), client.list(None)).await.expect_err("hangs");
    assert_eq!(sim.trace(|l| (l.count(Method::CreateContainer), l.count(Method::ListContainers))), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn restart_breaks_connections_and_misses_exits() {
    let (sim, mut client) = node();
    let mut events = client.events().await.expect("events");
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let victim = client.launch(&pod, container("victim", 0, "run")).await.expect("launch");
    let survivor = client.launch(&pod, container("survivor", 0, "run")).await.expect("launch");
    let half = client.create(&pod, container("half", 0, "run")).await.expect("create");
    let starting = tokio::spawn({
        let (mut client, half) = (client.clone(), half.clone());
        async move { client.start(&half).await }
    });
    sim.until("half started", ms(1000), |l| l.live("web", "half").is_some()).await.expect("process");
    sim.go_down();
    starting.await.expect("no panic").expect_err("cut off");
    client.status(&survivor).await.expect_err("down");
    sim.kill("web", "victim", Exit::Code(9)).expect("alive");
    sleep(ms(500)).await;
    sim.come_up(Recovery::default());
    while let Ok(Some(_)) = events.message().await {}
    let (status, _) = client.status(&victim).await.expect("reconnected");
    assert_eq!((status.state(), status.exit_code), (ContainerExited, 9));
    assert_eq!(state(&mut client, &survivor).await, ContainerRunning);
    assert_eq!(state(&mut client, &half).await, ContainerRunning, "its process has started");
    let mut events = client.events().await.expect("events");
    timeout(ms(1000), events.message()).await.expect_err("no event reports it");
}

#[tokio::test(start_paused = true)]
async fn restart_may_lose_exit_codes_and_replay_events() {
    let (sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let id = client.launch(&pod, container("main", 0, "exit 3 200ms")).await.expect("launch");
    sim.restart(ms(500), Recovery { lose_exit_codes: true, replay_events: 2 }).await;
    let (status, _) = client.status(&id).await.expect("reconnected");
    assert_eq!((status.exit_code, status.reason.as_str()), (255, "Unknown"));
    let mut events = client.events().await.expect("events");
    for kind in [ContainerCreatedEvent, ContainerStartedEvent] {
        assert_eq!(events.message().await.expect("stream").expect("old event").container_event_type(), kind);
    }
}

#[tokio::test(start_paused = true)]
async fn running_snapshot_may_be_stamped_after_the_exit() {
    let (sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let mut events = client.events().await.expect("events");
    for _ in 0..2 {
        events.message().await.expect("stream").expect("sandbox event");
    }
    let id = client.create(&pod, container("main", 0, "exit 0")).await.expect("create");
    events.message().await.expect("stream").expect("created event");
    sim.faults(|f| f.events = EventFaults { stale: 1.0, stale_by: ms(200), ..EventFaults::default() });
    let start = tokio::spawn({
        let (mut client, id) = (client.clone(), id.clone());
        async move { client.start(&id).await }
    });
    sim.until("exited", ms(1000), |l| l.history("web", "main").any(|i| i.exited.is_some())).await.expect("exit");
    start.await.expect("no panic").expect("start");
    sim.faults(|f| f.clear());
    let mut arrived = Vec::new();
    for _ in 0..2 {
        let event = events.message().await.expect("stream").expect("event");
        arrived.push((event.container_event_type(), event.containers_statuses[0].state(), event.created_at));
    }
    assert_eq!((arrived[0].0, arrived[0].1), (ContainerStoppedEvent, ContainerExited));
    assert_eq!((arrived[1].0, arrived[1].1), (ContainerStartedEvent, ContainerRunning));
    assert!(arrived[1].2 > arrived[0].2, "the stale snapshot has the newer stamp: {arrived:?}");
}

#[tokio::test(start_paused = true)]
async fn lists_filter_by_label_state_and_sandbox() {
    let (_sim, mut client) = node();
    let web = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let db = client.run_sandbox(sandbox("db", 0)).await.expect("sandbox");
    let runs = client.launch(&web, container("main", 0, "run")).await.expect("launch");
    let made = client.create(&db, container("main", 0, "run")).await.expect("create");
    let ids = async |client: &mut Client, filter: v1::ContainerFilter| -> Vec<String> {
        client.list(Some(filter)).await.expect("list").into_iter().map(|container| container.id).collect()
    };
    let state = Some(v1::ContainerStateValue { state: ContainerRunning.into() });
    assert_eq!(ids(&mut client, v1::ContainerFilter { state, ..Default::default() }).await, [runs]);
    let filter = v1::ContainerFilter { pod_sandbox_id: db, ..Default::default() };
    assert_eq!(ids(&mut client, filter).await, [made]);
    let label_selector = [("io.kubernetes.container.name".to_owned(), "other".to_owned())].into();
    assert!(ids(&mut client, v1::ContainerFilter { label_selector, ..Default::default() }).await.is_empty());
    assert_eq!(client.list(None).await.expect("list").len(), 2);
    let selector = [("io.kubernetes.pod.uid".to_owned(), "db-uid".to_owned())].into();
    let filter = Some(v1::PodSandboxFilter { label_selector: selector, ..Default::default() });
    let found = client.runtime.list_pod_sandbox(v1::ListPodSandboxRequest { filter }).await.expect("list");
    assert_eq!(found.into_inner().items.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn trace_detects_duplicates_and_decreasing_attempts() {
    let (sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    client.launch(&pod, container("main", 1, "run")).await.expect("launch");
    client.launch(&pod, container("side", 0, "run")).await.expect("launch");
    assert_eq!(sim.trace(|l| (l.duplicates().len(), l.fallen_attempts().len())), (0, 0));
    client.launch(&pod, container("main", 0, "run")).await.expect("nothing forbids it");
    let (twice, fallen) = sim.trace(|l| (l.duplicates().to_vec(), l.fallen_attempts().len()));
    assert_eq!((twice.len(), twice[0].container.as_str(), fallen), (1, "main", 1));
}

#[tokio::test(start_paused = true)]
async fn children_outlive_an_init_without_its_own_pid_namespace() {
    let (sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    for (name, mode, outlived) in
        [("own", v1::NamespaceMode::Container, false), ("host", v1::NamespaceMode::Node, true)]
    {
        let mut config = container(name, 0, "exit 1 10ms fork");
        let linux = config.linux.as_mut().and_then(|linux| linux.security_context.as_mut()).expect("set");
        linux.namespace_options = Some(v1::NamespaceOption { pid: mode.into(), ..Default::default() });
        client.launch(&pod, config).await.expect("launch");
        sim.until("init exited", ms(1000), |l| l.history("web", name).any(|i| i.exited.is_some())).await.expect("exit");
        sleep(ms(20)).await;
        assert_eq!(sim.trace(|l| l.live("web", name).is_some()), outlived, "{name}");
        sleep(ms(50)).await;
        assert!(sim.trace(|l| l.live("web", name).is_none()), "{name}: no process remains after the exit report");
    }
}

#[tokio::test(start_paused = true)]
async fn reused_pid_does_not_affect_an_open_pidfd() {
    let (sim, mut client) = node();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    client.launch(&pod, container("first", 0, "exit 0 50ms")).await.expect("launch");
    let pid = sim.trace(|l| l.live("web", "first").and_then(|i| i.pid)).expect("live");
    let pinned = sim.kernel().open(pid).expect("alive");
    sim.kernel().reuse(pid);
    sim.kernel().wait_gone(pid).await;
    let second = client.launch(&pod, container("second", 0, "run")).await.expect("launch");
    assert_eq!(sim.trace(|l| l.live("web", "second").and_then(|i| i.pid)), Some(pid));
    assert!(pinned.is_gone());
    assert_eq!(sim.kernel().open(pid).map(|pinned| pinned.container_id), Some(second));
}

#[tokio::test(start_paused = true)]
async fn oom_kills_are_reported_by_kernel_and_runtime() {
    let (sim, mut client) = node();
    let mut facts = sim.kernel().subscribe();
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let id = client.launch(&pod, container("main", 0, "oom 10ms")).await.expect("launch");
    let KernelFact::Oom(oom) = facts.recv().await.expect("fact") else { panic!("the OOM record comes first") };
    assert!(oom.init && oom.container_id == id);
    assert!(matches!(facts.recv().await, Ok(KernelFact::Exit(exit)) if exit.exit == Exit::Oom));
    sleep(ms(60)).await;
    let (status, _) = client.status(&id).await.expect("status");
    assert_eq!((status.exit_code, status.reason.as_str()), (137, "OOMKilled"));
    client.launch(&pod, container("main", 1, "run")).await.expect("launch");
    sim.oom_child("web", "main").expect("alive");
    assert!(matches!(facts.recv().await, Ok(KernelFact::Oom(oom)) if !oom.init));
    assert!(sim.trace(|l| l.live("web", "main").is_some()), "a child was killed, not the container");
}

#[tokio::test(start_paused = true)]
async fn images_are_pulled_and_looked_up() {
    let (sim, mut client) = node();
    sim.images(|images| images.publish("localhost/app:1", 7));
    let spec = |name: &str| Some(v1::ImageSpec { image: name.to_owned(), ..Default::default() });
    let status = v1::ImageStatusRequest { image: spec("localhost/app:1"), verbose: false };
    assert_eq!(client.images.image_status(status.clone()).await.expect("status").into_inner().image, None);
    let begin = Instant::now();
    let pull = |name| v1::PullImageRequest { image: spec(name), ..Default::default() };
    let reference = client.images.pull_image(pull("localhost/app:1")).await.expect("pull").into_inner().image_ref;
    assert_eq!(begin.elapsed(), ms(500));
    let image = client.images.image_status(status).await.expect("status").into_inner().image.expect("there now");
    assert_eq!((image.id, image.size), (reference, 7));
    let refused = client.images.pull_image(pull("localhost/none:1")).await.expect_err("unknown");
    assert_eq!(refused.code(), Code::NotFound);
    assert!(refused.message().starts_with("failed to pull and unpack image \"localhost/none:1\""), "{refused}");
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let mut config = container("main", 0, "run");
    config.image = spec("localhost/none:1");
    assert_eq!(client.create(&pod, config).await.expect_err("no image").code(), Code::NotFound);
}

#[tokio::test(start_paused = true)]
async fn features_differ_between_runtimes() {
    let (_sim, mut old) = node();
    let config = v1::RuntimeConfigRequest {};
    assert_eq!(old.runtime.runtime_config(config).await.expect_err("1.7").code(), Code::Unimplemented);
    let (_sim, mut new) = node_with(Options { features: Features::all(), ..Options::default() });
    let linux = new.runtime.runtime_config(config).await.expect("newest").into_inner().linux.expect("linux");
    assert_eq!(linux.cgroup_driver(), v1::CgroupDriver::Cgroupfs);
    let pod = new.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    new.launch(&pod, container("main", 0, "run")).await.expect("launch");
    let request = v1::StreamContainersRequest { filter: None };
    let mut pages = new.runtime.stream_containers(request).await.expect("stream").into_inner();
    assert_eq!(pages.message().await.expect("page").expect("one").containers.len(), 1);
    assert!(pages.message().await.expect("end").is_none());
}

#[tokio::test(start_paused = true)]
async fn simulates_thousands_of_containers_quickly() {
    let (sim, client) = node();
    let begin = std::time::Instant::now();
    let pods: Vec<_> = (0..500)
        .map(|pod| {
            let mut client = client.clone();
            tokio::spawn(async move {
                let pod = client.run_sandbox(sandbox(&format!("p{pod}"), 0)).await.expect("sandbox");
                for name in ["a", "b", "c", "d"] {
                    client.launch(&pod, container(name, 0, "run")).await.expect("launch");
                }
            })
        })
        .collect();
    for pod in pods {
        pod.await.expect("no panic");
    }
    assert_eq!(sim.trace(Trace::live_count), 2000);
    assert_eq!(client.clone().list(None).await.expect("list").len(), 2000);
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

async fn eventful_run(seed: u64) -> String {
    let (sim, mut client) = node_with(Options { seed, jitter: 0.2, ..Options::default() });
    let targets = [("web".to_owned(), "main".to_owned())];
    let faults = FaultSchedule::random(seed, Duration::from_secs(20), 12, &targets);
    let driver = tokio::spawn({
        let sim = sim.clone();
        async move { faults.run(&sim, async || {}).await }
    });
    for attempt in 0..20 {
        let give_up = async {
            let pod = client.run_sandbox(sandbox("web", attempt)).await?;
            client.launch(&pod, container("main", attempt, "exit 1 300ms")).await
        };
        // Results of calls do not matter: only the trace is compared.
        let _ = timeout(Duration::from_secs(1), give_up).await;
    }
    driver.await.expect("no panic");
    sim.trace(Trace::to_string)
}

#[tokio::test(start_paused = true)]
async fn same_seed_gives_the_same_trace() {
    let first = eventful_run(11).await;
    assert_eq!(first, eventful_run(11).await);
    assert_ne!(first, eventful_run(12).await);
}

#[tokio::test]
async fn unix_socket_endpoint_survives_runtime_restarts() {
    let folder = tempfile::tempdir().expect("folder");
    let path = folder.path().join("runtime.sock");
    let (sim, _) = node();
    let endpoint = sim.socket(&path).expect("bind");
    let address = format!("unix://{}", path.display());
    let channel = tonic::transport::Endpoint::from_shared(address).expect("address").connect_lazy();
    let mut client = Client::new(channel);
    let pod = client.run_sandbox(sandbox("web", 0)).await.expect("sandbox");
    let id = client.launch(&pod, container("main", 0, "run")).await.expect("launch");
    sim.go_down();
    client.status(&id).await.expect_err("down");
    let gone = async {
        while path.exists() {
            sleep(ms(2)).await
        }
    };
    timeout(Duration::from_secs(5), gone).await.expect("no socket while down");
    sim.come_up(Recovery::default());
    let back = async {
        while client.status(&id).await.is_err() {
            sleep(ms(2)).await
        }
    };
    timeout(Duration::from_secs(5), back).await.expect("served again");
    drop(endpoint);
    assert!(!path.exists());
}
