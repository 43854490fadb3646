//! Environment of a container: variables of services, of whole ConfigMaps and Secrets, literal values with `$(VAR)`
//! expansion, fields of the pod, amounts of resources, keys of ConfigMaps and Secrets. Pure: the objects come in.
//!
//! References to files (KEP-5307) are refused.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::EnvFromSource;
use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::api::core::v1::EnvVarSource;
use k8s_openapi::api::core::v1::Pod;

use super::EnvObjects;
use super::GenerateError;
use super::expand::expand;
use super::names;
use super::qos::Amounts;
use crate::model::downward;

/// What environment variables can speak of besides the pod's own object.
#[derive(Clone, Copy, Debug)]
pub struct EnvContext<'a> {
    /// Addresses of the pod, primary first, at most one per family. The node's own with host network.
    pub pod_ips: &'a [String],
    /// Addresses of the node, primary first.
    pub node_ips: &'a [String],
    /// Allocatable cpu, memory and ephemeral-storage of the node: limits of who has none.
    pub allocatable: &'a Amounts,
    /// Longest string of a process's environment: its name, `=`, its value and the final NUL. 32 pages.
    pub max_string: usize,
    /// ConfigMaps, Secrets and services.
    pub objects: &'a EnvObjects,
}

/// All strings together: more than what the kernel ever accepts.
const MAX_TOTAL: usize = 6 << 20;
/// Longest path.
const MAX_PATH: usize = 4096;

/// The variables of `container`, by name. Services come first; each later source wins over those before it.
///
/// # Errors
/// A source that does not exist, is not supported, or cannot be evaluated; variables that no process can be given.
pub fn environment(
    pod: &Pod,
    container: &Container,
    context: EnvContext<'_>,
) -> Result<BTreeMap<String, String>, GenerateError> {
    if pod.spec.as_ref().is_some_and(|spec| spec.enable_service_links.is_none()) {
        return Err(GenerateError::NoServiceLinks);
    }
    let services = &context.objects.services;
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    // Counted as it grows: sources can be named again and again, values can be made of values.
    let mut room = Room::default();
    for source in container.env_from.iter().flatten() {
        whole_object(&mut known, source, context.objects, &mut room)?;
    }
    for variable in container.env.iter().flatten() {
        let lookup = |name: &str| known.get(name).or_else(|| services.get(name)).map(String::as_str);
        if let Some(value) = value_of(pod, container, variable, lookup, context)? {
            room.take(&variable.name, &value)?;
            known.insert(variable.name.clone(), value);
        }
    }
    for (name, value) in services {
        known.entry(name.clone()).or_insert_with(|| value.clone());
    }
    check(&known, context.max_string)?;
    Ok(known)
}

/// What has been put into an environment, also what was replaced again.
#[derive(Default)]
struct Room(usize);

impl Room {
    fn take(&mut self, name: &str, value: &str) -> Result<(), GenerateError> {
        self.0 = self.0.saturating_add(entry(name, value.len()));
        // Twice as much is let in here: what is replaced again does not count in the end.
        let fits = self.0 <= 2 * MAX_TOTAL;
        if fits { Ok(()) } else { Err(GenerateError::EnvSize { size: self.0, limit: MAX_TOTAL }) }
    }
}

/// All keys of a ConfigMap or Secret, as they are: which names a shell likes is not asked here.
fn whole_object(
    known: &mut BTreeMap<String, String>,
    source: &EnvFromSource,
    objects: &EnvObjects,
    room: &mut Room,
) -> Result<(), GenerateError> {
    let prefix = source.prefix.as_deref().unwrap_or_default();
    let mut add = |key: &str, value: String| {
        let name = format!("{prefix}{key}");
        room.take(&name, &value)?;
        known.insert(name, value);
        Ok(())
    };
    if let Some(reference) = &source.config_map_ref {
        let object = objects.config_map(&reference.name, reference.optional)?;
        let mut data = object.iter().flat_map(|object| object.data.iter().flatten());
        data.try_for_each(|(key, value)| add(key, value.clone()))
    } else if let Some(reference) = &source.secret_ref {
        let object = objects.secret(&reference.name, reference.optional)?;
        let mut data = object.iter().flat_map(|object| object.data.iter().flatten());
        data.try_for_each(|(key, value)| add(key, text(&value.0)))
    } else {
        Ok(())
    }
}

/// The environment is text; bytes that are none are replaced, where upstream would hand on what the runtime cannot take.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Bytes that a variable with a value of this length takes: `NAME=VALUE` and the NUL at its end.
fn entry(name: &str, length: usize) -> usize {
    name.len() + length + 2
}

/// Refuses what no process can be started with, before the runtime is asked: its answer would name no variable.
fn check(environment: &BTreeMap<String, String>, max_string: usize) -> Result<(), GenerateError> {
    let mut total = 0;
    for (name, value) in environment {
        let size = entry(name, value.len());
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(GenerateError::EnvText { name: name.clone() });
        }
        if size > max_string {
            return Err(GenerateError::EnvVariableSize { name: name.clone(), size, limit: max_string });
        }
        total += size;
    }
    if total > MAX_TOTAL { Err(GenerateError::EnvSize { size: total, limit: MAX_TOTAL }) } else { Ok(()) }
}

/// Expands each word of a command or argument list with the final environment.
///
/// # Errors
/// All words together are more than any process can be given.
pub fn expand_words(
    words: Option<&Vec<String>>,
    environment: &BTreeMap<String, String>,
) -> Result<Vec<String>, GenerateError> {
    let lookup = |name: &str| environment.get(name).map(String::as_str);
    let mut taken = 0;
    let expanded = words.into_iter().flatten().map(|word| {
        let too_long = |length| GenerateError::WordsSize { size: length + taken, limit: MAX_TOTAL };
        let expanded = expand(word, lookup, MAX_TOTAL - taken).map_err(too_long)?;
        taken += expanded.len();
        Ok(expanded)
    });
    expanded.collect()
}

/// Expands `subPathExpr`.
///
/// # Errors
/// A variable that is unset or empty; a path longer than any can be.
pub fn expand_sub_path(text: &str, environment: &BTreeMap<String, String>) -> Result<String, GenerateError> {
    let mut missing = std::collections::BTreeSet::new();
    let lookup = |name: &str| {
        let value = environment.get(name).map(String::as_str).filter(|value| !value.is_empty());
        if value.is_none() {
            missing.insert(name.to_owned());
        }
        value
    };
    let expanded = expand(text, lookup, MAX_PATH);
    if missing.is_empty() {
        return expanded.map_err(|size| GenerateError::SubPathSize { size, limit: MAX_PATH });
    }
    Err(GenerateError::MissingValue { names: missing.into_iter().collect::<Vec<_>>().join(", ") })
}

/// `None`: an optional source that does not exist; the variable is left out.
fn value_of<'a>(
    pod: &Pod,
    container: &Container,
    variable: &EnvVar,
    lookup: impl Fn(&str) -> Option<&'a str>,
    context: EnvContext<'_>,
) -> Result<Option<String>, GenerateError> {
    match (variable.value.as_deref().filter(|value| !value.is_empty()), &variable.value_from) {
        (Some(value), _) => {
            let (limit, name) = (context.max_string, &variable.name);
            let too_long =
                |length| GenerateError::EnvVariableSize { name: name.clone(), size: entry(name, length), limit };
            expand(value, lookup, limit).map(Some).map_err(too_long)
        }
        (None, Some(source)) => from_source(pod, container, source, context),
        (None, None) => Ok(Some(String::new())),
    }
}

fn from_source(
    pod: &Pod,
    container: &Container,
    source: &EnvVarSource,
    context: EnvContext<'_>,
) -> Result<Option<String>, GenerateError> {
    if let Some(field) = &source.field_ref {
        return field_value(pod, &field.field_path, context).map(Some);
    }
    if let Some(resource) = &source.resource_field_ref {
        return Ok(Some(downward::resource_field(pod, Some(container), resource, context.allocatable)?));
    }
    let (kind, reference, found) = if let Some(key) = &source.config_map_key_ref {
        let object = context.objects.config_map(&key.name, key.optional)?;
        let value = object.map(|object| object.data.as_ref().and_then(|data| data.get(&key.key)).cloned());
        ("ConfigMap", (&key.key, &key.name, key.optional), value)
    } else if let Some(key) = &source.secret_key_ref {
        let object = context.objects.secret(&key.name, key.optional)?;
        let value = object.map(|object| Some(text(&object.data.as_ref()?.get(&key.key)?.0)));
        ("Secret", (&key.key, &key.name, key.optional), value)
    } else {
        return Err(GenerateError::Unsupported { container: container.name.clone(), what: "env valueFrom fileKeyRef" });
    };
    let (key, name, optional) = reference;
    match found {
        Some(Some(value)) => Ok(Some(value)),
        None => Ok(None),
        Some(None) if optional == Some(true) => Ok(None),
        Some(None) => Err(GenerateError::NoSuchKey {
            key: key.clone(),
            kind,
            namespace: names::pod_namespace(pod).to_owned(),
            name: name.clone(),
        }),
    }
}

fn field_value(pod: &Pod, path: &str, context: EnvContext<'_>) -> Result<String, GenerateError> {
    let spec = pod.spec.as_ref();
    let first = |ips: &[String]| ips.first().cloned().unwrap_or_default();
    let value = match path {
        "spec.nodeName" => spec.and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
        "spec.serviceAccountName" => spec.and_then(|spec| spec.service_account_name.clone()).unwrap_or_default(),
        "status.podIP" => first(context.pod_ips),
        "status.podIPs" => context.pod_ips.join(","),
        "status.hostIP" | "status.hostIPs" if context.node_ips.is_empty() => return Err(GenerateError::NoNodeIp),
        "status.hostIP" => first(context.node_ips),
        "status.hostIPs" => context.node_ips.join(","),
        _ => downward::metadata_field(pod, path)?,
    };
    Ok(value)
}
