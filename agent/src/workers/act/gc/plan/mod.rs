//! Which dead containers and old sandboxes are removed. Pure.

mod node;

use std::collections::HashMap;
use std::collections::HashSet;

pub use node::CountedPod;
pub use node::excess;

use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::DeadContainerPolicy;
use crate::model::PodSnapshot;
use crate::model::SandboxId;

/// A container instance that does not run, as the runtime confirms.
#[derive(Clone, Copy)]
struct Dead<'a> {
    status: &'a ContainerStatus,
    /// Newer exited instances of its container.
    newer_exited: usize,
    /// What to do with the container depends on it: the newest instance of all, or the newest exited one while no newer one
    /// runs.
    is_needed: bool,
}

/// The dead instances of a pod, newest first. A proven exit that the runtime has not confirmed is none yet: it cannot be
/// removed, and does not count as the newest exited instance.
fn dead_instances(snapshot: &PodSnapshot) -> Vec<Dead<'_>> {
    /// What was seen of one container so far.
    #[derive(Default)]
    struct Seen {
        any: bool,
        running: bool,
        exited: usize,
    }
    let mut containers: HashMap<&str, Seen> = HashMap::new();
    let mut dead = Vec::new();
    for status in &snapshot.containers {
        let seen = containers.entry(&status.name).or_default();
        let newer_exited = seen.exited;
        match status.state {
            ContainerState::Running => seen.running = true,
            ContainerState::Exited if status.proven.is_some() => {}
            ContainerState::Exited => {
                dead.push(Dead { status, newer_exited, is_needed: newer_exited == 0 && !seen.running });
                seen.exited += 1;
            }
            ContainerState::Created | ContainerState::Unknown => {
                dead.push(Dead { status, newer_exited, is_needed: !seen.any });
            }
        }
        seen.any = true;
    }
    dead
}

/// By what a pod's worker decides which instances are surplus.
pub(super) struct Rules<'a> {
    /// Limits on dead containers.
    pub policy: DeadContainerPolicy,
    /// Instances that exceed the limits of the node.
    pub excess: &'a HashSet<ContainerId>,
    /// Nanoseconds since the Unix epoch.
    pub now: i64,
}

/// Instances to remove although the pod stays.
#[derive(Default)]
pub(super) struct Surplus<'a> {
    /// To be removed now, oldest first.
    pub now: Vec<&'a ContainerStatus>,
    /// When the first of the others is old enough, in nanoseconds since the Unix epoch.
    pub next: Option<i64>,
}

/// Instances to remove although the pod stays. At once: exited ones beyond those that stay when another exits. Once they are
/// old enough: exited ones beyond the limit or in excess, and those in state Created or Unknown unless they are the newest
/// of their container. None that [`Dead::is_needed`].
pub(super) fn surplus<'a>(snapshot: &'a PodSnapshot, rules: &Rules<'_>) -> Surplus<'a> {
    let policy = &rules.policy;
    let mut surplus = Surplus::default();
    for dead in dead_instances(snapshot).into_iter().filter(|dead| !dead.is_needed) {
        let exited = dead.status.state == ContainerState::Exited;
        if exited && dead.newer_exited >= policy.kept_after_exit() {
            surplus.now.push(dead.status);
            continue;
        }
        let beyond = policy.per_container.is_some_and(|limit| !exited || dead.newer_exited >= limit);
        if !beyond && !rules.excess.contains(&dead.status.id) {
            continue;
        }
        let old_at = policy.old_at(dead.status.created_at);
        if old_at <= rules.now {
            surplus.now.push(dead.status);
        } else {
            surplus.next = Some(surplus.next.map_or(old_at, |next| next.min(old_at)));
        }
    }
    surplus.now.reverse();
    surplus
}

/// Sandboxes to remove although the pod stays, oldest first: all but the newest that are not ready and have no container;
/// those in `gone` are removed already.
pub(super) fn old_sandboxes<'a>(snapshot: &'a PodSnapshot, gone: &HashSet<&ContainerId>) -> Vec<&'a SandboxId> {
    let holds = |id: &SandboxId| snapshot.containers.iter().any(|c| &c.sandbox_id == id && !gone.contains(&c.id));
    let old = snapshot.sandboxes.iter().skip(1).rev();
    old.filter(|sandbox| !sandbox.ready && !holds(&sandbox.id)).map(|sandbox| &sandbox.id).collect()
}

/// Instances to remove with their pod. Those that have not exited are removed with their sandbox, if the runtime lists it.
pub(super) fn dead(snapshot: &PodSnapshot) -> impl Iterator<Item = &ContainerStatus> {
    let is_stray =
        move |status: &ContainerStatus| snapshot.sandboxes.iter().all(|sandbox| sandbox.id != status.sandbox_id);
    snapshot.containers.iter().filter(move |status| match status.state {
        ContainerState::Running => false,
        ContainerState::Exited => status.proven.is_none(),
        ContainerState::Created | ContainerState::Unknown => is_stray(status),
    })
}

#[cfg(test)]
mod tests;
