//! Which pod of the cache a container or sandbox belongs to. Records of the kernel name a container only, and a container
//! that starts PID namespaces of its own causes thousands a second: none may search all pods.

use std::collections::HashMap;

use crate::model::ContainerId;
use crate::model::PodSnapshot;
use crate::model::PodUid;

/// Pods by the ids of their containers and sandboxes.
#[derive(Default)]
pub(super) struct Owners(HashMap<ContainerId, PodUid>);

impl Owners {
    /// The pod with this container or sandbox.
    pub(super) fn of(&self, id: &ContainerId) -> Option<&PodUid> {
        self.0.get(id)
    }

    /// The cache has the `new` snapshot of a pod in place of the `old` one.
    pub(super) fn replaced(&mut self, old: Option<&PodSnapshot>, new: Option<&PodSnapshot>) {
        if old.zip(new).is_some_and(|(old, new)| ids(old).eq(ids(new))) {
            return;
        }
        for id in old.into_iter().flat_map(ids) {
            self.0.remove(id);
        }
        let Some(new) = new else { return };
        let containers = new.containers.iter().map(|container| container.id.clone());
        let sandboxes = new.sandboxes.iter().map(|sandbox| ContainerId::from(sandbox.id.as_str()));
        self.0.extend(containers.chain(sandboxes).map(|id| (id, new.pod.uid.clone())));
    }
}

fn ids(snapshot: &PodSnapshot) -> impl Iterator<Item = &str> {
    let containers = snapshot.containers.iter().map(|container| container.id.as_str());
    containers.chain(snapshot.sandboxes.iter().map(|sandbox| sandbox.id.as_str()))
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::model::ContainerState;
    use crate::pleg::testing;

    /// A pod with these containers.
    fn pod(uid: &str, ids: &[&str]) -> PodSnapshot {
        let containers = ids.iter().map(|id| testing::container(id, "web", ContainerState::Running));
        PodSnapshot { pod: testing::pod(uid), ..testing::snapshot(Instant::now(), containers.collect()) }
    }

    #[test]
    fn owners_follow_the_cache() {
        let mut owners = Owners::default();
        let (first, other) = (pod("p", &["a", "b"]), pod("q", &["c"]));
        owners.replaced(None, Some(&first));
        owners.replaced(None, Some(&other));
        let of = |owners: &Owners, id: &str| owners.of(&ContainerId::from(id)).map_or("", PodUid::as_str).to_owned();
        assert_eq!(["a", "b", "c", "d", "s"].map(|id| of(&owners, id)), ["p", "p", "q", "", ""]);
        let second = pod("p", &["d", "b"]);
        owners.replaced(Some(&first), Some(&second));
        assert_eq!(["a", "b", "c", "d"].map(|id| of(&owners, id)), ["", "p", "q", "p"]);
        owners.replaced(Some(&second), Some(&second));
        assert_eq!(owners.0.len(), 3);
        owners.replaced(Some(&second), None);
        owners.replaced(Some(&other), None);
        assert!(owners.0.is_empty());
    }
}
