//! A partly merged configuration: the standard document as JSON, with the origin of every field, layer upon layer.
//!
//! Owns the precedence of the layers: defaults, file, drop-ins, flags. Reads no files and validates no values.

use std::collections::BTreeMap;
use std::path::Component;
use std::path::Path;
use std::path::PathBuf;

use serde_json::Map;
use serde_json::Value;

use super::document;
use super::document::Document;
use super::document::DocumentError;
use super::document::Place;
use super::duration::GoDuration;
use super::feature_gates::Feature;
use super::feature_gates::FeatureGates;
use super::flags::Flag;
use super::flags::FlagError;
use super::kubelet::DEFAULT_EVICTION_HARD;
use super::kubelet::KubeletConfiguration;
use super::kubelet::legacy_defaults;
use super::schema;
use super::schema::Described;
use super::schema::Presence;
use super::settings::ConfigError;
use super::settings::Origin;
use super::settings::lookup;
use super::settings::prune;
use super::settings::remove_if;
use super::settings::strip_nulls;
use super::settings::to_json;

/// The fields upstream sets differently when there is no configuration file.
const LEGACY: [&str; 5] = [
    "authentication.anonymous.enabled",
    "authentication.webhook.enabled",
    "authorization.mode",
    "readOnlyPort",
    "evictionHard",
];

/// Paths of the configuration file that are relative to it.
const FILE_PATHS: [&str; 7] = [
    "staticPodPath",
    "authentication.x509.clientCAFile",
    "tlsCertFile",
    "tlsPrivateKeyFile",
    "resolvConf",
    "volumePluginDir",
    "podLogsDir",
];

/// The layers merged so far. Every default is filled in at all times.
#[derive(Debug)]
pub(super) struct Draft {
    fields: Map<String, Value>,
    pub(super) origins: BTreeMap<String, Origin>,
    /// Gates of the command line; some defaults depend on them.
    flag_gates: BTreeMap<String, bool>,
}

impl Draft {
    /// Before any file: upstream's legacy defaults.
    pub(super) fn legacy(flag_gates: BTreeMap<String, bool>) -> Self {
        let mut fields = to_json(&legacy_defaults());
        fields.remove("imagePullCredentialsVerificationPolicy");
        fill_dependent_defaults(&mut fields, &flag_gates);
        let origins = LEGACY.iter().map(|path| ((*path).to_owned(), Origin::LegacyDefault)).collect();
        Self { fields, origins, flag_gates }
    }

    /// From the configuration file, whose defaults replace the legacy ones altogether.
    ///
    /// # Errors
    /// An unknown or mistyped field.
    pub(super) fn from_file(document: &Document, flag_gates: BTreeMap<String, bool>) -> Result<Self, ConfigError> {
        let mut fields = document.fields.clone();
        let mut origins = origins_of(document, Origin::File);
        let folder = std::path::absolute(&document.place.file).ok();
        let folder = folder.as_deref().and_then(Path::parent).unwrap_or(Path::new("/"));
        for path in FILE_PATHS {
            resolve_path(&mut fields, path, folder);
        }
        merge_default_thresholds(&mut fields);
        let fields =
            with_defaults(fields, &mut origins, &flag_gates).map_err(|problem| field_error(document, problem))?;
        Ok(Self { fields, origins, flag_gates })
    }

    /// Merges a drop-in into the layers below it, as a JSON merge patch.
    ///
    /// # Errors
    /// An unknown or mistyped field.
    pub(super) fn patch(&mut self, document: &Document) -> Result<(), ConfigError> {
        // The drop-in alone must be a valid document, so that an error is attributed to it.
        let mut alone = document.fields.clone();
        strip_nulls(&mut alone);
        document::decode::<KubeletConfiguration>(Value::Object(alone))
            .map_err(|problem| field_error(document, problem))?;

        let mut base = prune(std::mem::take(&mut self.fields));
        merge_patch(&mut base, &document.fields);
        // Only the main file brings the defaults. An empty map, which pruning drops, and `null` mean no thresholds.
        base.entry("evictionHard").or_insert_with(|| Value::Object(Map::new()));
        self.forget_replaced("", &document.fields);
        self.origins.extend(origins_of(document, Origin::DropIn));
        self.fields = with_defaults(base, &mut self.origins, &self.flag_gates)
            .map_err(|problem| field_error(document, problem))?;
        Ok(())
    }

    /// Drops origins below whatever a patch replaces or removes.
    fn forget_replaced(&mut self, prefix: &str, patch: &Map<String, Value>) {
        for (key, value) in patch {
            let path = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
            match value {
                Value::Object(inner) => self.forget_replaced(&path, inner),
                _ => self.forget(&path),
            }
        }
    }

    fn forget(&mut self, path: &str) {
        self.origins.retain(|known, _| {
            known.strip_prefix(path).is_none_or(|rest| !(rest.is_empty() || rest.starts_with(['.', '['])))
        });
    }

    /// Sets a field from the command line. Zero is a value here, and is not replaced by the default.
    ///
    /// # Errors
    /// The value does not fit the field's type.
    pub(super) fn set(&mut self, flag: &'static Flag, path: &str, value: Value) -> Result<(), ConfigError> {
        // Gates are merged by name; every other flag replaces the field as a whole.
        let value = match (path, value) {
            ("featureGates", Value::Object(named)) => {
                for name in named.keys() {
                    self.origins.insert(format!("{path}.{name}"), Origin::Flag(flag.name));
                }
                let mut gates = match self.fields.get(path) {
                    Some(Value::Object(gates)) => gates.clone(),
                    _ => Map::new(),
                };
                gates.extend(named);
                Value::Object(gates)
            }
            (_, value) => {
                self.forget(path);
                self.origins.insert(path.to_owned(), Origin::Flag(flag.name));
                value
            }
        };
        let mut fields = self.fields.clone();
        put(&mut fields, path, value);
        document::decode::<KubeletConfiguration>(Value::Object(fields.clone()))
            .map_err(|problem| FlagError { flag: flag.name, problem: problem.message })?;
        self.fields = fields;
        Ok(())
    }

    /// The typed result.
    ///
    /// # Errors
    /// The merged document is not a valid one.
    pub(super) fn typed(&self) -> Result<KubeletConfiguration, ConfigError> {
        document::decode(Value::Object(self.fields.clone())).map_err(|problem| {
            let place = match lookup(&self.origins, &problem.field) {
                Origin::File(place) | Origin::DropIn(place) => place,
                other => Place { file: other.to_string().into(), line: 0 },
            };
            DocumentError::Field { place, field: problem.field, problem: problem.message }.into()
        })
    }
}

fn field_error(document: &Document, problem: document::Problem) -> ConfigError {
    let place = document.place_of(&problem.field);
    DocumentError::Field { place, field: problem.field, problem: problem.message }.into()
}

fn origins_of(document: &Document, origin: fn(Place) -> Origin) -> BTreeMap<String, Origin> {
    let file = &document.place.file;
    let at = |line: u64| origin(Place { file: file.clone(), line });
    document.lines.iter().map(|(path, line)| (path.clone(), at(*line))).collect()
}

/// Fills in every default; the result names every field and decodes.
fn with_defaults(
    mut fields: Map<String, Value>,
    origins: &mut BTreeMap<String, Origin>,
    flag_gates: &BTreeMap<String, bool>,
) -> Result<Map<String, Value>, document::Problem> {
    strip_nulls(&mut fields);
    // A zero of another type is an error, not a default.
    document::decode::<KubeletConfiguration>(Value::Object(fields.clone()))?;
    forget_zeros(&mut fields, origins);
    fill_dependent_defaults(&mut fields, flag_gates);
    document::decode::<KubeletConfiguration>(Value::Object(fields)).map(|config| to_json(&config))
}

/// Plain fields cannot be set to zero, which means "not written". A text is zero only if it is empty: "0" is one CPU, or a
/// size. Durations, whose defaults are written as durations, are zero if they take no time.
fn forget_zeros(fields: &mut Map<String, Value>, origins: &mut BTreeMap<String, Origin>) {
    fn is_zero(value: &Value) -> bool {
        match value {
            Value::Number(number) => number.as_f64() == Some(0.0),
            Value::String(text) => text.is_empty(),
            _ => false,
        }
    }
    fn is_no_time(value: &Value) -> bool {
        is_zero(value) || duration(value).is_some_and(GoDuration::is_zero)
    }
    fn duration(value: &Value) -> Option<GoDuration> {
        value.as_str()?.parse().ok()
    }
    let defaults = Value::Object(to_json(&KubeletConfiguration::default()));
    schema::walk(KubeletConfiguration::FIELDS, &mut |path, field| {
        let default = path.split('.').try_fold(&defaults, |section, name| section.get(name));
        let says: fn(&Value) -> bool = if default.and_then(duration).is_some() { is_no_time } else { is_zero };
        if field.presence == Presence::Value && remove_if(fields, path, says) {
            origins.remove(path);
        }
    });
}

/// Defaults that depend on other fields or on gates.
fn fill_dependent_defaults(fields: &mut Map<String, Value>, flag_gates: &BTreeMap<String, bool>) {
    let mut asked = gate_map(fields.get("featureGates"));
    asked.extend(flag_gates.iter().map(|(name, value)| (name.clone(), *value)));
    // Invalid gates are reported once all layers are merged; until then the defaults of 1.36 are used.
    let gates = FeatureGates::new(&asked).unwrap_or_default();
    if !fields.contains_key("serializeImagePulls") {
        let parallel = fields.get("maxParallelImagePulls").and_then(Value::as_i64);
        fields.insert("serializeImagePulls".to_owned(), parallel.is_none_or(|pulls| pulls < 2).into());
    }
    if !fields.contains_key("nodeStatusReportFrequency")
        && let Some(update) = fields.get("nodeStatusUpdateFrequency").cloned()
    {
        fields.insert("nodeStatusReportFrequency".to_owned(), update);
    }
    if gates.enabled(Feature::KubeletCrashLoopBackOffMax) {
        let section = fields.entry("crashLoopBackOff").or_insert_with(|| Value::Object(Map::new()));
        if let Value::Object(section) = section {
            section.entry("maxContainerRestartPeriod").or_insert_with(|| "5m0s".into());
        }
    }
    if !gates.enabled(Feature::KubeletEnsureSecretPulledImages) {
        fields.entry("imagePullCredentialsVerificationPolicy").or_insert_with(|| "".into());
    }
}

/// The well-formed entries of a `featureGates` value.
pub(super) fn gate_map(value: Option<&Value>) -> BTreeMap<String, bool> {
    let entries = value.and_then(Value::as_object).into_iter().flatten();
    entries.filter_map(|(name, value)| value.as_bool().map(|value| (name.clone(), value))).collect()
}

/// Only the main file can ask for the defaults of the hard thresholds it does not name.
fn merge_default_thresholds(fields: &mut Map<String, Value>) {
    let asked = fields.get("mergeDefaultEvictionSettings") == Some(&Value::Bool(true));
    if let Some(Value::Object(thresholds)) = fields.get_mut("evictionHard").filter(|_| asked) {
        for (signal, value) in DEFAULT_EVICTION_HARD {
            thresholds.entry(signal).or_insert_with(|| value.into());
        }
    }
}

/// Makes a path absolute, seen from `folder`; an empty one stays empty.
fn resolve_path(fields: &mut Map<String, Value>, path: &str, folder: &Path) {
    match path.split_once('.') {
        Some((section, rest)) => {
            if let Some(Value::Object(inner)) = fields.get_mut(section) {
                resolve_path(inner, rest, folder);
            }
        }
        None => {
            if let Some(Value::String(text)) = fields.get_mut(path)
                && !text.is_empty()
                && Path::new(text.as_str()).is_relative()
            {
                *text = joined(folder, text).to_string_lossy().into_owned();
            }
        }
    }
}

/// A path seen from `folder`, without `.` and `..`, as a kubelet joins them: not every field may have such parts.
fn joined(folder: &Path, path: &str) -> PathBuf {
    let mut joined = PathBuf::new();
    for part in folder.join(path).components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => _ = joined.pop(),
            other => joined.push(other),
        }
    }
    joined
}

fn put(fields: &mut Map<String, Value>, path: &str, value: Value) {
    match path.split_once('.') {
        Some((section, rest)) => {
            let section = fields.entry(section).or_insert_with(|| Value::Object(Map::new()));
            if let Value::Object(inner) = section {
                put(inner, rest, value);
            }
        }
        None => {
            fields.insert(path.to_owned(), value);
        }
    }
}

/// RFC 7386: objects merge, `null` removes, anything else replaces.
fn merge_patch(target: &mut Map<String, Value>, patch: &Map<String, Value>) {
    for (key, value) in patch {
        match value {
            Value::Null => {
                target.remove(key);
            }
            Value::Object(inner) => {
                let slot = target.entry(key).or_insert_with(|| Value::Object(Map::new()));
                if !slot.is_object() {
                    *slot = Value::Object(Map::new());
                }
                if let Value::Object(existing) = slot {
                    merge_patch(existing, inner);
                }
            }
            other => {
                target.insert(key.clone(), other.clone());
            }
        }
    }
}
