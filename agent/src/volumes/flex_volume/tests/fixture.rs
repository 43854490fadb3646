//! A node with one driver, a shell script that does what a test says, and its pods.

use std::fs;
use std::ops::Deref;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use serde_json::json;

use crate::volumes::Volumes;
use crate::volumes::testing::TestNode;
use crate::volumes::testing::with_source;

pub(super) const DRIVER: &str = "example.com/d";

/// Notes the call, and does what the file of the command's name says.
const SCRIPT: &str = r#"#!/bin/sh
dir=$(dirname "$0")
printf '%s\n' "$*" >> "$dir/calls"
if [ -f "$dir/$1" ]; then . "$dir/$1"; exit; fi
echo '{"status": "Not supported"}'
exit 1
"#;

pub(super) const SUCCESS: &str = r#"echo '{"status": "Success"}'"#;
/// A driver that only mounts.
pub(super) const MOUNTS: &str = r#"echo '{"status": "Success", "capabilities": {"attach": false}}'"#;
pub(super) const MOUNT: &str = r#"mount -t tmpfs flex "$2" && echo '{"status": "Success"}'"#;
pub(super) const UNMOUNT: &str = r#"umount "$2" && echo '{"status": "Success"}'"#;

pub(super) struct Fixture(TestNode);

impl Deref for Fixture {
    type Target = TestNode;

    fn deref(&self) -> &TestNode {
        &self.0
    }
}

impl Fixture {
    /// With a driver that does these things, by command.
    pub(super) fn new(script: &[(&str, &str)]) -> Self {
        Self::with(script, false, false)
    }

    pub(super) fn with(script: &[(&str, &str)], by_control_plane: bool, is_paused: bool) -> Self {
        let with_driver = |volumes: Volumes, root: &Path| volumes.with_flex_volumes(&root.join("flex"), "n1");
        let fixture = Self(TestNode::new(by_control_plane, is_paused, with_driver));
        fixture.install();
        script.iter().for_each(|(command, does)| fixture.does(command, does));
        fixture
    }

    /// The folder of the driver.
    pub(super) fn folder(&self) -> PathBuf {
        self.root.path().join("flex/example.com~d")
    }

    /// Puts the driver in place. By another process: a program that some process has open for writing cannot be run, and
    /// each process that a test starts has for a moment what this one has open.
    pub(super) fn install(&self) {
        let (folder, source) = (self.folder(), self.root.path().join("script"));
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(&source, SCRIPT).expect("a file");
        let done = Command::new("install").args(["-m", "755"]).arg(&source).arg(folder.join("d")).status();
        assert!(done.is_ok_and(|status| status.success()), "install(1) failed");
    }

    /// From now on the driver does this for the command.
    pub(super) fn does(&self, command: &str, does: &str) {
        fs::write(self.folder().join(command), does).expect("a file");
    }

    /// The calls since the last time.
    pub(super) fn calls(&self) -> Vec<String> {
        let path = self.folder().join("calls");
        let text = fs::read_to_string(&path).unwrap_or_default();
        // There is none without a call.
        let _ = fs::remove_file(&path);
        text.lines().map(str::to_owned).collect()
    }

    /// The commands of the calls since the last time.
    pub(super) fn commands(&self) -> Vec<String> {
        self.calls().iter().map(|call| call.split(' ').next().unwrap_or_default().to_owned()).collect()
    }

    /// The next agent on this node, without an API server.
    pub(super) fn next(&self) -> Volumes {
        Volumes::new(self.root.path()).with_flex_volumes(&self.root.path().join("flex"), "n1")
    }

    pub(super) fn set_up(&self, pod: &Pod) -> Result<(), String> {
        self.set_up_by(&self.volumes, pod)
    }

    pub(super) fn set_up_by(&self, volumes: &Volumes, pod: &Pod) -> Result<(), String> {
        volumes.make_pod_dirs_here(pod.metadata.uid.as_deref().expect("a UID"));
        self.0.set_up_by(volumes, pod)
    }

    /// Where the volume of this name is mounted for a pod.
    pub(super) fn target(&self, uid: &str, volume: &str) -> PathBuf {
        self.root.path().join(format!("pods/{uid}/volumes/example.com~d/{volume}"))
    }

    /// Where the volume is mounted for the node.
    pub(super) fn place(&self) -> PathBuf {
        self.root.path().join("plugins/kubernetes.io/flexvolume/example.com/d/mounts/v")
    }
}

/// The options of a call.
pub(super) fn options(call: &str) -> Value {
    let at = call.find('{').expect("options");
    serde_json::from_str(&call[at..]).expect("JSON")
}

/// The arguments of a call without its options.
pub(super) fn arguments(call: &str) -> &str {
    call.split('{').next().unwrap_or_default().trim_end()
}

/// A pod with a volume `v`, whose source has these fields besides the driver.
pub(super) fn pod(uid: &str, change: Value) -> Pod {
    with_source(uid, "flexVolume", json!({"driver": DRIVER}), &change)
}

/// The group of a file.
pub(super) fn group_of(path: &Path) -> u32 {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata(path).expect("it exists").gid()
}
