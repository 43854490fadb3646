//! A node with scripted programs of iSCSI, and its pods.

use std::path::Path;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::Pod;
use keblet_skip::mounts::tmpfs;
use serde_json::Value;
use serde_json::json;

use crate::volumes::disks::testing::DiskNode;
use crate::volumes::disks::testing::TestHost;
use crate::volumes::iscsi::host::testing::TARGET;
use crate::volumes::testing::with_source;

const INTERFACE: &str = "iface.iscsi_ifacename = default\niface.transport_name = tcp\n";
pub(super) const SHOW: &str = "iscsiadm -m iface -I default -o show";

/// What iscsiadm(8), mount(8) and others do. `portals`: on which the target listens.
fn script(test: &TestHost, portals: &[&str], call: &str) -> Option<(i32, String)> {
    let words: Vec<&str> = call.split(' ').collect();
    let portal = words.iter().position(|word| *word == "-p").map(|at| words[at + 1]);
    let number = portals.iter().position(|known| Some(*known) == portal).and_then(|at| u32::try_from(at).ok());
    match (words[0], words.last().copied()) {
        ("iscsiadm", Some("show")) => Some((0, INTERFACE.to_owned())),
        ("iscsiadm", Some("--discover")) if number.is_none() => Some((8, "no answer".to_owned())),
        ("iscsiadm", Some("--login")) => {
            let (address, port) = portal?.rsplit_once(':')?;
            test.session(number?, TARGET, (address, port), &[(7, "sda")]);
            test.write(&format!("dev/disk/by-path/ip-{address}:{port}-iscsi-{TARGET}-lun-7"), &"x".repeat(1 << 17));
            None
        }
        ("iscsiadm", Some("--logout")) => {
            let Some(number) = number else { return Some((21, String::new())) };
            test.end_session(number);
            None
        }
        ("multipath", Some(map)) => {
            let holder = test.root.path().join("sys/block/sda/holders").join(map);
            std::fs::remove_file(holder).expect("the map of the disk");
            None
        }
        ("blkid", _) => Some((2, String::new())),
        ("mount", Some(target)) => {
            tmpfs(Path::new(target));
            None
        }
        _ => None,
    }
}

/// A node with portals on which the target listens, on paused time, without a control plane that attaches volumes.
pub(super) fn iscsi_node(portals: &'static [&str]) -> DiskNode {
    iscsi_node_with(portals, false, true)
}

pub(super) fn iscsi_node_with(portals: &'static [&str], by_control_plane: bool, is_paused: bool) -> DiskNode {
    DiskNode::new("iscsi", move |test, call| script(test, portals, call), by_control_plane, is_paused)
}

impl DiskNode {
    /// Where the unit of [`pod`] is mounted for the node, by the interface and the first portal.
    pub(super) fn place_at(&self, interface: &str, portal: &str) -> PathBuf {
        self.place(&format!("iface-{interface}/{portal}-{TARGET}-lun-7"))
    }
}

/// A pod with a disk, whose source has these fields besides the usual ones.
pub(super) fn pod(uid: &str, change: Value) -> Pod {
    with_source(uid, "iscsi", json!({"targetPortal": "192.0.2.1", "iqn": TARGET, "lun": 7}), &change)
}

/// The calls of iscsiadm(8) at a portal, by their ends.
pub(super) fn calls_at(portal: &str, calls: &[String]) -> Vec<String> {
    let end = |call: &String| call.split_once(&format!("-p {portal} ")).map(|(_, end)| end.to_owned());
    calls.iter().filter_map(end).collect()
}
