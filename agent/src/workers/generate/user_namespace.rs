//! The user namespace of a pod (KEP-127), in calls to the runtime. Pure.

use keblet_proto::cri::v1 as cri;

use crate::user_namespaces::Mapping;

/// The host's, of every pod that does not have `hostUsers: false`.
pub fn host() -> cri::UserNamespace {
    cri::UserNamespace { mode: cri::NamespaceMode::Node as i32, ..cri::UserNamespace::default() }
}

/// The pod's own, with these ids on the node.
pub fn own(Mapping { first, length }: Mapping) -> cri::UserNamespace {
    let ids = cri::IdMapping { host_id: first, container_id: 0, length };
    cri::UserNamespace { mode: cri::NamespaceMode::Pod as i32, uids: vec![ids], gids: vec![ids] }
}

/// Mounts as the container sees them: with ids of its own user namespace (idmapped mounts). Owners on disk stay as they are, and
/// so are ids inside of the namespace.
pub fn map_mounts(mut mounts: Vec<cri::Mount>, users: &cri::UserNamespace) -> Vec<cri::Mount> {
    for mount in &mut mounts {
        mount.uid_mappings.clone_from(&users.uids);
        mount.gid_mappings.clone_from(&users.gids);
    }
    mounts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mount_has_the_ids_of_the_pod() {
        let users = own(Mapping { first: 131_072, length: 65_536 });
        let ids = vec![cri::IdMapping { host_id: 131_072, container_id: 0, length: 65_536 }];
        assert_eq!((users.mode(), &users.uids, &users.gids), (cri::NamespaceMode::Pod, &ids, &ids));
        let mapped = map_mounts(vec![cri::Mount::default(), cri::Mount::default()], &users);
        assert!(mapped.len() == 2 && mapped.iter().all(|mount| mount.uid_mappings == ids && mount.gid_mappings == ids));
        let plain = map_mounts(vec![cri::Mount::default()], &host());
        assert_eq!(plain, [cri::Mount::default()]);
        assert_eq!(host().mode(), cri::NamespaceMode::Node);
    }
}
