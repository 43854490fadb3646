//! What was applied to containers.
//!
//! A container that is restarted for its resize may run before the file has what it was created with. If the agent is killed
//! then, the next one finds what the container had before, and restarts it once more: the start waits for that record.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ResourceRequirements;

use super::Allocations;
use super::Which;
use crate::allocation::records::PendingWrite;
use crate::allocation::records::Urgency;
use crate::model::PodUid;
use crate::model::resources::are_same;

/// The longest wait for a record, as for one of an eviction. A disk that hangs must not keep a container from its start.
pub(super) const LONGEST_WAIT: Duration = Duration::from_millis(500);

impl Allocations {
    /// A container of the pod was changed to these resources.
    pub fn container_actuated(&self, uid: &PodUid, name: &str, resources: ResourceRequirements) {
        self.record_container(uid, name, resources);
    }

    /// A container of the pod is created next, with these resources. Waits for their record, for half a second at most, if
    /// it replaces another one; no other start waits.
    pub async fn container_starts(&self, uid: &PodUid, name: &str, resources: ResourceRequirements) {
        if let Some(replacement) = self.record_container(uid, name, resources) {
            replacement.wait(LONGEST_WAIT).await;
        }
    }

    /// Returns the write of a record that replaces another one.
    fn record_container(&self, uid: &PodUid, name: &str, resources: ResourceRequirements) -> Option<PendingWrite> {
        let mut state = self.state();
        let recorded = state.actuated.entries.get(uid).and_then(|entry| entry.containers.get(name));
        let urgency = match recorded {
            Some(recorded) if are_same(recorded, &resources) => return None,
            Some(_) => Urgency::AtOnce,
            None => Urgency::Soon,
        };
        let entry = Arc::make_mut(state.actuated.entries.entry(uid.clone()).or_default());
        entry.containers.insert(name.to_owned(), resources);
        let write = state.actuated.next_write();
        self.store(state, Which::Actuated, urgency);
        write.filter(|_| urgency == Urgency::AtOnce)
    }
}
