//! Pinning container inits by pidfd: the machine's own [`ProcessWatch`].

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::process::Gone;
use super::process::Pinned;
use super::process::ProcessWatch;
use super::sensors::Sensor;
use super::sensors::SensorBoard;
use super::sensors::SensorState;
use crate::kernel::hierarchy::Hierarchy;
use crate::kernel::pidfd;
use crate::kernel::pidfd::PinError;
use crate::kernel::pidfd::PinnedProcess;
use crate::model::ContainerId;

/// How often, and after what first delay (doubled each time), a dead process is asked for its exit code: the kernel
/// tells once the runtime's shim has reaped it.
const CODE_ATTEMPTS: u32 = 5;
const CODE_DELAY: Duration = Duration::from_millis(1);

/// Pins through pidfds.
pub struct PidfdWatch {
    hierarchy: Hierarchy,
    board: SensorBoard,
    /// A probe tells exit codes: no need to ask the pidfd for them.
    codes_from_probe: bool,
    /// The runtime's pids have proven to be pids of our own PID namespace. Until then "no such process" proves
    /// nothing: agent and runtime may count differently.
    trusted: AtomicBool,
}

impl PidfdWatch {
    /// A watch that checks cgroups in `hierarchy`.
    pub fn new(hierarchy: Hierarchy, board: SensorBoard, codes_from_probe: bool) -> Self {
        board.set(Sensor::Pidfd, SensorState::Up);
        Self { hierarchy, board, codes_from_probe, trusted: AtomicBool::new(false) }
    }

    fn judge(&self, process: PinnedProcess, id: &ContainerId) -> Pinned {
        let path = process.cgroup_path(&self.hierarchy).unwrap_or_default();
        if !path.split('/').any(|part| part.contains(id.as_str())) {
            return Pinned::Ineligible(format!(
                "process {} lies in cgroup {path}, not in its container's",
                process.pid()
            ));
        }
        if !process.is_pid_ns_init() {
            return Pinned::Ineligible(format!("process {} does not lead a PID namespace of its own", process.pid()));
        }
        self.trusted.store(true, Relaxed);
        let ask = !self.codes_from_probe;
        Pinned::Watching(Box::pin(async move {
            if let Err(error) = process.gone().await {
                tracing::warn!(pid = process.pid(), %error, "waiting for a pidfd failed; the runtime's word is awaited");
                std::future::pending::<()>().await;
            }
            Gone { exit_code: if ask { exit_code(&process).await } else { None } }
        }))
    }
}

async fn exit_code(process: &PinnedProcess) -> Option<i32> {
    for attempt in 0..CODE_ATTEMPTS {
        if let Some(status) = process.exit_status() {
            return Some(status.code());
        }
        tokio::time::sleep(CODE_DELAY * 2u32.pow(attempt)).await;
    }
    process.exit_status().map(|status| status.code())
}

impl ProcessWatch for PidfdWatch {
    fn pin(&self, pid: u32, id: &ContainerId) -> Pinned {
        match pidfd::pin(pid) {
            Ok(process) => self.judge(process, id),
            Err(PinError::AlreadyGone { .. }) if self.trusted.load(Relaxed) => Pinned::Gone,
            Err(error @ PinError::System { .. }) => {
                self.board.set(Sensor::Pidfd, SensorState::Degraded(error.to_string()));
                Pinned::Ineligible(error.to_string())
            }
            Err(error) => Pinned::Ineligible(error.to_string()),
        }
    }
}
