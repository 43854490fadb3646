//! Records of the probes as hints: exits of init processes, OOM kills.
//!
//! Loads the probes, watches the cgroups of pods (the probes watch those created below), maps cgroups to containers, and
//! forwards what concerns a container. If the probes cannot be loaded, their sensors are down with a reason.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::ExitFacts;
use super::Hint;
use super::OomFacts;
use super::RelistReason;
use super::sensors::Sensor;
use super::sensors::SensorBoard;
use super::sensors::SensorState;
use crate::cgroups::Hierarchy;
use crate::kernel::bpf;
use crate::kernel::bpf::KernelRecord;
use crate::kernel::bpf::Loaded;
use crate::kernel::bpf::Losses;
use crate::kernel::bpf::Oom;
use crate::kernel::bpf::ProbeOutput;
use crate::kernel::bpf::ProbeStatus;
use crate::kernel::bpf::Probes;
use crate::kernel::bpf::Records;
use crate::kernel::clock::BootTime;
use crate::kernel::index::ContainerIndex;
use crate::metrics::Metrics;
use crate::model::KernelMoment;
use crate::recorder::EventType;
use crate::recorder::Recorder;

/// Options of the kernel sensors.
#[derive(Clone, Debug)]
pub struct KernelOptions {
    /// The cgroup of all pods in the watched hierarchy (`/kubepods`, `/` for all cgroups).
    pub cgroup_root: String,
    /// The kernel's type information.
    pub btf: PathBuf,
    /// Records the event `SystemOOM`.
    pub recorder: Recorder,
    /// Counts lost records.
    pub metrics: Arc<Metrics>,
}

/// Loads the probes and starts forwarding their records. `None` if they cannot be loaded.
pub async fn start(
    options: KernelOptions,
    hierarchy: Hierarchy,
    hints: mpsc::Sender<Hint>,
    board: SensorBoard,
    shutdown: CancellationToken,
) -> Option<Probes> {
    let loading = bpf::Options { btf: options.btf.clone(), ..bpf::Options::new(hierarchy.clone()) };
    let Loaded { probes, records, status } = match bpf::load(loading).await {
        Ok(loaded) => loaded,
        Err(error) => {
            for sensor in [Sensor::Exits, Sensor::Oom, Sensor::Cgroups, Sensor::Reclaim] {
                board.set(sensor, SensorState::Down(error.to_string()));
            }
            return None;
        }
    };
    report(&board, &status);
    let mut index = ContainerIndex::new();
    match probes.watch_tree(&hierarchy, &options.cgroup_root) {
        Ok(found) => found.iter().for_each(|(id, path)| index.cgroup_created(*id, None, path)),
        Err(error) => board.set(Sensor::Exits, SensorState::Degraded(error.to_string())),
    }
    let KernelOptions { recorder, metrics, .. } = options;
    let follower = Follower { records, index, hints, board, recorder, metrics };
    tokio::spawn(async move {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = follower.follow() => {}
        }
    });
    Some(probes)
}

fn report(board: &SensorBoard, status: &[ProbeStatus]) {
    for (sensor, prefix) in
        [(Sensor::Exits, "process"), (Sensor::Oom, "oom"), (Sensor::Cgroups, "cgroup"), (Sensor::Reclaim, "reclaim")]
    {
        let programs = status.iter().filter(|probe| probe.program.starts_with(prefix));
        board.set(sensor, state(&programs.collect::<Vec<_>>()));
    }
}

/// Up with all its programs, down without any, degraded in between.
fn state(programs: &[&ProbeStatus]) -> SensorState {
    let down: Vec<String> =
        programs.iter().filter_map(|p| p.down.as_ref().map(|why| format!("{}: {why}", p.program))).collect();
    match down.len() {
        0 => SensorState::Up,
        some if some < programs.len() => SensorState::Degraded(down.join("; ")),
        _ => SensorState::Down(down.join("; ")),
    }
}

struct Follower {
    records: Records,
    index: ContainerIndex,
    hints: mpsc::Sender<Hint>,
    board: SensorBoard,
    recorder: Recorder,
    metrics: Arc<Metrics>,
}

impl Follower {
    async fn follow(mut self) {
        loop {
            let hint = match self.records.next().await {
                Ok(ProbeOutput::Record(record)) => self.hint(record),
                Ok(ProbeOutput::Lost(lost)) => {
                    self.count(&lost);
                    tracing::warn!(
                        deaths = lost.deaths,
                        cgroups = lost.cgroups,
                        watches = lost.watches,
                        "kernel records lost"
                    );
                    Some(Hint::Gap(RelistReason::Dropped))
                }
                Err(error) => {
                    let reason = format!("reading the ring buffers: {error}");
                    self.board.set(Sensor::Exits, SensorState::Down(reason.clone()));
                    self.board.set(Sensor::Oom, SensorState::Down(reason));
                    return;
                }
            };
            // Waits while the channel is full; records that the kernel drops meanwhile are counted.
            if let Some(hint) = hint
                && self.hints.send(hint).await.is_err()
            {
                return;
            }
        }
    }

    fn count(&self, lost: &Losses) {
        for (queue, count) in [("deaths", lost.deaths), ("cgroups", lost.cgroups), ("watches", lost.watches)] {
            if count > 0 {
                self.metrics.sensors.dropped(queue, count);
            }
        }
    }

    fn hint(&mut self, record: KernelRecord) -> Option<Hint> {
        let at = moment(record.at());
        match record {
            KernelRecord::CgroupCreated(event) => {
                self.index.cgroup_created(event.id, Some(event.parent), &event.path);
                None
            }
            KernelRecord::CgroupRemoved(event) => {
                self.index.cgroup_removed(event.id);
                None
            }
            KernelRecord::Exit(exit) if exit.pid_ns_init => {
                let member = self.index.by_cgroup(exit.cgroup?)?;
                let exit_code = exit.status.code();
                Some(Hint::Exit(ExitFacts { container: member.container, pid: exit.pid, exit_code, at }))
            }
            KernelRecord::Exit(_) => None,
            KernelRecord::Oom(oom) => {
                if let Some(message) = system_oom(&oom) {
                    self.recorder.node_event(EventType::Warning, "SystemOOM", &message);
                }
                let container = oom.cgroup.and_then(|id| self.index.by_cgroup(id)).map(|member| member.container);
                container.as_ref().filter(|_| oom.watched)?;
                Some(Hint::Oom(OomFacts {
                    container,
                    pid: oom.pid,
                    comm: oom.victim.map(|victim| victim.comm).unwrap_or_default(),
                    anon_kib: oom.memory.map_or(0, |memory| memory.anon_kib),
                    at,
                }))
            }
        }
    }
}

/// Message of a system OOM: no cgroup limit was exceeded. If the victim is unknown, so is the limit.
fn system_oom(oom: &Oom) -> Option<String> {
    let victim = oom.victim.as_ref().filter(|_| oom.limit.is_none())?;
    Some(format!("System OOM encountered, victim process: {}, pid: {}", victim.comm, oom.pid))
}

fn moment(at: BootTime) -> KernelMoment {
    let now = Instant::now();
    BootTime::now().map_or(KernelMoment(now), |boot_now| at.to_moment(boot_now, now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::bpf::CgroupId;
    use crate::kernel::bpf::OomVictim;

    #[test]
    fn only_a_kill_without_an_exceeded_limit_is_a_system_oom() {
        let victim =
            OomVictim { started: BootTime(0), comm: "hungry".to_owned(), oom_score_adj: 0, pid_ns_init: false };
        let oom =
            |limit, victim| Oom { pid: 7, at: BootTime(1), cgroup: None, watched: false, limit, victim, memory: None };
        let message = system_oom(&oom(None, Some(victim.clone())));
        assert_eq!(message.as_deref(), Some("System OOM encountered, victim process: hungry, pid: 7"));
        assert_eq!(system_oom(&oom(Some(CgroupId(1)), Some(victim))), None, "a limit was exceeded");
        assert_eq!(system_oom(&oom(None, None)), None, "the limit is unknown");
    }
}
