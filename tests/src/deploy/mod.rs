//! What operators install from the folder `deploy`: documents of manifests, and of the Helm chart.

pub mod helm;

use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use serde_json::Value;

/// A file of the repository.
pub fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name)
}

/// The documents of a YAML text.
///
/// # Errors
/// It is malformed.
pub fn yaml(text: &str) -> Result<Vec<Value>> {
    serde_saphyr::from_multiple(text).with_context(|| format!("not YAML:\n{text}"))
}

/// The documents of a manifest.
///
/// # Errors
/// It cannot be read or is malformed.
pub fn manifest(name: &str) -> Result<Vec<Value>> {
    yaml(&read(&path(name))?).with_context(|| format!("cannot decode {name}"))
}

/// The document of this kind.
///
/// # Errors
/// There is none.
pub fn of_kind<'a>(documents: &'a [Value], kind: &str) -> Result<&'a Value> {
    documents.iter().find(|one| one["kind"] == kind).with_context(|| format!("there is no {kind}"))
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}
