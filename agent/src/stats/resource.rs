//! `/metrics/resource`: what metrics-server reads. Pure.

use prometheus::proto::MetricFamily;

use super::family::Family;
use super::family::float;
use super::family::unix_seconds;
use super::sample::Measured;
use super::sample::Sample;

fn seconds(measured: &Measured) -> Option<f64> {
    measured.usage.cpu.map(|nanos| float(nanos) / 1e9)
}

fn working_set(measured: &Measured) -> Option<f64> {
    measured.usage.memory.map(|memory| float(memory.working_set))
}

fn swap(measured: &Measured) -> Option<f64> {
    measured.usage.memory?.swap.map(float)
}

fn swap_limit(measured: &Measured) -> Option<f64> {
    measured.usage.memory?.swap_limit.map(float)
}

/// The families, sorted by name; without a sample only `resource_scrape_error`.
pub(super) fn families(sample: Option<&Sample>) -> Vec<MetricFamily> {
    let mut error = Family::gauge("resource_scrape_error", "[STABLE] 1 if usage could not be measured, else 0");
    let failed = sample.is_none_or(|sample| sample.is_incomplete);
    error.add(&[], Some(if failed { 1.0 } else { 0.0 }), None);
    let mut all = vec![error];
    if let Some(sample) = sample {
        all.extend(of_node(sample));
        all.extend(of_containers(sample));
        all.extend(of_pods(sample));
    }
    all.retain(|family| !family.is_empty());
    all.sort_by_key(Family::name);
    all.into_iter().map(Family::into_family).collect()
}

fn of_node(sample: &Sample) -> [Family; 3] {
    let mut cpu =
        Family::counter("node_cpu_usage_seconds_total", "[STABLE] Processor time of the node in core-seconds");
    let mut memory = Family::gauge("node_memory_working_set_bytes", "[STABLE] Working set of the node in bytes");
    let mut swapped = Family::gauge("node_swap_usage_bytes", "[ALPHA] Swap the node uses in bytes");
    cpu.add(&[], seconds(&sample.node), Some(sample.at));
    memory.add(&[], working_set(&sample.node), Some(sample.at));
    swapped.add(&[], swap(&sample.node), Some(sample.at));
    [cpu, memory, swapped]
}

fn of_containers(sample: &Sample) -> [Family; 5] {
    let mut cpu = Family::counter(
        "container_cpu_usage_seconds_total",
        "[STABLE] Processor time of the container in core-seconds",
    );
    let mut memory =
        Family::gauge("container_memory_working_set_bytes", "[STABLE] Working set of the container in bytes");
    let mut start =
        Family::gauge("container_start_time_seconds", "[STABLE] Start of the container in seconds of Unix time");
    let mut swapped = Family::gauge("container_swap_usage_bytes", "[ALPHA] Swap the container uses in bytes");
    let mut limit = Family::gauge("container_swap_limit_bytes", "[ALPHA] Swap the container may use in bytes");
    for pod in &sample.pods {
        for container in &pod.containers {
            let labels =
                [("container", container.name.as_str()), ("namespace", &*pod.pod.namespace), ("pod", &*pod.pod.name)];
            let (measured, at) = (&container.measured, Some(sample.at));
            cpu.add(&labels, seconds(measured), at);
            memory.add(&labels, working_set(measured), at);
            start.add(&labels, unix_seconds(container.created_at), None);
            swapped.add(&labels, swap(measured), at);
            limit.add(&labels, swap_limit(measured), at);
        }
    }
    [cpu, memory, start, swapped, limit]
}

fn of_pods(sample: &Sample) -> [Family; 3] {
    let mut cpu = Family::counter("pod_cpu_usage_seconds_total", "[STABLE] Processor time of the pod in core-seconds");
    let mut memory = Family::gauge("pod_memory_working_set_bytes", "[STABLE] Working set of the pod in bytes");
    let mut swapped = Family::gauge("pod_swap_usage_bytes", "[ALPHA] Swap the pod uses in bytes");
    for pod in &sample.pods {
        let whole = pod.whole();
        let labels = [("namespace", &*pod.pod.namespace), ("pod", &*pod.pod.name)];
        cpu.add(&labels, seconds(&whole), Some(sample.at));
        memory.add(&labels, working_set(&whole), Some(sample.at));
        swapped.add(&labels, swap(&whole), Some(sample.at));
    }
    [cpu, memory, swapped]
}

#[cfg(test)]
mod tests {
    use prometheus::Encoder as _;
    use tokio::time::Instant;

    use super::super::sample::tests::sample;
    use super::*;

    fn text(sample: Option<&Sample>) -> String {
        let mut text = Vec::new();
        prometheus::TextEncoder::new().encode(&families(sample), &mut text).unwrap();
        String::from_utf8(text)
            .unwrap()
            .lines()
            .filter(|line| !line.starts_with("# HELP"))
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[tokio::test]
    async fn names_types_labels_and_times() {
        let labels = r#"{container="main",namespace="ns",pod="pod"}"#;
        let of_pod = r#"{namespace="ns",pod="pod"}"#;
        let at = 1_767_225_700_500_u64;
        let expected = [
            "# TYPE container_cpu_usage_seconds_total counter".to_owned(),
            format!("container_cpu_usage_seconds_total{labels} 2.5 {at}"),
            "# TYPE container_memory_working_set_bytes gauge".to_owned(),
            format!("container_memory_working_set_bytes{labels} 600 {at}"),
            "# TYPE container_start_time_seconds gauge".to_owned(),
            format!("container_start_time_seconds{labels} 1767225600"),
            "# TYPE container_swap_usage_bytes gauge".to_owned(),
            format!("container_swap_usage_bytes{labels} 7 {at}"),
            "# TYPE node_cpu_usage_seconds_total counter".to_owned(),
            format!("node_cpu_usage_seconds_total 2.5 {at}"),
            "# TYPE node_memory_working_set_bytes gauge".to_owned(),
            format!("node_memory_working_set_bytes 600 {at}"),
            "# TYPE node_swap_usage_bytes gauge".to_owned(),
            format!("node_swap_usage_bytes 7 {at}"),
            "# TYPE pod_cpu_usage_seconds_total counter".to_owned(),
            format!("pod_cpu_usage_seconds_total{of_pod} 2.5 {at}"),
            "# TYPE pod_memory_working_set_bytes gauge".to_owned(),
            format!("pod_memory_working_set_bytes{of_pod} 600 {at}"),
            "# TYPE pod_swap_usage_bytes gauge".to_owned(),
            format!("pod_swap_usage_bytes{of_pod} 7 {at}"),
            "# TYPE resource_scrape_error gauge".to_owned(),
            "resource_scrape_error 0".to_owned(),
        ];
        assert_eq!(text(Some(&sample(Instant::now(), 2_500_000_000))), expected.join("\n"));
    }

    #[tokio::test]
    async fn a_pod_without_a_cgroup_is_reported() {
        let mut sample = sample(Instant::now(), 2_500_000_000);
        sample.pods[0].own = None;
        let text = text(Some(&sample));
        for name in ["pod_cpu_usage_seconds_total", "pod_memory_working_set_bytes", "pod_swap_usage_bytes"] {
            assert!(text.contains(&format!("\n{name}{{")), "{name} is missing in\n{text}");
        }
    }

    #[test]
    fn without_a_sample_only_the_error_is_reported() {
        assert_eq!(text(None), "# TYPE resource_scrape_error gauge\nresource_scrape_error 1");
    }
}
