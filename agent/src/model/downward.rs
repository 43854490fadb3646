//! Values of the downward API: fields of a pod's metadata, requests and limits. Pure; without addresses, and independent of
//! where the values go.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::OnceLock;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ResourceFieldSelector;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::Amount;
use super::ContainerClass;
use super::QuantityError;
use super::quote::go_quoted;
use super::spec;
use super::spec::SpecContainer;

/// A field or resource that has no value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each case is")]
pub enum DownwardError {
    #[error("unsupported fieldPath: {path}")]
    FieldPath { path: String },
    #[error("unsupported container resource : {resource}")]
    ResourceField { resource: String },
    #[error("container {name} not found")]
    NoSuchContainer { name: String },
    #[error("quantity of {resource}: {source}")]
    Quantity { resource: String, source: QuantityError },
}

/// A field of the pod's metadata: `metadata.name`, `.namespace`, `.uid`, one label or annotation
/// (`metadata.labels['key']`; empty if there is no such key), or all of them, a line `key="value"` each.
///
/// # Errors
/// Any other field.
pub fn metadata_field(pod: &Pod, path: &str) -> Result<String, DownwardError> {
    let meta = &pod.metadata;
    let value = match path {
        "metadata.name" => meta.name.clone().unwrap_or_default(),
        "metadata.namespace" => meta.namespace.clone().unwrap_or_default(),
        "metadata.uid" => meta.uid.clone().unwrap_or_default(),
        "metadata.labels" => lines(meta.labels.as_ref()),
        "metadata.annotations" => lines(meta.annotations.as_ref()),
        _ => subscripted(pod, path).ok_or_else(|| DownwardError::FieldPath { path: path.to_owned() })?,
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

fn lines(map: Option<&BTreeMap<String, String>>) -> String {
    let lines: Vec<String> =
        map.into_iter().flatten().map(|(key, value)| format!("{key}={}", go_quoted(value))).collect();
    lines.join("\n")
}

/// The init and regular containers of a pod by name, indexed at the first look-up: a pod may have thousands, and name them
/// in thousands of fields.
#[derive(Debug)]
pub struct NamedContainers<'a> {
    /// The pod.
    pub pod: &'a Pod,
    index: OnceLock<HashMap<&'a str, SpecContainer<'a>>>,
}

impl<'a> NamedContainers<'a> {
    /// Those of this pod.
    pub fn of(pod: &'a Pod) -> Self {
        Self { pod, index: OnceLock::new() }
    }

    fn get(&self, name: &str) -> Option<SpecContainer<'a>> {
        self.index.get_or_init(|| spec::lasting_by_name(self.pod)).get(name).copied()
    }
}

/// A request or limit in whole multiples of the selector's divisor, rounded up. `own` is the container whose variable it is,
/// used if the selector names none; `None` for a file of a volume. The limit of containers without one is `allocatable` of the
/// node, in variables the pod's own limit before that.
///
/// # Errors
/// An unknown resource or container; a quantity that cannot be read.
pub fn resource_field(
    containers: &NamedContainers<'_>,
    own: Option<&Container>,
    selector: &ResourceFieldSelector,
    allocatable: &BTreeMap<String, Amount>,
) -> Result<String, DownwardError> {
    let unknown = || DownwardError::ResourceField { resource: selector.resource.clone() };
    let (side, name) = selector.resource.split_once('.').ok_or_else(unknown)?;
    let known = matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-");
    let named = selector.container_name.as_deref().filter(|name| !name.is_empty());
    let missing = |name: &str| DownwardError::NoSuchContainer { name: name.to_owned() };
    let named = named.map(|name| containers.get(name).ok_or_else(|| missing(name))).transpose()?;
    let container = match named {
        Some(found) => found.spec,
        None => own.ok_or_else(|| missing(""))?,
    };
    // As upstream: a variable that names an init container gets no default for its limits, a file does.
    let has_default = own.is_none() || named.is_none_or(|found| found.class == ContainerClass::Regular);
    let resources = container.resources.as_ref();
    let amount = match side {
        "requests" if known => amount_of(resources.and_then(|r| r.requests.as_ref()), name)?,
        "limits" if known => {
            let stated = amount_of(resources.and_then(|r| r.limits.as_ref()), name)?;
            match stated.filter(|amount| !amount.is_zero()) {
                None if has_default => default_limit(own.map(|_| containers.pod), name, allocatable)?,
                _ => stated,
            }
        }
        _ => return Err(unknown()),
    };
    let divisor = selector.divisor.as_ref().map(Amount::try_from).transpose();
    let divisor = divisor.map_err(|source| DownwardError::Quantity { resource: "divisor".to_owned(), source })?;
    let divisor = divisor.filter(|divisor| !divisor.is_zero()).unwrap_or_else(|| Amount::units(1));
    Ok(divided(name, amount.unwrap_or_default(), divisor).to_string())
}

fn amount_of(list: Option<&BTreeMap<String, Quantity>>, name: &str) -> Result<Option<Amount>, DownwardError> {
    let amount = list.and_then(|list| list.get(name)).map(Amount::try_from).transpose();
    amount.map_err(|source| DownwardError::Quantity { resource: name.to_owned(), source })
}

/// The own limit of `pod` (KEP-2837), which upstream's files do not have, else the node's allocatable. Huge pages are never
/// overcommitted: their limit is always stated.
fn default_limit(
    pod: Option<&Pod>,
    name: &str,
    allocatable: &BTreeMap<String, Amount>,
) -> Result<Option<Amount>, DownwardError> {
    if name.starts_with("hugepages-") {
        return Ok(None);
    }
    let pod_limits = pod.and_then(|pod| pod.spec.as_ref()?.resources.as_ref()?.limits.as_ref());
    let of_pod = match name {
        "cpu" | "memory" => amount_of(pod_limits, name)?,
        _ => None,
    };
    Ok(of_pod.filter(|amount| !amount.is_zero()).or_else(|| allocatable.get(name).copied()))
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn metadata_as_files_show_it() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u",
            "labels": {"b": "two", "a": "1"}, "annotations": {"x/y": "line\n\"quoted\"\u{7}é"}}}))
        .expect("a pod");
        for (path, expected) in [
            ("metadata.name", "p"),
            ("metadata.namespace", "ns"),
            ("metadata.uid", "u"),
            ("metadata.labels", "a=\"1\"\nb=\"two\""),
            ("metadata.annotations", "x/y=\"line\\n\\\"quoted\\\"\\aé\""),
            ("metadata.labels['b']", "two"),
            ("metadata.labels['none']", ""),
        ] {
            assert_eq!(metadata_field(&pod, path), Ok(expected.to_owned()), "{path}");
        }
        for path in ["spec.nodeName", "status.podIP", "metadata.labels['b'", "metadata.name['x']", ""] {
            let error = metadata_field(&pod, path).expect_err("refused").to_string();
            assert_eq!(error, format!("unsupported fieldPath: {path}"));
        }
        assert_eq!(metadata_field(&Pod::default(), "metadata.labels"), Ok(String::new()));
    }

    fn value(pod: &Pod, own: Option<&str>, container: &str, resource: &str) -> String {
        let of_node = [("cpu", "4"), ("memory", "8Gi"), ("ephemeral-storage", "16Gi"), ("hugepages-2Mi", "64Mi")];
        let amount = |(name, text): (&str, &str)| (name.to_owned(), text.parse().expect("an amount"));
        let allocatable: BTreeMap<String, Amount> = of_node.into_iter().map(amount).collect();
        let selector = json!({"containerName": container, "resource": resource, "divisor": "1"});
        let selector: ResourceFieldSelector = serde_json::from_value(selector).expect("a selector");
        let containers = NamedContainers::of(pod);
        let own = own.map(|name| containers.get(name).expect("a container").spec);
        resource_field(&containers, own, &selector, &allocatable).expect("a value")
    }

    #[test]
    fn limits_that_are_not_stated() {
        let huge = json!({"limits": {"hugepages-2Mi": "4Mi"}});
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "initContainers": [{"name": "init"}, {"name": "sidecar", "restartPolicy": "Always"}],
            "containers": [{"name": "main"}, {"name": "huge", "resources": huge}]}}))
        .expect("a pod");
        let value = |own: Option<&str>, container: &str, resource: &str| value(&pod, own, container, resource);
        for container in ["main", "init", "sidecar"] {
            assert_eq!(value(None, container, "limits.cpu"), "4", "a file on {container}");
            assert_eq!(value(None, container, "limits.memory"), (8_u64 << 30).to_string(), "a file on {container}");
            assert_eq!(value(None, container, "requests.cpu"), "0", "a file on {container}");
        }
        for (own, container, expected) in [
            ("main", "main", "4"),
            ("main", "", "4"),
            ("init", "", "4"),
            ("init", "init", "0"),
            ("main", "init", "0"),
            ("init", "main", "4"),
        ] {
            assert_eq!(value(Some(own), container, "limits.cpu"), expected, "variable of {own} on {container:?}");
        }
        for own in [None, Some("main")] {
            assert_eq!(value(own, "main", "limits.hugepages-2Mi"), "0", "what the node has is not the container's");
            assert_eq!(value(own, "huge", "limits.hugepages-2Mi"), (4 << 20).to_string());
            assert_eq!(value(own, "huge", "limits.ephemeral-storage"), (16_u64 << 30).to_string());
        }
    }

    #[test]
    fn limits_of_the_pod_are_those_of_variables_alone() {
        let pod: Pod = serde_json::from_value(json!({"spec": {
            "resources": {"limits": {"cpu": "2", "memory": "1Gi"}},
            "containers": [{"name": "main"}, {"name": "limited", "resources": {"limits": {"cpu": "1"}}}]}}))
        .expect("a pod");
        for (own, container, resource, expected) in [
            (Some("main"), "", "limits.cpu", 2_u64),
            (Some("main"), "main", "limits.memory", 1 << 30),
            (Some("main"), "main", "limits.ephemeral-storage", 16 << 30),
            (Some("main"), "limited", "limits.cpu", 1),
            (Some("main"), "main", "requests.cpu", 0),
            (None, "main", "limits.cpu", 4),
            (None, "main", "limits.memory", 8 << 30),
            (None, "limited", "limits.cpu", 1),
            (None, "limited", "limits.memory", 8 << 30),
        ] {
            assert_eq!(value(&pod, own, container, resource), expected.to_string(), "{own:?} {container} {resource}");
        }
    }
}
