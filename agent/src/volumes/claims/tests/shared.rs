//! Local volumes that several pods set up at the same time; how volumes of claims are counted.

use tokio::time::timeout;

use super::*;
use crate::volumes::bind_mount;
use crate::volumes::testing::node;

/// As upstream: while files are given to the group of one pod, which may take long, the next one waits for its mount.
#[test]
fn a_pod_waits_while_another_one_sets_the_same_local_volume_up() {
    in_private_mounts(|| {
        let mut fixture = Fixture::new();
        let dir = fixture.local_dir();
        fixture.binds(json!({"local": {"path": dir}}));
        fixture.volumes.make_pod_dirs_here("u-2");
        let (first, second) = (fixture.mount_path("u-1", "local-volume"), pod("u-2", Some(88), false));
        // By the first pod.
        let held = fixture.runtime.block_on(fixture.volumes.node.globals.lock(&dir));
        let waited = fixture.runtime.block_on(async {
            tokio::time::pause();
            let done = timeout(Duration::from_secs(60), fixture.volumes.set_up(&second, None)).await;
            tokio::time::resume();
            done.is_err()
        });
        let group = |path: &Path| fs::metadata(path).expect("it exists").gid();
        assert!(waited && !fixture.mount_path("u-2", "local-volume").exists());
        assert_eq!(group(&dir.join("file")), 0, "nothing is changed");

        fixture.runtime.block_on(bind_mount::make(&dir, &first, false)).expect("mounted");
        drop(held);
        fixture.set_up(&second).expect("mounted");
        assert_eq!(group(&dir.join("file")), 0, "it is the first pod's");
        let message = "The requested fsGroup is 88, but the volume pv has GID 0. The volume may not be shareable.";
        assert_eq!(fixture.events.take(), [format!("u-2 W AlreadyMountedVolume: {message}")]);
        for uid in ["u-1", "u-2"] {
            fixture.runtime.block_on(fixture.volumes.tear_down(uid)).expect("unmounted");
        }
    });
}

/// As upstream, which looks at the mounts of the path: else files in use would be given to the group of another pod.
#[test]
fn another_volume_of_the_same_directory_keeps_the_group_of_the_first_pod() {
    in_private_mounts(|| {
        let mut fixture = Fixture::new();
        let dir = fixture.local_dir();
        fixture.binds(json!({"local": {"path": dir}}));
        fixture.set_up(&pod("u-1", Some(77), false)).expect("mounted");
        let spec = json!({"local": {"path": dir}, "claimRef": {"uid": "c-1"}});
        fixture.reply("persistentvolumes/other", json!({"metadata": {"name": "other"}, "spec": spec}));
        let claim = json!({"metadata": {"name": "data", "namespace": "ns", "uid": "c-1"},
            "spec": {"volumeName": "other"}, "status": {"phase": "Bound"}});
        fixture.reply("namespaces/ns/persistentvolumeclaims/data", claim);
        let group = || fs::metadata(dir.join("file")).expect("it exists").gid();
        fixture.set_up(&pod("u-2", Some(88), false)).expect("mounted");
        assert_eq!(group(), 77, "it is the first pod's");
        let message = "The requested fsGroup is 88, but the volume other has GID 77. The volume may not be shareable.";
        assert_eq!(fixture.events.take(), [format!("u-2 W AlreadyMountedVolume: {message}")]);
        for uid in ["u-1", "u-2"] {
            fixture.runtime.block_on(fixture.volumes.tear_down(uid)).expect("unmounted");
        }
        fixture.set_up(&pod("u-3", Some(88), false)).expect("mounted");
        assert_eq!(group(), 88, "no other pod has it");
        fixture.runtime.block_on(fixture.volumes.tear_down("u-3")).expect("unmounted");
    });
}

/// What is only waited for has a limit, and ends with the pod.
#[test]
fn a_pod_that_waits_for_a_local_volume_fails_or_ends() {
    in_private_mounts(|| {
        let fixture = Fixture::new();
        let dir = fixture.local_dir();
        fixture.binds(json!({"local": {"path": dir}}));
        fixture.volumes.make_pod_dirs_here("u-2");
        let second = pod("u-2", None, false);
        let held = fixture.runtime.block_on(fixture.volumes.node.globals.lock(&dir));
        fixture.runtime.block_on(async {
            tokio::time::pause();
            let waits = timeout(Duration::from_secs(60), fixture.volumes.set_up(&second, None)).await;
            waits.expect_err("it waits for the first pod");
            let failed = fixture.volumes.set_up(&second, None).await.expect_err("the disk may hang");
            assert!(failed[0].to_string().contains("takes longer than 123s"), "{}", failed[0]);
            let waits = timeout(Duration::from_secs(60), fixture.volumes.set_up(&second, None)).await;
            waits.expect_err("it waits again");
            fixture.volumes.tear_down("u-2").await.expect("it is not waited for, and nothing was mounted");
        });
        drop(held);
    });
}

/// It may be formatted for another pod, which takes long.
#[test]
fn a_pod_that_waits_for_a_local_device_ends() {
    if !Path::new("/dev/loop-control").exists() {
        return keblet_skip::skip("needs loop devices");
    }
    in_private_mounts(|| {
        let fixture = Fixture::new();
        let device = LoopDevice::on(&fixture.root.path().join("disk"), 1 << 20);
        fixture.binds(json!({"local": {"path": device.0}}));
        fixture.volumes.make_pod_dirs_here("u-1");
        let place = fixture.root.path().join("plugins/kubernetes.io/local-volume/mounts/pv");
        let held = fixture.runtime.block_on(fixture.volumes.node.globals.lock(&place));
        fixture.runtime.block_on(async {
            tokio::time::pause();
            let one = pod("u-1", None, false);
            let waits = timeout(Duration::from_secs(60), fixture.volumes.set_up(&one, None)).await;
            waits.expect_err("it waits for the device");
            let began = tokio::time::Instant::now();
            fixture.volumes.tear_down("u-1").await.expect("it is not waited for");
            assert_eq!(began.elapsed().as_secs(), 0);
        });
        drop(held);
        assert!(!place.exists() && !fixture.mount_path("u-1", "local-volume").exists());
    });
}

/// As upstream: the pod may have no permission to read the files.
#[test]
fn another_group_of_a_pod_that_only_reads_is_reported() {
    in_private_mounts(|| {
        let mut fixture = Fixture::new();
        fixture.binds(json!({"local": {"path": fixture.local_dir()}}));
        fixture.set_up(&pod("u-1", Some(77), false)).expect("mounted");
        fixture.set_up(&pod("u-2", Some(77), true)).expect("mounted");
        assert_eq!(fixture.events.take(), [""; 0]);
        fixture.set_up(&pod("u-3", Some(88), true)).expect("mounted");
        let message = "The requested fsGroup is 88, but the volume pv has GID 77. The volume may not be shareable.";
        assert_eq!(fixture.events.take(), [format!("u-3 W AlreadyMountedVolume: {message}")]);
        for uid in ["u-1", "u-2", "u-3"] {
            fixture.runtime.block_on(fixture.volumes.tear_down(uid)).expect("unmounted");
        }
    });
}

/// Else a pod would start with an empty directory instead of the disk that another node has.
#[test]
fn a_volume_of_some_nodes_is_not_set_up_before_this_one_is_known() {
    let mut fixture = Fixture::new();
    let (objects, known) = fixture.runtime.block_on(async { objects(&fixture.replies) });
    known.send_replace(None);
    fixture.volumes = Volumes::new(fixture.root.path()).with_objects(objects, BTreeMap::new());
    let zone = json!({"key": "zone", "operator": "In", "values": ["a"]});
    let affinity = json!({"required": {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}});
    fixture.binds(json!({"hostPath": {"path": "/"}, "nodeAffinity": affinity}));
    let error = fixture.set_up(&pod("u-1", None, false)).expect_err("not yet");
    assert!(error.starts_with("MountVolume.NodeAffinity check failed for volume \"pv\" : "), "{error}");
    known.send_replace(Some(Arc::new(node(json!({})))));
    fixture.set_up(&pod("u-1", None, false)).expect("it is one of them");
}

/// As upstream: the text is that of devices, the reason of the event that of mounts. Mounts are counted as attempts on the
/// plugin of the persistent volume, maps are not.
#[test]
fn volumes_of_other_nodes_are_not_set_up() {
    let mut fixture = Fixture::new();
    let metrics = Metrics::new();
    fixture.volumes = fixture.volumes.with_metrics(metrics.clone());
    let elsewhere = json!({"required": {"nodeSelectorTerms":
        [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}]}});
    fixture.binds(json!({"local": {"path": "/dev/null"}, "volumeMode": "Block", "nodeAffinity": &elsewhere}));
    let pod = using_device(pod("u-1", None, false));
    let failed = fixture.runtime.block_on(fixture.volumes.set_up(&pod, None)).expect_err("of other nodes");
    let expected = "MapVolume.NodeAffinity check failed for volume \"pv\" : no matching NodeSelectorTerms";
    assert_eq!((failed[0].to_string().as_str(), failed[0].reason()), (expected, "FailedMount"));
    assert_eq!(samples(&metrics, "storage_operation"), [""; 0]);

    fixture.binds(json!({"local": {"path": "/"}, "nodeAffinity": elsewhere}));
    let expected = "MountVolume.NodeAffinity check failed for volume \"pv\" : no matching NodeSelectorTerms";
    assert_eq!(fixture.set_up(&self::pod("u-2", None, false)), Err(expected.to_owned()));
    assert_eq!(samples(&metrics, "storage_operation"), [operation("volume_mount", "local-volume", "fail-unknown", 1)]);
}

/// As upstream, a claim counts once its persistent volume is known, as a volume of that one's plugin.
#[test]
fn claims_are_counted_by_the_plugin_of_their_volume() {
    let fixture = Fixture::new();
    let wanted = |pod: &Pod| fixture.volumes.plugins_wanted(pod).collect::<Vec<_>>();
    for (uid, source, expected) in [
        ("u-1", json!({"csi": {"driver": "d.example", "volumeHandle": "h"}}), "kubernetes.io/csi:d.example"),
        ("u-2", json!({"hostPath": {"path": "/"}}), "kubernetes.io/host-path"),
    ] {
        let pod = pod(uid, None, false);
        assert!(wanted(&pod).is_empty(), "{uid}: the volume is not known");
        let volume = json!({"metadata": {"name": "pv"}, "spec": source});
        let source = Source::of(&serde_json::from_value(volume).expect("a volume"));
        fixture.volumes.node.claims.put(uid, "v", BoundVolume::plain("pv", source)).expect("not exclusive");
        assert_eq!(wanted(&pod), [expected]);
    }
    let mut inline = pod("u-3", None, false);
    let volume = &mut inline.spec.as_mut().expect("a spec").volumes.as_mut().expect("one")[0];
    *volume = serde_json::from_value(json!({"name": "v", "csi": {"driver": "d.example"}})).expect("a volume");
    assert_eq!(wanted(&inline), ["kubernetes.io/csi:d.example"]);
}
