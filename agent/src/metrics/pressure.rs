//! Pressure: crossings of its levels, decisions of policies, and reclaim that pods must do themselves. Crossings and
//! decisions of what is configured are counted from zero on: to a query for an increase, a first value is none.

use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;
use std::sync::OnceLock;
use std::sync::PoisonError;
use std::time::Duration;

use prometheus::CounterVec;
use prometheus::Histogram;
use prometheus::IntCounterVec;
use prometheus::IntGaugeVec;
use prometheus::Opts;

use super::buckets;
use super::register::Register;

/// Pressure.
#[derive(Debug)]
pub struct Pressure {
    crossings: IntCounterVec,
    level: IntGaugeVec,
    own_limit: IntCounterVec,
    decisions: IntCounterVec,
    active: IntGaugeVec,
    returned: Histogram,
    stalls: IntCounterVec,
    stall_time: CounterVec,
    /// Stalls already counted, by UID of the pod.
    counted: Mutex<HashMap<String, Counted>>,
    source: OnceLock<StallSource>,
}

/// Reads the stalls of all pods. May block.
pub type ReadStalls = Box<dyn Fn() -> Vec<PodStalls> + Send + Sync>;

struct StallSource(ReadStalls);

impl fmt::Debug for StallSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StallSource")
    }
}

#[derive(Debug)]
struct Counted {
    labels: [String; 2],
    count: u64,
    time: Duration,
}

/// Stalls of a pod as its cgroups count them now.
#[derive(Clone, Debug)]
pub struct PodStalls {
    /// UID of the pod.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub pod: String,
    /// How often its tasks had to reclaim memory.
    pub count: u64,
    /// Time that its tasks spent in reclaim.
    pub time: Duration,
}

impl Pressure {
    pub(super) fn new(register: &Register<'_>) -> Self {
        let level = ["resource", "kind", "scope"];
        let of_pod = ["namespace", "pod"];
        Self {
            crossings: register.counters(
                "keblet_pressure_crossings_total",
                "Levels of pressure entered and left.",
                &["resource", "kind", "scope", "direction"],
            ),
            level: register.gauges("keblet_pressure_level", "1 while a level of pressure is entered.", &level),
            own_limit: register.counters(
                "keblet_pressure_own_limit_total",
                "Levels of CPU pressure that the CPU limits of pods explain. Nothing is done about them.",
                &["resource", "scope"],
            ),
            decisions: register.counters(
                "keblet_pressure_policy_decisions_total",
                "Decisions of pressure policies; those of the mode DryRun are not carried out.",
                &["policy", "action", "mode"],
            ),
            active: register.gauges(
                "keblet_pressure_policy_active",
                "1 from the moment both windows of a policy are at its threshold until it is at rest.",
                &["policy"],
            ),
            returned: register.histogram(
                "keblet_eviction_memory_returned_seconds",
                "Time from the decision to evict a pod until its memory was free again.",
                buckets::LATENCY,
            ),
            stalls: register.counters(
                "keblet_pressure_reclaim_stalls_total",
                "How often tasks of a pod had to reclaim memory themselves, counted by kernel probes.",
                &of_pod,
            ),
            stall_time: register.add(CounterVec::new(
                Opts::new(
                    "keblet_pressure_reclaim_stall_seconds_total",
                    "For how long tasks of a pod had to reclaim memory themselves, counted by kernel probes.",
                ),
                &of_pod,
            )),
            counted: Mutex::default(),
            source: OnceLock::new(),
        }
    }

    /// A level is followed, which has not been crossed yet. That of CPU may be explained by limits.
    pub fn follows(&self, resource: &str, kind: &str, scope: &str) {
        for direction in ["entered", "left"] {
            self.crossings.with_label_values(&[resource, kind, scope, direction]).inc_by(0);
        }
        if resource == "cpu" {
            self.own_limit.with_label_values(&[resource, scope]).inc_by(0);
        }
    }

    /// A policy of this mode is followed, which may decide on these actions.
    pub fn follows_policy(&self, policy: &str, mode: &str, actions: &[&str]) {
        for action in actions {
            self.decisions.with_label_values(&[policy, *action, mode]).inc_by(0);
        }
    }

    /// A level was entered or left.
    pub fn crossed(&self, resource: &str, kind: &str, scope: &str, entered: bool) {
        let direction = if entered { "entered" } else { "left" };
        self.crossings.with_label_values(&[resource, kind, scope, direction]).inc();
        self.level.with_label_values(&[resource, kind, scope]).set(entered.into());
    }

    /// A level was entered because of limits of pods.
    pub fn explained_by_limits(&self, resource: &str, scope: &str) {
        self.own_limit.with_label_values(&[resource, scope]).inc();
    }

    /// A policy has decided.
    pub fn decided(&self, policy: &str, action: &str, mode: &str) {
        self.decisions.with_label_values(&[policy, action, mode]).inc();
    }

    /// A policy is active or at rest.
    pub fn active(&self, policy: &str, active: bool) {
        self.active.with_label_values(&[policy]).set(active.into());
    }

    /// The memory of an evicted pod is free, so long after the decision.
    pub fn memory_returned(&self, took: Duration) {
        self.returned.observe(took.as_secs_f64());
    }

    /// Where stalls are read when metrics are; the first call counts.
    pub fn read_stalls_by(&self, read: ReadStalls) {
        let _ = self.source.set(StallSource(read));
    }

    /// Reads the stalls of all pods. Blocks.
    pub fn refresh(&self) {
        if let Some(StallSource(read)) = self.source.get() {
            self.reclaim_stalls(read());
        }
    }

    /// The stalls of all pods now. Counts what has grown; a pod that is absent is forgotten.
    pub fn reclaim_stalls(&self, pods: Vec<PodStalls>) {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        counted.retain(|uid, known| {
            let lives = pods.iter().any(|pod| pod.uid == *uid);
            if !lives {
                // Absent if two pods had one name.
                let _ = self.stalls.remove_label_values(&known.labels);
                let _ = self.stall_time.remove_label_values(&known.labels);
            }
            lives
        });
        for pod in pods {
            let labels = [pod.namespace, pod.pod];
            let known = counted.entry(pod.uid).or_insert_with(|| Counted { labels, count: 0, time: Duration::ZERO });
            let more = (pod.count.saturating_sub(known.count), pod.time.saturating_sub(known.time));
            (known.count, known.time) = (pod.count, pod.time);
            self.stalls.with_label_values(&known.labels).inc_by(more.0);
            self.stall_time.with_label_values(&known.labels).inc_by(more.1.as_secs_f64());
        }
    }
}
