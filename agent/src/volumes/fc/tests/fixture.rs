//! A node with disks that udev has named, and its pods.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Weak;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod;
use keblet_skip::mounts::tmpfs;
use serde_json::Value;
use serde_json::json;
use tokio::sync::watch;

use crate::host_program::testing::ScriptedPrograms;
use crate::objects::Objects;
use crate::volumes::Volumes;
use crate::volumes::VolumesInUse;
use crate::volumes::disks::testing::TestHost;
use crate::volumes::testing::Replies;
use crate::volumes::testing::objects;

/// A target.
pub(super) const WWN: &str = "50060e801049cfd1";

/// A node with one SCSI host.
pub(super) struct Fixture {
    pub(super) test: Arc<TestHost>,
    pub(super) root: tempfile::TempDir,
    pub(super) programs: Arc<ScriptedPrograms>,
    pub(super) replies: Replies,
    pub(super) node: watch::Sender<Option<Arc<Node>>>,
    pub(super) in_use: watch::Receiver<VolumesInUse>,
    pub(super) volumes: Volumes,
    pub(super) runtime: tokio::runtime::Runtime,
}

/// What blkid(8), mount(8) and multipath(8) do. The file `formatted` has the type of what is on the disks; with the file
/// `busy`, no multipath device can be removed.
fn script(test: &Weak<TestHost>, call: &str) -> Option<(i32, String)> {
    let test = test.upgrade()?;
    let words: Vec<&str> = call.split(' ').collect();
    match (words[0], words.last().copied()) {
        ("multipath", Some(_)) if test.read("busy").is_some() => Some((1, "map in use".to_owned())),
        ("multipath", Some(map)) => {
            for disk in test.host().disks_of(map) {
                let holder = test.root.path().join("sys/block").join(disk).join("holders").join(map);
                std::fs::remove_file(holder).expect("a path of the device");
            }
            None
        }
        ("blkid", _) => Some(test.read("formatted").map_or((2, String::new()), |kind| (0, format!("TYPE={kind}\n")))),
        ("mount", Some(target)) => {
            tmpfs(Path::new(target));
            std::fs::write(Path::new(target).join("mounted"), "").expect("a file");
            None
        }
        _ => None,
    }
}

/// Adds a disk with a name of udev: a link in `/dev`.
pub(super) fn add_disk(test: &TestHost, disk: &str, number: &str, link: &str) {
    test.disk(disk, number);
    test.write(&format!("dev/{disk}"), &"x".repeat(1 << 17));
    test.link(&format!("dev/{link}"), &format!("../../{disk}"));
}

/// The name of udev for a unit, without a PCI device.
pub(super) fn by_path(wwn: &str, lun: u8) -> String {
    format!("disk/by-path/fc-0x{wwn}-lun-{lun}")
}

impl Fixture {
    /// On paused time, without a control plane that attaches volumes.
    pub(super) fn new() -> Self {
        Self::with(false, true)
    }

    pub(super) fn with(by_control_plane: bool, is_paused: bool) -> Self {
        let (test, replies) = (Arc::new(TestHost::new()), Replies::default());
        test.write("sys/class/scsi_host/host0/scan", "");
        let of = Arc::downgrade(&test);
        let programs = Arc::new(ScriptedPrograms::new(move |call| script(&of, call)));
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().start_paused(is_paused).build().expect("a runtime");
        let root = tempfile::tempdir().expect("a folder");
        let sender = watch::Sender::new(None);
        let in_use = sender.subscribe();
        let (objects, node) = runtime.block_on(async { objects(&replies) });
        let mut volumes = Volumes::new(root.path());
        volumes.node.disks.tools.programs = programs.clone();
        volumes.node.disks.tools.host = test.host();
        let volumes = volumes.with_attachments(sender, by_control_plane).with_objects(objects, BTreeMap::new());
        Self { test, root, programs, replies, node, in_use, volumes, runtime }
    }

    /// The next agent on this node.
    pub(super) fn next(&self) -> Volumes {
        let mut next = Volumes::new(self.root.path());
        next.node.disks.tools.programs = self.programs.clone();
        next.node.disks.tools.host = self.test.host();
        next.with_objects(Objects::standalone(), BTreeMap::new())
    }

    pub(super) fn disk(&self, disk: &str, number: &str, link: &str) {
        add_disk(&self.test, disk, number, link);
    }

    /// Adds a multipath device of these disks.
    pub(super) fn multipath(&self, name: &str, disks: &[&str]) {
        self.test.write(&format!("dev/{name}"), &"x".repeat(1 << 17));
        self.test.write(&format!("sys/block/{name}/dev"), "240:99\n");
        self.test.write(&format!("sys/block/{name}/dm/uuid"), "mpath-3600a\n");
        for disk in disks {
            self.test.write(&format!("sys/block/{name}/slaves/{disk}"), "");
            self.test.write(&format!("sys/block/{disk}/holders/{name}"), "");
        }
    }

    /// The path of a device.
    pub(super) fn device(&self, name: &str) -> String {
        self.test.root.path().join("dev").join(name).to_string_lossy().into_owned()
    }

    /// What was written to remove a disk from the kernel.
    pub(super) fn deleted(&self, disk: &str) -> String {
        self.test.read(&format!("sys/block/{disk}/device/delete")).expect("a disk")
    }

    pub(super) fn set_up(&self, pod: &Pod) -> Result<(), String> {
        let done = self.runtime.block_on(self.volumes.set_up(pod, None));
        done.map_err(|mut failed| failed.remove(0).to_string())
    }

    pub(super) fn tear_down(&self, volumes: &Volumes, uid: &str) {
        self.runtime.block_on(volumes.tear_down(uid)).expect("torn down");
    }

    /// Releases what is unused.
    pub(super) fn release(&self, volumes: &Volumes) -> usize {
        let unused = self.runtime.block_on(volumes.unused()).expect("a list");
        for place in &unused {
            self.runtime.block_on(volumes.release_unused(place)).expect("released");
        }
        unused.len()
    }

    pub(super) fn in_use(&self) -> BTreeSet<String> {
        self.in_use.borrow().clone().expect("reported")
    }

    pub(super) fn target(&self, uid: &str) -> PathBuf {
        self.root.path().join(format!("pods/{uid}/volumes/kubernetes.io~fc/v"))
    }

    pub(super) fn place(&self, name: &str) -> PathBuf {
        self.root.path().join("plugins/kubernetes.io/fc").join(name)
    }
}

/// A pod with unit 0 of [`WWN`], whose source has these fields besides; a null removes one.
pub(super) fn pod(uid: &str, change: Value) -> Pod {
    let mut source = json!({"targetWWNs": [WWN], "lun": 0});
    source.as_object_mut().expect("an object").extend(change.as_object().expect("an object").clone());
    serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {
            "securityContext": {"fsGroup": 77},
            "volumes": [{"name": "v", "fc": source}],
            "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        },
    }))
    .expect("a pod")
}
