//! Claims on volumes of the driver that have more than the claim states.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use super::attachable::ATTACHING;
use super::*;
use crate::host_program::testing::ScriptedPrograms;
use crate::recorder::testing::RecordedEvents;
use crate::recorder::testing::listening;
use crate::volumes::Volumes;
use crate::volumes::flex_volume::FlexExpansion;
use crate::volumes::flex_volume::FlexSource;
use crate::volumes::testing::Patches;
use crate::volumes::testing::patched_objects;

const CLAIM: &str = "/api/v1/namespaces/ns/persistentvolumeclaims/data";
const FAILURE: &str = r#"echo '{"status": "Failure", "message": "no room"}'"#;
const FAILED: &str = "expandfs command failed, status: Failure, reason: no room";

/// An agent on the node of this fixture, its events, and its patches.
fn agent(fixture: &Fixture) -> (Volumes, RecordedEvents, Patches) {
    let (recorder, events) = listening();
    let (objects, patches) = fixture.runtime.block_on(async { patched_objects(&fixture.replies) });
    (fixture.next().with_recorder(recorder).with_objects(objects, BTreeMap::new()), events, patches)
}

/// The claim `data` has 1Gi, and its persistent volume this capacity.
fn bind_sized(fixture: &Fixture, capacity: &str) {
    bind(fixture, json!({"flexVolume": {"driver": fixture::DRIVER}, "capacity": {"storage": capacity}}));
    let mut replies = fixture.replies.lock().expect("unpoisoned");
    let mut claim = replies[CLAIM].clone();
    claim["status"]["capacity"] = json!({"storage": "1Gi"});
    replies.insert(CLAIM.to_owned(), claim.clone());
    replies.insert(format!("{CLAIM}/status"), claim);
}

/// A pod that uses the claim.
fn using(uid: &str) -> Pod {
    let mut pod = with_volume(uid, json!({"name": "v", "persistentVolumeClaim": {"claimName": "data"}}));
    pod.spec.as_mut().expect("a spec").node_name = Some("n1".to_owned());
    pod
}

/// What follows the options of a call.
fn after_options(call: &str) -> &str {
    call.rsplit_once('}').map_or("", |(_, rest)| rest)
}

fn commands_of(calls: &[String]) -> Vec<&str> {
    calls.iter().filter_map(|call| call.split(' ').next()).collect()
}

#[test]
fn a_driver_expands_the_volume_of_a_claim_before_its_pod_starts_and_in_use() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&[("init", MOUNTS), ("mount", MOUNT), ("expandfs", FAILURE)]);
        bind_sized(&fixture, "2Gi");
        let (volumes, mut events, patches) = agent(&fixture);
        let (one, target) = (using("u-1"), fixture.target("u-1", "pv"));
        let error = fixture.set_up_by(&volumes, &one).expect_err("not expanded");
        assert_eq!(error, format!("MountVolume.Setup failed while expanding volume for volume \"pv\" : {FAILED}"));
        assert_eq!(fixture.commands(), ["init", "mount", "expandfs"]);
        assert!(events.take().is_empty() && patches.lock().expect("unpoisoned").is_empty());

        fixture.does("expandfs", SUCCESS);
        fixture.set_up_by(&volumes, &one).expect("expanded");
        let calls = fixture.calls();
        assert!(calls.len() == 1 && calls[0].starts_with("expandfs {"), "{calls:?}");
        assert!(calls[0].contains(r#""kubernetes.io/pvOrVolumeName":"pv""#) && !calls[0].contains("pod.uid"));
        assert_eq!(after_options(&calls[0]), format!("  {} 2147483648 1073741824", target.display()));
        let event = "N FileSystemResizeSuccessful: MountVolume.NodeExpandVolume succeeded for volume \"pv\" n1";
        assert_eq!(events.take(), [format!("u-1 {event}"), format!("data {event}")]);
        let patched = std::mem::take(&mut *patches.lock().expect("unpoisoned"));
        assert_eq!(patched.len(), 1);
        assert_eq!(patched[0].0, format!("{CLAIM}/status"));
        assert_eq!(patched[0].1["status"], json!({"capacity": {"storage": "2Gi"}}));

        fixture.set_up_by(&volumes, &one).expect("the restart of a container");
        assert_eq!(fixture.commands(), [""; 0]);
        assert!(volumes.can_change(&one), "its capacity may grow");
        fixture.does("expandfs", FAILURE);
        let refresh = || fixture.runtime.block_on(volumes.refresh(&one, None));
        let failed = refresh().expect_err("no room").remove(0);
        let expected = format!("NodeExpandVolume.NodeExpandVolume failed for volume \"pv\" : {FAILED}");
        assert_eq!((failed.to_string(), failed.reason()), (expected, "VolumeResizeFailed"));
        assert!(is_mount_point(&target).expect("the pod has it"));
        fixture.does("expandfs", SUCCESS);
        refresh().expect("expanded");
        assert_eq!(fixture.commands(), ["expandfs", "expandfs"]);
    });
}

#[test]
fn a_driver_that_expands_nothing_is_not_called_for_that() {
    in_private_mounts(|| {
        let does = r#"echo '{"status": "Success", "capabilities": {"attach": false, "requiresFSResize": false}}'"#;
        let fixture = Fixture::new(&[("init", does), ("mount", MOUNT), ("expandfs", SUCCESS)]);
        bind_sized(&fixture, "2Gi");
        let (volumes, _events, patches) = agent(&fixture);
        fixture.set_up_by(&volumes, &using("u-1")).expect("mounted");
        assert_eq!(fixture.commands(), ["init", "mount"]);
        assert!(!volumes.can_change(&using("u-1")) && patches.lock().expect("unpoisoned").is_empty());
    });
}

#[test]
fn an_expansion_has_the_device_that_the_driver_has_attached() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&ATTACHING);
        fixture.does("expandfs", SUCCESS);
        bind_sized(&fixture, "2Gi");
        let (volumes, _events, _patches) = agent(&fixture);
        fixture.set_up_by(&volumes, &using("u-1")).expect("mounted and expanded");
        let (calls, target) = (fixture.calls(), fixture.target("u-1", "pv"));
        assert_eq!(commands_of(&calls), ["init", "attach", "waitforattach", "mountdevice", "mount", "expandfs"]);
        let expected = format!(" /dev/flex {} 2147483648 1073741824", target.display());
        assert_eq!(after_options(&calls[5]), expected);

        // The next agent does not know it, until the driver has named it once more.
        let (next, _events, _patches) = agent(&fixture);
        fixture.set_up_by(&next, &using("u-1")).expect("it is there");
        let calls = fixture.calls();
        assert_eq!(commands_of(&calls), ["init", "attach", "waitforattach", "expandfs"]);
        assert_eq!(after_options(&calls[3]), expected);
        fixture.runtime.block_on(next.refresh(&using("u-1"), None)).expect("expanded");
        let calls = fixture.calls();
        assert_eq!(commands_of(&calls), ["expandfs"]);
        assert_eq!(after_options(&calls[0]), expected);
    });
}

#[test]
fn the_claim_follows_if_the_driver_does_not_support_the_call_and_has_no_device() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&MOUNT_ONLY);
        bind_sized(&fixture, "2Gi");
        let (volumes, _events, patches) = agent(&fixture);
        for (uid, expected) in [("u-1", vec!["init", "mount", "expandfs"]), ("u-2", vec!["mount"])] {
            fixture.set_up_by(&volumes, &using(uid)).expect("mounted");
            assert_eq!(fixture.commands(), expected, "what is not supported is not tried again");
            assert_eq!(std::mem::take(&mut *patches.lock().expect("unpoisoned")).len(), 1);
        }
    });
}

#[test]
fn what_the_driver_does_not_expand_the_agent_does() {
    in_private_mounts(|| {
        let fixture = Fixture::new(&ATTACHING);
        let attached = r#"echo '{"status": "Success", "device": "/dev/expanded"}'"#;
        fixture.does("attach", attached);
        fixture.does("waitforattach", attached);
        bind_sized(&fixture, "1Gi");
        fixture.set_up(&using("u-1")).expect("mounted");
        assert!(!fixture.commands().contains(&"expandfs".to_owned()), "it is large enough");

        let held = |call: &str| call.starts_with("blkid").then(|| (0, "TYPE=ext4\n".to_owned()));
        let programs = Arc::new(ScriptedPrograms::new(held));
        let mut flex_volumes = fixture.volumes.node.flex_volumes.clone();
        flex_volumes.drivers.programs = programs.clone();
        let source = FlexSource { driver: fixture::DRIVER.to_owned(), ..FlexSource::default() };
        let expand = |uid: &str| {
            let objects = &fixture.volumes.objects;
            let wanted = FlexExpansion { uid, volume: "pv", source: &source, objects, to: 2 << 30, from: 1 << 30 };
            let expanding = Box::pin(flex_volumes.expand(wanted));
            let done = async { tokio::time::timeout(Duration::from_secs(60), expanding).await };
            fixture.runtime.block_on(done).expect("nothing is waited for").map_err(|error| error.to_string())
        };
        assert_eq!(expand("u-2"), Err("the volumes of the pod are to be torn down".to_owned()));
        assert_eq!((fixture.commands(), programs.take()), (Vec::new(), Vec::new()), "the pod has no volume");
        // As while a driver unmounts it, which may never end.
        let unmounting = fixture.runtime.block_on(flex_volumes.globals.lock(&fixture.target("u-1", "pv")));
        assert_eq!(expand("u-1"), Err("the volumes of the pod are to be torn down".to_owned()));
        assert_eq!((fixture.commands(), programs.take()), (Vec::new(), Vec::new()), "it is not waited for");
        drop(unmounting);
        assert_eq!(expand("u-1"), Ok(()));
        assert_eq!(fixture.commands(), ["expandfs"]);
        let calls = programs.take();
        assert_eq!(calls.last().map(String::as_str), Some("resize2fs /dev/expanded"), "{calls:?}");
    });
}
