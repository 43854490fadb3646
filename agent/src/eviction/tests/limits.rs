//! Limits on files.

use serde_json::json;

use super::super::local_limits::Excess;
use super::super::local_limits::Needs;
use super::super::local_limits::excess;
use super::super::readings::DiskLayout;
use super::*;

fn with_volume(limit: Option<&str>) -> Pod {
    pod("web", json!({"volumes": [{"name": "data", "emptyDir": {"sizeLimit": limit}}]}))
}

fn limited(limit: &str) -> Pod {
    pod("web", json!({"containers": [{"name": "main", "resources": {"limits": {"ephemeral-storage": limit}}}]}))
}

fn found(pod: &Pod, usage: &PodUsage, layout: DiskLayout) -> Option<(&'static str, String)> {
    excess(pod, usage, layout).map(|Excess { limit, message }| (limit, message))
}

#[test]
fn only_pods_with_limits_are_measured() {
    for (pod, volumes, containers) in [
        (with_volume(None), false, false),
        (with_volume(Some("0")), false, false),
        (with_volume(Some("1Gi")), true, false),
        (limited("1Gi"), true, true),
        (
            pod("web", json!({"volumes": [{"name": "data", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]})),
            false,
            false,
        ),
        (pod("web", json!({"volumes": [{"name": "data", "hostPath": {"path": "/"}}]})), false, false),
    ] {
        let needs = Needs::of(&pod);
        assert_eq!((needs.volumes, needs.containers), (volumes, containers), "{:?}", pod.spec);
    }
}

#[test]
fn volumes() {
    let pod = with_volume(Some("1Gi"));
    assert_eq!(found(&pod, &disks("9Gi", "9Gi", "1Gi"), DiskLayout::Shared), None, "not above");
    let expected = ("emptydirfs.limit", "Usage of EmptyDir volume \"data\" exceeds the limit \"1Gi\". ".to_owned());
    assert_eq!(found(&pod, &disks("0", "0", "1025Mi"), DiskLayout::Shared), Some(expected));
    assert_eq!(found(&pod, &PodUsage::default(), DiskLayout::Shared), None, "not measured yet");
    assert_eq!(found(&with_volume(None), &disks("0", "0", "9Gi"), DiskLayout::Shared), None);
}

#[test]
fn the_whole_pod() {
    let pod = limited("100Mi");
    let message = "Pod ephemeral local storage usage exceeds the total limit of containers 100Mi. ".to_owned();
    let expected = Some(("ephemeralpodfs.limit", message));
    assert_eq!(found(&pod, &disks("50Mi", "30Mi", "21Mi"), DiskLayout::Shared), expected);
    assert_eq!(found(&pod, &disks("50Mi", "30Mi", "20Mi"), DiskLayout::Shared), None);
    let other = PodUsage { other: used("101Mi"), ..PodUsage::default() };
    assert_eq!(found(&pod, &other, DiskLayout::Shared), expected);
}

#[test]
fn one_container() {
    let limits = |amount: &str| json!({"limits": {"ephemeral-storage": amount}});
    let pod = pod(
        "web",
        json!({"containers": [
            {"name": "main", "resources": limits("10Mi")}, {"name": "roomy", "resources": limits("1Gi")},
        ]}),
    );
    let message = "Container main exceeded its local ephemeral storage limit \"10Mi\". ".to_owned();
    let expected = Some(("ephemeralcontainerfs.limit", message));
    assert_eq!(found(&pod, &disks("8Mi", "3Mi", "0"), DiskLayout::Shared), expected);
    for layout in [DiskLayout::Dedicated, DiskLayout::Split] {
        assert_eq!(found(&pod, &disks("8Mi", "3Mi", "0"), layout), None, "{layout:?}: writable layers do not count");
        assert_eq!(found(&pod, &disks("8Mi", "11Mi", "0"), layout), expected, "{layout:?}");
    }
    let unlimited = self::pod(
        "web",
        json!({"containers": [
            {"name": "main", "resources": limits("0")}, {"name": "roomy", "resources": limits("1Gi")},
        ]}),
    );
    assert_eq!(found(&unlimited, &disks("8Mi", "3Mi", "0"), DiskLayout::Shared), None, "zero is no limit");
}

#[test]
fn sidecars_have_limits_too() {
    let limits = json!({"limits": {"ephemeral-storage": "10Mi"}});
    let with = |restart: Option<&str>| {
        let init = json!([{"name": "main", "restartPolicy": restart, "resources": limits}]);
        let regular = json!([{"name": "other", "resources": {"limits": {"ephemeral-storage": "1Gi"}}}]);
        pod("web", json!({"initContainers": init, "containers": regular}))
    };
    assert!(found(&with(Some("Always")), &disks("11Mi", "0", "0"), DiskLayout::Shared).is_some());
    assert_eq!(found(&with(None), &disks("11Mi", "0", "0"), DiskLayout::Shared), None);
}
