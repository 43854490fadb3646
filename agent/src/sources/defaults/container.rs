//! Defaults inside a container.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::api::core::v1::HTTPGetAction;
use k8s_openapi::api::core::v1::LifecycleHandler;
use k8s_openapi::api::core::v1::Probe;

use super::number;
use super::pull_policy;
use super::text;

pub(super) fn apply(container: &mut Container) {
    let policy = pull_policy(container.image.as_deref().unwrap_or_default());
    text(&mut container.image_pull_policy, policy);
    text(&mut container.termination_message_path, "/dev/termination-log");
    text(&mut container.termination_message_policy, "File");
    for port in container.ports.iter_mut().flatten() {
        text(&mut port.protocol, "TCP");
    }
    container.env.iter_mut().flatten().for_each(env);
    container.resources.get_or_insert_default();
    for probe in [&mut container.liveness_probe, &mut container.readiness_probe, &mut container.startup_probe] {
        probe.iter_mut().for_each(apply_probe);
    }
    if let Some(lifecycle) = &mut container.lifecycle {
        lifecycle.post_start.iter_mut().chain(&mut lifecycle.pre_stop).for_each(hook);
    }
}

fn env(env: &mut EnvVar) {
    let Some(from) = &mut env.value_from else { return };
    if let Some(field) = &mut from.field_ref {
        text(&mut field.api_version, "v1");
    }
    if let Some(file) = &mut from.file_key_ref {
        file.optional.get_or_insert(false);
    }
}

fn apply_probe(probe: &mut Probe) {
    number(&mut probe.timeout_seconds, 1);
    number(&mut probe.period_seconds, 10);
    number(&mut probe.success_threshold, 1);
    number(&mut probe.failure_threshold, 3);
    probe.http_get.iter_mut().for_each(http_get);
    if let Some(grpc) = &mut probe.grpc {
        grpc.service.get_or_insert_default();
    }
}

fn hook(handler: &mut LifecycleHandler) {
    handler.http_get.iter_mut().for_each(http_get);
}

fn http_get(action: &mut HTTPGetAction) {
    text(&mut action.path, "/");
    text(&mut action.scheme, "HTTP");
}
