//! The whole agent on a simulated node, with the real pipeline. Desired pods come from the test instead of a folder.

mod options;
mod start;

use std::path::Path;
use std::sync::Arc;

use keblet::model::Clock;
use keblet::model::ConfigSource;
use keblet::model::Pod;
use keblet::model::PodUid;
use keblet::model::PodUpdate;
use keblet::model::Pressures;
use keblet::oom::OomReporter;
use keblet::pipeline::Desired;
use keblet::pipeline::NodeGarbage;
use keblet::pipeline::Running;
use keblet::pipeline::Started;
use keblet::probes::ProbeResultStore;
use keblet::recorder::Recorder;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeOptions;
use keblet::runtime::RuntimeState;
use keblet::runtime::watch_runtime;
use keblet::sources;
use keblet::status::Statuses;
use keblet::status::TerminationReason;
use keblet::sync::EvictionSender;
use keblet::sync::KillRequest;
use keblet::sync::SharedPods;
use keblet::workers::state::KillOptions;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::sync::DropGuard;

use super::pleg_harness::PlegHarness;
use super::pleg_harness::SensorSet;
use super::pleg_harness::clock;
use crate::cri::SimRuntime;
use options::StartOptions;

/// Capacity of the sync loop's update channel.
const UPDATES: usize = 64;

/// One agent. Dropping it stops all its tasks at once, as SIGKILL does.
pub struct Agent {
    /// Sensors and PLEG.
    pub harness: PlegHarness,
    /// Published statuses.
    pub statuses: Statuses,
    /// Results of probes, as a prober publishes them.
    pub probes: ProbeResultStore,
    /// Eviction requests.
    pub evictions: EvictionSender,
    /// What can be removed from the node without terminating a pod.
    pub garbage: NodeGarbage,
    /// Resources under pressure.
    pub pressures: watch::Sender<Pressures>,
    /// All desired pods.
    pub desired: SharedPods,
    pub(super) clock: Clock,
    pub(super) running: Running,
    updates: mpsc::Sender<PodUpdate>,
    closed: watch::Sender<bool>,
    /// True while the sync loop must not begin yet.
    pub(super) preparing: watch::Sender<bool>,
    sync_loop: JoinSet<()>,
    pub(super) shutdown: CancellationToken,
    pub(super) tasks: JoinSet<()>,
    _delivered: mpsc::Receiver<PodUpdate>,
    _aside: DropGuard,
}

impl Agent {
    fn begin(sim: &SimRuntime, sensors: SensorSet, root: &Path, pods: Vec<Pod>, options: StartOptions) -> Self {
        let runtime = super::pleg_harness::runtime(sim, RuntimeOptions::default());
        let desired = SharedPods::default();
        let harness = harness(sim, sensors, &runtime, &desired, &options);
        let (aside, shutdown) = (CancellationToken::new(), CancellationToken::new());
        let mut tasks = JoinSet::new();
        let (state_sender, state) = watch::channel(RuntimeState::Unknown);
        tasks.spawn(watch_runtime(runtime.clone(), state_sender, harness.sensor_states.subscribe(), aside.clone()));
        let (updates, receiver) = mpsc::channel(UPDATES);
        // The first set of pods is in the channel before the loop begins.
        let _ = updates.try_send(PodUpdate::Add(options.first_source(), pods));
        let recorder = Recorder::default();
        let (delivered, sources) = sources::start(options.sources(), clock(sim), recorder, &mut tasks, aside.clone());
        let (closed, pressures) = (watch::Sender::new(false), watch::Sender::new(Pressures::default()));
        let mut services = options.services(sim, root, runtime, state);
        services.pods.desired = desired.clone();
        services.admission.closed = closed.subscribe();
        services.admission.pressures = pressures.subscribe();
        let updated = Desired { updates: receiver, sources };
        let Started { running, garbage, sync } =
            services.start(updated, harness.pleg.clone(), &mut tasks, shutdown.clone());
        let preparing = watch::Sender::new(false);
        Self {
            harness,
            statuses: running.statuses.clone(),
            probes: running.probes.clone(),
            evictions: running.evictions(),
            garbage,
            pressures,
            clock: clock(sim),
            desired,
            running,
            updates,
            closed,
            sync_loop: spawn_loop(preparing.subscribe(), sync),
            preparing,
            shutdown,
            tasks,
            _delivered: delivered,
            _aside: aside.drop_guard(),
        }
    }

    /// Adds a desired pod.
    pub async fn add(&self, pod: Pod) {
        self.send(PodUpdate::Add(ConfigSource::File, vec![pod])).await;
    }

    /// Updates a desired pod, under the same UID.
    pub async fn update(&self, pod: Pod) {
        self.send(PodUpdate::Update(ConfigSource::File, vec![pod])).await;
    }

    /// Replaces a desired pod, of which only the API status has changed.
    pub async fn reconcile(&self, pod: Pod) {
        self.send(PodUpdate::Reconcile(ConfigSource::File, vec![pod])).await;
    }

    /// From now on the API server has these pods, which cannot be decoded, and no others such.
    pub async fn keep_undecodable(&self, uids: &[&str]) {
        let uids = uids.iter().map(|uid| PodUid::from(*uid)).collect();
        self.send(PodUpdate::Undecodable(ConfigSource::Api, uids)).await;
    }

    /// Removes a desired pod.
    pub async fn remove(&self, pod: Pod) {
        self.send(PodUpdate::Remove(ConfigSource::File, vec![pod])).await;
    }

    /// Requests the termination of a pod, as a graceful node shutdown does, and waits until it has terminated.
    pub async fn kill(&self, uid: PodUid, grace: i64, reason: TerminationReason) {
        let finished = CancellationToken::new();
        let options = KillOptions {
            grace: Some(grace),
            termination_reason: Some(Arc::new(reason)),
            finished: Some(finished.clone()),
            ..KillOptions::default()
        };
        if self.running.kills.send(KillRequest { uid, options }).await.is_ok() {
            finished.cancelled().await;
        }
    }

    /// Rejects new pods from now on, as during a shutdown of the machine.
    pub fn close(&self) {
        self.closed.send_replace(true);
    }

    /// Stops the agent as SIGTERM does; its containers keep running.
    pub async fn shut_down(mut self) {
        self.shutdown.cancel();
        let ended = self.sync_loop.join_next().await;
        assert!(ended.is_none_or(|ended| ended.is_ok()), "the sync loop panicked");
    }

    /// Ends the stream of desired pods, and waits for the end of the sync loop.
    pub async fn lose_sources(self) {
        let Self { updates, mut sync_loop, .. } = self;
        drop(updates);
        let ended = sync_loop.join_next().await;
        assert!(ended.is_none_or(|ended| ended.is_ok()), "the sync loop panicked");
    }

    /// Delivers an update of any source.
    pub async fn send(&self, update: PodUpdate) {
        // A loop that has ended receives no updates.
        let _ = self.updates.send(update).await;
    }
}

/// Sensors and PLEG, whose reports the options receive.
fn harness(
    sim: &SimRuntime,
    sensors: SensorSet,
    runtime: &Runtime,
    desired: &SharedPods,
    options: &StartOptions,
) -> PlegHarness {
    let (metrics, recorder, desired) = (options.metrics.clone(), options.recorder.clone(), desired.clone());
    let ooms = OomReporter::new(metrics, recorder, Arc::new(move |uid| desired.by_uid(uid)));
    PlegHarness::open_on(sim, sensors, runtime, options.seen.clone(), ooms)
}

/// A task that runs the sync loop once `preparing` is false.
fn spawn_loop(mut preparing: watch::Receiver<bool>, sync: impl Future<Output = ()> + Send + 'static) -> JoinSet<()> {
    let mut sync_loop = JoinSet::new();
    sync_loop.spawn(async move {
        // Fails only without the agent, which ends this task.
        _ = preparing.wait_for(|preparing| !preparing).await;
        sync.await;
    });
    sync_loop
}
