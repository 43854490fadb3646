//! Disks on a machine of files, with scripted programs, in a mount namespace of their own.

mod fixture;
mod raw;
mod removal;

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use keblet_skip::mounts::in_private_mounts;
use serde_json::json;

use super::*;
use crate::volumes::testing::node;
use crate::volumes::tests::operation;
use crate::volumes::tests::samples;
use fixture::WWN;
use fixture::by_path;
use fixture::fc_node;
use fixture::fc_node_with;
use fixture::pod;

#[test]
fn a_disk_is_mounted_once_and_removed_after_its_last_pod() {
    in_private_mounts(|| {
        let mut fixture = fc_node();
        let metrics = fixture.count_operations();
        fixture.volumes.reconstruct().expect("nothing is there");
        assert!(fixture.in_use().is_empty());
        fixture.disk("sda", "240:0", &by_path(WWN, 0));
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        let (device, place) = (fixture.device("sda"), fixture.place("50060e801049cfd1-lun-0"));
        let calls = [
            format!("blkid -p -s TYPE -s PTTYPE -o export {device}"),
            format!("mkfs.ext4 -F -m0 {device}"),
            format!("mount -t ext4 -o defaults -- {device} {}", place.display()),
        ];
        assert_eq!(fixture.programs.take(), calls);
        fixture.share_and_release(pod, "kubernetes.io/fc/[50060e801049cfd1]:0");
        assert_eq!(fixture.programs.take(), [format!("blockdev --flushbufs {device}")]);
        assert_eq!(fixture.deleted("sda"), "1");
        assert!(!place.exists() && fixture.in_use().is_empty());
        let counted =
            [("unmount_device", 1), ("volume_apply_access_control", 1), ("volume_mount", 2), ("volume_unmount", 2)];
        let counted = counted.map(|(name, count)| operation(name, "fc", "success", count));
        assert_eq!(samples(&metrics, "storage_operation"), counted);
    });
}

#[test]
fn another_agent_removes_what_the_first_has_mounted() {
    in_private_mounts(|| {
        let fixture = fc_node();
        // An identifier with a dash, whose place can be read as two.
        fixture.disk("sda", "240:0", "disk/by-id/scsi-SVENDOR_disk-1");
        fixture.disk("sdb", "240:16", "disk/by-id/scsi-SVENDOR_disk");
        let identified = json!({"targetWWNs": null, "lun": null, "wwids": ["SVENDOR disk-1"]});
        fixture.set_up(&pod("u-1", identified)).expect("mounted");
        let place = fixture.place("SVENDOR_disk-1");
        assert!(place.join("mounted").exists());
        let next = fixture.next();
        next.reconstruct().expect("read");
        assert_eq!(fixture.release(&next), 0, "the mount shows that the pod has it");
        fixture.tear_down(&next, "u-1");
        assert_eq!(fixture.release(&next), 1);
        assert_eq!((fixture.deleted("sda"), fixture.deleted("sdb")), ("1".to_owned(), String::new()));
        assert!(!place.exists());
    });
}

#[test]
fn hosts_are_scanned_for_a_disk_that_is_not_there() {
    in_private_mounts(|| {
        let fixture = fc_node();
        let error = fixture.set_up(&pod("u-1", json!({"lun": 7}))).expect_err("no disk");
        let expected = "MountVolume.WaitForAttach failed for volume \"v\" : no fc disk found: no device of unit 7 at target \
                        50060e801049cfd1 in /dev/disk/by-path within 10 s";
        assert_eq!(error, expected);
        let identified = json!({"targetWWNs": null, "lun": null, "wwids": ["3600a", "3600b"]});
        let error = fixture.set_up(&pod("u-2", identified)).expect_err("no disk");
        let expected = "no fc disk found: no device with identifier 3600a, 3600b in /dev/disk/by-id within 10 s";
        assert!(error.ends_with(expected), "{error}");
        assert_eq!(fixture.test.read("sys/class/scsi_host/host0/scan").as_deref(), Some("- - -"));
        assert_eq!(fixture.programs.take(), [""; 0]);
        for uid in ["u-1", "u-2"] {
            fixture.tear_down(&fixture.volumes, uid);
        }
        assert_eq!(fixture.release(&fixture.volumes), 2, "what was begun is undone");
        assert!(fixture.in_use().is_empty() && !fixture.place("50060e801049cfd1-lun-7").exists());

        // A pod that is over does not wait for it.
        fixture.runtime.block_on(async {
            let of_pod = pod("u-4", json!({}));
            let set_up = tokio::time::timeout(Duration::from_secs(1), fixture.volumes.set_up(&of_pod, None));
            set_up.await.expect_err("it is looked for");
            let began = tokio::time::Instant::now();
            fixture.volumes.tear_down("u-4").await.expect("nothing is mounted");
            assert_eq!(began.elapsed().as_secs(), 0);
            fixture.volumes.until_unused().await;
            fixture.volumes.until_unused().await;
        });
        assert_eq!(fixture.release(&fixture.volumes), 1, "when the search has ended");

        // It appears while it is waited for.
        let (test, set_up) = (fixture.test.clone(), pod("u-3", json!({})));
        fixture.runtime.block_on(async {
            let appears = async {
                tokio::time::sleep(Duration::from_secs(3)).await;
                fixture::add_disk(&test, "sda", "240:0", &by_path(WWN, 0));
            };
            let (done, ()) = tokio::join!(fixture.volumes.set_up(&set_up, None), appears);
            assert!(done.is_ok(), "{done:?}");
        });
        fixture.tear_down(&fixture.volumes, "u-3");
        fixture.release(&fixture.volumes);
    });
}

/// Two units of a target: the release of one is not to take the other away.
#[test]
fn another_unit_of_the_target_stays() {
    in_private_mounts(|| {
        let fixture = fc_node();
        for (disk, number, lun) in [("sda", "240:0", 0), ("sdb", "240:16", 1)] {
            fixture.disk(disk, number, &by_path(WWN, lun));
            fixture.set_up(&pod(disk, json!({"lun": lun}))).expect("mounted");
        }
        fixture.tear_down(&fixture.volumes, "sda");
        assert_eq!(fixture.release(&fixture.volumes), 1);
        assert_eq!((fixture.deleted("sda"), fixture.deleted("sdb")), ("1".to_owned(), String::new()));
        assert!(fixture.target("sdb").join("mounted").exists());
        fixture.tear_down(&fixture.volumes, "sdb");
        assert_eq!((fixture.release(&fixture.volumes), fixture.deleted("sdb")), (1, "1".to_owned()));
    });
}

#[test]
fn a_disk_that_is_used_by_another_name_or_otherwise_stays() {
    in_private_mounts(|| {
        let fixture = fc_node();
        fixture.disk("sda", "240:0", &by_path(WWN, 0));
        fixture.test.link("dev/disk/by-id/scsi-3600a", "../../sda");
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        fixture.set_up(&pod("u-2", json!({"wwids": ["3600a"], "targetWWNs": null, "lun": null}))).expect("mounted");
        fixture.tear_down(&fixture.volumes, "u-1");
        assert_eq!((fixture.release(&fixture.volumes), fixture.deleted("sda")), (1, String::new()), "the same disk");
        // Of the node: a volume group.
        fixture.test.write("sys/block/sda/sda1/holders/dm-9", "");
        fixture.tear_down(&fixture.volumes, "u-2");
        assert_eq!((fixture.release(&fixture.volumes), fixture.deleted("sda")), (1, String::new()));
    });
}

/// Through one of its paths alone the disk would be lost with that path, and multipathd would have it in use.
#[test]
fn a_disk_with_several_paths_is_mounted_through_their_multipath_device_which_is_removed_first() {
    in_private_mounts(|| {
        let fixture = fc_node();
        let other = "50060e801049cfd2";
        fixture.disk("sda", "240:0", &by_path(WWN, 0));
        fixture.disk("sdb", "240:16", &by_path(other, 0));
        fixture.disk("sdc", "240:32", "disk/by-path/pci-0000:41:00.0-fc-0xabc-lun-0");
        fixture.multipath("dm-0", &["sda", "sdb", "sdc"]);
        fixture.set_up(&pod("u-1", json!({"targetWWNs": [WWN, other]}))).expect("mounted");
        let place = fixture.place("50060e801049cfd1-50060e801049cfd2-lun-0");
        let mount = format!("mount -t ext4 -o defaults -- {} {}", fixture.device("dm-0"), place.display());
        assert_eq!(fixture.programs.take().last(), Some(&mount));
        assert_eq!(fixture.test.read("sys/class/scsi_host/host0/scan").as_deref(), Some(""), "it was there");
        fixture.tear_down(&fixture.volumes, "u-1");

        // As upstream, it is tried again: the device can be busy for a moment.
        fixture.test.write("busy", "");
        let error = fixture.runtime.block_on(fixture.volumes.release_unused(&place)).expect_err("busy").to_string();
        assert!(error.starts_with("multipath -f dm-0 failed: exit status: 1"), "{error}");
        assert_eq!((fixture.deleted("sda"), place.exists()), (String::new(), true));
        fs::remove_file(fixture.test.root.path().join("busy")).expect("removed");
        fixture.programs.take();
        assert_eq!(fixture.release(&fixture.volumes), 1);
        let flushed = ["sda", "sdb", "sdc"].map(|disk| format!("blockdev --flushbufs {}", fixture.device(disk)));
        assert_eq!(fixture.programs.take(), [&["multipath -f dm-0".to_owned()][..], &flushed[..]].concat());
        assert_eq!(["sda", "sdb", "sdc"].map(|disk| fixture.deleted(disk)), ["1", "1", "1"], "also what is not named");
        assert!(!place.exists());
    });
}

#[test]
fn a_disk_that_vanishes_is_unmounted_and_forgotten() {
    in_private_mounts(|| {
        let fixture = fc_node();
        fixture.disk("sda", "240:0", &by_path(WWN, 0));
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        fs::remove_file(fixture.test.root.path().join("dev/sda")).expect("removed");
        fixture.programs.take();
        fixture.tear_down(&fixture.volumes, "u-1");
        assert_eq!(fixture.release(&fixture.volumes), 1);
        assert_eq!((fixture.programs.take(), fixture.deleted("sda")), (Vec::new(), String::new()));
        assert!(!fixture.place("50060e801049cfd1-lun-0").exists() && fixture.in_use().is_empty());
        // The link of udev is left.
        fixture.set_up(&pod("u-2", json!({}))).expect_err("it leads to nothing");
        fixture.tear_down(&fixture.volumes, "u-2");
    });
}

#[test]
fn what_is_read_only_is_not_formatted() {
    in_private_mounts(|| {
        let fixture = fc_node();
        fixture.disk("sda", "240:0", &by_path(WWN, 0));
        let error = fixture.set_up(&pod("u-1", json!({"readOnly": true}))).expect_err("nothing to mount");
        let expected = "has no file system, and is not formatted since the volume is read-only";
        assert!(error.starts_with("MountVolume.MountDevice failed") && error.ends_with(expected), "{error}");
        fixture.tear_down(&fixture.volumes, "u-1");
        fixture.release(&fixture.volumes);
        fixture.programs.take();

        fixture.test.write("formatted", "xfs");
        fixture.disk("sda", "240:0", &by_path(WWN, 0));
        fixture.set_up(&pod("u-2", json!({"readOnly": true, "fsType": "xfs"}))).expect("mounted");
        let calls = fixture.programs.take();
        assert!(calls.last().is_some_and(|call| call.starts_with("mount -t xfs -o ro,defaults -- ")), "{calls:?}");
        let of_pod = pod("u-2", json!({"readOnly": true}));
        assert!(fixture.volumes.is_read_only(&crate::volumes::PodVolumes::of(&of_pod), "v"));
        fixture.tear_down(&fixture.volumes, "u-2");
        fixture.release(&fixture.volumes);
    });
}

#[test]
fn a_volume_waits_until_the_control_plane_has_attached_it() {
    in_private_mounts(|| {
        let fixture = fc_node_with(true, true);
        fixture.disk("sda", "240:0", &by_path(WWN, 0));
        let error = fixture.set_up(&pod("u-1", json!({}))).expect_err("not attached");
        let name = "kubernetes.io/fc/[50060e801049cfd1]:0";
        let expected = format!("volume {name} was not attached to this node within 123s");
        assert!(error.contains(&expected), "{error}");
        assert_eq!((fixture.in_use(), fixture.programs.take()), ([name.to_owned()].into(), Vec::new()));
        let status = json!({"volumesInUse": [name], "volumesAttached": [{"name": name, "devicePath": ""}]});
        fixture.node.send_replace(Some(Arc::new(node(status))));
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        fixture.tear_down(&fixture.volumes, "u-1");
        fixture.release(&fixture.volumes);
        assert!(fixture.in_use().is_empty());
    });
}

#[test]
fn hostile_volumes_run_no_program_and_leave_nothing() {
    let fixture = fc_node();
    for change in [
        json!({"targetWWNs": null, "lun": null}),
        json!({"lun": null}),
        json!({"lun": 256}),
        json!({"lun": -1}),
        json!({"targetWWNs": [""]}),
        json!({"targetWWNs": ["../../../../etc"]}),
        json!({"targetWWNs": [".*"]}),
        json!({"targetWWNs": null, "wwids": ["../../../x"]}),
        json!({"targetWWNs": null, "wwids": ["volumeDevices"]}),
        json!({"targetWWNs": null, "wwids": ["a\nb"]}),
        json!({"targetWWNs": null, "wwids": ["3600a-part2"]}),
        json!({"targetWWNs": null, "wwids": ["50060e801049cfd1-lun-0"]}),
    ] {
        let error = fixture.set_up(&pod("u-1", change.clone())).expect_err("refused");
        assert!(error.starts_with("MountVolume.SetUp failed for volume \"v\" : fc: "), "{change}: {error}");
    }
    assert_eq!(fixture.programs.take(), [""; 0]);
    assert!(!fixture.root.path().join("plugins").exists() && !fixture.root.path().join("pods").exists());
}
