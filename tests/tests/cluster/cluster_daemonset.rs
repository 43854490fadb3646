//! The observer as `deploy` installs it, from the image of `cargo xtask image`: with the privileges of the DaemonSet it
//! reports what happens on its node, and nothing of it stays.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Pod;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::Session;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use keblet_tests::deploy;
use keblet_tests::deploy::helm::Chart;
use keblet_tests::observer;
use keblet_tests::standalone;
use kube::api::ListParams;
use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;

use super::cluster_metrics::Page;
use super::cluster_metrics::page;

const MANIFEST: &str = "deploy/observe/daemonset.yaml";
/// Where the manifest expects the runtime's socket.
const RUNTIME_FOLDER: &str = "/run/containerd";
/// CAP_PERFMON and CAP_BPF.
const CAPABILITIES: u64 = 1 << 38 | 1 << 39;
const POLL: Duration = Duration::from_millis(500);

/// A namespace on a node of its own that has the image.
async fn prepare(node: impl AsyncFnOnce(&Cluster) -> ClusterNode) -> Tenant {
    let cluster = Cluster::shared().await.unwrap();
    let node = node(&cluster).await;
    node.import(&standalone::image().unwrap()).unwrap();
    Tenant::on(cluster, Arc::new(node), "daemonset").await.unwrap()
}

/// Paths of the fields of `sent` that `stored` has not, or otherwise.
fn differing(sent: &Value, stored: &Value, path: &str, found: &mut Vec<String>) {
    match (sent, stored) {
        (Value::Object(sent), Value::Object(stored)) => {
            for (name, value) in sent {
                let stored = stored.get(name).unwrap_or(&Value::Null);
                differing(value, stored, &format!("{path}/{}", name.replace('/', "~1")), found);
            }
        }
        (Value::Array(sent), Value::Array(stored)) if sent.len() == stored.len() => {
            for (index, (value, stored)) in sent.iter().zip(stored).enumerate() {
                differing(value, stored, &format!("{path}/{index}"), found);
            }
        }
        (sent, stored) if sent == stored => {}
        // The API server leaves out a false `hostNetwork`.
        (Value::Bool(false), Value::Null) => {}
        _ => found.push(path.to_owned()),
    }
}

/// The manifest with what this node forces: a namespace and a node among those of other tests, and another folder of the
/// runtime's socket, which is replaced as for CRI-O.
fn manifest(tenant: &Tenant) -> Vec<Value> {
    let written = deploy::manifest(MANIFEST).unwrap();
    let text = fs::read_to_string(deploy::path(MANIFEST)).unwrap();
    let folder = tenant.node.folder().unwrap();
    let mut documents = deploy::yaml(&text.replace(RUNTIME_FOLDER, &folder.display().to_string())).unwrap();
    for document in &mut documents {
        let field = if document["kind"] == "Namespace" { "name" } else { "namespace" };
        document["metadata"][field] = json!(tenant.namespace);
        if document["kind"] == "DaemonSet" {
            document["spec"]["template"]["spec"]["nodeSelector"]["kubernetes.io/hostname"] = json!(tenant.node.name());
        }
    }
    let mut changed = Vec::new();
    differing(&json!(documents), &json!(written), "", &mut changed);
    changed.sort();
    let pod = "/2/spec/template/spec";
    let expected = [
        "/0/metadata/name".to_owned(),
        "/1/metadata/namespace".to_owned(),
        "/2/metadata/namespace".to_owned(),
        format!("{pod}/containers/0/args/3"),
        format!("{pod}/containers/0/volumeMounts/0/mountPath"),
        format!("{pod}/nodeSelector/kubernetes.io~1hostname"),
        format!("{pod}/volumes/0/hostPath/path"),
    ];
    assert_eq!(changed, expected);
    documents
}

/// The chart with the same, by its values.
fn chart(tenant: &Tenant) -> Vec<Value> {
    let chart = Chart::read(&deploy::path("deploy/helm/keblet-observe")).unwrap();
    let values = json!({
        "runtime": { "directory": tenant.node.folder().unwrap() },
        "nodeSelector": { "kubernetes.io/hostname": tenant.node.name() },
    });
    chart.render(&tenant.namespace, &values).unwrap()
}

/// Calls kubectl with these documents on its standard input.
async fn kubectl(tenant: &Tenant, arguments: &[&str], documents: &[Value]) {
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": documents }).to_string();
    let output = tenant.kubectl().run_with(arguments, &list).await.unwrap();
    assert_eq!(output.code, 0, "{arguments:?}: {}{}\n{}", output.out, output.err, tenant.node.log_excerpt());
}

/// A DaemonSet that was rolled out.
struct Installed<'a> {
    tenant: &'a Tenant,
    set: String,
    pod: Pod,
}

impl<'a> Installed<'a> {
    async fn new(tenant: &'a Tenant, documents: &[Value]) -> Self {
        let sent = deploy::of_kind(documents, "DaemonSet").unwrap();
        let set = sent["metadata"]["name"].as_str().unwrap().to_owned();
        kubectl(tenant, &["apply", "-f", "-"], documents).await;
        let complete = |set: Option<&DaemonSet>| {
            let status = set?.status.as_ref()?;
            let counts = [status.desired_number_scheduled, status.number_ready, status.number_available?];
            (counts == [1; 3]).then(|| set.cloned()).flatten()
        };
        let stored: DaemonSet = tenant.until(&set, "one ready pod", complete).await.unwrap();
        let mut lost = Vec::new();
        differing(sent, &serde_json::to_value(&stored).unwrap(), "", &mut lost);
        assert_eq!(lost, Vec::<String>::new(), "fields that the API server has stored otherwise");
        let labels = stored.spec.unwrap().selector.match_labels.unwrap();
        let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let pods = tenant.api::<Pod>().list(&ListParams::default().labels(&labels.join(","))).await.unwrap().items;
        let [pod] = <[Pod; 1]>::try_from(pods).unwrap();
        Self { tenant, set, pod }
    }

    fn pod(&self) -> &str {
        self.pod.metadata.name.as_deref().unwrap()
    }

    /// The metrics, from the port that is declared, and annotated if it is.
    async fn scrape(&self) -> Page {
        let ports = self.pod.spec.as_ref().unwrap().containers[0].ports.as_ref().unwrap();
        let port = ports.iter().find(|port| port.name.as_deref() == Some("metrics")).unwrap().container_port;
        if let Some(annotated) = self.pod.metadata.annotations.iter().find_map(|all| all.get("prometheus.io/port")) {
            assert_eq!(*annotated, port.to_string());
        }
        let address = self.pod.status.as_ref().unwrap().pod_ip.as_deref().unwrap();
        let url = format!("http://{address}:{port}/metrics");
        let client = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build().unwrap();
        let text = client.get(url).send().await.unwrap().error_for_status().unwrap().text().await.unwrap();
        Page::parse(&text).unwrap()
    }

    /// Waits until a scrape has each of these series.
    async fn until_counted(&self, series: &[(&str, &[(&str, &str)])]) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let page = self.scrape().await;
            let missing = series.iter().find(|(name, labels)| page.sum(name, labels) != Some(1.0));
            let Some(missing) = missing else { return };
            assert!(Instant::now() < deadline, "not once: {missing:?}; {}", self.tenant.node.log_excerpt());
            tokio::time::sleep(POLL).await;
        }
    }

    /// Waits until the node's agent has counted a successful liveness probe.
    async fn until_probed(&self) {
        let labels = [("probe_type", "Liveness"), ("result", "successful"), ("pod", self.pod())];
        let deadline = Instant::now() + TIMEOUT;
        while page(self.tenant, "/metrics/probes").await.unwrap().sum("prober_probe_total", &labels).is_none() {
            assert!(Instant::now() < deadline, "not probed; {}", self.tenant.node.log_excerpt());
            tokio::time::sleep(POLL).await;
        }
    }

    /// Process id and container id, as the runtime reports them.
    fn process(&self) -> (i32, String) {
        let pods = self.tenant.node.pods().unwrap();
        let pod = pods.iter().find(|pod| pod.name == self.pod()).unwrap();
        let container = pod.latest("observe").unwrap();
        (container.pid.unwrap(), container.id.clone())
    }

    /// Checks the privileges that the kernel grants.
    fn check_confined(&self) {
        let (pid, _) = self.process();
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
        let status = read("status");
        let field = |name: &str| {
            let values = status.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            values.map(str::trim).next().unwrap_or_else(|| panic!("no {name} in {status}"))
        };
        for set in ["CapPrm", "CapEff", "CapBnd"] {
            assert_eq!(u64::from_str_radix(field(set), 16).unwrap(), CAPABILITIES, "{set}: {status}");
        }
        assert_eq!((field("NoNewPrivs"), field("Seccomp")), ("1", "2"), "{status}");
        let namespace = |pid: &str, kind: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        let pid = pid.to_string();
        assert_eq!(namespace(&pid, "pid"), namespace("self", "pid"), "not the host's PID namespace");
        assert_ne!(namespace(&pid, "net"), namespace("self", "net"), "the host's network");
        self.check_mounts(&read("mountinfo"));
    }

    /// Checks that root and host paths are read-only, with all that is mounted below them if the agent reports that.
    fn check_mounts(&self, table: &str) {
        let mounts: Vec<(&Path, &str)> = table
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>())
            .map(|fields| (Path::new(fields[4]), fields[5]))
            .collect();
        let is_read_only = |options: &str| options.split(',').any(|option| option == "ro");
        let root = mounts.iter().find(|(point, _)| *point == Path::new("/")).unwrap();
        assert!(is_read_only(root.1), "{table}");
        let statuses = self.pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap();
        let of_volumes = statuses[0].volume_mounts.as_ref().unwrap();
        assert_eq!(of_volumes.len(), 2, "{of_volumes:?}");
        for volume in of_volumes {
            let point = Path::new(&volume.mount_path);
            let all = volume.recursive_read_only.as_deref() == Some("Enabled");
            let below = mounts.iter().filter(|(path, _)| if all { path.starts_with(point) } else { *path == point });
            let options: Vec<&str> = below.map(|(_, options)| *options).collect();
            assert!(!options.is_empty() && options.iter().all(|options| is_read_only(options)), "{volume:?}\n{table}");
        }
    }

    /// Waits until the kill is in the log, and returns the log's records. A line that is none is a warning or an error.
    async fn until_logged(&self, log: &Session) -> Vec<Value> {
        let is_kill = |record: &Value| {
            record["kind"] == "oom"
                && record["pod"]["name"] == "hungry"
                && record["pod"]["namespace"] == self.tenant.namespace
                && record["victim"] == "main"
                && record["confidence"] == "kernel"
        };
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let text = log.output_so_far();
            let complete = text.rsplit_once('\n').map_or("", |(complete, _)| complete);
            let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
            let records: Vec<Value> = complete.lines().map(parse).collect();
            let warning = records.iter().find(|record| record["schema"] != "keblet.dev/observe/v1");
            assert_eq!(warning, None);
            if records.iter().any(is_kill) {
                return records;
            }
            assert!(Instant::now() < deadline, "no kill that the kernel reported in {text}");
            tokio::time::sleep(POLL).await;
        }
    }

    /// Checks that every source of evidence that a pod can have is up, and that the node has its own name.
    fn check_sources(&self, records: &[Value]) {
        let start = records.iter().find(|record| record["kind"] == "start").unwrap();
        assert_eq!(start["node"], self.tenant.node.name(), "{start}");
        let later = records.iter().filter(|record| record["kind"] == "sensor");
        let states: BTreeMap<&str, &Value> = start["sensors"]
            .as_array()
            .unwrap()
            .iter()
            .chain(later)
            .map(|sensor| (sensor["sensor"].as_str().unwrap(), sensor))
            .collect();
        for sensor in ["exits", "oom", "cgroups", "reclaim", "pidfd", "relist"] {
            assert_eq!(states[sensor]["state"], "up", "{states:#?}");
        }
    }

    /// Checks that it was never restarted.
    async fn check_unharmed(&self) {
        let pod = self.tenant.api::<Pod>().get(self.pod()).await.unwrap();
        let statuses = pod.status.unwrap().container_statuses.unwrap();
        assert_eq!((statuses[0].restart_count, statuses[0].ready), (0, true), "{statuses:?}");
    }
}

/// A pod that is not restarted: one that the kernel kills, or one that exits with 3.
fn failing(tenant: &Tenant, for_want_of_memory: bool) -> Value {
    let mut spec = tenant.shell("exit 3");
    spec["restartPolicy"] = json!("Never");
    if for_want_of_memory {
        let container = &mut spec["containers"][0];
        container["image"] = json!(PROBE_IMAGE);
        container["command"] = json!(["/probe", "oom", "--mb", "256"]);
        container["resources"] = json!({ "limits": { "memory": "48Mi" } });
    }
    spec
}

/// Installs it, and lets it report what happens. Returns the container's id.
async fn observe(tenant: &Tenant, documents: &[Value]) -> String {
    let installed = Installed::new(tenant, documents).await;
    installed.check_confined();
    let mut log = tenant.kubectl().start(&["logs", "--follow", installed.pod()]).unwrap();
    log.until_output("\"kind\":\"ready\"").await.unwrap();

    tenant.pod("hungry", failing(tenant, true)).await.unwrap();
    tenant.pod("crashing", failing(tenant, false)).await.unwrap();
    let namespace = ("namespace", tenant.namespace.as_str());
    let (hungry, crashing) = (("pod", "hungry"), ("pod", "crashing"));
    let (exits, kills) = ("keblet_observe_container_exits_total", "keblet_pod_oom_kills_total");
    let main = ("container", "main");
    let series: [(&str, &[(&str, &str)]); 3] = [
        (kills, &[namespace, hungry, main, ("victim", "main")]),
        (exits, &[namespace, hungry, main, ("reason", "OOMKilled")]),
        (exits, &[namespace, crashing, main, ("reason", "Error")]),
    ];
    installed.until_counted(&series).await;
    // A second one in the same container, as the documentation calls it.
    let (set, folder) = (format!("daemonset/{}", installed.set), tenant.node.folder().unwrap());
    let endpoint = format!("--container-runtime-endpoint=unix://{}/containerd.sock", folder.display());
    let report = tenant.kubectl().ok(&["exec", &set, "--", "/usr/bin/keblet", "oom", &endpoint]).await.unwrap();
    assert!(report.contains(&format!("{}/hungry", tenant.namespace)), "{report}");
    installed.until_probed().await;
    installed.check_unharmed().await;
    installed.check_sources(&installed.until_logged(&log).await);
    installed.process().1
}

fn can_run() -> bool {
    let lack = observer::lacks_for_probes();
    if let Some(lack) = &lack {
        keblet_skip::skip(&format!("the probes cannot be loaded: {lack}"));
    }
    lack.is_none()
}

#[tokio::test]
#[ignore = "real cluster"]
async fn the_daemon_set_of_the_manifest_observes_its_node_and_leaves_nothing() {
    if !can_run() {
        return;
    }
    let tenant = prepare(async |cluster| ClusterNode::start(cluster, json!({})).await.unwrap()).await;
    let documents = manifest(&tenant);
    let container = observe(&tenant, &documents).await;
    // With the namespace.
    kubectl(&tenant, &["delete", "-f", "-"], &documents).await;
    assert_eq!(standalone::processes_of(&container), [0; 0]);
    tenant.node.until_nothing_remains().await.unwrap();
    let Tenant { cluster, node, .. } = tenant;
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn the_daemon_set_of_the_chart_observes_the_node_of_a_go_kubelet() {
    let kubelet = keblet_peers::find_programs().unwrap().join("kubelet");
    if !kubelet.exists() {
        return keblet_skip::skip(&format!("needs {}: run `cargo xtask peers`", kubelet.display()));
    }
    if !can_run() {
        return;
    }
    let start = async |cluster: &Cluster| ClusterNode::start_other(cluster, &kubelet, json!({})).await.unwrap();
    let tenant = prepare(start).await;
    let documents = chart(&tenant);
    let container = observe(&tenant, &documents).await;
    kubectl(&tenant, &["delete", "-f", "-"], &documents).await;
    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    assert_eq!(standalone::processes_of(&container), [0; 0]);
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}
