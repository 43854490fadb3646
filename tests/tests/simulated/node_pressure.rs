//! Evictions on the whole agent: a node that is short of something ends one pod, says so in its status, and recovers.

use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::EmptyDirVolumeSource;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use keblet::config::eviction::Signal;
use keblet::eviction::Reclaim;
use keblet::model::Pod;
use keblet::stats::FsUsage;
use keblet::stats::PodUsage;
use keblet::status::TerminationReason;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::shortage::*;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::json;
use tokio::time::Instant;
use tokio::time::sleep;
use tokio::time::sleep_until;
use tokio_util::sync::CancellationToken;

#[tokio::test(start_paused = true)]
async fn memory_pressure_evicts_the_pod_above_its_request() {
    keep_events();
    let (sim, folder) = node();
    let (api, shown) = (Api::default(), Shown::default());
    let pods = [requesting("web", "run", Some("900Mi")), requesting("batch", "term ignore", None)];
    let pods = pods.iter().map(|pod| api.put(pod)).collect();
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), pods, &api);
    until(&sim, "both run", |l| l.live_count() == 2).await;
    shown.set_available(Signal::MemoryAvailable, 500);
    shown.uses("web", 800);
    shown.uses("batch", 50);
    let (_wake, metrics) = agent.evict_by(hard_memory(), shown.clone());
    sleep(secs(30)).await;
    assert_eq!(sim.trace(Trace::live_count), 2, "nothing is short");

    shown.set_available(Signal::MemoryAvailable, 90);
    let begin = Instant::now();
    until(&sim, "batch has ended", |l| l.live("batch", "main").is_none()).await;
    // A poll after ten seconds at most, and one second of grace, which the program ignores.
    assert!(begin.elapsed() < secs(14), "{:?}", begin.elapsed());
    shown.set_available(Signal::MemoryAvailable, 140);
    assert!(agent.pressures.borrow().memory);
    assert!(shown.state().killed.is_empty(), "the runtime has stopped it");

    let stored = || api.pod("batch").and_then(|pod| pod.status.clone());
    until_true("the API server knows", || reason(stored().as_ref()) == Some("Evicted")).await;
    let status = stored().expect("a status");
    let message = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi. Container main was using \
                   50Mi, request is 0, has larger consumption of memory. ";
    assert_eq!((status.phase.as_deref(), status.message.as_deref()), (Some("Failed"), Some(message)));
    let conditions = status.conditions.iter().flatten();
    let disruption = conditions.clone().find(|condition| condition.type_ == "DisruptionTarget").expect("a condition");
    assert_eq!((disruption.status.as_str(), disruption.reason.as_deref()), ("True", Some("TerminationByKubelet")));
    assert_eq!(disruption.message.as_deref(), Some(message));

    let text = metrics.render().expect("metrics");
    assert!(text.contains("kubelet_evictions{eviction_signal=\"memory.available\"} 1\n"), "{text}");
    sleep(secs(290)).await;
    assert!(agent.pressures.borrow().memory, "the transition period is five minutes");
    sleep(secs(20)).await;
    assert!(!agent.pressures.borrow().memory);
    assert_eq!(sim.trace(|l| l.history("batch", "main").count()), 1, "it is not started again");
    assert!(sim.trace(|l| l.live("web", "main").is_some()));
    assert_eq!((events("EvictionThresholdMet"), events("Evicted")), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_notification_of_the_kernel_is_acted_on_at_once() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![requesting("web", "run", None)]);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    let (wake, metrics) = agent.evict_by(policy(json!({"evictionHard": {"pid.available": "100"}})), shown.clone());
    shown.set_available(Signal::PidAvailable, 500);
    sleep(secs(1)).await;
    shown.set_available(Signal::PidAvailable, 50);
    wake.send(Instant::now()).await.expect("it listens");
    let begin = Instant::now();
    until_true("evicted", || is_evicted(&agent, "web")).await;
    assert!(begin.elapsed() < Duration::from_millis(50), "{:?}", begin.elapsed());
    let text = metrics.render().expect("metrics");
    assert!(text.contains("keblet_eviction_decision_seconds_bucket{cause=\"pressure\",le=\"0.05\"} 1"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn usage_that_cannot_be_measured_is_measured_again_soon() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![requesting("web", "run", None)]);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    let (wake, _) = agent.evict_by(policy(json!({"evictionHard": {"pid.available": "100"}})), shown.clone());
    shown.set_available(Signal::PidAvailable, 500);
    sleep(secs(1)).await;
    shown.set_available(Signal::PidAvailable, 50);
    shown.state().unmeasurable = 3;
    wake.send(Instant::now()).await.expect("it listens");
    let begin = Instant::now();
    until_true("evicted", || is_evicted(&agent, "web")).await;
    // Pauses of 100, 200 and 400 ms.
    assert!(begin.elapsed() < secs(1), "{:?}", begin.elapsed());
}

/// The manager may be busy when the notification arrives.
#[tokio::test(start_paused = true)]
async fn a_decision_is_timed_from_the_arrival_of_its_notification() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![requesting("web", "run", None)]);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    let (wake, metrics) = agent.evict_by(policy(json!({"evictionHard": {"pid.available": "100"}})), shown.clone());
    shown.set_available(Signal::PidAvailable, 500);
    sleep(secs(5)).await;
    shown.set_available(Signal::PidAvailable, 50);
    wake.send(Instant::now() - secs(3)).await.expect("it listens");
    until_true("evicted", || is_evicted(&agent, "web")).await;
    let text = metrics.render().expect("metrics");
    for line in ["le=\"2\"} 0", "le=\"5\"} 1"] {
        let line = format!("keblet_eviction_decision_seconds_bucket{{cause=\"pressure\",{line}");
        assert!(text.contains(&line), "{line} is not in {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_under_memory_pressure_rejects_pods_without_requests() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), Vec::new());
    shown.set_available(Signal::MemoryAvailable, 50);
    let _manager = agent.evict_by(
        policy(json!({
            "evictionSoft": {"memory.available": "10%"}, "evictionSoftGracePeriod": {"memory.available": "1h"},
        })),
        shown.clone(),
    );
    until_true("under pressure", || agent.pressures.borrow().memory).await;
    agent.add(requesting("best-effort", "run", None)).await;
    agent.add(requesting("burstable", "run", Some("1Mi"))).await;
    agent.add(pod("static").running("main", "run").build()).await;
    until(&sim, "the others run", |l| l.live_count() == 2).await;
    let status = agent.statuses.get(&uid("best-effort")).expect("a status");
    assert_eq!((status.phase.as_deref(), reason(Some(&status))), (Some("Failed"), Some("Evicted")));
    assert_eq!(status.message.as_deref(), Some("Pod was rejected: The node had condition: [MemoryPressure]. "));
    assert!(sim.trace(|l| l.history("best-effort", "main").count()) == 0);
}

#[tokio::test(start_paused = true)]
async fn critical_pods_are_never_evicted() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let fixed = pod("static").running("main", "run").build();
    let mut critical = ApiPod::clone(&requesting("critical", "run", None));
    critical.spec.as_mut().expect("a spec").priority = Some(2_000_000_000);
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![fixed, Arc::new(critical)]);
    until(&sim, "both run", |l| l.live_count() == 2).await;
    shown.set_available(Signal::MemoryAvailable, 1);
    shown.state().unmeasurable = 1;
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    sleep(secs(120)).await;
    assert_eq!(sim.trace(Trace::live_count), 2);
    assert!(agent.pressures.borrow().memory);
    assert_eq!(shown.state().unmeasurable, 1, "usage of pods that are not evicted is not measured");
}

/// What is removed for a disk that holds everything, in this order.
const RECLAIMED: [Reclaim; 2] =
    [Reclaim { containers: true, images: false }, Reclaim { containers: false, images: true }];

/// Dead containers of pods that have terminated, and unused images, are removed before a pod is evicted.
#[tokio::test(start_paused = true)]
async fn a_full_disk_is_relieved_without_evicting_a_pod() {
    let (sim, folder) = node();
    sim.images(|images| images.store("unused", 300 * MIB));
    let shown = Shown::default();
    let done = Arc::new(ApiPod::clone(&pod("done").restarted("Never").running("main", "exit 0").from_api().build()));
    let pods = vec![requesting("web", "run", None), done];
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    until(&sim, "done", |l| l.live_count() == 1 && l.history("done", "main").count() == 1).await;
    sleep(secs(180)).await;
    assert!(sim.trace(|l| l.count(Method::RemoveImage)) == 0, "no threshold of image garbage collection is set");
    shown.set_available(Signal::NodeFsAvailable, 50);
    shown.state().garbage = Some((agent.garbage.clone(), 200));
    let _manager = agent.evict_by(policy(json!({"evictionHard": {"nodefs.available": "10%"}})), shown.clone());
    until_true("the image is removed", || sim.trace(|l| l.count(Method::RemoveImage)) == 1).await;
    sleep(secs(30)).await;
    assert_eq!(shown.state().reclaimed, RECLAIMED);
    assert!(sim.trace(|l| l.history("done", "main").all(|instance| instance.removed.is_some())));
    assert!(sim.trace(|l| l.live("web", "main").is_some()) && !is_evicted(&agent, "web"));
    assert!(agent.pressures.borrow().disk);
}

/// The runtime is slow to remove images, and to report the size of the files of containers.
#[tokio::test(start_paused = true)]
async fn what_precedes_an_eviction_for_a_disk_delays_none_for_memory() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let names = ["batch", "other", "full"];
    let pods = names.map(|name| requesting(name, "run", None)).to_vec();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    until(&sim, "all run", |l| l.live_count() == 3).await;
    shown.uses("batch", 60);
    shown.uses("other", 50);
    let volumes = [("data".to_owned(), FsUsage { bytes: 100 * MIB, inodes: 2 })].into();
    shown.state().usage.insert(uid("full"), PodUsage { memory: Some(MIB), volumes, ..PodUsage::default() });
    shown.state().relief_takes = secs(30);
    shown.set_available(Signal::MemoryAvailable, 500);
    shown.set_available(Signal::NodeFsAvailable, 50);
    let hard = json!({"evictionHard": {"memory.available": "100Mi", "nodefs.available": "10%"}});
    let _manager = agent.evict_by(policy(hard), shown.clone());
    let begin = Instant::now();
    for (name, moment) in [("batch", secs(10)), ("other", secs(40))] {
        sleep_until(begin + moment).await;
        shown.set_available(Signal::MemoryAvailable, 90);
        until(&sim, "it has ended", |l| l.live(name, "main").is_none()).await;
        assert!(begin.elapsed() < moment + secs(5), "{name}: {:?}", begin.elapsed());
        shown.set_available(Signal::MemoryAvailable, 500);
    }
    until(&sim, "the disk is relieved", |l| l.live_count() == 0).await;
    // Once all containers and images were removed and all files measured.
    assert!(begin.elapsed() >= secs(90), "{:?}", begin.elapsed());
    assert_eq!(shown.state().reclaimed, RECLAIMED);
}

/// The runtime hangs while an image is removed.
#[tokio::test(start_paused = true)]
async fn a_removal_that_hangs_delays_evictions_for_a_disk_and_is_not_begun_twice() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let pods = ["full", "next"].map(|name| requesting(name, "run", None)).to_vec();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    until(&sim, "both run", |l| l.live_count() == 2).await;
    for (name, mib) in [("full", 100), ("next", 50)] {
        let volumes = [("data".to_owned(), FsUsage { bytes: mib * MIB, inodes: 2 })].into();
        shown.state().usage.insert(uid(name), PodUsage { volumes, ..PodUsage::default() });
    }
    shown.state().relief_takes = secs(24 * 3600);
    shown.set_available(Signal::NodeFsAvailable, 50);
    let _manager = agent.evict_by(policy(json!({"evictionHard": {"nodefs.available": "10%"}})), shown.clone());
    let begin = Instant::now();
    sleep(secs(10)).await;
    // Files are measured at once, and another removal would end at once.
    shown.state().relief_takes = Duration::ZERO;
    for (moment, left) in [(115, 2), (135, 1), (235, 1), (275, 0)] {
        sleep_until(begin + secs(moment)).await;
        assert_eq!(sim.trace(Trace::live_count), left, "after {moment} s");
        assert_eq!(is_evicted(&agent, "full"), left < 2, "after {moment} s");
    }
    assert!(is_evicted(&agent, "next") && shown.state().reclaimed.is_empty());
}

/// What precedes an eviction for a disk takes longer than the pass that begins it waits.
#[tokio::test(start_paused = true)]
async fn it_is_logged_that_no_pod_can_be_evicted_for_a_disk_however_long_that_takes_to_find_out() {
    keep_events();
    let (sim, folder) = node();
    let shown = Shown::default();
    let mut critical = ApiPod::clone(&requesting("critical", "run", None));
    critical.spec.as_mut().expect("a spec").priority = Some(2_000_000_000);
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![Arc::new(critical)]);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    shown.uses("critical", 50);
    shown.state().relief_takes = secs(5);
    shown.set_available(Signal::NodeFsAvailable, 50);
    let _manager = agent.evict_by(policy(json!({"evictionHard": {"nodefs.available": "10%"}})), shown.clone());
    sleep(secs(60)).await;
    assert!(is_logged("critical pods are not evicted") && is_logged("there is no pod that could be evicted"));
    assert_eq!(sim.trace(Trace::live_count), 1);
}

/// With a volume `data` that may hold a MiB.
fn with_limit(name: &str) -> Pod {
    let mut pod = ApiPod::clone(&requesting(name, "run", None));
    let empty_dir = EmptyDirVolumeSource { size_limit: Some(Quantity("1Mi".to_owned())), medium: None };
    let volume = Volume { name: "data".to_owned(), empty_dir: Some(empty_dir), ..Volume::default() };
    pod.spec.as_mut().expect("a spec").volumes = Some(vec![volume]);
    Arc::new(pod)
}

#[tokio::test(start_paused = true)]
async fn files_that_were_counted_twice_evict_no_pod() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![with_limit("moving")]);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    let volumes = [("data".to_owned(), FsUsage { bytes: 2 * MIB, inodes: 2 })].into();
    shown.state().usage.insert(uid("moving"), PodUsage { volumes, ..PodUsage::default() });
    let recounted = |bytes| vec![("data".to_owned(), FsUsage { bytes, inodes: 2 })];
    shown.state().recounted.insert(uid("moving"), recounted(MIB));
    let _manager = agent.evict_by(policy(json!({})), shown.clone());
    sleep(secs(600)).await;
    assert!(!is_evicted(&agent, "moving") && sim.trace(|l| l.live("moving", "main").is_some()));
    shown.state().recounted.insert(uid("moving"), recounted(MIB + 1));
    let evicted = || is_evicted(&agent, "moving");
    let begin = Instant::now();
    while !evicted() {
        assert!(begin.elapsed() < secs(300 + 2 * 20 + 30), "it is counted again after a pause");
        sleep(secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_hangs_while_limits_are_checked_delays_no_eviction() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let pods = vec![with_limit("limited"), requesting("batch", "run", None)];
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    until(&sim, "both run", |l| l.live_count() == 2).await;
    shown.state().limits_hang = true;
    shown.uses("batch", 50);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    sleep(secs(30)).await;
    shown.set_available(Signal::MemoryAvailable, 90);
    until(&sim, "batch has ended", |l| l.live("batch", "main").is_none()).await;
    assert!(is_evicted(&agent, "batch"));
}

#[tokio::test(start_paused = true)]
async fn a_volume_above_its_limit_evicts_its_pod() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let pods = vec![with_limit("full"), with_limit("empty")];
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    until(&sim, "both run", |l| l.live_count() == 2).await;
    let volume = |bytes| [("data".to_owned(), FsUsage { bytes, inodes: 2 })].into();
    shown.state().usage.insert(uid("full"), PodUsage { volumes: volume(2 * MIB), ..PodUsage::default() });
    shown.state().usage.insert(uid("empty"), PodUsage { volumes: volume(MIB), ..PodUsage::default() });
    let (_wake, metrics) = agent.evict_by(policy(json!({})), shown.clone());
    until(&sim, "it has ended", |l| l.live("full", "main").is_none()).await;
    let status = agent.statuses.get(&uid("full")).expect("a status");
    assert_eq!(reason(Some(&status)), Some("Evicted"));
    assert_eq!(status.message.as_deref(), Some("Usage of EmptyDir volume \"data\" exceeds the limit \"1Mi\". "));
    assert!(status.conditions.iter().flatten().all(|condition| condition.type_ != "DisruptionTarget"));
    sleep(secs(60)).await;
    assert!(sim.trace(|l| l.live("empty", "main").is_some()));
    let text = metrics.render().expect("metrics");
    assert!(text.contains("kubelet_evictions{eviction_signal=\"emptydirfs.limit\"} 1\n"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn all_pods_above_their_limits_are_evicted_at_once() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![with_limit("full"), with_limit("fuller")]);
    until(&sim, "both run", |l| l.live_count() == 2).await;
    for name in ["full", "fuller"] {
        let volumes = [("data".to_owned(), FsUsage { bytes: 2 * MIB, inodes: 2 })].into();
        shown.state().usage.insert(uid(name), PodUsage { volumes, ..PodUsage::default() });
    }
    sim.faults(|faults| faults.add(CallFault::on(Method::StopContainer, FaultKind::Hang)));
    let _manager = agent.evict_by(policy(json!({})), shown.clone());
    // Their files are counted for 20 s, and neither pod ends within 30 s.
    sleep(secs(30)).await;
    assert!(is_evicted(&agent, "full") && is_evicted(&agent, "fuller"));
    let mut killed: Vec<_> = shown.state().killed.iter().map(|(pod, _)| pod.clone()).collect();
    killed.sort();
    assert_eq!(killed, [uid("full"), uid("fuller")], "the runtime has not stopped them in time");
}

#[tokio::test(start_paused = true)]
async fn the_memory_of_pods_that_are_evicted_together_is_waited_for_at_the_same_time() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let pods = vec![with_limit("full"), with_limit("fuller"), requesting("batch", "run", None)];
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    until(&sim, "all run", |l| l.live_count() == 3).await;
    for name in ["full", "fuller"] {
        let volumes = [("data".to_owned(), FsUsage { bytes: 2 * MIB, inodes: 2 })].into();
        shown.state().usage.insert(uid(name), PodUsage { volumes, ..PodUsage::default() });
        shown.state().held.insert(uid(name), MIB);
    }
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    until(&sim, "both have ended", |l| l.live_count() == 1).await;
    shown.uses("batch", 50);
    shown.set_available(Signal::MemoryAvailable, 50);
    let begin = Instant::now();
    until_true("evicted", || is_evicted(&agent, "batch")).await;
    assert!((secs(25)..secs(45)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn one_pod_is_evicted_at_a_time() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let names: Vec<String> = (0..5).map(|n| format!("p{n}")).collect();
    let pods = names.iter().map(|name| requesting(name, "term ignore", None)).collect();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    until(&sim, "all run", |l| l.live_count() == 5).await;
    names.iter().zip(1..).for_each(|(name, n)| shown.uses(name, n * 10));
    shown.set_available(Signal::MemoryAvailable, 50);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    for left in [4, 3] {
        until(&sim, "another one ends", |l| l.live_count() == left).await;
        let evicted = names.iter().filter(|name| is_evicted(&agent, name)).count();
        assert_eq!(evicted, 5 - left, "the next one is chosen when nothing is left of the one before");
    }
    shown.set_available(Signal::MemoryAvailable, 500);
    sleep(secs(60)).await;
    let evicted: Vec<&str> = names.iter().filter(|name| is_evicted(&agent, name)).map(String::as_str).collect();
    assert!(evicted.len() <= 3 && evicted.contains(&"p4") && evicted.contains(&"p3"), "{evicted:?}");
}

#[tokio::test(start_paused = true)]
async fn an_eviction_while_the_api_server_is_away_is_reported_when_it_is_back() {
    let mut web = WebNode::start("run").await;
    let _manager = web.evict_unreported().await;
    sleep(secs(120)).await;
    web.api.set_unavailable(false);
    let stored = || web.api.pod("web").and_then(|pod| pod.status.clone());
    until_true("the API server has it", || reason(stored().as_ref()) == Some("Evicted")).await;
    assert_eq!(web.sim.trace(|l| l.history("web", "main").count()), 1);
}

/// The folder of the agent is on a disk that blocks. In real time, as a call that hangs stops a paused clock.
#[tokio::test]
async fn a_disk_that_blocks_delays_no_eviction() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![requesting("web", "run", None)]);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    let partial = folder.path().join("evictions.partial");
    mkfifo(&partial, Mode::S_IRWXU).expect("a pipe");
    shown.set_available(Signal::MemoryAvailable, 50);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    let stopped = sim.until("the agent stops it", secs(20), |l| l.count(Method::StopContainer) > 0).await;
    // Lets the write go on, which the end of the test waits for, and later ones find no pipe.
    let reader = std::fs::File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(&partial);
    let _ = std::fs::remove_file(&partial);
    drop(reader.expect("opened for reading"));
    if let Err(unmet) = stopped {
        panic!("{unmet}");
    }
}

/// A runtime that cannot stop the pod, as on a node that has no memory left for it to start a program.
#[tokio::test(start_paused = true)]
async fn an_evicted_pod_that_the_runtime_does_not_stop_in_time_is_killed() {
    let (sim, folder) = node();
    let (api, shown) = (Api::default(), Shown::default());
    let pods = vec![api.put(&requesting("web", "run", None))];
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), pods, &api);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    sim.faults(|faults| faults.add(CallFault::on(Method::StopContainer, FaultKind::Hang)));
    shown.uses("web", 800);
    shown.set_available(Signal::MemoryAvailable, 50);
    let begin = Instant::now();
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    until_true("it is killed", || !shown.state().killed.is_empty()).await;
    let killed = shown.state().killed.clone();
    assert_eq!(killed.iter().map(|(pod, _)| pod.clone()).collect::<Vec<_>>(), [uid("web")]);
    // One second of grace, and the shortest timeouts of two stops.
    let after = killed[0].1.duration_since(begin);
    assert!((secs(5)..secs(6)).contains(&after), "{after:?}");
    assert_eq!(shown.state().suspended, [uid("web")], "it took no more memory meanwhile");
}

/// A pod that is being stopped has had its signal, and needs its processes to end.
#[tokio::test(start_paused = true)]
async fn a_pod_that_is_being_stopped_is_not_suspended() {
    let (sim, folder) = node();
    let (api, shown) = (Api::default(), Shown::default());
    let pods = vec![api.put(&requesting("web", "term ignore", None))];
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), pods, &api);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    let reason = TerminationReason { reason: "Preempted", message: String::new(), disruption: None };
    agent.evictions.evict(uid("web"), reason, Some(30), CancellationToken::new()).await.expect("the agent runs");
    until(&sim, "the agent stops it", |l| l.count(Method::StopContainer) > 0).await;
    shown.uses("web", 800);
    shown.set_available(Signal::MemoryAvailable, 50);
    let begin = Instant::now();
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    until(&sim, "it has ended", |l| l.live_count() == 0).await;
    assert!(begin.elapsed() < secs(5), "its eviction has shortened the grace period: {:?}", begin.elapsed());
    assert_eq!(shown.state().suspended, []);
}
