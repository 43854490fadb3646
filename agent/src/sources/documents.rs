//! The text of a manifest to untyped documents, and back from a field's path to its line.
//!
//! YAML is read as the API tooling does: untyped, with the spellings of YAML 1.1 (`yes`, `0644`), merge keys, and
//! the last of duplicate keys winning. A text that starts with `{` is JSON. Both may hold several documents,
//! separated by `---`; empty ones are skipped. Depth, node count and alias expansion are bounded.

use std::fmt;

use serde::Deserialize;
use serde::de::MapAccess;
use serde::de::SeqAccess;
use serde::de::Visitor;
use serde_json::Value;
use serde_saphyr::Spanned;

/// The text is neither YAML nor JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SyntaxProblem {
    /// Line, from 1, if the parser knows it.
    pub line: Option<u64>,
    /// What the parser says.
    pub message: String,
}

/// All documents of the text that are not empty.
///
/// # Errors
/// The text is neither YAML nor JSON.
pub(super) fn parse(text: &str) -> Result<Vec<Value>, SyntaxProblem> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if is_json(text) { parse_json(text) } else { parse_yaml(text) }
}

fn is_json(text: &str) -> bool {
    text.trim_start().starts_with('{')
}

fn parse_yaml<T: for<'de> Deserialize<'de>>(text: &str) -> Result<Vec<T>, SyntaxProblem> {
    let options = serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins,
        legacy_octal_numbers: true,
        with_snippet: false,
    };
    serde_saphyr::from_multiple_with_options(text, options).map_err(|error| SyntaxProblem {
        line: error.location().map(|at| at.line()).filter(|&line| line > 0),
        message: error.without_snippet().to_string(),
    })
}

/// A JSON string cannot hold a raw line break, so a line `---` is always a separator.
fn parse_json(text: &str) -> Result<Vec<Value>, SyntaxProblem> {
    let mut documents = Vec::new();
    let mut first_line = 0;
    for part in text.split_inclusive('\n').collect::<Vec<_>>().split(|line| line.trim_end() == "---") {
        let part_text = part.concat();
        for document in serde_json::Deserializer::from_str(&part_text).into_iter::<Value>() {
            let document = document.map_err(|error| SyntaxProblem {
                line: Some(first_line + error.line() as u64),
                message: error.to_string(),
            })?;
            documents.push(document);
        }
        first_line += part.len() as u64 + 1;
    }
    Ok(documents)
}

/// The line of the field at `path` in the `document`th (from 0) document, or of its nearest ancestor that exists.
/// Reads the text again: meant for errors only.
pub(super) fn line_of(text: &str, document: usize, path: &str) -> Option<u64> {
    let documents: Vec<Spanned<Node>> = parse_yaml(text).ok()?;
    let mut at = documents.get(document)?;
    let mut line = at.referenced.line();
    for step in segments(path) {
        let next = match (&at.value, step) {
            (Node::Map(entries), PathSegment::Key(key)) => entries.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v),
            (Node::Seq(items), PathSegment::Index(index)) => items.get(index),
            _ => None,
        };
        let Some(next) = next else { break };
        at = next;
        line = at.referenced.line();
    }
    (line > 0).then_some(line)
}

enum PathSegment<'a> {
    Key(&'a str),
    Index(usize),
}

/// `spec.containers[0].env[1].name`, and map keys in brackets: `metadata.labels[app/x]`.
fn segments(path: &str) -> impl Iterator<Item = PathSegment<'_>> {
    let mut rest = path;
    std::iter::from_fn(move || {
        rest = rest.strip_prefix('.').unwrap_or(rest);
        if rest.is_empty() {
            return None;
        }
        if let Some((inside, after)) = rest.strip_prefix('[').and_then(|r| r.split_once(']')) {
            rest = after;
            return Some(inside.parse().map_or(PathSegment::Key(inside), PathSegment::Index));
        }
        let end = rest.char_indices().skip(1).find(|(_, c)| matches!(c, '.' | '[')).map_or(rest.len(), |(i, _)| i);
        let (key, after) = rest.split_at(end);
        rest = after;
        Some(PathSegment::Key(key))
    })
}

/// The shape of a document with the place of every node.
enum Node {
    Scalar,
    Seq(Vec<Spanned<Node>>),
    Map(Vec<(String, Spanned<Node>)>),
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any YAML value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_str<E>(self, _: &str) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Scalar)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut seq = Vec::new();
        while let Some(item) = items.next_element()? {
            seq.push(item);
        }
        Ok(Node::Seq(seq))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Node, A::Error> {
        let mut map = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            map.push(entry);
        }
        Ok(Node::Map(map))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn yaml_is_read_as_the_api_tooling_does() {
        let text =
            "a: yes\nb: 0644\nc: 1.5\nd: ~\ne: '1'\nf: 2001-01-01\n1: x\na: no\ng: &g {h: 1}\ni: {<<: *g, j: 2}\n";
        let expected = json!({"a": false, "b": 420, "c": 1.5, "d": null, "e": "1", "f": "2001-01-01", "1": "x",
            "g": {"h": 1}, "i": {"h": 1, "j": 2}});
        assert_eq!(parse(text), Ok(vec![expected]));
    }

    #[test]
    fn several_documents_empty_ones_skipped() {
        assert_eq!(parse("---\na: 1\n---\n# nothing\n---\nb: 2\n---\n"), Ok(vec![json!({"a": 1}), json!({"b": 2})]));
        assert_eq!(parse("{\"a\": 1}\n---\n{\"b\": 2}\n"), Ok(vec![json!({"a": 1}), json!({"b": 2})]));
        assert_eq!(parse(""), Ok(vec![]));
    }

    #[test]
    fn json_may_use_tabs_and_surrogates() {
        assert_eq!(parse("\u{feff} {\n\t\"a\": \"\\ud83d\\ude00\"}"), Ok(vec![json!({"a": "\u{1f600}"})]));
    }

    #[test]
    fn syntax_errors_name_the_line() {
        assert_eq!(parse("a: 1\nb: [1\n").map_err(|e| e.line.is_some()), Err(true));
        assert_eq!(parse("a: 1\nb:\n\t- x\n").map_err(|e| e.line), Err(Some(3)));
        assert_eq!(parse("{\"a\": 1}\n---\n{\"b\":\n oops}").map_err(|e| e.line), Err(Some(4)));
    }

    #[test]
    fn excessive_structure_is_rejected() {
        assert!(parse(&"[".repeat(100_000)).is_err(), "deep flow");
        assert!(parse(&format!("{{\"a\":{}", "[".repeat(100_000))).is_err(), "deep json");
        assert!(parse(&"- ".repeat(100_000)).is_err(), "deep block");
        let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for i in 1..12 {
            let item = format!("*a{}", i - 1);
            bomb.push_str(&format!("a{i}: &a{i} [{}]\n", [item.as_str(); 10].join(", ")));
        }
        assert!(parse(&bomb).is_err(), "alias bomb");
    }

    #[test]
    fn paths_lead_to_lines() {
        let text = "a: 1\n---\nspec:\n  containers:\n  - name: x\n    image: y\n  - name: z\n    env:\n    - name: A\n";
        for (path, line) in [
            ("spec.containers[0].image", 6),
            ("spec.containers[1].name", 7),
            ("spec.containers[1].env[0].name", 9),
            ("spec.containers[1].image", 7),
            ("spec.containers[7]", 5),
            ("metadata.name", 3),
        ] {
            assert_eq!(line_of(text, 1, path), Some(line), "{path}");
        }
        let labels = "metadata:\n  labels:\n    app: x\n    example.com/y: z\n";
        assert_eq!(line_of(labels, 0, "metadata.labels[example.com/y]"), Some(4));
        assert_eq!(line_of(labels, 3, "metadata"), None);
    }
}
