//! The text of a manifest to an untyped document, and back from a field's path to its line.
//!
//! YAML is read as the API tooling does: untyped, with the spellings of YAML 1.1 (`yes`, `0644`), merge keys, `\'` in
//! double quotes, and the last of duplicate keys winning. Of several documents, separated by `---`, a kubelet reads the
//! first; whatever follows it need not even be YAML. A text that starts with `{` is JSON, and nothing may follow it.
//! Depth, node count and alias expansion are bounded.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::MapAccess;
use serde::de::SeqAccess;
use serde::de::Visitor;
use serde_json::Value;
use serde_saphyr::ExternalMessageSource;
use serde_saphyr::Spanned;
use serde_saphyr::granit_parser::ErrorKind;

/// Scalars with `\'` that are rewritten at most: after each the text is parsed again.
const MAX_REWRITTEN: usize = 100;

/// The text is neither YAML nor JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SyntaxProblem {
    /// Line, from 1, if the parser knows it.
    pub line: Option<u64>,
    /// The parser's message.
    pub message: String,
}

/// The document that a text holds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Document {
    /// Its content; `None` if it is empty.
    pub value: Option<Value>,
    /// The text holds further ones.
    pub is_followed: bool,
}

/// The first document of the text.
///
/// # Errors
/// It is neither YAML nor JSON.
pub(super) fn parse(text: &str) -> Result<Document, SyntaxProblem> {
    let text = without_byte_order_mark(text);
    if text.trim_start().starts_with('{') {
        return Ok(Document { value: Some(parse_json(text)?), is_followed: false });
    }
    let (first, rest) = split_after_first(text);
    Ok(Document { value: parse_yaml(first)?, is_followed: lines(rest).any(|line| is_content(without_marker(line))) })
}

fn without_byte_order_mark(text: &str) -> &str {
    text.strip_prefix('\u{feff}').unwrap_or(text)
}

/// The first YAML document with all that precedes it, and the rest from the marker that ends it. No scalar can contain
/// a marker: at the start of a line it always is one.
fn split_after_first(text: &str) -> (&str, &str) {
    let mut end = 0;
    let mut is_begun = false;
    for line in lines(text) {
        if is_marker(line, "...") || (is_begun && is_marker(line, "---")) {
            break;
        }
        // Comments and directives before the first `---` belong to the document that it begins.
        is_begun |= is_content(line) && !line.starts_with('%');
        end += line.len();
    }
    text.split_at(end)
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive(['\n', '\r'])
}

fn is_marker(line: &str, marker: &str) -> bool {
    line.strip_prefix(marker).is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\n', '\r']))
}

fn without_marker(line: &str) -> &str {
    if is_marker(line, "---") || is_marker(line, "...") { &line[3..] } else { line }
}

fn is_content(line: &str) -> bool {
    let line = line.trim();
    !line.is_empty() && !line.starts_with('#')
}

fn parse_yaml<T: for<'de> Deserialize<'de>>(document: &str) -> Result<Option<T>, SyntaxProblem> {
    let mut text = Cow::Borrowed(document);
    let mut left = MAX_REWRITTEN;
    loop {
        let error = match parse_documents::<T>(&text) {
            Ok(documents) => return Ok(documents.into_iter().next()),
            Err(error) => error,
        };
        let Some(rewritten) = with_plain_apostrophes(&text, &error).filter(|_| left > 0) else {
            return Err(SyntaxProblem {
                line: error.location().map(|at| at.line()).filter(|&line| line > 0),
                message: error.without_snippet().to_string(),
            });
        };
        text = Cow::Owned(rewritten);
        left -= 1;
    }
}

fn parse_documents<T: for<'de> Deserialize<'de>>(text: &str) -> Result<Vec<T>, serde_saphyr::Error> {
    let options = serde_saphyr::options! {
        duplicate_keys: serde_saphyr::DuplicateKeyPolicy::LastWins,
        legacy_octal_numbers: true,
        with_snippet: false,
    };
    // Unlike its counterpart for one document, this call accepts an empty one.
    serde_saphyr::from_multiple_with_options(text, options)
}

/// The text with `'` for each `\'` of the double-quoted scalar that the parser rejects; `None` if it rejects the text
/// for another reason. YAML has no such escape sequence, but a kubelet's parser accepts it.
fn with_plain_apostrophes(text: &str, error: &serde_saphyr::Error) -> Option<String> {
    let serde_saphyr::Error::ExternalMessage { source, location, .. } = error.without_snippet() else { return None };
    let ExternalMessageSource::Parser(problem) = source.as_ref() else { return None };
    if *problem.kind() != ErrorKind::UnknownQuotedScalarEscape {
        return None;
    }
    // The parser names the character at which the scalar begins.
    let (start, _) = text.char_indices().nth(usize::try_from(location.span().offset()).ok()?)?;
    let mut rest = text[start..].strip_prefix('"')?;
    let mut rewritten = text[..=start].to_owned();
    while let Some(at) = rest.find(['\\', '"']).filter(|&at| rest[at..].starts_with('\\')) {
        let escaped = rest[at + 1..].chars().next();
        let end = at + 1 + escaped.map_or(0, char::len_utf8);
        rewritten.push_str(if escaped == Some('\'') { &rest[..at] } else { &rest[..=at] });
        rewritten.push_str(&rest[at + 1..end]);
        rest = &rest[end..];
    }
    rewritten.push_str(rest);
    (rewritten.len() < text.len()).then_some(rewritten)
}

fn parse_json(text: &str) -> Result<Value, SyntaxProblem> {
    serde_json::from_str(text)
        .map_err(|error| SyntaxProblem { line: Some(error.line() as u64), message: error.to_string() })
}

/// The line of the field at `path` in the first document, or of its nearest ancestor that exists. Reads the text again:
/// meant for errors only.
pub(super) fn line_of(text: &str, path: &str) -> Option<u64> {
    let (first, _) = split_after_first(without_byte_order_mark(text));
    let document: Spanned<Node> = parse_yaml(first).ok()??;
    let mut at = &document;
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
        assert_eq!(parse(text), Ok(only(expected)));
    }

    fn only(value: Value) -> Document {
        Document { value: Some(value), is_followed: false }
    }

    #[test]
    fn the_first_document_is_read_and_others_are_noticed() {
        for (text, first, is_followed) in [
            ("", None, false),
            ("a: 1\n", Some(1), false),
            ("a: 1\n---\nb: 2\n", Some(1), true),
            ("a: 1\r\n---\r\nb: 2\r\n", Some(1), true),
            ("---\na: 1\n---\n# nothing\n---\nb: 2\n---\n", Some(1), true),
            ("# nothing\n\n--- # begins\na: 1\n", Some(1), false),
            ("%YAML 1.2\n---\na: 1\n...\nb: 2\n", Some(1), true),
            ("--- {a: 1}\n--- {b: 2}\n", Some(1), true),
            ("a: 1\n---\n", Some(1), false),
            ("a: 1\n---\n # nothing\n...\n\n---", Some(1), false),
            ("a: 1\n---\nb: [", Some(1), true),
            ("a: 1\n---\n\t\0", Some(1), true),
            ("a: 1\n--- x", Some(1), true),
            // A first document that is empty is one, as for a kubelet, which then finds no pod.
            ("---\n---\na: 1\n", None, true),
            ("---\n# nothing\n---\na: 1\n", None, true),
            ("...\na: 1\n", None, true),
            ("# KYAML\n---\n{\n  # comment\n  a: 1, # comment\n}\n", Some(1), false),
            ("null\n", None, false),
        ] {
            let expected = Document { value: first.map(|number| json!({ "a": number })), is_followed };
            assert_eq!(parse(text), Ok(expected), "{text:?}");
        }
        assert_eq!(parse("a: |\n  ---\n  ...\nb: ----\n"), Ok(only(json!({"a": "---\n...\n", "b": "----"}))));
        assert!(parse("a: [1\n---\nb: 2\n").is_err(), "the first one is incomplete");
    }

    #[test]
    fn escaped_apostrophes_are_read_as_the_api_tooling_does() {
        let text = r#"
a: "it\'s \"x\" \\'" # é
b: 'c\'
d: |
  "\'
e: ["\'", "\'\'"]
f: "echo \"A=\'b\'\nC\" > /x"
"#;
        let expected = json!({"a": r#"it's "x" \'"#, "b": r"c\", "d": "\"\\'\n", "e": ["'", "''"],
            "f": "echo \"A='b'\nC\" > /x"});
        assert_eq!(parse(text), Ok(only(expected)));
        assert_eq!(line_of(text, "f"), Some(7));

        for (text, line) in [(r#"a: "\q""#, 1), (r#"a: "\'\q""#, 1), ("a: \"\\'\"\nb:\n\t- x\n", 3)] {
            assert_eq!(parse(text).map_err(|e| e.line), Err(Some(line)), "{text}");
        }
        let item = "- \"\\'\"\n";
        assert!(parse(&item.repeat(MAX_REWRITTEN)).is_ok());
        assert!(parse(&item.repeat(MAX_REWRITTEN + 1)).is_err(), "each takes one more attempt");
    }

    #[test]
    fn json_may_use_tabs_and_surrogates_and_ends_the_text() {
        assert_eq!(parse("\u{feff} {\n\t\"a\": \"\\ud83d\\ude00\"}"), Ok(only(json!({"a": "\u{1f600}"}))));
        for rest in ["{\"b\": 2}", "---\n{\"b\": 2}\n", "x"] {
            assert_eq!(parse(&format!("{{\"a\": 1}}\n{rest}")).map_err(|e| e.line), Err(Some(2)), "{rest}");
        }
    }

    #[test]
    fn syntax_errors_name_the_line() {
        assert_eq!(parse("a: 1\nb: [1\n").map_err(|e| e.line.is_some()), Err(true));
        assert_eq!(parse("a: 1\nb:\n\t- x\n").map_err(|e| e.line), Err(Some(3)));
        assert_eq!(parse("{\"a\":\n oops}").map_err(|e| e.line), Err(Some(2)));
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
        let text =
            "# a\n---\nspec:\n  containers:\n  - name: x\n    image: y\n  - name: z\n    env:\n    - name: A\n---\n- [";
        for (path, line) in [
            ("spec.containers[0].image", 6),
            ("spec.containers[1].name", 7),
            ("spec.containers[1].env[0].name", 9),
            ("spec.containers[1].image", 7),
            ("spec.containers[7]", 5),
            ("metadata.name", 3),
        ] {
            assert_eq!(line_of(text, path), Some(line), "{path}");
        }
        let labels = "metadata:\n  labels:\n    app: x\n    example.com/y: z\n";
        assert_eq!(line_of(labels, "metadata.labels[example.com/y]"), Some(4));
        assert_eq!(line_of("# nothing\n", "metadata"), None);
    }
}
