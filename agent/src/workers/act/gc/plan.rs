//! Which exited containers and old sandboxes of a pod are removed. Pure.

use std::collections::HashMap;
use std::collections::HashSet;

use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::SandboxId;

/// Instances to remove although the pod stays, oldest first: of every container all exited ones but the newest, and those
/// in state Created or Unknown unless they are the newest of all. A proven death that the runtime has not confirmed cannot
/// be removed yet, and does not count as the newest exited one.
pub(super) fn surplus(snapshot: &PodSnapshot) -> Vec<&ContainerStatus> {
    /// What was seen of one container so far.
    #[derive(Default)]
    struct Seen {
        any: bool,
        exited: bool,
    }
    let mut containers: HashMap<&str, Seen> = HashMap::new();
    let mut out = Vec::new();
    for status in &snapshot.containers {
        let seen = containers.entry(&status.name).or_default();
        let goes = match status.state {
            ContainerState::Running => false,
            ContainerState::Exited => status.proven.is_none() && std::mem::replace(&mut seen.exited, true),
            ContainerState::Created | ContainerState::Unknown => seen.any,
        };
        seen.any = true;
        if goes {
            out.push(status);
        }
    }
    out.reverse();
    out
}

/// Sandboxes to remove although the pod stays, oldest first: all but the newest that are not ready and have no container;
/// those in `gone` are removed already.
pub(super) fn old_sandboxes<'a>(snapshot: &'a PodSnapshot, gone: &HashSet<&ContainerId>) -> Vec<&'a SandboxId> {
    let holds = |id: &SandboxId| snapshot.containers.iter().any(|c| &c.sandbox_id == id && !gone.contains(&c.id));
    let old = snapshot.sandboxes.iter().skip(1).rev();
    old.filter(|sandbox| !sandbox.ready && !holds(&sandbox.id)).map(|sandbox| &sandbox.id).collect()
}

/// Instances to remove with their pod.
pub(super) fn dead(snapshot: &PodSnapshot) -> impl Iterator<Item = &ContainerStatus> {
    snapshot.containers.iter().filter(|status| status.state == ContainerState::Exited && status.proven.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing;

    fn instance(name: &str, attempt: u32, state: ContainerState) -> ContainerStatus {
        ContainerStatus { state, ..testing::exited(name, attempt, 0) }
    }

    fn ids(found: Vec<&ContainerStatus>) -> Vec<String> {
        found.into_iter().map(|status| format!("{}/{}", status.name, status.attempt)).collect()
    }

    #[test]
    fn the_newest_exited_instance_of_each_container_stays() {
        use ContainerState::Created;
        use ContainerState::Exited;
        use ContainerState::Running;
        use ContainerState::Unknown;
        let newest_first = vec![
            instance("a", 4, Running),
            instance("b", 3, Created),
            instance("c", 3, Unknown),
            instance("a", 3, Created),
            instance("a", 2, Exited),
            instance("b", 2, Exited),
            instance("c", 2, Created),
            instance("a", 1, Exited),
            instance("b", 1, Unknown),
            instance("a", 0, Exited),
            instance("d", 0, Exited),
        ];
        assert_eq!(ids(surplus(&testing::snapshot(newest_first))), ["a/0", "b/1", "a/1", "c/2", "a/3"]);
    }

    #[test]
    fn an_unconfirmed_death_does_not_count_as_the_newest() {
        let dead = |attempt| instance("a", attempt, ContainerState::Exited);
        let at = tokio::time::Instant::now();
        let proof = crate::model::ProvenDeath { seen_at: at, kernel_age: None, exit_code: None, oom_killed: false };
        let newest = ContainerStatus { proven: Some(proof), ..dead(2) };
        assert_eq!(ids(surplus(&testing::snapshot(vec![newest.clone(), dead(1)]))), [""; 0]);
        assert_eq!(ids(surplus(&testing::snapshot(vec![newest, dead(1), dead(0)]))), ["a/0"]);
    }

    #[test]
    fn sandboxes_with_containers_stay() {
        let mut snapshot = testing::snapshot(vec![instance("a", 1, ContainerState::Exited)]);
        let sandbox = |id: &str, ready| crate::model::SandboxStatus {
            id: id.into(),
            ready,
            ..snapshot.sandboxes.first().expect("a sandbox").clone()
        };
        let sandboxes = ["newest", "ready", "full", "empty", "oldest"].map(|id| sandbox(id, id == "ready")).to_vec();
        snapshot.sandboxes = sandboxes;
        snapshot.containers[0].sandbox_id = "full".into();
        let ids = |gone: &[&ContainerId]| {
            let old = old_sandboxes(&snapshot, &gone.iter().copied().collect());
            old.into_iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(ids(&[]), ["oldest", "empty"]);
        assert_eq!(ids(&[&snapshot.containers[0].id]), ["oldest", "empty", "full"]);
    }
}
