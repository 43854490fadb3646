//! Keeps the limits on dead containers that concern all pods (upstream: the container garbage collection, once a minute).
//!
//! Decides by the pod cache, without a call to the runtime. What exceeds a limit is removed by the pods' workers; of pods
//! whose worker has finished it is removed here, since nothing else acts on them.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::model::ContainerId;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::spec;
use crate::recorder::EventType;
use crate::retry::Operation;
use crate::sync::SharedPods;
use crate::workers::act::gc;
use crate::workers::act::gc::CountedPod;
use crate::workers::act::joined;
use crate::workers::registry::WorkerRegistry;
use crate::workers::registry::WorkerSummary;
use crate::workers::state::Phase;
use crate::workers::state::is_terminal;
use crate::workers::worker::WorkerContext;

/// Time between two passes.
const PERIOD: Duration = Duration::from_secs(60);

/// Dead containers of all pods of the pipeline.
pub(super) struct DeadContainerLimits {
    context: Arc<WorkerContext>,
    registry: WorkerRegistry,
    pods: SharedPods,
}

/// A desired pod with a worker.
struct WorkedPod {
    snapshot: Arc<PodSnapshot>,
    finished: bool,
    has_ended: bool,
}

impl DeadContainerLimits {
    /// Of the pods of these workers; `None` if no limit concerns all pods.
    pub(super) fn new(context: Arc<WorkerContext>, registry: WorkerRegistry, pods: SharedPods) -> Option<Self> {
        let policy = context.act.dead_containers.policy();
        policy.concerns_all_pods().then_some(Self { context, registry, pods })
    }

    /// Runs passes until it is dropped.
    pub(super) async fn run(self) {
        loop {
            sleep(PERIOD).await;
            self.pass().await;
        }
    }

    async fn pass(&self) {
        let dead_containers = &self.context.act.dead_containers;
        let pods = self.worked_pods();
        let counted: Vec<CountedPod<'_>> =
            pods.iter().map(|pod| CountedPod { snapshot: &pod.snapshot, has_ended: pod.has_ended }).collect();
        let excess = gc::excess(&counted, &dead_containers.policy(), self.context.clock.wall_nanos());
        dead_containers.set_excess(excess.clone());
        let has_excess = |pod: &&WorkedPod| pod.snapshot.containers.iter().any(|status| excess.contains(&status.id));
        for pod in pods.iter().filter(has_excess) {
            if pod.finished {
                self.remove(&pod.snapshot, &excess).await;
            } else {
                self.registry.request_sync(&pod.snapshot.pod.uid);
            }
        }
    }

    /// Removes what is in excess of a pod whose worker has finished.
    async fn remove(&self, snapshot: &PodSnapshot, excess: &HashSet<ContainerId>) {
        let WorkerContext { act, pleg, recorder, retries, .. } = &*self.context;
        let target = snapshot.pod.with_uid();
        if retries.due(Operation::CollectGarbage, &target).is_some() {
            return;
        }
        let errors = gc::remove_excess(act, snapshot, excess).await;
        if errors.is_empty() {
            retries.succeeded(Operation::CollectGarbage, &target);
        } else {
            let reason = joined(&errors);
            recorder.node_event(EventType::Warning, "ContainerGCFailed", &reason);
            retries.failed(Operation::CollectGarbage, &target, &reason);
        }
        // The cache then shows them as removed; a failure is corrected by the next relist.
        let _ = pleg.inspect(&snapshot.pod.uid).await;
    }

    /// Not those that are being terminated: their workers are about to decide on their containers.
    fn worked_pods(&self) -> Vec<WorkedPod> {
        let workers = self.registry.summaries();
        let worked = |snapshot: Arc<PodSnapshot>| {
            let (worker, desired) = workers.get(&snapshot.pod.uid).zip(self.pods.by_uid(&snapshot.pod.uid))?;
            let finished = worker.phase == Phase::Finished;
            let has_ended = has_ended(worker, &desired);
            (finished || !worker.terminating).then_some(WorkedPod { snapshot, finished, has_ended })
        };
        self.context.pleg.all().into_iter().filter_map(worked).collect()
    }
}

/// True if also the next agent does not start it: the API server has its end. Of a static pod only the containers show
/// that it has ended.
fn has_ended(worker: &WorkerSummary, desired: &Pod) -> bool {
    worker.phase == Phase::Finished && !spec::is_static(desired) && is_terminal(desired)
}
