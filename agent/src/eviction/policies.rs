//! Pressure policies: what they find is reported, and carried out in the mode `Enforce`. One pod at a time, as for thresholds;
//! afterwards the windows begin anew.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::decision::IMMEDIATE;
use super::decision::Victim;
use super::decision::suspends;
use super::manager::Cause;
use super::manager::Manager;
use super::message::because;
use super::observe::Observe;
use super::readings::Readings;
use super::readings::Resource;
use crate::cgroups::memory_high::Raised;
use crate::config::eviction::Signal;
use crate::config::pressure::PolicyMode;
use crate::config::pressure::PressurePolicy;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::pressure::Evict;
use crate::pressure::Finding;
use crate::pressure::PolicyDecision;
use crate::pressure::Relax;
use crate::pressure::Tracker;
use crate::recorder::EventType;

/// The signal of `kubelet_evictions`.
const SIGNAL: &str = "memory.pressure";
/// How often pressure is read without triggers of the kernel.
const POLL: Duration = Duration::from_secs(1);

/// The policies, and what was last reported of each.
pub(super) struct Policies {
    tracker: Tracker,
    reported: HashMap<String, Reported>,
    /// Why `memory.high` could not be raised the last time, until the policy is at rest.
    refused: HashMap<String, String>,
}

/// A decision that is not reported again while it stays the same.
type Reported = (&'static str, Option<PodUid>);

impl Policies {
    pub(super) fn new(policies: Vec<PressurePolicy>) -> Self {
        Self { tracker: Tracker::new(policies), reported: HashMap::new(), refused: HashMap::new() }
    }

    /// The longest time until pressure is to be read again; `None` if only triggers decide. `unannounced`: there are none.
    pub(super) fn pause(&self, unannounced: bool) -> Option<Duration> {
        let watching = self.tracker.spacing().filter(|_| self.tracker.is_watching());
        watching.or((unannounced && !self.tracker.is_idle()).then_some(POLL))
    }

    /// A pod was evicted or a limit changed: what was observed before no longer counts.
    pub(super) fn restart(&mut self) {
        self.tracker.reset();
        self.reported.clear();
    }

    /// Returns true if the decision is another than the one before.
    fn is_news(&mut self, finding: &Finding) -> bool {
        let pod = match &finding.decision {
            PolicyDecision::Evict(Evict { uid, .. }) | PolicyDecision::Relax(Relax { uid, .. }) => Some(uid.clone()),
            _ => None,
        };
        let reported = (finding.decision.as_str(), pod);
        self.reported.insert(finding.policy.name.clone(), reported.clone()) != Some(reported)
    }

    /// A policy is at rest: what it decides next is reported again.
    fn rests(&mut self, policy: &str) {
        self.reported.remove(policy);
        self.refused.remove(policy);
    }

    /// `memory.high` could not be raised. The reason is logged once.
    fn refused(&mut self, policy: &str, pod: &str, reason: &str) {
        if self.refused.insert(policy.to_owned(), reason.to_owned()).as_deref() != Some(reason) {
            tracing::warn!(policy, pod, reason, "cannot raise memory.high of every cgroup of the pod");
        }
    }
}

impl<O: Observe> Manager<O> {
    /// Reads pressure and acts on what the policies find. Returns true if a pod was evicted or a limit raised.
    pub(super) async fn follow_policies(&mut self, pods: &[Pod], readings: &Readings, cause: Cause) -> bool {
        if self.policies.tracker.is_idle() {
            return false;
        }
        let available = readings.signals.get(&Signal::MemoryAvailable).map(|reading| reading.available);
        let available = available.and_then(|bytes| u64::try_from(bytes).ok());
        let Some(sample) = self.parts.observe.pressure(available).await else { return false };
        let at = sample.at;
        self.policies.tracker.add(sample);
        if self.policies.tracker.wants_pods(at) {
            let of_pods = self.parts.observe.pressure_of(pods).await;
            self.policies.tracker.add_pods(at, of_pods);
        }
        for policy in self.policies.tracker.rested() {
            self.parts.metrics.pressure.active(&policy, false);
            self.policies.rests(&policy);
            tracing::info!(policy, "the pressure policy is no longer active");
        }
        for finding in self.policies.tracker.findings() {
            self.parts.metrics.pressure.active(&finding.policy.name, true);
            if self.act(finding, pods, cause).await {
                return true;
            }
        }
        false
    }

    /// Reports a finding, and carries it out if the policy is enforced. Returns true if something was done.
    async fn act(&mut self, mut finding: Finding, pods: &[Pod], cause: Cause) -> bool {
        if let PolicyDecision::Relax(relax) = &finding.decision
            && finding.policy.mode == PolicyMode::Enforce
        {
            let Raised { written, refusal } = self.parts.observe.raise(&relax.raises).await;
            if let Some(reason) = &refusal {
                self.policies.refused(&finding.policy.name, &relax.name, reason);
            }
            // Only what is written is reported.
            if written > 0 {
                self.report(&finding, pods);
            }
            if written > 0 || refusal.is_none() {
                // Also if another program has changed the values meanwhile.
                self.policies.restart();
                return written > 0;
            }
            finding = finding.without_relax();
        }
        if self.policies.is_news(&finding) {
            self.report(&finding, pods);
        }
        if finding.policy.mode == PolicyMode::DryRun {
            return false;
        }
        match &finding.decision {
            PolicyDecision::Calm
            | PolicyDecision::OwnLimit(_)
            | PolicyDecision::NoVictim
            | PolicyDecision::Relax(_) => false,
            PolicyDecision::Evict(evict) => match pods.iter().find(|pod| pod_ref(pod).uid == evict.uid) {
                Some(pod) => {
                    self.evict_for(&finding, pod, pods, cause).await;
                    true
                }
                None => false,
            },
        }
    }

    async fn evict_for(&mut self, finding: &Finding, pod: &Pod, pods: &[Pod], cause: Cause) {
        self.announce(Resource::Memory);
        let pressures = self.history.observe_memory(self.parts.policy.transition, Instant::now());
        self.publish(pressures);
        let usage = match self.parts.observe.usage(pods, false).await {
            Ok(mut usage) => usage.remove(&pod_ref(pod).uid),
            Err(error) => {
                tracing::warn!(error, "the status of the evicted pod will not name its usage");
                None
            }
        };
        let notice = because(Resource::Memory, pod, usage.as_ref(), &reason(finding));
        self.evict(Victim { pod: pod.clone(), grace: IMMEDIATE, suspend: suspends(pod), notice }, SIGNAL, true, cause)
            .await;
    }

    fn report(&self, finding: &Finding, pods: &[Pod]) {
        let Finding { policy, decision, evidence } = finding;
        let (action, mode, why) = (decision.as_str(), policy.mode.as_str(), reason(finding));
        let scanned = evidence.scanned;
        self.parts.metrics.pressure.decided(&policy.name, action, mode);
        let is_dry = policy.mode == PolicyMode::DryRun;
        let (uid, reason, message) = match decision {
            PolicyDecision::Evict(evict) => {
                let (pod, takes, waiting) = (&evict.name, evict.takes, others(evict));
                tracing::warn!(
                    policy = policy.name,
                    mode,
                    action,
                    pod,
                    takes,
                    waiting,
                    scanned,
                    why,
                    "pressure policy"
                );
                (&evict.uid, "PressurePolicyDryRun", format!("Would be evicted. {why}Others waited: {waiting}."))
            }
            PolicyDecision::Relax(relax) => {
                let pod = &relax.name;
                tracing::warn!(policy = policy.name, mode, action, pod, scanned, why, "pressure policy");
                let reason = if is_dry { "PressurePolicyDryRun" } else { "MemoryHighRaised" };
                (
                    &relax.uid,
                    reason,
                    format!("memory.high {}. {why}", if is_dry { "would be raised" } else { "was raised" }),
                )
            }
            PolicyDecision::OwnLimit(pods) => {
                let pods = pods.join(" ");
                tracing::info!(policy = policy.name, mode, action, pods, why, "tasks wait because of their own limits");
                return;
            }
            PolicyDecision::NoVictim | PolicyDecision::Calm => {
                tracing::warn!(
                    policy = policy.name,
                    mode,
                    action,
                    scanned,
                    why,
                    "there is no pod that could be evicted"
                );
                return;
            }
        };
        // An eviction that is carried out has an event of its own.
        let has_event = is_dry || matches!(decision, PolicyDecision::Relax(_));
        if let Some(pod) = pods.iter().find(|pod| has_event && pod_ref(pod).uid == *uid) {
            self.parts.recorder.pod_event(pod, "", EventType::Warning, reason, message.trim_end());
        }
    }
}

/// Why a policy acts, for statuses and events.
fn reason(Finding { policy, evidence, .. }: &Finding) -> String {
    let percent = |part: f64| format!("{:.0}%", part * 100.0);
    format!(
        "Pressure policy {}: tasks waited for memory ({}) {} of the last {:?} and {} of the last {:?}, threshold {}. ",
        policy.name,
        policy.kind.as_str(),
        percent(evidence.short),
        policy.short,
        percent(evidence.long),
        policy.long,
        percent(policy.threshold),
    )
}

/// Pods that waited, with the part of the time.
fn others(evict: &Evict) -> String {
    let named: Vec<String> = evict.waiting.iter().map(|(pod, part)| format!("{pod} {:.0}%", part * 100.0)).collect();
    if named.is_empty() { "none".to_owned() } else { named.join(", ") }
}
