//! The simulated kernel as the agent's process watch and as source of exit and OOM hints.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use keblet::events::ExitFacts;
use keblet::events::Hint;
use keblet::events::OomFacts;
use keblet::events::RelistReason;
use keblet::events::process::Gone;
use keblet::events::process::Pinned;
use keblet::events::process::ProcessWatch;
use keblet::model::ContainerId;
use keblet::model::KernelMoment;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;

use crate::cri::KernelFact;
use crate::cri::SimRuntime;

/// Opens pidfds of the simulated kernel, with the checks of the real process watch.
#[derive(Debug)]
pub struct SimWatch {
    sim: SimRuntime,
    pinned_pids: Mutex<HashSet<u32>>,
}

impl SimWatch {
    /// A process watch on this node.
    pub fn new(sim: &SimRuntime) -> Self {
        Self { sim: sim.clone(), pinned_pids: Mutex::default() }
    }

    /// PIDs that the agent has tried to pin.
    pub fn pinned_pids(&self) -> HashSet<u32> {
        self.pinned_pids.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ProcessWatch for SimWatch {
    fn pin(&self, pid: u32, id: &ContainerId) -> Pinned {
        self.pinned_pids.lock().unwrap_or_else(PoisonError::into_inner).insert(pid);
        let Some(process) = self.sim.kernel().open(pid) else { return Pinned::Gone };
        if process.container_id != id.as_str() {
            return Pinned::Ineligible(format!("process {pid} is in the cgroup of {}", process.container_id));
        }
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
            Ok(KernelFact::Exit(exit)) if exit.ns_init => Hint::Exit(ExitFacts {
                container: ContainerId::from(exit.container_id),
                pid: exit.pid,
                exit_code: exit.exit.code(),
                at: KernelMoment(exit.at),
            }),
            Ok(KernelFact::Exit(_)) => continue,
            Ok(KernelFact::Oom(oom)) => Hint::Oom(OomFacts {
                container: Some(ContainerId::from(oom.container_id)),
                pid: oom.pid,
                comm: "simulated".to_owned(),
                anon_kib: 0,
                at: KernelMoment(oom.at),
            }),
            Err(RecvError::Lagged(_)) => Hint::Gap(RelistReason::Dropped),
            Err(RecvError::Closed) => return,
        };
        if hints.send(hint).await.is_err() {
            return;
        }
    }
}

/// Shares a watch with the agent.
pub(super) fn shared(sim: &SimRuntime) -> Arc<dyn ProcessWatch> {
    Arc::new(SimWatch::new(sim))
}
