//! Volumes that the control plane attaches to this node: the agent reports those that it uses (`status.volumesInUse` of the
//! Node) before it uses them, and uses one once it is in `status.volumesAttached`. Until a volume has left the first list it
//! is attached to no other node that must not have it too.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;

use super::VolumeError;
use super::plugin::SET_UP_TIMEOUT;
use crate::objects::Objects;

/// What metrics call the wait.
pub(super) const OPERATION: &str = "verify_controller_attached_volume";

/// Names of volumes in use; `None` until the volumes that another agent has left are known.
pub type VolumesInUse = Option<BTreeSet<String>>;

/// Volumes in use, and whether the control plane attaches volumes. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Attachment {
    in_use: watch::Sender<VolumesInUse>,
    /// Names of volumes in use, by plugin.
    of_plugins: Arc<Mutex<BTreeMap<&'static str, BTreeSet<String>>>>,
    /// `enableControllerAttachDetach`. Otherwise a volume may be used at once: no plugin here needs more than that.
    by_control_plane: bool,
}

impl Default for Attachment {
    fn default() -> Self {
        Self::new(watch::Sender::new(None), false)
    }
}

impl Attachment {
    pub(super) fn new(in_use: watch::Sender<VolumesInUse>, by_control_plane: bool) -> Self {
        Self { in_use, of_plugins: Arc::default(), by_control_plane }
    }

    fn of_plugins(&self) -> MutexGuard<'_, BTreeMap<&'static str, BTreeSet<String>>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.of_plugins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the volumes of a plugin that are in use, without publishing them: those of another one are not known yet.
    pub(super) fn record(&self, plugin: &'static str, names: BTreeSet<String>) {
        self.of_plugins().insert(plugin, names);
    }

    /// Replaces the volumes of a plugin that are in use by those that are listed now, and publishes those of all. Blocking.
    ///
    /// # Errors
    /// That of the list: what is published stays.
    pub(super) fn report(
        &self,
        plugin: &'static str,
        list: impl FnOnce() -> Result<BTreeSet<String>, VolumeError>,
    ) -> Result<(), VolumeError> {
        // With the lock: what is published last is the latest. A list from before it would lack what another pod has come to
        // use since, or have what was released.
        let mut all = self.of_plugins();
        all.insert(plugin, list()?);
        let names: BTreeSet<String> = all.values().flatten().cloned().collect();
        self.in_use.send_if_modified(|known| {
            let is_new = known.as_ref() != Some(&names);
            *known = Some(names);
            is_new
        });
        Ok(())
    }

    /// True if the control plane attaches volumes, and not the agent.
    pub(super) fn is_by_control_plane(&self, objects: &Objects) -> bool {
        self.by_control_plane && objects.node_changes().is_some()
    }

    /// Waits until the control plane has attached a volume that is reported to be in use. Returns at once, and false, where
    /// it attaches none.
    ///
    /// # Errors
    /// It has not within two minutes.
    pub(super) async fn wait(&self, objects: &Objects, name: &str) -> Result<bool, VolumeError> {
        let Some(mut node) = objects.node_changes().filter(|_| self.by_control_plane) else { return Ok(false) };
        let is_attached = node.wait_for(|node| lack(node.as_deref(), name).is_none());
        match tokio::time::timeout(SET_UP_TIMEOUT, is_attached).await {
            Ok(Ok(_)) => return Ok(true),
            Ok(Err(_)) => return Err(VolumeError::Interrupted("the Node object is no longer watched".to_owned())),
            Err(_) => {}
        }
        match lack(node.borrow().as_deref(), name) {
            Some(lack) => Err(VolumeError::NotAttached { name: name.to_owned(), waited: SET_UP_TIMEOUT, lack }),
            None => Ok(true),
        }
    }
}

/// What is missing until the volume may be used. Only the Node of the API server counts: what is not reported yet does not
/// keep the volume from being detached.
fn lack(node: Option<&Node>, name: &str) -> Option<&'static str> {
    let Some(status) = node.and_then(|node| node.status.as_ref()) else { return Some("the Node object is not known") };
    if !status.volumes_in_use.iter().flatten().any(|used| used == name) {
        return Some("it is not in status.volumesInUse of the Node yet");
    }
    let is_attached = status.volumes_attached.iter().flatten().any(|attached| attached.name == name);
    (!is_attached).then_some("it is not in status.volumesAttached of the Node")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_volume_may_be_used_when_it_is_reported_and_attached() {
        let node =
            |status| -> Node { serde_json::from_value(json!({"metadata": {}, "status": status})).expect("a node") };
        let attached = json!([{"name": "p/v", "devicePath": ""}]);
        for (status, expected) in [
            (json!({"volumesInUse": ["p/v"], "volumesAttached": attached}), None),
            (json!({"volumesInUse": ["p/w", "p/v"], "volumesAttached": attached}), None),
            (json!({"volumesAttached": attached}), Some("it is not in status.volumesInUse of the Node yet")),
            (json!({"volumesInUse": ["p/v"]}), Some("it is not in status.volumesAttached of the Node")),
            (
                json!({"volumesInUse": ["p/v"], "volumesAttached": [{"name": "p/w", "devicePath": ""}]}),
                Some("it is not in status.volumesAttached of the Node"),
            ),
        ] {
            assert_eq!(lack(Some(&node(status)), "p/v"), expected);
        }
        assert_eq!(lack(None, "p/v"), Some("the Node object is not known"));
    }

    #[test]
    fn only_a_change_is_reported() {
        let sender = watch::Sender::new(None);
        let mut reported = sender.subscribe();
        let attachment = Attachment::new(sender, true);
        attachment.report("p", || Ok(BTreeSet::new())).expect("listed");
        assert!(reported.has_changed().expect("open"), "it is known that there are none");
        reported.mark_unchanged();
        attachment.report("p", || Ok(BTreeSet::new())).expect("listed");
        assert!(!reported.has_changed().expect("open"));
        attachment.report("p", || Ok(["p/v".to_owned()].into())).expect("listed");
        assert!(reported.has_changed().expect("open"));
        reported.mark_unchanged();
        attachment.report("p", || Err(VolumeError::GivenUp)).expect_err("not listed");
        assert!(!reported.has_changed().expect("open"));
    }

    /// Of two reports at the same time, the one that is published last must not have the older list.
    #[test]
    fn volumes_are_listed_and_published_in_one_step() {
        let attachment = Attachment::new(watch::Sender::new(None), true);
        let is_alone = || attachment.of_plugins.try_lock().is_err();
        let list = || {
            assert!(is_alone(), "another report could be published in between");
            Ok(BTreeSet::new())
        };
        attachment.report("p", list).expect("listed");
        assert!(!is_alone());
    }

    #[test]
    fn volumes_of_all_plugins_are_reported_together() {
        let sender = watch::Sender::new(None);
        let reported = sender.subscribe();
        let attachment = Attachment::new(sender, true);
        attachment.record("q", ["q/v".to_owned()].into());
        assert!(reported.borrow().is_none(), "those of the other plugin are not known");
        attachment.report("p", || Ok(["p/v".to_owned()].into())).expect("listed");
        assert_eq!(*reported.borrow(), Some(["p/v".to_owned(), "q/v".to_owned()].into()));
        attachment.report("q", || Ok(BTreeSet::new())).expect("listed");
        assert_eq!(*reported.borrow(), Some(["p/v".to_owned()].into()));
    }

    #[tokio::test]
    async fn nothing_is_waited_for_without_a_control_plane() {
        let attachment = Attachment::new(watch::Sender::new(None), true);
        assert!(!attachment.wait(&Objects::standalone(), "p/v").await.expect("standalone"));
    }
}
