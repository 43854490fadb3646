//! The result of loading: effective values, where each came from, and why loading failed if it did.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;

use serde_json::Map;
use serde_json::Value;
use serde_json::json;

use super::document::DocumentError;
use super::document::Place;
use super::document::Problem;
use super::feature_gates::FeatureGates;
use super::flags::FlagError;
use super::flags::FlagSettings;
use super::keblet;
use super::keblet::KebletConfiguration;
use super::kubelet;
use super::kubelet::KubeletConfiguration;
use super::protections::unhonoured;
use super::schema;
use super::schema::Described;
use super::schema::Presence;
use super::validate::parse_cpus;
use crate::model::quote::masked_url;

/// Where an effective value was set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// Not set: the value is the default.
    #[default]
    Default,
    /// Not set: the value is the default of a start without a configuration file.
    LegacyDefault,
    /// In the configuration file (or keblet's own).
    File(Place),
    /// In a drop-in file.
    DropIn(Place),
    /// On the command line.
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::LegacyDefault => f.write_str("default without --config"),
            Self::File(place) | Self::DropIn(place) => place.fmt(f),
            Self::Flag(name) => write!(f, "--{name}"),
        }
    }
}

/// A value that is well-formed but not acceptable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Where it was set.
    pub origin: Origin,
    /// Path of the field.
    pub field: String,
    /// What is wrong.
    pub message: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.origin, self.field, self.message)
    }
}

/// Why the configuration cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A named file or directory cannot be read.
    #[error("cannot read {}: {cause}", file.display())]
    Read {
        /// The file or directory.
        file: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// A file contains an invalid document.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// A document is well-formed but of the wrong kind, or there are too many or too few.
    #[error("{place}: {problem}")]
    Kind {
        /// The document.
        place: Place,
        /// What is wrong with it.
        problem: String,
    },
    /// A flag has an invalid value.
    #[error(transparent)]
    Flag(#[from] FlagError),
    /// Feature gates are reported alone, because other checks depend on them.
    #[error("invalid feature gates: {}", list(violations))]
    Gates {
        /// All that is wrong with them.
        violations: Vec<Violation>,
    },
    /// Values are not acceptable.
    #[error("invalid configuration: {}", list(violations))]
    Invalid {
        /// All of them.
        violations: Vec<Violation>,
    },
}

impl ConfigError {
    /// Every violation that several checks found.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with all of them, or else the first error of another kind.
    pub fn together(checks: impl IntoIterator<Item = Result<(), Self>>) -> Result<(), Self> {
        let mut violations = Vec::new();
        for check in checks {
            match check {
                Err(Self::Invalid { violations: found }) => violations.extend(found),
                other => other?,
            }
        }
        if violations.is_empty() { Ok(()) } else { Err(Self::Invalid { violations }) }
    }
}

/// One entry stays in the line, several get a line each.
fn list<T: fmt::Display>(items: &[T]) -> String {
    match items {
        [one] => one.to_string(),
        many => many.iter().map(|item| format!("\n  {item}")).collect(),
    }
}

/// Facts of the machine that the checks use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// `/sys/fs/cgroup` is not a cgroup v2 file system; hybrid hosts count as v1.
    pub cgroup_v1: bool,
    /// Some swap is in use.
    pub swap_active: bool,
    /// The CPUs that are online as a list, such as `0-3,8`; empty if they are not known.
    pub online_cpus: String,
}

/// The effective configuration. Made once by [`super::load`], never changed.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The standard document, defaults filled in, drop-ins and flags on top.
    pub kubelet: KubeletConfiguration,
    /// keblet's own document.
    pub keblet: KebletConfiguration,
    /// What only flags can set.
    pub flags: FlagSettings,
    /// Which features are on.
    pub gates: FeatureGates,
    pub(super) origins: Origins,
    pub(super) notices: Vec<String>,
}

/// Where fields of the three documents were set.
#[derive(Clone, Debug, Default)]
pub(super) struct Origins {
    pub(super) kubelet: BTreeMap<String, Origin>,
    pub(super) keblet: BTreeMap<String, Origin>,
    pub(super) flags: BTreeMap<String, Origin>,
}

/// The origin of a path, or of the nearest thing around it that was set.
pub(super) fn lookup(origins: &BTreeMap<String, Origin>, path: &str) -> Origin {
    let mut path = path;
    loop {
        if let Some(origin) = origins.get(path) {
            return origin.clone();
        }
        match path.rfind(['.', '[']) {
            Some(end) => path = &path[..end],
            None => return Origin::Default,
        }
    }
}

impl Settings {
    /// Where a field of the standard document was set, by its path there.
    pub fn origin(&self, path: &str) -> Origin {
        lookup(&self.origins.kubelet, path)
    }

    /// Warnings to log once at start: deprecated flags, settled gates, settings that are accepted but have no effect.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Refuses configured settings of isolation or protection that are not honoured yet.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with the field and origin of each of them.
    pub fn check_supported(&self) -> Result<(), ConfigError> {
        let located = |problem: Problem| Violation {
            origin: self.origin(&problem.field),
            field: problem.field,
            message: problem.message,
        };
        let violations: Vec<Violation> = unhonoured(&self.kubelet).into_iter().map(located).collect();
        if violations.is_empty() { Ok(()) } else { Err(ConfigError::Invalid { violations }) }
    }

    /// Refuses hosts this configuration does not allow.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with each setting that excludes this host.
    pub fn check_host(&self, host: &HostFacts) -> Result<(), ConfigError> {
        let mut violations = Vec::new();
        let mut reject = |field: &str, message: String| {
            violations.push(Violation { origin: self.origin(field), field: field.to_owned(), message });
        };
        if host.cgroup_v1 && self.kubelet.fail_cgroup_v1 {
            reject(
                "failCgroupV1",
                "kubelet is configured to not run on a host using cgroup v1. cgroup v1 support is unsupported and will be \
                 removed in a future release; to run on this host all the same, set failCgroupV1: false (or \
                 --fail-cgroupv1=false)"
                    .to_owned(),
            );
        }
        if host.cgroup_v1 && self.kubelet.single_process_oom_kill == Some(false) {
            reject("singleProcessOOMKill", "false is not possible on a cgroup v1 host".to_owned());
        }
        if host.cgroup_v1 && self.kubelet.memory_swap.swap_behavior == "LimitedSwap" {
            reject(
                "memorySwap.swapBehavior",
                "swap feature is enabled and LimitedSwap but it is only supported with cgroupv2".to_owned(),
            );
        }
        if host.cgroup_v1 && self.kubelet.memory_reservation_policy == "TieredReservation" {
            reject("memoryReservationPolicy", "TieredReservation protects memory only on a cgroup v2 host".to_owned());
        }
        if host.swap_active && self.kubelet.fail_swap_on {
            reject(
                "failSwapOn",
                "running with swap on is not supported, please disable swap or set --fail-swap-on flag to false"
                    .to_owned(),
            );
        }
        let reserved = &self.kubelet.reserved_system_cpus;
        let online = parse_cpus(&host.online_cpus).unwrap_or_default();
        if parse_cpus(reserved).is_some_and(|cpus| !cpus.is_subset(&online)) {
            let message = format!("reserved-cpus: {reserved} is not a subset of online-cpus: {}", host.online_cpus);
            reject("reservedSystemCPUs", message);
        }
        if violations.is_empty() { Ok(()) } else { Err(ConfigError::Invalid { violations }) }
    }

    /// The answer of `/configz`: the effective standard document, without fields whose values are equivalent to absence.
    pub fn configz(&self) -> Value {
        json!({ "kubeletconfig": standard_document(&self.kubelet) })
    }

    /// Both effective documents for the log, as YAML like a kubelet's since 1.37. The values of `staticPodURLHeader`, which may
    /// be secrets, and a password in `staticPodURL` are masked.
    pub fn logged(&self) -> String {
        let own = with_kind(to_json(&self.keblet), keblet::API_VERSION, keblet::KIND);
        let documents = [standard_document(&self.without_secrets()), own];
        // JSON is YAML, too.
        serde_saphyr::to_string_multiple(&documents).unwrap_or_else(|_| json!(documents).to_string())
    }

    /// The standard document, to be shown.
    pub(super) fn without_secrets(&self) -> KubeletConfiguration {
        let mut kubelet = self.kubelet.clone();
        for values in kubelet.static_pod_url_header.values_mut() {
            *values = vec!["<masked>".to_owned()];
        }
        kubelet.static_pod_url = masked_url(&kubelet.static_pod_url);
        kubelet
    }
}

fn standard_document(config: &KubeletConfiguration) -> Value {
    with_kind(prune(to_json(config)), kubelet::API_VERSION, kubelet::KIND)
}

fn with_kind(mut document: Map<String, Value>, version: &str, kind: &str) -> Value {
    document.insert("kind".to_owned(), kind.into());
    document.insert("apiVersion".to_owned(), version.into());
    document.into()
}

/// A document as JSON; optional fields that are not set are left out.
pub(super) fn to_json<T: serde::Serialize>(document: &T) -> Map<String, Value> {
    // Documents are structs of strings, numbers, lists and string maps: serialising them cannot fail.
    match serde_json::to_value(document) {
        Ok(Value::Object(mut map)) => {
            strip_nulls(&mut map);
            map
        }
        _ => Map::new(),
    }
}

/// Removes every `null`, which is equivalent to absence.
pub(super) fn strip_nulls(map: &mut Map<String, Value>) {
    map.retain(|_, value| !value.is_null());
    for value in map.values_mut() {
        if let Value::Object(inner) = value {
            strip_nulls(inner);
        }
    }
}

/// Removes plain fields that are zero, as the API's own encoding does. Durations are always written.
pub(super) fn prune(mut map: Map<String, Value>) -> Map<String, Value> {
    schema::walk(KubeletConfiguration::FIELDS, &mut |path, field| {
        if field.presence == Presence::Value {
            remove_if(&mut map, path, is_empty);
        }
    });
    map
}

/// Removes the field at a dotted path if its value says so.
pub(super) fn remove_if(map: &mut Map<String, Value>, path: &str, says: fn(&Value) -> bool) -> bool {
    match path.split_once('.') {
        Some((section, rest)) => match map.get_mut(section) {
            Some(Value::Object(inner)) => remove_if(inner, rest, says),
            _ => false,
        },
        None if map.get(path).is_some_and(says) => map.remove(path).is_some(),
        None => false,
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    }
}
