//! Calls that the other tests do not refuse: pulls, commands in containers, and those of image garbage collection, with the
//! calls and log lines of each minute.

use keblet::config::eviction::Signal;
use keblet::eviction::Garbage as _;
use keblet::model::Pod;
use keblet_tests::node::PodOf;
use keblet_tests::node::folder;
use keblet_tests::node::shortage::Shown;
use keblet_tests::node::shortage::policy;
use serde_json::Value;
use serde_json::json;

use super::*;

/// The pod with these fields in its container.
fn with(pod: PodOf, fields: &Value) -> Pod {
    let mut object = serde_json::to_value(&*pod.build()).expect("a pod");
    let container = object["spec"]["containers"][0].as_object_mut().expect("a container");
    container.extend(fields.as_object().expect("fields").clone());
    Arc::new(serde_json::from_value(object).expect("a pod"))
}

/// The agent with this pod while the runtime refuses `method` from the start; 20 minutes.
async fn refused(sim: &SimRuntime, method: Method, pod: Pod) -> ByMinute {
    let warnings = Warnings::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
    refuse(sim, method);
    let folder = folder();
    let recorder = Recorder::logging("sim");
    let _agent = Agent::start_with_recorder(sim, SensorSet::ALL, folder.path(), vec![pod], recorder);
    ByMinute::observe(sim, method, &warnings, 20).await
}

/// The back-off of image pulls: 10 s, doubling to five minutes.
#[tokio::test(start_paused = true)]
async fn a_pull_that_is_refused_for_ever_is_repeated_with_growing_pauses() {
    let sim = SimRuntime::new(Options::default());
    sim.images(|images| images.publish("busybox", 1 << 20));
    let observed = refused(&sim, Method::PullImage, pod("web").running("main", "run").build()).await;
    let calls = [observed.calls(0..1), observed.calls(0..10), observed.calls(10..20)];
    assert!((2..=4).contains(&calls[0]) && (4..=8).contains(&calls[1]) && (1..=3).contains(&calls[2]), "{calls:?}");
    assert!((1..=2).contains(&observed.refusals().len()), "{:#?}", observed.refusals());
    observed.assert_reported(true);
}

/// The container is stopped each time, and started again after its crash-loop back-off.
#[tokio::test(start_paused = true)]
async fn a_post_start_hook_that_is_refused_for_ever_is_repeated_with_growing_pauses() {
    let (sim, _folder) = node();
    let hook = json!({"lifecycle": {"postStart": {"exec": {"command": ["hook"]}}}});
    let observed = refused(&sim, Method::ExecSync, with(pod("web").running("main", "term 100ms"), &hook)).await;
    let calls = [observed.calls(0..1), observed.calls(0..10), observed.calls(10..20)];
    assert!((2..=5).contains(&calls[0]) && (4..=9).contains(&calls[1]) && (1..=3).contains(&calls[2]), "{calls:?}");
    let late: Vec<_> = observed.lines[10..].iter().flatten().collect();
    assert!(late.len() <= 3, "{late:#?}");
}

/// A run of a probe makes three attempts, as a kubelet's, and the next run follows a period later: 10 s.
#[tokio::test(start_paused = true)]
async fn a_probe_that_is_refused_for_ever_is_run_once_in_its_period_and_logged_once() {
    let (sim, _folder) = node();
    let probe = json!({"livenessProbe": {"exec": {"command": ["check"]}}});
    let observed = refused(&sim, Method::ExecSync, with(pod("web").running("main", "run"), &probe)).await;
    assert!(observed.calls.iter().all(|calls| (12..=21).contains(calls)), "{:?}", observed.calls);
    assert!(observed.refusals().len() <= 2, "{:#?}", observed.refusals());
    observed.assert_reported(false);
    let instances = sim.trace(|trace| trace.history("web", "main").count());
    assert_eq!(instances, 1, "an outcome that is not known restarts nothing");
}

#[tokio::test(start_paused = true)]
async fn a_pre_stop_hook_that_is_refused_is_not_repeated() {
    let warnings = Warnings::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
    let (sim, folder) = node();
    refuse(&sim, Method::ExecSync);
    let hook = json!({"lifecycle": {"preStop": {"exec": {"command": ["hook"]}}}});
    let web = with(pod("web").running("main", "term 100ms"), &hook);
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
    until(&sim, "it runs", |trace| trace.live("web", "main").is_some()).await;
    agent.remove(web).await;
    let observed = ByMinute::observe(&sim, Method::ExecSync, &warnings, 10).await;
    assert_eq!(observed.calls(0..10), 1);
    assert!(observed.refusals().len() <= 2, "{:#?}", observed.refusals());
    observed.assert_reported(false);
    assert!(sim.sandboxes("web").is_empty(), "{}", sim.trace(Trace::to_string));
}

/// There is a pass every five minutes.
#[tokio::test(start_paused = true)]
async fn calls_of_image_garbage_collection_are_made_once_in_a_pass_and_logged_once() {
    for (method, most) in [(Method::ListImages, 13), (Method::ImageFsInfo, 13), (Method::RemoveImage, 26)] {
        let warnings = Warnings::default();
        let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
        let (sim, folder) = node();
        sim.images(|images| images.store("unused:1", 1 << 20));
        refuse(&sim, method);
        let policy = GcPolicy { high: 85, max_age: minutes(10), ..GcPolicy::default() };
        let _agent = Agent::start_collecting_images(&sim, SensorSet::ALL, folder.path(), Vec::new(), policy);
        let observed = ByMinute::observe(&sim, method, &warnings, 60).await;
        let calls = observed.calls(0..60);
        assert!((10..=most).contains(&calls), "{method:?}: {calls} calls in an hour");
        assert!(observed.calls.iter().all(|calls| *calls <= most / 12), "{method:?}: {:?}", observed.calls);
        let refusals = observed.refusals();
        assert!((1..=3).contains(&refusals.len()), "{method:?}: {refusals:#?}");
        observed.assert_reported(false);
    }
}

/// The eviction manager requests it again and again while the node is short of disk space.
#[tokio::test(start_paused = true)]
async fn garbage_that_cannot_be_removed_from_a_full_disk_is_logged_once() {
    let warnings = Warnings::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
    let ((sim, folder), api) = (node(), Api::default());
    sim.images(|images| images.store("unused:1", 1 << 20));
    let web = api.put(&pod("web").restarted("Never").running("main", "exit 0 5s").from_api().build());
    let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
    sleep(Duration::from_secs(30)).await;
    agent.update(api.pod("web").expect("the pod")).await;
    sleep(Duration::from_secs(10)).await;
    refuse(&sim, Method::RemoveContainer);
    refuse(&sim, Method::RemoveImage);
    warnings.take();
    for _ in 0..30 {
        agent.garbage.remove_dead_containers().await;
        agent.garbage.remove_unused_images(Duration::ZERO).await;
        sleep(Duration::from_secs(10)).await;
    }
    let calls = [Method::RemoveContainer, Method::RemoveImage].map(|method| sim.trace(|trace| trace.count(method)));
    assert!(calls.iter().all(|calls| *calls >= 30), "{calls:?}");
    let mut logged = warnings.take();
    logged.retain(|line| line.contains("operation failed operation=\"reclaim_disk\""));
    assert_eq!(logged.len(), 2, "one for the containers, one for the images: {logged:#?}");
}

/// In between the node has space, and nothing is tried.
#[tokio::test(start_paused = true)]
async fn garbage_that_cannot_be_removed_in_two_shortages_is_not_reported_as_stuck() {
    let warnings = Warnings::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
    let ((sim, folder), shown) = (node(), Shown::default());
    sim.images(|images| images.store("unused:1", 1 << 20));
    refuse(&sim, Method::RemoveImage);
    let recorder = Recorder::logging("sim");
    let mut agent = Agent::start_with_recorder(&sim, SensorSet::ALL, folder.path(), Vec::new(), recorder);
    // Each removal ends the shortage, as if pods had deleted files.
    shown.state().garbage = Some((agent.garbage.clone(), 200));
    shown.set_available(Signal::NodeFsAvailable, 200);
    let hard = json!({"evictionHard": {"nodefs.available": "10%"}});
    let _manager = agent.evict_by(policy(hard), shown.clone());
    sleep(minutes(5)).await;
    for shortage in 1..=2 {
        shown.set_available(Signal::NodeFsAvailable, 50);
        sleep(minutes(20)).await;
        let logged = warnings.take();
        let count = |text: &str| logged.iter().filter(|line| line.contains(text)).count();
        let failed = count("operation failed operation=\"reclaim_disk\"");
        assert!((1..=2).contains(&failed), "{shortage}: {logged:#?}");
        assert_eq!(count("OperationStuck"), 0, "{shortage}: {logged:#?}");
    }
}
