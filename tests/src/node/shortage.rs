//! A node short of a resource, with signals that the test sets for the eviction manager, and the states that the tests of
//! evictions wait for.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::time::Duration;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use keblet::cgroups::memory_high::Raise;
use keblet::cgroups::memory_high::Raised;
use keblet::cgroups::usage::Pressure;
use keblet::cgroups::usage::PressureLine;
use keblet::config::KubeletConfiguration;
use keblet::config::eviction::Signal;
use keblet::config::eviction::thresholds;
use keblet::config::pressure::PressureSettings;
use keblet::eviction::DiskLayout;
use keblet::eviction::Garbage as _;
use keblet::eviction::Manager;
use keblet::eviction::Needs;
use keblet::eviction::NodePods;
use keblet::eviction::Observe;
use keblet::eviction::Parts;
use keblet::eviction::Policy;
use keblet::eviction::Reading;
use keblet::eviction::Readings;
use keblet::eviction::Reclaim;
use keblet::metrics::Metrics;
use keblet::model::Pod;
use keblet::model::PodUid;
use keblet::model::pod_ref;
use keblet::pipeline::NodeGarbage;
use keblet::pressure::NodeSample;
use keblet::pressure::PodSample;
use keblet::recorder::Recorder;
use keblet::stats::ContainerUsage;
use keblet::stats::PodUsage;
use keblet::stats::Sizes;
use serde_json::Value;
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio::time::sleep;

use super::Agent;
use super::Api;
use super::SensorSet;
use super::node;
use super::pod;
use crate::cri::SimRuntime;
use crate::cri::Trace;

pub use super::kept_events::events;
pub use super::kept_events::is_logged;
pub use super::kept_events::keep_events;
pub use super::kept_events::logged;

/// The longest time that a test waits.
pub const SOON: Duration = Duration::from_secs(60);
/// Bytes of a mebibyte.
pub const MIB: u64 = 1 << 20;

/// So many seconds.
pub const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// What the node shows, as the test sets it. Clones share it.
#[derive(Clone, Default)]
pub struct Shown(Arc<Mutex<State>>);

/// What is shown.
#[derive(Default)]
pub struct State {
    /// Available and capacity.
    pub signals: HashMap<Signal, (u64, u64)>,
    /// By pod.
    pub usage: HashMap<PodUid, PodUsage>,
    /// Sizes of volumes by pod, as a count without a pause finds them; of other pods it finds what `usage` has.
    pub recounted: Sizes,
    /// The runtime does not answer what the files of containers use.
    pub limits_hang: bool,
    /// Where unused images and dead containers are removed, and what the node then has left on its disk.
    pub garbage: Option<(NodeGarbage, u64)>,
    /// What was removed.
    pub reclaimed: Vec<Reclaim>,
    /// How tasks wait for memory; without PSI nothing is known.
    pub stall: Option<Stall>,
    /// Why pods wait.
    pub waiting: Vec<PodSample>,
    /// When containers of pods were created, in nanoseconds since the Unix epoch.
    pub created: HashMap<PodUid, Vec<i64>>,
    /// Bytes charged to the cgroups of pods.
    pub held: HashMap<PodUid, u64>,
    /// Pods whose processes were suspended.
    pub suspended: Vec<PodUid>,
    /// Pods whose processes were killed past the runtime, and when.
    pub killed: Vec<(PodUid, Instant)>,
    /// Values of `memory.high`.
    pub raised: Vec<Raise>,
    /// Why `memory.high` cannot be written.
    pub raise_refused: Option<String>,
    /// So many measurements of usage fail.
    pub unmeasurable: u32,
    /// How long it takes to read the signals.
    pub reading_takes: Duration,
    /// How long it takes to remove what no pod needs, and to measure usage of disks.
    pub relief_takes: Duration,
}

/// Waiting of all tasks, and pages that the node has reclaimed.
#[derive(Clone, Copy)]
pub struct Stall {
    since: Instant,
    micros: u64,
    /// Percent of the time from `since` on.
    percent: u64,
    scanned: u64,
}

impl Stall {
    fn micros_now(&self) -> u64 {
        let passed = u64::try_from(self.since.elapsed().as_micros()).expect("short");
        self.micros + passed * self.percent / 100
    }
}

impl Shown {
    /// What is shown now.
    ///
    /// # Panics
    /// Another holder has panicked.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("not poisoned")
    }

    /// So many MiB, or so many process ids, are left of a thousand.
    pub fn set_available(&self, signal: Signal, number: u64) {
        let unit = if signal == Signal::PidAvailable { 1 } else { MIB };
        self.state().signals.insert(signal, (number * unit, 1000 * unit));
    }

    /// From now on tasks wait for memory for so many percent of the time; `reclaims`: because the node is short of it.
    pub fn stalls(&self, percent: u64, reclaims: bool) {
        let before = self.state().stall;
        let micros = before.map_or(0, |stall| stall.micros_now());
        let scanned = before.map_or(0, |stall| stall.scanned);
        self.state().stall =
            Some(Stall { since: Instant::now(), micros, percent, scanned: if reclaims { scanned.max(1) } else { 0 } });
    }

    /// Tasks wait for memory now.
    pub fn is_stalled(&self) -> bool {
        self.state().stall.is_some_and(|stall| stall.percent > 0)
    }

    /// The pod holds so many MiB of memory, and requests so many.
    pub fn holds(&self, pod: &str, mib: u64, requested: u64) {
        let (working_set, requested) = (mib * MIB, requested * MIB);
        let sample =
            PodSample { uid: uid(pod), name: format!("ns/{pod}"), working_set, requested, ..PodSample::default() };
        self.state().waiting.push(sample);
        self.uses(pod, mib);
    }

    /// The pod uses so many MiB of memory.
    pub fn uses(&self, pod: &str, mib: u64) {
        let memory = Some(mib * MIB);
        let containers = [("main".to_owned(), ContainerUsage { memory, ..ContainerUsage::default() })].into();
        self.state().usage.insert(uid(pod), PodUsage { memory, containers, ..PodUsage::default() });
    }
}

/// No sleep is shorter than a millisecond.
async fn take(duration: Duration) {
    if !duration.is_zero() {
        sleep(duration).await;
    }
}

impl Observe for Shown {
    async fn readings(&mut self) -> Readings {
        let takes = self.state().reading_takes;
        take(takes).await;
        let at = Instant::now();
        let signed = |number: u64| i64::try_from(number).expect("small");
        let reading = |(signal, (available, capacity)): (&Signal, &(u64, u64))| {
            (*signal, Reading { available: signed(*available), capacity: signed(*capacity), at })
        };
        Readings { signals: self.state().signals.iter().map(reading).collect(), disks: Some(DiskLayout::Shared) }
    }

    fn usage(&mut self, _: &[Pod], with_disks: bool) -> BoxFuture<'static, Result<HashMap<PodUid, PodUsage>, String>> {
        let mut state = self.state();
        let takes = if with_disks { state.relief_takes } else { Duration::ZERO };
        let usage = match state.unmeasurable.checked_sub(1) {
            Some(left) => {
                state.unmeasurable = left;
                Err("the runtime does not answer".to_owned())
            }
            None => Ok(state.usage.clone()),
        };
        Box::pin(async move {
            take(takes).await;
            usage
        })
    }

    fn limited(&mut self, _: &[(Pod, Needs)]) -> BoxFuture<'static, Result<HashMap<PodUid, PodUsage>, String>> {
        let state = self.state();
        let (usage, hangs) = (state.usage.clone(), state.limits_hang);
        Box::pin(async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            Ok(usage)
        })
    }

    fn recount(&mut self, pod: &Pod) -> BoxFuture<'static, Sizes> {
        let uid = PodUid::from(pod.metadata.uid.as_deref().expect("a UID"));
        let sizes = self.state().recounted.get(&uid).cloned().map(|sizes| (uid, sizes));
        Box::pin(async move {
            sleep(secs(20)).await;
            sizes.into_iter().collect()
        })
    }

    fn reclaim(&mut self, what: Reclaim) -> BoxFuture<'static, ()> {
        let shown = self.clone();
        let garbage = self.state().garbage.clone();
        let takes = self.state().relief_takes;
        Box::pin(async move {
            take(takes).await;
            if let Some((garbage, left)) = garbage {
                garbage.remove_dead_containers().await;
                garbage.remove_unused_images(secs(120)).await;
                shown.set_available(Signal::NodeFsAvailable, left);
            }
            shown.state().reclaimed.push(what);
        })
    }

    fn disks_suffice(&mut self) {
        if let Some((garbage, _)) = &self.state().garbage {
            garbage.is_not_needed();
        }
    }

    async fn held(&mut self, pod: &Pod) -> Option<u64> {
        self.state().held.get(pod.metadata.uid.as_deref().expect("a UID")).copied()
    }

    fn suspend(&mut self, pod: &Pod, _: Duration) {
        self.state().suspended.push(pod_ref(pod).uid);
    }

    async fn kill(&mut self, pod: &Pod) {
        self.state().killed.push((pod_ref(pod).uid, Instant::now()));
    }

    async fn created(&mut self, uid: &PodUid) -> Result<Vec<i64>, String> {
        Ok(self.state().created.get(uid).cloned().unwrap_or_default())
    }

    async fn pressure(&mut self, available: Option<u64>) -> Option<NodeSample> {
        let mut state = self.state();
        let pressure = state.stall.as_mut().map(|stall| {
            stall.scanned += u64::from(stall.scanned > 0);
            let line = PressureLine { total: stall.micros_now(), ..PressureLine::default() };
            (Pressure { some: line, full: line }, stall.scanned)
        });
        let (node, scanned) = (pressure.map(|(node, _)| node), pressure.map_or(0, |(_, scanned)| scanned));
        Some(NodeSample {
            at: Instant::now(),
            node,
            kubepods: None,
            scanned,
            refaulted: 0,
            limit_hits: None,
            available,
        })
    }

    async fn pressure_of(&mut self, pods: &[Pod]) -> Vec<PodSample> {
        let lives =
            |sample: &&PodSample| pods.iter().any(|pod| pod.metadata.uid.as_deref() == Some(sample.uid.as_str()));
        self.state().waiting.iter().filter(lives).cloned().collect()
    }

    async fn raise(&mut self, raises: &[Raise]) -> Raised {
        let mut state = self.state();
        if let Some(refusal) = state.raise_refused.clone() {
            return Raised { written: 0, refusal: Some(refusal) };
        }
        state.raised.extend_from_slice(raises);
        Raised { written: raises.len(), refusal: None }
    }
}

impl Agent {
    /// Starts an eviction manager with this view of the node, which ends with the agent. If the agent was started just before,
    /// its sync loop begins when the manager is prepared, as on a real node. Returns what wakes it, and its metrics.
    pub fn evict_by(&mut self, policy: Policy, observe: impl Observe) -> (mpsc::Sender<Instant>, Arc<Metrics>) {
        let (wake, woken) = mpsc::channel(1);
        let metrics = Metrics::new();
        let prepared = Manager::prepare(Parts {
            policy,
            observe,
            pods: NodePods {
                registry: self.running.registry.clone(),
                evictions: self.evictions.clone(),
                statuses: self.statuses.clone(),
                desired: self.desired.clone(),
            },
            journal: self.running.journal.clone(),
            wake: woken,
            memory_events: mpsc::channel(1).1,
            clock: self.clock,
            pressures: self.pressures.clone(),
            recorder: Recorder::logging("sim"),
            metrics: metrics.clone(),
        });
        let (preparing, shutdown) = (self.preparing.clone(), self.shutdown.clone());
        preparing.send_replace(true);
        self.tasks.spawn(async move {
            let manager = prepared.await;
            preparing.send_replace(false);
            manager.run(shutdown).await;
        });
        (wake, metrics)
    }
}

/// A node of a cluster on which an agent runs the pod `web`.
pub struct WebNode {
    /// Its runtime.
    pub sim: SimRuntime,
    /// The agent's folder.
    pub folder: TempDir,
    /// The API server.
    pub api: Api,
    /// What the node will show to an eviction manager.
    pub shown: Shown,
    /// The agent.
    pub agent: Agent,
}

impl WebNode {
    /// Starts the pod with this program, and waits until its status is sent.
    ///
    /// # Panics
    /// It does not run in time.
    pub async fn start(program: &str) -> Self {
        let (sim, folder) = node();
        let (api, shown) = (Api::default(), Shown::default());
        let web = api.put(&requesting("web", program, None));
        let agent = Agent::start_in_cluster(&sim, SensorSet::ALL, folder.path(), vec![web], &api);
        until(&sim, "it runs", |l| l.live_count() == 1).await;
        sleep(secs(5)).await;
        Self { sim, folder, api, shown, agent }
    }

    /// Evicts the pod while the API server is unavailable, which it stays, and ends the lack of memory. Returns what wakes the
    /// manager, and its metrics.
    ///
    /// # Panics
    /// The pod does not end in time.
    pub async fn evict_unreported(&mut self) -> (mpsc::Sender<Instant>, Arc<Metrics>) {
        self.api.set_unavailable(true);
        self.shown.set_available(Signal::MemoryAvailable, 50);
        let manager = self.agent.evict_by(hard_memory(), self.shown.clone());
        until(&self.sim, "it has ended", |l| l.live_count() == 0).await;
        self.shown.set_available(Signal::MemoryAvailable, 500);
        manager
    }
}

/// Evictions by these fields of the configuration.
pub fn policy(fields: Value) -> Policy {
    let mut document = json!({"evictionHard": {}, "enforceNodeAllocatable": ["none"]});
    let (Some(document_fields), Value::Object(fields)) = (document.as_object_mut(), fields) else { panic!("objects") };
    document_fields.extend(fields);
    let kubelet: KubeletConfiguration = serde_json::from_value(document).expect("a configuration");
    Policy {
        thresholds: thresholds(&kubelet, false),
        transition: kubelet.eviction_pressure_transition_period.std(),
        max_pod_grace: kubelet.eviction_max_pod_grace_period.into(),
        local_storage: true,
        pressure: Vec::new(),
    }
}

/// Evictions below 100 MiB of memory.
pub fn hard_memory() -> Policy {
    policy(json!({"evictionHard": {"memory.available": "100Mi"}}))
}

/// A pressure policy `thrash` with these fields, beside the thresholds of the configuration.
pub fn with_pressure(base: Policy, fields: Value) -> Policy {
    let mut document = json!({"name": "thrash", "mode": "Enforce"});
    let (Some(document_fields), Value::Object(fields)) = (document.as_object_mut(), fields) else { panic!("objects") };
    document_fields.extend(fields);
    let settings: PressureSettings = serde_json::from_value(json!({"policies": [document]})).expect("a section");
    Policy { pressure: settings.policies(), ..base }
}

/// The UID of the pod of this name.
pub fn uid(name: &str) -> PodUid {
    PodUid::from(format!("{name}-uid").as_str())
}

/// A pod of the API server that runs this program and requests so much memory.
pub fn requesting(name: &str, program: &str, memory: Option<&str>) -> Pod {
    let mut pod = ApiPod::clone(&pod(name).running("main", program).from_api().build());
    let container = &mut pod.spec.as_mut().expect("a spec").containers[0];
    let requests = memory.map(|memory| [("memory".to_owned(), Quantity(memory.to_owned()))].into());
    container.resources = Some(ResourceRequirements { requests, ..ResourceRequirements::default() });
    Arc::new(pod)
}

/// Waits for a condition of the runtime.
///
/// # Panics
/// It is not met in time.
pub async fn until(sim: &SimRuntime, what: &str, condition: impl Fn(&Trace) -> bool) {
    if let Err(unmet) = sim.until(what, SOON, condition).await {
        panic!("{unmet}");
    }
}

/// Waits for a condition.
///
/// # Panics
/// It is not met in time.
pub async fn until_true(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < SOON, "not in time: {what}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// The reason of a status.
pub fn reason(status: Option<&PodStatus>) -> Option<&str> {
    status.and_then(|status| status.reason.as_deref())
}

/// The pod's status says that it was evicted.
pub fn is_evicted(agent: &Agent, name: &str) -> bool {
    reason(agent.statuses.get(&uid(name)).as_ref()) == Some("Evicted")
}
