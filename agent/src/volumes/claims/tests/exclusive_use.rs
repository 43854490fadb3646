//! Volumes that one pod at a time may use.

use super::*;
use crate::volumes::bind_mount;

/// Nothing in memory shows a pod that a predecessor has started, and that may still run.
#[test]
fn an_exclusive_volume_is_in_use_until_the_pod_of_another_agent_is_torn_down() {
    const IN_USE: &str = "volume uses the ReadWriteOncePod access mode and is already in use by another pod";
    in_private_mounts(|| {
        let (mut fixture, metrics) = (Fixture::new(), Metrics::new());
        fixture.volumes = fixture.volumes.with_metrics(metrics.clone());
        let (dir, one) = (fixture.local_dir(), fixture.mount_path("u-1", "local-volume"));
        fixture.binds(json!({"local": {"path": dir}, "accessModes": ["ReadWriteOncePod"]}));
        fixture.runtime.block_on(bind_mount::make(&dir, &one, false)).expect("mounted");
        let two = pod("u-2", None, false);
        assert_eq!(fixture.set_up(&two), Err(format!("MountVolume.SetUp failed for volume \"pv\" : {IN_USE}")));
        let failure = [operation("volume_mount", "local-volume", "fail-unknown", 1)];
        assert_eq!(samples(&metrics, "storage_operation"), failure, "by the plugin of the volume");
        assert!(!fixture.mount_path("u-2", "local-volume").exists());
        fixture.runtime.block_on(fixture.volumes.tear_down("u-1")).expect("unmounted");
        // What is left of others is no mount.
        fs::create_dir_all(fixture.mount_path("u-3", "local-volume")).expect("a folder");
        fs::write(fixture.root.path().join("pods/file"), "").expect("a file");
        fixture.set_up(&two).expect("mounted");
        fixture.runtime.block_on(fixture.volumes.tear_down("u-2")).expect("unmounted");
    });

    let (mut fixture, metrics) = (Fixture::new(), Metrics::new());
    fixture.volumes = fixture.volumes.with_metrics(metrics.clone());
    fixture.binds(json!({"local": {"path": "/dev/null"}, "volumeMode": "Block", "accessModes": ["ReadWriteOncePod"]}));
    let links = fixture.root.path().join("pods/u-1/volumeDevices/kubernetes.io~local-volume");
    fs::create_dir_all(&links).expect("folders");
    std::os::unix::fs::symlink("/dev/null", links.join("pv")).expect("a link");
    let two = using_device(pod("u-2", None, false));
    assert_eq!(fixture.set_up(&two), Err(format!("MapVolume.SetUpDevice failed for volume \"pv\" : {IN_USE}")));
    assert_eq!(samples(&metrics, "storage_operation"), [operation("map_volume", "local-volume", "fail-unknown", 1)]);
    fixture.runtime.block_on(fixture.volumes.tear_down("u-1")).expect("unmapped");
    let error = fixture.set_up(&two).expect_err("it is tried");
    assert!(error.ends_with("/dev/null: is not a block device"), "{error}");
}
