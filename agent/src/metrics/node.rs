//! The node and this program.

use prometheus::Gauge;
use prometheus::IntGauge;
use prometheus::IntGaugeVec;

use super::register::Register;

/// The node and this program.
#[derive(Debug)]
pub struct Node {
    name: IntGaugeVec,
    cgroup_version: IntGauge,
    losing_support: IntGaugeVec,
    provider: IntGaugeVec,
    build: IntGaugeVec,
    features: IntGaugeVec,
    startup: Startup,
    shutdown_start: Gauge,
    shutdown_end: Gauge,
}

/// From the machine's start to a Ready node, in parts.
#[derive(Debug)]
struct Startup {
    pre_kubelet: Gauge,
    pre_registration: Gauge,
    registration: Gauge,
    post_registration: Gauge,
    total: Gauge,
}

impl Startup {
    fn new(register: &Register<'_>) -> Self {
        let gauge = |part: &str, help: &str| {
            let name = format!("kubelet_node_startup_{part}duration_seconds");
            register.float_gauge(&name, &format!("[ALPHA] Seconds from {help}, at node startup."))
        };
        Self {
            pre_kubelet: gauge("pre_kubelet_", "the machine's start to the agent's"),
            pre_registration: gauge("pre_registration_", "the agent's start to its attempt to register the node"),
            registration: gauge("registration_", "the attempt to register the node to its success"),
            post_registration: gauge("post_registration_", "registration to the node being Ready"),
            total: gauge("", "the machine's start to the node being Ready"),
        }
    }
}

/// Labels of `kubernetes_build_info`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildInfo<'a> {
    /// Such as `v1.36.3`.
    pub git_version: &'a str,
    /// Such as `1`.
    pub major: &'a str,
    /// Such as `36`.
    pub minor: &'a str,
    /// Such as `linux/amd64`.
    pub platform: &'a str,
    /// Such as `rustc`.
    pub compiler: &'a str,
}

impl Node {
    pub(super) fn new(register: &Register<'_>) -> Self {
        Self {
            name: register.gauges("kubelet_node_name", "[ALPHA] The node's name, as a label; always 1.", &["node"]),
            cgroup_version: register.gauge("kubelet_cgroup_version", "[ALPHA] cgroup version of this host."),
            losing_support: register.gauges(
                "kubelet_cri_losing_support",
                "[ALPHA] 1 if the runtime lacks a feature that the version in the label requires.",
                &["version"],
            ),
            provider: register.gauges(
                "kubelet_metrics_provider",
                "[ALPHA] Source of container usage, as a label; always 1.",
                &["provider"],
            ),
            build: register.gauges(
                "kubernetes_build_info",
                "[BETA] The build, as labels; always 1.",
                &[
                    "build_date",
                    "compiler",
                    "git_commit",
                    "git_tree_state",
                    "git_version",
                    "go_version",
                    "major",
                    "minor",
                    "platform",
                ],
            ),
            features: register.gauges(
                "kubernetes_feature_enabled",
                "[BETA] Whether a feature gate is on.",
                &["name", "stage"],
            ),
            startup: Startup::new(register),
            shutdown_start: register.float_gauge(
                "kubelet_graceful_shutdown_start_time_seconds",
                "[ALPHA] When the last graceful shutdown of the node began, as Unix time.",
            ),
            shutdown_end: register.float_gauge(
                "kubelet_graceful_shutdown_end_time_seconds",
                "[ALPHA] When the last graceful shutdown of the node ended, as Unix time.",
            ),
        }
    }

    /// The machine ran this long, in seconds, before the agent.
    pub fn startup_pre_kubelet(&self, seconds: f64) {
        self.startup.pre_kubelet.set(seconds);
    }

    /// The node was registered: seconds before the attempt, and for it.
    pub fn startup_registration(&self, before: f64, took: f64) {
        self.startup.pre_registration.set(before);
        self.startup.registration.set(took);
    }

    /// The node became Ready this many seconds after its registration, and after the machine's boot.
    pub fn startup_ready(&self, after_registration: f64, total: Option<f64>) {
        self.startup.post_registration.set(after_registration);
        if let Some(total) = total {
            self.startup.total.set(total);
        }
    }

    /// Begin and end of the last graceful shutdown as Unix time; 0 if there was none.
    pub fn graceful_shutdown(&self, start: f64, end: f64) {
        self.shutdown_start.set(start);
        self.shutdown_end.set(end);
    }

    /// Names the node.
    pub fn name(&self, name: &str) {
        self.name.reset();
        self.name.with_label_values(&[name]).set(1);
    }

    /// 1 or 2.
    pub fn cgroup_version(&self, version: i64) {
        self.cgroup_version.set(version);
    }

    /// The runtime does not report its cgroup driver, which `version` requires.
    pub fn runtime_losing_support(&self, version: &str) {
        self.losing_support.with_label_values(&[version]).set(1);
    }

    /// The source of usage: `cadvisor` for cgroup files, `cri` for the runtime alone.
    pub fn metrics_provider(&self, provider: &'static str) {
        self.provider.with_label_values(&[provider]).set(1);
    }

    /// Build information. Unknown values are empty.
    pub fn build(&self, info: &BuildInfo<'_>) {
        let BuildInfo { git_version, major, minor, platform, compiler } = *info;
        self.build.with_label_values(&["", compiler, "", "", git_version, "", major, minor, platform]).set(1);
    }

    /// Whether a feature is enabled. `stage` is ALPHA, BETA, DEPRECATED, or empty for GA ones.
    pub fn feature(&self, name: &str, stage: &str, enabled: bool) {
        self.features.with_label_values(&[name, stage]).set(enabled.into());
    }
}
