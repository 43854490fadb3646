//! The task: reads the signals, decides, acts. One pod at a time, but for those that exceed limits on files; after an eviction
//! the signals are read again at once.

use std::collections::HashMap;
use std::collections::HashSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::decision::IMMEDIATE;
use super::decision::Reclaim;
use super::decision::Victim;
use super::decision::victim;
use super::history::History;
use super::history::ThresholdStates;
use super::journal::EvictionRecord;
use super::journal::Journal;
use super::journal::Reason;
use super::message::Notice;
use super::message::REASON;
use super::observe::Observe;
use super::pace;
use super::pods::NodePods;
use super::policies::Policies;
use super::readings::Readings;
use super::readings::Resource;
use super::readings::for_layout;
use super::readings::is_met;
use super::readings::is_of_containers;
use super::recount::Recounts;
use super::relief::Relief;
use super::resume::RESUME_PERIOD;
use crate::config::eviction::Signal;
use crate::config::eviction::Threshold;
use crate::config::pressure::PressurePolicy;
use crate::metrics::Metrics;
use crate::model::Backoff;
use crate::model::Clock;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::Pressures;
use crate::model::pod_ref;
use crate::model::spec;
use crate::pressure::PolicyDecision;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::stats::PodUsage;
use crate::workers::act::runtime_kill_limit;
use crate::workers::state::Phase;

/// How long the memory of evicted pods is waited for, after nothing is left of their processes.
const MEMORY_RETURNS: Duration = Duration::from_secs(30);
/// How long the processes of an evicted pod are suspended, if the runtime does not send the signal to stop before. On a node
/// that is stalled it takes seconds for that.
const SUSPENSION: Duration = Duration::from_secs(3);
/// How often the same resource is announced as short.
const ANNOUNCE_PERIOD: Duration = Duration::from_secs(10);

/// From the configuration.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// All thresholds.
    pub thresholds: Vec<Threshold>,
    /// `evictionPressureTransitionPeriod`
    pub transition: Duration,
    /// `evictionMaxPodGracePeriod`
    pub max_pod_grace: i64,
    /// `localStorageCapacityIsolation`: limits on files are enforced.
    pub local_storage: bool,
    /// `pressure.policies`
    pub pressure: Vec<PressurePolicy>,
}

/// Services of the manager.
pub struct Parts<O> {
    /// From the configuration.
    pub policy: Policy,
    /// The node.
    pub observe: O,
    /// Its pods.
    pub pods: NodePods,
    /// Evictions and preemptions that are not finished.
    pub journal: Journal,
    /// The kernel's triggers: when tasks waited for memory. Closed without any.
    pub wake: mpsc::Receiver<Instant>,
    /// When memory of all pods ran short.
    pub memory_events: mpsc::Receiver<Instant>,
    /// Time.
    pub clock: Clock,
    /// The conditions of the node.
    pub pressures: watch::Sender<Pressures>,
    /// Events.
    pub recorder: Recorder,
    /// What is counted.
    pub metrics: Arc<Metrics>,
}

/// The eviction manager.
pub struct Manager<O> {
    pub(super) parts: Parts<O>,
    pub(super) history: History,
    pub(super) policies: Policies,
    /// Pods that were evicted and have not ended.
    pub(super) evicted: HashSet<PodUid>,
    pub(super) recounts: Recounts,
    pub(super) relief: Relief,
    /// It was announced that a resource is short, and not yet logged which pods are not evicted for it.
    is_news: bool,
    announced: Option<(Resource, Instant)>,
    pub(super) started: Instant,
    /// The wall clock then, in nanoseconds since the Unix epoch.
    pub(super) started_at: i64,
    /// When all sources were seen to have delivered their pods.
    pub(super) sources_ready_at: Option<Instant>,
    /// Passes in a row that had to choose a pod and could not measure usage.
    unmeasured: Backoff,
}

/// What started a pass, and when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cause {
    name: &'static str,
    at: Instant,
}

impl<O: Observe> Manager<O> {
    /// Has observed nothing yet. Pods whose eviction an earlier agent has not finished are terminated when they are created: to
    /// be awaited before the sync loop runs, which would start them. Waits for the runtime only if there are any, for a bounded
    /// time; if it does not answer, each pass queries it again.
    pub async fn prepare(parts: Parts<O>) -> Self {
        let mut manager = Self::new(parts);
        manager.parts.journal.remove_stale(manager.started_at, RESUME_PERIOD).await;
        // Ends no pod: that is waited for, and the sync loop does not run yet.
        manager.resume(&[]).await;
        manager
    }

    fn new(parts: Parts<O>) -> Self {
        for threshold in parts.policy.thresholds.iter().filter(|threshold| is_of_containers(threshold.signal)) {
            let signal = threshold.signal.as_str();
            tracing::warn!(signal, "the threshold is ignored: it follows from that of nodefs or imagefs");
        }
        for policy in &parts.policy.pressure {
            parts.metrics.pressure.follows_policy(&policy.name, policy.mode.as_str(), &PolicyDecision::REPORTED);
        }
        let (history, evicted, started) = (History::default(), HashSet::new(), Instant::now());
        let policies = Policies::new(parts.policy.pressure.clone());
        let unmeasured = Backoff::new(pace::SHORTEST, pace::LONGEST);
        let (recounts, relief) = (Recounts::default(), Relief::default());
        let (started_at, announced) = (parts.clock.wall_nanos(), None);
        let sources_ready_at = None;
        Self {
            parts,
            history,
            policies,
            evicted,
            recounts,
            relief,
            is_news: false,
            announced,
            started,
            started_at,
            sources_ready_at,
            unmeasured,
        }
    }

    /// Runs until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let Policy { thresholds, local_storage, pressure, .. } = &self.parts.policy;
        let is_idle = thresholds.is_empty() && !local_storage && pressure.is_empty();
        if is_idle && self.parts.journal.inherited().is_empty() {
            // Their sensor ends, as nothing is woken.
            self.parts.memory_events.close();
            shutdown.run_until_cancelled(self.keep_records()).await;
            return;
        }
        shutdown.run_until_cancelled(self.run_loop()).await;
    }

    async fn run_loop(&mut self) {
        let mut cause = Cause { name: "poll", at: Instant::now() };
        let mut free_since = cause.at;
        loop {
            let pause = self.pass(cause).await;
            let now = Instant::now();
            if pause.is_zero() {
                free_since = now;
            }
            let next = now + pause;
            cause = tokio::select! {
                () = tokio::time::sleep_until(next) => Cause { name: "poll", at: next },
                Some(at) = self.parts.wake.recv() => Cause { name: "pressure", at },
                Some(at) = self.parts.memory_events.recv() => Cause { name: "memory-events", at },
                () = self.recounts.next() => Cause { name: "limits", at: Instant::now() },
                () = self.relief.next() => Cause { name: "disk", at: Instant::now() },
            };
            // Waiting for the end of an evicted pod is not part of the next decision.
            cause.at = cause.at.max(free_since);
        }
    }

    /// One pass. Returns the time until the next one.
    async fn pass(&mut self, cause: Cause) -> Duration {
        let readings = self.parts.observe.readings().await;
        let thresholds = for_layout(&self.parts.policy.thresholds, readings.disks.unwrap_or_default());
        let transition = self.parts.policy.transition;
        let step = self.history.step(&thresholds, &readings, transition, Instant::now());
        self.publish(step.pressures);
        let active = self.parts.pods.active();
        if self.resume(&active).await {
            return Duration::ZERO;
        }
        self.evicted.retain(|uid| active.iter().any(|pod| pod_ref(pod).uid == *uid));
        self.remove_reported().await;
        let candidates: Vec<Pod> = active.into_iter().filter(|pod| !self.evicted.contains(&pod_ref(pod).uid)).collect();
        if self.enforce_limits(&candidates, readings.disks.unwrap_or_default(), cause).await {
            return Duration::ZERO;
        }
        if step.due.is_empty() {
            self.unmeasured.succeeded();
        }
        let of_disk = |threshold: &&Threshold| Resource::of(threshold.signal).is_of_disk();
        if !thresholds.iter().filter(of_disk).any(|threshold| is_met(threshold, &readings, true)) {
            self.relief.forget();
            self.parts.observe.disks_suffice();
        }
        if !step.due.is_empty() && self.relieve(&step, &thresholds, &readings, candidates.clone(), cause).await {
            return Duration::ZERO;
        }
        if self.follow_policies(&candidates, &readings, cause).await {
            return Duration::ZERO;
        }
        self.pause(&step, &thresholds, &readings)
    }

    fn pause(&self, step: &ThresholdStates, thresholds: &[Threshold], readings: &Readings) -> Duration {
        let now = Instant::now();
        let ends = [step.next_due, self.history.next_transition(self.parts.policy.transition, now)];
        let until = ends.into_iter().flatten().map(|end| end.saturating_duration_since(now)).min();
        // What is done for a disk ends at any moment, and memory may run short before.
        let awaits_relief = step.due.first().is_some_and(|first| {
            let what = Reclaim::of(first.signal, readings.disks.unwrap_or_default());
            Resource::of(first.signal).is_of_disk() && self.relief.is_running_for(what)
        });
        let pause = match self.is_resuming() {
            true => pace::SHORTEST,
            false if awaits_relief => pace::pause(thresholds, readings, false),
            false if self.unmeasured.failures() > 0 => self.unmeasured.pause(),
            false => pace::pause(thresholds, readings, !step.due.is_empty()),
        };
        let pause = self.policies.pause(self.parts.wake.is_closed()).map_or(pause, |shorter| shorter.min(pause));
        until.map_or(pause, |until| until.clamp(pace::SHORTEST, pause.max(pace::SHORTEST)))
    }

    pub(super) fn publish(&self, pressures: Pressures) {
        let changed = self.parts.pressures.send_if_modified(|known| std::mem::replace(known, pressures) != pressures);
        if changed {
            tracing::info!(conditions = ?pressures.conditions(), "the pressures of the node have changed");
        }
    }

    /// Acts on the first threshold: reclaims from the node, then evicts a pod. Returns true if it evicted one.
    async fn relieve(
        &mut self,
        step: &ThresholdStates,
        thresholds: &[Threshold],
        readings: &Readings,
        pods: Vec<Pod>,
        cause: Cause,
    ) -> bool {
        let signal = step.due[0].signal;
        self.is_news |= self.announce(Resource::of(signal));
        let Some((pods, usage)) = self.usage_after_reclaim(signal, thresholds, readings, pods).await else {
            return false;
        };
        for threshold in &step.due {
            if let Some(reading) = readings.signals.get(&threshold.signal) {
                self.parts.metrics.eviction.stats_age(threshold.signal.as_str(), reading.at.elapsed());
            }
        }
        let is_news = std::mem::take(&mut self.is_news);
        let (victim, spared) = victim(&step.due, readings, pods, &usage, self.parts.policy.max_pod_grace);
        if is_news && !spared.is_empty() {
            let names: Vec<String> = spared.iter().map(|pod| pod_ref(pod).full_name()).collect();
            tracing::warn!(signal = signal.as_str(), pods = names.join(" "), "critical pods are not evicted");
        }
        let Some(victim) = victim else {
            if is_news {
                tracing::warn!(signal = signal.as_str(), "there is no pod that could be evicted");
            }
            return false;
        };
        self.evict(victim, signal.as_str(), true, cause).await;
        true
    }

    /// Usage of the pods that can be ranked for `signal`; for a disk it is measured after what no pod needs was removed. `None`
    /// if no pod is to be evicted now: enough was removed, a step is still waited for, or usage cannot be measured.
    async fn usage_after_reclaim(
        &mut self,
        signal: Signal,
        thresholds: &[Threshold],
        readings: &Readings,
        pods: Vec<Pod>,
    ) -> Option<(Vec<Pod>, HashMap<PodUid, PodUsage>)> {
        let (pods, usage) = if Resource::of(signal).is_of_disk() {
            let reclaim = Reclaim::of(signal, readings.disks.unwrap_or_default());
            self.relieve_disk(signal, reclaim, thresholds, pods).await?
        } else if pods.iter().all(|pod| spec::is_critical(pod)) {
            // Notifications of the kernel may come often while nothing can be done.
            (pods, Ok(HashMap::new()))
        } else {
            let usage = self.parts.observe.usage(&pods, false).await;
            (pods, usage)
        };
        match usage {
            Ok(usage) => {
                self.unmeasured.succeeded();
                Some((pods, usage))
            }
            Err(error) => {
                self.unmeasured.failed(0.0);
                if self.unmeasured.failures() == 1 {
                    tracing::warn!(error, "no pod is evicted: usage cannot be measured; trying again soon");
                }
                None
            }
        }
    }

    /// Records that a resource is short. Returns false if it was recorded a moment ago.
    pub(super) fn announce(&mut self, resource: Resource) -> bool {
        let now = Instant::now();
        if self.announced.is_some_and(|(known, at)| known == resource && now < at + ANNOUNCE_PERIOD) {
            return false;
        }
        self.announced = Some((resource, now));
        let message = format!("Attempting to reclaim {}", resource.as_str());
        self.parts.recorder.node_event(EventType::Warning, "EvictionThresholdMet", &message);
        true
    }

    /// Evicts a pod, and waits until nothing is left of it.
    pub(super) async fn evict(&mut self, victim: Victim, signal: &'static str, disruption: bool, cause: Cause) {
        let decided = self.record(victim, signal, disruption, cause).await;
        self.end(&[decided]).await;
    }

    /// Announces and records the eviction of a pod, which [`Self::end`] is to carry out.
    pub(super) async fn record(
        &mut self,
        victim: Victim,
        signal: &'static str,
        disruption: bool,
        cause: Cause,
    ) -> (Pod, EvictionRecord) {
        let Victim { pod, grace, suspend, notice: Notice { message, annotations } } = victim;
        let parts = &self.parts;
        parts.metrics.eviction.decided(cause.name, cause.at.elapsed());
        parts.metrics.eviction.evicted(signal);
        parts.recorder.pod_event_annotated(&pod, EventType::Warning, REASON, &message, annotations);
        let (uid, boot_id) = (pod_ref(&pod).uid.to_string(), parts.journal.boot_id().to_owned());
        let (decided_at, renewed_at) = (parts.clock.wall_nanos(), 0);
        let reason = Reason::Evicted;
        let entry = EvictionRecord { uid, reason, grace, message, disruption, decided_at, renewed_at, boot_id };
        self.parts.journal.add(entry.clone()).await;
        // One that is being stopped has had its signal, and needs its processes to end.
        if suspend && self.parts.pods.phase(&pod_ref(&pod).uid) == Some(Phase::Syncing) {
            self.parts.observe.suspend(&pod, SUSPENSION);
        }
        (pod, entry)
    }

    /// Terminates pods that are recorded, all at once, and waits until nothing is left of them. A record stays until the end of
    /// its pod is reported. A runtime may be stalled by the same lack of memory or process ids: it starts a program for each
    /// signal. What it has not killed in time of a pod that is evicted at once is killed through the pod's cgroup.
    pub(super) async fn end(&mut self, recorded: &[(Pod, EvictionRecord)]) {
        let (begin, mut held) = (Instant::now(), Vec::new());
        for (pod, _) in recorded {
            self.evicted.insert(pod_ref(pod).uid);
            held.push(self.parts.observe.held(pod).await);
        }
        let Parts { observe, pods, .. } = &mut self.parts;
        let pods = &*pods;
        let ended =
            join_all(recorded.iter().map(|(pod, entry)| pods.evict(pod, entry.grace, entry.termination_reason())));
        let kill_late = async {
            tokio::time::sleep(runtime_kill_limit(IMMEDIATE)).await;
            for (pod, entry) in recorded {
                // With a longer grace period a pod must not be killed before it got the signal to stop, which waits for calls
                // in progress.
                if entry.grace == IMMEDIATE {
                    observe.kill(pod).await;
                }
            }
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            _ = ended => {}
            never = kill_late => match never {},
        }
        let deadline = Instant::now() + MEMORY_RETURNS;
        for ((pod, _), held) in recorded.iter().zip(held) {
            if let Some(held) = held {
                self.await_memory(pod, held, begin, deadline).await;
            }
        }
        self.policies.restart();
    }

    /// Waits until the memory that the pod held is free: its cgroup is gone, or nearly nothing is charged to it.
    async fn await_memory(&mut self, pod: &Pod, held: u64, begin: Instant, deadline: Instant) {
        while let Some(left) = self.parts.observe.held(pod).await.filter(|left| *left > held / 20) {
            if Instant::now() >= deadline {
                let pod = pod_ref(pod).full_name();
                return tracing::warn!(pod, held, left, "the memory of an evicted pod is not free yet");
            }
            tokio::time::sleep(pace::SHORTEST).await;
        }
        self.parts.metrics.pressure.memory_returned(begin.elapsed());
    }
}
