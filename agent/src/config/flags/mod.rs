//! The command line as configuration: which flags exist, what each sets, and how its text becomes a value.
//!
//! Owns no parser of argument lists (the command line's own parser feeds [`FlagValues`]) and no precedence.

mod own;
mod table;
mod text;

use std::collections::BTreeMap;

use serde_json::Map;
use serde_json::Value;

pub use own::FlagSettings;
pub use table::FLAGS;
pub use table::Flag;
pub use table::Kind;
pub use table::Target;
pub use table::find;

use super::document;

/// What is wrong with a flag.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--{flag}: {problem}")]
pub struct FlagError {
    /// Its name.
    pub flag: &'static str,
    /// What is wrong with the value.
    pub problem: String,
}

/// Flags that name files or folders with documents.
const DOCUMENT_PATHS: [&str; 3] = ["config", "config-dir", "keblet-config"];

/// The flags that were given: for each, its texts in the order they came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlagValues(BTreeMap<&'static str, Vec<String>>);

/// Brings a flag to its canonical spelling: underscores are hyphens, as long as no `=value` is touched.
pub fn normalize(argument: &str) -> String {
    match argument.split_once('=') {
        Some((name, value)) if name.starts_with("--") => format!("{}={value}", name.replace('_', "-")),
        None if argument.starts_with("--") => argument.replace('_', "-"),
        _ => argument.to_owned(),
    }
}

impl FlagValues {
    /// Adds one occurrence.
    pub fn push(&mut self, flag: &'static Flag, text: impl Into<String>) {
        self.0.entry(flag.name).or_default().push(text.into());
    }

    /// Every flag given, by name, with its value.
    ///
    /// # Errors
    /// A flag with an invalid value.
    pub fn values(&self) -> Result<Vec<(&'static Flag, Value)>, FlagError> {
        let mut values = Vec::new();
        for (name, texts) in &self.0 {
            let Some(flag) = find(name) else { continue };
            let mut value = None;
            // As upstream, an address that is empty sets nothing.
            for text in texts.iter().filter(|text| flag.kind != Kind::Ip || !text.is_empty()) {
                let next = text::read(flag.kind, text).map_err(|problem| FlagError { flag: flag.name, problem })?;
                // Upstream assigns taints, so that the last use counts; other lists and all maps grow.
                let earlier = value.filter(|_| flag.kind != Kind::Taints);
                value = Some(text::join(earlier, next));
            }
            values.extend(value.map(|value| (flag, value)));
        }
        Ok(values)
    }

    /// The settings that only flags can make.
    ///
    /// # Errors
    /// A flag with an invalid value.
    pub fn own(&self) -> Result<FlagSettings, FlagError> {
        let mut map = Map::new();
        for (flag, value) in self.values()? {
            // Units and scripts fill these from variables that may be empty: no path, as for a kubelet.
            let is_no_path = DOCUMENT_PATHS.contains(&flag.name) && value == "";
            if flag.target == Target::Own && !is_no_path {
                map.insert(flag.name.to_owned(), value);
            }
        }
        document::decode(Value::Object(map)).map_err(|problem| FlagError {
            flag: find(&problem.field).map_or("config", |flag| flag.name),
            problem: problem.message,
        })
    }

    /// The flags whose use is discouraged, with what to use instead.
    pub fn deprecated(&self) -> impl Iterator<Item = &'static Flag> {
        self.0.keys().filter_map(|name| find(name)).filter(|flag| flag.deprecated)
    }

    /// Every flag given, by name, with its texts.
    #[cfg(test)]
    pub(crate) fn texts(&self) -> impl Iterator<Item = (&'static str, &[String])> {
        self.0.iter().map(|(name, texts)| (*name, texts.as_slice()))
    }
}

impl<'a> FromIterator<(&'a str, &'a str)> for FlagValues {
    /// From known flags and texts; unknown names are left out, since the parser rejects them.
    fn from_iter<I: IntoIterator<Item = (&'a str, &'a str)>>(pairs: I) -> Self {
        let mut values = Self::default();
        for (name, text) in pairs {
            if let Some(flag) = find(name) {
                values.push(flag, text);
            }
        }
        values
    }
}

#[cfg(test)]
mod tests;
