//! A node with disks that udev has named, and its pods.

use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use keblet_skip::mounts::tmpfs;
use serde_json::Value;
use serde_json::json;

use crate::volumes::disks::testing::DiskNode;
use crate::volumes::disks::testing::TestHost;
use crate::volumes::testing::with_source;

/// A target.
pub(super) const WWN: &str = "50060e801049cfd1";

/// What blkid(8), mount(8) and multipath(8) do. The file `formatted` has the type of what is on the disks; with the file
/// `busy`, no multipath device can be removed.
fn script(test: &TestHost, call: &str) -> Option<(i32, String)> {
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

/// A node with one SCSI host, on paused time, without a control plane that attaches volumes.
pub(super) fn fc_node() -> DiskNode {
    fc_node_with(false, true)
}

pub(super) fn fc_node_with(by_control_plane: bool, is_paused: bool) -> DiskNode {
    let node = DiskNode::new("fc", script, by_control_plane, is_paused);
    node.test.write("sys/class/scsi_host/host0/scan", "");
    node
}

impl DiskNode {
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
}

/// A pod with unit 0 of [`WWN`], whose source has these fields besides; a null removes one.
pub(super) fn pod(uid: &str, change: Value) -> Pod {
    with_source(uid, "fc", json!({"targetWWNs": [WWN], "lun": 0}), &change)
}
