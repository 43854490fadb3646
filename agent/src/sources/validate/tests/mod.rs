//! One broken field at a time in an otherwise valid pod, and what is said about it.

mod annotations;
mod container;
mod disks;
mod mounts;
mod resources;

use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;
use serde_json::Value;
use serde_json::json;

use crate::sources::defaults;

fn base() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web", "namespace": "default", "uid": "u-1"},
        "spec": {
            "containers": [{"name": "c", "image": "a:1", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
            "initContainers": [{"name": "i", "image": "a:1"}],
            "volumes": [{"name": "v"}],
        },
    })
}

fn errors_of(pod: Value) -> Vec<String> {
    let mut pod: Pod = serde_json::from_value(pod).expect("a pod");
    defaults::apply(&mut pod);
    super::pod(&pod).iter().map(ToString::to_string).collect()
}

/// The errors of the valid pod with `value` at the JSON pointer `at`.
fn with(at: &str, value: Value) -> Vec<String> {
    let mut pod = base();
    let (parent, field) = at.rsplit_once('/').expect("a pointer");
    let parent = pod.pointer_mut(parent).unwrap_or_else(|| panic!("{at} has a parent"));
    match parent {
        Value::Array(items) => items.push(value),
        parent => parent[field] = value,
    }
    errors_of(pod)
}

fn check(table: &[(&str, Value, &str)]) {
    for (at, value, expected) in table {
        let errors = with(at, value.clone());
        if expected.is_empty() {
            assert_eq!(errors, Vec::<String>::new(), "{at} = {value}");
        } else {
            assert!(errors.iter().any(|e| e.starts_with(expected)), "{at} = {value}: {expected:?} not in {errors:?}");
        }
    }
}

#[test]
fn the_base_is_valid() {
    assert_eq!(errors_of(base()), Vec::<String>::new());
}

#[test]
fn metadata() {
    check(&[
        ("/metadata/name", json!(""), "metadata.name: Required value: name or generateName is required"),
        (
            "/metadata/name",
            json!("../../etc"),
            "metadata.name: Invalid value: \"../../etc\": a lowercase RFC 1123 subdomain",
        ),
        ("/metadata/name", json!("Web"), "metadata.name: Invalid value: \"Web\""),
        ("/metadata/name", json!("a".repeat(254)), "metadata.name: Invalid value"),
        ("/metadata/namespace", json!("a/b"), "metadata.namespace: Invalid value: \"a/b\": a lowercase RFC 1123 label"),
        ("/metadata/uid", json!("../x"), "metadata.uid: Invalid value"),
        ("/metadata/labels", json!({"app.kubernetes.io/name": "x_1"}), ""),
        ("/metadata/labels", json!({"a b": "x"}), "metadata.labels: Invalid value: \"a b\": name part must consist"),
        ("/metadata/labels", json!({"a": "x y"}), "metadata.labels: Invalid value: \"x y\": a valid label must be"),
        ("/metadata/annotations", json!({"A/b": "any \n text"}), ""),
        ("/metadata/annotations", json!({"-": ""}), "metadata.annotations: Invalid value: \"-\""),
        (
            "/metadata/annotations",
            json!({"a": "x".repeat(300_000)}),
            "metadata.annotations: Too long: may not be more than 262144 bytes",
        ),
    ]);
}

#[test]
fn pod_level_fields() {
    check(&[
        ("/spec/containers", json!([]), "spec.containers: Required value"),
        (
            "/spec/restartPolicy",
            json!("Sometimes"),
            "spec.restartPolicy: Unsupported value: \"Sometimes\": supported values: \"Always\", \"OnFailure\", \"Never\"",
        ),
        ("/spec/dnsPolicy", json!("Any"), "spec.dnsPolicy: Unsupported value"),
        (
            "/spec/dnsPolicy",
            json!("None"),
            "spec.dnsConfig: Required value: must provide `dnsConfig` when `dnsPolicy` is None",
        ),
        (
            "/spec/dnsConfig",
            json!({"nameservers": ["1.1.1.1", "::1", "1.1.1.2"], "searches": ["a.b", "."], "options": [{"name": "ndots", "value": "2"}]}),
            "",
        ),
        (
            "/spec/dnsConfig",
            json!({"nameservers": ["1", "::1", "::2", "::3"]}),
            "spec.dnsConfig.nameservers: Invalid value",
        ),
        (
            "/spec/dnsConfig",
            json!({"nameservers": ["one"]}),
            "spec.dnsConfig.nameservers[0]: Invalid value: \"one\": must be a valid IP address",
        ),
        ("/spec/dnsConfig", json!({"searches": ["a b"]}), "spec.dnsConfig.searches[0]: Invalid value"),
        ("/spec/dnsConfig", json!({"searches": ["-a"]}), "spec.dnsConfig.searches[0]: Invalid value"),
        (
            "/spec/resources",
            json!({"limits": {"hugepages-2Mi": "4Mi"}}),
            "spec.resources: Forbidden: HugePages require",
        ),
        (
            "/spec/dnsConfig",
            json!({"options": [{"name": "a\nnameserver 6.6.6.6"}]}),
            "spec.dnsConfig.options[0].name: Invalid value",
        ),
        (
            "/spec/activeDeadlineSeconds",
            json!(0),
            "spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647, inclusive",
        ),
        ("/spec/hostname", json!("a.b"), "spec.hostname: Invalid value"),
        ("/spec/hostAliases", json!([{"ip": "x", "hostnames": ["a"]}]), "spec.hostAliases[0].ip: Invalid value"),
        (
            "/spec/hostAliases",
            json!([{"ip": "::1", "hostnames": ["a\nb"]}]),
            "spec.hostAliases[0].hostnames[0]: Invalid value: \"a\\nb\"",
        ),
        ("/spec/nodeSelector", json!({"a": "b c"}), "spec.nodeSelector: Invalid value"),
        ("/spec/runtimeClassName", json!("A"), "spec.runtimeClassName: Invalid value"),
        // Only schedulers read it.
        ("/spec/schedulerName", json!("my scheduler"), ""),
        (
            "/spec/ephemeralContainers",
            json!([{"name": "e", "image": "a"}]),
            "spec.ephemeralContainers: Forbidden: cannot be set on create",
        ),
        (
            "/spec/tolerations",
            json!([{"key": "a", "operator": "Is"}]),
            "spec.tolerations[0].operator: Unsupported value: \"Is\"",
        ),
        ("/spec/tolerations", json!([{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}]), ""),
        (
            "/spec/tolerations",
            json!([{"key": "a", "operator": "Gt", "value": "5"}]),
            "spec.tolerations[0].operator: Unsupported value: \"Gt\": supported values: \"Equal\", \"Exists\", \"Lt\", \"Gt\"",
        ),
        ("/spec/os", json!({"name": "plan9"}), "spec.os.name: Unsupported value"),
        ("/spec/preemptionPolicy", json!("Never"), ""),
        ("/spec/preemptionPolicy", json!(""), "spec.preemptionPolicy: Required value"),
        (
            "/spec/preemptionPolicy",
            json!("Always"),
            "spec.preemptionPolicy: Unsupported value: \"Always\": supported values: \"PreemptLowerPriority\", \"Never\"",
        ),
    ]);
}

#[test]
fn sysctls_of_namespaces_that_the_pod_shares_are_refused() {
    for (shared, name, is_refused) in [
        ("hostNetwork", "net.ipv4.ip_forward", true),
        ("hostNetwork", "kernel.shmmax", false),
        ("hostIPC", "kernel.shmmax", true),
        ("hostIPC", "kernel/msgmax", true),
        ("hostIPC", "fs.mqueue.msg_max", true),
        ("hostIPC", "net.ipv4.ip_forward", false),
        ("hostIPC", "kernel.shm_next_id", false),
    ] {
        let mut pod = base();
        pod["spec"][shared] = json!(true);
        pod["spec"]["securityContext"] = json!({"sysctls": [{"name": name, "value": "1"}]});
        let errors = errors_of(pod);
        let at = "spec.securityContext.sysctls[0].name";
        let problem = format!("{at}: Invalid value: {name:?}: may not be specified when '{shared}' is true");
        assert_eq!(errors.iter().any(|error| error.starts_with(&problem)), is_refused, "{name}: {errors:?}");
        assert_eq!(errors.len(), usize::from(is_refused), "{errors:?}");
    }
}

#[test]
fn an_overridden_hostname_excludes_others() {
    check(&[
        ("/spec/hostnameOverride", json!("h.example"), ""),
        ("/spec/hostnameOverride", json!(""), "spec.hostnameOverride: Invalid value: \"\""),
        ("/spec/hostnameOverride", json!("a".repeat(65)), "spec.hostnameOverride: Too long"),
    ]);
    let mut pod = base();
    pod["spec"]["hostnameOverride"] = json!("h.example");
    for field in ["setHostnameAsFQDN", "hostNetwork"] {
        pod["spec"][field] = json!(true);
    }
    let expected = ["setHostnameAsFQDN", "hostNetwork"]
        .map(|field| format!("spec.hostnameOverride: Forbidden: may not be specified when {field} is true"));
    assert_eq!(errors_of(pod), expected);
}

#[test]
fn security() {
    let pod = "/spec/securityContext";
    let container = "/spec/containers/0/securityContext";
    check(&[
        (
            pod,
            json!({"runAsUser": -1}),
            "spec.securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive",
        ),
        (pod, json!({"supplementalGroups": [1, -1]}), "spec.securityContext.supplementalGroups[1]: Invalid value: -1"),
        (pod, json!({"sysctls": [{"name": "net.ipv4.ip_forward", "value": "1"}]}), ""),
        (
            pod,
            json!({"sysctls": [{"name": "net..x", "value": "1"}]}),
            "spec.securityContext.sysctls[0].name: Invalid value",
        ),
        (
            pod,
            json!({"sysctls": [{"name": "a.b", "value": "1"}, {"name": "a/b", "value": "1"}]}),
            "spec.securityContext.sysctls[1].name: Duplicate value: \"a/b\"",
        ),
        (
            pod,
            json!({"seccompProfile": {"type": "Localhost"}}),
            "spec.securityContext.seccompProfile.localhostProfile: Required value: must be set when seccomp type is Localhost",
        ),
        (
            pod,
            json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "../x"}}),
            "spec.securityContext.seccompProfile.localhostProfile: Invalid value: \"../x\": must not contain '..'",
        ),
        (
            pod,
            json!({"seccompProfile": {"type": "Mine"}}),
            "spec.securityContext.seccompProfile.type: Unsupported value",
        ),
        (pod, json!({"seLinuxChangePolicy": "Recursive"}), ""),
        (
            pod,
            json!({"seLinuxChangePolicy": "MountOption"}),
            "spec.securityContext.seLinuxChangePolicy: Unsupported value: \"MountOption\": supported values: \"Recursive\"",
        ),
        (
            container,
            json!({"privileged": true, "allowPrivilegeEscalation": false}),
            "spec.containers[0].securityContext: Invalid value: \"\": cannot set `allowPrivilegeEscalation` to false and `privileged` to true",
        ),
        (container, json!({"procMount": "Unmasked"}), "spec.containers[0].securityContext.procMount: Invalid value"),
    ]);
    let mut pod = base();
    pod["spec"]["os"] = json!({"name": "linux"});
    pod["spec"]["securityContext"] = json!({"windowsOptions": {}});
    pod["spec"]["initContainers"][0]["securityContext"] = json!({"windowsOptions": {}});
    let at = |path: &str| format!("{path}.windowsOptions: Forbidden: windows options cannot be set for a linux pod");
    let expected = ["spec.securityContext", "spec.initContainers[0].securityContext"].map(at);
    assert_eq!(errors_of(pod), expected);
    let mut pod = base();
    pod["spec"]["hostPID"] = json!(true);
    pod["spec"]["shareProcessNamespace"] = json!(true);
    assert!(errors_of(pod)[0].ends_with("ShareProcessNamespace and HostPID cannot both be enabled"));
}

#[test]
fn every_mistake_is_reported_at_once() {
    let mut pod = base();
    pod["metadata"]["name"] = json!("A");
    pod["spec"]["containers"][0]["image"] = json!("");
    pod["spec"]["restartPolicy"] = json!("x");
    assert_eq!(errors_of(pod).len(), 3);
}

/// JSON of the shape of a pod with anything in place of its values.
fn any_json() -> impl Strategy<Value = Value> {
    let text = prop_oneof![Just(String::new()), "\\PC{0,8}", "[a-z./-]{0,8}", Just("..".to_owned())];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-2i64..70_000).prop_map(Value::from),
        text.prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-zA-Z.]{1,10}", inner, 0..4).prop_map(|m| json!(m)),
        ]
    })
}

proptest! {
    #[test]
    fn any_value_anywhere_is_an_error_or_fine(value in any_json(), place in 0usize..24) {
        let places = [
            "/metadata/name", "/metadata/labels", "/metadata/annotations", "/spec/hostname", "/spec/dnsConfig",
            "/spec/containers", "/spec/volumes", "/spec/restartPolicy", "/spec/securityContext", "/spec/hostAliases",
            "/spec/containers/0/env", "/spec/containers/0/ports", "/spec/containers/0/resources",
            "/spec/containers/0/volumeMounts", "/spec/containers/0/livenessProbe", "/spec/containers/0/lifecycle",
            "/spec/containers/0/securityContext", "/spec/containers/0/image", "/spec/volumes/0/hostPath",
            "/spec/volumes/0/emptyDir", "/spec/volumes/0/projected", "/spec/volumes/0/downwardAPI",
            "/spec/tolerations", "/spec/resources",
        ];
        let mut pod = base();
        let (parent, field) = places[place].rsplit_once('/').expect("a pointer");
        pod.pointer_mut(parent).expect("a parent")[field] = value;
        if let Ok(mut pod) = serde_json::from_value::<Pod>(pod) {
            defaults::apply(&mut pod);
            for error in super::pod(&pod) {
                prop_assert!(!error.to_string().contains('\n'));
            }
        }
    }
}
