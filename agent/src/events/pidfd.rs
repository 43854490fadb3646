//! Watches init processes of containers by pidfd: the machine's own [`ProcessWatch`].

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::process::Gone;
use super::process::Pinned;
use super::process::ProcessWatch;
use super::sensors::Sensor;
use super::sensors::SensorState;
use super::sensors::SensorStates;
use crate::cgroups::Hierarchy;
use crate::kernel::pidfd;
use crate::kernel::pidfd::PinError;
use crate::kernel::pidfd::PinnedProcess;
use crate::model::Backoff;
use crate::model::ContainerId;

/// How often, and after what first and longest delay, the exit code of an ended process is read: the kernel reports it
/// once the runtime's shim has reaped it.
const CODE_ATTEMPTS: u32 = 5;
const CODE_DELAY: Duration = Duration::from_millis(1);
const LONGEST_CODE_DELAY: Duration = Duration::from_millis(16);

/// Watches through pidfds.
pub struct PidfdWatch {
    hierarchy: Hierarchy,
    sensor_states: SensorStates,
    /// The runtime's pids were seen to be pids of the agent's own PID namespace. Until then "no such process" proves
    /// nothing.
    trusted: AtomicBool,
    /// The last process could not be watched, for a reason of the system.
    has_failed: AtomicBool,
}

impl PidfdWatch {
    /// A watch that checks cgroups in `hierarchy`.
    pub fn new(hierarchy: Hierarchy, sensor_states: SensorStates) -> Self {
        sensor_states.set(Sensor::Pidfd, SensorState::Up);
        Self { hierarchy, sensor_states, trusted: AtomicBool::new(false), has_failed: AtomicBool::new(false) }
    }

    fn watch(&self, process: PinnedProcess, id: &ContainerId) -> Pinned {
        let path = process.cgroup_path(&self.hierarchy).unwrap_or_default();
        match owner(path, id) {
            Owner::Container => {}
            Owner::Monitor => {
                return Pinned::Monitor(format!("process {} is in cgroup {path} of the monitor", process.pid()));
            }
            Owner::Other => {
                let reason = format!("process {} is in cgroup {path}, not in its container's", process.pid());
                return Pinned::NotFound(reason);
            }
        }
        let is_init = process.is_pid_ns_init();
        self.trusted.store(true, Relaxed);
        let sensor_states = self.sensor_states.clone();
        let gone = Box::pin(async move {
            if let Err(error) = process.gone().await {
                tracing::warn!(pid = process.pid(), %error, "cannot wait for a pidfd; waiting for the runtime's event");
                std::future::pending::<()>().await;
            }
            let reads_code = is_init && !has_codes_from_probe(&sensor_states);
            Gone { exit_code: if reads_code { exit_code(&process).await } else { None } }
        });
        if is_init { Pinned::Watching(gone) } else { Pinned::Hint(gone) }
    }
}

/// The owner of a cgroup.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    Container,
    /// The monitor of the container: CRI-O names its cgroup `crio-conmon-<id>`.
    Monitor,
    Other,
}

/// The owner of the cgroup at `path`, with regard to the container `id`. Runtimes name cgroups after their container.
fn owner(path: &str, id: &ContainerId) -> Owner {
    match path.split('/').find_map(|part| part.split_once(id.as_str())) {
        Some((prefix, _)) if prefix.ends_with("conmon-") => Owner::Monitor,
        Some(_) => Owner::Container,
        None => Owner::Other,
    }
}

/// A probe reports exit codes: no need to read them from the pidfd.
fn has_codes_from_probe(sensor_states: &SensorStates) -> bool {
    sensor_states.get(Sensor::Exits) == Some(SensorState::Up)
}

async fn exit_code(process: &PinnedProcess) -> Option<i32> {
    let mut backoff = Backoff::new(CODE_DELAY, LONGEST_CODE_DELAY);
    for _ in 0..CODE_ATTEMPTS {
        if let Some(status) = process.exit_status() {
            return Some(status.code());
        }
        tokio::time::sleep(backoff.failed(0.0)).await;
    }
    process.exit_status().map(|status| status.code())
}

impl ProcessWatch for PidfdWatch {
    fn pin(&self, pid: u32, id: &ContainerId) -> Pinned {
        match pidfd::pin(pid) {
            Ok(process) => {
                if self.has_failed.swap(false, Relaxed) {
                    self.sensor_states.set(Sensor::Pidfd, SensorState::Up);
                }
                self.watch(process, id)
            }
            Err(PinError::AlreadyGone { .. }) if self.trusted.load(Relaxed) => Pinned::Gone,
            Err(error @ PinError::AlreadyGone { .. }) => Pinned::NotFound(error.to_string()),
            Err(PinError::System { source, .. }) => {
                self.has_failed.store(true, Relaxed);
                // The reason names no process, so that refusals of several, and in each relist, are one change of the state.
                let reason = format!("cannot pin processes: {source}");
                self.sensor_states.set(Sensor::Pidfd, SensorState::Degraded(reason.clone()));
                Pinned::Failed(reason)
            }
            Err(error) => Pinned::Ineligible(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::HierarchyKind;

    #[test]
    fn codes_are_read_unless_the_probe_of_exits_is_up() {
        let sensor_states = SensorStates::default();
        assert!(!has_codes_from_probe(&sensor_states));
        for (state, expected) in [
            (SensorState::Up, true),
            (SensorState::Degraded("some cgroups are not watched".to_owned()), false),
            (SensorState::Down("process_exit: refused".to_owned()), false),
            (SensorState::Off, false),
        ] {
            sensor_states.set(Sensor::Exits, state.clone());
            assert_eq!(has_codes_from_probe(&sensor_states), expected, "{state:?}");
        }
    }

    #[test]
    fn the_reason_of_a_refusal_is_the_same_for_all_processes() {
        let (mount, kind) = ("/sys/fs/cgroup".into(), HierarchyKind::Unified);
        let hierarchy = Hierarchy { kind, number: 0, mount, root: "/".to_owned() };
        let sensor_states = SensorStates::default();
        let watch = PidfdWatch::new(hierarchy, sensor_states.clone());
        // The kernel refuses pid 0.
        assert!(matches!(watch.pin(0, &ContainerId::from("a")), Pinned::Failed(_)));
        let refused = SensorState::Degraded("cannot pin processes: Invalid argument (os error 22)".to_owned());
        assert_eq!(sensor_states.get(Sensor::Pidfd), Some(refused));
    }

    #[test]
    fn a_container_does_not_own_the_cgroup_of_its_monitor() {
        let id = "0123456789abcdef".repeat(4);
        for (path, expected) in [
            (format!("/kubepods.slice/kubepods-pod1.slice/crio-{id}.scope"), Owner::Container),
            (format!("/kubepods.slice/kubepods-pod1.slice/crio-{id}.scope/container"), Owner::Container),
            (format!("/kubepods.slice/kubepods-pod1.slice/cri-containerd-{id}.scope"), Owner::Container),
            (format!("/kubepods/pod1/{id}"), Owner::Container),
            (format!("/kubepods/pod1/crio-{id}"), Owner::Container),
            (format!("/system.slice/crio-conmon-{id}.scope"), Owner::Monitor),
            (format!("/kubepods/pod1/crio-conmon-{id}"), Owner::Monitor),
            ("/kata_overhead/another".to_owned(), Owner::Other),
            (String::new(), Owner::Other),
        ] {
            assert_eq!(owner(&path, &ContainerId::from(id.as_str())), expected, "{path}");
        }
    }
}
