//! The cgroups of pods: driver, root, and the QoS loop that weighs the Burstable class.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use keblet_proto::cri::v1 as cri;
use tokio_util::sync::CancellationToken;

use crate::cgroups::CgroupName;
use crate::cgroups::Cgroups;
use crate::cgroups::Driver;
use crate::cgroups::Layout;
use crate::config::Settings;
use crate::metrics::Metrics;
use crate::runtime::Runtime;
use crate::sync::SharedPods;

/// From this version on upstream takes the cgroup driver from the runtime only (KEP-4033).
const DRIVER_NEEDED: &str = "1.37.0";

/// Period of the QoS loop, as in the kubelet.
const QOS_PERIOD: Duration = Duration::from_secs(60);
/// Its period until every source of pods has been read.
const QOS_START_PERIOD: Duration = Duration::from_secs(1);

/// Creates the tree below `cgroupRoot`; `None` with `cgroupsPerQOS: false`. The runtime's own driver overrides the
/// configured one (KEP-4033).
///
/// # Errors
/// `cgroupRoot` is invalid or lacks controllers; the systemd driver without systemd; the kernel or systemd refuses.
pub(super) async fn prepare(
    settings: &Settings,
    runtime: &Runtime,
    metrics: &Metrics,
    layout: Layout,
    pods: &SharedPods,
) -> anyhow::Result<Option<Cgroups>> {
    let kubelet = &settings.kubelet;
    if !kubelet.cgroups_per_qos {
        return Ok(None);
    }
    let reported = match runtime.runtime_config().await {
        Ok(driver) => {
            if driver.is_none() {
                metrics.node.runtime_losing_support(DRIVER_NEEDED);
            }
            driver
        }
        Err(error) => {
            tracing::warn!(%error, "cannot read the cgroup driver of the runtime; using the configured one");
            None
        }
    };
    let driver = match reported {
        Some(cri::CgroupDriver::Systemd) => Driver::Systemd,
        Some(cri::CgroupDriver::Cgroupfs) => Driver::Cgroupfs,
        None if kubelet.cgroup_driver == "systemd" => Driver::Systemd,
        None => Driver::Cgroupfs,
    };
    let root =
        CgroupName::parse(&kubelet.cgroup_root).with_context(|| format!("cgroupRoot {:?}", kubelet.cgroup_root))?;
    let cgroups = Cgroups::new(layout, driver, root).context("setting up the cgroup driver")?;
    cgroups.ensure_tree().await.context("creating the cgroups of pods")?;
    Ok(Some(cgroups.with_requests(Arc::new(pods.clone()))))
}

/// Keeps the CPU weight of the Burstable class at what its pods request, until `shutdown`.
pub(super) fn start_qos_loop(cgroups: &Cgroups, shutdown: &CancellationToken) {
    let cgroups = cgroups.clone();
    let update = async move {
        loop {
            let is_complete = cgroups.update_burstable_weight().await;
            tokio::time::sleep(if is_complete { QOS_PERIOD } else { QOS_START_PERIOD }).await;
        }
    };
    tokio::spawn(shutdown.clone().run_until_cancelled_owned(update));
}
