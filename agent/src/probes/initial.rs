//! The result of a probe before its first run. Pure.

use std::collections::HashMap;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::PodStatus;

use crate::model::ContainerId;
use crate::model::ProbeKind;
use crate::model::ProbeResult;

/// A container that was started this long before the agent is not new to its users.
const OLDER: Duration = Duration::from_secs(10);

/// What the last status of a pod has of its containers.
#[derive(Debug, Default)]
pub(super) struct Record {
    /// By name of the container.
    instances: HashMap<String, Instance>,
    pod_ready: bool,
    /// The Ready condition has a reason: an agent set it to False. The node controller sets it to False on the pods of a
    /// lost node without one, and leaves `ready` of their containers, which is outdated then.
    has_reason: bool,
}

/// Fields of one instance. The container may have another instance since.
#[derive(Debug)]
struct Instance {
    id: Option<ContainerId>,
    started: Option<bool>,
    ready: bool,
}

impl Record {
    pub(super) fn of(status: &PodStatus) -> Self {
        let lists = [&status.container_statuses, &status.init_container_statuses];
        let instances = lists.into_iter().flatten().flatten().map(|container| {
            let id = container.container_id.as_deref().and_then(|id| id.split_once("://"));
            let id = id.map(|(_, id)| ContainerId::from(id));
            (container.name.clone(), Instance { id, started: container.started, ready: container.ready })
        });
        let ready = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready");
        Self {
            instances: instances.collect(),
            pod_ready: ready.is_some_and(|condition| condition.status == "True"),
            has_reason: ready.is_some_and(|condition| condition.reason.is_some()),
        }
    }
}

/// What was known of a container before this agent saw it running.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PriorState {
    /// It was started well before the agent, or an earlier agent's status has it, whatever the clock says: it may have been
    /// set back since. Not if that status has another instance: no probe is known to have succeeded for this one.
    pub(super) older: bool,
    /// `started` in the last status of this very instance.
    pub(super) started: Option<bool>,
    /// The pod was Ready; or this very instance was, in a pod that an agent found not Ready for another container or a
    /// readiness gate. Upstream uses the condition of the pod alone. Not if the last status has another instance: an
    /// earlier agent has replaced it and could not report that.
    pub(super) ready: bool,
}

impl PriorState {
    /// Of the instance `id` of the container `name`, which was started `started_at` nanoseconds after the Unix epoch; the
    /// agent started at `agent`. `None`: it is known to have started before the instance.
    pub(super) fn of(
        record: &Record,
        name: &str,
        id: &ContainerId,
        started_at: i64,
        agent: Option<SystemTime>,
    ) -> Self {
        let started = u64::try_from(started_at).ok().filter(|nanos| *nanos > 0);
        let started = started.and_then(|nanos| SystemTime::UNIX_EPOCH.checked_add(Duration::from_nanos(nanos)));
        let recorded = record.instances.get(name);
        let of_instance = recorded.filter(|instance| instance.id.as_ref() == Some(id));
        let has_replaced = recorded.is_some() && of_instance.is_none();
        let was_ready = of_instance.is_some_and(|instance| instance.ready) && record.has_reason;
        Self {
            older: !has_replaced && (is_older(started, agent) || (agent.is_some() && of_instance.is_some())),
            started: of_instance.and_then(|instance| instance.started),
            ready: !has_replaced && (record.pod_ready || was_ready),
        }
    }

    /// The result that stands until the probe has one of its own. A restart of the agent changes none: containers that
    /// served keep serving, started ones stay started. Without a record a container of this age counts as started.
    pub(super) fn initial(self, kind: ProbeKind) -> ProbeResult {
        match kind {
            ProbeKind::Liveness => ProbeResult::Success,
            ProbeKind::Readiness if self.older && self.ready => ProbeResult::Success,
            ProbeKind::Readiness => ProbeResult::Failure,
            ProbeKind::Startup => match self.started {
                Some(true) => ProbeResult::Success,
                None if self.older => ProbeResult::Success,
                Some(false) | None => ProbeResult::Unknown,
            },
        }
    }
}

fn is_older(started: Option<SystemTime>, agent: Option<SystemTime>) -> bool {
    started.zip(agent).is_some_and(|(started, agent)| agent.duration_since(started).is_ok_and(|age| age > OLDER))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_restart_of_the_agent_keeps_what_was_known() {
        use ProbeKind::{Liveness, Readiness, Startup};
        use ProbeResult::{Failure, Success, Unknown};
        let known = |older, started, ready| PriorState { older, started, ready };
        for (known, kind, expected) in [
            (known(false, None, false), Liveness, Success),
            (known(false, None, false), Readiness, Failure),
            (known(false, None, false), Startup, Unknown),
            (known(true, None, true), Readiness, Success),
            (known(true, None, false), Readiness, Failure),
            (known(false, None, true), Readiness, Failure),
            (known(true, Some(false), true), Startup, Unknown),
            (known(true, None, false), Startup, Success),
            (known(false, Some(true), false), Startup, Success),
        ] {
            assert_eq!(known.initial(kind), expected, "{known:?} {kind:?}");
        }
    }

    #[test]
    fn a_restart_of_the_agent_keeps_the_readiness_of_containers_of_an_unready_pod() {
        use ProbeResult::{Failure, Success};
        let initial = |reason: Option<&str>, name: &str, id: &str| {
            let container = |name: &str, ready: bool| {
                json!({ "name": name, "containerID": format!("containerd://{name}"), "started": true, "image": "",
                    "imageID": "", "ready": ready, "restartCount": 0 })
            };
            let status: PodStatus = serde_json::from_value(json!({
                "conditions": [{ "type": "Ready", "status": "False", "reason": reason }],
                "containerStatuses": [container("a", true), container("b", false)],
            }))
            .expect("a status");
            let agent = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1000));
            let known = PriorState::of(&Record::of(&status), name, &ContainerId::from(id), 700_000_000_000, agent);
            known.initial(ProbeKind::Readiness)
        };
        for (reason, name, id, expected) in [
            (Some("ContainersNotReady"), "a", "a", Success),
            (Some("ReadinessGatesNotReady"), "a", "a", Success),
            (Some("ContainersNotReady"), "b", "b", Failure),
            (Some("ContainersNotReady"), "a", "new", Failure),
            (None, "a", "a", Failure),
        ] {
            assert_eq!(initial(reason, name, id), expected, "{reason:?} {name} {id}");
        }
    }

    #[test]
    fn only_the_record_of_the_same_instance_counts() {
        let status: PodStatus = serde_json::from_value(json!({
            "conditions": [{ "type": "Ready", "status": "True" }],
            "containerStatuses": [{ "name": "c", "containerID": "containerd://a", "started": true, "image": "", "imageID": "",
                "ready": true, "restartCount": 0 }],
        }))
        .expect("a status");
        let record = Record::of(&status);
        let agent = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1000));
        let at = |seconds: i64| seconds * 1_000_000_000;
        let of = |record: &Record, id: &str, started_at: i64, agent: Option<SystemTime>| {
            PriorState::of(record, "c", &ContainerId::from(id), started_at, agent)
        };
        let same = PriorState { older: true, started: Some(true), ready: true };
        // It has replaced the instance while the agent before this one could not report it.
        let other = PriorState { older: false, started: None, ready: false };
        for started_at in [at(700), at(990), at(2000), 0] {
            assert_eq!(of(&record, "a", started_at, agent), same, "{started_at}");
            assert_eq!(of(&record, "b", started_at, agent), other, "{started_at}");
        }
        let new = PriorState { older: false, started: Some(true), ready: true };
        assert_eq!(of(&record, "a", at(700), None), new);
        let unknown = PriorState { older: true, started: None, ready: false };
        let nothing = Record::default();
        assert_eq!(of(&nothing, "a", at(1), agent), unknown);
        assert_eq!(of(&nothing, "a", at(1), None), PriorState { older: false, ..unknown });
    }

    #[test]
    fn an_instance_that_replaced_the_recorded_one_is_neither_started_nor_ready() {
        use ProbeKind::{Readiness, Startup};
        use ProbeResult::{Failure, Unknown};
        let agent = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1000));
        for id in [Some("containerd://a"), None] {
            let container = json!({ "name": "c", "containerID": id, "started": true, "image": "", "imageID": "",
                "ready": true, "restartCount": 0 });
            let status: PodStatus = serde_json::from_value(json!({
                "conditions": [{ "type": "Ready", "status": "True" }], "initContainerStatuses": [container],
            }))
            .expect("a status");
            let known = PriorState::of(&Record::of(&status), "c", &ContainerId::from("b"), 700_000_000_000, agent);
            assert_eq!([Readiness, Startup].map(|kind| known.initial(kind)), [Failure, Unknown], "{id:?}");
        }
    }
}
