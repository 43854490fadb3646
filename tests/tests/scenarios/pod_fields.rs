//! Fields of pods on a real runtime, as the container itself sees them. It reports through its termination message.

use std::net::IpAddr;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_tests::standalone::StandaloneNode;
use serde_json::Value;
use serde_json::json;

/// Runs a pod with these fields, whose container writes the output of `script`; returns its lines and the pod's status.
pub(crate) fn report(
    node: &mut StandaloneNode,
    name: &str,
    fields: Value,
    container: Value,
    script: &str,
) -> Result<Report> {
    let mut pod = node.pod(name, &[]);
    let spec = pod["spec"].as_object_mut().context("a spec")?;
    spec.insert("restartPolicy".to_owned(), json!("Never"));
    spec.extend(fields.as_object().context("fields")?.clone());
    let main = pod["spec"]["containers"][0].as_object_mut().context("a container")?;
    main.insert("image".to_owned(), json!(BUSYBOX_IMAGE));
    main.insert("command".to_owned(), json!(["sh", "-c", format!("({script}) >/report 2>&1")]));
    main.insert("terminationMessagePath".to_owned(), json!("/report"));
    main.extend(container.as_object().context("fields")?.clone());
    node.layout.write_manifest(name, &pod)?;
    // The exit is published before the runtime has reported the path of the message.
    let (status, message) = node.until("the report of the pod", |node| {
        let status = node.status(name);
        ensure!(status["phase"] != "Failed", "{status}");
        let message = &status["containerStatuses"][0]["state"]["terminated"]["message"];
        Ok(message.as_str().map(|message| (status.clone(), message.to_owned())))
    })?;
    Ok(Report { lines: message.lines().map(str::to_owned).collect(), status })
}

/// What a pod has reported.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) lines: Vec<String>,
    status: Value,
}

#[test]
#[ignore = "real runtime"]
fn a_container_runs_with_its_identity_and_restrictions() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.start()?;
    let of_pod = json!({
        "hostIPC": true,
        "volumes": [{ "name": "data", "emptyDir": {} }],
        "securityContext": { "runAsUser": 1234, "runAsGroup": 2345, "fsGroup": 3456, "supplementalGroups": [4567] },
    });
    let context = json!({
        "readOnlyRootFilesystem": true,
        "allowPrivilegeEscalation": false,
        "runAsNonRoot": true,
        "capabilities": { "drop": ["ALL"], "add": ["NET_BIND_SERVICE"] },
        "seccompProfile": { "type": "RuntimeDefault" },
    });
    let container = json!({
        "securityContext": context,
        "workingDir": "/tmp",
        "env": [{ "name": "A", "value": "a" }, { "name": "B", "value": "$(A)b" }],
        "volumeMounts": [{ "name": "data", "mountPath": "/data" }, { "name": "data", "mountPath": "/ro", "readOnly": true }],
    });
    let script = "id -u; id -g; id -G; pwd; echo $B; readlink /proc/self/ns/ipc; readlink /proc/self/ns/net; \
                  awk '/CapBnd|NoNewPrivs|Seccomp:/ {print $1 $2}' /proc/self/status; touch /x; \
                  touch /data/x; stat -c %g /data/x; ls /ro; touch /ro/y; true";
    let report = report(&mut node, "identity", of_pod, container, script)?;
    let host = |kind: &str| std::fs::read_link(format!("/proc/self/ns/{kind}"));
    let (ipc, net) = (host("ipc")?.display().to_string(), host("net")?.display().to_string());
    let expected = [
        "1234",
        "2345",
        "2345 3456 4567",
        "/tmp",
        "ab",
        &ipc,
        &net,
        "CapBnd:0000000000000400",
        "NoNewPrivs:1",
        "Seccomp:2",
        "touch: /x: Read-only file system",
        "3456",
        "x",
        "touch: /ro/y: Read-only file system",
    ];
    ensure!(report.lines == expected, "{report:#?}");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn a_pod_with_a_network_of_its_own_has_its_names_and_resolver() -> Result<()> {
    let mut node = StandaloneNode::with(json!({ "clusterDomain": "cluster.test" }))?;
    node.start()?;
    let fields = json!({
        "hostNetwork": false,
        "hostname": "web",
        "subdomain": "sub",
        "setHostnameAsFQDN": true,
        "hostAliases": [{ "ip": "192.0.2.9", "hostnames": ["a.example", "b.example"] }],
        "dnsPolicy": "None",
        "dnsConfig": { "nameservers": ["192.0.2.53"], "searches": ["x.example"], "options": [{ "name": "ndots", "value": "2" }] },
        "securityContext": { "sysctls": [{ "name": "net.ipv4.ip_unprivileged_port_start", "value": "80" }] },
    });
    let script = "hostname; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; grep -v '^#' /etc/resolv.conf; \
                  grep -e sub.default -e example /etc/hosts";
    let report = report(&mut node, "names", fields, json!({}), script)?;
    let ip: IpAddr = report.status["podIP"].as_str().context("an address")?.parse()?;
    let expected = [
        "web.sub.default.svc.cluster.test".to_owned(),
        "80".to_owned(),
        "search x.example".to_owned(),
        "nameserver 192.0.2.53".to_owned(),
        "options ndots:2".to_owned(),
        format!("{ip}\tweb.sub.default.svc.cluster.test\tweb"),
        "192.0.2.9\ta.example\tb.example".to_owned(),
    ];
    ensure!(report.lines == expected, "{report:#?}");

    let fields = json!({ "hostNetwork": false, "hostnameOverride": "other.example", "dnsPolicy": "Default" });
    let report = self::report(&mut node, "override", fields, json!({}), "hostname; grep -c other.example /etc/hosts")?;
    ensure!(report.lines == ["other.example", "1"], "{report:#?}");
    node.stop()
}
