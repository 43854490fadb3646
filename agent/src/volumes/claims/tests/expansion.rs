//! Volumes whose persistent volume has more than the claim.

use super::*;
use crate::host_program::testing::ScriptedPrograms;
use crate::volumes::testing::Patches;
use crate::volumes::testing::patched_objects;
use crate::volumes::testing::slow_objects;

const CLAIM: &str = "namespaces/ns/persistentvolumeclaims/data";

/// A fixture whose patches are kept.
fn patched() -> (Fixture, Patches) {
    let mut fixture = Fixture::new();
    let (recorder, events) = listening();
    let (objects, patches) = fixture.runtime.block_on(async { patched_objects(&fixture.replies) });
    let volumes = Volumes::new(fixture.root.path()).with_recorder(recorder).with_objects(objects, BTreeMap::new());
    (fixture.volumes, fixture.events) = (volumes, events);
    (fixture, patches)
}

/// The claim is bound to a local volume; both have these sizes.
fn sized(fixture: &Fixture, path: &Path, claim: &str, volume: &str) {
    stated(fixture, path, json!({"capacity": {"storage": claim}}), volume);
}

/// As [`sized`], with more in the claim's status.
fn stated(fixture: &Fixture, path: &Path, mut status: Value, volume: &str) {
    let spec = json!({"local": {"path": path}, "capacity": {"storage": volume}, "claimRef": {"uid": "c-1"}});
    fixture.reply("persistentvolumes/pv", json!({"metadata": {"name": "pv"}, "spec": spec}));
    status["phase"] = "Bound".into();
    let mut claim = json!({"metadata": {"name": "data", "namespace": "ns", "uid": "c-1", "resourceVersion": "7"},
        "spec": {"volumeName": "pv", "resources": {"requests": {"storage": volume}}}, "status": status});
    fixture.reply(CLAIM, claim.clone());
    claim["metadata"]["resourceVersion"] = "8".into();
    fixture.reply(&format!("{CLAIM}/status"), claim);
}

/// Bodies of the patches since the last time, all of which are of the claim's status.
fn taken(patches: &Patches) -> Vec<Value> {
    let taken = std::mem::take(&mut *patches.lock().expect("unpoisoned"));
    let of_claim = |(path, body): (String, Value)| {
        assert_eq!(path, format!("/api/v1/{CLAIM}/status"));
        body
    };
    taken.into_iter().map(of_claim).collect()
}

/// Expands the local volume at this path, which is mounted for a pod, without a program of the node.
fn expand(fixture: &Fixture, path: &Path, read_only: bool, is_new: bool) -> Result<bool, String> {
    let source = Source::of(
        &serde_json::from_value(json!({"metadata": {}, "spec": {"local": {"path": path}}})).expect("a volume"),
    );
    let mut pod = pod("u-1", None, read_only);
    pod.spec.as_mut().expect("a spec").node_name = Some("n1".to_owned());
    let volume = ClaimedVolume {
        objects: fixture.volumes.objects.clone(),
        recorder: fixture.volumes.recorder.clone(),
        flex_volumes: fixture.volumes.node.flex_volumes.clone(),
        pod,
        claim: "data".to_owned(),
        used: Arc::new(BoundVolume { read_only, ..BoundVolume::plain("pv", source) }),
        place: "/m".into(),
        is_new,
    };
    let programs = ScriptedPrograms::new(|_| Some((1, String::new())));
    let done = fixture.runtime.block_on(volume.expand(&programs)).map_err(|error| error.to_string());
    assert_eq!(programs.take(), [""; 0]);
    done
}

/// As upstream: a directory has what its file system has, and the claim gets the new capacity.
#[test]
fn the_claim_of_a_directory_gets_the_capacity_of_its_volume() {
    let (mut fixture, patches) = patched();
    let dir = fixture.local_dir();
    sized(&fixture, &dir, "2Gi", "2Gi");
    assert_eq!(expand(&fixture, &dir, false, true), Ok(false));
    sized(&fixture, &dir, "1Gi", "2Gi");
    assert_eq!(expand(&fixture, &dir, false, true), Ok(true));
    let expected = json!({"metadata": {"resourceVersion": "7"}, "status": {"capacity": {"storage": "2Gi"}}});
    assert_eq!(taken(&patches), [expected]);
    let event = "N FileSystemResizeSuccessful: MountVolume.NodeExpandVolume succeeded for volume \"pv\" n1";
    assert_eq!(fixture.events.take(), [format!("u-1 {event}"), format!("data {event}")]);
}

#[test]
fn a_recorded_expansion_is_begun_and_finished_in_the_claim() {
    let (fixture, patches) = patched();
    let dir = fixture.local_dir();
    let status = |step: &str| {
        json!({"capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "2Gi"},
            "allocatedResourceStatuses": {"storage": step}})
    };
    stated(&fixture, &dir, status("ControllerResizeInProgress"), "2Gi");
    assert_eq!((expand(&fixture, &dir, false, false), taken(&patches).len()), (Ok(false), 0));
    stated(&fixture, &dir, status("NodeResizePending"), "2Gi");
    assert_eq!(expand(&fixture, &dir, false, false), Ok(true));
    let begun = json!({"metadata": {"resourceVersion": "7"},
        "status": {"allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}}});
    let finished = json!({"metadata": {"resourceVersion": "8"},
        "status": {"capacity": {"storage": "2Gi"}, "allocatedResourceStatuses": {"storage": null}}});
    assert_eq!(taken(&patches), [begun, finished]);

    stated(&fixture, &dir.join("file"), status("NodeResizeInProgress"), "2Gi");
    let error = expand(&fixture, &dir.join("file"), false, false).expect_err("a plain file");
    assert!(error.ends_with("only directory and block device are supported"), "{error}");
    let failed = taken(&patches).remove(0);
    assert_eq!(failed["status"]["conditions"][0]["type"], "NodeResizeError");
    assert_eq!(failed["status"]["conditions"][0]["message"], format!("failed to expand pvc with {error}"));
}

/// The texts of upstream differ: the other one is that of an expansion that no controller records.
#[test]
fn a_recorded_expansion_that_cannot_be_finished_has_the_text_of_upstream() {
    let (fixture, patches) = patched();
    let dir = fixture.local_dir();
    let status = json!({"capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "2Gi"},
        "allocatedResourceStatuses": {"storage": "NodeResizeInProgress"}});
    stated(&fixture, &dir, status, "2Gi");
    fixture.replies.lock().expect("unpoisoned").remove(&format!("/api/v1/{CLAIM}/status"));
    let expected = "mountVolume.NodeExpandVolume update pvc status failed: no";
    assert_eq!(expand(&fixture, &dir, false, false), Err(expected.to_owned()));
    assert_eq!(taken(&patches).len(), 1);
}

#[test]
fn what_is_only_read_is_not_expanded() {
    let (mut fixture, patches) = patched();
    let dir = fixture.local_dir();
    sized(&fixture, &dir, "1Gi", "2Gi");
    assert_eq!((expand(&fixture, &dir, true, true), taken(&patches).len()), (Ok(false), 0));
    let event = "W FileSystemResizeFailed: MountVolume.NodeExpandVolume failed for volume \"pv\" requested read-only";
    let event = format!("{event} file system");
    assert_eq!(fixture.events.take(), [format!("u-1 {event}"), format!("data {event}")]);
}

#[test]
fn a_claim_that_cannot_be_read_keeps_a_pod_from_starting_and_no_pod_that_runs() {
    let (fixture, _) = patched();
    let dir = fixture.local_dir();
    let expected = "mountVolume.NodeExpandVolume get PVC failed : persistentvolumeclaims \"data\" not found";
    assert_eq!(expand(&fixture, &dir, false, true), Err(expected.to_owned()));
    assert_eq!(expand(&fixture, &dir, false, false), Ok(false));
}

#[test]
fn a_pod_is_not_started_before_its_volume_is_expanded() {
    in_private_mounts(|| {
        let (mut fixture, patches) = patched();
        let dir = fixture.local_dir();
        sized(&fixture, &dir, "1Gi", "2Gi");
        let status = format!("/api/v1/{CLAIM}/status");
        let reply = fixture.replies.lock().expect("unpoisoned").remove(&status).expect("a reply");
        fixture.volumes.make_pod_dirs_here("u-1");
        let pod = pod("u-1", None, false);
        let failed = fixture.runtime.block_on(fixture.volumes.set_up(&pod, None)).expect_err("not patched").remove(0);
        let expected = "MountVolume.Setup failed while expanding volume for volume \"pv\" : \
                        mountVolume.NodeExpandVolume update PVC status failed : no";
        assert_eq!((failed.to_string().as_str(), failed.reason()), (expected, "FailedMount"));
        fixture.replies.lock().expect("unpoisoned").insert(status, reply);
        fixture.set_up(&pod).expect("expanded");
        assert_eq!(taken(&patches).len(), 2);
        assert!(!fixture.volumes.can_change(&pod), "nothing is read of a directory in use");
        fixture.events.take();
        fixture.set_up(&pod).expect("the restart of a container");
        assert_eq!((taken(&patches).len(), fixture.events.take()), (0, Vec::new()));
        fixture.runtime.block_on(fixture.volumes.tear_down("u-1")).expect("unmounted");
    });
}

#[test]
fn a_teardown_does_not_wait_for_the_api_server_during_an_expansion() {
    in_private_mounts(|| {
        let fixture = Fixture::new();
        sized(&fixture, &fixture.local_dir(), "1Gi", "2Gi");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(async {
            let (objects, asked) = slow_objects(&fixture.replies, Duration::from_secs(3));
            let volumes = Volumes::new(fixture.root.path()).with_objects(objects, BTreeMap::new());
            volumes.make_pod_dirs_here("u-1");
            let pod = pod("u-1", None, false);
            let set_up = tokio::time::timeout(Duration::from_secs(7), volumes.set_up(&pod, None));
            set_up.await.expect_err("claim and volume are read again after six seconds");
            assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 3);
            let began = tokio::time::Instant::now();
            volumes.tear_down("u-1").await.expect("unmounted");
            assert_eq!(began.elapsed().as_secs(), 0);
        });
    });
}

#[test]
fn a_container_restarts_while_the_size_of_its_volume_is_read() {
    in_private_mounts(|| {
        let fixture = Fixture::new();
        sized(&fixture, &fixture.local_dir(), "2Gi", "2Gi");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(async {
            let (objects, asked) = slow_objects(&fixture.replies, Duration::from_secs(3));
            let volumes = Volumes::new(fixture.root.path()).with_objects(objects, BTreeMap::new());
            volumes.make_pod_dirs_here("u-1");
            let pod = pod("u-1", None, false);
            volumes.set_up(&pod, None).await.expect("mounted");
            // As if it were a device: a directory in use is not expanded.
            let known = volumes.node.claims.get("u-1", "v").expect("it is mounted");
            let used = BoundVolume { is_directory: false, ..(*known).clone() };
            volumes.node.claims.put("u-1", "v", used).expect("not exclusive");
            let mut refresh = Box::pin(volumes.refresh(&pod, None));
            tokio::time::timeout(Duration::from_secs(1), &mut refresh).await.expect_err("the claim is read");
            assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 3);
            let began = tokio::time::Instant::now();
            volumes.set_up(&pod, None).await.expect("it is mounted");
            assert_eq!(began.elapsed().as_secs(), 0);
            refresh.await.expect("it has its size");
            assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 4);
            volumes.tear_down("u-1").await.expect("unmounted");
        });
    });
}
