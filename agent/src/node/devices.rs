//! Resources of device plugins. No plugin can register with this agent, so none of what an earlier kubelet offered is there:
//! as with a kubelet that starts, until the plugins register again. The kubelet's checkpoint names these resources. Extended
//! resources that others have set on the Node are not in it.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::filesystem;
use crate::model::resources::is_extended;

/// The checkpoint, below the root directory.
const CHECKPOINT: &str = "device-plugins/kubelet_internal_checkpoint";
/// Its directory. A kubelet makes it at its first start; the checkpoint is written only once a plugin has registered. To a
/// kubelet each file in it is a checkpoint, its own socket included.
const FOLDER: &str = "device-plugins";
/// Longest checkpoint that is read: it has the device files, mounts and variables of each container with devices.
const MAX_FILE: usize = 16 << 20;
/// Resources with device plugins. Far more than a node has: the plugins' pods can write the checkpoint, and all it names is in
/// the Node's status.
const MAX_RESOURCES: usize = 1000;

/// Makes the directory of device plugins. True if there was none: neither a kubelet nor this agent has run with this root
/// directory before. Blocks.
///
/// # Errors
/// It cannot be made.
pub fn make_folder(root_dir: &Path) -> io::Result<bool> {
    match fs::DirBuilder::new().mode(0o750).create(root_dir.join(FOLDER)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        made => made.map(|()| true),
    }
}

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
/// its checkpoint is unreadable, or names too many, which is logged. Blocks.
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
    let content = filesystem::read_opened(&filesystem::open_regular(file)?, MAX_FILE)?;
    let Checkpoint { data } = serde_json::from_slice(&content)?;
    let registered = data.registered_devices.into_iter().flatten().map(|(name, _)| name);
    let allocated = data.pod_device_entries.into_iter().flatten().map(|entry| entry.resource_name);
    let names: BTreeSet<String> = registered.chain(allocated).filter(|name| is_resource(name)).collect();
    match names.len() {
        0..=MAX_RESOURCES => Ok(names),
        many => Err(io::Error::other(format!("{many} resources"))),
    }
}

/// An extended resource that the API server accepts in the Node's status: a domain, and a name in it.
fn is_resource(text: &str) -> bool {
    let Some((domain, name)) = text.split_once('/') else { return false };
    let is_lower = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_domain = domain.len() <= 253 && domain.split('.').all(|label| is_word(label, is_lower, b"-"));
    is_domain && is_extended(text) && name.len() <= 63 && is_word(name, u8::is_ascii_alphanumeric, b"-_.")
}

/// Letters at both ends, and nothing but letters and `others` between.
fn is_word(text: &str, is_letter: fn(&u8) -> bool, others: &[u8]) -> bool {
    let bytes = text.as_bytes();
    let has_ends = bytes.first().is_some_and(is_letter) && bytes.last().is_some_and(is_letter);
    has_ends && bytes.iter().all(|byte| is_letter(byte) || others.contains(byte))
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
    fn a_root_directory_is_new_at_the_first_start_only() {
        let root = tempfile::tempdir().expect("a folder");
        assert!(make_folder(root.path()).expect("made"));
        assert!(!make_folder(root.path()).expect("there"), "without a checkpoint, too");
        assert!(make_folder(&root.path().join("none")).is_err());
    }

    fn checkpoint_of(names: impl Iterator<Item = String>) -> String {
        let registered: BTreeMap<String, [&str; 0]> = names.map(|name| (name, [])).collect();
        serde_json::json!({"Data": {"RegisteredDevices": registered}}).to_string()
    }

    #[test]
    fn a_pipe_in_place_of_the_checkpoint_is_not_waited_for() {
        let root = tempfile::tempdir().expect("a folder");
        let file = root.path().join(CHECKPOINT);
        std::fs::create_dir_all(file.parent().expect("a parent")).expect("a folder");
        nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        assert_eq!(device_resources(root.path()), BTreeSet::new());
    }

    #[test]
    fn a_checkpoint_with_too_many_names_is_ignored() {
        let many = |count: usize| checkpoint_of((0..count).map(|number| format!("example.com/gpu-{number}")));
        assert_eq!(named(Some(&many(1000))).len(), 1000);
        assert_eq!(named(Some(&many(1001))), [""; 0]);
    }

    #[test]
    fn what_is_no_name_of_a_resource_is_left_out() {
        let long = format!("example.com/{}", "x".repeat(64));
        let names =
            ["example.com/", "/gpu", "example.com/g pu", "Example.com/gpu", "example.com/a/b", &long, "a.io/x.Y_z"];
        assert_eq!(named(Some(&checkpoint_of(names.map(str::to_owned).into_iter()))), ["a.io/x.Y_z"]);
    }

    #[test]
    fn a_missing_or_damaged_checkpoint_names_nothing() {
        for content in [None, Some(""), Some("{"), Some("null"), Some(r#"{"Data":{"RegisteredDevices":7}}"#)] {
            assert_eq!(named(content), [""; 0], "{content:?}");
        }
    }
}
