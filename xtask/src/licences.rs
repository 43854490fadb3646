//! `cargo xtask licences`: every crate that may be linked has a licence and a source that `deny.toml` allows.
//!
//! The part of `cargo deny` that every commit needs, without the minutes that building that tool takes. Licence texts
//! are not read: the licence is the `license` field of a crate's manifest.

use std::fs;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use serde::Deserialize;

use crate::paths;
use crate::report::Report;
use crate::system;

#[derive(Deserialize)]
struct Deny {
    licenses: Licenses,
    sources: Sources,
}

#[derive(Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Sources {
    allow_registry: Vec<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    /// `None` for crates of this repository.
    source: Option<String>,
}

/// Checks all packages of the lock file.
///
/// # Errors
/// `deny.toml` or the output of `cargo metadata` cannot be read.
pub(crate) fn check() -> Result<Report> {
    let root = paths::repository();
    let file = root.join("deny.toml");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let deny: Deny = toml::from_str(&text).with_context(|| format!("{} is invalid", file.display()))?;
    let metadata = system::output(
        Command::new(paths::cargo()).args(["metadata", "--format-version", "1", "--locked"]).current_dir(&root),
    )?;
    let metadata: Metadata = serde_json::from_str(&metadata).context("cannot parse the output of cargo metadata")?;
    let mut report = Report::new(format!("licences: {} crates", metadata.packages.len()));
    report.problems = metadata.packages.iter().filter_map(|package| problem(package, &deny)).collect();
    Ok(report)
}

fn problem(package: &Package, deny: &Deny) -> Option<String> {
    let name = format!("{} {}", package.name, package.version);
    if let Some(source) = &package.source {
        let address = source.trim_start_matches("registry+").trim_start_matches("sparse+");
        if !deny.sources.allow_registry.iter().any(|allowed| allowed == address) {
            return Some(format!("{name} comes from {source}"));
        }
    }
    match package.license.as_deref() {
        None => Some(format!("{name} has no licence")),
        Some(expression) => match allowed(expression, &deny.licenses.allow) {
            Some(true) => None,
            Some(false) => Some(format!("{name} has the licence {expression}")),
            None => Some(format!("{name} has a malformed licence expression: {expression}")),
        },
    }
}

/// Whether an SPDX expression can be satisfied by the allowed licences; `None` if it is malformed.
fn allowed(expression: &str, allow: &[String]) -> Option<bool> {
    // Older crates separate alternatives by a slash.
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut reader = Expression { words: &words, allow };
    let met = reader.any()?;
    reader.words.is_empty().then_some(met)
}

struct Expression<'a> {
    words: &'a [&'a str],
    allow: &'a [String],
}

impl Expression<'_> {
    fn next(&mut self, expected: &str) -> bool {
        let found = self.words.first() == Some(&expected);
        if found {
            self.words = &self.words[1..];
        }
        found
    }

    fn any(&mut self) -> Option<bool> {
        let mut met = self.all()?;
        while self.next("OR") {
            met |= self.all()?;
        }
        Some(met)
    }

    fn all(&mut self) -> Option<bool> {
        let mut met = self.one()?;
        while self.next("AND") {
            met &= self.one()?;
        }
        Some(met)
    }

    fn one(&mut self) -> Option<bool> {
        if self.next("(") {
            let met = self.any()?;
            return self.next(")").then_some(met);
        }
        let (first, rest) = self.words.split_first()?;
        self.words = rest;
        let mut licence = (*first).to_owned();
        if self.next("WITH") {
            let (exception, rest) = self.words.split_first()?;
            self.words = rest;
            licence = format!("{licence} WITH {exception}");
        }
        Some(self.allow.contains(&licence))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_met_or_not() {
        let allow = ["MIT", "Apache-2.0", "ISC", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned);
        let cases = [
            ("MIT", Some(true)),
            ("GPL-3.0", Some(false)),
            ("MIT OR GPL-3.0", Some(true)),
            ("MIT/GPL-3.0", Some(true)),
            ("MIT AND GPL-3.0", Some(false)),
            ("GPL-3.0 OR MIT AND ISC", Some(true)),
            ("(MIT OR GPL-3.0) AND ISC", Some(true)),
            ("(MIT OR ISC) AND GPL-3.0", Some(false)),
            ("Apache-2.0 WITH LLVM-exception", Some(true)),
            ("MIT WITH LLVM-exception", Some(false)),
            ("(MIT", None),
            ("MIT ISC", None),
            ("", None),
        ];
        for (expression, expected) in cases {
            assert_eq!(allowed(expression, &allow), expected, "{expression}");
        }
    }

    #[test]
    fn other_sources_and_missing_licences_are_problems() {
        let deny: Deny =
            toml::from_str("[licenses]\nallow = [\"MIT\"]\n[sources]\nallow-registry = [\"https://index.example\"]\n")
                .unwrap();
        let package = |license: Option<&str>, source: Option<&str>| Package {
            name: "a".to_owned(),
            version: "1.0.0".to_owned(),
            license: license.map(str::to_owned),
            source: source.map(str::to_owned),
        };
        let registry = Some("registry+https://index.example");
        assert_eq!(problem(&package(Some("MIT"), registry), &deny), None);
        assert_eq!(problem(&package(Some("MIT"), None), &deny), None);
        assert_eq!(problem(&package(None, registry), &deny).unwrap(), "a 1.0.0 has no licence");
        let git = Some("git+https://elsewhere.example");
        assert_eq!(
            problem(&package(Some("MIT"), git), &deny).unwrap(),
            "a 1.0.0 comes from git+https://elsewhere.example"
        );
        assert_eq!(problem(&package(Some("X"), registry), &deny).unwrap(), "a 1.0.0 has the licence X");
    }
}
