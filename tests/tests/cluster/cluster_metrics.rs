//! Metrics that dashboards and alerts read: the families exist and have plausible values.

use std::collections::BTreeMap;
use std::time::Duration;
use std::time::SystemTime;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;

/// The samples of one page.
pub(crate) struct Page(Vec<Sample>);

struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Page {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
        lines.map(|line| sample(line).with_context(|| format!("not a sample: {line}"))).collect::<Result<_>>().map(Self)
    }

    /// The samples of a name with these labels.
    fn with<'a>(&'a self, name: &'a str, labels: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Sample> {
        let fits =
            |sample: &&Sample| labels.iter().all(|(key, value)| sample.labels.get(*key).is_some_and(|is| is == value));
        self.0.iter().filter(move |sample| sample.name == name).filter(fits)
    }

    /// Their sum; `None` if there are none.
    pub(crate) fn sum(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.with(name, labels).map(|sample| sample.value).reduce(|sum, value| sum + value)
    }
}

/// Splits labels. Values of a node's metrics contain neither quotes nor commas.
fn sample(line: &str) -> Option<Sample> {
    let (series, rest) = match line.split_once('}') {
        Some((series, rest)) => (series, rest),
        None => line.split_once(' ')?,
    };
    let (name, labels) = series.split_once('{').unwrap_or((series, ""));
    let pairs = labels.strip_suffix('"').unwrap_or(labels).split("\",").filter(|pair| !pair.is_empty());
    let pairs = pairs.map(|pair| pair.split_once("=\"").map(|(key, value)| (key.to_owned(), value.to_owned())));
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Sample { name: name.to_owned(), labels: pairs.collect::<Option<_>>()?, value })
}

/// A page of the node's, by way of the API server.
pub(crate) async fn page(tenant: &Tenant, path: &str) -> Result<Page> {
    let path = format!("/api/v1/nodes/{}/proxy{path}", tenant.node.name());
    Page::parse(&tenant.kubectl().ok(&["get", "--raw", &path]).await?)
}

/// Reads a page until all families have an expected value; the error names one that has not.
async fn until_all(tenant: &Tenant, path: &str, expected: &[Expected<'_>]) -> Result<Page> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let page = page(tenant, path).await?;
        let wrong = expected.iter().find_map(|(name, labels, is_right)| {
            let value = page.sum(name, labels);
            (!value.is_some_and(is_right)).then(|| format!("{name} {labels:?} is {value:?}"))
        });
        let Some(wrong) = wrong else { return Ok(page) };
        ensure!(Instant::now() < deadline, "{path}: {wrong}\n{}", tenant.node.log_excerpt());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

type Expected<'a> = (&'a str, &'a [(&'a str, &'a str)], fn(f64) -> bool);

fn some(value: f64) -> bool {
    value >= 1.0
}

const MEBIBYTE: f64 = 1024.0 * 1024.0;

/// A pod with volumes and limits that writes a log and uses the processor a little.
async fn worker(tenant: &Tenant) -> Result<()> {
    tenant.kubectl().ok(&["create", "configmap", "settings", "--from-literal=key=value"]).await?;
    let mut spec = tenant.shell("i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo counted; exec sleep 1000");
    spec["volumes"] =
        json!([{ "name": "scratch", "emptyDir": {} }, { "name": "settings", "configMap": { "name": "settings" } }]);
    spec["containers"][0]["volumeMounts"] =
        json!([{ "name": "scratch", "mountPath": "/scratch" }, { "name": "settings", "mountPath": "/settings" }]);
    spec["containers"][0]["resources"] = json!({ "limits": { "cpu": "500m", "memory": "64Mi" } });
    tenant.pod("worker", spec).await?;
    tenant.until_ready("worker").await.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn dashboard_metrics_have_plausible_values() -> Result<()> {
    let tenant = Tenant::new_namespace("metrics").await?;
    worker(&tenant).await?;
    let mounted = |plugin| [("operation_name", "volume_mount"), ("status", "success"), ("volume_plugin", plugin)];
    let (scratch, settings, token) =
        (mounted("kubernetes.io/empty-dir"), mounted("kubernetes.io/configmap"), mounted("kubernetes.io/projected"));
    let of_pod = [("namespace", tenant.namespace.as_str()), ("pod", "worker"), ("container", "main")];
    let set_up = [("plugin_name", "kubernetes.io/configmap"), ("state", "actual_state_of_world")];
    let labels = [("plugin_name", "kubernetes.io/configmap"), ("state", "desired_state_of_world")];
    until_all(
        &tenant,
        "/metrics",
        &[
            ("storage_operation_duration_seconds_count", &scratch, some),
            ("storage_operation_duration_seconds_count", &settings, some),
            ("storage_operation_duration_seconds_count", &token, some),
            ("volume_manager_total_volumes", &set_up, some),
            ("volume_manager_total_volumes", &labels, some),
            ("kubelet_container_log_filesystem_used_bytes", &of_pod, some),
            (
                "kubelet_image_manager_ensure_image_requests_total",
                &[("pull_policy", "never"), ("present_locally", "true")],
                some,
            ),
            ("kubelet_metrics_provider", &[("provider", "cadvisor")], |value| value == 1.0),
            ("kubelet_node_name", &[("node", tenant.node.name())], |value| value == 1.0),
            ("kubelet_running_pods", &[], some),
            ("kubelet_running_containers", &[("container_state", "running")], some),
            ("kubelet_active_pods", &[("static", "")], some),
            ("kubelet_started_containers_total", &[("container_type", "container")], some),
            ("kubelet_pod_start_duration_seconds_count", &[], some),
            ("kubelet_pod_start_sli_duration_seconds_count", &[], some),
            ("kubelet_pod_worker_duration_seconds_count", &[("operation_type", "create")], some),
            ("kubelet_runtime_operations_total", &[("operation_type", "start_container")], some),
            ("kubelet_runtime_operations_duration_seconds_count", &[("operation_type", "run_podsandbox")], some),
            ("kubelet_pleg_relist_duration_seconds_count", &[], some),
            ("kubelet_http_requests_total", &[("path", "metrics")], some),
            ("rest_client_requests_total", &[("code", "200"), ("method", "GET")], some),
            ("rest_client_request_duration_seconds_count", &[("verb", "GET")], some),
            ("rest_client_transport_create_calls_total", &[], some),
            ("process_resident_memory_bytes", &[], |value| value > MEBIBYTE),
            ("process_cpu_seconds_total", &[], |value| value > 0.0),
        ],
    )
    .await?;
    usage(&tenant, &of_pod).await?;
    volumes(&tenant).await?;

    tenant.kubectl().ok(&["delete", "pod", "worker"]).await?;
    let unmounted = ["empty-dir", "configmap", "projected"].map(|plugin| format!("kubernetes.io/{plugin}"));
    for plugin in &unmounted {
        let labels = [("operation_name", "volume_unmount"), ("status", "success"), ("volume_plugin", plugin.as_str())];
        until_all(&tenant, "/metrics", &[("storage_operation_duration_seconds_count", &labels, some)]).await?;
    }
    let deadline = Instant::now() + TIMEOUT;
    while page(&tenant, "/metrics/cadvisor").await?.with("container_last_seen", &of_pod[..2]).next().is_some() {
        ensure!(Instant::now() < deadline, "a removed pod still has metrics");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    tenant.delete_namespace().await.map(drop)
}

/// The pages with resource usage, which must agree.
async fn usage(tenant: &Tenant, of_pod: &[(&str, &str)]) -> Result<()> {
    let no_error: Expected<'_> = ("container_scrape_error", &[], |value| value == 0.0);
    let page = until_all(
        tenant,
        "/metrics/cadvisor",
        &[
            no_error,
            ("container_cpu_usage_seconds_total", of_pod, |value| value > 0.05 && value < 600.0),
            ("container_memory_working_set_bytes", of_pod, |value| value > 0.0 && value < 64.0 * MEBIBYTE),
            ("container_memory_usage_bytes", of_pod, |value| value > 0.0),
            ("container_memory_rss", of_pod, |value| value >= 0.0),
            ("container_spec_memory_limit_bytes", of_pod, |value| value == 64.0 * MEBIBYTE),
            ("container_spec_cpu_quota", of_pod, |value| value == 50_000.0),
            ("container_spec_cpu_period", of_pod, |value| value == 100_000.0),
            ("container_cpu_cfs_periods_total", of_pod, some),
            ("container_network_receive_bytes_total", &of_pod[..2], |value| value >= 0.0),
            ("container_processes", of_pod, some),
            ("container_file_descriptors", of_pod, some),
            ("container_ulimits_soft", of_pod, some),
            ("container_fs_limit_bytes", &[("id", "/")], |value| value > MEBIBYTE),
            ("machine_cpu_cores", &[], some),
            ("machine_memory_bytes", &[], |value| value > 64.0 * MEBIBYTE),
        ],
    )
    .await?;
    let labels = ["container", "id", "image", "name", "namespace", "pod"];
    for sample in page.0.iter().filter(|sample| sample.name.starts_with("container_memory_working_set")) {
        assert_eq!(sample.labels.keys().collect::<Vec<_>>(), labels, "{}", sample.name);
    }
    let of_machine = page.sum("container_cpu_usage_seconds_total", &[("id", "/")]).context("the root cgroup")?;
    let of_container = page.sum("container_cpu_usage_seconds_total", of_pod).context("the container")?;
    assert!(of_container < of_machine, "{of_container} of {of_machine}");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64();
    let started = page.sum("container_start_time_seconds", of_pod).context("the container's start")?;
    assert!(now - started < 600.0 && started <= now, "{started} at {now}");
    let network: Vec<&Sample> = page.with("container_network_receive_bytes_total", &of_pod[..2]).collect();
    assert!(network.iter().all(|sample| sample.labels["container"].is_empty()), "network metrics are per pod");
    assert!(network.iter().all(|sample| !sample.labels["image"].is_empty()), "dashboards select them by image!=\"\"");

    let resource = self::page(tenant, "/metrics/resource").await?;
    let same = resource.sum("container_cpu_usage_seconds_total", of_pod).context("the container")?;
    assert!((0.0..60.0).contains(&(same - of_container)), "{same} after {of_container}");
    let probes = self::page(tenant, "/metrics/probes").await?;
    assert!(probes.sum("process_start_time_seconds", &[]).is_some_and(|at| at > 0.0 && at <= now));
    Ok(())
}

/// The summary has the volumes of the pod. A kubelet measures those of a new pod within two minutes.
async fn volumes(tenant: &Tenant) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(180);
    let path = format!("/api/v1/nodes/{}/proxy/stats/summary", tenant.node.name());
    loop {
        let summary: Value = serde_json::from_str(&tenant.kubectl().ok(&["get", "--raw", &path]).await?)?;
        let is_worker = |pod: &&Value| pod["podRef"]["namespace"] == tenant.namespace.as_str();
        let pod = summary["pods"].as_array().into_iter().flatten().find(is_worker);
        let volumes = pod.and_then(|pod| pod["volume"].as_array()).into_iter().flatten();
        let used = |name: &str| volumes.clone().find(|volume| volume["name"] == name)?["inodesUsed"].as_u64();
        if used("scratch") >= Some(1) && used("settings") >= Some(1) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "volumes are missing in {summary:#}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
