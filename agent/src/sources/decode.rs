//! The text of a manifest to finished static pods: document, types, API defaults, static pod defaults, validation,
//! refused references. All or nothing per text; no I/O, no clock.

use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod as ApiPod;
use serde_json::Value;

use super::defaults;
use super::documents;
use super::references;
use super::static_pod;
use super::static_pod::Origin;
use super::validate;
use crate::model::Pod;
use crate::model::quote::Excerpt;

/// A manifest must be smaller than this, in bytes.
pub const MAX_MANIFEST_BYTES: u64 = 10 << 20;

/// The log message about [`Manifest::ignores_documents`].
pub(super) const FURTHER_DOCUMENTS: &str = "only the first document of the manifest is used, further ones are ignored";

/// The content of a manifest.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Manifest {
    /// Its pods in their order.
    pub pods: Vec<Pod>,
    /// Fields it sets that a pod does not have: ignored, but most likely misspelt.
    pub unknown_fields: Vec<String>,
    /// Further documents follow the first one: ignored, as by a kubelet, but most likely meant to be used.
    pub ignores_documents: bool,
}

/// Why a manifest gives no pods.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct ManifestError {
    /// What is wrong; at least one entry.
    pub problems: Vec<Problem>,
}

/// One thing wrong with a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Line in the text, from 1, if known.
    pub line: Option<u64>,
    /// Path of the field, if any, and what is wrong.
    pub message: String,
}

/// More problems than these are only counted in the message.
const SHOWN_PROBLEMS: usize = 10;

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().take(SHOWN_PROBLEMS).enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            match problem.line {
                Some(line) => write!(f, "{separator}line {line}: {}", problem.message)?,
                None => write!(f, "{separator}{}", problem.message)?,
            }
        }
        match self.problems.len().saturating_sub(SHOWN_PROBLEMS) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

impl ManifestError {
    /// The text as a whole is unusable.
    pub fn whole(message: String) -> Self {
        Self { problems: vec![Problem { line: None, message }] }
    }
}

/// What is wrong with the document, before lines are known: (path or empty, message).
type Problems = Vec<(String, String)>;

/// Reads a manifest's bytes into pods ready for the sync loop.
///
/// # Errors
/// What is wrong with the text or its first document; then no pod of it is used.
pub fn decode(bytes: &[u8], origin: &Origin<'_>) -> Result<Manifest, ManifestError> {
    if bytes.len() as u64 >= MAX_MANIFEST_BYTES {
        return Err(ManifestError::whole(format!("is too big: must be under {MAX_MANIFEST_BYTES} bytes")));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let line = bytes[..error.valid_up_to()].iter().filter(|&&b| b == b'\n').count() as u64 + 1;
        let problem = Problem { line: Some(line), message: "is not valid UTF-8".to_owned() };
        ManifestError { problems: vec![problem] }
    })?;
    let document = documents::parse(text).map_err(|problem| {
        let message = format!("is neither YAML nor JSON: {}", Excerpt(&problem.message));
        ManifestError { problems: vec![Problem { line: problem.line, message }] }
    })?;
    let Some(value) = document.value else {
        let which = if document.is_followed { "has an empty first document" } else { "holds no document" };
        return Err(ManifestError::whole(which.to_owned()));
    };
    let mut manifest = Manifest { ignores_documents: document.is_followed, ..Manifest::default() };
    read_document(value, origin, &mut manifest).map_err(|problems| locate(text, problems))?;
    Ok(manifest)
}

/// Adds the lines.
fn locate(text: &str, problems: Problems) -> ManifestError {
    let problems = problems
        .into_iter()
        .enumerate()
        .map(|(i, (path, message))| Problem {
            // Each look-up reads the text again; what is not shown needs none.
            line: if i < SHOWN_PROBLEMS { documents::line_of(text, &path) } else { None },
            message: if path.is_empty() { message } else { format!("{path}: {message}") },
        })
        .collect();
    ManifestError { problems }
}

fn read_document(document: Value, origin: &Origin<'_>, manifest: &mut Manifest) -> Result<(), Problems> {
    let kind = |value: &Value, field: &str| value.get(field).and_then(Value::as_str).map(str::to_owned);
    let api_version = kind(&document, "apiVersion").unwrap_or_default();
    let kind = kind(&document, "kind").unwrap_or_default();
    match (api_version.as_str(), kind.as_str()) {
        ("v1", "Pod") => read_pod(document, "", origin, manifest),
        ("v1", "PodList" | "List") => read_list(document, origin, manifest),
        (_, "") => Err(vec![("kind".into(), "Required value: must be Pod or PodList".into())]),
        ("v1", _) => Err(vec![(
            "kind".into(),
            format!("Unsupported value: \"{}\": supported values: \"Pod\", \"PodList\"", Excerpt(&kind)),
        )]),
        ("", _) => Err(vec![("apiVersion".into(), "Required value: must be v1".into())]),
        _ => Err(vec![(
            "apiVersion".into(),
            format!("Unsupported value: \"{}\": supported values: \"v1\"", Excerpt(&api_version)),
        )]),
    }
}

fn read_list(mut document: Value, origin: &Origin<'_>, manifest: &mut Manifest) -> Result<(), Problems> {
    let items = match document.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) => items,
        None | Some(Value::Null) => Vec::new(),
        Some(_) => return Err(vec![("items".into(), "Invalid value: must be a list of pods".into())]),
    };
    for (index, mut item) in items.into_iter().enumerate() {
        if let Value::Object(fields) = &mut item {
            fields.entry("apiVersion").or_insert_with(|| "v1".into());
            fields.entry("kind").or_insert_with(|| "Pod".into());
        }
        read_pod(item, &format!("items[{index}]."), origin, manifest)?;
    }
    Ok(())
}

fn read_pod(mut value: Value, prefix: &str, origin: &Origin<'_>, manifest: &mut Manifest) -> Result<(), Problems> {
    if let Some(spec) = value.get_mut("spec") {
        quote_quantities(spec);
    }
    let mut pod: ApiPod = serde_path_to_error::deserialize(&value).map_err(|error| {
        let path = error.path().to_string();
        let path = if path == "." { String::new() } else { path };
        vec![(format!("{prefix}{path}"), Excerpt(&error.inner().to_string()).to_string())]
    })?;
    if let Ok(known) = serde_json::to_value(&pod) {
        unknown_fields(&value, &known, prefix.trim_end_matches('.'), &mut manifest.unknown_fields);
    }
    let named = |(path, message): (&str, String)| vec![(format!("{prefix}{path}"), message)];

    defaults::apply(&mut pod);
    static_pod::establish(&mut pod, origin).map_err(named)?;
    let findings = validate::pod(&pod);
    if !findings.is_empty() {
        return Err(findings.into_iter().map(|e| (format!("{prefix}{}", e.path.as_str()), e.problem)).collect());
    }
    references::check(&pod, origin.prevent_api_references).map_err(|refused| named(("spec", refused)))?;
    manifest.pods.push(Arc::new(pod));
    Ok(())
}

/// Resource quantities may be written as bare numbers; the API types take strings only.
fn quote_quantities(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(quote_quantities),
        Value::Object(fields) => {
            for (key, value) in fields {
                match (key.as_str(), &mut *value) {
                    ("limits" | "requests" | "overhead", Value::Object(amounts)) => {
                        amounts.values_mut().for_each(quote)
                    }
                    ("sizeLimit" | "divisor", number) => quote(number),
                    _ => quote_quantities(value),
                }
            }
        }
        _ => {}
    }
}

fn quote(value: &mut Value) {
    if let Value::Number(number) = value {
        *value = Value::String(number.to_string());
    }
}

/// Fields named in this many errors are enough to find the mistake.
const MAX_UNKNOWN: usize = 20;

/// Fields of `given` that `known`, what the typed object gives back, does not have.
fn unknown_fields(given: &Value, known: &Value, path: &str, unknown: &mut Vec<String>) {
    match (given, known) {
        (Value::Object(given), Value::Object(known)) => {
            for (key, value) in given.iter().filter(|(_, v)| !v.is_null()) {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                match known.get(key) {
                    Some(known) => unknown_fields(value, known, &path, unknown),
                    None if unknown.len() < MAX_UNKNOWN => unknown.push(Excerpt(&path).to_string()),
                    None => return,
                }
            }
        }
        (Value::Array(given), Value::Array(known)) => {
            for (i, (given, known)) in given.iter().zip(known).enumerate() {
                unknown_fields(given, known, &format!("{path}[{i}]"), unknown);
            }
        }
        _ => {}
    }
}
