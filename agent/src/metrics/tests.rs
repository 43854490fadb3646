use std::time::Duration;

use super::*;
use crate::model::LifecycleKind;
use crate::model::OomConfidence;
use crate::model::OomScope;
use crate::model::OomVictim;
use crate::model::Source;

/// Uses every method once, so that every family shows.
fn used() -> Arc<Metrics> {
    let metrics = Metrics::new();
    let short = Duration::from_millis(3);
    let info =
        BuildInfo { git_version: "v1.36.3", major: "1", minor: "36", platform: "linux/amd64", compiler: "rustc" };
    metrics.node.name("node-1");
    metrics.node.cgroup_version(2);
    metrics.node.runtime_losing_support("1.37.0");
    metrics.node.build(&info);
    metrics.node.feature("EventedPLEG", "ALPHA", false);
    metrics.pods.desired(PodOrigin::Static, 3);
    metrics.pods.active(PodOrigin::Api, 2);
    let working = Working { lifecycle: "sync", config: "desired", origin: PodOrigin::Static };
    metrics.pods.working([(working, 3)]);
    metrics.pods.running(3, [("running", 4), ("exited", 1)]);
    metrics.pods.restarted(PodOrigin::Static);
    metrics.pods.orphaned();
    metrics.containers.ephemeral(1);
    metrics.pods.rejected("NodeShutdown");
    metrics.containers.of_new_pod(2);
    metrics.startup.running_after(short);
    metrics.pods.status_synced(short);
    metrics.pods.sandbox_started(false);
    metrics.pods.user_namespaced_started();
    metrics.pods.user_namespaced_failed();
    metrics.containers.started("container", Some("ErrImagePull"));
    metrics.containers.started("init_container", Some("pull secret ns/s: invalid docker configuration"));
    metrics.containers.terminated("container", 137, "OOMKilled");
    metrics.images.checked(MustPull::Allowed);
    metrics.images.plugin_ran("plugin", short, false);
    metrics.images.set_plugin_config("sha256:0");
    metrics.workers.synced(SyncKind::Create, short);
    metrics.workers.started(short);
    metrics.workers.planned(short);
    metrics.workers.acted("start-container", short, false);
    metrics.pleg.relist("period", short, Some(Duration::from_secs(300)), true);
    metrics.pleg.inspection(short, true);
    metrics.pleg.event(Source::Kernel, LifecycleKind::ContainerDied, Some(short));
    metrics.pleg.contradiction();
    metrics.pleg.stream(true);
    metrics.pleg.stream(false);
    metrics.pleg.stream_event(short);
    metrics.runtime.call("version", short, false);
    metrics.runtime.sandbox("", short, false);
    metrics.node_images.pulled(1 << 20, short);
    metrics.cgroups.operation("create", short);
    metrics.node_images.collected(true);
    metrics.node_images.asked("always", None, Some(true));
    metrics.volumes.operation("volume_mount", "kubernetes.io/secret", short, true);
    metrics.volumes.mounted_after("kubernetes.io/secret", short);
    metrics.volumes.measured(MetricSource::Walk, short);
    metrics.volumes.totals([(VolumeState::Actual, "kubernetes.io/secret", 1)]);
    metrics.volumes.claims([ClaimStats {
        namespace: "ns",
        name: "claim",
        capacity: 10,
        available: 4,
        used: 6,
        inodes: 5,
        inodes_free: 3,
        inodes_used: 2,
    }]);
    metrics.node.metrics_provider("cadvisor");
    let logs = LogsOf { uid: "u", namespace: "ns", pod: "p", container: "c" };
    metrics.containers.logs([(logs, 4096)]);
    metrics.recorder.lost("rejected");
    metrics.sensors.state("exits", SensorLevel::Degraded);
    metrics.sensors.dropped("exits", 5);
    metrics.oom.kill(OomScope::QosClass, OomVictim::Main, OomConfidence::Kernel);
    metrics.oom.corrected("Error", "OOMKilled");
    let request = Request { method: "GET", path: "pods", server: "readonly", long_running: false };
    metrics.http.began(&request);
    metrics.http.ended(&request, short);
    metrics.http.websocket(super::Subresource::Exec);
    metrics.rest_client.answered("GET", "host", Some(200));
    metrics.rest_client.took("GET", "host", short);
    metrics.rest_client.retried("GET", "host", Some(429));
    metrics.rest_client.waited("GET", "host", short);
    metrics.rest_client.sent("GET", "host", 1);
    metrics.rest_client.received("GET", "host", 1);
    metrics.rest_client.plugin_ran("no_error", 0);
    metrics.rest_client.transport_made();
    metrics.rest_client.transport_shared();
    metrics.rest_client.authority_reloaded(AuthorityReload::Updated);
    metrics.rest_client.looked_up("host", short);
    metrics.rest_client.transport_made();
    metrics.rest_client.transport_dropped();
    metrics.retries.retried("sync_pod");
    metrics.retries.stuck("sync_pod", vec![tokio::time::Instant::now() + Duration::from_secs(60)]);
    metrics.eviction.evicted("memory.available");
    metrics.eviction.preempted("cpu");
    metrics.eviction.stats_age("memory.available", short);
    metrics.eviction.memory_available(1, Some(2));
    metrics.eviction.decided("pressure", short);
    metrics.pressure.crossed("memory", "some", "node", true);
    metrics.pressure.explained_by_limits("cpu", "node");
    metrics.resizes.requested("increase", "limits", "memory");
    metrics.resizes.actuated(short, true);
    metrics.resizes.set_pending("deferred", 1);
    metrics.resizes.set_in_progress(1);
    metrics.resizes.infeasible("swap_limitation");
    metrics.resizes.deferred_accepted("pods_removed");
    metrics.pressure.decided("thrash", "evict", "DryRun");
    metrics.pressure.active("thrash", true);
    metrics.pressure.memory_returned(short);
    metrics.pressure.reclaim_stalls(vec![pod_stalls("u", 2)]);
    metrics.certificates.serving_rotated(short);
    metrics.certificates.serving_renewal_failed();
    metrics.certificates.of_pods([("s.io/s", "fresh", 2)]);
    metrics.access.token_reviewed(Some(201), short);
    metrics.access.access_reviewed(None, short);
    metrics.access.token_looked_up(true, short);
    metrics.access.token_reviews_in_flight(1);
    metrics.access.token_reviews_blocked(1);
    metrics.access.token_review_ended(true);
    metrics.access.certificate_presented(3600.0);
    metrics
}

fn pod_stalls(uid: &str, count: u64) -> PodStalls {
    let (namespace, pod, time) = ("ns".to_owned(), format!("pod-{uid}"), Duration::from_secs(count));
    PodStalls { uid: uid.to_owned(), namespace, pod, count, time }
}

#[test]
fn reclaim_stalls_only_grow_and_end_with_the_pod() {
    let metrics = Metrics::new();
    let value = || {
        let text = metrics.render().unwrap();
        let line =
            text.lines().find(|line| line.starts_with("keblet_pressure_reclaim_stalls_total{")).map(str::to_owned);
        line.and_then(|line| line.rsplit(' ').next().map(str::to_owned))
    };
    metrics.pressure.reclaim_stalls(vec![pod_stalls("a", 5)]);
    metrics.pressure.reclaim_stalls(vec![pod_stalls("a", 2)]);
    assert_eq!(value().as_deref(), Some("5"), "a container of the pod was removed");
    metrics.pressure.reclaim_stalls(vec![pod_stalls("a", 3)]);
    assert_eq!(value().as_deref(), Some("6"));
    metrics.pressure.reclaim_stalls(Vec::new());
    assert_eq!(value(), None);
}

/// Every family's name and type, as clients see them. The file is the promise.
#[test]
fn families_are_those_promised() {
    let text = used().render().unwrap();
    let mut families: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    families.sort_unstable();
    assert_eq!(families.join("\n"), include_str!("testdata/families.txt").trim_end());
}

#[test]
fn labels_and_values() {
    let text = used().render().unwrap();
    for line in [
        "kubelet_node_name{node=\"node-1\"} 1",
        "kubelet_desired_pods{static=\"true\"} 3",
        "kubelet_active_pods{static=\"\"} 2",
        "kubelet_working_pods{config=\"desired\",lifecycle=\"sync\",static=\"true\"} 3",
        "kubelet_running_containers{container_state=\"running\"} 4",
        "kubelet_started_pods_total 1",
        "kubelet_started_pods_errors_total 1",
        "kubelet_started_user_namespaced_pods_total 1",
        "kubelet_started_user_namespaced_pods_errors_total 1",
        "kubelet_started_containers_errors_total{code=\"ErrImagePull\",container_type=\"container\"} 1",
        "kubelet_started_containers_errors_total{code=\"Other\",container_type=\"init_container\"} 1",
        "kubelet_terminated_containers_total{container_type=\"container\",exit_code=\"137\",reason=\"OOMKilled\"} 1",
        "kubelet_pod_worker_duration_seconds_bucket{operation_type=\"create\",le=\"0.005\"} 1",
        "kubelet_volume_stats_used_bytes{namespace=\"ns\",persistentvolumeclaim=\"claim\"} 6",
        "kubelet_volume_stats_inodes_free{namespace=\"ns\",persistentvolumeclaim=\"claim\"} 3",
        "kubelet_podcertificate_states{signer_name=\"s.io/s\",state=\"fresh\"} 2",
        "kubelet_pleg_discard_events 0",
        "kubelet_pleg_relist_interval_seconds_bucket{le=\"10\"} 0",
        "kubelet_runtime_operations_errors_total{operation_type=\"version\"} 1",
        "kubelet_runtime_operations_duration_seconds_bucket{operation_type=\"version\",le=\"745.0580596923828\"} 1",
        "kubelet_image_pull_duration_seconds_count{image_size_in_bytes=\"0-10MB\"} 1",
        "kubernetes_feature_enabled{name=\"EventedPLEG\",stage=\"ALPHA\"} 0",
        "hidden_metrics_total 0",
        "disabled_metrics_total 0",
        "keblet_pressure_crossings_total{direction=\"entered\",kind=\"some\",resource=\"memory\",scope=\"node\"} 1",
        "keblet_pressure_level{kind=\"some\",resource=\"memory\",scope=\"node\"} 1",
        "keblet_pressure_policy_decisions_total{action=\"evict\",mode=\"DryRun\",policy=\"thrash\"} 1",
        "keblet_pressure_reclaim_stall_seconds_total{namespace=\"ns\",pod=\"pod-u\"} 2",
        "keblet_event_latency_seconds_bucket{source=\"kernel\",type=\"ContainerDied\",le=\"0.005\"} 1",
        "keblet_event_latency_seconds_bucket{source=\"kernel\",type=\"ContainerDied\",le=\"0.002\"} 0",
        "keblet_relists_total{reason=\"period\",result=\"ok\"} 1",
        "keblet_sensor_state{sensor=\"exits\",state=\"degraded\"} 1",
        "keblet_sensor_state{sensor=\"exits\",state=\"up\"} 0",
        "keblet_hints_dropped_total{queue=\"exits\"} 5",
        "rest_client_transport_cache_entries 1",
        "rest_client_transport_create_calls_total{result=\"miss\"} 2",
        "rest_client_transport_create_calls_total{result=\"hit\"} 1",
        "rest_client_transport_ca_reload_total{reason=\"updated\",result=\"success\"} 1",
        "rest_client_dns_resolution_duration_seconds_bucket{host=\"host\",le=\"0.005\"} 1",
        "volume_manager_total_volumes{plugin_name=\"kubernetes.io/secret\",state=\"actual_state_of_world\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
}

#[test]
fn counts_are_replaced() {
    let metrics = used();
    metrics.pods.working([]);
    metrics.pods.running(0, []);
    metrics.certificates.of_pods([]);
    metrics.node.name("node-2");
    let text = metrics.render().unwrap();
    let working: Vec<&str> = text.lines().filter(|line| line.starts_with("kubelet_working_pods{")).collect();
    assert!(working.len() == 15 && working.iter().all(|line| line.ends_with(" 0")), "{working:?}");
    assert!(!text.contains("kubelet_running_containers{"));
    assert!(!text.contains("kubelet_podcertificate_states{"));
    assert!(!text.contains("node-1"), "an old name does not stay");
}

#[test]
fn without_use_only_unlabelled_families_show() {
    let text = Metrics::new().render().unwrap();
    assert!(text.contains("\nkubelet_started_pods_total 0\n"));
    assert!(!text.contains("kubelet_runtime_operations_total"));
}

/// So that `time() - kubelet_pleg_last_seen_seconds` grows while the runtime does not answer.
#[test]
fn only_successful_lists_and_inspections_renew_when_the_pleg_was_seen() {
    let metrics = Metrics::new();
    let seen = || {
        let text = metrics.render().unwrap();
        let value = text.lines().find_map(|line| line.strip_prefix("kubelet_pleg_last_seen_seconds "));
        value.expect("the family").to_owned()
    };
    let relisted = |ok| metrics.pleg.relist("period", Duration::ZERO, None, ok);
    relisted(false);
    assert_eq!(seen(), "0");
    relisted(true);
    let last = seen();
    assert_ne!(last, "0");
    relisted(false);
    metrics.pleg.inspection(Duration::ZERO, false);
    assert_eq!(seen(), last);
    metrics.pleg.inspection(Duration::ZERO, true);
    assert!(seen().parse::<f64>().unwrap() > last.parse::<f64>().unwrap(), "events are followed");
}

/// An increase is seen only from the second value of a series on.
#[test]
fn oom_kills_begin_with_zero() {
    let metrics = Metrics::new();
    let line = "keblet_oom_kills_total{confidence=\"log\",scope=\"node\",victim=\"other\"}";
    let shows = |value: u64| metrics.render().unwrap().lines().any(|found| found == format!("{line} {value}"));
    assert!(shows(0));
    metrics.oom.kill(OomScope::Node, OomVictim::Other, OomConfidence::Log);
    assert!(shows(1));
}

/// All that the verdicts correct: `agent/src/oom/verdict_tests.rs` compares them.
#[test]
fn corrected_reasons_begin_with_zero() {
    let metrics = Metrics::new();
    let shown = || {
        let text = metrics.render().unwrap();
        let lines = text.lines().filter_map(|line| line.strip_prefix("keblet_oom_reasons_corrected_total"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let before = shown();
    assert!(before.len() == 5 && before.iter().all(|line| line.ends_with(" 0")), "{before:?}");
    metrics.oom.corrected("OOMKilled", "Error");
    assert_eq!(shown().len(), 5);
    assert!(shown().contains(&"{from=\"OOMKilled\",to=\"Error\"} 1".to_owned()), "{:?}", shown());
}

#[test]
fn restarted_pods_begin_with_zero() {
    let metrics = Metrics::new();
    let shown = || {
        let text = metrics.render().unwrap();
        let lines = text.lines().filter_map(|line| line.strip_prefix("kubelet_restarted_pods_total{static="));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(shown(), ["\"\"} 0", "\"true\"} 0"]);
    metrics.pods.restarted(PodOrigin::Api);
    assert_eq!(shown(), ["\"\"} 1", "\"true\"} 0"]);
}

#[test]
fn families_are_counted_by_stability() {
    let text = used().render().unwrap();
    for stability in ["BETA", "ALPHA", "INTERNAL"] {
        let mark = format!(" [{stability}] ");
        let shown = text.lines().filter(|line| line.starts_with("# HELP ") && line.contains(&mark)).count();
        let labels = format!(r#"deprecated_version="",stability_level="{stability}""#);
        let line = format!("registered_metrics_total{{{labels}}} {shown}");
        assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
    }
}

#[test]
fn the_process_is_seen() {
    let text = Metrics::new().render().unwrap();
    let value = |name: &str| -> f64 {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    assert!(value("process_resident_memory_bytes ") > 1e6);
    assert!(value("process_open_fds ") >= 3.0);
    assert!(value("process_max_fds ") >= value("process_open_fds "));
    assert!(value("process_start_time_seconds ") > 1.6e9);
    assert!(value("process_cpu_seconds_total ") >= 0.0);
}

#[test]
fn a_reason_for_which_no_resize_waits_has_no_series() {
    let metrics = Metrics::new();
    metrics.resizes.set_pending("deferred", 0);
    metrics.resizes.set_pending("infeasible", 2);
    let shown = || {
        let text = metrics.render().unwrap();
        let series = text.lines().filter(|line| line.starts_with("kubelet_pod_pending_resizes"));
        series.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(shown(), [r#"kubelet_pod_pending_resizes{reason="infeasible"} 2"#]);
    metrics.resizes.set_pending("infeasible", 0);
    assert!(shown().is_empty());
}

/// Series of `/metrics` that the dashboards, alerts and rules of kubernetes-mixin query, with the labels they select or
/// group by. Series that upstream has removed are not among them.
#[test]
fn dashboards_find_their_series() {
    let queried: &[(&str, &[&str])] = &[
        ("kubelet_node_name", &["node"]),
        ("kubelet_running_pods", &[]),
        ("kubelet_running_containers", &["container_state"]),
        ("volume_manager_total_volumes", &["state"]),
        ("kubelet_pleg_relist_duration_seconds_bucket", &["le"]),
        ("kubelet_pleg_relist_duration_seconds_count", &[]),
        ("kubelet_pleg_relist_interval_seconds_bucket", &["le"]),
        ("kubelet_pod_worker_duration_seconds_bucket", &["operation_type", "le"]),
        ("kubelet_pod_worker_duration_seconds_count", &["operation_type"]),
        ("kubelet_pod_start_duration_seconds_bucket", &["le"]),
        ("kubelet_pod_start_duration_seconds_count", &[]),
        ("kubelet_runtime_operations_total", &["operation_type"]),
        ("kubelet_runtime_operations_errors_total", &["operation_type"]),
        ("kubelet_runtime_operations_duration_seconds_bucket", &["operation_type", "le"]),
        ("kubelet_cgroup_manager_duration_seconds_bucket", &["operation_type", "le"]),
        ("kubelet_cgroup_manager_duration_seconds_count", &["operation_type"]),
        ("storage_operation_duration_seconds_bucket", &["operation_name", "volume_plugin", "le"]),
        ("storage_operation_duration_seconds_count", &["operation_name", "volume_plugin"]),
        ("rest_client_requests_total", &["code"]),
        ("rest_client_request_duration_seconds_bucket", &["verb", "le"]),
        ("kubelet_evictions", &["eviction_signal"]),
        ("kubelet_certificate_manager_client_ttl_seconds", &[]),
        ("kubelet_certificate_manager_server_ttl_seconds", &[]),
        ("kubelet_certificate_manager_client_expiration_renew_errors", &[]),
        ("kubelet_server_expiration_renew_errors", &[]),
        ("kubelet_volume_stats_capacity_bytes", &["namespace", "persistentvolumeclaim"]),
        ("kubelet_volume_stats_available_bytes", &["namespace", "persistentvolumeclaim"]),
        ("kubelet_volume_stats_used_bytes", &["namespace", "persistentvolumeclaim"]),
        ("kubelet_volume_stats_inodes", &["namespace", "persistentvolumeclaim"]),
        ("kubelet_volume_stats_inodes_free", &["namespace", "persistentvolumeclaim"]),
        ("kubelet_volume_stats_inodes_used", &["namespace", "persistentvolumeclaim"]),
        ("kubernetes_build_info", &["git_version"]),
        ("process_resident_memory_bytes", &[]),
        ("process_cpu_seconds_total", &[]),
        ("go_goroutines", &[]),
    ];
    let text = used().render().unwrap();
    let fits = |line: &str, name: &str, labels: &[&str]| {
        let (found, rest) = line.split_at(line.find(['{', ' ']).unwrap_or(line.len()));
        let has = |label: &&str| rest.contains(&format!("{{{label}=\"")) || rest.contains(&format!(",{label}=\""));
        found == name && labels.iter().all(has)
    };
    for (name, labels) in queried {
        assert!(text.lines().any(|line| fits(line, name, labels)), "{name} {labels:?} is missing in\n{text}");
    }
    for removed in ["kubelet_node_config_error", "storage_operation_errors_total"] {
        assert!(!text.contains(removed), "{removed}");
    }
}
