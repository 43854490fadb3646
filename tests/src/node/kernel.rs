//! The simulated kernel as the agent's process watch and as source of exit and OOM hints.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use keblet::events::ExitFacts;
use keblet::events::Hint;
use keblet::events::RelistReason;
use keblet::events::process::Gone;
use keblet::events::process::Pinned;
use keblet::events::process::ProcessWatch;
use keblet::model::CgroupPlace;
use keblet::model::CgroupRole;
use keblet::model::ContainerId;
use keblet::model::KernelMoment;
use keblet::model::OomConfidence;
use keblet::model::OomLimit;
use keblet::model::OomMemory;
use keblet::model::OomRecord;
use keblet::model::OomRoot;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use crate::cri::Exit;
use crate::cri::KernelFact;
use crate::cri::SimRuntime;

/// Opens pidfds of the simulated kernel, with the checks of the real process watch.
#[derive(Debug)]
pub struct SimWatch {
    sim: SimRuntime,
    /// A process of a container was found by its pid.
    trusted: AtomicBool,
}

impl SimWatch {
    /// A process watch on this node.
    pub fn new(sim: &SimRuntime) -> Self {
        Self { sim: sim.clone(), trusted: AtomicBool::new(false) }
    }
}

impl ProcessWatch for SimWatch {
    fn pin(&self, pid: u32, id: &ContainerId) -> Pinned {
        let Some(process) = self.sim.kernel().open(pid) else {
            let reason = format!("process {pid} is already gone");
            return if self.trusted.load(Relaxed) { Pinned::Gone } else { Pinned::NotFound(reason) };
        };
        if process.container_id != id.as_str() {
            return Pinned::NotFound(format!("process {pid} is in the cgroup of {}", process.container_id));
        }
        self.trusted.store(true, Relaxed);
        let gone = Box::pin(async move {
            process.gone().await;
            Gone { exit_code: None }
        });
        if self.sim.leads_pid_namespace(id.as_str()) { Pinned::Watching(gone) } else { Pinned::Hint(gone) }
    }
}

/// Converts records of the simulated probes to hints, as the agent does with real ones.
pub async fn follow_kernel(mut facts: broadcast::Receiver<KernelFact>, hints: mpsc::Sender<Hint>) {
    loop {
        let hint = match facts.recv().await {
            Ok(KernelFact::Exit(exit)) if exit.ns_init || exit.exit == Exit::Oom => Hint::Exit(ExitFacts {
                container: ContainerId::from(exit.container_id),
                pid: exit.pid,
                exit_code: exit.exit.code(),
                signalled: exit.exit.wait_status() & 0x7f != 0,
                oom_victim: exit.exit == Exit::Oom,
                at: KernelMoment(exit.at),
            }),
            Ok(KernelFact::Exit(_)) => continue,
            Ok(KernelFact::Oom(oom)) => Hint::Oom(Box::new(oom_record(&oom))),
            Err(RecvError::Lagged(_)) => Hint::Gap(RelistReason::Dropped),
            Err(RecvError::Closed) => return,
        };
        if hints.send(hint).await.is_err() {
            return;
        }
    }
}

/// A kill by the container's own limit.
fn oom_record(oom: &crate::cri::OomRecord) -> OomRecord {
    let place = CgroupPlace {
        path: format!("/kubepods/{}", oom.container_id),
        role: CgroupRole::Container,
        pod: None,
        container: Some(ContainerId::from(oom.container_id.as_str())),
    };
    OomRecord {
        pid: Some(oom.pid),
        comm: "simulated".to_owned(),
        place: Some(place.clone()),
        limit: OomLimit::Exceeded { place: Some(place), bytes: Some(64 << 20) },
        memory: Some(OomMemory { anon_bytes: 60 << 20, file_bytes: 0, shmem_bytes: 0 }),
        root: Some(OomRoot { pid: oom.root, is_init: oom.root != oom.pid || oom.init, in_cgroup: true }),
        ..OomRecord::new(OomConfidence::Kernel, KernelMoment(oom.at))
    }
}

/// Shares a watch with the agent.
pub(super) fn shared(sim: &SimRuntime) -> Arc<dyn ProcessWatch> {
    Arc::new(SimWatch::new(sim))
}
