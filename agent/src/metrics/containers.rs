//! Containers, their starts, hooks, ends and logs.

use prometheus::Histogram;
use prometheus::IntCounter;
use prometheus::IntCounterVec;
use prometheus::IntGauge;

use super::buckets;
use super::register::Register;
use super::replaced::Replaced;
use super::values::gauge;

/// Containers.
#[derive(Debug)]
pub struct Containers {
    ephemeral: IntGauge,
    per_pod: Histogram,
    started: IntCounterVec,
    start_errors: IntCounterVec,
    hook_fallbacks: IntCounter,
    sleeps_cut: IntCounter,
    terminated: IntCounterVec,
    logs: Replaced,
}

/// A container whose logs are measured.
#[derive(Clone, Copy, Debug)]
pub struct LogsOf<'a> {
    /// Of its pod.
    pub uid: &'a str,
    /// Of its pod.
    pub namespace: &'a str,
    /// Its pod's name.
    pub pod: &'a str,
    /// Its own name.
    pub container: &'a str,
}

impl Containers {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            ephemeral: register
                .gauge("kubelet_managed_ephemeral_containers", "[ALPHA] Ephemeral containers of desired pods."),
            per_pod: register.histogram(
                "kubelet_containers_per_pod_count",
                "[ALPHA] Containers of each new pod.",
                buckets::CONTAINERS,
            ),
            started: register.counters(
                "kubelet_started_containers_total",
                "[ALPHA] Attempts to start a container.",
                &["container_type"],
            ),
            start_errors: register.counters(
                "kubelet_started_containers_errors_total",
                "[ALPHA] Failed attempts to start a container, by reason.",
                &["container_type", "code"],
            ),
            hook_fallbacks: register.counter(
                "kubelet_lifecycle_handler_http_fallbacks_total",
                "[ALPHA] HTTPS requests of lifecycle hooks that were answered over HTTP.",
            ),
            sleeps_cut: register.counter(
                "kubelet_sleep_action_terminated_early_total",
                "[ALPHA] Sleeps of lifecycle hooks that were ended before their time.",
            ),
            terminated: register.counters(
                "kubelet_terminated_containers_total",
                "[ALPHA] Containers that ended.",
                &["container_type", "exit_code", "reason"],
            ),
            logs: register.replaced(
                "kubelet_container_log_filesystem_used_bytes",
                "[ALPHA] Bytes on disk of a container's logs.",
                &["container", "namespace", "pod", "uid"],
            ),
        }
    }

    /// Ephemeral containers of desired pods.
    pub fn ephemeral(&self, count: usize) {
        self.ephemeral.set(gauge(count));
    }

    /// A new pod with this many containers.
    pub fn of_new_pod(&self, count: usize) {
        self.per_pod.observe(count as f64);
    }

    /// The start of a container was tried. `kind` is `container`, `init_container` or `ephemeral_container`, `error`
    /// the reason of the failure, such as `ErrImagePull`. Reasons that are free texts count as `Other`: there is no end of
    /// them, and each would be a series.
    pub fn started(&self, kind: &'static str, error: Option<&str>) {
        self.started.with_label_values(&[kind]).inc();
        if let Some(reason) = error {
            let reason = if reason.contains(' ') { "Other" } else { reason };
            self.start_errors.with_label_values(&[kind, reason]).inc();
        }
    }

    /// The server of an HTTPS hook responded without TLS.
    pub fn hook_fell_back(&self) {
        self.hook_fallbacks.inc();
    }

    /// The sleep of a hook was ended before its time.
    pub fn sleep_cut(&self) {
        self.sleeps_cut.inc();
    }

    /// A container ended.
    pub fn terminated(&self, kind: &'static str, exit_code: i32, reason: &str) {
        self.terminated.with_label_values(&[kind, &exit_code.to_string(), reason]).inc();
    }

    /// Bytes of containers' logs; replaces all earlier ones.
    pub fn logs<'a>(&self, used: impl IntoIterator<Item = (LogsOf<'a>, u64)>) {
        let labels = |of: LogsOf<'a>| [of.container, of.namespace, of.pod, of.uid];
        self.logs.replace(used.into_iter().map(|(of, bytes)| (labels(of), gauge(bytes))));
    }
}
