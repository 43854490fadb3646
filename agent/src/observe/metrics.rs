//! The metrics of an observed node, and the endpoint that serves them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse;
use axum::response::Response;
use axum::routing::get;
use prometheus::proto::MetricFamily;

use super::collect::Measure;
use super::record::Confidence;
use super::record::Line;
use super::record::PressureRecord;
use super::record::PressureScope;
use super::record::Record;
use super::record::Resource;
use super::record::Scope;
use super::record::Victim;
use super::state::ObservedNode;
use super::state::ObservedPod;
use super::state::OomCounts;
use crate::metrics::Observe;
use crate::metrics::ObservedInfo;
use crate::metrics::PodLabels;
use crate::metrics::SensorLevel;
use crate::metrics::TEXT_FORMAT;
use crate::metrics::encode_text;

/// How long a scrape waits for a measurement.
const MEASURE: Duration = Duration::from_secs(2);

/// The node as it is observed now, shared with the endpoint. The one that receives records writes.
pub type SharedNode = Arc<Mutex<ObservedNode>>;

/// `/metrics`, measured for each scrape if the last measurement is older than a second, and `/healthz`.
pub fn router(node: SharedNode, measure: Measure) -> Router {
    let metrics = async move || {
        measure.now(MEASURE).await;
        let families = families(&node.lock().unwrap_or_else(PoisonError::into_inner));
        exposition(&families)
    };
    Router::new().route("/metrics", get(metrics)).route("/healthz", get(async || "ok"))
}

fn exposition(families: &[MetricFamily]) -> Response {
    match encode_text(families) {
        Ok(text) => ([(header::CONTENT_TYPE, TEXT_FORMAT)], text).into_response(),
        Err(error) => {
            let body = format!("An error has occurred while serving metrics:\n\n{error}\n");
            (StatusCode::INTERNAL_SERVER_ERROR, body).into_response()
        }
    }
}

/// The pressure of the node ends a measurement.
pub fn ends_measurement(line: &Line) -> bool {
    matches!(&line.record, Record::Pressure(pressure) if pressure.scope == PressureScope::Node)
}

/// All families of a node.
pub fn families(node: &ObservedNode) -> Vec<MetricFamily> {
    let metrics = Observe::new();
    let runtime = node.runtime.as_ref();
    metrics.info(&ObservedInfo {
        version: &node.start.version,
        kernel: &node.start.kernel,
        cgroups: &node.start.cgroups,
        runtime: runtime.map_or("", |runtime| &runtime.name),
        runtime_version: runtime.map_or("", |runtime| &runtime.version),
    });
    for sensor in node.sensors.values() {
        metrics.sensor(&sensor.sensor, SensorLevel::named(&sensor.state).unwrap_or(SensorLevel::Down));
    }
    metrics.lost(node.lost.exits, node.lost.cgroups, node.lost.watches);
    oom_kills(&metrics, &node.oom_counts);
    if let Some(pressure) = &node.pressure {
        waiting(&metrics, None, pressure);
    }
    let ready = node.pods.values().filter(|pod| pod.pod.sandbox_ready).count();
    metrics.pods(ready, node.pods.len() - ready);
    for container in node.pods.values().flat_map(|pod| &pod.pod.containers) {
        metrics.container(container.state.as_str());
    }
    one_per_name(node).for_each(|pod| of_pod(&metrics, pod));
    for stall in node.current_stalls() {
        let labels = PodLabels { namespace: &stall.pod.namespace, pod: &stall.pod.name };
        metrics.stalled(labels, stall.resource.as_str(), stall.cause.as_str(), stall.percent / 100.0);
    }
    metrics.gather()
}

/// All combinations, those without a kill as well: a query for an increase does not see the first value of a series.
fn oom_kills(metrics: &Observe, counts: &OomCounts) {
    for scope in Scope::ALL.map(Scope::as_str) {
        for victim in Victim::ALL.map(Victim::as_str) {
            for confidence in Confidence::ALL.map(Confidence::as_str) {
                let count = counts.get(&(scope, victim, confidence)).copied().unwrap_or(0);
                metrics.oom_kills(scope, victim, confidence, count);
            }
        }
    }
}

/// Of pods with one name, which share their series, the one whose sandbox is ready, or else that was started last: the runtime
/// keeps what is left of a pod for a while when another one has its name.
fn one_per_name(node: &ObservedNode) -> impl Iterator<Item = &ObservedPod> {
    let rank = |pod: &ObservedPod| {
        (pod.pod.sandbox_ready, pod.pod.containers.iter().filter_map(|container| container.started_at).max())
    };
    let mut chosen: BTreeMap<(&str, &str), &ObservedPod> = BTreeMap::new();
    for pod in node.pods.values() {
        let name = (pod.pod.pod.namespace.as_str(), pod.pod.pod.name.as_str());
        if chosen.get(&name).is_none_or(|best| rank(pod) > rank(best)) {
            chosen.insert(name, pod);
        }
    }
    chosen.into_values()
}

fn of_pod(metrics: &Observe, pod: &ObservedPod) {
    let labels = PodLabels { namespace: &pod.pod.pod.namespace, pod: &pod.pod.pod.name };
    for container in &pod.pod.containers {
        metrics.restarts(labels, &container.name, container.restarts);
    }
    for ((container, reason), count) in &pod.exit_counts {
        metrics.exits(labels, container, reason, *count);
    }
    for ((container, victim, scope), count) in &pod.oom_counts {
        metrics.pod_oom_kills(labels, container, victim, scope, *count);
    }
    if let Some(pressure) = &pod.pressure {
        waiting(metrics, Some(labels), pressure);
        metrics.memory(labels, pressure.memory_bytes, pressure.memory_limit_bytes);
        if let Some(reclaim) = pressure.reclaim {
            metrics.reclaim(labels, reclaim.stalls, reclaim.total_seconds);
        }
    }
}

fn waiting(metrics: &Observe, pod: Option<PodLabels<'_>>, record: &PressureRecord) {
    for resource in Resource::ALL {
        if let Some(waiting) = record.waiting(resource) {
            metrics.waiting(pod, resource.as_str(), waiting.some.total_seconds, waiting.full.total_seconds);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::record::ContainerView;
    use crate::observe::record::ExitInfo;
    use crate::observe::record::ExitRecord;
    use crate::observe::record::ExitSource;
    use crate::observe::record::PodName;
    use crate::observe::record::PodRecord;
    use crate::observe::record::Timestamp;
    use crate::observe::record::samples;

    #[test]
    fn the_exposition_tells_of_the_node_and_its_pods() {
        let text = String::from_utf8(encode_text(&families(&samples::node())).unwrap()).unwrap();
        for line in [
            "keblet_observe_pods{sandbox=\"ready\"} 5",
            "keblet_observe_containers{state=\"running\"} 6",
            "keblet_sensor_state{sensor=\"oom\",state=\"up\"} 1",
            "keblet_sensor_state{sensor=\"runtime-events\",state=\"down\"} 1",
            "keblet_oom_kills_total{confidence=\"kernel\",scope=\"container\",victim=\"child\"} 1",
            "keblet_pod_oom_kills_total{container=\"cart\",namespace=\"shop\",pod=\"cart-7d9f\",scope=\"container\",victim=\"child\"} 1",
            "keblet_observe_container_exits_total{container=\"worker\",namespace=\"batch\",pod=\"report-28\",reason=\"Error\"} 1",
            "keblet_pod_stalled_ratio{cause=\"other-pod\",namespace=\"shop\",pod=\"cart-7d9f\",resource=\"memory\"} 0.31",
            "keblet_pod_memory_limit_bytes{namespace=\"shop\",pod=\"cart-7d9f\"} 67108864",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
        assert!(text.contains("keblet_node_pressure_seconds_total{resource=\"memory\",share=\"full\"}"), "{text}");
        assert!(!text.contains("before"), "kills before the start are not counted: {text}");
    }

    #[test]
    fn oom_kills_of_the_node_begin_with_zero() {
        let text = String::from_utf8(encode_text(&families(&ObservedNode::default())).unwrap()).unwrap();
        let kills: Vec<&str> = text.lines().filter(|line| line.starts_with("keblet_oom_kills_total{")).collect();
        assert!(kills.iter().all(|line| line.ends_with("} 0")), "{kills:?}");
        let labels: Vec<_> = samples::node().oom_counts.into_keys().collect();
        assert!(!labels.is_empty() && kills.len() > labels.len(), "{labels:?}");
        for (scope, victim, confidence) in labels {
            let labels = format!("{{confidence=\"{confidence}\",scope=\"{scope}\",victim=\"{victim}\"}}");
            assert!(kills.iter().any(|line| line.contains(&labels)), "{labels} is missing in {kills:?}");
        }
    }

    /// As of a StatefulSet, or a static pod whose manifest was changed. Else the sum falls when what is left of the first ends.
    #[test]
    fn pods_with_one_name_are_not_summed_up() {
        let exposed = |exits: [u64; 2], ready: [bool; 2], uids: [&str; 2]| {
            let mut node = ObservedNode::default();
            for (second, uid) in (1..).zip(uids) {
                let at = usize::from(second == 2);
                let pod = PodName { namespace: "ns".into(), name: "p-0".into(), uid: uid.into() };
                let view = ContainerView {
                    name: "c".into(),
                    started_at: Timestamp::from_nanos(second * 1_000_000_000),
                    ..ContainerView::default()
                };
                let (sandbox_ready, containers) = (ready[at], vec![view]);
                let record = PodRecord { pod: pod.clone(), sandbox_ready, containers, ..PodRecord::default() };
                node.apply(&Line::new(node.now, Record::Pod(record)));
                for _ in 0..exits[at] {
                    let exit = ExitInfo { reason: "Error".into(), ..ExitInfo::default() };
                    let (pod, container, id, source) = (pod.clone(), "c".into(), String::new(), ExitSource::Runtime);
                    let record = ExitRecord { pod, container, id, exit, source, earlier: false };
                    node.apply(&Line::new(node.now, Record::Exit(record)));
                }
            }
            String::from_utf8(encode_text(&families(&node)).unwrap()).unwrap()
        };
        for uids in [["a", "b"], ["b", "a"]] {
            for (ready, expected) in [([false, true], 2), ([true, false], 5), ([false, false], 2)] {
                let text = exposed([5, 2], ready, uids);
                let series = "keblet_observe_container_exits_total{container=\"c\",namespace=\"ns\",pod=\"p-0\",reason=\"Error\"}";
                assert!(text.lines().any(|line| line == format!("{series} {expected}")), "{ready:?} {uids:?}\n{text}");
                assert!(text.contains("keblet_observe_containers{state=\"unknown\"} 2"), "both are there: {text}");
            }
        }
    }

    #[test]
    fn the_series_of_a_pod_end_with_it() {
        let mut node = samples::node();
        let pods: Vec<PodRecord> = node.pods.values().map(|pod| pod.pod.clone()).collect();
        for pod in pods {
            let removed = PodRecord { pod: pod.pod, removed: true, ..PodRecord::default() };
            node.apply(&Line::new(node.now, Record::Pod(removed)));
        }
        let text = String::from_utf8(encode_text(&families(&node)).unwrap()).unwrap();
        assert!(!text.contains("namespace=\"shop\""), "{text}");
    }
}
