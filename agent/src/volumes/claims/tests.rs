//! Volumes of claims in a mount namespace of their own, with a scripted API server.

mod exclusive_use;
mod expansion;
mod shared;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use keblet_skip::mounts::in_private_mounts;
use serde_json::Value;
use serde_json::json;

use super::*;
use crate::metrics::Metrics;
use crate::recorder::testing::RecordedEvents;
use crate::recorder::testing::listening;
use crate::volumes::PodVolumes;
use crate::volumes::Volumes;
use crate::volumes::testing::LoopDevice;
use crate::volumes::testing::Replies;
use crate::volumes::testing::objects;
use crate::volumes::tests::operation;
use crate::volumes::tests::samples;

/// A node with the label `zone=a`, and an API server that answers GETs of what is in `replies`, by path.
struct Fixture {
    root: tempfile::TempDir,
    replies: Replies,
    volumes: Volumes,
    events: RecordedEvents,
    runtime: tokio::runtime::Runtime,
}

impl Fixture {
    fn new() -> Self {
        let root = tempfile::tempdir().expect("a folder");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let replies = Replies::default();
        let (recorder, events) = listening();
        let objects = runtime.block_on(async { objects(&replies).0 });
        let volumes = Volumes::new(root.path()).with_recorder(recorder).with_objects(objects, BTreeMap::new());
        Self { root, replies, volumes, events, runtime }
    }

    /// A claim `data` that is bound to a persistent volume `pv` with this spec.
    fn binds(&self, spec: Value) {
        let mut spec = spec;
        spec["claimRef"] = json!({"uid": "c-1"});
        self.reply("persistentvolumes/pv", json!({"metadata": {"name": "pv"}, "spec": spec}));
        let claim = json!({"metadata": {"name": "data", "namespace": "ns", "uid": "c-1"}, "spec": {"volumeName": "pv"},
            "status": {"phase": "Bound"}});
        self.reply("namespaces/ns/persistentvolumeclaims/data", claim);
    }

    fn reply(&self, path: &str, object: Value) {
        self.replies.lock().expect("unpoisoned").insert(format!("/api/v1/{path}"), object);
    }

    fn set_up(&self, pod: &Pod) -> Result<(), String> {
        let uid = pod.metadata.uid.as_deref().expect("a UID");
        self.volumes.make_pod_dirs_here(uid);
        let done = self.runtime.block_on(self.volumes.set_up(pod, None));
        done.map_err(|mut failed| failed.remove(0).to_string())
    }

    fn mount_path(&self, uid: &str, plugin: &str) -> PathBuf {
        self.root.path().join(format!("pods/{uid}/volumes/kubernetes.io~{plugin}/pv"))
    }

    /// A directory of the node with one file.
    fn local_dir(&self) -> PathBuf {
        let dir = self.root.path().join("disk");
        fs::create_dir(&dir).expect("a folder");
        fs::write(dir.join("file"), "kept").expect("a file");
        dir
    }
}

fn pod(uid: &str, group: Option<u32>, read_only: bool) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": uid, "namespace": "ns", "uid": uid},
        "spec": {
            "securityContext": {"fsGroup": group, "fsGroupChangePolicy": "OnRootMismatch"},
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data", "readOnly": read_only}}],
            "containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        },
    }))
    .expect("a pod")
}

/// The pod with the volume as a device instead of files.
fn using_device(mut pod: Pod) -> Pod {
    let container = &mut pod.spec.as_mut().expect("a spec").containers[0];
    container.volume_mounts = None;
    container.volume_devices = serde_json::from_value(json!([{"name": "v", "devicePath": "/dev/x"}])).expect("devices");
    pod
}

#[test]
fn a_local_volume_is_shared_by_pods_and_given_to_the_group_of_the_first() {
    in_private_mounts(|| {
        let mut fixture = Fixture::new();
        let dir = fixture.local_dir();
        let zone = json!({"key": "zone", "operator": "In", "values": ["a"]});
        fixture.binds(json!({"local": {"path": dir},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}}}));
        fixture.set_up(&pod("u-1", Some(77), false)).expect("mounted");
        assert!(fixture.volumes.is_relabelled(&PodVolumes::of(&pod("u-1", None, false)), "v"));
        let one = fixture.mount_path("u-1", "local-volume");
        let group = |path: &Path| fs::metadata(path).expect("it exists").gid();
        assert_eq!((group(&one), group(&one.join("file"))), (77, 77));
        fs::write(one.join("new"), "").expect("it is writable");
        assert_eq!(fixture.events.take(), [""; 0]);

        fixture.set_up(&pod("u-2", Some(88), false)).expect("mounted");
        let two = fixture.mount_path("u-2", "local-volume");
        assert!(two.join("new").exists());
        assert_eq!((group(&two), group(&two.join("file"))), (77, 77), "another pod has it");
        let message = "The requested fsGroup is 88, but the volume pv has GID 77. The volume may not be shareable.";
        assert_eq!(fixture.events.take(), [format!("u-2 W AlreadyMountedVolume: {message}")]);

        // The API server is not needed again: not while the agent runs, and no mount is made twice.
        fixture.replies.lock().expect("unpoisoned").clear();
        fixture.set_up(&pod("u-2", Some(88), false)).expect("known");
        assert_eq!(fixture.events.take(), [""; 0]);
        let is_measured = |fixture: &Fixture, uid| !fixture.volumes.measurable(&pod(uid, None, false)).is_empty();
        assert!(is_measured(&fixture, "u-1"));
        let local = |count| [("kubernetes.io/local-volume", count)].into();
        assert_eq!(fixture.volumes.set_up_by_plugin(), local(2));
        fixture.runtime.block_on(fixture.volumes.tear_down("u-1")).expect("unmounted");
        assert_eq!(fixture.volumes.set_up_by_plugin(), local(1));
        assert!(!one.exists() && two.join("file").exists() && dir.join("new").exists());
        assert!(!is_measured(&fixture, "u-1") && is_measured(&fixture, "u-2"));

        // Of another agent's volumes the mount is undone, and nothing else.
        let next = Volumes::new(fixture.root.path());
        fixture.runtime.block_on(next.tear_down("u-2")).expect("unmounted");
        assert!(!two.exists() && dir.join("file").exists() && next.is_torn_down("u-2"));
    });
}

/// Loop devices whose file is below this directory.
fn loops_below(dir: &Path) -> usize {
    let loops = fs::read_dir("/sys/block").expect("a list").flatten();
    let backing = loops.filter_map(|entry| fs::read_to_string(entry.path().join("loop/backing_file")).ok());
    backing.filter(|file| Path::new(file.trim_end()).starts_with(dir)).count()
}

#[test]
fn a_raw_device_is_mapped_for_each_pod_and_kept_in_use() {
    if !Path::new("/dev/loop-control").exists() {
        return keblet_skip::skip("needs loop devices");
    }
    in_private_mounts(|| {
        let mut fixture = Fixture::new();
        let device = LoopDevice::on(&fixture.root.path().join("disk"), 1 << 20);
        fixture.binds(json!({"local": {"path": device.0}, "volumeMode": "Block"}));
        let using = |uid: &str, read_only: bool| using_device(pod(uid, Some(77), read_only));
        let error = fixture.set_up(&pod("u-0", None, false)).expect_err("it has no files");
        assert_eq!(error, "volume v has volumeMode Block, but is specified in volumeMounts");

        let one = using("u-1", false);
        fixture.set_up(&one).expect("mapped");
        let maps = fixture.root.path().join("plugins/kubernetes.io~local-volume/volumeDevices/pv");
        let links = fixture.root.path().join("pods/u-1/volumeDevices/kubernetes.io~local-volume");
        let mapped = |place: &str, path: &Path| {
            format!("u-1 N SuccessfulMountVolume: MapVolume.MapPodDevice succeeded for volume \"pv\" {place} {path:?}")
        };
        assert_eq!(fixture.events.take(), [mapped("globalMapPath", &maps), mapped("volumeMapPath", &links)]);
        let (link, read_only) = fixture.volumes.device(&PodVolumes::of(&one), "v").expect("a device");
        assert_eq!((fs::read_link(&link).expect("a link"), read_only), (device.0.clone(), false));
        assert_eq!(link, links.join("pv"));
        fixture.set_up(&one).expect("once more");
        assert_eq!((fixture.events.take(), loops_below(&maps)), (Vec::new(), 1));
        let [measured] = &fixture.volumes.measurable(&one)[..] else { panic!("one volume") };
        assert_eq!((&measured.path, measured.by), (&link, MeasuredBy::Device));

        let two = using("u-2", true);
        fixture.set_up(&two).expect("mapped");
        assert!(fixture.volumes.device(&PodVolumes::of(&two), "v").expect("a device").1);
        assert_eq!(loops_below(&maps), 2);
        assert!(!fixture.volumes.is_torn_down("u-1"));
        fixture.runtime.block_on(fixture.volumes.tear_down("u-1")).expect("unmapped");
        assert!(fixture.volumes.is_torn_down("u-1") && !links.exists() && !maps.join("u-1").exists());
        assert_eq!(loops_below(&maps), 1);

        // What another agent has mapped is undone.
        let next = Volumes::new(fixture.root.path());
        fixture.runtime.block_on(next.tear_down("u-2")).expect("unmapped");
        fixture.runtime.block_on(next.remove_orphan("u-2")).expect("removed");
        assert!(loops_below(fixture.root.path()) == 1 && !maps.exists());
    });
}

/// Whether this machine can make file systems on devices.
fn lacks_devices() -> bool {
    let has_program = ["/sbin/mkfs.ext4", "/usr/sbin/mkfs.ext4"].iter().any(|path| Path::new(path).exists());
    !Path::new("/dev/loop-control").exists() || !has_program
}

#[test]
fn a_local_device_is_formatted_once_and_mounted_until_its_last_pod_has_gone() {
    if lacks_devices() {
        return keblet_skip::skip("needs loop devices and mkfs.ext4");
    }
    in_private_mounts(|| {
        let mut fixture = Fixture::new();
        let device = LoopDevice::on(&fixture.root.path().join("disk"), 32 << 20);
        fixture.binds(json!({"local": {"path": device.0}, "mountOptions": ["noexec"]}));
        let global = fixture.root.path().join("plugins/kubernetes.io/local-volume/mounts/pv");
        let unused = |volumes: &Volumes| fixture.runtime.block_on(volumes.unused()).expect("a list");
        let error = fixture.set_up(&pod("u-0", None, true)).expect_err("nothing to read");
        assert!(error.starts_with("MountVolume.MountDevice failed for volume \"pv\" : disk /dev/loop"), "{error}");
        assert!(error.ends_with("is not formatted since the volume is read-only") && !global.exists(), "{error}");
        fixture.runtime.block_on(fixture.volumes.tear_down("u-0")).expect("nothing was set up");

        fixture.set_up(&pod("u-1", Some(77), false)).expect("formatted and mounted");
        let one = fixture.mount_path("u-1", "local-volume");
        let flags = nix::sys::statvfs::statvfs(&one).expect("a file system").flags();
        assert!(flags.contains(nix::sys::statvfs::FsFlags::ST_NOEXEC), "{flags:?}");
        let kind = nix::sys::statfs::statfs(&one).expect("a file system").filesystem_type();
        assert_eq!(kind, nix::sys::statfs::EXT4_SUPER_MAGIC);
        assert!(one.join("lost+found").exists() && fs::metadata(&one).expect("it exists").gid() == 77);
        fs::write(one.join("new"), "kept").expect("it is writable");
        fixture.set_up(&pod("u-2", Some(88), true)).expect("mounted");
        let two = fixture.mount_path("u-2", "local-volume");
        assert_eq!(fs::read_to_string(two.join("new")).expect("the same files"), "kept");
        fs::write(two.join("other"), "").expect_err("read-only");
        fixture.runtime.block_on(fixture.volumes.tear_down("u-1")).expect("unmounted");
        assert_eq!(unused(&fixture.volumes), [""; 0].map(PathBuf::from), "the second pod has it");

        // Another agent reads from the mounts what is used.
        let metrics = Metrics::new();
        let next = Volumes::new(fixture.root.path()).with_metrics(metrics.clone());
        assert_eq!(unused(&next), [""; 0].map(PathBuf::from));
        fixture.runtime.block_on(next.release_unused(&global)).expect("nothing is done");
        assert!(two.join("new").exists());
        fixture.runtime.block_on(next.tear_down("u-2")).expect("unmounted");
        assert_eq!(unused(&next), std::slice::from_ref(&global));
        fixture.runtime.block_on(next.release_unused(&global)).expect("unmounted");
        assert!(!global.exists() && unused(&next).is_empty());
        let once = ["unmount_device", "volume_unmount"].map(|name| operation(name, "local-volume", "success", 1));
        assert_eq!(samples(&metrics, "storage_operation"), once);

        fixture.volumes.forget("u-3");
        fixture.set_up(&pod("u-3", None, false)).expect("mounted, and not formatted again");
        assert_eq!(
            fs::read_to_string(fixture.mount_path("u-3", "local-volume").join("new")).expect("it was kept"),
            "kept"
        );
        fixture.runtime.block_on(fixture.volumes.tear_down("u-3")).expect("unmounted");
        fixture.runtime.block_on(fixture.volumes.tear_down("u-2")).expect("it is over");
        fixture.runtime.block_on(fixture.volumes.release_unused(&global)).expect("unmounted");

        fixture.binds(json!({"local": {"path": device.0, "fsType": "xfs"}}));
        fixture.volumes.make_pod_dirs_here("u-4");
        let done = fixture.runtime.block_on(fixture.volumes.set_up(&pod("u-4", None, false), None));
        let failed = done.expect_err("another format").remove(0);
        assert_eq!(failed.reason(), "FailedMount", "{failed}");
        let event = "pv W FailedMountOnFilesystemMismatch: MountVolume failed for volume \"pv\" mount failed: ";
        let events = fixture.events.take();
        assert_eq!(events.iter().filter(|found| found.starts_with(event)).count(), 1, "{events:?}");
        assert!(!global.exists() && events.iter().all(|event| !event.contains("u-4")));
    });
}

#[test]
fn a_device_that_cannot_be_mapped_is_named() {
    let fixture = Fixture::new();
    fixture.binds(json!({"local": {"path": fixture.local_dir()}, "volumeMode": "Block"}));
    let pod = using_device(pod("u-1", None, false));
    fixture.volumes.make_pod_dirs_here("u-1");
    let failed = fixture.runtime.block_on(fixture.volumes.set_up(&pod, None)).expect_err("a folder").remove(0);
    let expected = format!(
        "MapVolume.MapPodDevice failed for volume \"pv\" : local volume {}: is not a block device",
        fixture.root.path().join("disk").display()
    );
    assert_eq!((failed.to_string(), failed.reason()), (expected, "FailedMapVolume"));
    fixture.binds(json!({"hostPath": {"path": "/dev/null"}, "volumeMode": "Block"}));
    let next = Volumes::new(fixture.root.path());
    fixture.runtime.block_on(next.tear_down("u-1")).expect("nothing was left");
}

#[test]
fn a_claim_that_is_used_read_only_cannot_be_written() {
    in_private_mounts(|| {
        let fixture = Fixture::new();
        let dir = fixture.local_dir();
        fixture.binds(json!({"local": {"path": dir}}));
        let pod = pod("u-1", Some(77), true);
        fixture.set_up(&pod).expect("mounted");
        let error = fs::write(fixture.mount_path("u-1", "local-volume").join("new"), "").expect_err("read-only");
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        assert_eq!(fs::metadata(&dir).expect("it exists").gid(), 0, "nothing of it is changed");
        let of_pod = PodVolumes::of(&pod);
        assert!(fixture.volumes.is_read_only(&of_pod, "v") && !fixture.volumes.is_relabelled(&of_pod, "v"));
        fixture.runtime.block_on(fixture.volumes.tear_down("u-1")).expect("unmounted");
        fs::write(dir.join("new"), "").expect("the node's directory is writable");
    });
}

/// A kubelet that takes the node over finds and unmounts them by that name.
#[test]
fn sub_paths_are_mounted_under_the_name_of_the_persistent_volume() {
    in_private_mounts(|| {
        let fixture = Fixture::new();
        fixture.binds(json!({"local": {"path": fixture.local_dir()}}));
        let pod = pod("u-1", None, false);
        fixture.set_up(&pod).expect("mounted");
        let mount = &pod.spec.as_ref().expect("a spec").containers[0].volume_mounts.as_ref().expect("mounts")[0];
        let of_pod = PodVolumes::of(&pod);
        let source = fixture.volumes.mount_source(&of_pod, "c", 0, mount, Some("part"));
        let source = fixture.runtime.block_on(source).expect("mounted");
        assert_eq!(source, fixture.root.path().join("pods/u-1/volume-subpaths/pv/c/0"));
        fixture.runtime.block_on(fixture.volumes.tear_down("u-1")).expect("unmounted");
        assert!(!source.exists());
    });
}

/// As upstream: only the pod's use of a claim makes it read-only.
#[test]
fn the_source_of_a_persistent_volume_makes_no_claim_read_only() {
    let fixture = Fixture::new();
    for source in [
        json!({"nfs": {"server": "192.0.2.1", "path": "/", "readOnly": true}}),
        json!({"iscsi": {"targetPortal": "192.0.2.1", "iqn": "iqn.2001-04.com.example:storage", "lun": 0, "readOnly": true}}),
        json!({"fc": {"wwids": ["3600508b400105e210000900000490000"], "readOnly": true}}),
    ] {
        let volume = json!({"metadata": {"name": "pv"}, "spec": source});
        let volume = serde_json::from_value(volume).expect("a volume");
        let source = Source::of(&volume);
        for read_only in [false, true] {
            let used = BoundVolume { read_only, ..BoundVolume::plain("pv", source.clone()) };
            fixture.volumes.node.claims.put("u-1", "v", used).expect("of one pod");
            assert_eq!(fixture.volumes.is_read_only(&PodVolumes::of(&pod("u-1", None, read_only)), "v"), read_only);
        }
    }
}

/// As upstream: the size of volumes that others fill is reported by their file system or device, once it is there.
#[test]
fn claims_are_measured_by_their_source() {
    let fixture = Fixture::new();
    let iscsi = json!({"targetPortal": "192.0.2.1", "iqn": "iqn.2001-04.com.example:storage", "lun": 0});
    let (of_files, of_device) = (Some(MeasuredBy::FileSystem), Some(MeasuredBy::Device));
    for (uid, source, is_block, expected) in [
        ("u-1", json!({"nfs": {"server": "192.0.2.1", "path": "/"}}), false, of_files),
        ("u-2", json!({"iscsi": iscsi}), false, of_files),
        ("u-3", json!({"iscsi": iscsi}), true, of_device),
        ("u-4", json!({"local": {"path": "/"}}), false, of_files),
        ("u-5", json!({"local": {"path": "/dev/x"}}), true, of_device),
        ("u-6", json!({"hostPath": {"path": "/"}}), false, None),
        ("u-7", json!({"fc": {"wwids": ["3600"]}}), false, of_files),
        ("u-8", json!({"fc": {"wwids": ["3600"]}}), true, of_device),
    ] {
        let volume = json!({"metadata": {"name": "pv"}, "spec": source});
        let source = Source::of(&serde_json::from_value(volume).expect("a volume"));
        let used = BoundVolume { is_block, ..BoundVolume::plain("pv", source) };
        fixture.volumes.node.claims.put(uid, "v", used).expect("not exclusive");
        let measured = || fixture.volumes.measurable(&pod(uid, None, false));
        assert!(measured().is_empty(), "{uid}: it is not mounted");
        let of_pod = pod(uid, None, false);
        let volume = &of_pod.spec.as_ref().expect("a spec").volumes.as_ref().expect("one")[0];
        let (plugin, name) = fixture.volumes.plugins.of(volume).expect("claims").backing(uid, volume);
        fixture.volumes.actual.mounted(uid, &name, (plugin, false), "volume_mount", Duration::ZERO, true);
        assert_eq!(measured().first().map(|volume| volume.by), expected, "{uid}");
    }
}

#[test]
fn mount_options_of_a_local_volume_are_applied() {
    in_private_mounts(|| {
        let fixture = Fixture::new();
        let dir = fixture.local_dir();
        fixture.binds(json!({"local": {"path": dir}, "mountOptions": ["noexec"]}));
        fixture.set_up(&pod("u-1", None, false)).expect("mounted");
        let target = fixture.mount_path("u-1", "local-volume");
        let flags = nix::sys::statvfs::statvfs(&target).expect("a file system").flags();
        assert!(flags.contains(nix::sys::statvfs::FsFlags::ST_NOEXEC), "{flags:?}");
        fixture.runtime.block_on(fixture.volumes.tear_down("u-1")).expect("unmounted");
    });
}

#[test]
fn a_host_path_volume_is_its_path() {
    let fixture = Fixture::new();
    let dir = fixture.local_dir();
    fixture.binds(json!({"hostPath": {"path": dir, "type": "Directory"}}));
    let pod = pod("u-1", Some(77), false);
    fixture.set_up(&pod).expect("checked");
    let mount = &pod.spec.as_ref().expect("a spec").containers[0].volume_mounts.as_ref().expect("mounts")[0];
    let of_pod = PodVolumes::of(&pod);
    let source = fixture.runtime.block_on(fixture.volumes.mount_source(&of_pod, "c", 0, mount, None)).expect("a path");
    assert_eq!(source, dir);
    assert_eq!(fs::metadata(&dir).expect("it exists").gid(), 0, "fsGroup does not apply");
    assert!(fixture.volumes.groups(&pod).is_empty() && !fixture.volumes.is_relabelled(&of_pod, "v"));
    let annotated = json!({"metadata": {"name": "pv", "annotations": {"pv.beta.kubernetes.io/gid": "1234"}},
        "spec": {"hostPath": {"path": dir, "type": "Directory"}, "claimRef": {"uid": "c-1"}}});
    fixture.reply("persistentvolumes/pv", annotated);
    fixture.volumes.forget("u-1");
    fixture.set_up(&pod).expect("read again");
    assert_eq!(fixture.volumes.groups(&pod), [1234].into());
    let mut stated = pod.clone();
    stated.spec.as_mut().expect("a spec").security_context =
        Some(serde_json::from_value(json!({"supplementalGroups": [1234]})).expect("a context"));
    assert!(fixture.volumes.groups(&stated).is_empty(), "it is in the spec already");
    assert!(fixture.volumes.measurable(&pod).is_empty());
    fs::remove_dir_all(&dir).expect("removed");
    let expected = format!(
        "MountVolume.SetUp failed for volume \"pv\" : hostPath type check failed, {0} is not a directory, unable to \
         determine its type: path {0:?} does not exist",
        dir.to_string_lossy()
    );
    assert_eq!(fixture.set_up(&self::pod("u-2", Some(77), false)), Err(expected));
}

#[test]
fn a_failed_mount_reports_the_cause_and_leaves_no_files() {
    let fixture = Fixture::new();
    let wrong_zone = json!({"required": {"nodeSelectorTerms":
        [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}]}});
    let csi = "MountVolume.MountDevice failed for volume \"pv\" : kubernetes.io/csi: attacher.MountDevice failed to create \
               newCsiDriverClient: driver name d.example not found in the list of registered CSI drivers";
    let missing =
        "error processing PVC ns/data: failed to fetch PVC from API server: persistentvolumeclaims \"data\" not found";
    assert_eq!(fixture.set_up(&pod("u-1", None, false)), Err(missing.to_owned()));
    for (spec, expected) in [
        (
            json!({"local": {"path": "/"}, "nodeAffinity": wrong_zone}),
            "MountVolume.NodeAffinity check failed for volume \"pv\" : no matching NodeSelectorTerms",
        ),
        (json!({"csi": {"driver": "d.example", "volumeHandle": "h"}}), csi),
        (
            json!({"hostPath": {"path": "/"}, "mountOptions": ["ro"]}),
            "MountVolume.MountOptionSupport check failed for volume \"pv\" : mount options are not supported for this volume type",
        ),
        (
            json!({"local": {"path": "/no/such"}}),
            "MountVolume.NewMounter initialization failed for volume \"pv\" : path \"/no/such\" does not exist",
        ),
        (
            json!({"local": {"path": "/a/../b"}}),
            "MountVolume.SetUp failed for volume \"pv\" : local volume /a/../b: must not contain '..'",
        ),
        (
            json!({"local": {"path": "/dev/null"}}),
            "MountVolume.NewMounter initialization failed for volume \"pv\" : only directory and block device are \
             supported",
        ),
        (
            json!({"local": {"path": "/"}, "volumeMode": "Block"}),
            "volume v has volumeMode Block, but is specified in volumeMounts",
        ),
    ] {
        fixture.binds(spec);
        fixture.volumes.forget("u-1");
        assert_eq!(fixture.set_up(&pod("u-1", None, false)), Err(expected.to_owned()));
        assert!(!fixture.mount_path("u-1", "local-volume").exists());
    }
    fixture.binds(json!({"hostPath": {"path": "/"}, "accessModes": ["ReadWriteOncePod"]}));
    fixture.volumes.forget("u-1");
    fixture.set_up(&pod("u-1", None, false)).expect("the first");
    let in_use = "MountVolume.SetUp failed for volume \"pv\" : volume uses the ReadWriteOncePod access mode and is already in \
                  use by another pod";
    assert_eq!(fixture.set_up(&pod("u-2", None, false)), Err(in_use.to_owned()));
}
