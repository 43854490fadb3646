//! Containers and what they use.

use serde_json::Value;
use serde_json::json;

use super::base;
use super::check;
use super::errors_of;

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
    // Only regular containers have this rule.
    pod["spec"]["initContainers"][0]["ports"] = json!([{"containerPort": 1, "hostPort": 9}]);
    let expected =
        "spec.containers[0].ports[0].hostPort: Invalid value: 9: must match `containerPort` when `hostNetwork` is true";
    assert_eq!(errors_of(pod), [expected]);
}

#[test]
fn host_ports_of_init_containers() {
    let ports = json!([{"containerPort": 1, "hostPort": 9}, {"containerPort": 2, "hostPort": 9}]);
    check(&[
        (
            "/spec/initContainers/0/ports",
            ports,
            "spec.initContainers[0].ports[1].hostPort: Duplicate value: \"TCP//9\"",
        ),
        // Plain ones run one after the other.
        (
            "/spec/initContainers",
            json!([
                {"name": "i", "image": "a:1", "ports": [{"containerPort": 1, "hostPort": 9}]},
                {"name": "j", "image": "a:1", "ports": [{"containerPort": 1, "hostPort": 9}]},
            ]),
            "",
        ),
    ]);
}

#[test]
fn restarts() {
    let rules = json!([{"action": "Restart", "exitCodes": {"operator": "NotIn", "values": []}}]);
    check(&[
        ("/spec/containers/0/restartPolicy", json!(""), "spec.containers[0].restartPolicy: Unsupported value: \"\""),
        (
            "/spec/containers",
            json!([{"name": "c", "image": "a:1", "restartPolicy": "Never", "restartPolicyRules": rules}]),
            "",
        ),
    ]);
}

#[test]
fn stop_signals() {
    let path = "spec.containers[0].lifecycle.stopSignal";
    for (os, signal, expected) in [
        ("linux", "SIGTERM", ""),
        ("linux", "SIGRTMIN+15", ""),
        ("linux", "SIGRTMAX-14", ""),
        ("linux", "SIGRTMIN+16", "Invalid value: \"SIGRTMIN+16\": must be the name of a signal"),
        ("linux", "SIGRTMINPLUS1", "Invalid value: \"SIGRTMINPLUS1\": must be the name of a signal"),
        ("linux", "RUNTIME_DEFAULT", "Invalid value: \"RUNTIME_DEFAULT\": must be the name of a signal"),
        ("linux", "TERM", "Invalid value: \"TERM\": must be the name of a signal"),
        ("", "SIGTERM", "Forbidden: may not be set for containers with empty `spec.os.name`"),
    ] {
        let mut pod = base();
        if !os.is_empty() {
            pod["spec"]["os"] = json!({"name": os});
        }
        pod["spec"]["containers"][0]["lifecycle"] = json!({"stopSignal": signal});
        let errors = errors_of(pod);
        match expected {
            "" => assert_eq!(errors, Vec::<String>::new(), "{signal}"),
            _ => assert!(errors[0].starts_with(&format!("{path}: {expected}")), "{errors:?}"),
        }
    }
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
        (at, from(json!({"fieldRef": {"fieldPath": "metadata.annotations['Example.com/a']"}})), ""),
        (at, from(json!({"fieldRef": {"fieldPath": "spec.host"}})), ""),
        (
            at,
            from(json!({"fieldRef": {"fieldPath": "metadata.labels['Example.com/a']"}})),
            "spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Invalid value: \"Example.com/a\": prefix part",
        ),
        (
            at,
            from(json!({"fieldRef": {"fieldPath": "spec.secret"}})),
            "spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Unsupported value: \"spec.secret\"",
        ),
        (at, from(json!({"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}})), ""),
        (at, from(json!({"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1000m"}})), ""),
        (at, from(json!({"resourceFieldRef": {"resource": "limits.memory", "divisor": "1024Ki"}})), ""),
        (
            at,
            from(json!({"resourceFieldRef": {"resource": "limits.memory", "divisor": "2Mi"}})),
            "spec.containers[0].env[0].valueFrom.resourceFieldRef.divisor: Invalid value: \"2Mi\": only divisor's values 1, 1k",
        ),
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
        (at, from(json!({"fileKeyRef": {"key": "k", "volumeName": "v", "path": "x"}})), ""),
        (at, from(json!({"fileKeyRef": {"key": "k", "volumeName": "v", "path": "/x"}})), ""),
        (
            at,
            from(json!({"fileKeyRef": {"key": "A=B", "volumeName": "v", "path": "x"}})),
            "spec.containers[0].env[0].valueFrom.fileKeyRef.key: Invalid value: \"A=B\": a valid environment variable name",
        ),
        (
            at,
            from(json!({"fileKeyRef": {"key": "k", "volumeName": "w", "path": "x"}})),
            "spec.containers[0].env[0].valueFrom.fileKeyRef.volumeName: Not found: \"w\"",
        ),
        (
            "/spec/initContainers/0/env",
            json!([{"name": "A", "valueFrom": {"fileKeyRef": {"key": "k", "volumeName": "", "path": "x"}}}]),
            "spec.initContainers[0].env[0].valueFrom.fileKeyRef.volumeName: Required value",
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
            volume(
                json!({"name": "w", "downwardAPI": {"items": [{"path": "a", "fieldRef": {"fieldPath": "spec.host"}}]}}),
            ),
            "spec.volumes[1].downwardAPI.items[0].fieldRef.fieldPath: Unsupported value: \"spec.nodeName\"",
        ),
        ("/spec/volumes", volume(json!({"name": "w", "projected": {"sources": [{}]}})), ""),
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
fn iscsi_volumes() {
    let at = "spec.volumes[1].iscsi";
    for (change, expected) in [
        (json!({}), ""),
        (json!({"targetPortal": "[fd00::1]", "portals": ["storage:861"], "lun": 255, "iscsiInterface": "iser"}), ""),
        (json!({"targetPortal": ""}), ".targetPortal: Required value"),
        (json!({"targetPortal": "-p"}), ".targetPortal: Invalid value: \"-p\": must be an IP address or host name"),
        (json!({"portals": ["192.0.2.2", "a/b"]}), ".portals[1]: Invalid value: \"a/b\": must be an IP address"),
        (json!({"iqn": ""}), ".iqn: Required value"),
        (json!({"iqn": "iqn.2001-04.com.example:a/../b"}), ".iqn: Invalid value: \"iqn.2001-04.com.example:a/../b\""),
        (json!({"initiatorName": "me"}), ".initiatorName: Invalid value: \"me\": must begin with iqn., eui. or naa."),
        (json!({"iscsiInterface": "../x"}), ".iscsiInterface: Invalid value: \"../x\": must be a name"),
        (json!({"lun": -1}), ".lun: Invalid value: -1: must be between 0 and 255, inclusive"),
        (json!({"lun": 256}), ".lun: Invalid value: 256: must be between 0 and 255, inclusive"),
        (json!({"chapAuthSession": true}), ".secretRef: Required value"),
        (json!({"chapAuthDiscovery": true}), ".secretRef: Required value"),
    ] {
        let mut source = json!({"targetPortal": "192.0.2.1", "iqn": "iqn.2001-04.com.example:a", "lun": 0});
        source.as_object_mut().expect("an object").extend(change.as_object().expect("an object").clone());
        let expected = if expected.is_empty() { String::new() } else { format!("{at}{expected}") };
        check(&[("/spec/volumes", json!([{"name": "v"}, {"name": "w", "iscsi": source}]), &expected)]);
    }
}

#[test]
fn an_iscsi_volume_with_an_initiator_has_a_short_name_and_portal() {
    let of = |portal: &str, initiator: Option<&str>| {
        let source = json!({
            "targetPortal": portal, "iqn": "iqn.2001-04.com.example:a", "lun": 0, "initiatorName": initiator,
        });
        json!([{"name": "v"}, {"name": "w", "iscsi": source}])
    };
    let too_long = "spec.volumes[1].name: Invalid value: \"w\": Total length of <volume name>:<iscsi.targetPortal>";
    let initiator = Some("iqn.2001-04.com.example:me");
    check(&[
        ("/spec/volumes", of(&"a".repeat(62), initiator), ""),
        ("/spec/volumes", of(&"a".repeat(63), initiator), too_long),
        ("/spec/volumes", of(&"a".repeat(63), None), ""),
    ]);
}

#[test]
fn files_of_variables_lie_in_an_empty_dir() {
    let mut pod = base();
    pod["spec"]["volumes"][0]["configMap"] = json!({"name": "m"});
    let file = json!({"key": "k", "volumeName": "v", "path": "x"});
    pod["spec"]["containers"][0]["env"] = json!([{"name": "A", "valueFrom": {"fileKeyRef": file}}]);
    let expected = "spec.containers[0].env[0].valueFrom.fileKeyRef.volumeName: Invalid value: \"v\": \
        referenced volume must be of type emptyDir";
    assert_eq!(errors_of(pod), [expected]);
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
            probe,
            json!({"httpGet": {"port": 1, "httpHeaders": [{"name": "X_Probe", "value": ""}]}}),
            "spec.containers[0].livenessProbe.httpGet.httpHeaders[0].name: Invalid value: \"X_Probe\"",
        ),
        (
            "/spec/containers/0/lifecycle",
            json!({"preStop": {"sleep": {"seconds": 31}}}),
            "spec.containers[0].lifecycle.preStop.sleep.seconds: Invalid value: 31",
        ),
    ]);
}
