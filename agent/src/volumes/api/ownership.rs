//! Owners and modes of a volume's files. Pure.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::SecurityContext;

use crate::model::spec;

/// User and group of a volume's files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Owners {
    /// The user that all containers of the pod run as, if the spec names one for all.
    pub(crate) user: Option<u32>,
    /// `fsGroup`.
    pub(crate) group: Option<u32>,
}

impl Owners {
    pub(crate) fn of(pod: &Pod) -> Self {
        let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
        let id = |id: Option<i64>| id.and_then(|id| u32::try_from(id).ok());
        let of_pod = id(context.and_then(|context| context.run_as_user));
        let of_container = |own: Option<&SecurityContext>| id(own.and_then(|own| own.run_as_user)).or(of_pod);
        let lasting = spec::lasting_containers(pod).map(|container| container.spec.security_context.as_ref());
        let ephemeral = spec::ephemeral_containers(pod).iter().map(|container| container.security_context.as_ref());
        let mut users = lasting.chain(ephemeral).map(of_container);
        let first = users.next().flatten();
        Self {
            user: first.filter(|_| users.all(|user| user == first)),
            group: id(context.and_then(|context| context.fs_group)),
        }
    }

    /// Mode of credentials: readable by their owner only, if that is known; the group's bits are added with the group.
    pub(crate) fn credential_mode(self, default: u32) -> u32 {
        if self.user.is_some() || self.group.is_some() { 0o600 } else { default }
    }

    /// Mode of a file, readable by the group.
    pub(crate) fn file_mode(self, mode: u32) -> u32 {
        mode | if self.group.is_some() { 0o440 } else { 0 }
    }

    /// Mode of a directory: the group may enter, and new files inherit it (setgid).
    pub(crate) fn dir_mode(self, mode: u32) -> u32 {
        mode | if self.group.is_some() { 0o2550 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn user(of_pod: serde_json::Value, of_containers: &[serde_json::Value], ephemeral: &[i64]) -> Option<u32> {
        let containers: Vec<_> =
            of_containers.iter().map(|user| json!({"name": "c", "securityContext": {"runAsUser": user}})).collect();
        let ephemeral: Vec<_> =
            ephemeral.iter().map(|user| json!({"name": "e", "securityContext": {"runAsUser": user}})).collect();
        let pod = json!({"spec": {"securityContext": {"runAsUser": of_pod}, "initContainers": containers,
            "containers": [{"name": "main"}], "ephemeralContainers": ephemeral}});
        Owners::of(&serde_json::from_value(pod).expect("a pod")).user
    }

    #[test]
    fn the_one_user_of_all_containers() {
        let null = json!(null);
        assert_eq!(user(null.clone(), &[], &[]), None);
        assert_eq!(user(json!(7), &[], &[]), Some(7));
        assert_eq!(user(json!(7), &[json!(7), null.clone()], &[7]), Some(7));
        assert_eq!(user(json!(7), &[json!(8)], &[]), None);
        assert_eq!(user(null, &[json!(7)], &[]), None, "main does not say");
        assert_eq!(user(json!(7), &[], &[8]), None);
        assert_eq!(user(json!(-1), &[], &[]), None);
    }

    #[test]
    fn modes() {
        let none = Owners::default();
        assert_eq!((none.credential_mode(0o644), none.file_mode(0o400), none.dir_mode(0o755)), (0o644, 0o400, 0o755));
        let group = Owners { user: None, group: Some(5) };
        assert_eq!(
            (group.credential_mode(0o644), group.file_mode(0o600), group.dir_mode(0o755)),
            (0o600, 0o640, 0o2755)
        );
        let user = Owners { user: Some(7), group: None };
        assert_eq!(
            (user.credential_mode(0o644), user.file_mode(0o600), user.dir_mode(0o755)),
            (0o600, 0o600, 0o755),
            "the user owns credentials, and only it reads them"
        );
    }
}
