//! Drivers that fail, and those that are gone.

use std::os::unix::fs::PermissionsExt as _;

use super::*;
use crate::volumes::Volumes;

const FAILED: &str = "MountVolume.SetUp failed for volume \"v\" : ";

#[test]
fn what_a_driver_reports_is_the_reason_and_nothing_is_left_of_the_mount() {
    let failure = r#"echo '{"status": "Failure", "message": "no route to host"}'; exit 1"#;
    let success = r#"echo '{"status": "Success"}'; exit 3"#;
    let huge = r"head -c 300000 /dev/zero | tr '\0' x";
    let no_status = "mount command failed: the driver printed no JSON object with a status: exit status: 0";
    for (does, expected) in [
        (failure, "mount command failed, status: Failure, reason: no route to host"),
        (success, "mount command failed: the driver reports success and ends with a failure: exit status: 3"),
        ("echo mounted", no_status),
        ("true", no_status),
        (huge, no_status),
        ("kill -9 $$", "mount command failed: the driver printed no JSON object with a status: signal: 9"),
    ] {
        let fixture = Fixture::new(&[("init", MOUNTS), ("mount", does)]);
        let error = fixture.set_up(&pod("u-1", json!({}))).expect_err(does);
        assert!(error.starts_with(&format!("{FAILED}{expected}")), "{does}: {error}");
        assert!(error.len() < 4096 && !fixture.target("u-1", "v").exists(), "{does}: {error}");
        assert!(fixture.volumes.set_up_by_plugin().is_empty());
        fixture.tear_down(&fixture.volumes, "u-1").expect("nothing is there");
    }
}

#[test]
fn a_driver_that_does_not_mount_has_to_mount_the_device() {
    for init in [MOUNTS, SUCCESS] {
        let fixture = Fixture::new(&[("init", init)]);
        let error = fixture.set_up(&pod("u-1", json!({}))).expect_err("nothing is mounted for the node");
        let expected = "the FlexVolume driver supports no mount, and has mounted nothing at";
        assert_eq!(error, format!("{FAILED}{expected} {}", fixture.place().display()));
        assert!(!fixture.target("u-1", "v").exists());
    }
}

#[test]
fn a_driver_that_cannot_be_initialised_mounts_nothing() {
    for (does, expected) in [
        (
            r#"echo '{"status": "Failure", "message": "no module"}'"#,
            "init command failed, status: Failure, reason: no module",
        ),
        (r#"echo '{"status": "Not supported"}'"#, "init command failed, status: Not supported, reason: "),
        ("echo ok", "init command failed: the driver printed no JSON object with a status: exit status: 0: ok"),
    ] {
        let fixture = Fixture::new(&[("init", does), ("mount", SUCCESS)]);
        assert_eq!(fixture.set_up(&pod("u-1", json!({}))), Err(format!("{FAILED}{expected}")));
        assert_eq!(fixture.commands(), ["init"]);
    }
    let fixture = Fixture::new(&MOUNT_ONLY);
    let program = fixture.folder().join("d");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o644)).expect("set");
    let error = fixture.set_up(&pod("u-1", json!({}))).expect_err("it is no program");
    assert!(error.contains("/d init failed: Permission denied"), "{error}");
}

/// It may be about to format a device.
#[test]
fn a_mount_that_takes_long_goes_on_alone() {
    in_private_mounts(|| {
        let slow = format!("while [ -d \"$dir\" ] && [ ! -e \"$dir/go\" ]; do sleep 0.01; done; {MOUNT}");
        let fixture = Fixture::new(&[("init", MOUNTS), ("mount", &slow), ("unmount", UNMOUNT)]);
        let one = pod("u-1", json!({}));
        fixture.runtime.block_on(async {
            // The driver is called in real time, and then time passes at once while it works.
            fixture.volumes.node.flex_volumes.drivers.find("example.com/d").await.expect("initialised");
            tokio::time::pause();
        });
        let goes_on = |done: Result<(), String>| done.is_err_and(|error| error.ends_with("goes on in the background"));
        assert!(goes_on(fixture.set_up(&one)) && goes_on(fixture.tear_down(&fixture.volumes, "u-1")));
        fixture.runtime.block_on(async { tokio::time::resume() });
        fs::write(fixture.folder().join("go"), "").expect("a file");
        fixture.set_up(&one).expect("it is there");
        assert_eq!(fixture.commands(), ["init", "mount"]);
        assert_eq!(group_of(&fixture.target("u-1", "v")), 77);
        fixture.tear_down(&fixture.volumes, "u-1").expect("unmounted");
        assert!(fixture.commands() == ["unmount"] && fixture.volumes.is_torn_down("u-1"));
    });
}

/// Time passes at once while it waits.
#[test]
fn a_driver_that_hangs_is_killed() {
    let fixture = Fixture::with(&[("init", "exec sleep 3600")], false, true);
    let error = fixture.set_up(&pod("u-1", json!({}))).expect_err("it hangs");
    assert!(error.ends_with("/d init failed: timed out after 120s"), "{error}");
}

#[test]
fn a_name_that_leads_elsewhere_is_no_driver() {
    let fixture = Fixture::new(&MOUNT_ONLY);
    for driver in ["../example.com~d/d", "example.com~d", "example.com/d/..", "..", "", "kubernetes.io/secret"] {
        let error = fixture.set_up(&pod("u-1", json!({"driver": driver}))).expect_err(driver);
        assert!(error.starts_with(&format!("{FAILED}FlexVolume driver {driver:?}: must be file names")), "{error}");
    }
    let (root, one) = (fixture.root.path(), pod("u-1", json!({})));
    let error = fixture.set_up_by(&Volumes::new(root), &one).expect_err("no directory of drivers");
    assert!(error.ends_with("this agent has no directory of FlexVolume drivers"), "{error}");
    assert_eq!(fixture.commands(), [""; 0]);
}

#[test]
fn a_failed_unmount_is_tried_again() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&[("init", MOUNTS), ("mount", MOUNT)]);
        fixture.does("unmount", r#"echo '{"status": "Failure", "message": "busy"}'"#);
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        let error = fixture.tear_down(&fixture.volumes, "u-1").expect_err("it fails");
        assert_eq!(error, "unmount command failed, status: Failure, reason: busy");
        assert!(is_mount_point(&fixture.target("u-1", "v")).expect("it is there"));
        fixture.does("unmount", UNMOUNT);
        fixture.tear_down(&fixture.volumes, "u-1").expect("unmounted");
        assert!(fixture.volumes.is_torn_down("u-1"));
    });
}

/// What the driver has attached, only the driver detaches.
#[test]
fn a_driver_that_is_being_replaced_is_waited_for() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&MOUNT_ONLY);
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        let program = fixture.folder().join("d");
        fs::remove_file(&program).expect("removed");
        let error = fixture.tear_down(&fixture.volumes, "u-1").expect_err("no driver");
        assert!(error.ends_with(&format!("there is no FlexVolume driver {}", program.display())), "{error}");
        assert!(is_mount_point(&fixture.target("u-1", "v")).expect("it is there"));
        fixture.install();
        fixture.calls();
        fixture.tear_down(&fixture.volumes, "u-1").expect("unmounted");
        assert!(fixture.commands().contains(&"unmount".to_owned()) && fixture.volumes.is_torn_down("u-1"));
    });
}

#[test]
fn without_its_driver_a_volume_is_unmounted_and_content_stays() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&MOUNT_ONLY);
        for uid in ["u-1", "u-2"] {
            fixture.set_up(&pod(uid, json!({}))).expect("mounted");
        }
        // Below the mount.
        let target = fixture.target("u-2", "v");
        crate::filesystem::unmount(&target).expect("unmounted");
        fs::write(target.join("file"), "kept").expect("written");
        fs::remove_dir_all(fixture.folder()).expect("removed");
        let next = fixture.next();
        next.reconstruct().expect("read");
        fixture.tear_down(&next, "u-1").expect("unmounted");
        assert!(next.is_torn_down("u-1"));
        let error = fixture.tear_down(&next, "u-2").expect_err("content stays");
        assert!(error.ends_with("/pods/u-2/volumes/example.com~d/v is not empty"), "{error}");
        let orphan = fixture.runtime.block_on(next.remove_orphan("u-2"));
        assert!(orphan.is_err() && target.join("file").exists());
    });
}
