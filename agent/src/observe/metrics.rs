//! The metrics of an observed node, and the endpoint that serves them.

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
use super::record::RunState;
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
    node.pods.values().for_each(|pod| of_pod(&metrics, pod));
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

fn of_pod(metrics: &Observe, pod: &ObservedPod) {
    let labels = PodLabels { namespace: &pod.pod.pod.namespace, pod: &pod.pod.pod.name };
    for container in &pod.pod.containers {
        metrics.container(match container.state {
            RunState::Created => "created",
            RunState::Running => "running",
            RunState::Exited => "exited",
            RunState::Unknown => "unknown",
        });
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
    use crate::observe::record::PodRecord;
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
