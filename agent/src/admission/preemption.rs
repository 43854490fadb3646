//! Which pods are evicted so that a critical pod gets the resources that it lacks. Pure.
//!
//! As few Guaranteed pods as possible, then as few Burstable ones, then BestEffort. Among pods of a class the one whose
//! request comes nearest to what is missing.

use std::borrow::Cow;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::Insufficient;
use super::Needs;
use super::Rejection;
use super::needs::CPU;
use super::needs::MEMORY;
use crate::model::spec;

/// A pod of the node, with what it holds.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The pod.
    pub pod: Arc<Pod>,
    /// What it holds.
    pub needs: Needs,
}

/// The candidates by QoS class.
#[derive(Clone, Debug, Default)]
pub struct Candidates {
    /// BestEffort pods.
    pub best_effort: Vec<Candidate>,
    /// Burstable pods.
    pub burstable: Vec<Candidate>,
    /// Guaranteed pods.
    pub guaranteed: Vec<Candidate>,
}

/// `other` may be evicted for `pod`: it is not critical, or both have a priority and its own is lower.
pub fn is_preemptable(pod: &Pod, other: &Pod) -> bool {
    let priority = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.priority);
    let is_lower = || priority(pod).zip(priority(other)).is_some_and(|(own, others)| own > others);
    (spec::is_critical(pod) && !spec::is_critical(other)) || is_lower()
}

/// The pods to evict, in order, for a pod that lacks these resources. All candidates are preemptable.
///
/// # Errors
/// All candidates together hold too little; the pod is rejected.
pub fn victims(missing: &[Insufficient], candidates: Candidates) -> Result<Vec<Candidate>, Rejection> {
    let Candidates { best_effort, burstable, guaranteed } = candidates;
    let missing = Missing(missing.iter().map(|m| (m.resource.clone(), m.missing())).filter(|(_, q)| *q > 0).collect());
    let all = missing.clone().without(&best_effort).without(&burstable).without(&guaranteed);
    if !all.0.is_empty() {
        return Err(all.rejection());
    }
    let guaranteed = nearest(guaranteed, missing.clone().without(&best_effort).without(&burstable));
    let burstable = nearest(burstable, missing.clone().without(&best_effort).without(&guaranteed));
    let best_effort = nearest(best_effort, missing.without(&burstable).without(&guaranteed));
    Ok(best_effort.into_iter().chain(burstable).chain(guaranteed).collect())
}

/// Evicts the nearest pod until nothing is missing, or no pod is left.
fn nearest(mut pods: Vec<Candidate>, mut missing: Missing) -> Vec<Candidate> {
    let mut chosen = Vec::new();
    while !missing.0.is_empty() && !pods.is_empty() {
        let mut best = 0;
        for index in 1..pods.len() {
            let (distance, least) = (missing.distance(&pods[index]), missing.distance(&pods[best]));
            if distance < least || (distance == least && is_smaller(&pods[index], &pods[best])) {
                best = index;
            }
        }
        let pod = pods.swap_remove(best);
        missing = missing.without(std::slice::from_ref(&pod));
        chosen.push(pod);
    }
    chosen
}

/// Of pods at the same distance: less memory, then less cpu; the later one if they are equal.
fn is_smaller(pod: &Candidate, other: &Candidate) -> bool {
    let size = |pod: &Candidate| [MEMORY, CPU].map(|resource| pod.needs.request.get(resource));
    size(pod) <= size(other)
}

/// Missing amounts above zero, by resource.
#[derive(Clone, Debug)]
struct Missing(Vec<(String, i64)>);

impl Missing {
    /// What is still missing without these pods.
    fn without(self, pods: &[Candidate]) -> Self {
        let left = |(resource, quantity): (String, i64)| {
            let freed = pods.iter().map(|pod| pod.needs.request.get(&resource));
            let left = freed.fold(quantity, i64::saturating_sub);
            (left > 0).then_some((resource, left))
        };
        Self(self.0.into_iter().filter_map(left).collect())
    }

    /// Distance of the pod's request from the missing amounts: the sum of the squares of the missing shares.
    fn distance(&self, pod: &Candidate) -> f64 {
        let share = |(resource, quantity): &(String, i64)| {
            let left = quantity.saturating_sub(pod.needs.request.get(resource)).max(0);
            (left as f64 / *quantity as f64).powi(2)
        };
        self.0.iter().map(share).sum()
    }

    fn rejection(&self) -> Rejection {
        let list: String = self.0.iter().map(|(resource, left)| format!("(res: {resource}, q: {left}), ")).collect();
        let message = format!(
            "Unexpected error while attempting to recover from admission failure: preemption: error finding a set of pods \
             to preempt: no set of running pods found to reclaim resources: [{list}]"
        );
        Rejection { reason: Cow::Borrowed("UnexpectedAdmissionError"), message }
    }
}

#[cfg(test)]
#[path = "preemption_tests.rs"]
mod tests;
