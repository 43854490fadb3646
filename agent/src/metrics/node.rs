//! The node and this program.

use prometheus::{IntGauge, IntGaugeVec};

use super::register::Register;

/// The node and this program.
#[derive(Debug)]
pub struct Node {
    name: IntGaugeVec,
    cgroup_version: IntGauge,
    losing_support: IntGaugeVec,
    build: IntGaugeVec,
    features: IntGaugeVec,
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
                "[ALPHA] 1 if the runtime lacks what the version in the label will require.",
                &["version"],
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
        }
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

    /// The runtime does not tell its cgroup driver; from `version` on it will have to.
    pub fn runtime_losing_support(&self, version: &str) {
        self.losing_support.with_label_values(&[version]).set(1);
    }

    /// Says what was built. What is unknown is empty.
    pub fn build(&self, info: &BuildInfo<'_>) {
        let BuildInfo { git_version, major, minor, platform, compiler } = *info;
        self.build.with_label_values(&["", compiler, "", "", git_version, "", major, minor, platform]).set(1);
    }

    /// Says whether a feature is on. `stage` is ALPHA, BETA, DEPRECATED, or empty for settled ones.
    pub fn feature(&self, name: &str, stage: &str, enabled: bool) {
        self.features.with_label_values(&[name, stage]).set(enabled.into());
    }
}
