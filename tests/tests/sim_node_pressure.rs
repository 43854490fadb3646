//! Evictions on the whole agent: a node that is short of something ends one pod, says so in its status, and recovers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::Once;
use std::time::Duration;

use k8s_openapi::api::core::v1::EmptyDirVolumeSource;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use keblet::config::KubeletConfiguration;
use keblet::config::eviction::Signal;
use keblet::config::eviction::thresholds;
use keblet::eviction::DiskLayout;
use keblet::eviction::Garbage as _;
use keblet::eviction::Needs;
use keblet::eviction::Observe;
use keblet::eviction::Policy;
use keblet::eviction::Reading;
use keblet::eviction::Readings;
use keblet::eviction::Reclaim;
use keblet::model::Pod;
use keblet::model::PodUid;
use keblet::pipeline::NodeGarbage;
use keblet::stats::ContainerUsage;
use keblet::stats::PodUsage;
use keblet::stats::Used;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;
use tokio::time::sleep;
use tracing::field::Field;
use tracing::field::Visit;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::layer::SubscriberExt as _;

const SOON: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// What the node shows, as the test sets it. Clones share it.
#[derive(Clone, Default)]
struct Shown(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    signals: HashMap<Signal, (u64, u64)>,
    usage: HashMap<PodUid, PodUsage>,
    /// Where unused images and dead containers are removed, and what the node then has left on its disk.
    garbage: Option<(NodeGarbage, u64)>,
    reclaimed: Vec<Reclaim>,
}

impl Shown {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("not poisoned")
    }

    /// So many MiB, or so many process ids, are left of a thousand.
    fn left(&self, signal: Signal, number: u64) {
        let unit = if signal == Signal::PidAvailable { 1 } else { MIB };
        self.state().signals.insert(signal, (number * unit, 1000 * unit));
    }

    /// The pod uses so many MiB of memory.
    fn uses(&self, pod: &str, mib: u64) {
        let memory = Some(mib * MIB);
        let containers = [("main".to_owned(), ContainerUsage { memory, ..ContainerUsage::default() })].into();
        self.state().usage.insert(uid(pod), PodUsage { memory, containers, ..PodUsage::default() });
    }
}

impl Observe for Shown {
    async fn readings(&mut self) -> Readings {
        let at = Instant::now();
        let signed = |number: u64| i64::try_from(number).expect("small");
        let reading = |(signal, (available, capacity)): (&Signal, &(u64, u64))| {
            (*signal, Reading { available: signed(*available), capacity: signed(*capacity), at })
        };
        Readings { signals: self.state().signals.iter().map(reading).collect(), disks: Some(DiskLayout::Shared) }
    }

    async fn usage(&mut self, _: &[Pod], _: bool) -> Result<HashMap<PodUid, PodUsage>, String> {
        Ok(self.state().usage.clone())
    }

    async fn limited(&mut self, _: &[(Pod, Needs)]) -> Result<HashMap<PodUid, PodUsage>, String> {
        Ok(self.state().usage.clone())
    }

    async fn reclaim(&mut self, what: Reclaim) {
        let garbage = self.state().garbage.clone();
        if let Some((garbage, left)) = garbage {
            garbage.remove_dead_containers().await;
            garbage.remove_unused_images(secs(120)).await;
            self.left(Signal::NodeFsAvailable, left);
        }
        self.state().reclaimed.push(what);
    }
}

/// Evictions by these fields of the configuration.
fn policy(fields: Value) -> Policy {
    let mut document = json!({"evictionHard": {}, "enforceNodeAllocatable": ["none"]});
    let (Some(document_fields), Value::Object(fields)) = (document.as_object_mut(), fields) else { panic!("objects") };
    document_fields.extend(fields);
    let kubelet: KubeletConfiguration = serde_json::from_value(document).expect("a configuration");
    Policy {
        thresholds: thresholds(&kubelet, false),
        transition: kubelet.eviction_pressure_transition_period.std(),
        max_pod_grace: kubelet.eviction_max_pod_grace_period.into(),
        local_storage: true,
    }
}

fn hard_memory() -> Policy {
    policy(json!({"evictionHard": {"memory.available": "100Mi"}}))
}

fn uid(name: &str) -> PodUid {
    PodUid::from(format!("{name}-uid").as_str())
}

/// A pod of the API server that runs this program and requests so much memory.
fn requesting(name: &str, program: &str, memory: Option<&str>) -> Pod {
    let mut pod = ApiPod::clone(&pod(name).running("main", program).from_api().build());
    let container = &mut pod.spec.as_mut().expect("a spec").containers[0];
    let requests = memory.map(|memory| [("memory".to_owned(), Quantity(memory.to_owned()))].into());
    container.resources = Some(ResourceRequirements { requests, ..ResourceRequirements::default() });
    Arc::new(pod)
}

async fn until(sim: &SimRuntime, what: &str, condition: impl Fn(&Trace) -> bool) {
    if let Err(unmet) = sim.until(what, SOON, condition).await {
        panic!("{unmet}");
    }
}

async fn until_true(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < SOON, "not in time: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

fn reason(status: Option<&PodStatus>) -> Option<&str> {
    status.and_then(|status| status.reason.as_deref())
}

fn is_evicted(agent: &Agent, name: &str) -> bool {
    reason(agent.statuses.get(&uid(name)).as_ref()) == Some("Evicted")
}

thread_local! {
    /// Events of the test that this thread runs.
    static EVENTS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Keeps events, which the recorder logs. For the whole process: a subscriber of one thread may lose what another thread
/// logs first.
struct KeptEvents;

impl<S: tracing::Subscriber> Layer<S> for KeptEvents {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == "keblet::recorder" {
            let mut line = Line::default();
            event.record(&mut line);
            EVENTS.with_borrow_mut(|events| events.push(line.0));
        }
    }
}

/// Keeps the events of this test from now on.
fn keep_events() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let subscriber = tracing_subscriber::registry().with(KeptEvents);
        tracing::subscriber::set_global_default(subscriber).expect("there is no other");
    });
    EVENTS.with_borrow_mut(Vec::clear);
}

/// How many events have this reason.
fn events(reason: &str) -> usize {
    let reason = format!("reason={reason:?}");
    EVENTS.with_borrow(|events| events.iter().filter(|event| event.contains(&reason)).count())
}

#[derive(Default)]
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, "{field}={value:?} ");
    }
}

#[tokio::test(start_paused = true)]
async fn memory_pressure_evicts_the_pod_above_its_request() {
    keep_events();
    let (sim, folder) = node();
    let (api, shown) = (Api::default(), Shown::default());
    let pods = [requesting("web", "run", Some("900Mi")), requesting("batch", "term ignore", None)];
    let pods = pods.iter().map(|pod| api.put(pod)).collect();
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), pods, &api);
    until(&sim, "both run", |l| l.live_count() == 2).await;
    shown.left(Signal::MemoryAvailable, 500);
    shown.uses("web", 800);
    shown.uses("batch", 50);
    let (_wake, metrics) = agent.evict_by(hard_memory(), shown.clone());
    sleep(secs(30)).await;
    assert_eq!(sim.trace(Trace::live_count), 2, "nothing is short");

    shown.left(Signal::MemoryAvailable, 90);
    let begin = Instant::now();
    until(&sim, "batch has ended", |l| l.live("batch", "main").is_none()).await;
    // A poll after ten seconds at most, and one second of grace, which the program ignores.
    assert!(begin.elapsed() < secs(14), "{:?}", begin.elapsed());
    shown.left(Signal::MemoryAvailable, 140);
    assert!(agent.pressures.borrow().memory);

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
    shown.left(Signal::PidAvailable, 500);
    sleep(secs(1)).await;
    shown.left(Signal::PidAvailable, 50);
    wake.send(()).await.expect("it listens");
    let begin = Instant::now();
    until_true("evicted", || is_evicted(&agent, "web")).await;
    assert!(begin.elapsed() < Duration::from_millis(50), "{:?}", begin.elapsed());
    let text = metrics.render().expect("metrics");
    assert!(text.contains("keblet_eviction_decision_seconds_bucket{cause=\"pressure\",le=\"0.05\"} 1"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_node_under_memory_pressure_rejects_pods_without_requests() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), Vec::new());
    shown.left(Signal::MemoryAvailable, 50);
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
    shown.left(Signal::MemoryAvailable, 1);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    sleep(secs(120)).await;
    assert_eq!(sim.trace(Trace::live_count), 2);
    assert!(agent.pressures.borrow().memory);
}

/// Dead containers of pods that have terminated, and images that nobody uses, are removed before a pod is evicted.
#[tokio::test(start_paused = true)]
async fn a_full_disk_is_relieved_without_evicting_a_pod() {
    let (sim, folder) = node();
    sim.images(|images| images.store("unused", 300 * MIB));
    let shown = Shown::default();
    let done = Arc::new(ApiPod::clone(&pod("done").restarted("Never").running("main", "exit 0").from_api().build()));
    let pods = vec![requesting("web", "run", None), done];
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    until(&sim, "done", |l| l.live_count() == 1 && l.history("done", "main").count() == 1).await;
    sleep(secs(30)).await;
    agent.garbage.remove_unused_images(secs(120)).await;
    assert!(sim.trace(|l| l.count(Method::RemoveImage)) == 0, "the image is new to the agent");
    sleep(secs(150)).await;
    shown.left(Signal::NodeFsAvailable, 50);
    shown.state().garbage = Some((agent.garbage.clone(), 200));
    let _manager = agent.evict_by(policy(json!({"evictionHard": {"nodefs.available": "10%"}})), shown.clone());
    until_true("the image is removed", || sim.trace(|l| l.count(Method::RemoveImage)) == 1).await;
    sleep(secs(30)).await;
    assert_eq!(shown.state().reclaimed, [Reclaim { containers: true, images: true }]);
    assert!(sim.trace(|l| l.history("done", "main").all(|instance| instance.removed.is_some())));
    assert!(sim.trace(|l| l.live("web", "main").is_some()) && !is_evicted(&agent, "web"));
    assert!(agent.pressures.borrow().disk);
}

#[tokio::test(start_paused = true)]
async fn a_volume_above_its_limit_evicts_its_pod() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let with_limit = |name: &str| {
        let mut pod = ApiPod::clone(&requesting(name, "run", None));
        let empty_dir = EmptyDirVolumeSource { size_limit: Some(Quantity("1Mi".to_owned())), medium: None };
        let volume = Volume { name: "data".to_owned(), empty_dir: Some(empty_dir), ..Volume::default() };
        pod.spec.as_mut().expect("a spec").volumes = Some(vec![volume]);
        Arc::new(pod)
    };
    let pods = vec![with_limit("full"), with_limit("empty")];
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    until(&sim, "both run", |l| l.live_count() == 2).await;
    let volume = |bytes| [("data".to_owned(), Used { bytes, inodes: 2 })].into();
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
async fn one_pod_is_evicted_at_a_time() {
    let (sim, folder) = node();
    let shown = Shown::default();
    let names: Vec<String> = (0..5).map(|n| format!("p{n}")).collect();
    let pods = names.iter().map(|name| requesting(name, "term ignore", None)).collect();
    let mut agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods);
    until(&sim, "all run", |l| l.live_count() == 5).await;
    names.iter().zip(1..).for_each(|(name, n)| shown.uses(name, n * 10));
    shown.left(Signal::MemoryAvailable, 50);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    for left in [4, 3] {
        until(&sim, "another one ends", |l| l.live_count() == left).await;
        let evicted = names.iter().filter(|name| is_evicted(&agent, name)).count();
        assert_eq!(evicted, 5 - left, "the next one is chosen when nothing is left of the one before");
    }
    shown.left(Signal::MemoryAvailable, 500);
    sleep(secs(60)).await;
    let evicted: Vec<&str> = names.iter().filter(|name| is_evicted(&agent, name)).map(String::as_str).collect();
    assert!(evicted.len() <= 3 && evicted.contains(&"p4") && evicted.contains(&"p3"), "{evicted:?}");
}

#[tokio::test(start_paused = true)]
async fn an_eviction_while_the_api_server_is_away_is_told_when_it_is_back() {
    let (sim, folder) = node();
    let (api, shown) = (Api::default(), Shown::default());
    let web = api.put(&requesting("web", "run", None));
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    sleep(secs(5)).await;
    api.set_unavailable(true);
    shown.left(Signal::MemoryAvailable, 50);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    until(&sim, "it has ended", |l| l.live_count() == 0).await;
    shown.left(Signal::MemoryAvailable, 500);
    sleep(secs(120)).await;
    api.set_unavailable(false);
    let told = || api.pod("web").and_then(|pod| pod.status.clone());
    until_true("the API server knows", || reason(told().as_ref()) == Some("Evicted")).await;
    assert_eq!(sim.trace(|l| l.history("web", "main").count()), 1);
}

/// The agent is killed after its decision, before the pod has ended: the next one ends it, and its status says why.
#[tokio::test(start_paused = true)]
async fn an_agent_killed_during_an_eviction_finishes_it_when_it_is_started_again() {
    keep_events();
    let (sim, folder) = node();
    let (api, shown) = (Api::default(), Shown::default());
    let web = api.put(&requesting("web", "term ignore", None));
    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
    until(&sim, "it runs", |l| l.live_count() == 1).await;
    sleep(secs(5)).await;
    shown.left(Signal::MemoryAvailable, 50);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    until(&sim, "told to end", |l| l.count(Method::StopContainer) > 0).await;
    drop(agent);
    shown.left(Signal::MemoryAvailable, 500);
    sleep(secs(10)).await;
    let known = api.pod("web").expect("it is there");
    assert_eq!(reason(known.status.as_ref()), None, "nobody knows of the eviction");

    let mut agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![known], &api);
    let _manager = agent.evict_by(hard_memory(), shown.clone());
    let stored = || api.pod("web").and_then(|pod| pod.status.clone());
    until_true("the API server knows", || reason(stored().as_ref()) == Some("Evicted")).await;
    until(&sim, "nothing runs", |l| l.live_count() == 0).await;
    sleep(secs(700)).await;
    assert_eq!(sim.trace(Trace::live_count), 0);
    assert_eq!(events("Evicted"), 1);
}
