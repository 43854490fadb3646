//! The range of one pod, in the format of the kubelet's checkpoint files. Pure.

use serde::Deserialize;
use serde::Serialize;

use super::UserNamespaceError;

/// Where the ids of a pod lie on the node; its user and group ids are mapped alike, from 0 on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping {
    /// The id on the node of id 0 in the pod.
    pub first: u32,
    /// How many ids the pod has.
    pub length: u32,
}

/// One entry of a checkpoint file. Fields that are not written are zero, and unknown ones are ignored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
struct MappingEntry {
    host_id: u32,
    container_id: u32,
    length: u32,
}

/// A checkpoint file.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
struct Checkpoint {
    uid_mappings: Option<Vec<MappingEntry>>,
    gid_mappings: Option<Vec<MappingEntry>>,
}

impl Mapping {
    /// The content of a checkpoint file.
    pub(super) fn to_checkpoint(self) -> Vec<u8> {
        let entry = MappingEntry { host_id: self.first, container_id: 0, length: self.length };
        let checkpoint = Checkpoint { uid_mappings: Some(vec![entry]), gid_mappings: Some(vec![entry]) };
        // Numbers and lists can always be written.
        serde_json::to_vec(&checkpoint).unwrap_or_default()
    }

    /// Reads the content of a checkpoint file.
    ///
    /// # Errors
    /// No JSON of this form; more or less than one range; ranges that differ or do not begin with root.
    pub(super) fn from_checkpoint(content: &[u8]) -> Result<Self, UserNamespaceError> {
        let invalid = |problem| Err(UserNamespaceError::Configuration { problem });
        let checkpoint: Checkpoint =
            serde_json::from_slice(content).map_err(|error| UserNamespaceError::Json(error.to_string()))?;
        let users = checkpoint.uid_mappings.unwrap_or_default();
        let groups = checkpoint.gid_mappings.unwrap_or_default();
        let [users_range] = users[..] else { return invalid("no more than one mapping allowed.") };
        let [groups_range] = groups[..] else { return invalid("GID and UID mappings should be identical.") };
        if users_range != groups_range {
            return invalid("GID and UID mapping should be identical");
        }
        if users_range.container_id != 0 {
            return invalid("UID 0 must be mapped");
        }
        Ok(Self { first: users_range.host_id, length: users_range.length })
    }
}
