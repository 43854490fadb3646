//! Writes the values, and records on the node whether they were accepted.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Class;
use super::Reservation;
use crate::cgroups::CgroupError;
use crate::cgroups::CgroupName;
use crate::cgroups::CgroupValues;
use crate::cgroups::Cgroups;
use crate::recorder::EventType;
use crate::recorder::Recorder;
use crate::retry::Operation;
use crate::retry::RetryTracker;

const ENFORCED: &str = "NodeAllocatableEnforced";
const FAILED: &str = "FailedNodeAllocatableEnforcement";
/// How often the machine is read for the limits of all pods.
const PERIOD: Duration = Duration::from_secs(60);

/// Reads what the cgroup of all pods is to have on the machine as it is now; `None` if that is not known. May block.
pub type ReadPodLimits = Arc<dyn Fn() -> Option<CgroupValues> + Send + Sync>;

/// A reservation is not enforced. The message is that of the kubelet's event.
#[derive(Debug, thiserror::Error)]
#[error("Failed to enforce {what} Cgroup Limits on {cgroup:?}: {reason}")]
pub struct EnforcementError {
    what: &'static str,
    cgroup: String,
    reason: String,
}

/// Enforces limits on cgroups of this node.
#[derive(Clone, Debug)]
pub struct Enforcer {
    /// The cgroups.
    pub cgroups: Cgroups,
    /// Events of the node.
    pub recorder: Recorder,
    /// Failures on the cgroup of all pods.
    pub retries: RetryTracker,
}

impl Enforcer {
    /// Limits the cgroup of all pods. Retried each minute until it succeeds: on cgroup v1 the kernel refuses a limit below
    /// the present usage, which evictions bring down. Follows the machine: the Node offers processors and memory that are
    /// added to it. Never ends.
    pub async fn enforce_on_pods(self, name: CgroupName, read: ReadPodLimits) {
        let target = name.quoted();
        let mut enforced: Option<CgroupValues> = None;
        loop {
            let wanted = read_limits(&read).await.map(|now| not_lowered(now, enforced.as_ref()));
            let mut due = Instant::now() + PERIOD;
            if let Some(values) = wanted.filter(|values| enforced.as_ref() != Some(values)) {
                match self.cgroups.update_existing(&name, &values).await {
                    Ok(_) => {
                        self.retries.succeeded(Operation::EnforceAllocatable, &target);
                        let message = "Updated Node Allocatable limit across pods";
                        self.recorder.node_event(EventType::Normal, ENFORCED, message);
                        enforced = Some(values);
                    }
                    Err(error) => {
                        due = self.retries.failed(Operation::EnforceAllocatable, &target, &error.to_string());
                    }
                }
            }
            tokio::time::sleep_until(due).await;
        }
    }

    /// Limits the cgroups of reserved daemons, which must exist.
    ///
    /// # Errors
    /// The first that is not limited; it is recorded on the node. The agent must not run without it.
    pub async fn enforce_reservations(&self, all: &[Reservation]) -> Result<(), EnforcementError> {
        for reservation in all {
            self.enforce(reservation).await.inspect_err(|error| {
                self.recorder.node_event(EventType::Warning, FAILED, &error.to_string());
            })?;
        }
        Ok(())
    }

    async fn enforce(&self, reservation: &Reservation) -> Result<(), EnforcementError> {
        let cgroup = &reservation.cgroup;
        let (what, lower) = names(reservation);
        let failed = |reason: String| EnforcementError { what, cgroup: cgroup.clone(), reason };
        let name = CgroupName::of_setting(cgroup, self.cgroups.driver()).map_err(|error| failed(error.to_string()))?;
        let Some(values) = &reservation.values else {
            return Err(failed(format!("{} cgroup is not configured properly", name.quoted())));
        };
        let written = self.cgroups.update_existing(&name, values).await;
        written.map_err(|error: CgroupError| failed(error.to_string()))?;
        self.recorder.node_event(EventType::Normal, ENFORCED, &format!("Updated limits on {lower} cgroup {cgroup}"));
        Ok(())
    }
}

async fn read_limits(read: &ReadPodLimits) -> Option<CgroupValues> {
    let read = read.clone();
    tokio::task::spawn_blocking(move || read()).await.ok().flatten()
}

/// Memory that is taken from the machine does not lower the limit: below the present usage the kernel would kill processes
/// at once, where evictions choose pods. The next start of the agent applies the lower limit.
fn not_lowered(now: CgroupValues, enforced: Option<&CgroupValues>) -> CgroupValues {
    let memory_max = now.memory_max.max(enforced.and_then(|enforced| enforced.memory_max));
    CgroupValues { memory_max, ..now }
}

/// The kubelet's names of a reservation in its failures and successes.
fn names(reservation: &Reservation) -> (&'static str, &'static str) {
    match (reservation.class, reservation.compressible) {
        (Class::System, false) => ("System Reserved", "system reserved"),
        (Class::Kube, false) => ("Kube Reserved", "kube reserved"),
        (Class::System, true) => ("System Reserved Compressible", "system reserved"),
        (Class::Kube, true) => ("Kube Reserved Compressible", "kube reserved"),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::path::PathBuf;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;
    use crate::cgroups::Driver;
    use crate::cgroups::Layout;
    use crate::recorder::testing::RecordedEvents;
    use crate::recorder::testing::listening;

    /// A cgroup v1 hierarchy in a folder, with the cgroups `daemons` and `kubepods`.
    struct Fixture {
        folder: tempfile::TempDir,
        enforcer: Enforcer,
        events: RecordedEvents,
    }

    impl Fixture {
        fn new() -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let controllers = ["cpu", "memory", "pids"].map(|name| (name.to_owned(), folder.path().to_owned())).into();
            let layout = Layout::V1 { controllers, unified: None };
            let cgroups = Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs");
            let (recorder, events) = listening();
            let retries = RetryTracker::new(recorder.clone(), None);
            for cgroup in ["daemons", "kubepods"] {
                let cgroup = folder.path().join(cgroup);
                std::fs::create_dir(&cgroup).expect("a folder");
                for (file, text) in [("cpu.shares", "1024"), ("memory.limit_in_bytes", "9223372036854771712")] {
                    std::fs::write(cgroup.join(file), text).expect("a file");
                }
            }
            Self { folder, enforcer: Enforcer { cgroups, recorder, retries }, events }
        }

        fn file(&self, path: &str) -> PathBuf {
            self.folder.path().join(path)
        }
    }

    fn reservation(class: Class, compressible: bool, cgroup: &str) -> Reservation {
        let values = CgroupValues { cpu_shares: 512, memory_max: Some(1 << 20), ..CgroupValues::default() };
        Reservation { class, compressible, cgroup: cgroup.to_owned(), values: Some(values) }
    }

    fn text(file: &Path) -> String {
        std::fs::read_to_string(file).expect("text")
    }

    /// Limits by the memory of a machine, in MiB.
    fn of_machine(memory: &Arc<AtomicU64>) -> ReadPodLimits {
        let memory = memory.clone();
        Arc::new(move || Some(CgroupValues { memory_max: Some(memory.load(Relaxed) << 20), ..CgroupValues::default() }))
    }

    async fn next_events(events: &mut RecordedEvents) -> Vec<String> {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let found = events.take();
            if !found.is_empty() {
                return found;
            }
        }
    }

    #[tokio::test]
    async fn reserved_cgroups_are_limited_and_reported_by_events() {
        let mut fixture = Fixture::new();
        let all = [reservation(Class::System, false, "/daemons"), reservation(Class::Kube, true, "daemons")];
        fixture.enforcer.enforce_reservations(&all).await.expect("accepted");
        assert_eq!(text(&fixture.file("daemons/cpu.shares")), "512");
        assert_eq!(text(&fixture.file("daemons/memory.limit_in_bytes")), "1048576");
        let expected = [
            "node N NodeAllocatableEnforced: Updated limits on system reserved cgroup /daemons",
            "node N NodeAllocatableEnforced: Updated limits on kube reserved cgroup daemons",
        ];
        assert_eq!(fixture.events.take(), expected);
    }

    #[tokio::test]
    async fn a_reserved_cgroup_that_does_not_exist_is_fatal() {
        let mut fixture = Fixture::new();
        let error = fixture
            .enforcer
            .enforce_reservations(&[reservation(Class::Kube, false, "/none/here")])
            .await
            .expect_err("missing")
            .to_string();
        let start = "Failed to enforce Kube Reserved Cgroup Limits on \"/none/here\": \
                     cgroup [\"none\" \"here\"] has some missing paths: ";
        assert!(error.starts_with(start), "{error}");
        assert_eq!(fixture.events.take(), [format!("node W FailedNodeAllocatableEnforcement: {error}")]);
        let unset = Reservation { values: None, ..reservation(Class::System, true, "/daemons") };
        let error = fixture.enforcer.enforce_reservations(&[unset]).await.expect_err("nothing reserved").to_string();
        let expected = "Failed to enforce System Reserved Compressible Cgroup Limits on \"/daemons\": \
                        [\"daemons\"] cgroup is not configured properly";
        assert_eq!(error, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_that_is_refused_is_retried_each_minute() {
        let mut fixture = Fixture::new();
        // A cgroup that does not exist yet stands for one that refuses the value.
        let limit = fixture.file("kubepods/memory.limit_in_bytes");
        std::fs::rename(fixture.file("kubepods"), fixture.file("aside")).expect("moved");
        let name = CgroupName::default().kubepods();
        tokio::spawn(fixture.enforcer.clone().enforce_on_pods(name, of_machine(&Arc::new(AtomicU64::new(1)))));
        let began = Instant::now();
        let mut seen = Vec::new();
        while seen.len() < 3 {
            seen.extend(next_events(&mut fixture.events).await);
        }
        assert!((120..=200).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
        let start =
            "node W FailedNodeAllocatableEnforcement: Failed to update Node Allocatable Limits [\"kubepods\"]: ";
        assert!(seen.iter().all(|event| event.starts_with(start)), "{seen:?}");
        std::fs::rename(fixture.file("aside"), fixture.file("kubepods")).expect("moved back");
        let enforced = "node N NodeAllocatableEnforced: Updated Node Allocatable limit across pods";
        assert_eq!(next_events(&mut fixture.events).await, [enforced]);
        assert_eq!(text(&limit), "1048576");
    }

    #[tokio::test(start_paused = true)]
    async fn memory_that_is_added_to_the_machine_raises_the_limit() {
        let mut fixture = Fixture::new();
        let (limit, memory) = (fixture.file("kubepods/memory.limit_in_bytes"), Arc::new(AtomicU64::new(2)));
        let name = CgroupName::default().kubepods();
        tokio::spawn(fixture.enforcer.clone().enforce_on_pods(name, of_machine(&memory)));
        let enforced = "node N NodeAllocatableEnforced: Updated Node Allocatable limit across pods";
        for (mebibytes, bytes) in [(2, "2097152"), (4, "4194304")] {
            memory.store(mebibytes, Relaxed);
            assert_eq!(next_events(&mut fixture.events).await, [enforced]);
            assert_eq!(text(&limit), bytes);
        }
        memory.store(1, Relaxed);
        tokio::time::sleep(3 * PERIOD).await;
        assert_eq!((fixture.events.take(), text(&limit).as_str()), (Vec::new(), "4194304"), "it may be in use");
    }
}
