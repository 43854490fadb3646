//! What a policy does about pressure. Pure.
//!
//! 1. Both windows must be at the threshold.
//! 2. If `memory.high` throttles a pod and the node has memory left, the value is raised.
//! 3. If the node reclaims memory, the pod is evicted that takes most from the others. Pods within their requests come last,
//!    critical pods are never evicted.
//! 4. Otherwise tasks wait because of a limit of their own cgroup, and nothing is done.

use std::cmp::Reverse;

use super::evidence::Evidence;
use super::evidence::PodEvidence;
use crate::cgroups::memory_high::High;
use crate::cgroups::memory_high::Raise;
use crate::config::pressure::PressurePolicy;
use crate::model::PodUid;

/// `memory.high` is raised by a quarter, and at least by so much.
const SMALLEST_RAISE: u64 = 16 << 20;
/// The node must have so many times the raise left.
const ROOM: u64 = 2;
/// Pods that wait are named from this part of the time on.
const NOTABLE: f64 = 0.01;
/// Pods that are named at most.
const NAMED: usize = 3;

/// What is to be done.
#[derive(Clone, PartialEq, Debug)]
pub enum PolicyDecision {
    /// Nothing: tasks do not wait for too long.
    Calm,
    /// Nothing: tasks wait because of limits of their own cgroups. The pods that have reached theirs.
    OwnLimit(Vec<String>),
    /// `memory.high` is raised.
    Relax(Relax),
    /// A pod is evicted.
    Evict(Evict),
    /// Nothing: no pod may be evicted.
    NoVictim,
}

/// A pod whose `memory.high` is raised.
#[derive(Clone, PartialEq, Debug)]
pub struct Relax {
    /// The pod.
    pub uid: PodUid,
    /// `namespace/name`
    pub name: String,
    /// The new values.
    pub raises: Vec<Raise>,
}

/// A pod that is evicted.
#[derive(Clone, PartialEq, Debug)]
pub struct Evict {
    /// The pod.
    pub uid: PodUid,
    /// `namespace/name`
    pub name: String,
    /// Bytes that the others lack because of it.
    pub takes: u64,
    /// Others that wait, with the part of the time, longest first.
    pub waiting: Vec<(String, f64)>,
}

impl PolicyDecision {
    /// Names of all decisions that are reported: of policies that hold.
    pub const REPORTED: [&'static str; 4] = ["own_limit", "relax", "evict", "no_victim"];

    /// The name in metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Calm => "calm",
            Self::OwnLimit(_) => "own_limit",
            Self::Relax(_) => "relax",
            Self::Evict(_) => "evict",
            Self::NoVictim => "no_victim",
        }
    }
}

/// Decides on a policy.
pub(super) fn decide(policy: &PressurePolicy, evidence: &Evidence) -> PolicyDecision {
    if evidence.short < policy.threshold || evidence.long < policy.threshold {
        return PolicyDecision::Calm;
    }
    if let Some(relax) = relax(evidence).filter(|_| policy.relax) {
        return PolicyDecision::Relax(relax);
    }
    if !evidence.node_reclaims() {
        let at_limit = evidence.pods.iter().filter(|pod| pod.max_hits > 0 || pod.high_hits > 0);
        return PolicyDecision::OwnLimit(at_limit.map(|pod| pod.name.clone()).collect());
    }
    let Some(victim) = victim(&evidence.pods) else { return PolicyDecision::NoVictim };
    let (uid, name) = (victim.uid.clone(), victim.name.clone());
    PolicyDecision::Evict(Evict { waiting: waiting(evidence, &uid), uid, name, takes: victim.takes() })
}

/// The pod that `memory.high` makes wait longest, if the node has memory for it.
fn relax(evidence: &Evidence) -> Option<Relax> {
    let throttled = evidence.pods.iter().filter(|pod| pod.high_hits > 0 && !pod.highs.is_empty());
    let pod = throttled.max_by(|left, right| left.waited.total_cmp(&right.waited).then(right.name.cmp(&left.name)))?;
    let raises: Vec<Raise> = pod.highs.iter().map(raise).collect();
    let more = raises.iter().map(|raise| raise.to.unwrap_or(raise.from.saturating_add(step(raise.from))));
    let more: u64 = more.zip(&raises).map(|(to, raise)| to.saturating_sub(raise.from)).fold(0, u64::saturating_add);
    (evidence.available? >= more.saturating_mul(ROOM)).then(|| Relax {
        uid: pod.uid.clone(),
        name: pod.name.clone(),
        raises,
    })
}

fn step(bytes: u64) -> u64 {
    (bytes / 4).max(SMALLEST_RAISE)
}

/// No value remains where it would not be below the hard limit.
fn raise(high: &High) -> Raise {
    let to = high.bytes.saturating_add(step(high.bytes));
    Raise {
        cgroup: high.cgroup.clone(),
        from: high.bytes,
        to: Some(to).filter(|to| high.max.is_none_or(|max| *to < max)),
    }
}

/// Of the pods above their requests, or else of all: those that take at least half as much as the one that takes most; of
/// these the one of the lowest priority.
fn victim(pods: &[PodEvidence]) -> Option<&PodEvidence> {
    let evictable = || pods.iter().filter(|pod| !pod.critical);
    let any_above = evictable().any(PodEvidence::is_above_request);
    let candidates = || evictable().filter(|pod| pod.is_above_request() || !any_above);
    let most = candidates().map(PodEvidence::takes).max()?;
    let stalling = candidates().filter(|pod| pod.takes() >= most / 2);
    stalling.min_by_key(|pod| (pod.priority, Reverse(pod.takes()), Reverse(pod.working_set), pod.name.clone()))
}

fn waiting(evidence: &Evidence, victim: &PodUid) -> Vec<(String, f64)> {
    let others = evidence.pods.iter().filter(|pod| pod.uid != *victim && pod.waited >= NOTABLE);
    let mut others: Vec<(String, f64)> = others.map(|pod| (pod.name.clone(), pod.waited)).collect();
    others.sort_by(|(left_name, left), (right_name, right)| right.total_cmp(left).then(left_name.cmp(right_name)));
    others.truncate(NAMED);
    others
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::pressure::PolicyMode;
    use crate::config::pressure::PressureScope;
    use crate::config::pressure::StallKind;

    const MIB: u64 = 1 << 20;

    fn policy() -> PressurePolicy {
        PressurePolicy {
            name: "thrash".to_owned(),
            mode: PolicyMode::Enforce,
            kind: StallKind::Full,
            scope: PressureScope::Node,
            threshold: 0.2,
            leave: 0.1,
            short: Duration::from_secs(1),
            long: Duration::from_secs(5),
            relax: true,
        }
    }

    /// Uses and requests so many MiB.
    fn pod(name: &str, working_set: u64, requested: u64) -> PodEvidence {
        let (working_set, requested) = (working_set * MIB, requested * MIB);
        PodEvidence { uid: name.into(), name: name.to_owned(), working_set, requested, ..PodEvidence::default() }
    }

    fn thrashing(pods: Vec<PodEvidence>) -> Evidence {
        let available = Some(50 * MIB);
        Evidence { short: 0.5, long: 0.3, scanned: 1000, available, pods, ..Evidence::default() }
    }

    fn evicted(pods: Vec<PodEvidence>) -> Option<String> {
        match decide(&policy(), &thrashing(pods)) {
            PolicyDecision::Evict(evict) => Some(evict.name),
            _ => None,
        }
    }

    #[test]
    fn every_decision_of_a_policy_that_holds_has_a_name_that_is_counted_from_the_start() {
        let reported = [
            PolicyDecision::OwnLimit(Vec::new()),
            PolicyDecision::Relax(Relax { uid: "a".into(), name: "a".to_owned(), raises: Vec::new() }),
            PolicyDecision::Evict(Evict { uid: "a".into(), name: "a".to_owned(), takes: 0, waiting: Vec::new() }),
            PolicyDecision::NoVictim,
        ];
        assert_eq!(reported.map(|decision| decision.as_str()), PolicyDecision::REPORTED);
    }

    #[test]
    fn both_windows_must_hold() {
        let pods = vec![pod("a", 100, 0)];
        for (short, long, acts) in [(0.5, 0.3, true), (0.5, 0.19, false), (0.19, 0.9, false), (0.2, 0.2, true)] {
            let decision = decide(&policy(), &Evidence { short, long, ..thrashing(pods.clone()) });
            assert_eq!(decision != PolicyDecision::Calm, acts, "{short} {long}");
        }
    }

    #[test]
    fn without_reclaim_of_the_node_the_limit_is_a_pods_own() {
        let own = PodEvidence { max_hits: 3, refaulted: 900 * MIB, ..pod("own", 100, 0) };
        let evidence = Evidence { scanned: 0, ..thrashing(vec![own, pod("other", 10, 0)]) };
        assert_eq!(decide(&policy(), &evidence), PolicyDecision::OwnLimit(vec!["own".to_owned()]));
        let of_all_pods = Evidence { limit_hits: 1, ..evidence };
        assert!(matches!(decide(&policy(), &of_all_pods), PolicyDecision::Evict(_)), "node allocatable is reached");
    }

    #[test]
    fn the_pod_that_takes_most_is_evicted() {
        assert_eq!(evicted(vec![pod("small", 10, 0), pod("large", 300, 0)]).as_deref(), Some("large"));
        let growing = PodEvidence { grown: 300 * MIB, ..pod("growing", 200, 0) };
        assert_eq!(evicted(vec![growing, pod("large", 300, 0)]).as_deref(), Some("growing"));
        let reading = PodEvidence { refaulted: 900 * MIB, ..pod("reading", 20, 0) };
        assert_eq!(evicted(vec![reading, pod("large", 300, 0)]).as_deref(), Some("reading"));
        assert_eq!(evicted(vec![pod("b", 300, 0), pod("a", 300, 0)]).as_deref(), Some("a"), "always the same");
    }

    #[test]
    fn of_pods_that_take_alike_the_lower_priority_goes() {
        let important = PodEvidence { priority: 10, ..pod("important", 300, 0) };
        assert_eq!(evicted(vec![important.clone(), pod("batch", 200, 0)]).as_deref(), Some("batch"));
        assert_eq!(evicted(vec![important, pod("innocent", 20, 0)]).as_deref(), Some("important"));
    }

    #[test]
    fn pods_within_their_requests_come_last_and_critical_pods_never() {
        let within = PodEvidence { grown: 900 * MIB, ..pod("within", 500, 600) };
        assert_eq!(evicted(vec![within.clone(), pod("above", 20, 10)]).as_deref(), Some("above"));
        let critical = PodEvidence { critical: true, ..pod("critical", 900, 0) };
        assert_eq!(evicted(vec![within, critical.clone()]).as_deref(), Some("within"));
        assert_eq!(decide(&policy(), &thrashing(vec![critical])), PolicyDecision::NoVictim);
        assert_eq!(decide(&policy(), &thrashing(Vec::new())), PolicyDecision::NoVictim);
    }

    #[test]
    fn waiting_pods_are_named() {
        let waiting = |name: &str, waited| PodEvidence { waited, ..pod(name, 10, 0) };
        let mut pods =
            vec![waiting("a", 0.05), waiting("b", 0.4), waiting("c", 0.001), waiting("d", 0.2), waiting("e", 0.1)];
        pods.push(PodEvidence { waited: 0.9, ..pod("hog", 900, 0) });
        let PolicyDecision::Evict(evict) = decide(&policy(), &thrashing(pods)) else { panic!("it acts") };
        let names: Vec<&str> = evict.waiting.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!((evict.name.as_str(), names.as_slice()), ("hog", ["b", "d", "e"].as_slice()));
    }

    #[test]
    fn throttling_by_memory_high_is_relaxed_first() {
        let high = |bytes, max| High { cgroup: "/pod/main".into(), bytes, max };
        let throttled = |bytes, max| PodEvidence { high_hits: 5, highs: vec![high(bytes, max)], ..pod("web", 90, 0) };
        let relaxed = |evidence: &Evidence| match decide(&policy(), evidence) {
            PolicyDecision::Relax(relax) => Some(relax.raises[0].to),
            _ => None,
        };
        let with_room =
            Evidence { available: Some(500 * MIB), ..thrashing(vec![throttled(100 * MIB, Some(200 * MIB))]) };
        assert_eq!(relaxed(&with_room), Some(Some(125 * MIB)));
        let no_reclaim = Evidence { scanned: 0, ..with_room.clone() };
        assert_eq!(relaxed(&no_reclaim), Some(Some(125 * MIB)), "it is that pod's limit that is raised");
        let near_max = Evidence { pods: vec![throttled(100 * MIB, Some(110 * MIB))], ..with_room.clone() };
        assert_eq!(relaxed(&near_max), Some(None), "no value above the hard limit");
        let short = Evidence { available: Some(49 * MIB), ..with_room.clone() };
        assert_eq!(relaxed(&short), None, "there is no memory that it could be given");
        let unlimited = Evidence { pods: vec![pod("web", 90, 0)], ..with_room.clone() };
        assert_eq!(relaxed(&unlimited), None);
        let never = PressurePolicy { relax: false, ..policy() };
        assert!(matches!(decide(&never, &with_room), PolicyDecision::Evict(_)));
    }

    #[test]
    fn the_pod_that_memory_high_makes_wait_longest_gets_sixteen_mebibytes_at_least() {
        let throttled = |name: &str, waited, high_hits, bytes| {
            let high = High { cgroup: "/pod/main".into(), bytes, max: None };
            PodEvidence { waited, high_hits, highs: vec![high], ..pod(name, 90, 0) }
        };
        let pods = vec![
            throttled("short", 0.1, 9, 100 * MIB),
            throttled("long", 0.6, 1, 10 * MIB),
            throttled("not throttled", 0.9, 0, 10 * MIB),
        ];
        let relaxed = |available| {
            let evidence = Evidence { available: Some(available), ..thrashing(pods.clone()) };
            match decide(&policy(), &evidence) {
                PolicyDecision::Relax(relax) => Some((relax.name, relax.raises[0].to)),
                _ => None,
            }
        };
        assert_eq!(relaxed(32 * MIB), Some(("long".to_owned(), Some(26 * MIB))));
        assert_eq!(relaxed(32 * MIB - 1), None, "less than twice as much is left");
    }
}
