//! `cargo xtask layers`: checks that modules of the agent import each other only as `agent/layers.toml` allows.
//!
//! Reports forbidden imports, rows that the code does not need, and effects in files that call themselves pure. Does
//! not parse Rust beyond paths: it reads `use` trees and paths that start at `crate`, or at `super` and end at the
//! crate's root.

mod scan;
mod table;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;

use crate::paths;
use crate::report::Report;
use scan::Source;
use table::Table;

/// Checks all files of the agent.
///
/// # Errors
/// The table or a source file cannot be read.
pub(crate) fn check() -> Result<Report> {
    let root = paths::repository();
    let file = root.join("agent/layers.toml");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let table = Table::parse(&text).with_context(|| format!("{} is invalid", file.display()))?;
    let sources = sources(&root.join("agent/src"))?;
    let count = sources.len();
    let mut report = Report::new(format!("layers: {count} files"));
    report.problems = problems(&table, &sources);
    report.problems.extend(stale_rows(&table, &sources));
    Ok(report)
}

/// Files that are compiled outside of tests.
fn production(sources: &[(PathBuf, Source)]) -> impl Iterator<Item = &(PathBuf, Source)> {
    let test_modules: Vec<&Vec<String>> = sources.iter().flat_map(|(_, source)| &source.test_modules).collect();
    sources.iter().filter(move |(_, source)| !test_modules.iter().any(|test| source.module.starts_with(test)))
}

/// One sentence for each import that the table forbids, and each effect in a file that calls itself pure.
fn problems(table: &Table, sources: &[(PathBuf, Source)]) -> Vec<String> {
    let mut problems = Vec::new();
    for (file, source) in production(sources) {
        if let Err(problem) = table.known(&source.module) {
            problems.push(format!("{}: {problem}", file.display()));
            continue;
        }
        for reference in &source.references {
            let allowed = table.allows(&source.module, &reference.path);
            let pure = if source.says_pure { table::is_pure(&reference.path) } else { Ok(()) };
            if let Err(problem) = allowed.and(pure) {
                problems.push(format!("{}:{}: {problem}", file.display(), reference.line));
            }
        }
    }
    problems
}

/// One sentence for each row or entry of the table that no code needs.
fn stale_rows(table: &Table, sources: &[(PathBuf, Source)]) -> Vec<String> {
    let modules: BTreeSet<&str> = production(sources).filter_map(|(_, source)| source.top()).collect();
    let used: BTreeSet<(&str, &str)> = production(sources)
        .flat_map(|(_, source)| {
            source.references.iter().filter_map(|reference| Some((source.top()?, reference.top()?)))
        })
        .collect();
    let mut problems = Vec::new();
    for name in table.names().filter(|name| !modules.contains(name)) {
        problems.push(format!("agent/layers.toml: there is no module {name}"));
    }
    let is_used = |name: &String| production(sources).any(|(_, source)| source.module.contains(name));
    for name in table.pure_names().filter(|name| !is_used(name)) {
        problems.push(format!("agent/layers.toml: there is no file or folder {name}"));
    }
    for (name, target) in table.permissions().filter(|permission| !used.contains(permission)) {
        problems.push(format!("agent/layers.toml: {name} may use {target}, but does not"));
    }
    problems
}

fn sources(folder: &Path) -> Result<Vec<(PathBuf, Source)>> {
    let mut sources = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(current) = folders.pop() {
        let entries = fs::read_dir(&current).with_context(|| format!("cannot read {}", current.display()))?;
        for path in entries.flatten().map(|entry| entry.path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
                let relative = path.strip_prefix(folder).unwrap_or(&path).to_owned();
                let source = Source::read(&text, module_of(&relative));
                sources.push((Path::new("agent/src").join(relative), source));
            }
        }
    }
    sources.sort_by(|(left, _), (right, _)| left.cmp(right));
    Ok(sources)
}

/// The module path of a file relative to the crate's folder: `pleg/cache.rs` is `pleg::cache`.
fn module_of(file: &Path) -> Vec<String> {
    let mut module: Vec<String> =
        file.with_extension("").components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
    if module.len() > 1 && module.last().is_some_and(|last| last == "mod") {
        module.pop();
    }
    module
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = r#"
everywhere = ["model"]
pure = ["plan"]
pure_may = ["model"]
all = ["lib", "wiring"]
[[module]]
name = "model"
duty = "words"
may = []
[[module]]
name = "runtime"
duty = "speaks"
may = []
[[module]]
name = "pleg"
duty = "observes"
may = ["runtime"]
"#;

    fn check(files: &[(&str, &str)]) -> Vec<String> {
        let table = Table::parse(TABLE).unwrap();
        let sources: Vec<_> = files
            .iter()
            .map(|(file, text)| (PathBuf::from(file), Source::read(text, module_of(Path::new(file)))))
            .collect();
        problems(&table, &sources)
    }

    #[test]
    fn permitted_imports_are_accepted() {
        let files = [
            ("lib.rs", "pub mod pleg;"),
            ("wiring.rs", "use crate::pleg::start; use crate::runtime::{Client, call};"),
            ("pleg/mod.rs", "use crate::{model::Pod, runtime}; use self::cache::Cache; mod cache;"),
            ("pleg/cache.rs", "use super::diff; use crate::pleg::diff; use crate::model::Pod;"),
            ("pleg/plan.rs", "use crate::model::Pod; use std::time::Duration;"),
        ];
        assert_eq!(check(&files), Vec::<String>::new());
    }

    #[test]
    fn imports_against_the_order_are_rejected() {
        let cases = [
            ("runtime/call.rs", "use crate::pleg::Cache;", "runtime/call.rs:1: runtime may not use pleg"),
            ("runtime/call.rs", "\nuse crate::{model, pleg::{a, b}};", "runtime/call.rs:2: runtime may not use pleg"),
            ("runtime/call.rs", "fn f() { crate::pleg::go() }", "runtime/call.rs:1: runtime may not use pleg"),
            ("runtime/call.rs", "use super::super::pleg::Cache;", "runtime/call.rs:1: runtime may not use pleg"),
            ("runtime/mod.rs", "use super::pleg;", "runtime/mod.rs:1: runtime may not use pleg"),
            ("pleg/a.rs", "use crate::wiring::go;", "pleg/a.rs:1: pleg may not use wiring"),
            ("pleg/plan.rs", "use crate::runtime::go;", "pleg/plan.rs:1: a pure file may not use runtime"),
            ("pleg/plan.rs", "use crate::pleg::cache;", "pleg/plan.rs:1: a pure file may not use pleg::cache"),
            ("pleg/plan/a.rs", "use super::super::b;", "pleg/plan/a.rs:1: a pure file may not use pleg::b"),
            ("pleg/plan.rs", "fn f() { tokio::spawn(g()); }", "pleg/plan.rs:1: a pure file may not use tokio"),
            (
                "pleg/plan.rs",
                "use std::time::Instant; fn f() { Instant::now(); }",
                "pleg/plan.rs:1: a pure file may not use Instant::now",
            ),
            ("other.rs", "", "other.rs: module other has no row in the table"),
            (
                "pleg/rank.rs",
                "//! Orders pods. Pure.\n\nuse tokio::fs;",
                "pleg/rank.rs:3: a file that calls itself pure may not use tokio",
            ),
            (
                "pleg/rank.rs",
                "//! Pure: no I/O.\nfn f() { std::time::SystemTime::now(); }",
                "pleg/rank.rs:2: a file that calls itself pure may not use SystemTime::now",
            ),
        ];
        for (file, text, problem) in cases {
            let found = check(&[(file, text)]);
            assert!(found.iter().any(|found| found == problem), "{file}: {text}\n{found:?}");
        }
    }

    #[test]
    fn a_pure_file_may_name_types_of_time_but_not_read_clocks() {
        let text =
            "//! Orders pods. Pure.\nuse tokio::time::Instant; use std::time::SystemTime; use crate::runtime::Id;";
        assert_eq!(check(&[("pleg/rank.rs", text)]), Vec::<String>::new());
        assert_eq!(check(&[("pleg/rank.rs", "//! Impure code.\nuse tokio::fs;")]), Vec::<String>::new());
    }

    #[test]
    fn rows_and_permissions_that_nothing_needs_are_stale() {
        let stale = |files: &[(&str, &str)]| {
            let table = Table::parse(TABLE).unwrap();
            let source =
                |(file, text): &(&str, &str)| (PathBuf::from(file), Source::read(text, module_of(Path::new(file))));
            stale_rows(&table, &files.iter().map(source).collect::<Vec<_>>())
        };
        let needed = [
            ("lib.rs", ""),
            ("wiring.rs", ""),
            ("model.rs", ""),
            ("runtime.rs", ""),
            ("pleg.rs", "use crate::runtime::Client;"),
            ("pleg/plan.rs", ""),
        ];
        assert_eq!(stale(&needed), Vec::<String>::new());
        let mut unused = needed;
        unused[4].1 = "#[cfg(test)]\nuse crate::runtime::Client;";
        assert_eq!(stale(&unused), ["agent/layers.toml: pleg may use runtime, but does not"]);
        assert_eq!(stale(&needed[1..]), ["agent/layers.toml: there is no module lib"]);
        assert_eq!(stale(&needed[..5]), ["agent/layers.toml: there is no file or folder plan"]);
    }

    #[test]
    fn comments_strings_and_tests_do_not_count() {
        let text = r##"
//! See [`crate::pleg::Cache`].
/* use crate::pleg::Cache; /* nested */ */
const A: &str = "use crate::pleg::Cache;";
const B: &str = r#"crate::pleg"#;
const C: char = '"'; fn f<'a>(x: &'a str) {}
#[cfg(test)]
mod tests { use crate::pleg::Cache; fn f() { if true { g() } } }
#[cfg(test)]
use crate::pleg::Cache;
#[cfg(test)]
mod table;
"##;
        let table = ("runtime/table.rs", "use crate::pleg::Cache;");
        assert_eq!(check(&[("runtime/mod.rs", text), table]), Vec::<String>::new());
    }
}
