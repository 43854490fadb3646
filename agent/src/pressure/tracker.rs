//! Follows the policies: takes samples, and returns what is to be done. Pure; samples have their time.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::decide::PolicyDecision;
use super::decide::decide;
use super::evidence::Evidence;
use super::evidence::PodEvidence;
use super::sample::NodeSample;
use super::sample::PodSample;
use super::stall_history::StallHistory;
use crate::cgroups::usage::Pressure;
use crate::config::pressure::PressurePolicy;
use crate::config::pressure::PressureScope;
use crate::config::pressure::StallKind;

/// Of older samples of the node those are kept that lie at least this part of the longest window apart.
const NODE_SPACING: u32 = 100;
/// Likewise of the pods.
const POD_SPACING: u32 = 4;

/// The policies and what they have observed.
#[derive(Clone, Debug, Default)]
pub struct Tracker {
    policies: Vec<Tracked>,
    /// The longest window of all policies.
    longest: Duration,
    /// By scope and kind.
    stalls: HashMap<(PressureScope, StallKind), StallHistory>,
    node: VecDeque<(Instant, NodeSample)>,
    pods: VecDeque<(Instant, Vec<PodSample>)>,
}

#[derive(Clone, Debug)]
struct Tracked {
    policy: PressurePolicy,
    /// Both windows have held, and the long one has not been below the lower threshold since.
    active: bool,
}

/// A policy that holds, and what is to be done.
#[derive(Clone, PartialEq, Debug)]
pub struct Finding {
    /// The policy.
    pub policy: PressurePolicy,
    /// What is known.
    pub evidence: Evidence,
    /// What is to be done.
    pub decision: PolicyDecision,
}

impl Finding {
    /// What is to be done if `memory.high` cannot be raised, on the same evidence.
    #[must_use]
    pub fn without_relax(mut self) -> Self {
        self.policy.relax = false;
        self.decision = decide(&self.policy, &self.evidence);
        self
    }
}

/// Shares of the short and the long window.
type Shares = (f64, f64);

impl Tracker {
    /// Has observed nothing.
    pub fn new(policies: Vec<PressurePolicy>) -> Self {
        let longest = policies.iter().map(|policy| policy.long).max().unwrap_or_default();
        let policies = policies.into_iter().map(|policy| Tracked { policy, active: false }).collect();
        Self { policies, longest, ..Self::default() }
    }

    /// There is no policy.
    pub fn is_idle(&self) -> bool {
        self.policies.is_empty()
    }

    /// Takes a sample of the node.
    pub fn add(&mut self, sample: NodeSample) {
        let scopes = [(PressureScope::Node, sample.node), (PressureScope::Kubepods, sample.kubepods)];
        for (scope, pressure) in scopes {
            let Some(Pressure { some, full }) = pressure else {
                // What was known is old.
                self.stalls.retain(|(known, _), _| *known != scope);
                continue;
            };
            for (kind, total) in [(StallKind::Some, some.total), (StallKind::Full, full.total)] {
                self.stalls.entry((scope, kind)).or_default().add(sample.at, total, self.longest);
            }
        }
        keep(&mut self.node, sample.at, sample, self.longest, NODE_SPACING);
    }

    /// A sample of the pods is needed: a policy holds, or may hold soon and the last sample is old.
    pub fn wants_pods(&self, now: Instant) -> bool {
        let age = self.pods.back().map(|(at, _)| now.saturating_duration_since(*at));
        self.policies.iter().any(|tracked| {
            let policy = &tracked.policy;
            let spacing = if self.holds(policy).is_some() { policy.short / 2 } else { policy.long / 4 };
            self.is_near(policy) && age.is_none_or(|age| age >= spacing)
        })
    }

    /// Takes a sample of the pods. Of older ones those are kept that lie a quarter of the longest window apart.
    pub fn add_pods(&mut self, at: Instant, pods: Vec<PodSample>) {
        keep(&mut self.pods, at, pods, self.longest, POD_SPACING);
    }

    /// A policy holds or may hold soon: samples are to be taken often.
    pub fn is_watching(&self) -> bool {
        self.policies.iter().any(|tracked| self.is_near(&tracked.policy))
    }

    /// The shortest time between two samples that a policy can use.
    pub fn spacing(&self) -> Option<Duration> {
        self.policies.iter().map(|tracked| tracked.policy.short / 4).min()
    }

    /// Policies that have been active and are at rest now.
    pub fn rested(&mut self) -> Vec<String> {
        let shares: Vec<Option<f64>> =
            self.policies.iter().map(|tracked| self.share(&tracked.policy, tracked.policy.long)).collect();
        let mut rested = Vec::new();
        for (tracked, long) in self.policies.iter_mut().zip(shares) {
            if tracked.active && long.is_some_and(|long| long < tracked.policy.leave) {
                tracked.active = false;
                rested.push(tracked.policy.name.clone());
            }
        }
        rested
    }

    /// The policies that hold, in the order of the configuration, with what is to be done.
    pub fn findings(&mut self) -> Vec<Finding> {
        let held: Vec<Option<Shares>> = self.policies.iter().map(|tracked| self.holds(&tracked.policy)).collect();
        for (tracked, held) in self.policies.iter_mut().zip(&held) {
            tracked.active |= held.is_some();
        }
        let finding = |(tracked, held): (&Tracked, Option<Shares>)| {
            let (policy, evidence) = (tracked.policy.clone(), self.evidence(&tracked.policy, held?));
            Some(Finding { decision: decide(&policy, &evidence), policy, evidence })
        };
        self.policies.iter().zip(held).filter_map(finding).collect()
    }

    /// Drops what was observed: after an action the windows begin anew.
    pub fn reset(&mut self) {
        self.stalls.clear();
        self.node.clear();
        self.pods.clear();
    }

    fn share(&self, policy: &PressurePolicy, window: Duration) -> Option<f64> {
        self.stalls.get(&(policy.scope, policy.kind))?.share(window)
    }

    fn is_near(&self, policy: &PressurePolicy) -> bool {
        self.share(policy, policy.short).is_some_and(|share| share >= policy.leave)
    }

    /// Both windows are at the threshold.
    fn holds(&self, policy: &PressurePolicy) -> Option<Shares> {
        let shares = (self.share(policy, policy.short)?, self.share(policy, policy.long)?);
        (shares.0 >= policy.threshold && shares.1 >= policy.threshold).then_some(shares)
    }

    fn evidence(&self, policy: &PressurePolicy, (short, long): Shares) -> Evidence {
        let mut evidence = Evidence { short, long, ..Evidence::default() };
        if let Some((at, now)) = self.node.back() {
            let is_before = |(before, _): &&(Instant, _)| at.saturating_duration_since(*before) >= policy.short;
            let before = self.node.iter().rev().find(is_before).or(self.node.front());
            before.iter().for_each(|(_, before)| evidence.add_growth(before, now));
        }
        evidence.pods = self.pods_within(policy.long);
        evidence
    }

    /// The pods now, compared with the first sample within the window.
    fn pods_within(&self, window: Duration) -> Vec<PodEvidence> {
        let Some((now, pods)) = self.pods.back() else { return Vec::new() };
        let first = self.pods.iter().find(|(at, _)| now.saturating_duration_since(*at) <= window);
        let Some((then, before)) = first else { return Vec::new() };
        let passed = now.saturating_duration_since(*then);
        // All counters of a pod that is new have grown since.
        let at_creation = PodSample::default();
        let of_pod = |pod: &PodSample| {
            let before = before.iter().find(|before| before.uid == pod.uid).unwrap_or(&at_creation);
            PodEvidence::between(before, pod, passed)
        };
        pods.iter().map(of_pod).collect()
    }
}

/// Adds a sample. Of older ones those are kept that lie a part of the longest window apart, and one from before it.
fn keep<T>(samples: &mut VecDeque<(Instant, T)>, at: Instant, sample: T, longest: Duration, spacing: u32) {
    if let [.., before, last] = samples.make_contiguous()
        && last.0.saturating_duration_since(before.0) < longest / spacing
    {
        samples.pop_back();
    }
    samples.push_back((at, sample));
    while samples.get(1).is_some_and(|(second, _)| at.saturating_duration_since(*second) >= longest) {
        samples.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::usage::PressureLine;
    use crate::config::pressure::PolicyMode;

    fn policy(name: &str, threshold: f64) -> PressurePolicy {
        PressurePolicy {
            name: name.to_owned(),
            mode: PolicyMode::Enforce,
            kind: StallKind::Full,
            scope: PressureScope::Node,
            threshold,
            leave: threshold / 2.0,
            short: Duration::from_secs(1),
            long: Duration::from_secs(4),
            relax: true,
        }
    }

    struct Node {
        tracker: Tracker,
        start: Instant,
        total: u64,
        pages: u64,
    }

    impl Node {
        fn new(policies: Vec<PressurePolicy>) -> Self {
            let start = Instant::now() + Duration::from_secs(3600);
            Self { tracker: Tracker::new(policies), start, total: 0, pages: 0 }
        }

        /// After `millis` of the test tasks have waited so many milliseconds more.
        fn waited(&mut self, millis: u64, waited: u64) {
            self.total += waited * 1000;
            self.pages += waited;
            let at = self.start + Duration::from_millis(millis);
            let node =
                Pressure { full: PressureLine { total: self.total, ..PressureLine::default() }, ..Pressure::default() };
            self.tracker.add(NodeSample {
                at,
                node: Some(node),
                kubepods: None,
                scanned: self.pages,
                refaulted: 0,
                limit_hits: None,
                available: Some(1),
            });
            if self.tracker.wants_pods(at) {
                let working_set = self.total;
                let hog =
                    PodSample { uid: "hog".into(), name: "ns/hog".to_owned(), working_set, ..PodSample::default() };
                self.tracker.add_pods(at, vec![hog]);
            }
        }
    }

    #[tokio::test]
    async fn a_policy_holds_when_both_windows_do_and_rests_later() {
        let mut node = Node::new(vec![policy("thrash", 0.4)]);
        node.waited(0, 0);
        node.waited(10_000, 0);
        assert!(!node.tracker.is_watching());
        let mut held_at = None;
        for step in 1..=20 {
            node.waited(10_000 + step * 250, 250);
            if !node.tracker.findings().is_empty() && held_at.is_none() {
                held_at = Some(step * 250);
            }
        }
        assert_eq!(held_at, Some(1750), "40 % of four seconds are over after 1.6 s");
        assert!(node.tracker.is_watching() && node.tracker.rested().is_empty());
        let finding = &node.tracker.findings()[0];
        assert!(finding.evidence.scanned > 0 && finding.evidence.pods[0].grown > 0, "{finding:?}");
        assert!(matches!(&finding.decision, PolicyDecision::Evict(evict) if evict.name == "ns/hog"));
        let mut rested = Vec::new();
        for step in 1..=20 {
            node.waited(15_000 + step * 250, 0);
            rested.extend(node.tracker.rested());
        }
        assert_eq!(rested, ["thrash"]);
    }

    #[tokio::test]
    async fn after_a_reset_the_windows_begin_anew() {
        let mut node = Node::new(vec![policy("thrash", 0.4)]);
        (0..=40).for_each(|step| node.waited(step * 250, 250));
        assert_eq!(node.tracker.findings().len(), 1);
        node.tracker.reset();
        for step in 41..=56 {
            node.waited(step * 250, 250);
            assert_eq!(node.tracker.findings(), [], "step {step}");
        }
        node.waited(57 * 250, 250);
        assert_eq!(node.tracker.findings().len(), 1);
    }

    #[tokio::test]
    async fn samples_are_bounded() {
        let mut node = Node::new(vec![policy("thrash", 0.1), policy("slow", 0.2)]);
        (0..2000).for_each(|step| node.waited(step * 10, 10));
        assert!(node.tracker.node.len() <= 103 && node.tracker.pods.len() <= 7, "{}", node.tracker.pods.len());
        assert_eq!(node.tracker.findings().len(), 2);
    }

    #[tokio::test]
    async fn without_psi_no_policy_holds() {
        let mut tracker = Tracker::new(vec![policy("thrash", 0.1)]);
        for step in 0..100 {
            let at = Instant::now() + Duration::from_secs(step);
            let (node, kubepods) = (None, None);
            tracker.add(NodeSample {
                at,
                node,
                kubepods,
                scanned: step,
                refaulted: step,
                limit_hits: None,
                available: None,
            });
        }
        assert!(!tracker.is_watching() && tracker.findings().is_empty());
    }
}
