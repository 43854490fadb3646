//! `cargo xtask layers`: data goes one way through the agent, and this holds the imports to it.
//!
//! Owns the check of `agent/src` against `agent/layers.toml`. Refuses to understand Rust beyond paths: what it reads
//! are `use` trees and paths that start at `crate` or climb there by `super`.

mod scan;
mod table;

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
pub fn check() -> Result<Report> {
    let root = paths::repository();
    let file = root.join("agent/layers.toml");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let table = Table::parse(&text).with_context(|| format!("{} is wrong", file.display()))?;
    let sources = sources(&root.join("agent/src"))?;
    let count = sources.len();
    let mut report = Report::new(format!("layers: {count} files"));
    report.problems = problems(&table, &sources);
    Ok(report)
}

/// One sentence for each import that the table forbids.
fn problems(table: &Table, sources: &[(PathBuf, Source)]) -> Vec<String> {
    let test_modules: Vec<&Vec<String>> = sources.iter().flat_map(|(_, source)| &source.test_modules).collect();
    let mut problems = Vec::new();
    for (file, source) in sources {
        if test_modules.iter().any(|test| source.module.starts_with(test)) {
            continue;
        }
        if let Err(problem) = table.known(&source.module) {
            problems.push(format!("{}: {problem}", file.display()));
            continue;
        }
        for reference in &source.references {
            if let Err(problem) = table.allows(&source.module, &reference.path) {
                problems.push(format!("{}:{}: {problem}", file.display(), reference.line));
            }
        }
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
    fn the_way_of_the_data_is_allowed() {
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
    fn the_way_back_is_not() {
        let cases = [
            ("runtime/call.rs", "use crate::pleg::Cache;", "runtime/call.rs:1: runtime may not use pleg"),
            ("runtime/call.rs", "\nuse crate::{model, pleg::{a, b}};", "runtime/call.rs:2: runtime may not use pleg"),
            ("runtime/call.rs", "fn f() { crate::pleg::go() }", "runtime/call.rs:1: runtime may not use pleg"),
            ("runtime/call.rs", "use super::super::pleg::Cache;", "runtime/call.rs:1: runtime may not use pleg"),
            ("runtime/mod.rs", "use super::pleg;", "runtime/mod.rs:1: runtime may not use pleg"),
            ("pleg/a.rs", "use crate::wiring::go;", "pleg/a.rs:1: pleg may not use wiring"),
            ("pleg/plan.rs", "use crate::runtime::go;", "pleg/plan.rs:1: a file that decides may not use runtime"),
            ("pleg/plan.rs", "use crate::pleg::cache;", "pleg/plan.rs:1: a file that decides may not use pleg::cache"),
            ("pleg/plan/a.rs", "use super::super::b;", "pleg/plan/a.rs:1: a file that decides may not use pleg::b"),
            ("pleg/plan.rs", "fn f() { tokio::spawn(g()); }", "pleg/plan.rs:1: a file that decides may not use tokio"),
            (
                "pleg/plan.rs",
                "use std::time::Instant; fn f() { Instant::now(); }",
                "pleg/plan.rs:1: a file that decides may not use Instant::now",
            ),
            ("other.rs", "", "other.rs: module other has no row in the table"),
        ];
        for (file, text, problem) in cases {
            let found = check(&[(file, text)]);
            assert!(found.iter().any(|found| found == problem), "{file}: {text}\n{found:?}");
        }
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
