//! Environment of a container: literal values with `$(VAR)` expansion, fields of the pod, amounts of resources. Pure.
//!
//! Service variables do not exist without an API server; references to ConfigMaps, Secrets and files are refused.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::api::core::v1::EnvVarSource;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ResourceFieldSelector;

use super::GenerateError;
use super::expand::expand;
use super::names;
use super::qos;
use super::qos::Amounts;
use crate::model::Amount;

/// What environment variables can speak of besides the pod's own object.
#[derive(Clone, Copy, Debug)]
pub struct EnvContext<'a> {
    /// Addresses of the pod, primary first, at most one per family. The node's own with host network.
    pub pod_ips: &'a [String],
    /// Addresses of the node, primary first.
    pub node_ips: &'a [String],
    /// Allocatable cpu, memory and ephemeral-storage of the node: limits of who has none.
    pub allocatable: &'a Amounts,
}

/// The variables of `container`, by name.
///
/// # Errors
/// A source that does not exist, is not supported, or cannot be evaluated.
pub fn environment(
    pod: &Pod,
    container: &Container,
    context: EnvContext<'_>,
) -> Result<BTreeMap<String, String>, GenerateError> {
    if pod.spec.as_ref().is_some_and(|spec| spec.enable_service_links.is_none()) {
        return Err(GenerateError::NoServiceLinks);
    }
    if container.env_from.iter().flatten().next().is_some() {
        return Err(GenerateError::Unsupported { container: container.name.clone(), what: "envFrom" });
    }
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    for variable in container.env.iter().flatten() {
        let value = value_of(pod, container, variable, &known, context)?;
        known.insert(variable.name.clone(), value);
    }
    Ok(known)
}

/// Expands each word of a command or argument list with the final environment.
pub fn expand_words(words: Option<&Vec<String>>, environment: &BTreeMap<String, String>) -> Vec<String> {
    let lookup = |name: &str| environment.get(name).map(String::as_str);
    words.into_iter().flatten().map(|word| expand(word, lookup)).collect()
}

/// Expands `subPathExpr`.
///
/// # Errors
/// A variable that is unset or empty.
pub fn expand_sub_path(text: &str, environment: &BTreeMap<String, String>) -> Result<String, GenerateError> {
    let mut missing = std::collections::BTreeSet::new();
    let expanded = expand(text, |name| {
        let value = environment.get(name).map(String::as_str).filter(|value| !value.is_empty());
        if value.is_none() {
            missing.insert(name.to_owned());
        }
        value
    });
    if missing.is_empty() {
        return Ok(expanded);
    }
    Err(GenerateError::MissingValue { names: missing.into_iter().collect::<Vec<_>>().join(", ") })
}

fn value_of(
    pod: &Pod,
    container: &Container,
    variable: &EnvVar,
    known: &BTreeMap<String, String>,
    context: EnvContext<'_>,
) -> Result<String, GenerateError> {
    match (variable.value.as_deref().filter(|value| !value.is_empty()), &variable.value_from) {
        (Some(value), _) => Ok(expand(value, |name| known.get(name).map(String::as_str))),
        (None, Some(source)) => from_source(pod, container, source, context),
        (None, None) => Ok(String::new()),
    }
}

fn from_source(
    pod: &Pod,
    container: &Container,
    source: &EnvVarSource,
    context: EnvContext<'_>,
) -> Result<String, GenerateError> {
    if let Some(field) = &source.field_ref {
        return field_value(pod, &field.field_path, context);
    }
    if let Some(resource) = &source.resource_field_ref {
        return resource_value(pod, container, resource, context);
    }
    let what = if source.config_map_key_ref.is_some() {
        "env valueFrom configMapKeyRef"
    } else if source.secret_key_ref.is_some() {
        "env valueFrom secretKeyRef"
    } else {
        "env valueFrom fileKeyRef"
    };
    Err(GenerateError::Unsupported { container: container.name.clone(), what })
}

fn field_value(pod: &Pod, path: &str, context: EnvContext<'_>) -> Result<String, GenerateError> {
    let spec = pod.spec.as_ref();
    let first = |ips: &[String]| ips.first().cloned().unwrap_or_default();
    let value = match path {
        "metadata.name" => names::pod_name(pod).to_owned(),
        "metadata.namespace" => names::pod_namespace(pod).to_owned(),
        "metadata.uid" => names::pod_uid(pod).to_owned(),
        "spec.nodeName" => spec.and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
        "spec.serviceAccountName" => spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
        "status.podIP" => first(context.pod_ips),
        "status.podIPs" => context.pod_ips.join(","),
        "status.hostIP" | "status.hostIPs" if context.node_ips.is_empty() => return Err(GenerateError::NoNodeIp),
        "status.hostIP" => first(context.node_ips),
        "status.hostIPs" => context.node_ips.join(","),
        _ => subscripted(pod, path).ok_or_else(|| GenerateError::FieldPath { path: path.to_owned() })?,
    };
    Ok(value)
}

/// `metadata.labels['key']` or `metadata.annotations['key']`; empty if there is no such key.
fn subscripted(pod: &Pod, path: &str) -> Option<String> {
    let (field, rest) = path.split_once("['")?;
    let key = rest.strip_suffix("']")?;
    let map = match field {
        "metadata.labels" => &pod.metadata.labels,
        "metadata.annotations" => &pod.metadata.annotations,
        _ => return None,
    };
    Some(map.as_ref().and_then(|map| map.get(key)).cloned().unwrap_or_default())
}

fn resource_value(
    pod: &Pod,
    own: &Container,
    selector: &ResourceFieldSelector,
    context: EnvContext<'_>,
) -> Result<String, GenerateError> {
    let unknown = || GenerateError::ResourceField { resource: selector.resource.clone() };
    let (side, name) = selector.resource.split_once('.').ok_or_else(unknown)?;
    let known = matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-");
    let named = selector.container_name.as_deref().filter(|name| !name.is_empty());
    let container = match named {
        Some(name) => find(pod, name).ok_or_else(|| GenerateError::NoSuchContainer { name: name.to_owned() })?,
        None => own,
    };
    let names_init = named.is_some_and(|name| is_init(pod, name));
    let resources = container.resources.as_ref();
    let amount = match side {
        "requests" if known => qos::amounts(resources.and_then(|r| r.requests.as_ref()))?.get(name).copied(),
        "limits" if known => {
            let stated = qos::amounts(resources.and_then(|r| r.limits.as_ref()))?.get(name).copied();
            match stated.filter(|amount| !amount.is_zero()) {
                None if !names_init => default_limit(pod, name, context)?,
                _ => stated,
            }
        }
        _ => return Err(unknown()),
    };
    let divisor = selector.divisor.as_ref().map(Amount::try_from).transpose();
    let divisor = divisor.map_err(|source| GenerateError::Quantity { resource: "divisor".to_owned(), source })?;
    let divisor = divisor.filter(|divisor| !divisor.is_zero()).unwrap_or_else(|| Amount::units(1));
    Ok(divided(name, amount.unwrap_or_default(), divisor).to_string())
}

/// The pod's own limit (KEP-2837), else what the node has to give; hugepages have no default.
fn default_limit(pod: &Pod, name: &str, context: EnvContext<'_>) -> Result<Option<Amount>, GenerateError> {
    let pod_limits = pod.spec.as_ref().and_then(|spec| spec.resources.as_ref()).and_then(|r| r.limits.as_ref());
    let of_pod = qos::amounts(pod_limits)?.get(name).copied().filter(|_| matches!(name, "cpu" | "memory"));
    Ok(of_pod.filter(|amount| !amount.is_zero()).or_else(|| context.allocatable.get(name).copied()))
}

/// Whole multiples of the divisor, rounded up; cpu is counted in thousandths.
fn divided(name: &str, amount: Amount, divisor: Amount) -> i64 {
    let (amount, divisor) = match name {
        "cpu" => (amount.milli_value(), divisor.milli_value()),
        _ => (amount.value(), divisor.value()),
    };
    let divisor = divisor.max(1);
    amount / divisor + i64::from(amount % divisor > 0)
}

fn find<'a>(pod: &'a Pod, name: &str) -> Option<&'a Container> {
    qos::containers(pod).find(|container| container.name == name)
}

fn is_init(pod: &Pod, name: &str) -> bool {
    let spec = pod.spec.as_ref();
    spec.is_some_and(|spec| spec.init_containers.iter().flatten().any(|container| container.name == name))
}
