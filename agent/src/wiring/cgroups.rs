//! The pods' cgroup tree: who makes it, where it hangs.

use std::path::Path;

use anyhow::Context as _;
use keblet_proto::cri::v1 as cri;

use crate::config::Settings;
use crate::kernel::cgroup::CgroupName;
use crate::kernel::cgroup::Cgroups;
use crate::kernel::cgroup::Driver;
use crate::kernel::cgroup::Layout;
use crate::metrics::Metrics;
use crate::runtime::Runtime;

/// From this version on upstream asks runtimes for their driver and takes no other answer.
const DRIVER_NEEDED: &str = "1.37.0";

/// Makes the tree below `cgroupRoot`; `None` with `cgroupsPerQOS: false`. The runtime's own driver overrides the
/// configured one (KEP-4033).
pub async fn prepare(settings: &Settings, runtime: &Runtime, metrics: &Metrics) -> anyhow::Result<Option<Cgroups>> {
    let kubelet = &settings.kubelet;
    if !kubelet.cgroups_per_qos {
        return Ok(None);
    }
    let told = match runtime.runtime_config().await {
        Ok(told) => {
            if told.is_none() {
                metrics.node.runtime_losing_support(DRIVER_NEEDED);
            }
            told
        }
        Err(error) => {
            tracing::warn!(%error, "the runtime does not tell its cgroup driver; the configured one is used");
            None
        }
    };
    let driver = match told {
        Some(cri::CgroupDriver::Systemd) => Driver::Systemd,
        Some(cri::CgroupDriver::Cgroupfs) => Driver::Cgroupfs,
        None if kubelet.cgroup_driver == "systemd" => Driver::Systemd,
        None => Driver::Cgroupfs,
    };
    let root =
        CgroupName::parse(&kubelet.cgroup_root).with_context(|| format!("cgroupRoot {:?}", kubelet.cgroup_root))?;
    let layout = Layout::detect().context("finding the cgroup hierarchies")?;
    let cgroups = Cgroups::new(layout, driver, root).context("setting up the cgroup driver")?;
    cgroups.ensure_tree().await.context("making the cgroups of pods")?;
    Ok(Some(cgroups))
}

/// True if this machine has cgroup v2 alone.
pub fn is_v2() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}
