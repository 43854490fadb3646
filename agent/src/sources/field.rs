//! Field errors of API objects: path and problem, worded like API validation errors.
//!
//! Values quoted in messages are escaped and cut, so that a malicious manifest cannot flood or forge log lines.

use std::fmt;

use crate::model::quote::Excerpt;

/// A path into an API object, such as `spec.containers[0].name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path(String);

impl Path {
    /// A top-level field.
    pub fn root(name: &str) -> Self {
        Self(name.to_owned())
    }

    /// A field of the object at this path.
    pub fn child(&self, name: &str) -> Self {
        Self(format!("{}.{name}", self.0))
    }

    /// An element of the list at this path.
    pub fn index(&self, index: usize) -> Self {
        Self(format!("{}[{index}]", self.0))
    }

    /// An entry of the map at this path.
    pub fn key(&self, key: &str) -> Self {
        Self(format!("{}[{}]", self.0, Excerpt(key)))
    }

    /// The path as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// One thing wrong with an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// Path of the field.
    pub path: Path,
    /// What, as the API server words it.
    pub problem: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.0, self.problem)
    }
}

/// How an error shows the offending value.
pub trait Value {
    /// The value as the API server would print it.
    fn show(&self) -> String;
}

impl Value for str {
    fn show(&self) -> String {
        format!("\"{}\"", Excerpt(self))
    }
}

impl Value for String {
    fn show(&self) -> String {
        self.as_str().show()
    }
}

macro_rules! plain_value {
    ($($number:ty),*) => { $(impl Value for $number {
        fn show(&self) -> String { self.to_string() }
    })* };
}
plain_value!(i32, i64, usize, bool);

/// Errors found so far; keeps a bounded number of them.
#[derive(Debug, Default)]
pub struct Findings(Vec<FieldError>);

/// Number of errors that are kept.
const MAX_FINDINGS: usize = 50;

impl Findings {
    /// The errors in the order found.
    pub fn into_vec(self) -> Vec<FieldError> {
        self.0
    }

    /// No errors.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn push(&mut self, path: &Path, problem: String) {
        if self.0.len() < MAX_FINDINGS {
            self.0.push(FieldError { path: path.clone(), problem });
        }
    }

    /// A field that must be set is not.
    pub fn required(&mut self, path: &Path, detail: &str) {
        self.push(path, if detail.is_empty() { "Required value".into() } else { format!("Required value: {detail}") });
    }

    /// A field has a value it must not have.
    pub fn invalid<V: Value + ?Sized>(&mut self, path: &Path, value: &V, detail: &str) {
        self.push(path, format!("Invalid value: {}: {detail}", value.show()));
    }

    /// A field has a value outside an enumeration.
    pub fn unsupported(&mut self, path: &Path, value: &str, supported: &[&str]) {
        let list: Vec<String> = supported.iter().map(|s| format!("\"{s}\"")).collect();
        self.push(path, format!("Unsupported value: {}: supported values: {}", value.show(), list.join(", ")));
    }

    /// A value that must be unique is not.
    pub fn duplicate<V: Value + ?Sized>(&mut self, path: &Path, value: &V) {
        self.push(path, format!("Duplicate value: {}", value.show()));
    }

    /// A field must not be set here.
    pub fn forbidden(&mut self, path: &Path, detail: &str) {
        self.push(path, format!("Forbidden: {detail}"));
    }

    /// A value is too long.
    pub fn too_long(&mut self, path: &Path, limit: usize) {
        self.push(path, format!("Too long: may not be more than {limit} bytes"));
    }

    /// A list has too many entries.
    pub fn too_many(&mut self, path: &Path, count: usize, limit: usize) {
        self.push(path, format!("Too many: {count}: must have at most {limit} items"));
    }

    /// A reference to something that is not there.
    pub fn not_found(&mut self, path: &Path, value: &str) {
        self.push(path, format!("Not found: {}", value.show()));
    }

    /// Each of the problems is an error about `value`.
    pub fn invalid_each(&mut self, path: &Path, value: &str, problems: Vec<String>) {
        for complaint in problems {
            self.invalid(path, value, &complaint);
        }
    }

    /// `value` must be one of `supported`.
    pub fn one_of(&mut self, path: &Path, value: &str, supported: &[&str]) {
        if !supported.contains(&value) {
            self.unsupported(path, value, supported);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_problems_read_like_the_api_servers() {
        let mut findings = Findings::default();
        let containers = Path::root("spec").child("containers");
        findings.required(&containers.index(0).child("name"), "");
        findings.invalid(&containers.index(1).child("ports"), &70_000, "must be between 1 and 65535, inclusive");
        findings.unsupported(&Path::root("spec").child("restartPolicy"), "No", &["Always", "Never"]);
        let shown: Vec<String> = findings.into_vec().iter().map(ToString::to_string).collect();
        assert_eq!(
            shown,
            [
                "spec.containers[0].name: Required value",
                "spec.containers[1].ports: Invalid value: 70000: must be between 1 and 65535, inclusive",
                "spec.restartPolicy: Unsupported value: \"No\": supported values: \"Always\", \"Never\"",
            ]
        );
    }

    #[test]
    fn control_characters_are_escaped_and_values_cut() {
        let shown = format!("a\n\u{1b}[31m{}", "x".repeat(1 << 20)).show();
        assert!(shown.len() < 200 && !shown.contains('\n') && !shown.contains('\u{1b}'), "{shown}");
    }

    #[test]
    fn the_number_of_findings_is_bounded() {
        let mut findings = Findings::default();
        (0..10_000).for_each(|i| findings.duplicate(&Path::root("spec").index(i), "x"));
        assert_eq!(findings.into_vec().len(), MAX_FINDINGS);
    }
}
