//! A node with disks on a machine of files, with scripted programs, for tests of a kind of disk.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Deref;
use std::ops::DerefMut;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;
use serde_json::json;

use crate::host_program::testing::ScriptedPrograms;
use crate::objects::Objects;
use crate::volumes::PodVolumes;
use crate::volumes::Volumes;
use crate::volumes::testing::TestNode;
use crate::volumes::testing::with_volume;

pub(in crate::volumes) use super::host::testing::TestHost;

/// A node with disks of one kind.
pub(in crate::volumes) struct DiskNode {
    pub(in crate::volumes) test: Arc<TestHost>,
    pub(in crate::volumes) programs: Arc<ScriptedPrograms>,
    /// The field of the disks' source in a volume, and the name of their plugin after `kubernetes.io/`.
    kind: &'static str,
    common: TestNode,
}

impl Deref for DiskNode {
    type Target = TestNode;

    fn deref(&self) -> &TestNode {
        &self.common
    }
}

impl DerefMut for DiskNode {
    fn deref_mut(&mut self) -> &mut TestNode {
        &mut self.common
    }
}

/// Volumes on this machine, with these programs.
fn on_host(mut volumes: Volumes, test: &TestHost, programs: &Arc<ScriptedPrograms>) -> Volumes {
    volumes.node.disks.tools.programs = programs.clone();
    volumes.node.disks.tools.host = test.host();
    volumes
}

impl DiskNode {
    /// `script`: what a call of a program changes on the machine, and ends with (see [`ScriptedPrograms`]).
    pub(in crate::volumes) fn new(
        kind: &'static str,
        script: impl Fn(&TestHost, &str) -> Option<(i32, String)> + Send + Sync + 'static,
        by_control_plane: bool,
        is_paused: bool,
    ) -> Self {
        let test = Arc::new(TestHost::new());
        let of = Arc::downgrade(&test);
        let programs = Arc::new(ScriptedPrograms::new(move |call| script(&*of.upgrade()?, call)));
        let common = TestNode::new(by_control_plane, is_paused, |volumes, _| on_host(volumes, &test, &programs));
        Self { test, programs, kind, common }
    }

    /// The next agent on this node.
    pub(in crate::volumes) fn next(&self) -> Volumes {
        let next = on_host(Volumes::new(self.root.path()), &self.test, &self.programs);
        next.with_objects(Objects::standalone(), BTreeMap::new())
    }

    pub(in crate::volumes) fn tear_down(&self, volumes: &Volumes, uid: &str) {
        self.common.tear_down(volumes, uid).expect("torn down");
    }

    /// Where the volume is mounted for a pod.
    pub(in crate::volumes) fn target(&self, uid: &str) -> PathBuf {
        self.root.path().join(format!("pods/{uid}/volumes/kubernetes.io~{}/v", self.kind))
    }

    /// Where a disk is mounted for the node, by its name there.
    pub(in crate::volumes) fn place(&self, name: &str) -> PathBuf {
        self.root.path().join("plugins/kubernetes.io").join(self.kind).join(name)
    }

    /// Checks that a disk that the pod `u-1` has is mounted for a second pod without a program, and released after both.
    /// `pod` makes pods with changes to the source of the disk; `name` is the disk's in the status of the Node.
    pub(in crate::volumes) fn share_and_release(&self, pod: fn(&str, Value) -> Pod, name: &str) {
        let (first, second) = (self.target("u-1"), self.target("u-2"));
        assert_eq!(self.in_use(), [name.to_owned()].into());
        assert_eq!(fs::metadata(&first).expect("mounted").gid(), 77);
        fs::write(first.join("file"), "kept").expect("writable");

        self.set_up(&pod("u-1", json!({}))).expect("it is there");
        self.set_up(&pod("u-2", json!({"readOnly": true}))).expect("mounted");
        assert_eq!(self.programs.take(), [""; 0], "the disk is there");
        fs::write(second.join("other"), "").expect_err("read-only");
        assert_eq!(fs::read_to_string(second.join("file")).expect("the same files"), "kept");

        self.tear_down(&self.volumes, "u-1");
        assert_eq!(self.release(&self.volumes), 0, "the second pod has it");
        self.tear_down(&self.volumes, "u-2");
        assert_eq!(self.in_use(), [name.to_owned()].into(), "until it is detached");
        assert_eq!(self.release(&self.volumes), 1);
    }

    /// A pod `u-1` whose claim is bound to a persistent volume `v` of this source, which it has as a raw device.
    pub(in crate::volumes) fn raw_pod(&self, source: Value) -> Pod {
        let kind = self.kind;
        let claim = json!({"metadata": {"uid": "c-1"}, "spec": {"volumeName": "v"}, "status": {"phase": "Bound"}});
        let volume = json!({"metadata": {"name": "v"},
            "spec": {kind: source, "volumeMode": "Block", "claimRef": {"uid": "c-1"}}});
        for (path, object) in [("namespaces/ns/persistentvolumeclaims/data", claim), ("persistentvolumes/v", volume)] {
            self.replies.lock().expect("unpoisoned").insert(format!("/api/v1/{path}"), object);
        }
        let mut pod = with_volume("u-1", json!({"name": "v", "persistentVolumeClaim": {"claimName": "data"}}));
        let container = &mut pod.spec.as_mut().expect("a spec").containers[0];
        let devices = json!([{"name": "v", "devicePath": "/dev/x"}]);
        container.volume_mounts = None;
        container.volume_devices = serde_json::from_value(devices).expect("a device");
        pod
    }

    /// Maps the raw device of [`Self::raw_pod`]; returns the pod's link, which leads to this device.
    pub(in crate::volumes) fn map(&self, pod: &Pod, device: &Path) -> PathBuf {
        self.volumes.make_pod_dirs_here("u-1");
        self.set_up(pod).expect("mapped");
        let (link, read_only) = self.volumes.device(&PodVolumes::of(pod), "v").expect("a device");
        assert_eq!(link, self.root.path().join(format!("pods/u-1/volumeDevices/kubernetes.io~{}/v", self.kind)));
        assert_eq!((fs::read_link(&link).expect("a link"), read_only), (device.to_owned(), false));
        link
    }
}
