//! Disks on a machine of files, with scripted programs that change it, in a mount namespace of their own.

mod fixture;
mod operations;

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use keblet_skip::mounts::in_private_mounts;
use serde_json::json;

use super::host::testing::TARGET;
use super::*;
use crate::filesystem;
use crate::volumes::testing::LoopDevice;
use crate::volumes::testing::node;
use fixture::SHOW;
use fixture::calls_at;
use fixture::iscsi_node;
use fixture::iscsi_node_with;
use fixture::pod;

#[test]
fn a_disk_is_attached_once_and_detached_after_its_last_pod() {
    in_private_mounts(|| {
        let fixture = iscsi_node(&["192.0.2.1:3260"]);
        fixture.volumes.reconstruct().expect("nothing is there");
        assert!(fixture.in_use().is_empty());
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        let calls = fixture.programs.take();
        let node = format!("-T {TARGET} -I default");
        let expected = [
            "-I default -o new".to_owned(),
            "-I default --discover".to_owned(),
            format!("{node} -o update -n node.session.scan -v manual"),
            format!("{node} --login"),
            format!("{node} -o update -n node.startup -v manual"),
        ];
        assert_eq!(calls_at("192.0.2.1:3260", &calls), expected);
        let place = fixture.place_at("default", "192.0.2.1:3260");
        let (device, at) = (fixture.test.root.path().join("dev/disk/by-path"), place.to_string_lossy());
        let device = device.join(format!("ip-192.0.2.1:3260-iscsi-{TARGET}-lun-7"));
        let device = device.to_string_lossy();
        assert_eq!(calls[0], SHOW);
        assert_eq!(
            calls[6..],
            [
                format!("blkid -p -s TYPE -s PTTYPE -o export {device}"),
                format!("mkfs.ext4 -F -m0 {device}"),
                format!("mount -t ext4 -o defaults -- {device} {at}"),
            ]
        );
        assert_eq!(fixture.test.read("sys/class/scsi_host/host0/scan").as_deref(), Some("0 0 7"));
        fixture.share_and_release(pod, &format!("kubernetes.io/iscsi/192.0.2.1:{TARGET}:7"));
        assert_eq!(
            fixture.programs.take(),
            [
                format!("iscsiadm -m node -p 192.0.2.1:3260 {node} --logout"),
                format!("iscsiadm -m node -p 192.0.2.1:3260 {node} -o delete"),
            ]
        );
        assert_eq!(fixture.test.read("sys/block/sda/device/delete").as_deref(), Some("1"));
        assert!(!place.exists() && !place.parent().expect("a folder").exists() && fixture.in_use().is_empty());
    });
}

#[test]
fn another_agent_detaches_what_the_first_has_attached() {
    in_private_mounts(|| {
        let fixture = iscsi_node(&["192.0.2.1:3260", "192.0.2.2:3260"]);
        let own = json!({"portals": ["192.0.2.2"], "initiatorName": "iqn.2001-04.com.example:me"});
        fixture.set_up(&pod("u-1", own)).expect("mounted");
        fixture.programs.take();
        let next = fixture.next();
        next.reconstruct().expect("read");
        assert_eq!(fixture.release(&next), 0, "the mount shows that the pod has it");
        fixture.tear_down(&next, "u-1");
        assert_eq!(fixture.release(&next), 1);
        let calls = fixture.programs.take();
        let end = |end: &str| format!("-T {TARGET} -I 192.0.2.1:3260:v {end}");
        for portal in ["192.0.2.1:3260", "192.0.2.2:3260"] {
            assert_eq!(calls_at(portal, &calls), [end("--logout"), end("-o delete")]);
        }
        assert_eq!(calls.last().map(String::as_str), Some("iscsiadm -m iface -I 192.0.2.1:3260:v -o delete"));
        assert!(!fixture.place_at("192.0.2.1:3260:v", "192.0.2.1:3260").exists());
    });
}

#[test]
fn one_portal_suffices_and_without_any_all_are_named() {
    in_private_mounts(|| {
        let fixture = iscsi_node(&["192.0.2.2:3260"]);
        let portals = json!({"portals": ["192.0.2.2", "192.0.2.3"], "initiatorName": "iqn.2001-04.com.example:me"});
        fixture.set_up(&pod("u-1", portals.clone())).expect("mounted");
        let calls = fixture.programs.take();
        let undone = "-I 192.0.2.1:3260:v -o delete".to_owned();
        let tried = calls_at("192.0.2.1:3260", &calls);
        assert_eq!(
            tried.iter().filter(|end| **end == undone).count(),
            2,
            "two rounds, and no record is left: {calls:?}"
        );
        assert_eq!(calls.iter().filter(|call| call.ends_with("--login")).count(), 1);
        fixture.tear_down(&fixture.volumes, "u-1");
        fixture.release(&fixture.volumes);

        let silent = iscsi_node(&[]);
        let error = silent.set_up(&pod("u-1", portals)).expect_err("no portal listens");
        let start = format!(
            "MountVolume.WaitForAttach failed for volume \"v\" : iscsi: no portal leads to unit 7 of {TARGET}: "
        );
        assert!(error.starts_with(&start), "{error}");
        for portal in ["192.0.2.1:3260", "192.0.2.2:3260", "192.0.2.3:3260"] {
            assert!(
                error
                    .contains(&format!("-p {portal} -I 192.0.2.1:3260:v --discover failed: exit status: 8: no answer"))
            );
        }
        let calls = silent.programs.take();
        assert_eq!(calls.last().map(String::as_str), Some("iscsiadm -m iface -I 192.0.2.1:3260:v -o delete"));
        silent.tear_down(&silent.volumes, "u-1");
        assert_eq!(silent.release(&silent.volumes), 1, "what was begun is undone");
        assert!(silent.in_use().is_empty());
    });
}

#[test]
fn a_device_that_does_not_appear_is_given_up() {
    let fixture = iscsi_node(&["192.0.2.1:3260"]);
    let error = fixture.set_up(&pod("u-1", json!({"lun": 8}))).expect_err("another unit");
    let expected = "portal 192.0.2.1:3260: no device of unit 8 in /dev/disk/by-path within 10 s";
    assert!(error.ends_with(expected), "{error}");
    fixture.tear_down(&fixture.volumes, "u-1");
    assert_eq!(fixture.release(&fixture.volumes), 1);
    assert!(fixture.programs.take().iter().any(|call| call.ends_with("--logout")));
}

/// The agent is killed after the login, before the disk is mounted.
#[test]
fn another_agent_ends_a_session_whose_disk_was_not_mounted() {
    let fixture = iscsi_node(&["192.0.2.1:3260"]);
    fixture.set_up(&pod("u-1", json!({"lun": 8}))).expect_err("there is no device of this unit");
    assert!(fixture.programs.take().iter().any(|call| call.ends_with("--login")));
    let next = fixture.next();
    next.reconstruct().expect("read");
    assert_eq!(fixture.release(&next), 1, "the record was written before the login");
    let calls = calls_at("192.0.2.1:3260", &fixture.programs.take());
    assert_eq!(calls, ["--logout", "-o delete"].map(|end| format!("-T {TARGET} -I default {end}")));
    assert!(!fixture.place("iface-default").exists());
}

#[test]
fn a_session_that_another_disk_needs_stays() {
    in_private_mounts(|| {
        let fixture = iscsi_node(&["192.0.2.1:3260", "192.0.2.2:3260"]);
        fixture.set_up(&pod("u-1", json!({"portals": ["192.0.2.2"]}))).expect("mounted");
        // Another volume of the same target, whose first portal is this one's second.
        fixture.set_up(&pod("u-2", json!({"targetPortal": "192.0.2.2"}))).expect("mounted");
        fixture.programs.take();
        fixture.tear_down(&fixture.volumes, "u-1");
        assert_eq!(fixture.release(&fixture.volumes), 1);
        let calls = fixture.programs.take();
        assert_eq!((calls_at("192.0.2.1:3260", &calls).len(), calls_at("192.0.2.2:3260", &calls).len()), (2, 0));
        assert_eq!(fixture.test.read("sys/block/sda/device/delete").as_deref(), Some(""), "the same unit is in use");
        fixture.tear_down(&fixture.volumes, "u-2");
        fixture.release(&fixture.volumes);
        assert_eq!(calls_at("192.0.2.2:3260", &fixture.programs.take()).len(), 2);

        // A disk of the session that is no pod's, and one that nothing uses yet.
        fixture.set_up(&pod("u-3", json!({}))).expect("mounted");
        fixture.programs.take();
        fixture.test.session(0, TARGET, ("192.0.2.1", "3260"), &[(8, "sdy"), (9, "sdz")]);
        fixture.test.write("sys/block/sdz/holders/dm-0", "");
        fixture.tear_down(&fixture.volumes, "u-3");
        fixture.release(&fixture.volumes);
        assert_eq!(fixture.programs.take(), [""; 0]);
        assert_eq!(fixture.test.read("sys/block/sda/device/delete").as_deref(), Some("1"), "its own disk goes");
        assert_eq!(fixture.test.read("sys/block/sdy/device/delete").as_deref(), Some(""), "another unit stays");
    });
}

/// Through one of its paths alone the disk would be lost with that path, and multipathd would have it in use.
#[test]
fn a_disk_with_several_paths_is_mounted_through_their_map_which_is_removed_first() {
    in_private_mounts(|| {
        let fixture = iscsi_node(&["192.0.2.1:3260", "192.0.2.2:3260"]);
        for portal in ["192.0.2.1:3260", "192.0.2.2:3260"] {
            let path = format!("dev/disk/by-path/ip-{portal}-iscsi-{TARGET}-lun-7");
            let path = fixture.test.root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::os::unix::fs::symlink("../../sda", path).expect("a link");
        }
        fixture.test.write("dev/dm-0", &"x".repeat(1 << 17));
        fixture.test.write("sys/block/dm-0/dm/uuid", "mpath-1\n");
        fixture.test.write("sys/block/sda/holders/dm-0", "");
        fixture.set_up(&pod("u-1", json!({"portals": ["192.0.2.2"]}))).expect("mounted");
        let (map, place) = (fixture.test.root.path().join("dev/dm-0"), fixture.place_at("default", "192.0.2.1:3260"));
        let mount = format!("mount -t ext4 -o defaults -- {} {}", map.display(), place.display());
        assert_eq!(fixture.programs.take().last(), Some(&mount));
        fixture.tear_down(&fixture.volumes, "u-1");
        assert_eq!(fixture.release(&fixture.volumes), 1);
        let calls = fixture.programs.take();
        assert_eq!(calls[0], "multipath -f dm-0");
        assert_eq!(calls.iter().filter(|call| call.starts_with("multipath")).count(), 1, "{calls:?}");
        assert_eq!(calls.iter().filter(|call| call.ends_with("--logout")).count(), 2, "{calls:?}");
        assert_eq!(fixture.test.read("sys/block/sda/device/delete").as_deref(), Some("1"));
    });
}

#[test]
fn a_session_that_is_there_is_used() {
    in_private_mounts(|| {
        let fixture = iscsi_node(&["192.0.2.1:3260"]);
        fixture.test.session(0, TARGET, ("192.0.2.1", "3260"), &[(7, "sda")]);
        fixture.test.write(&format!("dev/disk/by-path/ip-192.0.2.1:3260-iscsi-{TARGET}-lun-7"), &"x".repeat(1 << 17));
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        assert!(fixture.programs.take().iter().all(|call| !call.contains(" -p 192.0.2.1")), "no login");
        assert_eq!(fixture.test.read("sys/class/scsi_host/host0/scan").as_deref(), Some("0 0 7"), "but a scan");
        fixture.tear_down(&fixture.volumes, "u-1");
        fixture.release(&fixture.volumes);
    });
}

#[test]
fn chap_is_read_from_the_secret() {
    in_private_mounts(|| {
        let fixture = iscsi_node(&["192.0.2.1:3260"]);
        let chap = json!({"chapAuthDiscovery": true, "chapAuthSession": true, "secretRef": {"name": "chap"}});
        let error = fixture.set_up(&pod("u-1", chap.clone())).expect_err("no secret");
        assert_eq!(error, "MountVolume.WaitForAttach failed for volume \"v\" : secrets \"chap\" not found");
        let encoded = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        let secret = json!({"metadata": {"name": "chap", "namespace": "ns"}, "type": "kubernetes.io/iscsi-chap", "data": {
            "discovery.sendtargets.auth.username": encoded("finder"), "discovery.sendtargets.auth.password": encoded("find"),
            "node.session.auth.username": encoded("user"), "node.session.auth.password": encoded("pass"),
            "node.session.auth.username_in": encoded("target"), "node.session.auth.password_in": encoded("ssap"),
        }});
        fixture.replies.lock().expect("unpoisoned").insert("/api/v1/namespaces/ns/secrets/chap".to_owned(), secret);
        fixture.set_up(&pod("u-1", chap)).expect("mounted");
        let settings: Vec<String> = fixture
            .programs
            .take()
            .iter()
            .filter_map(|call| {
                let (_, setting) = call.split_once(" -o update -n ")?;
                setting.contains(".auth.").then(|| setting.to_owned())
            })
            .collect();
        let expected = [
            "discovery.sendtargets.auth.authmethod -v CHAP",
            "discovery.sendtargets.auth.username -v finder",
            "discovery.sendtargets.auth.password -v find",
            "node.session.auth.authmethod -v CHAP",
            "node.session.auth.username -v user",
            "node.session.auth.password -v pass",
            "node.session.auth.username_in -v target",
            "node.session.auth.password_in -v ssap",
        ];
        assert_eq!(settings, expected);
        let record = fixture.place_at("default", "192.0.2.1:3260");
        crate::filesystem::unmount(&record).expect("unmounted");
        assert!(!fs::read_to_string(record.join("iscsi.json")).expect("a record").contains("pass"));
        fixture.tear_down(&fixture.volumes, "u-1");
        fixture.release(&fixture.volumes);
    });
}

#[test]
fn a_volume_waits_until_the_control_plane_has_attached_it() {
    in_private_mounts(|| {
        let fixture = iscsi_node_with(&["192.0.2.1:3260"], true, true);
        let name = format!("kubernetes.io/iscsi/192.0.2.1:{TARGET}:7");
        let error = fixture.set_up(&pod("u-1", json!({}))).expect_err("not attached");
        let end = "was not attached to this node within 123s: it is not in status.volumesInUse of the Node yet";
        assert!(
            error.starts_with("MountVolume.WaitForAttach failed for volume \"v\"") && error.ends_with(end),
            "{error}"
        );
        assert_eq!((fixture.in_use(), fixture.programs.take()), ([name.clone()].into(), Vec::new()));
        fixture.tear_down(&fixture.volumes, "u-1");
        assert_eq!((fixture.release(&fixture.volumes), fixture.in_use()), (0, [].into()), "it was never attached");
        // No other node gets it until it has left the volumes in use.
        let took = fixture.runtime.block_on(async {
            let of_pod = pod("u-1", json!({}));
            let set_up = tokio::time::timeout(Duration::from_secs(5), fixture.volumes.set_up(&of_pod, None));
            set_up.await.expect_err("it waits");
            let began = tokio::time::Instant::now();
            fixture.volumes.tear_down("u-1").await.expect("torn down");
            began.elapsed()
        });
        assert!(took < Duration::from_secs(1), "a pod that ends does not wait: {took:?}");
        assert_eq!((fixture.release(&fixture.volumes), fixture.in_use()), (0, [].into()));
        let (sender, attached) = (fixture.node.clone(), json!([{"name": name, "devicePath": ""}]));
        fixture.runtime.spawn(async move {
            tokio::time::sleep(Duration::from_secs(5)).await;
            sender.send_replace(Some(Arc::new(node(json!({"volumesInUse": [name]})))));
            tokio::time::sleep(Duration::from_secs(5)).await;
            sender.send_replace(Some(Arc::new(node(json!({"volumesInUse": [name], "volumesAttached": attached})))));
        });
        fixture.set_up(&pod("u-1", json!({}))).expect("attached and mounted");
        fixture.node.send_replace(None);
        fixture.set_up(&pod("u-1", json!({}))).expect("what is mounted does not depend on the API server");
        fixture.tear_down(&fixture.volumes, "u-1");
        fixture.release(&fixture.volumes);
    });
}

#[test]
fn a_raw_device_is_mapped_and_detached_after_its_pod() {
    if !Path::new("/dev/loop-control").exists() {
        return keblet_skip::skip("needs loop devices");
    }
    in_private_mounts(|| {
        // losetup(8) is the real one.
        let fixture = iscsi_node_with(&["192.0.2.1:3260"], false, false);
        let disk = LoopDevice::on(&fixture.root.path().join("disk"), 1 << 20);
        let path = fixture.test.root.path().join(format!("dev/disk/by-path/ip-192.0.2.1:3260-iscsi-{TARGET}-lun-7"));
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::os::unix::fs::symlink(&disk.0, &path).expect("a link");
        fixture.test.session(0, TARGET, ("192.0.2.1", "3260"), &[(7, "sda")]);
        let pod = fixture.raw_pod(json!({"targetPortal": "192.0.2.1", "iqn": TARGET, "lun": 7}));
        let link = fixture.map(&pod, &path);
        let places = fixture.place("volumeDevices/iface-default");
        let place = places.join(format!("192.0.2.1:3260-{TARGET}-lun-7"));
        assert!(
            filesystem::is_mount_point(&place.join("u-1")).expect("it is there") && place.join("iscsi.json").exists()
        );
        fixture.programs.take();
        fixture.set_up(&pod).expect("it is there");
        assert_eq!((fixture.programs.take(), fixture.release(&fixture.volumes)), (Vec::new(), 0));

        // Another agent, for which the mapped device is a file.
        let next = fixture.next();
        assert_eq!(fixture.release(&next), 0);
        fixture.tear_down(&next, "u-1");
        assert!(next.is_torn_down("u-1") && !link.exists() && !place.join("u-1").exists());
        assert_eq!(fixture.release(&next), 1);
        assert!(!places.exists() && fixture.programs.take().iter().any(|call| call.ends_with("--logout")));
    });
}

#[test]
fn hostile_volumes_run_no_program_and_leave_nothing() {
    let fixture = iscsi_node(&["192.0.2.1:3260"]);
    for change in [
        json!({"iqn": ""}),
        json!({"iqn": "-o"}),
        json!({"iqn": "iqn.2001-04.com.example:../../../../../etc"}),
        json!({"targetPortal": "--login"}),
        json!({"targetPortal": "192.0.2.1/../../x"}),
        json!({"portals": ["a\nb"]}),
        json!({"lun": 256}),
        json!({"lun": -1}),
        json!({"iscsiInterface": "../../default"}),
        json!({"initiatorName": "-I"}),
    ] {
        let error = fixture.set_up(&pod("u-1", change.clone())).expect_err("refused");
        assert!(error.starts_with("MountVolume.SetUp failed for volume \"v\" : iscsi: "), "{change}: {error}");
    }
    let mut climbing = pod("u-1", json!({}));
    let spec = climbing.spec.as_mut().expect("a spec");
    spec.volumes.as_mut().expect("volumes")[0].name = "../v".to_owned();
    spec.containers[0].volume_mounts.as_mut().expect("mounts")[0].name = "../v".to_owned();
    let error = fixture.set_up(&climbing).expect_err("refused");
    assert!(error.contains("cannot be part of a path"), "{error}");
    assert_eq!(fixture.programs.take(), [""; 0]);
    assert!(!fixture.root.path().join("plugins").exists() && !fixture.root.path().join("pods").exists());
}
