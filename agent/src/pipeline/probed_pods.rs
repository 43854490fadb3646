//! Pods as the prober sees them: addresses and states from statuses and the pod cache.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::api::core::v1::PodStatus;

use super::Monitoring;
use super::Running;
use crate::model::Clock;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::KUBERNETES;
use crate::model::Pod;
use crate::model::PodUid;
use crate::pleg::PlegHandle;
use crate::probes::Parts;
use crate::probes::ProbedPods;
use crate::probes::Prober;
use crate::runtime::Runtime;
use crate::status::Statuses;
use crate::workers::generate::expand::expand;

/// The longest argument of an exec probe, in bytes; the kernel's limit for one argument.
const MAX_ARGUMENT: usize = 128 << 10;
/// The longest command of an exec probe, in bytes; the kernel's limit for all arguments of a process.
const MAX_COMMAND: usize = 6 << 20;

struct Pods {
    statuses: Statuses,
    pleg: PlegHandle,
}

impl ProbedPods for Pods {
    /// The status decides which address is the primary one. It may still have that of a replaced sandbox.
    fn address(&self, pod: &PodUid) -> Option<String> {
        let published = self.statuses.pod_ip(pod).filter(|ip| !ip.is_empty());
        let current = self.pleg.cached(pod).map(|snapshot| snapshot.ips.clone()).unwrap_or_default();
        match published {
            Some(published) if current.is_empty() || current.contains(&published) => Some(published),
            _ => current.into_iter().next(),
        }
    }

    fn may_run(&self, pod: &PodUid, container: &ContainerId) -> bool {
        let snapshot = self.pleg.cached(pod);
        let found = snapshot.as_ref().and_then(|snapshot| snapshot.by_id(container));
        found.is_none_or(|container| container.state == ContainerState::Running)
    }

    fn last_status(&self, pod: &Pod) -> Option<PodStatus> {
        self.statuses.last_known(pod)
    }
}

/// The prober of these pods.
pub(super) fn prober(runtime: &Runtime, monitoring: &Monitoring, clock: Clock, running: &Running) -> Prober {
    Prober::new(Parts {
        runtime: runtime.clone(),
        results: running.probes.clone(),
        pods: Arc::new(Pods { statuses: running.statuses.clone(), pleg: running.pleg.clone() }),
        version: KUBERNETES,
        expand: expand_command,
        clock,
        recorder: monitoring.recorder.clone(),
        metrics: monitoring.metrics.clone(),
    })
}

/// Only values that the spec states: those of references are empty, and other variables of the container are unknown.
fn expand_command<'a>(command: &[String], env: &'a [EnvVar]) -> Result<Vec<String>, usize> {
    // The last one of a name counts.
    let has_references = command.iter().any(|argument| argument.contains("$("));
    let known = env.iter().filter(|_| has_references);
    let value = |variable: &'a EnvVar| variable.value.as_deref().unwrap_or_default().as_bytes();
    let values: HashMap<&str, &[u8]> = known.map(|variable| (variable.name.as_str(), value(variable))).collect();
    let mut left = MAX_COMMAND;
    let expanded = command.iter().map(|argument| {
        let expanded = expand(argument, |name| values.get(name).copied(), left.min(MAX_ARGUMENT))?;
        left -= expanded.len();
        Ok(String::from_utf8_lossy(&expanded).into_owned())
    });
    expanded.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn arguments_are_expanded_with_the_values_of_the_spec() {
        let env: Vec<EnvVar> = serde_json::from_value(json!([
            { "name": "A", "value": "first" },
            { "name": "A", "value": "$(B)" },
            { "name": "REF", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } },
        ]))
        .expect("variables");
        for (text, expected) in [("$(A)", "$(B)"), ("[$(REF)]", "[]"), ("$(HOME) $$(A)", "$(HOME) $(A)")] {
            assert_eq!(expand_command(&[text.to_owned()], &env), Ok(vec![expected.to_owned()]));
        }
        let huge = vec![EnvVar { name: "A".into(), value: Some("x".repeat(1 << 16)), value_from: None }];
        assert_eq!(expand_command(&["$(A)".repeat(9)], &huge), Err(9 << 16));
        assert_eq!(expand_command(&vec!["$(A)".to_owned(); 100], &huge), Err(1 << 16), "all together");
    }
}
