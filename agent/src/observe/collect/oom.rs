//! A verdict of the agent's own OOM module as a record. Pure.

use crate::model;
use crate::model::OomVerdict;
use crate::observe::record::Confidence;
use crate::observe::record::OomMemory;
use crate::observe::record::OomProcess;
use crate::observe::record::OomRecord;
use crate::observe::record::Scope;
use crate::observe::record::Timestamp;
use crate::observe::record::Victim;
use crate::observe::text::clean;

use super::pods::name_of;

/// Longest command name, in characters; the kernel's are shorter.
const NAME: usize = 32;

/// The record of a verdict, with its time.
pub(super) fn record(verdict: &OomVerdict) -> (Timestamp, OomRecord) {
    let container = verdict.container.as_ref();
    let record = OomRecord {
        pod: verdict.pod.as_ref().map(name_of),
        container: container.map(|container| container.name.clone()).filter(|name| !name.is_empty()),
        container_id: container.map(|container| container.id.to_string()),
        victim: victim(verdict.victim),
        process: verdict.pid.map(|pid| OomProcess { pid, name: clean(&verdict.comm, NAME) }),
        scope: scope(verdict.scope),
        limit_bytes: verdict.limit_bytes,
        limit_cgroup: verdict.limit_cgroup.clone(),
        memory: verdict.memory.map(|memory| OomMemory {
            anon_bytes: memory.anon_bytes,
            file_bytes: memory.file_bytes,
            shmem_bytes: memory.shmem_bytes,
        }),
        kills: 1,
        earlier: false,
        confidence: confidence(verdict.confidence),
        missing: verdict.missing.iter().map(|missing| missing.as_str().to_owned()).collect(),
    };
    (Timestamp::from_nanos(verdict.time.0).unwrap_or_default(), record)
}

fn victim(victim: model::OomVictim) -> Victim {
    match victim {
        model::OomVictim::Main => Victim::Main,
        model::OomVictim::Child => Victim::Child,
        model::OomVictim::Exec => Victim::Exec,
        model::OomVictim::Other => Victim::Other,
        model::OomVictim::Unknown => Victim::Unknown,
    }
}

fn scope(scope: model::OomScope) -> Scope {
    match scope {
        model::OomScope::Container => Scope::Container,
        model::OomScope::Pod => Scope::Pod,
        model::OomScope::QosClass => Scope::QosClass,
        model::OomScope::NodeAllocatable => Scope::NodeAllocatable,
        model::OomScope::OtherCgroup => Scope::OtherCgroup,
        model::OomScope::Node => Scope::Node,
        model::OomScope::Unknown => Scope::Unknown,
    }
}

fn confidence(confidence: model::OomConfidence) -> Confidence {
    match confidence {
        model::OomConfidence::Kernel => Confidence::Kernel,
        model::OomConfidence::Counter => Confidence::Counter,
        model::OomConfidence::Log => Confidence::Log,
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::model::KernelMoment;
    use crate::model::OomConfidence;
    use crate::model::OomContainer;
    use crate::model::OomEvidence;
    use crate::model::OomGroup;
    use crate::model::OomScope;
    use crate::model::OomTime;
    use crate::model::OomVictim;
    use crate::model::PodRef;

    #[test]
    fn spellings_are_those_of_the_agent() {
        for value in OomVictim::ALL {
            assert_eq!(victim(*value).as_str(), value.as_str());
        }
        for value in OomScope::ALL {
            assert_eq!(scope(*value).as_str(), value.as_str());
        }
        for value in OomConfidence::ALL {
            assert_eq!(confidence(*value).as_str(), value.as_str());
        }
    }

    #[test]
    fn a_verdict_keeps_what_is_known_and_what_is_missing() {
        let verdict = OomVerdict {
            moment: KernelMoment(Instant::now()),
            time: OomTime(1_700_000_000_123_456_789),
            pid: Some(7),
            comm: "hog\n".to_owned(),
            pod: Some(PodRef { uid: "u".into(), namespace: "ns".into(), name: "web".into() }),
            container: Some(OomContainer { id: "abc".into(), name: String::new() }),
            victim: OomVictim::Child,
            scope: OomScope::Container,
            limit_cgroup: Some("/kubepods/podu/abc".to_owned()),
            limit_bytes: None,
            memory: None,
            group: OomGroup::Single,
            confidence: OomConfidence::Kernel,
            missing: vec![OomEvidence::LimitBytes, OomEvidence::Memory],
        };
        let (time, record) = record(&verdict);
        assert_eq!(time.to_string(), "2023-11-14T22:13:20.123Z");
        assert_eq!((record.container, record.container_id.as_deref()), (None, Some("abc")));
        assert_eq!(record.process.unwrap().name, "hog\u{fffd}");
        assert_eq!(record.missing, ["limit-bytes", "memory"]);
    }
}
