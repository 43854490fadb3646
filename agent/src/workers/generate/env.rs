//! Environment of a container: service variables, `envFrom`, literal values with `$(VAR)` expansion, `fieldRef`,
//! `resourceFieldRef`, keys of ConfigMaps and Secrets. Pure: the API objects are arguments.
//!
//! Values are bytes, because a Secret's need not be UTF-8; CRI carries them unchanged
//! (<https://github.com/kubernetes/kubernetes/pull/139168>).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::EnvFromSource;
use k8s_openapi::api::core::v1::EnvVar;
use k8s_openapi::api::core::v1::EnvVarSource;
use k8s_openapi::api::core::v1::FileKeySelector;
use k8s_openapi::api::core::v1::Pod;

use super::EnvObjects;
use super::GenerateError;
use super::expand::expand;
use super::names;
use crate::model::downward;
use crate::model::downward::NamedContainers;
use crate::model::qos::Amounts;

/// Variables of a container by name.
pub type Environment = BTreeMap<String, Vec<u8>>;

/// What environment variables can refer to besides the pod object.
#[derive(Clone, Copy, Debug)]
pub struct EnvContext<'a> {
    /// Addresses of the pod, primary first, at most one per family. The node's own with host network.
    pub pod_ips: &'a [String],
    /// Addresses of the node, primary first.
    pub node_ips: &'a [String],
    /// Allocatable cpu, memory and ephemeral-storage of the node: the value of limits that are not set.
    pub allocatable: &'a Amounts,
    /// Longest string of a process's environment: its name, `=`, its value and the final NUL. 32 pages.
    pub max_string: usize,
    /// ConfigMaps, Secrets and services.
    pub objects: &'a EnvObjects,
}

/// Bytes of all strings together: more than the kernel ever accepts.
const MAX_TOTAL: usize = 6 << 20;
/// Longest path in bytes (`PATH_MAX`).
const MAX_PATH: usize = 4096;

/// The variables of `container`, by name. Services come first; each later source overrides those before it.
///
/// # Errors
/// A source that does not exist, is not supported, or cannot be evaluated; a variable that execve would reject.
pub fn environment(pod: &Pod, container: &Container, context: EnvContext<'_>) -> Result<Environment, GenerateError> {
    if pod.spec.as_ref().is_some_and(|spec| spec.enable_service_links.is_none()) {
        return Err(GenerateError::NoServiceLinks);
    }
    let services = &context.objects.services;
    let mut known = Environment::new();
    // Counted while it grows: a source can be named repeatedly, and values can refer to values.
    let mut room = SizeBudget::default();
    let containers = NamedContainers::of(pod);
    for source in container.env_from.iter().flatten() {
        whole_object(&mut known, source, context.objects, &mut room)?;
    }
    for variable in container.env.iter().flatten() {
        let lookup = |name: &str| {
            let own = known.get(name).map(Vec::as_slice);
            own.or_else(|| services.get(name).map(String::as_bytes))
        };
        if let Some(value) = value_of(&containers, container, variable, lookup, context)? {
            room.take(&variable.name, &value)?;
            known.insert(variable.name.clone(), value);
        }
    }
    for (name, value) in services {
        known.entry(name.clone()).or_insert_with(|| value.clone().into_bytes());
    }
    check(&known, context.max_string)?;
    Ok(known)
}

/// Bytes that were added to an environment, including values that were replaced later.
#[derive(Clone, Debug, Default)]
pub(super) struct SizeBudget(usize);

impl SizeBudget {
    /// Counts a variable.
    ///
    /// # Errors
    /// All together are more than a process can be given.
    pub(super) fn take(&mut self, name: &str, value: &[u8]) -> Result<(), GenerateError> {
        self.0 = self.0.saturating_add(entry(name, value.len()));
        // Twice the limit, since replaced values do not count in the final check.
        let fits = self.0 <= 2 * MAX_TOTAL;
        if fits { Ok(()) } else { Err(GenerateError::EnvSize { size: self.0, limit: MAX_TOTAL }) }
    }
}

/// `envFrom`: all keys of a ConfigMap or Secret. Names are not validated.
fn whole_object(
    known: &mut Environment,
    source: &EnvFromSource,
    objects: &EnvObjects,
    room: &mut SizeBudget,
) -> Result<(), GenerateError> {
    let prefix = source.prefix.as_deref().unwrap_or_default();
    let mut add = |key: &str, value: &[u8]| {
        let name = format!("{prefix}{key}");
        room.take(&name, value)?;
        known.insert(name, value.to_vec());
        Ok(())
    };
    if let Some(reference) = &source.config_map_ref {
        let object = objects.config_map(&reference.name, reference.optional)?;
        let mut data = object.iter().flat_map(|object| object.data.iter().flatten());
        data.try_for_each(|(key, value)| add(key, value.as_bytes()))
    } else if let Some(reference) = &source.secret_ref {
        let object = objects.secret(&reference.name, reference.optional)?;
        let mut data = object.iter().flat_map(|object| object.data.iter().flatten());
        data.try_for_each(|(key, value)| add(key, &value.0))
    } else {
        Ok(())
    }
}

/// Bytes that a variable with a value of this length takes: `NAME=VALUE` and the NUL at its end.
fn entry(name: &str, length: usize) -> usize {
    name.len() + length + 2
}

/// Rejects variables that execve would reject. The runtime's own error would not name the variable.
fn check(environment: &Environment, max_string: usize) -> Result<(), GenerateError> {
    let mut total = 0;
    for (name, value) in environment {
        let size = entry(name, value.len());
        if name.is_empty() || name.contains(['=', '\0']) || value.contains(&0) {
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
/// The words exceed the size limit of execve together; a word becomes something that is not UTF-8, which CRI cannot carry.
pub fn expand_words(words: Option<&Vec<String>>, environment: &Environment) -> Result<Vec<String>, GenerateError> {
    let lookup = |name: &str| environment.get(name).map(Vec::as_slice);
    let mut taken = 0;
    let expanded = words.into_iter().flatten().map(|word| {
        let too_long = |length| GenerateError::WordsSize { size: length + taken, limit: MAX_TOTAL };
        let expanded = expand(word, lookup, MAX_TOTAL - taken).map_err(too_long)?;
        taken += expanded.len();
        String::from_utf8(expanded).map_err(|_| GenerateError::WordText { word: word.clone() })
    });
    expanded.collect()
}

/// Expands `subPathExpr`.
///
/// # Errors
/// A variable is unset or empty; the path is longer than `PATH_MAX` or not UTF-8.
pub fn expand_sub_path(text: &str, environment: &Environment) -> Result<String, GenerateError> {
    let mut missing = std::collections::BTreeSet::new();
    let lookup = |name: &str| {
        let value = environment.get(name).map(Vec::as_slice).filter(|value| !value.is_empty());
        if value.is_none() {
            missing.insert(name.to_owned());
        }
        value
    };
    let expanded = expand(text, lookup, MAX_PATH);
    if missing.is_empty() {
        let path = expanded.map_err(|size| GenerateError::SubPathSize { size, limit: MAX_PATH })?;
        return String::from_utf8(path).map_err(|_| GenerateError::WordText { word: text.to_owned() });
    }
    Err(GenerateError::MissingValue { names: missing.into_iter().collect::<Vec<_>>().join(", ") })
}

/// `None`: an optional source that does not exist; the variable is left out.
fn value_of<'a>(
    containers: &NamedContainers<'_>,
    container: &Container,
    variable: &EnvVar,
    lookup: impl Fn(&str) -> Option<&'a [u8]>,
    context: EnvContext<'_>,
) -> Result<Option<Vec<u8>>, GenerateError> {
    match (variable.value.as_deref().filter(|value| !value.is_empty()), &variable.value_from) {
        (Some(value), _) => {
            let (limit, name) = (context.max_string, &variable.name);
            let too_long =
                |length| GenerateError::EnvVariableSize { name: name.clone(), size: entry(name, length), limit };
            expand(value, lookup, limit).map(Some).map_err(too_long)
        }
        (None, Some(source)) => from_source(containers, container, source, context),
        (None, None) => Ok(Some(Vec::new())),
    }
}

fn from_source(
    containers: &NamedContainers<'_>,
    container: &Container,
    source: &EnvVarSource,
    context: EnvContext<'_>,
) -> Result<Option<Vec<u8>>, GenerateError> {
    if let Some(field) = &source.field_ref {
        return field_value(containers.pod, &field.field_path, context).map(|value| Some(value.into_bytes()));
    }
    if let Some(resource) = &source.resource_field_ref {
        let value = downward::resource_field(containers, Some(container), resource, context.allocatable)?;
        return Ok(Some(value.into_bytes()));
    }
    let (kind, reference, found) = if let Some(key) = &source.config_map_key_ref {
        let object = context.objects.config_map(&key.name, key.optional)?;
        let value = object.map(|object| Some(object.data.as_ref()?.get(&key.key)?.clone().into_bytes()));
        ("ConfigMap", (&key.key, &key.name, key.optional), value)
    } else if let Some(key) = &source.secret_key_ref {
        let object = context.objects.secret(&key.name, key.optional)?;
        let value = object.map(|object| Some(object.data.as_ref()?.get(&key.key)?.0.clone()));
        ("Secret", (&key.key, &key.name, key.optional), value)
    } else if let Some(key) = &source.file_key_ref {
        return file_value(key, context.objects);
    } else {
        return Ok(Some(Vec::new()));
    };
    let (key, name, optional) = reference;
    match found {
        Some(Some(value)) => Ok(Some(value)),
        None => Ok(None),
        Some(None) if optional == Some(true) => Ok(None),
        Some(None) => Err(GenerateError::NoSuchKey {
            key: key.clone(),
            kind,
            namespace: names::pod_namespace(containers.pod).to_owned(),
            name: name.clone(),
        }),
    }
}

/// The value of a key in a file. A file that cannot be used is an error in any case. While the feature gate is off the
/// variable is empty, as upstream.
fn file_value(reference: &FileKeySelector, objects: &EnvObjects) -> Result<Option<Vec<u8>>, GenerateError> {
    let FileKeySelector { key, path, volume_name, optional } = reference;
    let Some(files) = &objects.files else { return Ok(Some(Vec::new())) };
    match files.value(volume_name, path, key)? {
        Some(value) => Ok(Some(value.to_vec())),
        None if *optional == Some(true) => Ok(None),
        None => Err(GenerateError::NoSuchFileKey { key: key.clone(), path: path.clone() }),
    }
}

fn field_value(pod: &Pod, path: &str, context: EnvContext<'_>) -> Result<String, GenerateError> {
    let spec = pod.spec.as_ref();
    let first = |ips: &[String]| ips.first().cloned().unwrap_or_default();
    let value = match path {
        // The second is from before v1; the API still accepts it.
        "spec.nodeName" | "spec.host" => spec.and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
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
