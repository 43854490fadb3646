//! Routers of logs, streams and usage.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::PodStatus;

use super::pods::PipelineHandle;
use crate::cgroups::CgroupName;
use crate::cgroups::Driver;
use crate::cgroups::Layout;
use crate::config::Feature;
use crate::config::Settings;
use crate::config::duration::GoDuration;
use crate::metrics::Metrics;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::oom::OomCounts;
use crate::runtime::Runtime;
use crate::server::Containers;
use crate::server::Mounted;
use crate::server::PodLookup;
use crate::server::logs;
use crate::server::streams;
use crate::server::usage;
use crate::stats::Folders;
use crate::stats::Snapshots;
use crate::stats::Stats;
use crate::stats::StatsSource;
use crate::stats::SystemCgroup;
use crate::stats::SystemCgroups;
use crate::sync::SharedPods;
use crate::volumes::MeasurableVolume;

/// Where a node keeps its logs.
const NODE_LOGS: &str = "/var/log";

/// The routers, for the servers that mount them.
pub(super) fn mounted(
    settings: &Settings,
    stats: Stats,
    pods: Arc<Pods>,
    runtime: &Runtime,
    metrics: &Arc<Metrics>,
) -> Mounted {
    let containers = Containers { pods, runtime: runtime.clone() };
    let split = settings.gates.enabled(Feature::PodLogsQuerySplitStreams);
    let checkpoints =
        settings.gates.enabled(Feature::ContainerCheckpoint).then(|| settings.flags.root_dir.join("checkpoints"));
    let websockets = settings.gates.enabled(Feature::ExtendWebSocketsToKubelet).then(|| metrics.clone());
    let queries = settings.kubelet.enable_system_log_query;
    let debug = logs::router(containers.clone(), split)
        .merge(logs::node::router(PathBuf::from(NODE_LOGS), queries))
        .merge(streams::router(containers, checkpoints, websockets));
    Mounted { debug, stats: usage::router(stats, metrics.clone()) }
}

/// Usage of the node and of its pods.
///
/// # Errors
/// `cgroupRoot` is not a name of a cgroup.
pub(super) fn stats(
    settings: &Settings,
    node_name: &str,
    pods: Arc<Pods>,
    runtime: &Runtime,
    layout: Layout,
    ooms: &OomCounts,
) -> anyhow::Result<Stats> {
    Ok(Stats::new(StatsSource {
        node_name: node_name.to_owned(),
        layout,
        proc: PathBuf::from("/proc"),
        volume_period: Some(settings.kubelet.volume_stats_agg_period)
            .filter(|period| !period.is_negative())
            .map(GoDuration::std),
        system: system_cgroups(settings)?,
        folders: Folders {
            root: settings.flags.root_dir.clone(),
            pod_logs: PathBuf::from(&settings.kubelet.pod_logs_dir),
        },
        runtime: runtime.clone(),
        snapshots: pods,
        ooms: ooms.clone(),
    }))
}

/// Pods as the handlers of the servers see them, and as their usage is measured.
pub(super) struct Pods {
    /// Desired pods.
    pub shared: SharedPods,
    /// The pipeline that runs them.
    pub pipeline: PipelineHandle,
}

impl PodLookup for Pods {
    fn pod(&self, namespace: &str, name: &str) -> Option<Pod> {
        // Another one with this name may still be terminating.
        self.shared.named(&format!("{name}_{namespace}")).0
    }

    fn status(&self, pod: &Pod) -> PodStatus {
        let computed = self.pipeline.borrow().as_ref().and_then(|running| running.statuses.get(&pod_ref(pod).uid));
        computed.or_else(|| pod.status.clone()).unwrap_or_default()
    }

    fn snapshot(&self, uid: &PodUid) -> Option<Arc<PodSnapshot>> {
        self.pipeline.borrow().as_ref().and_then(|running| running.pleg.cached(uid))
    }
}

impl Snapshots for Pods {
    fn all(&self) -> Vec<Arc<PodSnapshot>> {
        self.pipeline.borrow().as_ref().map(|running| running.pleg.all()).unwrap_or_default()
    }

    fn volumes(&self) -> HashMap<PodUid, Vec<MeasurableVolume>> {
        let pipeline = self.pipeline.borrow();
        let Some(running) = pipeline.as_ref() else { return HashMap::new() };
        let of_pod = |pod: Pod| (pod_ref(&pod).uid, running.volumes.measurable(&pod));
        self.shared.all().into_iter().map(of_pod).collect()
    }
}

/// System cgroups by name. Without `kubeletCgroups` that of the kubelet is the agent's own; those of others are listed only
/// if they are configured. The cgroup driver is not known yet: both spellings of the pods' cgroup are listed, of which one
/// does not exist.
fn system_cgroups(settings: &Settings) -> anyhow::Result<SystemCgroups> {
    let kubelet = &settings.kubelet;
    let at = |path: &String| (!path.is_empty()).then(|| SystemCgroup::At(path.clone()));
    let mut all = vec![("kubelet", at(&kubelet.kubelet_cgroups).unwrap_or(SystemCgroup::OfAgent))];
    all.extend(at(&settings.flags.runtime_cgroups).map(|cgroup| ("runtime", cgroup)));
    all.extend(at(&kubelet.system_cgroups).map(|cgroup| ("misc", cgroup)));
    if kubelet.cgroups_per_qos {
        let root = CgroupName::parse(&kubelet.cgroup_root);
        let pods = root.with_context(|| format!("cgroupRoot {:?}", kubelet.cgroup_root))?.kubepods();
        all.extend([Driver::Cgroupfs, Driver::Systemd].map(|driver| ("pods", SystemCgroup::At(pods.path(driver)))));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;

    use super::*;
    use crate::config::FlagValues;
    use crate::config::load;

    #[test]
    fn of_pods_with_one_name_the_newest_is_reached() {
        let pod = |uid: &String| {
            let mut pod = k8s_openapi::api::core::v1::Pod::default();
            pod.metadata.name = Some("web".to_owned());
            pod.metadata.namespace = Some("ns".to_owned());
            pod.metadata.uid = Some(uid.clone());
            Arc::new(pod)
        };
        let mut uids: Vec<String> = (0..16).map(|n| format!("uid-{n}")).collect();
        for _ in 0..uids.len() {
            uids.rotate_left(1);
            let shared = SharedPods::holding(uids.iter().map(pod));
            let pods = Pods { shared, pipeline: watch::channel(None).1 };
            let found = pods.pod("ns", "web").expect("a pod");
            assert_eq!(found.metadata.uid.as_ref(), uids.last());
            assert!(pods.pod("ns", "other").is_none() && pods.pod("other", "web").is_none());
        }
    }

    #[test]
    fn the_kubelets_cgroup_is_the_agents_own_unless_it_is_configured() {
        let listed = |flags: &[(&'static str, &'static str)]| {
            let settings = load(&flags.iter().copied().collect::<FlagValues>()).expect("valid flags");
            system_cgroups(&settings).expect("valid names")
        };
        let at = |path: &str| SystemCgroup::At(path.to_owned());
        let pods = [("pods", at("/kubepods")), ("pods", at("/kubepods.slice"))];
        let own = [("kubelet", SystemCgroup::OfAgent)];
        assert_eq!(listed(&[]), [&own[..], &pods[..]].concat());
        let configured = [("kubelet", at("/agent")), ("runtime", at("/runtime"))];
        let flags = [("kubelet-cgroups", "/agent"), ("runtime-cgroups", "/runtime")];
        assert_eq!(listed(&flags), [&configured[..], &pods[..]].concat());
    }
}
