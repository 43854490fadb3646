//! Volumes of a driver that is a shell script, in a mount namespace of their own.

mod attachable;
mod expansion;
mod faults;
mod fixture;

use std::fs;

use keblet_skip::mounts::in_private_mounts;
use serde_json::Value;
use serde_json::json;

use crate::filesystem::is_mount_point;
use crate::volumes::PodVolumes;
use crate::volumes::testing::with_volume;
use fixture::Fixture;
use fixture::MOUNT;
use fixture::MOUNTS;
use fixture::SUCCESS;
use fixture::UNMOUNT;
use fixture::arguments;
use fixture::group_of;
use fixture::options;
use fixture::pod;

const MOUNT_ONLY: [(&str, &str); 3] = [("init", MOUNTS), ("mount", MOUNT), ("unmount", UNMOUNT)];

#[test]
fn a_volume_is_mounted_once_given_to_the_group_and_unmounted() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&MOUNT_ONLY);
        let one = pod("u-1", json!({"fsType": "ext4", "options": {"share": "s"}}));
        assert_eq!(fixture.volumes.plugins_wanted(&one).count(), 0, "the driver is not known yet");
        fixture.set_up(&one).expect("mounted");
        let (calls, target) = (fixture.calls(), fixture.target("u-1", "v"));
        assert_eq!(calls[0], "init");
        assert_eq!(arguments(&calls[1]), format!("mount {}", target.display()));
        let given = options(&calls[1]);
        for (name, expected) in [
            ("kubernetes.io/fsType", "ext4"),
            ("kubernetes.io/readwrite", "rw"),
            ("kubernetes.io/pvOrVolumeName", "v"),
            ("kubernetes.io/pod.namespace", "ns"),
            ("kubernetes.io/mounterArgs.FsGroup", "77"),
            ("share", "s"),
        ] {
            assert_eq!(given[name], expected, "{name}");
        }
        assert!(is_mount_point(&target).expect("it is there") && group_of(&target) == 77);
        assert_eq!(fixture.volumes.plugins_wanted(&one).collect::<Vec<_>>(), ["example.com/d"]);
        assert_eq!(fixture.volumes.set_up_by_plugin(), [("example.com/d", 1)].into());
        let of_pod = PodVolumes::of(&one);
        assert!(!fixture.volumes.is_read_only(&of_pod, "v") && fixture.volumes.is_relabelled(&of_pod, "v"));
        assert!(fixture.volumes.measurable(&one).is_empty(), "the driver does not support it");

        fixture.set_up(&one).expect("it is there");
        fixture.tear_down(&fixture.volumes, "u-1").expect("unmounted");
        assert_eq!(fixture.calls(), [format!("unmount {}", target.display())]);
        assert!(fixture.volumes.is_torn_down("u-1") && fixture.volumes.set_up_by_plugin().is_empty());
    });
}

/// Nothing is mounted that would show the next attempt what is there.
#[test]
fn a_driver_that_mounts_nothing_is_called_once_as_well() {
    let does = [("init", MOUNTS), ("mount", r#"echo x > "$2/file"; echo '{"status": "Success"}'"#)];
    let fixture = Fixture::new(&does);
    fixture.does("unmount", r#"rm "$2/file"; rmdir "$2"; echo '{"status": "Success"}'"#);
    let mut one = pod("u-1", json!({}));
    one.spec.as_mut().expect("a spec").security_context = None;
    for _ in 0..2 {
        fixture.set_up(&one).expect("set up");
    }
    assert_eq!(fixture.commands(), ["init", "mount"]);
    fixture.tear_down(&fixture.volumes, "u-1").expect("removed");
    assert!(fixture.commands() == ["unmount"] && fixture.volumes.is_torn_down("u-1"));
}

#[test]
fn another_agent_keeps_and_unmounts_what_the_first_has_mounted() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&MOUNT_ONLY);
        let one = pod("u-1", json!({}));
        fixture.set_up(&one).expect("mounted");
        fs::write(fixture.target("u-1", "v").join("file"), "kept").expect("writable");
        fixture.calls();
        let next = fixture.next();
        next.reconstruct().expect("read");
        assert_eq!(next.set_up_by_plugin(), [("example.com/d", 1)].into());
        fixture.set_up_by(&next, &one).expect("it is there");
        assert!(fixture.commands() == ["init"] && fixture.target("u-1", "v").join("file").exists());

        // The pod is gone, and nothing is known but the directory.
        let last = fixture.next();
        fixture.tear_down(&last, "u-1").expect("unmounted");
        assert!(fixture.commands() == ["init", "unmount"] && last.is_torn_down("u-1"));
    });
}

#[test]
fn a_volume_that_is_only_read_keeps_its_group() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&MOUNT_ONLY);
        let read_only = pod("u-1", json!({"readOnly": true}));
        fixture.set_up(&read_only).expect("mounted");
        assert_eq!(options(&fixture.calls()[1])["kubernetes.io/readwrite"], "ro");
        assert_eq!(group_of(&fixture.target("u-1", "v")), 0);
        let of_pod = PodVolumes::of(&read_only);
        assert!(fixture.volumes.is_read_only(&of_pod, "v") && !fixture.volumes.is_relabelled(&of_pod, "v"));
    });
}

#[test]
fn the_driver_says_what_the_agent_does_with_its_files() {
    in_private_mounts(|| {
        let does = r#"echo '{"status": "Success", "capabilities":
            {"attach": false, "fsGroup": false, "selinuxRelabel": false, "supportsMetrics": true}}'"#;
        let fixture = Fixture::new(&[("init", does), ("mount", MOUNT), ("unmount", UNMOUNT)]);
        let one = pod("u-1", json!({}));
        fixture.set_up(&one).expect("mounted");
        assert_eq!(group_of(&fixture.target("u-1", "v")), 0, "it gives the files itself");
        assert!(!fixture.volumes.is_relabelled(&PodVolumes::of(&one), "v"));
        let [measured] = &fixture.volumes.measurable(&one)[..] else { panic!("one volume") };
        assert_eq!(measured.path, fixture.target("u-1", "v"));
    });
}

#[test]
fn what_the_driver_does_not_unmount_the_agent_does() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&[("init", MOUNTS), ("mount", MOUNT)]);
        for (uid, expected) in [("u-1", vec!["init", "mount", "unmount"]), ("u-2", vec!["mount"])] {
            fixture.set_up(&pod(uid, json!({}))).expect("mounted");
            fixture.tear_down(&fixture.volumes, uid).expect("unmounted");
            assert_eq!(fixture.commands(), expected, "what is not supported is not tried again");
            assert!(fixture.volumes.is_torn_down(uid));
        }
    });
}

#[test]
fn a_driver_that_is_installed_later_is_found_and_one_that_changes_is_initialised_again() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&MOUNT_ONLY);
        let program = fixture.folder().join("d");
        fs::remove_file(&program).expect("removed");
        let error = fixture.set_up(&pod("u-1", json!({}))).expect_err("no driver");
        let expected = "MountVolume.SetUp failed for volume \"v\" : \
                        no volume plugin matched: there is no FlexVolume driver";
        assert_eq!(error, format!("{expected} {}", program.display()));
        fixture.install();
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        fixture.set_up(&pod("u-2", json!({}))).expect("mounted");
        assert_eq!(fixture.commands(), ["init", "mount", "mount"]);
        fs::remove_file(&program).expect("removed");
        fixture.set_up(&pod("u-2", json!({}))).expect("a container starts again");
        fixture.install();
        fixture.set_up(&pod("u-3", json!({}))).expect("mounted");
        assert_eq!(fixture.commands(), ["init", "mount"]);
    });
}

/// A claim `data` that is bound to a persistent volume `pv` with these fields.
fn bind(fixture: &Fixture, fields: Value) {
    let mut spec = json!({"claimRef": {"uid": "c-1"}});
    spec.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    let claim = json!({"metadata": {"name": "data", "namespace": "ns", "uid": "c-1"}, "spec": {"volumeName": "pv"},
        "status": {"phase": "Bound"}});
    let mut replies = fixture.replies.lock().expect("unpoisoned");
    replies.insert("/api/v1/persistentvolumes/pv".to_owned(), json!({"metadata": {"name": "pv"}, "spec": spec}));
    replies.insert("/api/v1/namespaces/ns/persistentvolumeclaims/data".to_owned(), claim);
    let secret = json!({"type": "example.com/d", "data": {"user": "YWRtaW4="}});
    replies.insert("/api/v1/namespaces/storage/secrets/s".to_owned(), secret);
}

#[test]
fn a_persistent_volume_is_mounted_by_its_name_with_its_secret() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&MOUNT_ONLY);
        let secret = json!({"name": "s", "namespace": "storage"});
        let source = json!({"flexVolume": {"driver": "example.com/d", "secretRef": secret, "readOnly": true}});
        bind(&fixture, source.clone());
        let using = |uid: &str| with_volume(uid, json!({"name": "v", "persistentVolumeClaim": {"claimName": "data"}}));
        fixture.set_up(&using("u-1")).expect("mounted");
        let (calls, target) = (fixture.calls(), fixture.target("u-1", "pv"));
        assert_eq!(arguments(&calls[1]), format!("mount {}", target.display()));
        let given = options(&calls[1]);
        assert_eq!(given["kubernetes.io/pvOrVolumeName"], "pv");
        assert_eq!(given["kubernetes.io/secret/user"], "YWRtaW4=");
        assert_eq!(given["kubernetes.io/readwrite"], "rw", "the use of the claim decides");
        assert!(is_mount_point(&target).expect("it is there") && group_of(&target) == 77);
        fixture.set_up(&using("u-1")).expect("it is there");
        assert_eq!(fixture.volumes.set_up_by_plugin(), [("example.com/d", 1)].into());
        fixture.tear_down(&fixture.volumes, "u-1").expect("unmounted");
        assert!(fixture.commands() == ["unmount"] && fixture.volumes.is_torn_down("u-1"));

        let mut with_options = source;
        with_options["mountOptions"] = json!(["noexec"]);
        bind(&fixture, with_options);
        let error = fixture.set_up(&using("u-2")).expect_err("no options");
        let expected = "MountVolume.MountOptionSupport check failed for volume \"pv\" : \
                        mount options are not supported for this volume type";
        assert_eq!(error, expected);
    });
}
