//! Set-ups that take long, on paused time, those of volumes with one claim, and what metrics count of them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;

use futures_util::future::BoxFuture;
use keblet_skip::mounts::in_private_mounts;
use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;
use tokio::time::timeout;

use super::*;
use crate::metrics::Metrics;
use crate::volumes::plugin::Attributes;
use crate::volumes::plugin::Plugins;
use crate::volumes::teardown::VolumeOnDisk;
use crate::volumes::testing::Gated;
use crate::volumes::testing::LoopDevice;
use crate::volumes::testing::Replies;
use crate::volumes::testing::objects;
use crate::volumes::testing::slow_objects;
use crate::volumes::tests::make;
use crate::volumes::tests::operation;
use crate::volumes::tests::samples;
use crate::volumes::tests::with_empty_dir;

const LONG: Duration = Duration::from_secs(600);

#[tokio::test(start_paused = true)]
async fn a_container_waits_two_seconds_for_the_refresh_of_what_is_set_up() {
    for (refreshes, expected) in [(true, Some(REFRESH_LIMIT)), (false, None)] {
        let gated = Gated { refreshes, ..Gated::default() };
        let volumes = gated.volumes(Path::new("/r"));
        let pod = with_empty_dir();
        let took = async || {
            let began = Instant::now();
            let done = timeout(LONG, volumes.set_up(&pod, None)).await;
            done.is_ok_and(|done| done.is_ok()).then(|| began.elapsed().as_secs())
        };
        assert_eq!(took().await, None, "without content no container starts");
        // The first one goes on.
        gated.set_ups.add_permits(2);
        assert_eq!(took().await, Some(0));
        let expected = expected.map(|limit| limit.as_secs());
        assert_eq!((took().await, took().await), (expected, expected), "{refreshes}");
        gated.set_ups.add_permits(2);
        assert_eq!(took().await, Some(0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_refresh_takes_the_time_it_needs_and_reports_what_never_ends() {
    let gated = Gated::default();
    let volumes = gated.volumes(Path::new("/r"));
    let began = Instant::now();
    let failed = volumes.refresh(&with_empty_dir(), None).await.expect_err("it never ends").remove(0);
    assert!(matches!(failed.error, VolumeError::GoesOn(limit) if limit == SET_UP_TIMEOUT), "{failed}");
    assert_eq!(began.elapsed().as_secs(), SET_UP_TIMEOUT.as_secs());
}

/// A plugin of emptyDirs whose content expires, as many seconds after the epoch as the name of the volume says.
#[derive(Debug)]
struct Expiring;

impl VolumePlugin for Expiring {
    fn name(&self) -> &'static str {
        "kubernetes.io/empty-dir"
    }

    fn supports(&self, volume: &Volume) -> bool {
        volume.empty_dir.is_some()
    }

    fn attributes(&self) -> Attributes {
        Attributes { refreshes: true, ..Attributes::default() }
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        let seconds = target.volume.name.parse().ok();
        let refresh_at = seconds.map(|seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        Box::pin(std::future::ready(Ok(Ready { refresh_at })))
    }

    fn tear_down<'a>(&'a self, _volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

#[tokio::test]
async fn the_content_that_expires_first_says_when_the_next_refresh_is_due() {
    let mut volumes = Volumes::new(Path::new("/r"));
    volumes.plugins = Plugins::only(Expiring);
    let names = ["30", "never", "10", "20"];
    let mount = |name: &str| json!({"name": name, "mountPath": format!("/{name}")});
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u-1"},
        "spec": {
            "volumes": names.map(|name| json!({"name": name, "emptyDir": {}})),
            "containers": [{"name": "c", "volumeMounts": names.map(mount)}],
        },
    }))
    .expect("a pod");
    let refresh_at = Some(SystemTime::UNIX_EPOCH + Duration::from_secs(10));
    let due = volumes.refresh(&pod, None).await.expect("refreshed");
    assert_eq!(due, RefreshDue { refresh_at, refresh_after: None });
}

/// A claim `data` that is bound to a persistent volume `pv` with this source.
fn binds(replies: &Replies, source: Value) {
    let mut spec = source;
    spec["claimRef"] = json!({"uid": "c-1"});
    let claim = json!({"metadata": {"name": "data", "namespace": "ns", "uid": "c-1"}, "spec": {"volumeName": "pv"},
        "status": {"phase": "Bound"}});
    let mut replies = replies.lock().expect("unpoisoned");
    replies.insert("/api/v1/namespaces/ns/persistentvolumeclaims/data".to_owned(), claim);
    replies.insert("/api/v1/persistentvolumes/pv".to_owned(), json!({"metadata": {"name": "pv"}, "spec": spec}));
}

/// A pod with volumes of these names, all of the claim `data`.
fn with_claim(names: &[&str]) -> Pod {
    let volume = |name: &&str| json!({"name": name, "persistentVolumeClaim": {"claimName": "data"}});
    let mount = |name: &&str| json!({"name": name, "mountPath": format!("/{name}")});
    let (volumes, mounts): (Vec<_>, Vec<_>) = names.iter().map(|name| (volume(name), mount(name))).unzip();
    serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u-1"},
        "spec": {"volumes": volumes, "containers": [{"name": "c", "volumeMounts": mounts}]},
    }))
    .expect("a pod")
}

#[test]
fn a_claim_that_a_pod_has_twice_is_mounted_once() {
    in_private_mounts(|| {
        let (root, replies) = (tempfile::tempdir().expect("a folder"), Replies::default());
        let disk = root.path().join("disk");
        std::fs::create_dir(&disk).expect("a folder");
        binds(&replies, json!({"local": {"path": disk}}));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let volumes = Volumes::new(root.path()).with_objects(objects(&replies).0, BTreeMap::new());
            volumes.set_up(&with_claim(&["v", "w"]), None).await.expect("mounted");
        });
        let mounted = root.path().join("pods/u-1/volumes/kubernetes.io~local-volume/pv");
        crate::filesystem::unmount(&mounted).expect("unmounted");
        assert!(!crate::filesystem::is_mount_point(&mounted).expect("inspected"), "there was one mount");
    });
}

/// As after a restart of the agent: a predecessor has set up the volumes of the pod.
#[tokio::test(start_paused = true)]
async fn a_claim_is_read_once_however_slowly_the_api_server_answers() {
    let (root, replies) = (tempfile::tempdir().expect("a folder"), Replies::default());
    binds(&replies, json!({"hostPath": {"path": root.path(), "type": "Directory"}}));
    let pod = with_claim(&["v"]);
    let (objects, asked) = slow_objects(&replies, Duration::from_secs(3));
    let volumes = Volumes::new(root.path()).with_objects(objects, BTreeMap::new());
    assert!(volumes.can_change(&pod));
    let began = Instant::now();
    volumes.refresh(&pod, None).await.expect("it is known now");
    assert_eq!((began.elapsed().as_secs(), asked.load(Ordering::Relaxed)), (6, 2));
    assert!(!volumes.can_change(&pod));
}

#[tokio::test]
async fn what_was_given_up_is_completed_before_the_teardown() {
    for is_refresh in [false, true] {
        let (_root, volumes) = make();
        let metrics = Metrics::new();
        let volumes = volumes.with_metrics(metrics.clone());
        let pod = with_empty_dir();
        let mut given_up = Box::pin(async {
            match is_refresh {
                true => volumes.refresh(&pod, None).await.map(drop),
                false => volumes.set_up(&pod, None).await,
            }
        });
        assert!(futures_util::poll!(&mut given_up).is_pending());
        drop(given_up);
        volumes.tear_down("u-1").await.expect("gone");
        assert!(volumes.is_torn_down("u-1"));
        let operations = ["volume_mount", "volume_unmount"].map(|name| operation(name, "empty-dir", "success", 1));
        assert_eq!(samples(&metrics, "storage_operation"), operations, "{is_refresh}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_teardown_waits_for_work_and_not_for_what_is_only_waited_for() {
    let root = tempfile::tempdir().expect("a folder");
    for (gives_up, expected) in [(true, 0), (false, SET_UP_TIMEOUT.as_secs())] {
        let volumes = Gated { gives_up, ..Gated::default() }.volumes(root.path());
        let pod = with_empty_dir();
        let mut given_up = Box::pin(volumes.set_up(&pod, None));
        assert!(futures_util::poll!(&mut given_up).is_pending());
        drop(given_up);
        let began = Instant::now();
        assert_eq!(volumes.tear_down("u-1").await.is_ok(), gives_up);
        assert_eq!(began.elapsed().as_secs(), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_mount_is_timed_from_its_first_request_on() {
    for (is_over, bucket) in [(false, "120"), (true, "0.1")] {
        let (root, volumes) = make();
        let metrics = Metrics::new();
        let volumes = volumes.with_metrics(metrics.clone());
        let path = root.path().join("late");
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "ns", "uid": "u-1"},
            "spec": {
                "volumes": [{"name": "h", "hostPath": {"path": path, "type": "Directory"}}],
                "containers": [{"name": "c", "volumeMounts": [{"name": "h", "mountPath": "/h"}]}],
            },
        }))
        .expect("a pod");
        volumes.set_up(&pod, None).await.expect_err("it is not there yet");
        tokio::time::advance(Duration::from_secs(70)).await;
        if is_over {
            volumes.tear_down("u-1").await.expect("gone");
        }
        std::fs::create_dir(&path).expect("a folder");
        for _ in 0..2 {
            volumes.set_up(&pod, None).await.expect("mounted");
        }
        let labels = r#"operation_name="overall_volume_mount",plugin_name="kubernetes.io/host-path""#;
        let count = format!("volume_operation_total_seconds_count{{{labels}}} 1");
        assert_eq!(samples(&metrics, "volume_operation_total_seconds"), [count], "{is_over}");
        let text = metrics.render().expect("metrics");
        // The bucket that it is in, and the one below.
        let below = (!is_over).then_some(("50", 0));
        for (bound, count) in below.into_iter().chain([(bucket, 1)]) {
            let line = format!("volume_operation_total_seconds_bucket{{{labels},le=\"{bound}\"}} {count}\n");
            assert!(text.contains(&line), "{line} is missing in\n{text}");
        }
    }
}

/// Volumes below `root` with this API server, and what is counted of them.
fn counted(root: &Path, replies: &Replies) -> (Volumes, Arc<Metrics>) {
    let metrics = Metrics::new();
    let volumes = Volumes::new(root).with_metrics(metrics.clone()).with_objects(objects(replies).0, BTreeMap::new());
    volumes.make_pod_dirs_here("u-1");
    (volumes, metrics)
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_cannot_be_used_yet_counts_as_no_mount() {
    let (root, replies) = (tempfile::tempdir().expect("a folder"), Replies::default());
    let (volumes, metrics) = counted(root.path(), &replies);
    let pod = with_claim(&["v"]);
    volumes.set_up(&pod, None).await.expect_err("there is no claim");
    assert_eq!(samples(&metrics, "storage_operation"), [""; 0]);
    tokio::time::advance(Duration::from_secs(70)).await;
    binds(&replies, json!({"hostPath": {"path": root.path()}}));
    volumes.set_up(&pod, None).await.expect("mounted");
    assert_eq!(samples(&metrics, "storage_operation"), [operation("volume_mount", "host-path", "success", 1)]);
    let labels = r#"operation_name="overall_volume_mount",plugin_name="kubernetes.io/host-path",le="50""#;
    let timed = format!("volume_operation_total_seconds_bucket{{{labels}}} 1\n");
    assert!(metrics.render().expect("metrics").contains(&timed), "the wait for the claim is no part of it");
}

/// A pod that uses the claim `data` as a device.
fn with_device() -> Pod {
    let mut pod = with_claim(&["v"]);
    let container = &mut pod.spec.as_mut().expect("a spec").containers[0];
    container.volume_mounts = None;
    container.volume_devices = serde_json::from_value(json!([{"name": "v", "devicePath": "/dev/x"}])).expect("devices");
    pod
}

/// The pod with this security context.
fn with_context(mut pod: Pod, context: Value) -> Pod {
    pod.spec.as_mut().expect("a spec").security_context = serde_json::from_value(context).expect("a context");
    pod
}

#[tokio::test]
async fn a_raw_device_that_cannot_be_mapped_counts_as_no_mount() {
    let (root, replies) = (tempfile::tempdir().expect("a folder"), Replies::default());
    binds(&replies, json!({"local": {"path": root.path()}, "volumeMode": "Block"}));
    let (volumes, metrics) = counted(root.path(), &replies);
    volumes.set_up(&with_device(), None).await.expect_err("it is a directory");
    let failed = operation("map_volume", "local-volume", "fail-unknown", 1);
    assert_eq!(samples(&metrics, "storage_operation"), [failed]);
}

#[test]
fn a_raw_device_is_mapped_and_unmapped() {
    if !Path::new("/dev/loop-control").exists() {
        return keblet_skip::skip("needs loop devices");
    }
    in_private_mounts(|| {
        let (root, replies) = (tempfile::tempdir().expect("a folder"), Replies::default());
        let device = LoopDevice::on(&root.path().join("disk"), 1 << 20);
        binds(&replies, json!({"local": {"path": device.0}, "volumeMode": "Block"}));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let metrics = runtime.block_on(async {
            let (volumes, metrics) = counted(root.path(), &replies);
            for _ in 0..2 {
                volumes.set_up(&with_device(), None).await.expect("mapped");
            }
            volumes.tear_down("u-1").await.expect("unmapped");
            assert!(volumes.set_up_by_plugin().is_empty());
            metrics
        });
        let once = ["map_volume", "unmap_volume"].map(|name| operation(name, "local-volume", "success", 1));
        assert_eq!(samples(&metrics, "storage_operation"), once);
    });
}

#[test]
fn a_local_volume_that_has_the_group_of_its_pod_is_not_counted_as_given_to_it() {
    in_private_mounts(|| {
        let (root, replies) = (tempfile::tempdir().expect("a folder"), Replies::default());
        let disk = root.path().join("disk");
        std::fs::create_dir(&disk).expect("a folder");
        binds(&replies, json!({"local": {"path": disk}}));
        let pod = with_context(with_claim(&["v"]), json!({"fsGroup": 77, "fsGroupChangePolicy": "OnRootMismatch"}));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let metrics = runtime.block_on(async {
            let (volumes, metrics) = counted(root.path(), &replies);
            for _ in 0..2 {
                volumes.set_up(&pod, None).await.expect("mounted");
                volumes.tear_down("u-1").await.expect("unmounted");
            }
            metrics
        });
        let expected = [("volume_apply_access_control", 1), ("volume_mount", 2), ("volume_unmount", 2)];
        let expected = expected.map(|(name, count)| operation(name, "local-volume", "success", count));
        assert_eq!(samples(&metrics, "storage_operation"), expected);
    });
}

#[tokio::test]
async fn an_empty_dir_is_given_to_the_group_of_its_pod_once() {
    let (_root, volumes) = make();
    let metrics = Metrics::new();
    let volumes = volumes.with_metrics(metrics.clone());
    // The test's own group, which needs no privilege.
    let pod = with_context(with_empty_dir(), json!({"fsGroup": nix::unistd::getgid().as_raw()}));
    for _ in 0..2 {
        volumes.set_up(&pod, None).await.expect("set up");
    }
    let once = ["volume_apply_access_control", "volume_mount"].map(|name| operation(name, "empty-dir", "success", 1));
    assert_eq!(samples(&metrics, "storage_operation"), once);
}
