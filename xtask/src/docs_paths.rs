//! `cargo xtask docs-paths`: every path that the documents name exists, and so does every test they name.
//!
//! Owns finding such names in Markdown. A path is a link's target, or code that starts with one of the tree's top
//! folders or names a file of the root; `PATH::NAME` names a function in a file. Refuses to check addresses of the web.

use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;

use crate::paths;
use crate::report::Report;
use crate::system;

/// Code that begins with one of these names a path of ours.
const TOP: [&str; 9] = [".ci", ".cargo", "agent", "deploy", "docs", "ebpf", "proto", "tests", "xtask"];
/// A word without a slash names a file of the root if it ends so.
const ROOT_FILES: [&str; 2] = [".md", ".toml"];

/// Checks all Markdown files that Git knows, and those it does not ignore.
pub fn check() -> Result<Report> {
    let root = paths::repository();
    let listed = system::output(
        Command::new("git").args(["ls-files", "--cached", "--others", "--exclude-standard", "*.md"]).current_dir(&root),
    )?;
    let mut report = Report::new(String::new());
    let mut count = 0;
    for document in listed.lines().map(Path::new) {
        let path = root.join(document);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        for (line, name) in names(&text) {
            count += 1;
            if let Err(problem) = exists(&root, document, &name) {
                report.problems.push(format!("{}:{line}: {problem}", document.display()));
            }
        }
    }
    report.what = format!("docs-paths: {count} names");
    Ok(report)
}

/// What a document names.
#[derive(Debug, PartialEq)]
enum Name {
    /// A link, relative to the document.
    Link(String),
    /// A path from the root, perhaps with a function in that file.
    Path(String, Option<String>),
}

fn exists(root: &Path, document: &Path, name: &Name) -> Result<(), String> {
    let (path, function) = match name {
        Name::Link(target) => (document.parent().unwrap_or(Path::new("")).join(target), None),
        Name::Path(path, function) => (PathBuf::from(path), function.as_deref()),
    };
    let full = root.join(&path);
    if !full.exists() {
        return Err(format!("{} does not exist", path.display()));
    }
    let Some(function) = function else { return Ok(()) };
    let text = fs::read_to_string(&full).map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    let last = function.rsplit("::").next().unwrap_or(function);
    if text.contains(&format!("fn {last}(")) {
        Ok(())
    } else {
        Err(format!("{} has no function {last}", path.display()))
    }
}

/// All names in a document, with their lines. Fenced blocks count as code too.
fn names(text: &str) -> Vec<(usize, Name)> {
    let mut names = Vec::new();
    let mut fenced = false;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        let found: Vec<Name> = if fenced {
            line.split_whitespace().filter_map(path).collect()
        } else {
            let code = line.split('`').skip(1).step_by(2).flat_map(str::split_whitespace).filter_map(path);
            code.chain(links(line)).collect()
        };
        names.extend(found.into_iter().map(|name| (index + 1, name)));
    }
    names
}

fn path(word: &str) -> Option<Name> {
    let word = word.trim_matches(|character: char| "()[],;:'\"".contains(character)).trim_end_matches('.');
    let (path, function) = match word.split_once("::") {
        Some((path, function)) => (path, Some(function.to_owned())),
        None => (word, None),
    };
    let plain = path.chars().all(|character| character.is_ascii_alphanumeric() || "._-/".contains(character));
    let top = path.split('/').next().is_some_and(|first| TOP.contains(&first)) && path.contains('/');
    let root_file = !path.contains('/') && ROOT_FILES.iter().any(|end| path.ends_with(end) && path.len() > end.len());
    // Function names begin small; `Cargo.toml::x` or a Rust path is no claim about a file.
    (plain && (top || root_file)).then(|| Name::Path(path.to_owned(), function))
}

fn links(line: &str) -> impl Iterator<Item = Name> + '_ {
    line.split("](").skip(1).filter_map(|rest| {
        let target = rest.split([')', ' ', '#']).next()?;
        let local = !target.is_empty() && !target.contains("://") && !target.starts_with("mailto:");
        local.then(|| Name::Link(target.to_owned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_told_from_other_code() {
        let text = "\
See `agent/src/lib.rs` and `tests/peers/src/lib.rs::start`, not `k8s.io/api` or `agent::model` or `a/b`.
Read [the map](docs/map.md#part), [the web](https://example.org/x) and `Cargo.toml`.
```
cat agent/layers.toml, and run
```
Globs like `agent/src/*.rs` are no names.
";
        let path = |name: &str| Name::Path(name.to_owned(), None);
        let expected = [
            (1, path("agent/src/lib.rs")),
            (1, Name::Path("tests/peers/src/lib.rs".to_owned(), Some("start".to_owned()))),
            (2, path("Cargo.toml")),
            (2, Name::Link("docs/map.md".to_owned())),
            (4, path("agent/layers.toml")),
        ];
        assert_eq!(names(text), expected);
    }

    #[test]
    fn a_missing_file_or_function_is_a_problem() {
        let root = paths::repository();
        let document = Path::new("xtask/page.md");
        let own = "xtask/src/docs_paths.rs";
        let path = |function: &str| Name::Path(own.to_owned(), Some(function.to_owned()));
        assert_eq!(exists(&root, document, &path("tests::a_missing_file_or_function_is_a_problem")), Ok(()));
        assert_eq!(exists(&root, document, &path("nobody")), Err(format!("{own} has no function nobody")));
        assert_eq!(exists(&root, document, &Name::Link("../Cargo.toml".to_owned())), Ok(()));
        let missing = Name::Link("nothing.md".to_owned());
        assert_eq!(exists(&root, document, &missing), Err("xtask/nothing.md does not exist".to_owned()));
    }
}
