//! Probes and lifecycle hooks.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ExecAction;
use k8s_openapi::api::core::v1::HTTPGetAction;
use k8s_openapi::api::core::v1::LifecycleHandler;
use k8s_openapi::api::core::v1::Probe;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::super::field::Findings;
use super::super::field::Path;
use super::formats;
use super::text;

/// Probes and hooks of a container that stays (regular or sidecar).
pub(super) fn check_container(container: &Container, grace: Option<i64>, path: &Path, findings: &mut Findings) {
    let liveness = path.child("livenessProbe");
    let readiness = path.child("readinessProbe");
    let startup = path.child("startupProbe");
    if let Some(probe) = &container.liveness_probe {
        check(probe, &liveness, findings);
        restarting(probe, &liveness, findings);
    }
    if let Some(probe) = &container.startup_probe {
        check(probe, &startup, findings);
        restarting(probe, &startup, findings);
    }
    if let Some(probe) = &container.readiness_probe {
        check(probe, &readiness, findings);
        if let Some(seconds) = probe.termination_grace_period_seconds {
            let path = readiness.child("terminationGracePeriodSeconds");
            findings.invalid(&path, &seconds, "must not be set for readinessProbes");
        }
    }
    if let Some(lifecycle) = &container.lifecycle {
        let path = path.child("lifecycle");
        for (field, hook) in [("postStart", &lifecycle.post_start), ("preStop", &lifecycle.pre_stop)] {
            if let Some(hook) = hook {
                check_hook(hook, grace, &path.child(field), findings);
            }
        }
    }
}

fn check(probe: &Probe, path: &Path, findings: &mut Findings) {
    let handlers = [
        ("exec", probe.exec.is_some()),
        ("httpGet", probe.http_get.is_some()),
        ("tcpSocket", probe.tcp_socket.is_some()),
        ("grpc", probe.grpc.is_some()),
    ];
    one_handler(&handlers, path, findings);
    actions(probe.exec.as_ref(), probe.http_get.as_ref(), probe.tcp_socket.as_ref().map(|t| &t.port), path, findings);
    if let Some(grpc) = &probe.grpc {
        formats::port(grpc.port)
            .iter()
            .for_each(|c| findings.invalid(&path.child("grpc").child("port"), &grpc.port, c));
    }
    let numbers = [
        ("initialDelaySeconds", probe.initial_delay_seconds),
        ("timeoutSeconds", probe.timeout_seconds),
        ("periodSeconds", probe.period_seconds),
        ("successThreshold", probe.success_threshold),
        ("failureThreshold", probe.failure_threshold),
    ];
    for (field, value) in numbers {
        super::not_negative(value.map(i64::from), &path.child(field), findings);
    }
    if let Some(seconds) = probe.termination_grace_period_seconds.filter(|&s| s <= 0) {
        findings.invalid(&path.child("terminationGracePeriodSeconds"), &seconds, "must be greater than 0");
    }
}

/// A probe whose failure restarts the container succeeds at once or not at all.
fn restarting(probe: &Probe, path: &Path, findings: &mut Findings) {
    if let Some(threshold) = probe.success_threshold.filter(|&t| t != 1) {
        findings.invalid(&path.child("successThreshold"), &threshold, "must be 1");
    }
}

fn check_hook(hook: &LifecycleHandler, grace: Option<i64>, path: &Path, findings: &mut Findings) {
    let handlers = [
        ("exec", hook.exec.is_some()),
        ("httpGet", hook.http_get.is_some()),
        ("tcpSocket", hook.tcp_socket.is_some()),
        ("sleep", hook.sleep.is_some()),
    ];
    one_handler(&handlers, path, findings);
    actions(hook.exec.as_ref(), hook.http_get.as_ref(), hook.tcp_socket.as_ref().map(|t| &t.port), path, findings);
    if let Some(sleep) = &hook.sleep {
        let grace = grace.unwrap_or(30);
        if !(0..=grace).contains(&sleep.seconds) {
            let message = format!("must be non-negative and less than terminationGracePeriodSeconds ({grace})");
            findings.invalid(&path.child("sleep").child("seconds"), &sleep.seconds, &message);
        }
    }
}

fn one_handler(handlers: &[(&str, bool)], path: &Path, findings: &mut Findings) {
    let mut set = handlers.iter().filter(|(_, set)| *set);
    if set.next().is_none() {
        findings.required(path, "must specify a handler type");
    }
    for (field, _) in set {
        findings.forbidden(&path.child(field), "may not specify more than 1 handler type");
    }
}

fn actions(
    exec: Option<&ExecAction>,
    http: Option<&HTTPGetAction>,
    tcp: Option<&IntOrString>,
    path: &Path,
    findings: &mut Findings,
) {
    if exec.is_some_and(|e| e.command.as_ref().is_none_or(Vec::is_empty)) {
        findings.required(&path.child("exec").child("command"), "");
    }
    if let Some(http) = http {
        http_get(http, &path.child("httpGet"), findings);
    }
    if let Some(port) = tcp {
        check_port(port, &path.child("tcpSocket").child("port"), findings);
    }
}

fn http_get(http: &HTTPGetAction, path: &Path, findings: &mut Findings) {
    if text(&http.path).is_empty() {
        findings.required(&path.child("path"), "");
    }
    check_port(&http.port, &path.child("port"), findings);
    findings.one_of(&path.child("scheme"), text(&http.scheme), &["HTTP", "HTTPS"]);
    for (i, header) in http.http_headers.iter().flatten().enumerate() {
        let path = path.child("httpHeaders").index(i).child("name");
        // Fewer characters than a token of HTTP has: no `_`, for example.
        if header.name.is_empty() || !header.name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            let message = "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', \
                           regex used for validation is '[-A-Za-z0-9]+')";
            findings.invalid(&path, &header.name, message);
        }
    }
}

fn check_port(port: &IntOrString, path: &Path, findings: &mut Findings) {
    match port {
        IntOrString::Int(number) => formats::port(*number).iter().for_each(|c| findings.invalid(path, number, c)),
        IntOrString::String(name) => findings.invalid_each(path, name, formats::port_name(name)),
    }
}
