//! The verdict on one OOM kill: which process, in which container of which pod, and whose memory limit was exceeded. Plain
//! data, serialisable; evidence that is missing is listed instead of guessed.

use std::fmt;

use serde::Serialize;
use serde::Serializer;

use super::ContainerId;
use super::KernelMoment;
use super::PodRef;

/// One process that the OOM killer killed. A kill of a whole cgroup (`memory.oom.group`) yields one verdict per process.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OomVerdict {
    /// When the kernel chose the process, on the agent's monotonic clock. Without a kernel record: when it was noticed.
    #[serde(skip)]
    pub moment: KernelMoment,
    /// The same on the wall clock.
    pub time: OomTime,
    /// Process id in the host's PID namespace.
    pub pid: Option<u32>,
    /// Command name, at most 15 bytes; empty if unknown.
    pub comm: String,
    /// The pod; name and namespace are empty if only its UID is known. `None` for a process of no pod, and if unknown
    /// (then [`Self::missing`] says so).
    pub pod: Option<PodRef>,
    /// The container; `None` for a process of no container, and if unknown.
    pub container: Option<OomContainer>,
    /// What the process was to its container.
    pub victim: OomVictim,
    /// Whose memory was exhausted.
    pub scope: OomScope,
    /// Path of the cgroup whose limit was exceeded, in the memory hierarchy.
    pub limit_cgroup: Option<String>,
    /// That limit in bytes, when the process was chosen.
    pub limit_bytes: Option<u64>,
    /// Memory of the process when it was chosen.
    pub memory: Option<OomMemory>,
    /// Whether the kernel killed a whole cgroup.
    pub group: OomGroup,
    /// The evidence that this is based on.
    pub confidence: OomConfidence,
    /// Evidence that is missing, in the order of [`OomEvidence`].
    pub missing: Vec<OomEvidence>,
}

impl OomVerdict {
    /// This kill explains the exit of the container: its main process was killed.
    pub fn killed_main(&self) -> bool {
        self.victim == OomVictim::Main
    }

    /// One of several victims of one event, and not the first: it has no event and no log line of its own.
    pub fn is_group_member(&self) -> bool {
        self.group == OomGroup::Member
    }
}

/// Nanoseconds since the Unix epoch; displayed and serialised as RFC 3339 with microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OomTime(
    /// Nanoseconds since the Unix epoch.
    pub i64,
);

impl fmt::Display for OomTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use k8s_openapi::jiff::Timestamp;
        let time = Timestamp::from_nanosecond(i128::from(self.0)).unwrap_or(Timestamp::UNIX_EPOCH);
        write!(f, "{time:.6}")
    }
}

impl Serialize for OomTime {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The container of a victim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OomContainer {
    /// The runtime's id of the instance.
    pub id: ContainerId,
    /// Name in the pod spec; empty for the sandbox, and while no inspection has shown the instance.
    pub name: String,
}

/// Resident memory of a victim in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OomMemory {
    /// Anonymous memory.
    pub anon_bytes: u64,
    /// File-backed memory.
    pub file_bytes: u64,
    /// Shared memory (tmpfs, System V).
    pub shmem_bytes: u64,
}

/// Defines an enumeration with the spelling of its values in JSON, metrics and logs.
macro_rules! spelled {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$variant_doc])* $variant,)+ }

        impl $name {
            /// All values.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The spelling in JSON, metrics and logs.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }
    };
}

spelled! {
    /// What a killed process was to its container.
    OomVictim {
        /// The container's main process (its init): the container exits with it.
        Main = "main",
        /// A descendant of the main process, adopted orphans included.
        Child = "child",
        /// A process that was started in the container by an exec (`kubectl exec`, exec probe, exec hook), or a
        /// descendant of one.
        Exec = "exec",
        /// A process of no container of a pod.
        Other = "other",
        /// A process of a container whose relation to the main process is not known.
        Unknown = "unknown",
    }
}

spelled! {
    /// Whose memory was exhausted.
    OomScope {
        /// The container's own limit (`resources.limits.memory`).
        Container = "container",
        /// The limit of the pod's cgroup.
        Pod = "pod",
        /// The limit of a QoS class's cgroup (`kubepods/burstable`, `kubepods/besteffort`).
        QosClass = "qos-class",
        /// Node allocatable: the limit of `kubepods`, the cgroup of all pods.
        NodeAllocatable = "node-allocatable",
        /// The limit of another cgroup, [`OomVerdict::limit_cgroup`].
        OtherCgroup = "other-cgroup",
        /// No limit: the node was out of memory.
        Node = "node",
        /// Not known.
        Unknown = "unknown",
    }
}

spelled! {
    /// Whether the kernel killed a whole cgroup (`memory.oom.group`).
    OomGroup {
        /// One process was killed.
        Single = "single",
        /// The process was chosen, and its whole cgroup was killed with it.
        Chosen = "chosen",
        /// The process was killed because another one of its cgroup was chosen.
        Member = "member",
    }
}

spelled! {
    /// The evidence of a verdict, best first.
    OomConfidence {
        /// The probe's record, made by the kernel at the moment of the kill.
        Kernel = "kernel",
        /// The cgroup's counter of OOM kills (`memory.events`, `memory.oom_control`): the number, not the processes.
        Counter = "counter",
        /// The kernel log.
        Log = "log",
    }
}

spelled! {
    /// Something a verdict may lack.
    OomEvidence {
        /// Which process.
        Process = "process",
        /// Which pod.
        Pod = "pod",
        /// Which container.
        Container = "container",
        /// Main process, child or exec.
        Relation = "relation",
        /// Whose limit.
        Scope = "scope",
        /// How high the limit was.
        LimitBytes = "limit-bytes",
        /// How much memory the process held.
        Memory = "memory",
        /// When it happened: the time is that of its discovery.
        Time = "time",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn serialises_as_documented() {
        let verdict = OomVerdict {
            moment: KernelMoment(Instant::now()),
            time: OomTime(1_700_000_000_123_456_789),
            pid: Some(4711),
            comm: "python3".to_owned(),
            pod: Some(PodRef { uid: "u".into(), namespace: "default".into(), name: "web".into() }),
            container: Some(OomContainer { id: "abc".into(), name: "app".to_owned() }),
            victim: OomVictim::Child,
            scope: OomScope::QosClass,
            limit_cgroup: Some("/kubepods/burstable".to_owned()),
            limit_bytes: Some(1 << 30),
            memory: Some(OomMemory { anon_bytes: 4096, file_bytes: 0, shmem_bytes: 8192 }),
            group: OomGroup::Single,
            confidence: OomConfidence::Kernel,
            missing: vec![OomEvidence::LimitBytes],
        };
        let expected = json!({
            "time": "2023-11-14T22:13:20.123456Z",
            "pid": 4711,
            "comm": "python3",
            "pod": { "uid": "u", "namespace": "default", "name": "web" },
            "container": { "id": "abc", "name": "app" },
            "victim": "child",
            "scope": "qos-class",
            "limit_cgroup": "/kubepods/burstable",
            "limit_bytes": 1_073_741_824_u64,
            "memory": { "anon_bytes": 4096, "file_bytes": 0, "shmem_bytes": 8192 },
            "group": "single",
            "confidence": "kernel",
            "missing": ["limit-bytes"],
        });
        assert_eq!(serde_json::to_value(verdict).unwrap(), expected);
    }
}
