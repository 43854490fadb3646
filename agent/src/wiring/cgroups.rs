//! The cgroups of pods: driver, root, node allocatable, and the QoS loop.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use keblet_proto::cri::v1 as cri;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::node::Node;
use crate::allocatable;
use crate::allocatable::Enforcer;
use crate::allocatable::ReadPodLimits;
use crate::cgroups::CgroupName;
use crate::cgroups::Cgroups;
use crate::cgroups::Driver;
use crate::cgroups::Layout;
use crate::cgroups::LimitWrites;
use crate::cgroups::QosPolicy;
use crate::cgroups::ReservedMemory;
use crate::config::Feature;
use crate::config::Settings;
use crate::metrics::Metrics;
use crate::model::named;
use crate::model::until;
use crate::node::Machine;
use crate::node::RootFs;
use crate::node::Sizes;
use crate::node::resources::ResourceConfig;
use crate::node::resources::pod_limits;
use crate::recorder::Recorder;
use crate::retry::RetryTracker;
use crate::runtime::Runtime;
use crate::server::Configz;
use crate::sync::SharedPods;

/// From this version on upstream takes the cgroup driver from the runtime only (KEP-4033).
const DRIVER_NEEDED: &str = "1.38.0";
/// How often the runtime is queried for its driver, and the pause between.
const DRIVER_TRIES: u32 = 3;
const DRIVER_PAUSE: Duration = Duration::from_secs(2);

/// Period of the QoS loop, as in the kubelet.
const QOS_PERIOD: Duration = Duration::from_secs(60);
/// Its period until every source of pods has been read.
const QOS_START_PERIOD: Duration = Duration::from_secs(1);

/// Services that setting up cgroups needs.
pub(super) struct Services<'a> {
    /// The configuration.
    pub settings: &'a Settings,
    /// The node, whose configuration shows the driver.
    pub node: &'a Node,
    /// The container runtime.
    pub runtime: &'a Runtime,
    /// What is counted.
    pub metrics: &'a Arc<Metrics>,
    /// The machine's cgroup hierarchies.
    pub layout: Layout,
    /// Where writes of limits are counted.
    pub limit_writes: LimitWrites,
    /// The pods of this node.
    pub pods: &'a SharedPods,
    /// Events of the node.
    pub recorder: &'a Recorder,
}

/// Resumes pods that an agent, killed during an eviction, has left suspended. Precedes any wait for the runtime or the API
/// server: what has stalled the node may keep them from responding for long.
pub(super) async fn resume_pods(settings: &Settings, layout: &Layout) {
    // An invalid root is reported by `prepare`.
    if let Ok(root) = CgroupName::parse(&settings.kubelet.cgroup_root) {
        Cgroups::resume_pods_of_any_driver(layout, &root).await;
    }
}

/// Creates the tree below `cgroupRoot` and enforces node allocatable; `None` with `cgroupsPerQOS: false`, where only a
/// `cgroupRoot` is limited.
///
/// # Errors
/// `cgroupRoot` is invalid or lacks controllers; the systemd driver without systemd; the kernel or systemd refuses; a
/// reserved cgroup cannot be limited; the runtime returns an error instead of its driver.
pub(super) async fn prepare(
    services: Services<'_>,
    tasks: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) -> anyhow::Result<Option<Cgroups>> {
    let Services { settings, node, runtime, metrics, layout, limit_writes, pods, recorder } = services;
    let kubelet = &settings.kubelet;
    let driver = driver(runtime, &kubelet.cgroup_driver, metrics).await?;
    show(&node.configz, driver);
    let root =
        CgroupName::parse(&kubelet.cgroup_root).with_context(|| format!("cgroupRoot {:?}", kubelet.cgroup_root))?;
    let cgroups = Cgroups::new(layout, driver, root).context("setting up the cgroup driver")?;
    let cgroups = cgroups.with_metrics(metrics.clone()).with_limit_writes(limit_writes);
    let root_fs = node.root_fs.clone();
    let machine = Machine::read(Path::new("/"), &settings.flags.root_dir, &root_fs).sizes;
    let node = ThisNode { settings, sizes: machine.unwrap_or_default() };
    let cgroups = if kubelet.cgroups_per_qos {
        cgroups.ensure_tree().await.context("creating the cgroups of pods")?;
        let policy = node.qos_policy(cgroups.layout());
        if !policy.protects_memory {
            cgroups.clear_memory_protection().await;
        }
        cgroups.with_requests(Arc::new(pods.clone()), policy)
    } else {
        cgroups
    };
    let retries = RetryTracker::new(recorder.clone(), Some(metrics.clone()));
    let enforcer = Enforcer { cgroups: cgroups.clone(), recorder: recorder.clone(), retries };
    node.enforce(enforcer, root_fs, tasks, shutdown).await?;
    Ok(kubelet.cgroups_per_qos.then_some(cgroups))
}

/// The runtime's own driver overrides the configured one (KEP-4033).
async fn driver(runtime: &Runtime, configured: &str, metrics: &Metrics) -> anyhow::Result<Driver> {
    let mut answer = runtime.runtime_config().await;
    for _ in 1..DRIVER_TRIES {
        let Err(error) = &answer else { break };
        tracing::warn!(%error, "cannot read the cgroup driver of the runtime; retrying");
        tokio::time::sleep(DRIVER_PAUSE).await;
        answer = runtime.runtime_config().await;
    }
    let reported = answer.context("reading the cgroup driver of the runtime")?;
    if reported.is_none() {
        metrics.node.runtime_losing_support(DRIVER_NEEDED);
    }
    Ok(choose(reported, configured))
}

fn choose(reported: Option<cri::CgroupDriver>, configured: &str) -> Driver {
    match reported {
        Some(cri::CgroupDriver::Systemd) => Driver::Systemd,
        Some(cri::CgroupDriver::Cgroupfs) => Driver::Cgroupfs,
        None if configured == "systemd" => Driver::Systemd,
        None => Driver::Cgroupfs,
    }
}

/// Has `/configz` show the driver in use.
fn show(configz: &Configz, driver: Driver) {
    let name = match driver {
        Driver::Systemd => "systemd",
        Driver::Cgroupfs => "cgroupfs",
    };
    configz.set("cgroupDriver", name);
}

/// What the values of cgroups follow from.
struct ThisNode<'a> {
    settings: &'a Settings,
    sizes: Sizes,
}

impl ThisNode<'_> {
    fn resource_config(&self) -> ResourceConfig {
        let Settings { kubelet, flags, .. } = self.settings;
        ResourceConfig::new(kubelet, flags.experimental_allocatable_ignore_eviction)
    }

    fn hugepage_sizes(&self) -> Vec<u64> {
        self.sizes.hugepages.keys().copied().collect()
    }

    fn qos_policy(&self, layout: &Layout) -> QosPolicy {
        let Settings { kubelet, gates, .. } = self.settings;
        let tiered = kubelet.memory_reservation_policy == "TieredReservation";
        let limits = pod_limits(&self.sizes, Some(&self.resource_config()));
        let allocatable = limits.get("memory").map_or(0, |amount| amount.value());
        let percent = kubelet.qos_reserved.get("memory").and_then(|text| text.strip_suffix('%')?.parse().ok());
        let reserved = percent.filter(|_| allocatable > 0).map(|percent| ReservedMemory { percent, allocatable });
        QosPolicy {
            protects_memory: tiered && layout.is_v2() && gates.enabled(Feature::MemoryQoS),
            reserved,
            hugepage_sizes: self.hugepage_sizes(),
        }
    }

    /// Limits the cgroup of all pods in the background, and reserved daemons before anything runs.
    async fn enforce(
        &self,
        enforcer: Enforcer,
        root_fs: RootFs,
        tasks: &mut JoinSet<()>,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<()> {
        let Settings { kubelet, gates, .. } = self.settings;
        let is_v2 = enforcer.cgroups.layout().is_v2();
        let protects_memory = gates.enabled(Feature::MemoryQoS);
        let (sizes, cpus) = (self.hugepage_sizes(), cpus(is_v2));
        let reservations = allocatable::reservations(kubelet, protects_memory, &sizes, &cpus);
        let root = enforcer.cgroups.root().clone();
        let all_pods = if kubelet.cgroups_per_qos { root.kubepods() } else { root };
        // The root of the hierarchy cannot have any limits.
        if !all_pods.components().is_empty() {
            let limits = pod_limits_of_machine(self.settings.clone(), root_fs, is_v2);
            let enforcing = enforcer.clone().enforce_on_pods(all_pods, limits);
            tasks.spawn(named("node allocatable", until(shutdown.clone(), enforcing)));
        }
        enforcer.enforce_reservations(&reservations).await.context("enforcing node allocatable")
    }
}

/// Computes the limits of all pods. A machine whose size is not known has none.
fn pod_limits_of_machine(settings: Settings, root_fs: RootFs, is_v2: bool) -> ReadPodLimits {
    Arc::new(move || {
        let sizes = Machine::read(Path::new("/"), &settings.flags.root_dir, &root_fs).sizes?;
        let node = ThisNode { settings: &settings, sizes };
        Some(allocatable::kubepods(&node.sizes, &settings.kubelet, &node.resource_config(), &cpus(is_v2)))
    })
}

/// The CPUs that are online. On v1 a cgroup has the CPUs of its parent, and cannot have more.
fn cpus(is_v2: bool) -> String {
    let online = || fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    if is_v2 { online().trim().to_owned() } else { String::new() }
}

/// Keeps the QoS classes at what their pods request, until `shutdown`.
pub(super) fn start_qos_loop(cgroups: &Cgroups, tasks: &mut JoinSet<()>, shutdown: &CancellationToken) {
    let cgroups = cgroups.clone();
    let update = async move {
        loop {
            let is_complete = cgroups.update_qos_classes().await;
            tokio::time::sleep(if is_complete { QOS_PERIOD } else { QOS_START_PERIOD }).await;
        }
    };
    tasks.spawn(named("QoS loop", until(shutdown.clone(), update)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FlagValues;
    use crate::config::load;

    #[test]
    fn the_runtime_overrides_the_configured_driver() {
        let table = [
            (Some(cri::CgroupDriver::Systemd), "cgroupfs", Driver::Systemd),
            (Some(cri::CgroupDriver::Cgroupfs), "systemd", Driver::Cgroupfs),
            (None, "systemd", Driver::Systemd),
            (None, "cgroupfs", Driver::Cgroupfs),
        ];
        for (reported, configured, expected) in table {
            assert_eq!(choose(reported, configured), expected, "{reported:?} {configured}");
        }
    }

    #[test]
    fn the_configuration_shows_the_driver_in_use() {
        let settings = load(&FlagValues::default()).expect("settings");
        for (driver, name) in [(Driver::Systemd, "systemd"), (Driver::Cgroupfs, "cgroupfs")] {
            let configz = Configz::new(settings.configz());
            show(&configz, driver);
            let shown: serde_json::Value = serde_json::from_str(&configz.text()).expect("JSON");
            assert_eq!(shown["kubeletconfig"]["cgroupDriver"], name);
        }
    }

    #[tokio::test]
    async fn pods_that_an_agent_left_suspended_are_resumed_without_the_runtime() {
        let settings = load(&FlagValues::default()).expect("settings");
        let mount = tempfile::tempdir().expect("a folder");
        let frozen = ["kubepods/burstable/podu-1", "kubepods.slice/kubepods-podu_2.slice"].map(|path| {
            let pod = mount.path().join(path);
            fs::create_dir_all(&pod).expect("folders");
            let file = pod.join("cgroup.freeze");
            fs::write(&file, "1\n").expect("a file");
            file
        });
        resume_pods(&settings, &Layout::V2 { mount: mount.path().to_owned() }).await;
        assert_eq!(frozen.map(|file| fs::read_to_string(file).expect("a file")), ["0", "0"]);
    }

    fn policy(is_v2: bool, lines: &str) -> QosPolicy {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("config.yaml");
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        fs::write(&file, format!("{head}{lines}\n")).expect("a file");
        let flags: FlagValues = [("config", file.to_str().expect("a path"))].into_iter().collect();
        let settings = load(&flags).expect("settings");
        let mount = folder.path().to_owned();
        let v1 = Layout::V1 { controllers: [("memory".to_owned(), mount.clone())].into(), unified: None };
        let sizes = Sizes { memory: 8 << 30, hugepages: [(2 << 20, 0)].into(), ..Sizes::default() };
        ThisNode { settings: &settings, sizes }.qos_policy(&if is_v2 { Layout::V2 { mount } } else { v1 })
    }

    #[test]
    fn the_policy_of_qos_classes_follows_from_settings() {
        let default = QosPolicy { hugepage_sizes: vec![2 << 20], ..QosPolicy::default() };
        assert_eq!(policy(true, ""), default);
        let tiered = "memoryReservationPolicy: TieredReservation";
        assert!(policy(true, tiered).protects_memory && !policy(false, tiered).protects_memory);
        let reserved = "featureGates: {QOSReserved: true}\nqosReserved: {memory: 50%}\nkubeReserved: {memory: 1Gi}";
        let expected = ReservedMemory { percent: 50, allocatable: 7 << 30 };
        assert_eq!(policy(true, reserved), QosPolicy { reserved: Some(expected), ..default });
    }
}
