//! What metrics count of a disk.

use super::*;
use crate::volumes::plugin::SET_UP_TIMEOUT;
use crate::volumes::tests::operation;
use crate::volumes::tests::samples;

#[test]
fn the_steps_of_a_mount_and_the_release_of_a_disk_are_counted() {
    in_private_mounts(|| {
        let mut fixture = iscsi_node_with(&["192.0.2.1:3260"], true, true);
        let metrics = fixture.count_operations();
        let counted = || samples(&metrics, "storage_operation");
        fixture.set_up(&pod("u-1", json!({}))).expect_err("not attached");
        let failed = ["verify_controller_attached_volume", "volume_mount"];
        assert_eq!(counted(), failed.map(|name| operation(name, "iscsi", "fail-unknown", 1)));

        let name = format!("kubernetes.io/iscsi/192.0.2.1:{TARGET}:7");
        let status = json!({"volumesInUse": [name], "volumesAttached": [{"name": name, "devicePath": ""}]});
        fixture.node.send_replace(Some(Arc::new(node(status))));
        for _ in 0..2 {
            fixture.set_up(&pod("u-1", json!({}))).expect("attached and mounted");
        }
        assert_eq!(fixture.release(&fixture.volumes), 0, "the pod has it");
        fixture.tear_down(&fixture.volumes, "u-1");
        assert_eq!(fixture.release(&fixture.volumes), 1);
        let expected = [
            ("unmount_device", "success"),
            ("verify_controller_attached_volume", "fail-unknown"),
            ("verify_controller_attached_volume", "success"),
            ("volume_apply_access_control", "success"),
            ("volume_mount", "fail-unknown"),
            ("volume_mount", "success"),
            ("volume_unmount", "success"),
        ];
        assert_eq!(counted(), expected.map(|(name, status)| operation(name, "iscsi", status, 1)), "each once");
    });
}

#[test]
fn nothing_is_counted_of_a_control_plane_that_attaches_no_volumes() {
    in_private_mounts(|| {
        let mut fixture = iscsi_node(&["192.0.2.1:3260"]);
        let metrics = fixture.count_operations();
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        let place = fixture.place_at("default", "192.0.2.1:3260");
        let release = || {
            let released = async { tokio::time::timeout(SET_UP_TIMEOUT, fixture.volumes.release_unused(&place)).await };
            fixture.runtime.block_on(released).expect("nothing is waited for")
        };
        release().expect("nothing is done: the pod has it");
        fixture.tear_down(&fixture.volumes, "u-1");
        let working = fixture.runtime.block_on(fixture.volumes.node.disks.globals.lock(&place));
        release().expect("nothing is done: it is being worked on");
        drop(working);
        release().expect("released");
        let steps = ["unmount_device", "volume_apply_access_control", "volume_mount", "volume_unmount"];
        let expected = steps.map(|name| operation(name, "iscsi", "success", 1));
        assert_eq!(samples(&metrics, "storage_operation"), expected);
    });
}

#[test]
fn the_map_and_the_release_of_a_raw_device_are_counted() {
    let mut fixture = iscsi_node(&[]);
    let metrics = fixture.count_operations();
    let pod = fixture.raw_pod(json!({"targetPortal": "192.0.2.1", "iqn": TARGET, "lun": 7}));
    fixture.set_up(&pod).expect_err("no portal listens");
    fixture.tear_down(&fixture.volumes, "u-1");
    assert_eq!(fixture.release(&fixture.volumes), 1, "what was begun is undone");
    let expected = [("map_volume", "fail-unknown"), ("unmap_device", "success")];
    let expected = expected.map(|(name, status)| operation(name, "iscsi", status, 1));
    assert_eq!(samples(&metrics, "storage_operation"), expected);
}
