//! Keeps the agent's own `oom_score_adj` at its configured value.

use std::path::Path;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::kernel::oom_score;
use crate::kernel::oom_score::Adjusted;
use crate::kernel::proc;
use crate::model::named;
use crate::model::until;

/// Time between two checks, as in the kubelet: a service manager may change it.
const PERIOD: Duration = Duration::from_secs(300);

/// Sets the value now and whenever it was changed, until `shutdown`. A value that is refused is logged once and given up:
/// the agent runs without privileges too. Not in a PID namespace of its own, where the value is that of its container.
pub(super) fn keep(value: i32, tasks: &mut JoinSet<()>, shutdown: &CancellationToken) {
    if !proc::in_host_pid_namespace() {
        return tracing::debug!("oomScoreAdj is not applied in a PID namespace of its own");
    }
    let keep = async move {
        // A file of the kernel: nothing waits for a disk.
        while apply(value) {
            tokio::time::sleep(PERIOD).await;
        }
    };
    tasks.spawn(named("oomScoreAdj", until(shutdown.clone(), keep)));
}

/// False if the value cannot be set.
fn apply(value: i32) -> bool {
    match oom_score::set(Path::new("/proc/self"), value) {
        Ok(Adjusted::Same) => true,
        Ok(Adjusted::Changed { from }) => {
            tracing::info!(from, to = value, "set the agent's own oom_score_adj");
            true
        }
        Err(error) => {
            let lack = "the kernel may kill the agent before pods; lowering it needs CAP_SYS_RESOURCE";
            tracing::warn!(%error, oom_score_adj = value, lack, "cannot set oomScoreAdj");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_is_kept_by_a_task_of_the_caller() {
        let own = std::fs::read_to_string("/proc/self/oom_score_adj").expect("readable");
        let (mut tasks, value) = (JoinSet::new(), own.trim().parse().expect("a number"));
        keep(value, &mut tasks, &CancellationToken::new());
        assert_eq!(tasks.len(), usize::from(proc::in_host_pid_namespace()));
    }
}
