//! Resources of device plugins. No plugin can register with this agent, so none of what an earlier kubelet offered is there:
//! as with a kubelet that starts, until the plugins register again. The kubelet's checkpoint names these resources. Extended
//! resources that others have set on the Node are not in it.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::reconcile::is_extended;
use crate::filesystem;

/// The checkpoint, below the root directory.
pub(super) const CHECKPOINT: &str = "device-plugins/kubelet_internal_checkpoint";
/// Longest checkpoint that is read: it has the device files, mounts and variables of each container with devices.
const MAX_FILE: usize = 16 << 20;

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Checkpoint {
    data: Data,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Data {
    registered_devices: Option<BTreeMap<String, IgnoredAny>>,
    pod_device_entries: Option<Vec<Allocation>>,
}

/// What a container holds of a resource.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Allocation {
    resource_name: String,
}

/// The resources whose device plugins have registered with an earlier kubelet, or of which pods got devices from it. None if
/// its checkpoint is unreadable, which is logged. Blocks.
pub fn device_resources(root_dir: &Path) -> BTreeSet<String> {
    let file = root_dir.join(CHECKPOINT);
    match read(&file) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeSet::new(),
        Err(error) => {
            let file = file.display();
            tracing::warn!(%file, %error, "cannot read which resources have device plugins; the Node may offer them");
            BTreeSet::new()
        }
    }
}

fn read(file: &Path) -> io::Result<BTreeSet<String>> {
    let content = filesystem::read_bounded(file, MAX_FILE)?;
    let Checkpoint { data } = serde_json::from_slice(&content)?;
    let registered = data.registered_devices.into_iter().flatten().map(|(name, _)| name);
    let allocated = data.pod_device_entries.into_iter().flatten().map(|entry| entry.resource_name);
    Ok(registered.chain(allocated).filter(|name| is_extended(name)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(checkpoint: Option<&str>) -> Vec<String> {
        let root = tempfile::tempdir().expect("a folder");
        if let Some(content) = checkpoint {
            let file = root.path().join(CHECKPOINT);
            std::fs::create_dir_all(file.parent().expect("a parent")).expect("a folder");
            std::fs::write(file, content).expect("a file");
        }
        device_resources(root.path()).into_iter().collect()
    }

    #[test]
    fn a_checkpoint_names_what_is_registered_and_what_pods_hold() {
        let checkpoint = r#"{"Data":{
            "PodDeviceEntries":[{"PodUID":"u","ContainerName":"c","ResourceName":"example.com/nic",
                "DeviceIDs":{"-1":["n0"]},"AllocResp":"CgA="}],
            "RegisteredDevices":{"example.com/gpu":["g0","g1"],"example.com/gone":null,"memory":[]}},"Checksum":1}"#;
        assert_eq!(named(Some(checkpoint)), ["example.com/gone", "example.com/gpu", "example.com/nic"]);
        let empty = r#"{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}"#;
        assert_eq!(named(Some(empty)), [""; 0]);
    }

    #[test]
    fn a_missing_or_damaged_checkpoint_names_nothing() {
        for content in [None, Some(""), Some("{"), Some("null"), Some(r#"{"Data":{"RegisteredDevices":7}}"#)] {
            assert_eq!(named(content), [""; 0], "{content:?}");
        }
    }
}
