//! State of pods for the servers, and gauges that are computed when metrics are read.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::Mutex;
use tokio::sync::watch;

use super::observers::sensor_reports;
use crate::cgroups::Layout;
use crate::cli::logging;
use crate::cli::version::KUBERNETES;
use crate::config::Settings;
use crate::events::sensors::SensorStates;
use crate::kernel::usage::AvailableMemory;
use crate::kernel::usage::DiskUsage;
use crate::metrics::ClaimStats;
use crate::metrics::LogsOf;
use crate::metrics::Metrics;
use crate::metrics::PodOrigin;
use crate::metrics::VolumeState;
use crate::metrics::Working;
use crate::model::Pod;
use crate::model::PodRef;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::spec;
use crate::pipeline::Running;
use crate::runtime::RuntimeState;
use crate::server;
use crate::server::AgentState;
use crate::server::Configz;
use crate::server::Handles;
use crate::server::SensorReport;
use crate::stats::ClaimUsage;
use crate::stats::Stats;
use crate::sync::SharedPods;
use crate::volumes::Volumes;
use crate::workers::registry;
use crate::workers::state::Phase;

/// How long a request for metrics waits for current gauges. Prometheus gives up after 10 s.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(5);

/// Sources of the handles.
pub(super) struct Server<'a> {
    /// Metrics.
    pub metrics: &'a Arc<Metrics>,
    /// Sensors.
    pub sensor_states: &'a SensorStates,
    /// Desired pods.
    pub shared: &'a SharedPods,
    /// Configuration and flags.
    pub settings: &'a Settings,
    /// Verbosity of the log.
    pub verbosity: logging::Verbosity,
    /// Usage of pods.
    pub stats: Stats,
    /// The machine's cgroup hierarchies.
    pub layout: Layout,
}

/// The pipeline once the runtime has been reached, and `None` before.
pub(super) type PipelineHandle = watch::Receiver<Option<Running>>;

impl Server<'_> {
    /// Handles for the servers.
    pub(super) fn handles(
        &self,
        configz: Configz,
        runtime: watch::Receiver<RuntimeState>,
        pipeline: PipelineHandle,
    ) -> Handles {
        let (stats, layout) = (self.stats.clone(), self.layout.clone());
        let (metrics, shared) = (self.metrics.clone(), self.shared.clone());
        let gauges =
            Arc::new(Gauges { metrics, shared, pipeline, stats, layout, refresh_lock: RefreshLock::default() });
        let (sensor_states, verbosity) = (self.sensor_states.clone(), self.verbosity.clone());
        Handles {
            agent: Arc::new(Agent { gauges, sensor_states, runtime, verbosity }),
            configz,
            version: KUBERNETES,
            flags: Arc::new(self.settings.flag_values()),
            metrics: self.metrics.clone(),
        }
    }
}

/// The agent as the servers see it.
struct Agent {
    gauges: Arc<Gauges>,
    sensor_states: SensorStates,
    runtime: watch::Receiver<RuntimeState>,
    verbosity: logging::Verbosity,
}

impl AgentState for Agent {
    fn pods(&self) -> Vec<Pod> {
        pods(&self.gauges.shared, &self.gauges.pipeline)
    }

    fn running_pods(&self) -> Result<Vec<Pod>, String> {
        match &*self.gauges.pipeline.borrow() {
            Some(running) => Ok(server::running(&running.pleg.all())),
            None => Err("the container runtime has not answered yet".to_owned()),
        }
    }

    fn sensors(&self) -> Vec<SensorReport> {
        sensor_reports(&self.sensor_states)
    }

    fn sync_loop_age(&self) -> Option<Duration> {
        self.gauges.shared.last_iteration().map(|at| at.elapsed())
    }

    fn runtime_ready(&self) -> Result<(), String> {
        match &*self.runtime.borrow() {
            RuntimeState::Ready { .. } => Ok(()),
            RuntimeState::Unreachable(error) | RuntimeState::NotReady { error, .. } => Err(error.clone()),
            RuntimeState::Unknown => Err("the container runtime has not answered yet".to_owned()),
        }
    }

    fn refresh_metrics(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.gauges.clone().refresh())
    }

    fn set_verbosity(&self, level: u32) -> Result<(), String> {
        self.verbosity.set(level)
    }
}

fn pods(shared: &SharedPods, pipeline: &PipelineHandle) -> Vec<Pod> {
    let statuses = pipeline.borrow().as_ref().map(|running| running.statuses.clone());
    // A pod of the API server is shown as it was last received.
    let own = |pod: &Pod| spec::is_static(pod);
    let with_status = |pod: Pod| match statuses.as_ref().filter(|_| own(&pod)).and_then(|s| s.get(&pod_ref(&pod).uid)) {
        Some(status) => {
            let mut shown = k8s_openapi::api::core::v1::Pod::clone(&pod);
            shown.status = Some(status);
            Arc::new(shown)
        }
        None => pod,
    };
    shared.all().into_iter().map(with_status).collect()
}

/// Computes gauges from the agent's state when metrics are read.
struct Gauges {
    metrics: Arc<Metrics>,
    shared: SharedPods,
    pipeline: PipelineHandle,
    stats: Stats,
    layout: Layout,
    refresh_lock: RefreshLock,
}

impl Gauges {
    /// Computes them, if that does not take too long: see [`RefreshLock::run`].
    async fn refresh(self: Arc<Self>) {
        let refresh_lock = self.refresh_lock.clone();
        let refresh = async move {
            // Not on the thread that computes the others: this needs such threads itself, and none may be left.
            let claims = self.stats.claims().await;
            let computed = tokio::task::spawn_blocking(move || self.compute(&claims));
            // A panic in it is logged.
            let _ = computed.await;
        };
        refresh_lock.run(refresh).await;
    }

    /// Blocks.
    fn compute(&self, claims: &[ClaimUsage]) {
        self.metrics.volumes.claims(claims.iter().map(claim_stats));
        if let Some(memory) = AvailableMemory::read(&self.layout) {
            self.metrics.eviction.memory_available(memory.working_set, memory.mem_available);
        }
        let (fixed, api): (Vec<Pod>, Vec<Pod>) = self.shared.all().into_iter().partition(|pod| spec::is_static(pod));
        self.metrics.pods.desired(PodOrigin::Static, fixed.len());
        self.metrics.pods.desired(PodOrigin::Api, api.len());
        self.metrics.pods.mirrors(self.shared.mirrors().len());
        let ephemeral = fixed.iter().chain(&api).map(|pod| spec::ephemeral_containers(pod).len()).sum();
        self.metrics.containers.ephemeral(ephemeral);
        // Not borrowed: what follows borrows it again.
        let Some(running) = &self.pipeline.borrow().clone() else { return };
        let desired = fixed.into_iter().chain(api).map(|pod| (pod_ref(&pod).uid, pod)).collect();
        self.count_working(&desired, running);
        let snapshots = running.pleg.all();
        let logs = self.stats.logs();
        self.metrics.containers.logs(logs.iter().map(|(pod, container, bytes)| (logs_of(pod, container), *bytes)));
        let certificates = running.objects.certificate_states();
        let certificates = certificates.iter().map(|((signer, state), count)| (signer.as_str(), *state, *count));
        self.metrics.certificates.of_pods(certificates);
        self.metrics.pressure.refresh();
        self.metrics.pods.observe_cache(&snapshots);
    }

    /// Pods by lifecycle state, and active pods.
    fn count_working(&self, desired: &HashMap<PodUid, Pod>, running: &Running) {
        let working = running.registry.summaries();
        let has_ended = |uid: &PodUid, pod: &Pod| {
            let stored = running.statuses.stored(uid);
            let status = stored.as_ref().map(|stored| &*stored.status).or(pod.status.as_ref());
            matches!(status.and_then(|status| status.phase.as_deref()), Some("Failed" | "Succeeded"))
        };
        let is_active = |(uid, pod): &(&PodUid, &Pod)| {
            let worker = working.get(*uid);
            worker.is_none_or(|worker| worker.phase < Phase::Terminated)
                && (!has_ended(uid, pod) || worker.is_some_and(|w| w.terminating))
        };
        let active: Vec<&Pod> = desired.iter().filter(is_active).map(|(_, pod)| pod).collect();
        count_volumes(&self.metrics, active.iter().copied(), &running.volumes);
        let (fixed, api): (Vec<&Pod>, Vec<&Pod>) = active.into_iter().partition(|pod| spec::is_static(pod));
        self.metrics.pods.active(PodOrigin::Static, fixed.len());
        self.metrics.pods.active(PodOrigin::Api, api.len());
        let mut counts: HashMap<Working, usize> = HashMap::new();
        for (uid, worker) in &working {
            *counts.entry(group(worker, desired.contains_key(uid))).or_default() += 1;
        }
        self.metrics.pods.working(counts);
    }
}

/// One refresh at a time, which all requests share that came before it began. It goes on after its requests have timed out,
/// so that a file system that does not answer keeps one thread, however often metrics are read.
#[derive(Clone, Debug, Default)]
struct RefreshLock {
    /// How many requests there were.
    requests: Arc<AtomicU64>,
    /// How many of them had come when the last refresh that was completed began.
    served: Arc<Mutex<u64>>,
}

impl RefreshLock {
    /// Runs `work` once no other refresh runs, and not at all if one that began after this call has ended by then. Returns
    /// after [`REFRESH_TIMEOUT`] at the latest.
    async fn run(&self, work: impl Future<Output = ()> + Send + 'static) {
        let request = self.requests.fetch_add(1, SeqCst) + 1;
        let locked = async {
            let mut served = self.served.clone().lock_owned().await;
            if *served >= request {
                return;
            }
            let waiting = self.requests.load(SeqCst);
            let running = tokio::spawn(async move {
                work.await;
                *served = waiting;
            });
            // A panic in it is logged, and leaves gauges that are out of date.
            let _ = running.await;
        };
        if tokio::time::timeout(REFRESH_TIMEOUT, locked).await.is_err() {
            tracing::debug!("metrics are answered with gauges that are out of date");
        }
    }
}

fn logs_of<'a>(pod: &'a PodRef, container: &'a str) -> LogsOf<'a> {
    LogsOf { uid: pod.uid.as_str(), namespace: &pod.namespace, pod: &pod.name, container }
}

fn claim_stats(claim: &ClaimUsage) -> ClaimStats<'_> {
    let DiskUsage { capacity, available, used, inodes, inodes_free, inodes_used } = claim.usage;
    let ClaimUsage { namespace, name, .. } = claim;
    ClaimStats { namespace, name, capacity, available, used, inodes, inodes_free, inodes_used }
}

/// Counts desired and actual volumes by plugin.
fn count_volumes<'a>(metrics: &Metrics, wanting: impl Iterator<Item = &'a Pod>, volumes: &Volumes) {
    let mut wanted: BTreeMap<Cow<'static, str>, usize> = BTreeMap::new();
    wanting.flat_map(|pod| volumes.plugins_wanted(pod)).for_each(|plugin| *wanted.entry(plugin).or_default() += 1);
    let wanted = wanted.iter().map(|(plugin, count)| (VolumeState::Desired, &**plugin, *count));
    let set_up = volumes.set_up_by_plugin();
    let set_up = set_up.iter().map(|(plugin, count)| (VolumeState::Actual, *plugin, *count));
    metrics.volumes.totals(wanted.chain(set_up));
}

/// Labels of a pod with a worker.
fn group(worker: &registry::WorkerSummary, desired: bool) -> Working {
    let lifecycle = match worker.phase {
        Phase::Syncing => "sync",
        Phase::Terminating => "terminating",
        Phase::Terminated | Phase::Finished => "terminated",
    };
    let (config, origin) = match &worker.pod {
        None => ("runtime_only", PodOrigin::Unknown),
        Some(pod) => {
            let origin = if spec::is_static(pod) { PodOrigin::Static } else { PodOrigin::Api };
            (if desired { "desired" } else { "orphan" }, origin)
        }
    };
    Working { lifecycle, config, origin }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use tokio::time::Instant;

    use super::*;
    use crate::metrics::Metrics;
    use crate::model::testing;

    #[tokio::test(start_paused = true)]
    async fn gauges_are_refreshed_in_turn_and_a_refresh_that_hangs_is_not_waited_for() {
        let (refresh_lock, running, most) =
            (RefreshLock::default(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let refresh = || {
            let (running, most) = (running.clone(), most.clone());
            refresh_lock.run(async move {
                most.fetch_max(running.fetch_add(1, SeqCst) + 1, SeqCst);
                tokio::time::sleep(Duration::from_millis(100)).await;
                running.fetch_sub(1, SeqCst);
            })
        };
        futures_util::future::join_all((0..8).map(|_| refresh())).await;
        assert_eq!((running.load(SeqCst), most.swap(0, SeqCst)), (0, 1));
        let began = Instant::now();
        refresh_lock.run(std::future::pending()).await;
        refresh().await;
        assert!(began.elapsed() < 3 * REFRESH_TIMEOUT, "{:?}", began.elapsed());
        assert_eq!(most.load(SeqCst), 0, "no second one is started beside it");
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_wait_share_the_next_refresh() {
        let (refresh_lock, begun) = (RefreshLock::default(), Arc::new(AtomicUsize::new(0)));
        let refresh = || {
            let begun = begun.clone();
            refresh_lock.run(async move {
                begun.fetch_add(1, SeqCst);
                tokio::time::sleep(Duration::from_millis(100)).await;
            })
        };
        futures_util::future::join_all((0..100).map(|_| refresh())).await;
        assert_eq!(begun.load(SeqCst), 2, "the first one has begun before the others came");
        refresh().await;
        assert_eq!(begun.load(SeqCst), 3, "what was done before is out of date");
        refresh_lock.run(async { panic!("this test makes it panic") }).await;
        refresh().await;
        assert_eq!(begun.load(SeqCst), 4);
    }

    #[test]
    fn pods_with_a_worker_are_grouped_as_upstream_does() {
        let working = |phase, pod: Option<k8s_openapi::api::core::v1::Pod>| registry::WorkerSummary {
            phase,
            terminating: phase > Phase::Syncing,
            pod: pod.map(Arc::new),
        };
        let pod = || testing::pod("Always", &[], &["a"]);
        let seen = [
            (working(Phase::Syncing, Some(testing::into_static(pod()))), true),
            (working(Phase::Syncing, Some(pod())), true),
            (working(Phase::Terminating, Some(pod())), false),
            (working(Phase::Terminating, None), false),
            (working(Phase::Finished, Some(pod())), true),
        ];
        let metrics = Metrics::new();
        metrics.pods.working(seen.iter().map(|(worker, desired)| (group(worker, *desired), 1)));
        let text = metrics.render().expect("metrics");
        for labels in [
            r#"config="desired",lifecycle="sync",static="true""#,
            r#"config="desired",lifecycle="sync",static="""#,
            r#"config="orphan",lifecycle="terminating",static="""#,
            r#"config="runtime_only",lifecycle="terminating",static="unknown""#,
            r#"config="desired",lifecycle="terminated",static="""#,
        ] {
            let line = format!("kubelet_working_pods{{{labels}}} 1");
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
    }

    #[test]
    fn volumes_are_counted_as_wanted_and_as_set_up() {
        let pod: k8s_openapi::api::core::v1::Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "p", "uid": "u"},
            "spec": {
                "volumes": [{"name": "a", "emptyDir": {}}, {"name": "s", "secret": {"secretName": "x"}}],
                "containers": [{"name": "c", "volumeMounts": [
                    {"name": "a", "mountPath": "/a"}, {"name": "s", "mountPath": "/s"},
                ]}],
            },
        }))
        .expect("a pod");
        let (metrics, all) = (Metrics::new(), [Arc::new(pod)]);
        let dir = tempfile::tempdir().expect("a folder");
        std::fs::create_dir_all(dir.path().join("pods/u/volumes/kubernetes.io~secret/s")).expect("a folder");
        let set_up = Volumes::new(dir.path());
        set_up.reconstruct().expect("a list");
        count_volumes(&metrics, all.iter(), &set_up);
        let text = metrics.render().expect("metrics");
        let mut lines: Vec<&str> = text.lines().filter(|line| line.starts_with("volume_manager_total")).collect();
        lines.sort_unstable();
        let line = |plugin, state| {
            format!(
                r#"volume_manager_total_volumes{{plugin_name="kubernetes.io/{plugin}",state="{state}_state_of_world"}} 1"#
            )
        };
        assert_eq!(lines, [line("empty-dir", "desired"), line("secret", "actual"), line("secret", "desired")]);
    }
}
