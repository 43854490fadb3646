//! Settings of this node, from its configuration and the machine.

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use tokio::sync::watch;

use crate::cgroups::Hierarchies;
use crate::cgroups::Layout;
use crate::cgroups::arithmetic::page_size;
use crate::cli::host;
use crate::cli::version::KUBERNETES;
use crate::config::Feature;
use crate::config::Settings;
use crate::filesystem;
use crate::filesystem::Sharing;
use crate::images::GcPolicy;
use crate::images::PullLimits;
use crate::kernel::selinux;
use crate::model::Amount;
use crate::model::DeadContainerPolicy;
use crate::node::Machine;
use crate::node::NodeConfig;
use crate::node::RootFs;
use crate::node::device_resources;
use crate::node::make_device_folder;
use crate::node::resources::ResourceConfig;
use crate::node::resources::allocatable;
use crate::runtime::RuntimeState;
use crate::server::Configz;
use crate::status::NodeAddresses;
use crate::workers::act::NodeFiles;
use crate::workers::generate::DnsSettings;
use crate::workers::generate::HandlerFeatures;
use crate::workers::generate::MemoryQos;
use crate::workers::generate::NodeIps;
use crate::workers::generate::NodeSettings;
use crate::workers::generate::ResourceSettings;
use crate::workers::generate::SecuritySettings;
use crate::workers::generate::Swap;

/// This node.
pub(super) struct Node {
    /// Its name.
    pub name: String,
    /// Settings of its object.
    pub config: Arc<NodeConfig>,
    /// The size of the root directory's file system, the same for all readers of the machine.
    pub root_fs: RootFs,
    /// Its configuration as `/configz` shows it.
    pub configz: Configz,
}

/// Reads the node's name and what another kubelet has left, and makes the agent's directories.
pub(super) fn describe(settings: &Settings, layout: &Layout) -> anyhow::Result<Node> {
    let name = host::node_name(&settings.flags.hostname_override)?;
    make_directories(settings)?;
    let root = &settings.flags.root_dir;
    let has_new_root = make_device_folder(root)
        .with_context(|| format!("making the directory of device plugins in {}", root.display()))?;
    let mut config = NodeConfig { has_new_root, ..NodeConfig::new(settings, &name, KUBERNETES) };
    config.resources.devices = device_resources(root);
    config.warning = (!layout.limits_cpu()).then_some("CPU hardcapping unsupported");
    let configz = Configz::new(settings.configz());
    Ok(Node { name, config: Arc::new(config), root_fs: RootFs::default(), configz })
}

/// The agent's own directories, with the modes and in the order of a kubelet.
fn make_directories(settings: &Settings) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let root = &settings.flags.root_dir;
    let logs = PathBuf::from(&settings.kubelet.pod_logs_dir);
    let wanted = [
        (root.clone(), 0o750),
        (logs, 0o750),
        (root.join("pods"), 0o750),
        (root.join("plugins"), 0o750),
        (root.join("plugins_registry"), 0o750),
        (root.join("pod-resources"), 0o750),
        (root.join("checkpoints"), 0o700),
        (PathBuf::from("/var/log/containers"), 0o755),
    ];
    for (path, mode) in wanted {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(mode)
            .create(&path)
            .with_context(|| format!("making directory {}", path.display()))?;
    }
    share_mounts(root);
    Ok(())
}

/// Mount propagation needs a shared root directory, as a kubelet makes it. Without permission to mount, or where pods of an
/// agent that did not have mounts, everything else works.
fn share_mounts(root: &Path) {
    let lack =
        "volumes with mountPropagation other than None, and recursively read-only ones, are refused by the runtime";
    match filesystem::make_shared(root) {
        Ok(Sharing::Shared) => {}
        Ok(Sharing::Made) => tracing::info!(root = %root.display(), "made mounts below the root directory shared"),
        Ok(Sharing::HasMounts) => {
            let problem = "it holds mounts of pods; drain the node and restart the agent";
            tracing::warn!(root = %root.display(), problem, lack, "the root directory is not on a shared mount");
        }
        Err(error) => {
            tracing::warn!(root = %root.display(), %error, lack, "cannot make mounts below the root directory shared");
        }
    }
}

/// Limits on image pulls.
pub(super) fn pull_limits(settings: &Settings) -> PullLimits {
    let kubelet = &settings.kubelet;
    let parallel = kubelet.max_parallel_image_pulls.and_then(|max| usize::try_from(max).ok());
    let serialize = kubelet.serialize_image_pulls;
    PullLimits {
        parallel: if serialize { Some(1) } else { parallel },
        per_second: u32::try_from(kubelet.registry_pull_qps).unwrap_or(0),
        burst: u32::try_from(kubelet.registry_burst).unwrap_or(0),
    }
}

/// When unused images are removed.
pub(super) fn image_gc(settings: &Settings) -> GcPolicy {
    let kubelet = &settings.kubelet;
    GcPolicy {
        high: u64::try_from(kubelet.image_gc_high_threshold_percent).unwrap_or(0),
        low: u64::try_from(kubelet.image_gc_low_threshold_percent).unwrap_or(0),
        min_age: kubelet.image_minimum_gc_age.std(),
        max_age: kubelet.image_maximum_gc_age.std(),
    }
}

/// When dead containers are removed.
pub(super) fn dead_containers(settings: &Settings) -> DeadContainerPolicy {
    let flags = &settings.flags;
    DeadContainerPolicy {
        // A negative number is no limit.
        per_container: usize::try_from(flags.maximum_dead_containers_per_container).ok(),
        total: usize::try_from(flags.maximum_dead_containers).ok(),
        min_age: flags.minimum_container_ttl_duration.std(),
    }
}

/// Files of the node.
pub(super) fn files(settings: &Settings) -> NodeFiles {
    let resolv_conf = settings.kubelet.resolv_conf.clone();
    NodeFiles { resolv_conf: Some(resolv_conf).filter(|path| !path.is_empty()).map(Into::into), ..NodeFiles::default() }
}

impl Node {
    /// Settings of sandboxes and containers.
    pub(super) fn settings(
        &self,
        settings: &Settings,
        hierarchies: &Hierarchies,
        addresses: watch::Receiver<NodeAddresses>,
        runtime: watch::Receiver<RuntimeState>,
    ) -> NodeSettings {
        let kubelet = &settings.kubelet;
        let root = &settings.flags.root_dir;
        let cluster_dns = kubelet.cluster_dns.iter().filter(|ip| ip.parse::<IpAddr>().is_ok()).cloned().collect();
        NodeSettings {
            pod_logs_dir: PathBuf::from(&kubelet.pod_logs_dir),
            keep_logs: kubelet.container_log_max_size.parse::<Amount>().is_ok_and(Amount::is_negative),
            dns: DnsSettings {
                cluster_dns,
                cluster_domain: kubelet.cluster_domain.clone(),
                ignores_override: !settings.gates.enabled(Feature::HostnameOverride),
                node_ips: NodeIps::new(addresses),
            },
            resources: resources(settings, hierarchies, &self.root_fs),
            security: SecuritySettings {
                seccomp_default: kubelet.seccomp_default || settings.flags.seccomp_default,
                seccomp_root: root.join("seccomp"),
                thermal_throttle: thermal_throttle(),
                selinux: selinux::is_enabled(Path::new("/")),
                handlers: HandlerFeatures::new(runtime),
            },
            stop_signals: settings.gates.enabled(Feature::ContainerStopSignals),
            env_files: settings.gates.enabled(Feature::EnvFiles),
            kubernetes_version: KUBERNETES.to_owned(),
        }
    }
}

/// The same numbers as the Node object's.
fn resources(settings: &Settings, hierarchies: &Hierarchies, root_fs: &RootFs) -> ResourceSettings {
    let kubelet = &settings.kubelet;
    let cgroup_v2 = hierarchies.layout.is_v2();
    let machine = Machine::read(Path::new("/"), &settings.flags.root_dir, root_fs);
    let sizes = machine.sizes.unwrap_or_default();
    let config = ResourceConfig::new(kubelet, settings.flags.experimental_allocatable_ignore_eviction);
    let period = kubelet.cpu_cfs_quota_period.std().as_micros();
    ResourceSettings {
        cfs_period: kubelet.cpu_cfs_quota.then(|| u64::try_from(period).unwrap_or(u64::MAX)),
        memory_capacity: sizes.memory,
        allocatable: allocatable(&sizes, &config),
        hugepage_sizes: sizes.hugepages.into_keys().collect(),
        page_size: usize::try_from(page_size()).unwrap_or(0),
        cgroup_v2,
        protects_memory: cgroup_v2 && hierarchies.layout.offers("memory"),
        single_process_oom_kill: !cgroup_v2 || kubelet.single_process_oom_kill.unwrap_or(false),
        swap: swap(settings, hierarchies, machine.swap),
        memory_qos: settings.gates.enabled(Feature::MemoryQoS).then(|| MemoryQos {
            tiered: kubelet.memory_reservation_policy == "TieredReservation",
            throttling_factor: kubelet.memory_throttling_factor,
        }),
        pod_pids_limit: Some(kubelet.pod_pids_limit).filter(|limit| *limit > 0),
    }
}

/// Swap of containers, on a machine with so many bytes of it.
fn swap(settings: &Settings, hierarchies: &Hierarchies, node_swap: i64) -> Swap {
    match settings.kubelet.memory_swap.swap_behavior.as_str() {
        _ if !hierarchies.limits_swap => Swap::NoController,
        "LimitedSwap" => Swap::Limited { node_swap },
        _ => Swap::Forbidden,
    }
}

/// The processors' thermal folders, hidden from containers.
fn thermal_throttle() -> Vec<String> {
    let entries = fs::read_dir("/sys/devices/system/cpu").into_iter().flatten().flatten();
    let mut found: Vec<String> = entries
        .map(|entry| entry.path().join("thermal_throttle"))
        .filter(|path| path.is_dir())
        .map(|path| path.to_string_lossy().into_owned())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use serde_json::Value;
    use serde_json::json;

    use super::*;
    use crate::config::FlagValues;
    use crate::config::load;

    /// Settings with these fields of the kubelet's configuration, and these flags.
    pub(in crate::wiring) fn settings(fields: &Value, flags: &[(&str, &str)]) -> Settings {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("config.json");
        let mut config = json!({"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration"});
        config.as_object_mut().expect("an object").extend(fields.as_object().expect("fields").clone());
        fs::write(&file, config.to_string()).expect("a file");
        let config = [("config", file.to_str().expect("a path"))];
        load(&config.into_iter().chain(flags.iter().copied()).collect::<FlagValues>()).expect("settings")
    }

    #[test]
    fn limits_on_pulls() {
        let limits = |parallel, per_second, burst| PullLimits { parallel, per_second, burst };
        for (fields, expected) in [
            (json!({}), PullLimits::default()),
            (json!({"serializeImagePulls": false}), limits(None, 5, 10)),
            (json!({"serializeImagePulls": false, "maxParallelImagePulls": 3}), limits(Some(3), 5, 10)),
            (json!({"maxParallelImagePulls": 3}), limits(Some(3), 5, 10)),
            (json!({"registryPullQPS": 0, "registryBurst": 7}), limits(Some(1), 0, 7)),
        ] {
            assert_eq!(pull_limits(&settings(&fields, &[])), expected, "{fields}");
        }
    }

    #[test]
    fn when_unused_images_are_removed() {
        let (minute, hour) = (Duration::from_secs(60), Duration::from_secs(3600));
        let stated = json!({"imageGCHighThresholdPercent": 91, "imageGCLowThresholdPercent": 72,
            "imageMinimumGCAge": "3m", "imageMaximumGCAge": "4h"});
        for (fields, expected) in [
            (json!({}), GcPolicy { high: 85, low: 80, min_age: 2 * minute, max_age: Duration::ZERO }),
            (stated, GcPolicy { high: 91, low: 72, min_age: 3 * minute, max_age: 4 * hour }),
        ] {
            assert_eq!(image_gc(&settings(&fields, &[])), expected, "{fields}");
        }
    }

    #[test]
    fn which_dead_containers_are_kept() {
        let (of_each, of_all) = ("maximum-dead-containers-per-container", "maximum-dead-containers");
        let (min_age, none) = (Duration::from_secs(30), Duration::ZERO);
        let stated = [(of_each, "2"), (of_all, "9"), ("minimum-container-ttl-duration", "30s")];
        for (flags, expected) in [
            (&[][..], DeadContainerPolicy::default()),
            (&stated, DeadContainerPolicy { per_container: Some(2), total: Some(9), min_age }),
            (
                &[(of_each, "0"), (of_all, "0")],
                DeadContainerPolicy { per_container: Some(0), total: Some(0), min_age: none },
            ),
            (&[(of_each, "-1")], DeadContainerPolicy { per_container: None, total: None, min_age: none }),
        ] {
            assert_eq!(dead_containers(&settings(&json!({}), flags)), expected, "{flags:?}");
        }
    }
}
