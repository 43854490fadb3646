//! Mounts beside block devices, and the files of projected volumes.

use serde_json::Value;
use serde_json::json;

use super::base;
use super::errors_of;

/// The errors of a pod with the claims `a` and `b`, whose container uses volumes in this way.
fn using(mounts: Value, devices: Value) -> Vec<String> {
    let mut pod = base();
    let claim = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
    pod["spec"]["volumes"] = json!([claim("a"), claim("b")]);
    pod["spec"]["containers"][0]["volumeMounts"] = mounts;
    pod["spec"]["containers"][0]["volumeDevices"] = devices;
    errors_of(pod)
}

#[test]
fn a_volume_is_used_as_one_device_or_as_files() {
    let (mounts, devices) = ("spec.containers[0].volumeMounts", "spec.containers[0].volumeDevices");
    let mount = |name: &str, path: &str| json!({"name": name, "mountPath": path});
    let device = |name: &str, path: &str| json!({"name": name, "devicePath": path});
    for (mounted, used, expected) in [
        (json!([mount("a", "/m")]), json!([device("b", "/d")]), vec![]),
        (json!([mount("a", "/m"), mount("a", "/n")]), json!([device("b", "/d")]), vec![]),
        (
            json!([]),
            json!([device("a", "/d"), device("a", "/e")]),
            vec![format!("{devices}[1].name: Invalid value: \"a\": must be unique")],
        ),
        (
            json!([]),
            json!([device("a", "/d"), device("b", "/d")]),
            vec![format!("{devices}[1].devicePath: Invalid value: \"/d\": must be unique")],
        ),
        (
            json!([mount("a", "/m")]),
            json!([device("a", "/d")]),
            vec![
                format!("{mounts}[0].name: Invalid value: \"a\": must not already exist in volumeDevices"),
                format!("{devices}[0].name: Invalid value: \"a\": must not already exist in volumeMounts"),
            ],
        ),
        (
            json!([mount("a", "/x")]),
            json!([device("b", "/x")]),
            vec![
                format!(
                    "{mounts}[0].mountPath: Invalid value: \"/x\": must not already exist as a path in volumeDevices"
                ),
                format!(
                    "{devices}[0].devicePath: Invalid value: \"/x\": must not already exist as a path in volumeMounts"
                ),
            ],
        ),
        (
            json!([]),
            json!([device("a", "/dev/../x")]),
            vec![format!("{devices}[0].devicePath: Invalid value: \"/dev/../x\": can not contain backsteps ('..')")],
        ),
        (json!([]), json!([device("a", "")]), vec![format!("{devices}[0].devicePath: Required value")]),
        (json!([]), json!([device("c", "/d")]), vec![format!("{devices}[0].name: Not found: \"c\"")]),
    ] {
        assert_eq!(using(mounted.clone(), used.clone()), expected, "{mounted} {used}");
    }
}

#[test]
fn an_empty_mode_of_a_mount_is_none_of_those_that_there_are() {
    let mount = json!([{"name": "a", "mountPath": "/m", "readOnly": true,
        "mountPropagation": "None", "recursiveReadOnly": "Enabled"}]);
    assert_eq!(using(mount.clone(), json!([])), [""; 0]);
    for field in ["mountPropagation", "recursiveReadOnly"] {
        let mut mount = mount.clone();
        mount[0][field] = json!("");
        let found = using(mount, json!([]));
        let expected =
            format!("spec.containers[0].volumeMounts[0].{field}: Unsupported value: \"\": supported values: ");
        assert!(found[0].starts_with(&expected), "{found:?}");
    }
}

#[test]
fn an_image_is_mounted_with_the_propagation_of_its_mount() {
    let mut pod = base();
    pod["spec"]["volumes"] = json!([{"name": "v", "image": {"reference": "a:1"}}]);
    pod["spec"]["containers"][0]["volumeMounts"][0]["mountPropagation"] = json!("HostToContainer");
    assert_eq!(errors_of(pod), [""; 0]);
}

#[test]
fn a_pod_with_users_of_its_own_has_no_devices() {
    let mut pod = base();
    pod["spec"]["hostUsers"] = json!(false);
    pod["spec"]["volumes"] = json!([{"name": "v"}, {"name": "a", "persistentVolumeClaim": {"claimName": "a"}}]);
    pod["spec"]["initContainers"][0]["volumeDevices"] = json!([{"name": "a", "devicePath": "/d"}]);
    let expected = ["spec.initContainers[0].volumeDevices: Forbidden: when `hostUsers` is false"];
    assert_eq!(errors_of(pod), expected);
}

#[test]
fn sources_of_a_projected_volume_do_not_conflict() {
    let at = "spec.volumes[0].projected";
    let item = |path: &str| json!([{"key": "k", "path": path}]);
    let field = |path: &str| json!([{"path": path, "fieldRef": {"fieldPath": "metadata.name"}}]);
    let conflict = |named: &str| format!("{at}: Invalid value: \"{named}\": conflicting duplicate paths");
    for (sources, expected) in [
        (json!([{"secret": {"name": "s", "items": item("a")}}, {"downwardAPI": {"items": field("b")}}]), vec![]),
        (
            json!([{"secret": {"name": "s", "items": item("a")}}, {"configMap": {"name": "m", "items": item("a")}}]),
            vec![conflict("m")],
        ),
        (
            json!([{"configMap": {"name": "m", "items": item("a")}}, {"downwardAPI": {"items": field("a")}}]),
            vec![conflict("a")],
        ),
        (
            json!([{"clusterTrustBundle": {"name": "b", "path": "a"}},
                {"podCertificate": {"signerName": "x/y", "keyType": "ED25519", "keyPath": "k", "certificateChainPath": "k"}},
                {"downwardAPI": {"items": field("a")}}]),
            vec![conflict("k"), conflict("a")],
        ),
        (json!([{"secret": {"items": item("a")}}]), vec![format!("{at}.sources[0].secret.name: Required value")]),
        (
            json!([{"serviceAccountToken": {"path": "t", "expirationSeconds": 599}}]),
            vec![
                format!(
                    "{at}.sources[0].serviceAccountToken.expirationSeconds: Invalid value: 599: may not specify a \
                     duration less than 10 minutes"
                ),
                format!(
                    "{at}.sources[0].serviceAccountToken: Forbidden: must not be specified when serviceAccountName is \
                     not set"
                ),
            ],
        ),
    ] {
        let mut pod = base();
        pod["spec"]["volumes"] = json!([{"name": "v", "projected": {"sources": sources}}]);
        assert_eq!(errors_of(pod), expected, "{sources}");
    }
    let mut pod = base();
    let token = json!({"path": "t", "expirationSeconds": (1_i64 << 32) + 1});
    pod["spec"]["serviceAccountName"] = json!("default");
    pod["spec"]["volumes"] = json!([{"name": "v", "projected": {"sources": [{"serviceAccountToken": token}]}}]);
    let expected = format!(
        "{at}.sources[0].serviceAccountToken.expirationSeconds: Invalid value: 4294967297: may not specify a duration \
         larger than 2^32 seconds"
    );
    assert_eq!(errors_of(pod), [expected]);
}
