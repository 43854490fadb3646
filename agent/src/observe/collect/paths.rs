//! Where the cgroups of pods and containers are, found by their names: the observer does not know how the kubelet is
//! configured.

use std::collections::HashMap;
use std::collections::VecDeque;

use crate::cgroups::Hierarchy;
use crate::kernel::index::place_of;
use crate::model::CgroupRole;

/// Directories that are looked at, and how deep, at most. Containers lie about five levels deep.
const MOST: usize = 16_384;
const DEEPEST: usize = 10;

/// Paths of cgroups in the hierarchy of containers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PodPaths {
    /// By UID.
    pub(super) pods: HashMap<String, String>,
    /// By the runtime's id.
    pub(super) containers: HashMap<String, String>,
}

impl PodPaths {
    /// Looks through the hierarchy below `root`. Blocks, but reads no disk.
    pub(super) fn find(hierarchy: &Hierarchy, root: &str) -> Self {
        let mut found = Self::default();
        let mut queue = VecDeque::from([(root.to_owned(), 0)]);
        let mut visited = 0;
        while let Some((path, depth)) = queue.pop_front() {
            for (_, child) in hierarchy.children(&path) {
                visited += 1;
                if visited > MOST {
                    tracing::warn!(limit = MOST, "too many cgroups; not all pods are measured");
                    return found;
                }
                let place = place_of(&child);
                if let Some(container) = place.container {
                    found.containers.insert(container.to_string(), child);
                    continue;
                }
                if let Some(uid) = place.pod.filter(|_| place.role == CgroupRole::Pod) {
                    found.pods.insert(uid.to_string(), child.clone());
                }
                if depth < DEEPEST {
                    queue.push_back((child, depth + 1));
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::HierarchyKind;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn both_drivers_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let hierarchy =
            Hierarchy { kind: HierarchyKind::Unified, number: 0, mount: folder.path().into(), root: "/".into() };
        let one = format!("test/kubepods/burstable/poda-1/{ID}");
        let other = format!("kubepods.slice/kubepods-podb_2.slice/cri-containerd-{}.scope", ID.replace('0', "f"));
        for path in [&one, &other] {
            std::fs::create_dir_all(folder.path().join(path)).unwrap();
        }
        std::fs::create_dir_all(folder.path().join("system.slice/pod.service")).unwrap();
        let found = PodPaths::find(&hierarchy, "/");
        assert_eq!(found.pods["a-1"], "/test/kubepods/burstable/poda-1");
        assert_eq!(found.pods["b-2"], "/kubepods.slice/kubepods-podb_2.slice");
        assert_eq!(found.containers[ID], format!("/{one}"));
        assert_eq!((found.pods.len(), found.containers.len()), (2, 2));
        assert_eq!(PodPaths::find(&hierarchy, "/nothing"), PodPaths::default());
    }
}
