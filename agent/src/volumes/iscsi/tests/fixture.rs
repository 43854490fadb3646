//! A node with scripted programs of iSCSI, and its pods.

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
use crate::volumes::iscsi::host::testing::TARGET;
use crate::volumes::testing::Replies;
use crate::volumes::testing::objects;

const INTERFACE: &str = "iface.iscsi_ifacename = default\niface.transport_name = tcp\n";
pub(super) const SHOW: &str = "iscsiadm -m iface -I default -o show";

/// A node with portals on which a target listens, or not.
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

/// What iscsiadm(8), mount(8) and others do. `portals`: on which the target listens.
fn script(test: &Weak<TestHost>, portals: &[&str], call: &str) -> Option<(i32, String)> {
    let test = test.upgrade()?;
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

impl Fixture {
    /// On paused time.
    pub(super) fn new(portals: &'static [&str]) -> Self {
        Self::with(portals, false, true)
    }

    pub(super) fn with(portals: &'static [&str], by_control_plane: bool, is_paused: bool) -> Self {
        let (test, replies) = (Arc::new(TestHost::new()), Replies::default());
        let of = Arc::downgrade(&test);
        let programs = Arc::new(ScriptedPrograms::new(move |call| script(&of, portals, call)));
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
        self.root.path().join(format!("pods/{uid}/volumes/kubernetes.io~iscsi/v"))
    }

    pub(super) fn place(&self, interface: &str, portal: &str) -> PathBuf {
        let places = self.root.path().join("plugins/kubernetes.io/iscsi");
        places.join(format!("iface-{interface}")).join(format!("{portal}-{TARGET}-lun-7"))
    }
}

/// A pod with a disk, whose source has these fields besides the usual ones.
pub(super) fn pod(uid: &str, change: Value) -> Pod {
    let mut source = json!({"targetPortal": "192.0.2.1", "iqn": TARGET, "lun": 7});
    source.as_object_mut().expect("an object").extend(change.as_object().expect("an object").clone());
    serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {
            "securityContext": {"fsGroup": 77},
            "volumes": [{"name": "v", "iscsi": source}],
            "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        },
    }))
    .expect("a pod")
}

/// The calls of iscsiadm(8) at a portal, by their ends.
pub(super) fn calls_at(portal: &str, calls: &[String]) -> Vec<String> {
    let end = |call: &String| call.split_once(&format!("-p {portal} ")).map(|(_, end)| end.to_owned());
    calls.iter().filter_map(end).collect()
}
