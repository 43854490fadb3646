//! AppArmor profiles (KEP-24) on a host that cannot enforce them, and profiles without a name. Pure.

use k8s_openapi::api::core::v1::AppArmorProfile;
use k8s_openapi::api::core::v1::Pod;

use super::Decision;
use super::Input;
use crate::model::quote::go_quoted;
use crate::model::spec;
use crate::model::spec::APP_ARMOR_ANNOTATION;

const REASON: &str = "AppArmor";

/// The profile of one container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Profile<'a> {
    Unconfined,
    RuntimeDefault,
    Localhost(&'a str),
}

/// Pods that have left phase Pending keep what they run with.
pub(super) fn check(input: Input<'_>) -> Decision {
    let phase = input.pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    let profiles = profiles(input.pod);
    if phase != "Pending" || !is_required(input.pod, &profiles) {
        return Decision::Admit;
    }
    if !input.node.app_armor {
        return Decision::reject(REASON, "Cannot enforce AppArmor: AppArmor is not enabled on the host");
    }
    let nameless = profiles.iter().find_map(|profile| match profile {
        Profile::Localhost(name) if name.trim().is_empty() => Some(*name),
        _ => None,
    });
    match nameless {
        Some(name) => {
            let message = format!("Cannot enforce AppArmor: invalid empty AppArmor profile name: {}", go_quoted(name));
            Decision::reject(REASON, message)
        }
        None => Decision::Admit,
    }
}

/// Whether any profile is to be enforced: one of a container, or one that the pod or an annotation states, also if every
/// container has another one.
fn is_required(pod: &Pod, profiles: &[Profile<'_>]) -> bool {
    let mut annotations = pod.metadata.annotations.iter().flatten();
    profiles.iter().copied().chain(of_pod(pod).map(by_field)).any(|profile| profile != Profile::Unconfined)
        || annotations.any(|(key, value)| key.starts_with(APP_ARMOR_ANNOTATION) && value != "unconfined")
}

fn of_pod(pod: &Pod) -> Option<&AppArmorProfile> {
    pod.spec.as_ref()?.security_context.as_ref()?.app_armor_profile.as_ref()
}

/// The profiles of all containers that have one: the container's field, else its annotation, else the pod's field.
fn profiles(pod: &Pod) -> Vec<Profile<'_>> {
    let of_pod = of_pod(pod);
    let regular = spec::init_containers(pod).iter().chain(spec::regular_containers(pod));
    let regular = regular.map(|container| (container.name.as_str(), container.security_context.as_ref()));
    let ephemeral = spec::ephemeral_containers(pod).iter();
    let ephemeral = ephemeral.map(|container| (container.name.as_str(), container.security_context.as_ref()));
    let mut profiles = Vec::new();
    for (name, context) in regular.chain(ephemeral) {
        let own = context.and_then(|context| context.app_armor_profile.as_ref());
        profiles.extend(own.map(by_field).or_else(|| by_annotation(pod, name)).or_else(|| of_pod.map(by_field)));
    }
    profiles
}

/// A type that is not known counts as one that must be enforced.
fn by_field(profile: &AppArmorProfile) -> Profile<'_> {
    match profile.type_.as_str() {
        "Unconfined" => Profile::Unconfined,
        "RuntimeDefault" => Profile::RuntimeDefault,
        _ => Profile::Localhost(profile.localhost_profile.as_deref().unwrap_or_default()),
    }
}

fn by_annotation<'a>(pod: &'a Pod, container: &str) -> Option<Profile<'a>> {
    match pod.metadata.annotations.as_ref()?.get(&format!("{APP_ARMOR_ANNOTATION}{container}"))?.as_str() {
        "unconfined" => Some(Profile::Unconfined),
        "runtime/default" => Some(Profile::RuntimeDefault),
        other => other.strip_prefix("localhost/").map(Profile::Localhost),
    }
}
