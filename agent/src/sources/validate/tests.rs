//! One broken field at a time in an otherwise valid pod, and what is said about it.

use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;
use serde_json::Value;
use serde_json::json;

use super::super::defaults;

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
        ("/spec/os", json!({"name": "plan9"}), "spec.os.name: Unsupported value"),
    ]);
}

#[test]
fn containers() {
    let container = |fields: Value| {
        let mut container = json!({"name": "d", "image": "a:1"});
        container.as_object_mut().expect("an object").extend(fields.as_object().cloned().expect("an object"));
        container
    };
    let at = "/spec/containers/-";
    check(&[
        (at, container(json!({})), ""),
        (at, container(json!({"name": ""})), "spec.containers[1].name: Required value"),
        (
            at,
            container(json!({"name": "A"})),
            "spec.containers[1].name: Invalid value: \"A\": a lowercase RFC 1123 label",
        ),
        (at, container(json!({"name": "c"})), "spec.containers[1].name: Duplicate value: \"c\""),
        (
            "/spec/initContainers/-",
            container(json!({"name": "c"})),
            "spec.initContainers[1].name: Duplicate value: \"c\"",
        ),
        (at, container(json!({"image": ""})), "spec.containers[1].image: Required value"),
        (
            at,
            container(json!({"image": " a"})),
            "spec.containers[1].image: Invalid value: \" a\": must not have leading or trailing whitespace",
        ),
        (
            at,
            container(json!({"imagePullPolicy": "Maybe"})),
            "spec.containers[1].imagePullPolicy: Unsupported value: \"Maybe\": supported values: \"Always\", \"IfNotPresent\", \"Never\"",
        ),
        (
            at,
            container(json!({"terminationMessagePolicy": "x"})),
            "spec.containers[1].terminationMessagePolicy: Unsupported",
        ),
        (
            "/spec/initContainers/-",
            container(json!({"lifecycle": {}})),
            "spec.initContainers[1].lifecycle: Forbidden: may not be set for init containers without restartPolicy=Always",
        ),
        (
            "/spec/initContainers/-",
            container(json!({"restartPolicy": "Always", "readinessProbe": {"exec": {"command": ["x"]}}})),
            "",
        ),
        (
            at,
            container(
                json!({"restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}}]}),
            ),
            "spec.containers[1].restartPolicy: Required value: must specify restartPolicy when restart rules are used",
        ),
        (
            at,
            container(
                json!({"restartPolicy": "Never", "restartPolicyRules": [{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [1]}}]}),
            ),
            "",
        ),
        (
            at,
            container(
                json!({"restartPolicy": "Never", "restartPolicyRules": vec![json!({"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}}); 21]}),
            ),
            "spec.containers[1].restartPolicyRules: Too many: 21: must have at most 20 items",
        ),
        (
            at,
            container(
                json!({"restartPolicy": "Never", "restartPolicyRules": [{"action": "Restart", "exitCodes": {"operator": "In", "values": vec![1; 256]}}]}),
            ),
            "spec.containers[1].restartPolicyRules[0].exitCodes.values: Too many: 256",
        ),
        (
            at,
            container(
                json!({"restartPolicy": "Never", "restartPolicyRules": [{"action": "Stop", "exitCodes": {"operator": "In", "values": [1]}}]}),
            ),
            "spec.containers[1].restartPolicyRules[0].action: Unsupported value",
        ),
        (at, container(json!({"workingDir": "/a\u{0}"})), "spec.containers[1].workingDir: Invalid value"),
    ]);
}

#[test]
fn ports() {
    let at = "/spec/containers/0/ports";
    check(&[
        (at, json!([{"containerPort": 80, "name": "http"}]), ""),
        (at, json!([{"containerPort": 0}]), "spec.containers[0].ports[0].containerPort: Required value"),
        (
            at,
            json!([{"containerPort": 65536}]),
            "spec.containers[0].ports[0].containerPort: Invalid value: 65536: must be between 1 and 65535, inclusive",
        ),
        (at, json!([{"containerPort": 1, "hostPort": -1}]), "spec.containers[0].ports[0].hostPort: Invalid value: -1"),
        (at, json!([{"containerPort": 1, "name": "UPPER"}]), "spec.containers[0].ports[0].name: Invalid value"),
        (
            at,
            json!([{"containerPort": 1, "name": "a"}, {"containerPort": 2, "name": "a"}]),
            "spec.containers[0].ports[1].name: Duplicate value: \"a\"",
        ),
        (
            at,
            json!([{"containerPort": 1, "protocol": "ICMP"}]),
            "spec.containers[0].ports[0].protocol: Unsupported value: \"ICMP\": supported values: \"SCTP\", \"TCP\", \"UDP\"",
        ),
        (
            at,
            json!([{"containerPort": 1, "hostPort": 9}, {"containerPort": 2, "hostPort": 9}]),
            "spec.containers[0].ports[1].hostPort: Duplicate value: \"TCP//9\"",
        ),
        (at, json!([{"containerPort": 1, "hostPort": 9}, {"containerPort": 2, "hostPort": 9, "protocol": "UDP"}]), ""),
        (
            at,
            json!([{"containerPort": 1, "hostPort": 9, "hostIP": "lo"}]),
            "spec.containers[0].ports[0].hostIP: Invalid value",
        ),
    ]);
    let mut pod = base();
    pod["spec"]["hostNetwork"] = json!(true);
    pod["spec"]["containers"][0]["ports"] = json!([{"containerPort": 1, "hostPort": 9}]);
    let expected =
        "spec.containers[0].ports[0].hostPort: Invalid value: 9: must match `containerPort` when `hostNetwork` is true";
    assert_eq!(errors_of(pod), [expected]);
}

#[test]
fn environment() {
    let at = "/spec/containers/0/env";
    let from = |source: Value| json!([{"name": "A", "valueFrom": source}]);
    check(&[
        (at, json!([{"name": "A", "value": "x".repeat(1 << 20)}]), ""),
        (at, json!([{"name": ""}]), "spec.containers[0].env[0].name: Required value"),
        (
            at,
            json!([{"name": "A=B"}]),
            "spec.containers[0].env[0].name: Invalid value: \"A=B\": a valid environment variable name",
        ),
        (at, json!([{"name": "A", "value": "\u{0}"}]), "spec.containers[0].env[0].value: Invalid value"),
        (
            at,
            json!([{"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
            "spec.containers[0].env[0].valueFrom: Invalid value: \"\": may not be specified when `value` is not empty",
        ),
        (at, from(json!({})), "spec.containers[0].env[0].valueFrom: Invalid value: \"\": must specify one of"),
        (at, from(json!({"fieldRef": {"fieldPath": "metadata.labels['app']"}})), ""),
        (
            at,
            from(json!({"fieldRef": {"fieldPath": "spec.secret"}})),
            "spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Unsupported value: \"spec.secret\"",
        ),
        (at, from(json!({"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}})), ""),
        (
            at,
            from(json!({"resourceFieldRef": {"resource": "limits.cpu", "divisor": "3"}})),
            "spec.containers[0].env[0].valueFrom.resourceFieldRef.divisor: Invalid value: \"3\": only divisor's values 1m and 1",
        ),
        (
            at,
            from(json!({"resourceFieldRef": {"resource": "cpu"}})),
            "spec.containers[0].env[0].valueFrom.resourceFieldRef.resource: Unsupported value",
        ),
        (
            at,
            from(json!({"fileKeyRef": {"key": "k", "volumeName": "v", "path": "../x"}})),
            "spec.containers[0].env[0].valueFrom.fileKeyRef.path: Invalid value: \"../x\": must not contain '..'",
        ),
        (
            "/spec/containers/0/envFrom",
            json!([{}]),
            "spec.containers[0].envFrom[0]: Invalid value: \"\": must specify one of: `configMapRef` or `secretRef`",
        ),
    ]);
}

#[test]
fn volumes_and_mounts() {
    let volume = |source: Value| json!([{"name": "v"}, source]);
    let mounts = "/spec/containers/0/volumeMounts";
    check(&[
        ("/spec/volumes", volume(json!({"name": ""})), "spec.volumes[1].name: Required value"),
        ("/spec/volumes", volume(json!({"name": "../v"})), "spec.volumes[1].name: Invalid value: \"../v\""),
        ("/spec/volumes", volume(json!({"name": "v"})), "spec.volumes[1].name: Duplicate value: \"v\""),
        (
            "/spec/volumes",
            volume(json!({"name": "w", "emptyDir": {}, "hostPath": {"path": "/"}})),
            "spec.volumes[1].hostPath: Forbidden: may not specify more than 1 volume type",
        ),
        (
            "/spec/volumes",
            volume(json!({"name": "w", "hostPath": {"path": ""}})),
            "spec.volumes[1].hostPath.path: Required value",
        ),
        (
            "/spec/volumes",
            volume(json!({"name": "w", "hostPath": {"path": "/a/../b"}})),
            "spec.volumes[1].hostPath.path: Invalid value: \"/a/../b\": must not contain '..'",
        ),
        ("/spec/volumes", volume(json!({"name": "w", "hostPath": {"path": "/a..b"}})), ""),
        (
            "/spec/volumes",
            volume(json!({"name": "w", "hostPath": {"path": "/a", "type": "Dir"}})),
            "spec.volumes[1].hostPath.type: Unsupported value: \"Dir\"",
        ),
        (
            "/spec/volumes",
            volume(json!({"name": "w", "emptyDir": {"sizeLimit": "-1"}})),
            "spec.volumes[1].emptyDir.sizeLimit: Forbidden",
        ),
        (
            "/spec/volumes",
            volume(json!({"name": "w", "secret": {"secretName": "s", "defaultMode": 512}})),
            "spec.volumes[1].secret.defaultMode: Invalid value: 512: must be a number between 0 and 0777",
        ),
        (
            "/spec/volumes",
            volume(json!({"name": "w", "configMap": {"name": "m", "items": [{"key": "k", "path": "/a"}]}})),
            "spec.volumes[1].configMap.items[0].path: Invalid value: \"/a\": must be a relative path",
        ),
        (
            "/spec/volumes",
            volume(
                json!({"name": "w", "downwardAPI": {"items": [{"path": "..data", "fieldRef": {"fieldPath": "metadata.name"}}]}}),
            ),
            "spec.volumes[1].downwardAPI.items[0].path: Invalid value: \"..data\": must not start with '..'",
        ),
        (
            "/spec/volumes",
            volume(json!({"name": "w", "projected": {"sources": [{}]}})),
            "spec.volumes[1].projected.sources[0]: Required value: source type must be specified",
        ),
        (
            mounts,
            json!([{"name": "w", "mountPath": "/w"}]),
            "spec.containers[0].volumeMounts[0].name: Not found: \"w\"",
        ),
        (
            mounts,
            json!([{"name": "v", "mountPath": ""}]),
            "spec.containers[0].volumeMounts[0].mountPath: Required value",
        ),
        (
            mounts,
            json!([{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/a"}]),
            "spec.containers[0].volumeMounts[1].mountPath: Invalid value: \"/a\": must be unique",
        ),
        (
            mounts,
            json!([{"name": "v", "mountPath": "/a", "subPath": "../x"}]),
            "spec.containers[0].volumeMounts[0].subPath: Invalid value: \"../x\": must not contain '..'",
        ),
        (
            mounts,
            json!([{"name": "v", "mountPath": "/a", "subPath": "/x"}]),
            "spec.containers[0].volumeMounts[0].subPath: Invalid value: \"/x\": must be a relative path",
        ),
        (
            mounts,
            json!([{"name": "v", "mountPath": "/a", "subPath": "x", "subPathExpr": "y"}]),
            "spec.containers[0].volumeMounts[0].subPathExpr: Invalid value: \"y\": subPathExpr and subPath are mutually exclusive",
        ),
        (
            mounts,
            json!([{"name": "v", "mountPath": "/a", "mountPropagation": "Bidirectional"}]),
            "spec.containers[0].volumeMounts[0].mountPropagation: Forbidden: Bidirectional mount propagation",
        ),
        (
            mounts,
            json!([{"name": "v", "mountPath": "/a", "recursiveReadOnly": "Enabled"}]),
            "spec.containers[0].volumeMounts[0].recursiveReadOnly: Forbidden: may only be specified when readOnly is true",
        ),
        (
            "/spec/containers/0/volumeDevices",
            json!([{"name": "v", "devicePath": "/dev/x"}]),
            "spec.containers[0].volumeDevices[0].name: Invalid value",
        ),
    ]);
}

#[test]
fn resource_amounts() {
    let at = "/spec/containers/0/resources";
    check(&[
        (at, json!({"limits": {"cpu": "1.5", "memory": "1Gi"}, "requests": {"cpu": "100m"}}), ""),
        (
            at,
            json!({"limits": {"cpu": "lots"}}),
            "spec.containers[0].resources.limits[cpu]: Invalid value: \"lots\": quantities must match the regular expression",
        ),
        (
            at,
            json!({"limits": {"cpu": "-1"}}),
            "spec.containers[0].resources.limits[cpu]: Invalid value: \"-1\": must be greater than or equal to 0",
        ),
        (
            at,
            json!({"limits": {"cpu": "1"}, "requests": {"cpu": "1001m"}}),
            "spec.containers[0].resources.requests: Invalid value: \"1001m\": must be less than or equal to cpu limit of 1",
        ),
        (
            at,
            json!({"limits": {"gold": "1"}}),
            "spec.containers[0].resources.limits[gold]: Invalid value: \"gold\": must be a standard resource type or fully qualified",
        ),
        (
            at,
            json!({"requests": {"example.com/gpu": "1"}}),
            "spec.containers[0].resources.limits: Required value: Limit must be set for non overcommitable resources",
        ),
        (
            at,
            json!({"limits": {"example.com/gpu": "1500m"}}),
            "spec.containers[0].resources.limits[example.com/gpu]: Invalid value: \"1500m\": must be an integer",
        ),
        (
            at,
            json!({"limits": {"hugepages-2Mi": "2Mi"}}),
            "spec.containers[0].resources: Forbidden: HugePages require cpu or memory",
        ),
        (
            "/spec/resources",
            json!({"limits": {"ephemeral-storage": "1Gi"}}),
            "spec.resources.limits[ephemeral-storage]: Unsupported value",
        ),
        ("/spec/resources", json!({"limits": {"cpu": "1"}}), ""),
    ]);
}

#[test]
fn probes_and_hooks() {
    let probe = "/spec/containers/0/livenessProbe";
    check(&[
        (probe, json!({"httpGet": {"port": "http", "path": "/x"}}), ""),
        (probe, json!({}), "spec.containers[0].livenessProbe: Required value: must specify a handler type"),
        (
            probe,
            json!({"exec": {"command": ["x"]}, "tcpSocket": {"port": 1}}),
            "spec.containers[0].livenessProbe.tcpSocket: Forbidden: may not specify more than 1 handler type",
        ),
        (probe, json!({"exec": {"command": []}}), "spec.containers[0].livenessProbe.exec.command: Required value"),
        (probe, json!({"tcpSocket": {"port": 0}}), "spec.containers[0].livenessProbe.tcpSocket.port: Invalid value: 0"),
        (
            probe,
            json!({"tcpSocket": {"port": 1}, "periodSeconds": -1}),
            "spec.containers[0].livenessProbe.periodSeconds: Invalid value: -1: must be greater than or equal to 0",
        ),
        (
            probe,
            json!({"tcpSocket": {"port": 1}, "successThreshold": 2}),
            "spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1",
        ),
        (
            "/spec/containers/0/readinessProbe",
            json!({"grpc": {"port": 1}, "successThreshold": 2, "terminationGracePeriodSeconds": 1}),
            "spec.containers[0].readinessProbe.terminationGracePeriodSeconds: Invalid value: 1: must not be set for readinessProbes",
        ),
        (
            probe,
            json!({"httpGet": {"port": 1, "httpHeaders": [{"name": "a b", "value": ""}]}}),
            "spec.containers[0].livenessProbe.httpGet.httpHeaders[0].name: Invalid value",
        ),
        (
            "/spec/containers/0/lifecycle",
            json!({"preStop": {"sleep": {"seconds": 31}}}),
            "spec.containers[0].lifecycle.preStop.sleep.seconds: Invalid value: 31",
        ),
    ]);
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
        (
            container,
            json!({"privileged": true, "allowPrivilegeEscalation": false}),
            "spec.containers[0].securityContext: Invalid value: \"\": cannot set `allowPrivilegeEscalation` to false and `privileged` to true",
        ),
        (container, json!({"procMount": "Unmasked"}), "spec.containers[0].securityContext.procMount: Invalid value"),
    ]);
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
