//! Families of `keblet observe`. Made for each scrape from what was observed, so that the series of a pod end with it.

use prometheus::CounterVec;
use prometheus::GaugeVec;
use prometheus::IntCounterVec;
use prometheus::IntGaugeVec;
use prometheus::Registry;
use prometheus::proto::MetricFamily;

use super::SensorLevel;
use super::process;
use super::register::Register;
use super::values::gauge;

/// Identity of node, runtime and program.
#[derive(Clone, Copy, Debug)]
pub struct ObservedInfo<'a> {
    /// Version of keblet.
    pub version: &'a str,
    /// Release of the kernel.
    pub kernel: &'a str,
    /// `v1` or `v2`.
    pub cgroups: &'a str,
    /// Name of the container runtime.
    pub runtime: &'a str,
    /// Its version.
    pub runtime_version: &'a str,
}

/// A pod as a label value.
#[derive(Clone, Copy, Debug)]
pub struct PodLabels<'a> {
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub pod: &'a str,
}

/// The families.
#[derive(Debug)]
pub struct Observe {
    registry: Registry,
    info: IntGaugeVec,
    sensors: IntGaugeVec,
    dropped: IntCounterVec,
    pods: IntGaugeVec,
    containers: IntGaugeVec,
    restarts: IntGaugeVec,
    exits: IntCounterVec,
    node_kills: IntCounterVec,
    pod_kills: IntCounterVec,
    node_waiting: CounterVec,
    pod_waiting: CounterVec,
    reclaims: IntCounterVec,
    reclaiming: CounterVec,
    memory: IntGaugeVec,
    memory_limit: IntGaugeVec,
    stalled: GaugeVec,
}

impl Observe {
    /// All families, without a value.
    pub fn new() -> Self {
        let registry = Registry::new();
        let register = Register::new(&registry);
        let seconds = |name: &str, help: &str, labels: &[&str]| {
            register.add(CounterVec::new(prometheus::Opts::new(name, help), labels))
        };
        let pod = ["namespace", "pod"];
        process::register(&register);
        Self {
            info: register.gauges(
                "keblet_observe_info",
                "1; the labels name versions of keblet, kernel and container runtime.",
                &["version", "kernel", "cgroups", "runtime", "runtime_version"],
            ),
            sensors: register.gauges(
                "keblet_sensor_state",
                "1 for the state each sensor is in, 0 for the others.",
                &["sensor", "state"],
            ),
            dropped: register.counters(
                "keblet_observe_lost_records_total",
                "Records of the kernel that were dropped because a buffer was full, and cgroups that are not watched.",
                &["queue"],
            ),
            pods: register.gauges("keblet_observe_pods", "Pods, by whether their sandbox is ready.", &["sandbox"]),
            containers: register.gauges("keblet_observe_containers", "Containers by state.", &["state"]),
            restarts: register.gauges(
                "keblet_observe_container_restarts",
                "Restarts of a container, as the container runtime's labels count them.",
                &["namespace", "pod", "container"],
            ),
            exits: register.counters(
                "keblet_observe_container_exits_total",
                "Exits of a pod's containers since they are observed.",
                &["namespace", "pod", "container", "reason"],
            ),
            node_kills: register.counters(
                "keblet_oom_kills_total",
                "Processes killed by the OOM killer: whose limit was reached, whose process it was, the evidence.",
                &["scope", "victim", "confidence"],
            ),
            pod_kills: register.counters(
                "keblet_pod_oom_kills_total",
                "Processes of a pod killed by the OOM killer since it is observed.",
                &["namespace", "pod", "container", "victim", "scope"],
            ),
            node_waiting: seconds(
                "keblet_node_pressure_seconds_total",
                "Time in which some or all tasks of the node waited for a resource (PSI).",
                &["resource", "share"],
            ),
            pod_waiting: seconds(
                "keblet_pod_pressure_seconds_total",
                "Time in which some or all tasks of a pod waited for a resource (PSI, cgroup v2).",
                &["namespace", "pod", "resource", "share"],
            ),
            reclaims: register.counters(
                "keblet_pod_reclaim_stalls_total",
                "Direct memory reclaims by processes of a pod since it is observed.",
                &pod,
            ),
            reclaiming: seconds(
                "keblet_pod_reclaim_seconds_total",
                "Time that processes of a pod spent in direct memory reclaim since it is observed.",
                &pod,
            ),
            memory: register.gauges("keblet_pod_memory_bytes", "Memory charged to a pod.", &pod),
            memory_limit: register.gauges("keblet_pod_memory_limit_bytes", "Limit on the memory of a pod.", &pod),
            stalled: register.float_gauges(
                "keblet_pod_stalled_ratio",
                "Share of the time in which a pod waited, at the last measurement, for pods that wait noticeably; by the \
                 cause: own-limit, itself, other-pod, unknown.",
                &["namespace", "pod", "resource", "cause"],
            ),
            registry,
        }
    }

    /// Versions.
    pub fn info(&self, info: &ObservedInfo<'_>) {
        let labels = [info.version, info.kernel, info.cgroups, info.runtime, info.runtime_version];
        self.info.with_label_values(&labels).set(1);
    }

    /// A sensor is in this state.
    pub fn sensor(&self, sensor: &str, level: SensorLevel) {
        for each in [SensorLevel::Up, SensorLevel::Degraded, SensorLevel::Down, SensorLevel::Off] {
            self.sensors.with_label_values(&[sensor, each.as_str()]).set((each == level).into());
        }
    }

    /// Records that were lost: of exits and OOM kills, of cgroups, and cgroups that are not watched.
    pub fn lost(&self, exits: u64, cgroups: u64, watches: u64) {
        for (queue, count) in [("exits", exits), ("cgroups", cgroups), ("watches", watches)] {
            self.dropped.with_label_values(&[queue]).inc_by(count);
        }
    }

    /// Pods with and without a ready sandbox.
    pub fn pods(&self, ready: usize, not_ready: usize) {
        self.pods.with_label_values(&["ready"]).set(gauge(ready));
        self.pods.with_label_values(&["not-ready"]).set(gauge(not_ready));
    }

    /// One more container in this state.
    pub fn container(&self, state: &str) {
        self.containers.with_label_values(&[state]).inc();
    }

    /// Restarts of a container.
    pub fn restarts(&self, pod: PodLabels<'_>, container: &str, restarts: u32) {
        self.restarts.with_label_values(&[pod.namespace, pod.pod, container]).set(restarts.into());
    }

    /// Exits of a container for one reason.
    pub fn exits(&self, pod: PodLabels<'_>, container: &str, reason: &str, count: u64) {
        self.exits.with_label_values(&[pod.namespace, pod.pod, container, reason]).inc_by(count);
    }

    /// OOM kills on the node.
    pub fn oom_kills(&self, scope: &str, victim: &str, confidence: &str, count: u64) {
        self.node_kills.with_label_values(&[scope, victim, confidence]).inc_by(count);
    }

    /// OOM kills in a pod.
    pub fn pod_oom_kills(&self, pod: PodLabels<'_>, container: &str, victim: &str, scope: &str, count: u64) {
        self.pod_kills.with_label_values(&[pod.namespace, pod.pod, container, victim, scope]).inc_by(count);
    }

    /// Seconds in which `some` and all (`full`) tasks waited for a resource: of a pod, or of the node.
    pub fn waiting(&self, pod: Option<PodLabels<'_>>, resource: &str, some: f64, full: f64) {
        for (share, seconds) in [("some", some), ("full", full)] {
            let counter = match pod {
                Some(pod) => self.pod_waiting.with_label_values(&[pod.namespace, pod.pod, resource, share]),
                None => self.node_waiting.with_label_values(&[resource, share]),
            };
            counter.inc_by(seconds.max(0.0));
        }
    }

    /// Direct memory reclaims of a pod.
    pub fn reclaim(&self, pod: PodLabels<'_>, stalls: u64, seconds: f64) {
        self.reclaims.with_label_values(&[pod.namespace, pod.pod]).inc_by(stalls);
        self.reclaiming.with_label_values(&[pod.namespace, pod.pod]).inc_by(seconds.max(0.0));
    }

    /// Memory of a pod and its limit, as far as known.
    pub fn memory(&self, pod: PodLabels<'_>, bytes: Option<u64>, limit: Option<u64>) {
        for (family, bytes) in [(&self.memory, bytes), (&self.memory_limit, limit)] {
            if let Some(bytes) = bytes {
                family.with_label_values(&[pod.namespace, pod.pod]).set(gauge(bytes));
            }
        }
    }

    /// A pod waits for a resource.
    pub fn stalled(&self, pod: PodLabels<'_>, resource: &str, cause: &str, ratio: f64) {
        self.stalled.with_label_values(&[pod.namespace, pod.pod, resource, cause]).set(ratio);
    }

    /// The families that have a value.
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }
}

impl Default for Observe {
    fn default() -> Self {
        Self::new()
    }
}
