use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;
use serde_json::Value;
use serde_json::json;

use super::apply;
use super::pull_policy;

fn defaulted(spec: Value) -> Value {
    let mut pod: Pod = serde_json::from_value(json!({"apiVersion": "v1", "kind": "Pod", "spec": spec})).expect("a pod");
    apply(&mut pod);
    let once = serde_json::to_value(&pod).expect("pods are JSON");
    apply(&mut pod);
    assert_eq!(serde_json::to_value(&pod).expect("pods are JSON"), once, "applying defaults twice changes nothing");
    once["spec"].clone()
}

fn with_container(container: Value) -> Value {
    let mut container = container;
    container["name"] = json!("c");
    defaulted(json!({"containers": [container]}))["containers"][0].clone()
}

fn with_volume(volume: Value) -> Value {
    let mut volume = volume;
    volume["name"] = json!("v");
    defaulted(json!({"containers": [], "volumes": [volume]}))["volumes"][0].clone()
}

#[test]
fn an_empty_pod_gets_all_pod_defaults() {
    let expected = json!({
        "containers": [], "dnsPolicy": "ClusterFirst", "restartPolicy": "Always", "schedulerName": "default-scheduler",
        "securityContext": {}, "terminationGracePeriodSeconds": 30, "enableServiceLinks": true,
    });
    assert_eq!(defaulted(json!({"containers": []})), expected);
    let set = json!({
        "containers": [], "dnsPolicy": "None", "restartPolicy": "Never", "schedulerName": "mine",
        "securityContext": {"runAsUser": 1}, "terminationGracePeriodSeconds": 0, "enableServiceLinks": false,
    });
    assert_eq!(defaulted(set.clone()), set, "what is set stays");
}

#[test]
fn a_minimal_container_gets_all_container_defaults() {
    assert_eq!(
        with_container(json!({"image": "a:1", "ports": [{"containerPort": 80}]})),
        json!({
            "name": "c", "image": "a:1", "imagePullPolicy": "IfNotPresent", "resources": {},
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
            "ports": [{"containerPort": 80, "protocol": "TCP"}],
        })
    );
}

#[test]
fn pull_policy_follows_the_tag() {
    for (image, policy) in [
        ("busybox", "Always"),
        ("busybox:latest", "Always"),
        ("reg:5000/busybox", "Always"),
        ("reg:5000/a/busybox:latest", "Always"),
        ("busybox:1.37", "IfNotPresent"),
        ("reg:5000/busybox:1", "IfNotPresent"),
        ("busybox@sha256:00", "IfNotPresent"),
        ("busybox:1@sha256:00", "IfNotPresent"),
        ("busybox:latest@sha256:00", "Always"),
        ("", "IfNotPresent"),
    ] {
        assert_eq!(pull_policy(image), policy, "{image}");
    }
}

#[test]
fn requests_follow_limits() {
    let container =
        with_container(json!({"resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1m"}}}));
    assert_eq!(container["resources"]["requests"], json!({"cpu": "1m", "memory": "1Gi"}));
}

#[test]
fn amounts_are_rounded_up_to_thousandths() {
    let amounts = json!({"cpu": "1500u", "memory": "1.0001Ki", "example.com/a": "0.5"});
    let rounded = json!({"cpu": "2m", "memory": "1024103m", "example.com/a": "0.5"});
    let container = || json!({"name": "c", "resources": {"limits": amounts}});
    let spec = defaulted(json!({
        "containers": [container()], "initContainers": [container()], "overhead": {"cpu": "1n"},
        "resources": {"limits": {"cpu": "1e-6"}, "requests": {"cpu": "700n"}},
    }));
    for list in ["containers", "initContainers"] {
        assert_eq!(spec[list][0]["resources"], json!({"limits": rounded, "requests": rounded}));
    }
    assert_eq!(spec["overhead"], json!({"cpu": "1m"}));
    assert_eq!(spec["resources"], json!({"limits": {"cpu": "1e-3"}, "requests": {"cpu": "1m", "memory": "1024103m"}}));
}

#[test]
fn probes_hooks_and_env() {
    let container = with_container(json!({
        "livenessProbe": {"httpGet": {"port": 80}},
        "readinessProbe": {"grpc": {"port": 1}, "periodSeconds": 5},
        "lifecycle": {"preStop": {"httpGet": {"port": 80, "scheme": "HTTPS"}}},
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
    }));
    assert_eq!(
        container["livenessProbe"],
        json!({"httpGet": {"port": 80, "path": "/", "scheme": "HTTP"}, "timeoutSeconds": 1, "periodSeconds": 10,
            "successThreshold": 1, "failureThreshold": 3})
    );
    assert_eq!(container["readinessProbe"]["periodSeconds"], 5);
    assert_eq!(container["readinessProbe"]["grpc"], json!({"port": 1, "service": ""}));
    assert_eq!(container["lifecycle"]["preStop"]["httpGet"], json!({"port": 80, "path": "/", "scheme": "HTTPS"}));
    assert_eq!(container["env"][0]["valueFrom"]["fieldRef"]["apiVersion"], "v1");
}

#[test]
fn volumes() {
    for (given, expected) in [
        (json!({}), json!({"emptyDir": {}})),
        (json!({"hostPath": {"path": "/x"}}), json!({"hostPath": {"path": "/x", "type": ""}})),
        (json!({"secret": {}}), json!({"secret": {"defaultMode": 420}})),
        (json!({"configMap": {"defaultMode": 256}}), json!({"configMap": {"defaultMode": 256, "name": ""}})),
        (
            json!({"downwardAPI": {"items": [{"path": "p", "fieldRef": {"fieldPath": "metadata.uid"}}]}}),
            json!({"downwardAPI": {"defaultMode": 420,
                "items": [{"path": "p", "fieldRef": {"fieldPath": "metadata.uid", "apiVersion": "v1"}}]}}),
        ),
        (
            json!({"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}),
            json!({"projected": {"defaultMode": 420, "sources": [{"serviceAccountToken": {"path": "t", "expirationSeconds": 3600}}]}}),
        ),
        (json!({"image": {"reference": "a"}}), json!({"image": {"reference": "a", "pullPolicy": "Always"}})),
    ] {
        let mut expected = expected;
        expected["name"] = json!("v");
        assert_eq!(with_volume(given), expected);
    }
}

#[test]
fn host_network_makes_every_port_a_host_port() {
    let container = json!({"name": "c", "ports": [{"containerPort": 80}, {"containerPort": 81, "hostPort": 1081}]});
    let spec =
        defaulted(json!({"hostNetwork": true, "containers": [container.clone()], "initContainers": [container]}));
    for list in ["containers", "initContainers"] {
        assert_eq!(spec[list][0]["ports"][0]["hostPort"], 80);
        assert_eq!(spec[list][0]["ports"][1]["hostPort"], 1081);
    }
}

#[test]
fn pod_level_requests_come_from_containers_then_from_limits() {
    let container = |name: &str, cpu: &str| json!({"name": name, "resources": {"requests": {"cpu": cpu}}});
    let mut sidecar = container("s", "200m");
    sidecar["restartPolicy"] = json!("Always");
    let spec = defaulted(json!({
        "resources": {"limits": {"cpu": "4", "memory": "1Gi"}},
        "initContainers": [sidecar, container("i", "1")],
        "containers": [container("a", "500m"), container("b", "100m")],
    }));
    assert_eq!(spec["resources"]["requests"], json!({"cpu": "1200m", "memory": "1Gi"}));
    let none = defaulted(json!({"containers": [container("a", "1")], "resources": {}}));
    assert_eq!(none["resources"], json!({}), "no pod limits, no pod requests");
}

#[test]
fn huge_page_limits_of_the_pod_come_from_containers_if_it_states_anything() {
    let container = json!({"name": "a", "resources": {"limits": {"cpu": "1", "hugepages-2Mi": "4Mi"}}});
    let of =
        |resources: Value| defaulted(json!({"containers": [container], "resources": resources}))["resources"].clone();
    assert_eq!(of(json!({})), json!({}), "as if it were not there");
    let stated = of(json!({"requests": {"cpu": "2"}}));
    assert_eq!(stated["limits"], json!({"hugepages-2Mi": "4Mi"}));
    assert_eq!(stated["requests"], json!({"cpu": "2", "hugepages-2Mi": "4Mi"}));
}

proptest! {
    #[test]
    fn any_image_has_a_policy(image in "\\PC{0,40}") {
        prop_assert!(["Always", "IfNotPresent"].contains(&pull_policy(&image)));
    }
}
