//! The sentence of a verdict in events. Pure.

use std::fmt::Write as _;

use crate::model::OomEvidence;
use crate::model::OomGroup;
use crate::model::OomScope;
use crate::model::OomVerdict;
use crate::model::OomVictim;

/// What happened, for the event on the pod.
pub(super) fn of(verdict: &OomVerdict) -> String {
    let mut text = format!("{} was killed: {}", process(verdict), cause(verdict));
    if let Some(memory) = verdict.memory {
        let (anon, file, shmem) = (size(memory.anon_bytes), size(memory.file_bytes), size(memory.shmem_bytes));
        // Writing to a string does not fail.
        let _ = write!(text, "; it held {anon} anonymous, {file} file and {shmem} shared memory");
    }
    if verdict.group == OomGroup::Chosen {
        text.push_str("; all processes of its cgroup were killed with it (memory.oom.group)");
    }
    let unknown: Vec<&str> =
        verdict.missing.iter().filter(|gap| **gap != OomEvidence::Time).map(|gap| gap.as_str()).collect();
    if !unknown.is_empty() {
        let _ = write!(text, " (unknown: {})", unknown.join(", "));
    }
    text
}

/// The message of upstream's event `SystemOOM` on the node.
pub(super) fn of_node(verdict: &OomVerdict) -> String {
    match (verdict.comm.as_str(), verdict.pid) {
        ("", _) | (_, None) => "System OOM encountered".to_owned(),
        (comm, Some(pid)) => format!("System OOM encountered, victim process: {comm}, pid: {pid}"),
    }
}

fn process(verdict: &OomVerdict) -> String {
    let name = match (verdict.comm.as_str(), verdict.pid) {
        ("", None) => "A process".to_owned(),
        ("", Some(pid)) => format!("Process {pid}"),
        (comm, None) => format!("Process {comm}"),
        (comm, Some(pid)) => format!("Process {comm} (pid {pid})"),
    };
    let container = match &verdict.container {
        Some(container) if !container.name.is_empty() => format!("container {}", container.name),
        Some(container) => format!("container {}", short(container.id.as_str())),
        None => return name,
    };
    match verdict.victim {
        OomVictim::Main => format!("{name}, the main process of {container},"),
        OomVictim::Child => format!("{name}, a child of the main process of {container},"),
        OomVictim::Exec => format!("{name}, started by an exec in {container},"),
        OomVictim::Other | OomVictim::Unknown => format!("{name} in {container}"),
    }
}

fn cause(verdict: &OomVerdict) -> String {
    let limit = verdict.limit_bytes.map(|bytes| format!(" of {}", size(bytes))).unwrap_or_default();
    match verdict.scope {
        OomScope::Container => format!("the container reached its memory limit{limit}"),
        OomScope::Pod => format!("the pod reached its memory limit{limit}"),
        OomScope::QosClass => format!("the pods of its QoS class reached their memory limit{limit}"),
        OomScope::NodeAllocatable => format!("all pods together reached the memory limit{limit} (node allocatable)"),
        OomScope::OtherCgroup => {
            let cgroup = verdict.limit_cgroup.as_deref().unwrap_or_default();
            format!("cgroup {cgroup} reached its memory limit{limit}")
        }
        OomScope::Node => "the node was out of memory".to_owned(),
        OomScope::Unknown => format!("a memory limit{limit} was reached, or the node was out of memory"),
    }
}

/// Container ids as tools abbreviate them.
fn short(id: &str) -> &str {
    id.get(..13).unwrap_or(id)
}

/// Bytes in the largest binary unit of which there is at least one, with one decimal place unless it is zero.
fn size(bytes: u64) -> String {
    const UNITS: [(&str, u64); 4] = [("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];
    let Some((unit, scale)) = UNITS.into_iter().find(|(_, scale)| bytes >= *scale) else { return bytes.to_string() };
    let (whole, tenth) = (bytes / scale, bytes % scale * 10 / scale);
    if tenth == 0 { format!("{whole}{unit}") } else { format!("{whole}.{tenth}{unit}") }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::model::KernelMoment;
    use crate::model::OomConfidence;
    use crate::model::OomContainer;
    use crate::model::OomMemory;
    use crate::model::OomTime;

    fn verdict() -> OomVerdict {
        OomVerdict {
            moment: KernelMoment(Instant::now()),
            time: OomTime(0),
            pid: Some(4711),
            comm: "python3".to_owned(),
            pod: None,
            container: Some(OomContainer { id: "0123456789abcdef".into(), name: "app".to_owned() }),
            victim: OomVictim::Child,
            scope: OomScope::Container,
            limit_cgroup: None,
            limit_bytes: Some(256 << 20),
            memory: Some(OomMemory { anon_bytes: 250 << 20, file_bytes: 1536, shmem_bytes: 0 }),
            group: OomGroup::Single,
            confidence: OomConfidence::Kernel,
            missing: Vec::new(),
        }
    }

    #[test]
    fn a_complete_verdict() {
        let text = "Process python3 (pid 4711), a child of the main process of container app, was killed: the container \
                    reached its memory limit of 256Mi; it held 250Mi anonymous, 1.5Ki file and 0 shared memory";
        assert_eq!(of(&verdict()), text);
    }

    #[test]
    fn what_is_missing_is_named() {
        let known = verdict();
        let verdict = OomVerdict {
            pid: None,
            comm: String::new(),
            container: Some(OomContainer { id: "0123456789abcdef".into(), name: String::new() }),
            victim: OomVictim::Unknown,
            scope: OomScope::Unknown,
            limit_bytes: None,
            memory: None,
            missing: vec![OomEvidence::Process, OomEvidence::Container, OomEvidence::Time],
            ..known
        };
        let text = "A process in container 0123456789abc was killed: a memory limit was reached, or the node was out of \
                    memory (unknown: process, container)";
        assert_eq!(of(&verdict), text);
    }

    #[test]
    fn the_event_on_the_node_names_a_process_only_with_its_pid() {
        let of = |comm: &str, pid| of_node(&OomVerdict { comm: comm.to_owned(), pid, ..verdict() });
        assert_eq!(of("hungry", Some(7)), "System OOM encountered, victim process: hungry, pid: 7");
        assert_eq!([of("", Some(7)), of("hungry", None), of("", None)], ["System OOM encountered"; 3]);
    }

    #[test]
    fn every_scope_and_victim_has_words() {
        let of = |victim, scope, group| {
            let limit_cgroup = Some("/x".to_owned());
            of(&OomVerdict { victim, scope, group, limit_cgroup, memory: None, ..verdict() })
        };
        for (victim, scope, group, words) in [
            (
                OomVictim::Main,
                OomScope::Pod,
                OomGroup::Single,
                "the main process of container app, was killed: the pod reached its memory limit of 256Mi",
            ),
            (
                OomVictim::Exec,
                OomScope::QosClass,
                OomGroup::Single,
                "started by an exec in container app, was killed: the pods of its QoS class reached",
            ),
            (
                OomVictim::Other,
                OomScope::NodeAllocatable,
                OomGroup::Single,
                "all pods together reached the memory limit of 256Mi (node allocatable)",
            ),
            (OomVictim::Main, OomScope::OtherCgroup, OomGroup::Single, "cgroup /x reached its memory limit of 256Mi"),
            (OomVictim::Main, OomScope::Node, OomGroup::Single, "was killed: the node was out of memory"),
            (
                OomVictim::Main,
                OomScope::Container,
                OomGroup::Chosen,
                "; all processes of its cgroup were killed with it (memory.oom.group)",
            ),
        ] {
            let text = of(victim, scope, group);
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn sizes() {
        for (bytes, text) in
            [(0, "0"), (1023, "1023"), (1024, "1Ki"), (1536, "1.5Ki"), (1 << 30, "1Gi"), (u64::MAX, "16777215.9Ti")]
        {
            assert_eq!(size(bytes), text);
        }
    }
}
