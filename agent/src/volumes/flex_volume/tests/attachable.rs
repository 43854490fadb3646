//! Volumes of a driver that attaches them.

use std::sync::Arc;
use std::time::Duration;

use keblet_skip::mounts::tmpfs;

use super::*;
use crate::volumes::testing::node;

const ATTACHED: &str = r#"echo '{"status": "Success", "device": "/dev/flex"}'"#;
const IN_USE: &str = "example.com/d/v";

/// Everything but the mounts for pods, which are left to the agent.
pub(super) const ATTACHING: [(&str, &str); 6] = [
    ("init", SUCCESS),
    ("attach", ATTACHED),
    ("waitforattach", ATTACHED),
    ("mountdevice", MOUNT),
    ("unmountdevice", UNMOUNT),
    ("detach", SUCCESS),
];

#[test]
fn a_volume_is_attached_once_and_detached_after_its_last_pod() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&ATTACHING);
        fixture.volumes.reconstruct().expect("nothing is there");
        assert!(fixture.in_use().is_empty());
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        let (calls, place) = (fixture.calls(), fixture.place());
        assert_eq!(calls.len(), 5, "{calls:?}");
        assert!(calls[0] == "init" && calls[1].starts_with("attach {") && calls[1].ends_with("} n1"), "{calls:?}");
        assert_eq!(arguments(&calls[2]), "waitforattach /dev/flex");
        assert_eq!(arguments(&calls[3]), format!("mountdevice {} /dev/flex", place.display()));
        assert!(options(&calls[3]).get("kubernetes.io/pod.uid").is_none(), "it is mounted for no pod");
        assert_eq!(arguments(&calls[4]), format!("mount {}", fixture.target("u-1", "v").display()));
        assert_eq!(fixture.in_use(), [IN_USE.to_owned()].into());
        fs::write(fixture.target("u-1", "v").join("file"), "kept").expect("writable");
        assert_eq!(group_of(&place), 77);

        fixture.set_up(&pod("u-2", json!({}))).expect("mounted");
        assert_eq!(fixture.commands(), [""; 0], "it is there, and mounts for pods are the agent's");
        assert!(fixture.target("u-2", "v").join("file").exists());
        fixture.tear_down(&fixture.volumes, "u-1").expect("unmounted");
        assert_eq!(fixture.release(&fixture.volumes), 0, "the second pod has it");
        assert_eq!(fixture.commands(), ["unmount"]);

        // The next agent finds it by the directories.
        let next = fixture.next();
        next.reconstruct().expect("read");
        assert_eq!(fixture.release(&next), 0, "the second pod has it");
        fixture.tear_down(&next, "u-2").expect("unmounted");
        assert_eq!(fixture.release(&next), 1);
        let expected = ["init".to_owned(), format!("unmount {}", fixture.target("u-2", "v").display())];
        let released = [format!("unmountdevice {}", place.display()), "detach v n1".to_owned()];
        assert_eq!(fixture.calls(), [expected, released].concat());
        assert!(!place.exists());
    });
}

#[test]
fn a_volume_that_the_control_plane_attaches_is_mounted_from_its_device() {
    in_private_mounts(|| {
        let fixture = Fixture::with(&ATTACHING, true, false);
        let attached = json!([{"name": IN_USE, "devicePath": "/dev/attached"}]);
        let status = json!({"volumesInUse": [IN_USE], "volumesAttached": attached});
        fixture.node.send_replace(Some(Arc::new(node(status))));
        fixture.does("waitforattach", r#"echo '{"status": "Not supported"}'"#);
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        let calls = fixture.calls();
        assert_eq!(arguments(&calls[1]), "waitforattach /dev/attached");
        assert_eq!(arguments(&calls[2]), format!("mountdevice {} /dev/attached", fixture.place().display()));
        assert_eq!(fixture.in_use(), [IN_USE.to_owned()].into());
        fixture.tear_down(&fixture.volumes, "u-1").expect("unmounted");
        assert_eq!(fixture.release(&fixture.volumes), 1);
        assert_eq!(fixture.commands(), ["unmount", "unmountdevice"]);
        assert!(fixture.in_use().is_empty());
    });
}

#[test]
fn a_volume_that_is_not_attached_is_not_mounted() {
    let fixture = Fixture::with(&ATTACHING, true, false);
    let failed = fixture.runtime.block_on(async {
        // The driver is called in real time, and then the control plane is waited for.
        let driver = fixture.volumes.node.flex_volumes.drivers.find("example.com/d").await;
        driver.expect("initialised");
        tokio::time::pause();
        fixture.volumes.set_up(&pod("u-1", json!({})), None).await.expect_err("not attached").remove(0)
    });
    let expected = "MountVolume.WaitForAttach failed for volume \"v\" : \
                    volume example.com/d/v was not attached to this node";
    assert!(failed.to_string().starts_with(expected) && failed.is_unattached(), "{failed}");
    assert_eq!(fixture.commands(), ["init"]);
}

/// Many drivers deny no capability, and only mount.
#[test]
fn a_driver_may_support_nothing_of_attaching() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&[("init", SUCCESS), ("mount", MOUNT), ("unmount", UNMOUNT)]);
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        assert_eq!(fixture.commands(), ["init", "attach", "waitforattach", "mountdevice", "mount"]);
        assert_eq!(fixture.release(&fixture.volumes), 0, "the pod has it");
        fixture.tear_down(&fixture.volumes, "u-1").expect("unmounted");
        assert_eq!(fixture.release(&fixture.volumes), 1);
        assert_eq!(fixture.commands(), ["unmount", "detach"]);
        assert!(!fixture.place().exists() && fixture.in_use().is_empty());
    });
}

#[test]
fn a_failed_step_is_named_and_what_was_attached_is_detached() {
    let fixture = Fixture::new(&ATTACHING);
    let failure = r#"echo '{"status": "Failure", "message": "no disk"}'"#;
    let waiting = "WaitForAttach";
    for (command, step) in [("mountdevice", "MountDevice"), ("waitforattach", waiting), ("attach", waiting)] {
        fixture.does(command, failure);
        let error = fixture.set_up(&pod("u-1", json!({}))).expect_err(command);
        let reason = format!("{command} command failed, status: Failure, reason: no disk");
        assert_eq!(error, format!("MountVolume.{step} failed for volume \"v\" : {reason}"));
    }
    fixture.tear_down(&fixture.volumes, "u-1").expect("nothing is mounted");
    fixture.calls();
    assert_eq!(fixture.release(&fixture.volumes), 1);
    assert_eq!(fixture.calls(), ["detach v n1"]);
}

/// As upstream: a pod can be deleted while its volume is formatted, and until that ends no other node gets the volume.
#[test]
fn a_teardown_does_not_wait_for_a_device_that_is_being_mounted() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&ATTACHING);
        let waits = "echo begun > \"$dir/begun\"; while [ -d \"$dir\" ] && [ ! -e \"$dir/go\" ]; do sleep 0.01; done";
        fixture.does("mountdevice", &format!("{waits}; {MOUNT}"));
        let (one, begun) = (pod("u-1", json!({})), fixture.folder().join("begun"));
        fixture.volumes.make_pod_dirs_here("u-1");
        let limit = Duration::from_secs(60);
        fixture.runtime.block_on(async {
            let mut set_up = Box::pin(fixture.volumes.set_up(&one, None));
            let called = async {
                while !begun.exists() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            let called = async {
                tokio::select! {
                    done = &mut set_up => panic!("{done:?}"),
                    () = called => {}
                }
            };
            tokio::time::timeout(limit, called).await.expect("the driver is called");
            drop(set_up);
            let torn_down = tokio::time::timeout(limit, fixture.volumes.tear_down("u-1")).await;
            torn_down.expect("it is not waited for").expect("the pod has nothing of it");
            // That of the teardown.
            fixture.volumes.until_unused().await;
        });
        fixture.release(&fixture.volumes);
        assert!(fixture.volumes.is_torn_down("u-1") && !fixture.commands().contains(&"detach".to_owned()));
        assert_eq!(fixture.in_use(), [IN_USE.to_owned()].into());

        fs::write(fixture.folder().join("go"), "").expect("a file");
        fixture.runtime.block_on(async {
            tokio::time::timeout(limit, fixture.volumes.until_unused()).await.expect("its end is announced");
        });
        assert!(is_mount_point(&fixture.place()).expect("it is there"));
        assert_eq!(fixture.release(&fixture.volumes), 1);
        assert_eq!(fixture.commands(), ["unmountdevice", "detach"]);
        assert!(fixture.in_use().is_empty());
    });
}

/// Else what one driver keeps there would have no disk of the node released.
#[test]
fn only_directories_of_drivers_are_searched_for_volumes() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&ATTACHING);
        fixture.set_up(&pod("u-1", json!({}))).expect("mounted");
        let of_driver = fixture.root.path().join("plugins/kubernetes.io/flexvolume/example.com/d");
        std::os::unix::fs::symlink(".", of_driver.join("loop")).expect("a link");
        tmpfs(&of_driver.join("state"));
        fs::create_dir_all(of_driver.join("state/mounts/v")).expect("folders");
        fs::create_dir_all(of_driver.join("a~b/mounts/v")).expect("folders");
        fs::write(of_driver.join("file"), "").expect("a file");
        fixture.next().reconstruct().expect("read");
        assert_eq!(fixture.release(&fixture.volumes), 0, "the pod has its volume, and there is no other");
        fixture.tear_down(&fixture.volumes, "u-1").expect("unmounted");
        assert_eq!(fixture.release(&fixture.volumes), 1);
        assert!(fixture.in_use().is_empty());
        crate::filesystem::unmount(&of_driver.join("state")).expect("unmounted");
    });
}

/// It would get the files of the other one.
#[test]
fn of_two_volumes_with_one_name_the_second_waits_for_the_release_of_the_first() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&ATTACHING);
        let [one, other] = ["a", "b"].map(|disk| json!({"options": {"disk": disk}}));
        fixture.set_up(&pod("u-1", one.clone())).expect("mounted");
        fixture.set_up(&pod("u-2", one)).expect("the same volume");
        let error = fixture.set_up(&pod("u-3", other.clone())).expect_err("another volume");
        let expected = "MountVolume.MountDevice failed for volume \"v\" : the node has another volume \"v\" of \
                        FlexVolume driver example.com/d, with another fsType or other options";
        assert_eq!(error, expected);
        for uid in ["u-1", "u-2"] {
            assert_eq!(fixture.release(&fixture.volumes), 0, "a pod has it");
            fixture.tear_down(&fixture.volumes, uid).expect("unmounted");
        }
        fixture.set_up(&pod("u-3", other.clone())).expect_err("it is mounted for the node yet");
        assert_eq!(fixture.release(&fixture.volumes), 1, "the pod that waits does not keep it");
        fixture.calls();
        fixture.set_up(&pod("u-3", other)).expect("mounted");
        assert_eq!(options(&fixture.calls()[2])["disk"], "b");
        fixture.tear_down(&fixture.volumes, "u-3").expect("unmounted");
        assert_eq!(fixture.release(&fixture.volumes), 1);
    });
}

#[test]
fn no_message_has_the_options_of_a_volume() {
    let fixture = Fixture::new(&ATTACHING);
    fixture.does("attach", "echo \"no: $2\"");
    for (length, expected) in [(10, "no JSON object with a status: exit status: 0"), (200_000, "list too long")] {
        let options = json!({"options": {"share": "x".repeat(length)}});
        let error = fixture.set_up(&pod(&format!("u-{length}"), options)).expect_err("it fails");
        assert!(error.contains(expected) && !error.contains("xxxxxxxxxx"), "{error}");
        fixture.tear_down(&fixture.volumes, &format!("u-{length}")).expect("nothing is mounted");
        fixture.release(&fixture.volumes);
    }
}
