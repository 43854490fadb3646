//! `cargo xtask docs-paths`: every path that the documents name exists, every `PATH::NAME` is a test, and every promise
//! names one.
//!
//! Finds such names in Markdown. A path is a link's target, or code that starts with one of the repository's top
//! folders or names a file of the root. Rows of a table with the column `Held by` are promises. Web addresses are not
//! checked.

use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;

use crate::paths;
use crate::report::Report;
use crate::system;

/// Code that begins with one of these is a path in the repository.
const TOP: [&str; 9] = [".ci", ".cargo", "agent", "deploy", "docs", "ebpf", "proto", "tests", "xtask"];
/// A word without a slash and with one of these suffixes is a file in the root.
const ROOT_FILES: [&str; 2] = [".md", ".toml"];

/// Heading of the column with the tests of a promise, and the text of a cell without tests.
const HELD_BY: &str = "Held by";
const PENDING: &str = "test pending";
/// Prefixes of a test's attribute.
const TEST_ATTRIBUTES: [&str; 3] = ["#[test]", "#[tokio::test]", "#[tokio::test("];

/// Checks all Markdown files that Git tracks or does not ignore.
///
/// # Errors
/// Git cannot list the files, or a file cannot be read.
pub(crate) fn check() -> Result<Report> {
    let root = paths::repository();
    let list = ["ls-files", "--cached", "--others", "--exclude-standard", "*.md"];
    let listed = system::output(&mut system::git(&root, &list))?;
    let mut report = Report::new(String::new());
    let mut count = 0;
    for document in listed.lines().map(Path::new) {
        let path = root.join(document);
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let has_tests =
            |path: &str| fs::read_to_string(root.join(path)).is_ok_and(|text| text.lines().any(is_attribute));
        for line in untested_promises(&text, has_tests) {
            report.problems.push(format!("{}:{line}: the promise names no test", document.display()));
        }
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

/// A name in a document.
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
    if is_test(&text, last) { Ok(()) } else { Err(format!("{} has no test {last}", path.display())) }
}

/// Whether a Rust file has a function with this name and a test attribute.
fn is_test(text: &str, name: &str) -> bool {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let declares = |line: &str| {
        let signature = line.strip_prefix("async ").unwrap_or(line);
        signature.strip_prefix("fn ").and_then(|rest| rest.strip_prefix(name)).is_some_and(|rest| rest.starts_with('('))
    };
    let marked = |index: usize| {
        let mut above = lines[..index].iter().rev().take_while(|line| !line.is_empty() && !line.ends_with('}'));
        above.any(|line| is_attribute(line))
    };
    lines.iter().enumerate().any(|(index, line)| declares(line) && marked(index))
}

/// Whether a line marks the function below as a test.
fn is_attribute(line: &str) -> bool {
    TEST_ATTRIBUTES.iter().any(|test| line.trim_start().starts_with(test))
}

/// Lines of promises that name no test, or a file without one, and are not marked as pending.
fn untested_promises(text: &str, has_tests: impl Fn(&str) -> bool) -> Vec<usize> {
    let mut promises = false;
    let mut untested = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if !line.starts_with('|') {
            promises = false;
            continue;
        }
        let last = line.trim_end_matches('|').rsplit('|').next().unwrap_or_default().trim();
        if last == HELD_BY {
            promises = true;
        } else if promises && !line.chars().all(|character| "|-: ".contains(character)) {
            let named: Vec<bool> = names(last)
                .iter()
                .filter_map(|(_, name)| match name {
                    Name::Path(path, function) if path.ends_with(".rs") => Some(function.is_some() || has_tests(path)),
                    Name::Path(..) | Name::Link(_) => None,
                })
                .collect();
            let is_held = !named.is_empty() && !named.contains(&false);
            if !is_held && last != PENDING {
                untested.push(index + 1);
            }
        }
    }
    untested
}

/// All names in a document, with their lines. Fenced blocks count as code.
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
    // Function names begin with a lower-case letter; `Cargo.toml::x` and Rust paths are not checked.
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
    fn paths_are_distinguished_from_other_code() {
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
    fn a_missing_file_or_test_is_a_problem() {
        let root = paths::repository();
        let document = Path::new("xtask/page.md");
        let own = "xtask/src/docs_paths.rs";
        let path = |function: &str| Name::Path(own.to_owned(), Some(function.to_owned()));
        assert_eq!(exists(&root, document, &path("tests::a_missing_file_or_test_is_a_problem")), Ok(()));
        assert_eq!(exists(&root, document, &path("no_such_test")), Err(format!("{own} has no test no_such_test")));
        assert_eq!(exists(&root, document, &Name::Link("../Cargo.toml".to_owned())), Ok(()));
        let missing = Name::Link("nothing.md".to_owned());
        assert_eq!(exists(&root, document, &missing), Err("xtask/nothing.md does not exist".to_owned()));
    }

    #[test]
    fn only_functions_with_the_attribute_are_tests() {
        let text = "\
#[test]
fn plain() {}

fn helper() {}

    #[tokio::test(start_paused = true)]
    #[ignore = \"needs a runtime\"]
    async fn waits() {}
}
fn after() {}
";
        for (name, expected) in
            [("plain", true), ("waits", true), ("helper", false), ("after", false), ("pla", false), ("none", false)]
        {
            assert_eq!(is_test(text, name), expected, "{name}");
        }
    }

    #[test]
    fn a_promise_names_a_test_or_says_that_it_is_pending() {
        let text = "\
| Promise | Held by |
|---|---|
| a | `tests/tests/a.rs::holds` |
| b | the reader |
| c | test pending |
| d | `SPECIFICATION.md` |
| e | `tests/tests/a.rs` |
| f | `tests/tests/a.rs::holds`, `tests/src/helpers.rs` |

| Other | Table |
|---|---|
| g | h |
";
        assert_eq!(untested_promises(text, |path| path == "tests/tests/a.rs"), [4, 6, 8]);
    }
}
