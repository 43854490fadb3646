//! Settings of the node that go into sandbox and container configurations.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use tokio::sync::watch;

use super::memory_qos::MemoryQos;
use crate::model::qos::Amounts;
use crate::runtime::RuntimeOffer;
use crate::runtime::RuntimeState;
use crate::status::NodeAddresses;

/// Settings of the node.
#[derive(Clone, Debug, Default)]
pub struct NodeSettings {
    /// Where container logs go (`podLogsDir`).
    pub pod_logs_dir: PathBuf,
    /// `containerLogMaxSize` is negative: logs of removed instances stay until the log folder of their pod is removed.
    pub keep_logs: bool,
    /// Name lookup.
    pub dns: DnsSettings,
    /// Requests and limits.
    pub resources: ResourceSettings,
    /// Security defaults.
    pub security: SecuritySettings,
    /// Feature gate ContainerStopSignals (KEP-4960): `lifecycle.stopSignal` is passed to the runtime, and what the runtime
    /// stops a container with is in its status.
    pub stop_signals: bool,
    /// Feature gate EnvFiles (KEP-3721): variables with a `fileKeyRef` are read from files. Without it they are empty.
    pub env_files: bool,
    /// The Kubernetes version that requests of hooks name (`v1.36.3`).
    pub kubernetes_version: String,
}

/// Settings for name lookup.
#[derive(Clone, Debug, Default)]
pub struct DnsSettings {
    /// `clusterDNS`, valid addresses only.
    pub cluster_dns: Vec<String>,
    /// `clusterDomain`.
    pub cluster_domain: String,
    /// Without the feature gate HostnameOverride (KEP-4762): `hostnameOverride` of pods is ignored.
    pub ignores_override: bool,
    /// Addresses of the node.
    pub node_ips: NodeIps,
}

/// Addresses of the node, primary first. They may change while the agent runs.
#[derive(Clone, Debug)]
pub struct NodeIps(watch::Receiver<NodeAddresses>);

impl NodeIps {
    /// Follows `addresses`.
    pub fn new(addresses: watch::Receiver<NodeAddresses>) -> Self {
        Self(addresses)
    }

    /// The present addresses; empty while unknown.
    pub fn now(&self) -> Vec<String> {
        self.0.borrow().ips.clone()
    }

    /// True if the IPv6 address of a pod comes first.
    pub fn prefers_v6(&self) -> bool {
        self.0.borrow().prefers_v6
    }
}

impl Default for NodeIps {
    /// No address.
    fn default() -> Self {
        Self::from(Vec::new())
    }
}

impl From<Vec<String>> for NodeIps {
    /// These addresses, unchanging, the family of the first one preferred.
    fn from(ips: Vec<String>) -> Self {
        let prefers_v6 = ips.first().is_some_and(|ip| ip.contains(':'));
        Self(watch::channel(NodeAddresses { ips, prefers_v6 }).1)
    }
}

/// Settings for requests and limits.
#[derive(Clone, Debug, Default)]
pub struct ResourceSettings {
    /// CFS period in microseconds (`cpuCFSQuotaPeriod`); `None` if `cpuCFSQuota` is off.
    pub cfs_period: Option<u64>,
    /// Memory of the machine, bytes.
    pub memory_capacity: i64,
    /// Allocatable cpu, memory and ephemeral-storage of the node.
    pub allocatable: Amounts,
    /// Huge page sizes of the node, bytes.
    pub hugepage_sizes: Vec<u64>,
    /// Size of a page, bytes; 0: not known.
    pub page_size: usize,
    /// The node runs cgroup v2.
    pub cgroup_v2: bool,
    /// The node runs cgroup v2 and has the memory controller there.
    pub protects_memory: bool,
    /// `singleProcessOOMKill`; always true on cgroup v1.
    pub single_process_oom_kill: bool,
    /// `memorySwap.swapBehavior` and whether the kernel can limit swap.
    pub swap: Swap,
    /// Protection and throttling of memory; `None` while the gate `MemoryQoS` is off.
    pub memory_qos: Option<MemoryQos>,
    /// `podPidsLimit` if above zero.
    pub pod_pids_limit: Option<i64>,
}

/// Swap for containers (KEP-2400).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Swap {
    /// The kernel cannot limit it; nothing is set.
    #[default]
    NoController,
    /// `NoSwap`.
    Forbidden,
    /// `LimitedSwap`.
    Limited {
        /// Swap of the machine, bytes.
        node_swap: i64,
    },
}

/// Security defaults.
#[derive(Clone, Debug, Default)]
pub struct SecuritySettings {
    /// `seccompDefault`: RuntimeDefault where no profile is set.
    pub seccomp_default: bool,
    /// `<root>/seccomp`, where localhost profiles are.
    pub seccomp_root: PathBuf,
    /// `thermal_throttle` folders of the CPUs, hidden from containers.
    pub thermal_throttle: Vec<String>,
    /// SELinux is enabled on the node: the runtime relabels files that the agent makes.
    pub selinux: bool,
    /// Features of the runtime's handlers.
    pub handlers: HandlerFeatures,
}

/// Features of the runtime's handlers, as the runtime last reported them.
#[derive(Clone, Debug)]
pub struct HandlerFeatures {
    state: watch::Receiver<RuntimeState>,
    /// What the runtime offered when it was last found ready: statuses are published also while it is not. Clones share it.
    last: Arc<Mutex<Arc<RuntimeOffer>>>,
}

impl HandlerFeatures {
    /// Whether this handler (empty: the default one) can make user namespaces (KEP-127).
    pub fn user_namespaces(&self, handler: &str) -> HandlerSupport {
        let offer = self.offer();
        match offer.handlers.iter().find(|offered| offered.name == handler) {
            Some(offered) if offered.user_namespaces => HandlerSupport::Yes,
            None if !offer.handlers.is_empty() => HandlerSupport::UnknownHandler,
            Some(_) | None => HandlerSupport::No,
        }
    }

    /// Follows `state`.
    pub fn new(state: watch::Receiver<RuntimeState>) -> Self {
        Self { state, last: Arc::default() }
    }

    /// True if this handler (empty: the default one) supports recursive read-only mounts (KEP-3857).
    pub fn recursive_read_only(&self, handler: &str) -> bool {
        let offer = self.offer();
        offer.handlers.iter().any(|offered| offered.name == handler && offered.recursive_read_only_mounts)
    }

    fn offer(&self) -> Arc<RuntimeOffer> {
        // Replaced as a whole: a panic elsewhere leaves it usable.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let RuntimeState::Ready { offer, .. } = &*self.state.borrow() {
            last.clone_from(offer);
        }
        Arc::clone(&last)
    }
}

/// Whether a handler has a feature.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HandlerSupport {
    /// It has it.
    Yes,
    /// It has not, or the runtime does not report features of handlers.
    No,
    /// The runtime reports others, and not this one.
    UnknownHandler,
}

impl Default for HandlerFeatures {
    /// No handler has any feature.
    fn default() -> Self {
        Self::new(watch::channel(RuntimeState::Unknown).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::HandlerOffer;

    #[test]
    fn a_runtime_that_does_not_answer_has_the_features_that_it_last_reported() {
        let handler = HandlerOffer { name: String::new(), recursive_read_only_mounts: true, user_namespaces: true };
        let offer = RuntimeOffer { handlers: vec![handler], ..RuntimeOffer::default() };
        let (runtime, state) = watch::channel(RuntimeState::Unknown);
        let handlers = HandlerFeatures::new(state);
        let found = || (handlers.recursive_read_only(""), handlers.user_namespaces(""));
        assert_eq!(found(), (false, HandlerSupport::No), "it was not ready yet");
        runtime.send_replace(RuntimeState::Ready { network_error: None, offer: Arc::new(offer) });
        assert_eq!(found(), (true, HandlerSupport::Yes));
        runtime.send_replace(RuntimeState::Unreachable("refused".to_owned()));
        assert_eq!(found(), (true, HandlerSupport::Yes));
    }
}
