//! Which dead containers and old sandboxes go. Pure.

use std::collections::HashMap;

use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::SandboxId;

/// Dead instances kept per pod and container name.
const KEPT: usize = 1;

/// A container that does not run.
#[derive(Clone, Debug, PartialEq)]
pub struct DeadContainer {
    /// The instance.
    pub id: ContainerId,
    /// Its pod.
    pub pod_uid: String,
    /// Its name in the spec.
    pub name: String,
    /// Anything but running.
    pub state: ContainerState,
    /// Nanoseconds since the Unix epoch.
    pub created_at: i64,
}

/// A sandbox.
#[derive(Clone, Debug, PartialEq)]
pub struct KnownSandbox {
    /// The instance.
    pub id: SandboxId,
    /// Its pod.
    pub pod_uid: String,
    /// Nanoseconds since the Unix epoch.
    pub created_at: i64,
    /// Ready, or with any container.
    pub active: bool,
}

/// Containers to remove, oldest first: all of a removable pod, else all but the newest of each name.
pub fn containers<'a>(dead: &'a [DeadContainer], removable: &impl Fn(&str) -> bool) -> Vec<&'a DeadContainer> {
    let mut by_unit: HashMap<(&str, &str), Vec<&DeadContainer>> = HashMap::new();
    for container in dead {
        by_unit.entry((&container.pod_uid, &container.name)).or_default().push(container);
    }
    let mut out = Vec::new();
    for ((uid, _), mut unit) in by_unit {
        unit.sort_by_key(|container| std::cmp::Reverse(container.created_at));
        out.extend(unit.into_iter().skip(if removable(uid) { 0 } else { KEPT }));
    }
    out.sort_by(|a, b| (a.created_at, a.id.as_str()).cmp(&(b.created_at, b.id.as_str())));
    out
}

/// Sandboxes to remove: every inactive one of a removable pod, else every inactive one but the pod's newest.
pub fn sandboxes<'a>(known: &'a [KnownSandbox], removable: &impl Fn(&str) -> bool) -> Vec<&'a KnownSandbox> {
    let mut by_pod: HashMap<&str, Vec<&KnownSandbox>> = HashMap::new();
    for sandbox in known {
        by_pod.entry(&sandbox.pod_uid).or_default().push(sandbox);
    }
    let mut out = Vec::new();
    for (uid, mut pod) in by_pod {
        pod.sort_by_key(|sandbox| std::cmp::Reverse(sandbox.created_at));
        let kept = if removable(uid) { 0 } else { KEPT };
        out.extend(pod.into_iter().skip(kept).filter(|sandbox| !sandbox.active));
    }
    out.sort_by(|a, b| (a.created_at, a.id.as_str()).cmp(&(b.created_at, b.id.as_str())));
    out
}

/// Exited instances to remove from one pod after `exited` ended (any container without it): all but the newest of that
/// name, or all exited ones of the pod.
pub fn dead_of_pod<'a>(
    snapshot: &'a PodSnapshot,
    exited: Option<&ContainerId>,
    keep_none: bool,
) -> Vec<&'a ContainerStatus> {
    let is_dead = |status: &&ContainerStatus| status.state == ContainerState::Exited && status.proven.is_none();
    if keep_none {
        return snapshot.containers.iter().filter(is_dead).collect();
    }
    let Some(name) = exited.and_then(|id| snapshot.by_id(id)).map(|status| &status.name) else { return Vec::new() };
    // Newest first; a death the runtime has not confirmed counts as the newest, but cannot be removed yet.
    let of_name = snapshot.containers.iter().filter(|status| &status.name == name);
    of_name.filter(|status| status.state == ContainerState::Exited).skip(KEPT).filter(is_dead).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dead(id: &str, uid: &str, name: &str, created_at: i64) -> DeadContainer {
        DeadContainer {
            id: id.into(),
            pod_uid: uid.into(),
            name: name.into(),
            state: ContainerState::Exited,
            created_at,
        }
    }

    fn ids<'a>(found: impl IntoIterator<Item = &'a DeadContainer>) -> Vec<&'a str> {
        found.into_iter().map(|container| container.id.as_str()).collect()
    }

    #[test]
    fn the_newest_of_each_name_is_kept() {
        let all = [
            dead("a3", "u1", "a", 3),
            dead("a1", "u1", "a", 1),
            dead("a2", "u1", "a", 2),
            dead("b1", "u1", "b", 1),
            dead("z9", "u2", "a", 9),
        ];
        assert_eq!(ids(containers(&all, &|_| false)), ["a1", "a2"]);
        assert_eq!(ids(containers(&all, &|uid| uid == "u2")), ["a1", "a2", "z9"]);
        assert_eq!(ids(containers(&all, &|_| true)), ["a1", "b1", "a2", "a3", "z9"]);
    }

    #[test]
    fn active_sandboxes_stay() {
        let sandbox = |id: &str, uid: &str, created_at, active| KnownSandbox {
            id: id.into(),
            pod_uid: uid.into(),
            created_at,
            active,
        };
        let all = [
            sandbox("old", "u1", 1, false),
            sandbox("busy", "u1", 2, true),
            sandbox("newest", "u1", 3, false),
            sandbox("gone", "u2", 1, false),
            sandbox("gone-busy", "u2", 2, true),
        ];
        let ids = |found: Vec<&KnownSandbox>| found.into_iter().map(|s| s.id.to_string()).collect::<Vec<_>>();
        assert_eq!(ids(sandboxes(&all, &|_| false)), ["gone", "old"]);
        assert_eq!(ids(sandboxes(&all[..3], &|_| false)), ["old"]);
        assert_eq!(ids(sandboxes(&all, &|_| true)), ["gone", "old", "newest"]);
    }
}
