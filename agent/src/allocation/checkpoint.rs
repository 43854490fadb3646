//! The files `allocated_pods_state` and `actuated_pods_state` below the agent's root directory, in the kubelet's format: a
//! node can change from one agent to the other.
//!
//! `{"data":"<text>","checksum":n}`: the text is JSON of its own, the checksum FNV-1a of it with a prefix.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ResourceClaim;
use k8s_openapi::api::core::v1::ResourceRequirements;
use serde::Deserialize;
use serde::Serialize;

use crate::filesystem;
use crate::model::PodUid;
use crate::model::fnv1a_32;
use crate::model::resources::PodResources;
use crate::model::resources::Quantities;

/// More than any node writes: some 100 bytes for each container.
const LARGEST: usize = 64 << 20;

/// Resources of pods, by UID. Copies share them: one is made under a lock, and written without it.
pub(super) type Entries = BTreeMap<PodUid, Arc<PodResources>>;

/// A checkpoint that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "could not restore state from checkpoint: {reason}, please drain this node and delete pod resource information \
     checkpoint file {path:?} before restarting Kubelet"
)]
pub struct CheckpointError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

#[derive(Serialize, Deserialize)]
struct File {
    data: String,
    checksum: u64,
}

#[derive(Default, Serialize, Deserialize)]
struct Text {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    entries: BTreeMap<String, PodEntry>,
}

#[derive(Default, Serialize, Deserialize)]
struct PodEntry {
    /// `null` without containers.
    #[serde(rename = "ContainerResources", default)]
    containers: Option<BTreeMap<String, Stored>>,
    #[serde(rename = "PodLevelResources", default)]
    pod: Option<Stored>,
}

/// `ResourceRequirements` in the kubelet's order of fields.
#[derive(Default, Serialize, Deserialize)]
struct Stored {
    #[serde(default, skip_serializing_if = "is_empty")]
    limits: Option<Quantities>,
    #[serde(default, skip_serializing_if = "is_empty")]
    requests: Option<Quantities>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    claims: Option<Vec<ResourceClaim>>,
}

fn is_empty(list: &Option<Quantities>) -> bool {
    list.as_ref().is_none_or(BTreeMap::is_empty)
}

impl From<&ResourceRequirements> for Stored {
    fn from(of: &ResourceRequirements) -> Self {
        Self { limits: of.limits.clone(), requests: of.requests.clone(), claims: of.claims.clone() }
    }
}

impl From<Stored> for ResourceRequirements {
    fn from(stored: Stored) -> Self {
        Self { limits: stored.limits, requests: stored.requests, claims: stored.claims }
    }
}

/// FNV-1a of the text as Go prints a string with its type.
fn checksum(text: &str) -> u64 {
    u64::from(fnv1a_32(b"(string)".iter().copied().chain(text.bytes())))
}

/// The content of a file with these entries, with its checksum.
pub(super) fn encode(entries: &Entries) -> serde_json::Result<(String, u64)> {
    let entry = |resources: &PodResources| PodEntry {
        containers: Some(resources.containers.iter().map(|(name, of)| (name.clone(), of.into())).collect()),
        pod: resources.pod.as_ref().map(Stored::from),
    };
    let entries = entries.iter().map(|(uid, resources)| (uid.as_str().to_owned(), entry(resources))).collect();
    let data = serde_json::to_string(&Text { entries })?;
    let checksum = checksum(&data);
    Ok((serde_json::to_string(&File { data, checksum })?, checksum))
}

/// Reads the content of a file. The error says what is wrong with it.
fn decode(content: &[u8]) -> Result<(Entries, u64), String> {
    let file: File = serde_json::from_slice(content).map_err(|error| error.to_string())?;
    let expected = checksum(&file.data);
    if file.checksum != expected {
        return Err("checkpoint is corrupted".to_owned());
    }
    let text: Text = serde_json::from_str(&file.data).map_err(|error| error.to_string())?;
    let resources = |entry: PodEntry| {
        let containers = entry.containers.into_iter().flatten();
        Arc::new(PodResources {
            containers: containers.map(|(name, stored)| (name, stored.into())).collect(),
            pod: entry.pod.map(ResourceRequirements::from),
        })
    };
    let entries = text.entries.into_iter().map(|(uid, entry)| (PodUid::from(uid.as_str()), resources(entry)));
    Ok((entries.collect(), expected))
}

/// Reads a checkpoint with its checksum; a missing one is empty. Blocks.
///
/// # Errors
/// The file cannot be read, or its content or checksum is wrong.
pub(super) fn read(path: &Path) -> Result<(Entries, Option<u64>), CheckpointError> {
    let failed = |reason: String| CheckpointError { path: path.to_owned(), reason };
    let content = match filesystem::read_bounded(path, LARGEST) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Entries::new(), None)),
        read => read.map_err(|error| failed(error.to_string()))?,
    };
    let (entries, checksum) = decode(&content).map_err(failed)?;
    Ok((entries, Some(checksum)))
}

/// Replaces a checkpoint atomically, with mode 0600. Blocks.
pub(super) fn write(path: &Path, content: &str) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    filesystem::replace(path, &format!(".{name}"), content.as_bytes(), 0o600)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use serde_json::json;

    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;

    fn requirements(value: serde_json::Value) -> ResourceRequirements {
        serde_json::from_value(value).expect("resources")
    }

    #[test]
    fn checksums_are_the_kubelets() {
        let one = r#"{"entries":{"u1":{"ContainerResources":{"c1":{"requests":{"cpu":"100m","memory":"128Mi"}}},"PodLevelResources":null}}}"#;
        let old =
            r#"{"entries":{"pod1":{"ContainerResources":{"container1":{"requests":{"cpu":"1Ki","memory":"1Ki"}}}}}}"#;
        assert_eq!(["{}", one, old].map(checksum), [694_314_937, 3_533_447_804, 1_178_570_812]);
    }

    #[test]
    fn the_text_is_the_kubelets() {
        let c1 = requirements(json!({ "requests": { "memory": "128Mi", "cpu": "100m" } }));
        let resources = Arc::new(PodResources { containers: [("c1".to_owned(), c1)].into(), pod: None });
        let (content, checksum) = encode(&[("u1".into(), resources.clone())].into()).expect("JSON");
        let expected = r#"{"data":"{\"entries\":{\"u1\":{\"ContainerResources\":{\"c1\":{\"requests\":{\"cpu\":\"100m\",\"memory\":\"128Mi\"}}},\"PodLevelResources\":null}}}","checksum":3533447804}"#;
        assert_eq!((content.as_str(), checksum), (expected, 3_533_447_804));
        let (entries, _) = decode(content.as_bytes()).expect("valid");
        assert_eq!(entries, [("u1".into(), resources)].into());
        assert_eq!(encode(&Entries::new()).expect("JSON").0, r#"{"data":"{}","checksum":694314937}"#);
        let full = requirements(json!({ "claims": [{ "name": "n" }], "limits": { "cpu": "1" }, "requests": {} }));
        let resources = Arc::new(PodResources { containers: BTreeMap::new(), pod: Some(full) });
        let (content, _) = encode(&[("u".into(), resources)].into()).expect("JSON");
        let pod = r#"{\"ContainerResources\":{},\"PodLevelResources\":{\"limits\":{\"cpu\":\"1\"},\"claims\":[{\"name\":\"n\"}]}}"#;
        assert!(content.contains(pod), "{content}");
    }

    #[test]
    fn a_kubelets_file_is_read_and_an_invalid_one_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("allocated_pods_state");
        assert_eq!(read(&path).expect("nothing"), (Entries::new(), None));
        let old = r#"{"data":"{\"entries\":{\"pod1\":{\"ContainerResources\":{\"container1\":{\"requests\":{\"cpu\":\"1Ki\",\"memory\":\"1Ki\"}}}}}}","checksum":1178570812}"#;
        fs::write(&path, old).expect("written");
        let (entries, checksum) = read(&path).expect("valid");
        assert_eq!((entries.len(), checksum), (1, Some(1_178_570_812)));
        for (content, reason) in [
            ("", "EOF while parsing"),
            (r#"{"data":"{}","checksum":0}"#, "checkpoint is corrupted"),
            (r#"{"data":"{}","checksum":694314938}"#, "checkpoint is corrupted"),
        ] {
            fs::write(&path, content).expect("written");
            let error = read(&path).expect_err("invalid").to_string();
            assert!(error.starts_with(&format!("could not restore state from checkpoint: {reason}")), "{error}");
            let end = format!("checkpoint file {path:?} before restarting Kubelet");
            assert!(error.ends_with(&end), "{error}");
        }
    }

    #[test]
    fn a_part_of_a_checkpoint_is_none() {
        let c1 = requirements(json!({ "requests": { "cpu": "100m" }, "claims": [{ "name": "n" }] }));
        let resources = PodResources { containers: [("c1".to_owned(), c1.clone())].into(), pod: Some(c1) };
        let (content, _) = encode(&[("u1".into(), Arc::new(resources))].into()).expect("JSON");
        for length in 0..content.len() {
            decode(&content.as_bytes()[..length]).expect_err("truncated");
        }
        decode(content.as_bytes()).expect("all of it");
    }

    #[test]
    fn what_lies_in_place_of_a_checkpoint_is_named_and_stays() {
        for found in InPlace::ALL {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("allocated_pods_state");
            found.put(&path).expect("made");
            let of_record = path.clone();
            let opened = in_time(move || read(&of_record)).expect("no other process is waited for");
            let error = opened.expect_err("no checkpoint").to_string();
            assert!(error.contains(&format!("checkpoint file {path:?}")), "{found:?}: {error}");
            assert!(found.is_at(&path), "{found:?}");
        }
    }

    #[test]
    fn files_are_private() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("actuated_pods_state");
        fs::write(folder.path().join(".actuated_pods_state"), "left behind").expect("written");
        for content in ["one", "two"] {
            write(&path, content).expect("written");
        }
        assert_eq!(fs::read_to_string(&path).expect("text"), "two");
        assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
    }
}
