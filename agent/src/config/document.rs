//! YAML or JSON text as documents with the line of every field.
//!
//! Owns syntax, duplicate keys and typed decoding with an error that names file, line and field. Does not interpret
//! documents.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de;
use serde::de::DeserializeOwned;
use serde::de::MapAccess;
use serde::de::SeqAccess;
use serde::de::Visitor;
use serde_json::Map;
use serde_json::Value;
use serde_saphyr::Spanned;
use serde_saphyr::options::DuplicateKeyPolicy;

use super::schema;
use super::schema::Described;

/// A place in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub file: PathBuf,
    /// The line, counted from 1; 0 when it is not known.
    pub line: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 {
            write!(f, "{}", self.file.display())
        } else {
            write!(f, "{}:{}", self.file.display(), self.line)
        }
    }
}

/// Why a document is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// The text is not YAML (or JSON).
    #[error("{place}: {problem}")]
    Syntax {
        /// Where the parser failed.
        place: Place,
        /// What is wrong there.
        problem: String,
    },
    /// A field is unknown, repeated or of the wrong type.
    #[error("{place}: {field}: {problem}")]
    Field {
        /// Where the field is written.
        place: Place,
        /// Its path in the document.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// One document: its fields as JSON and the line each is written in.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// Where it begins.
    pub place: Place,
    /// Its fields.
    pub fields: Map<String, Value>,
    /// Line by dotted field path (`a.b[0].c`); fields that are `null` have none.
    pub lines: BTreeMap<String, u64>,
}

/// The documents of a file, in order; empty ones are left out.
///
/// # Errors
/// Text that is neither YAML nor JSON; a repeated field.
pub fn parse(file: &Path, text: &str) -> Result<Vec<Document>, DocumentError> {
    let options = serde_saphyr::options! {
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        with_snippet: false,
    };
    let nodes: Vec<Spanned<Node>> = serde_saphyr::from_multiple_with_options(text, options).map_err(|error| {
        let line = error.location().map_or(0, |location| location.line());
        DocumentError::Syntax { place: Place { file: file.to_owned(), line }, problem: error.to_string() }
    })?;
    nodes
        .into_iter()
        .filter(|node| !matches!(node.value, Node::Scalar(Value::Null)))
        .map(|node| Document::new(file, node))
        .collect()
}

impl Document {
    fn new(file: &Path, node: Spanned<Node>) -> Result<Self, DocumentError> {
        let place = Place { file: file.to_owned(), line: node.referenced.line() };
        let mut lines = BTreeMap::new();
        let value = flatten(file, "", node, &mut lines)?;
        let Value::Object(fields) = value else {
            let problem = "expected a mapping of field names to values".to_owned();
            return Err(DocumentError::Syntax { place, problem });
        };
        Ok(Self { place, fields, lines })
    }

    /// A top-level string field, such as `kind`.
    pub fn text(&self, field: &str) -> Option<&str> {
        self.fields.get(field).and_then(Value::as_str)
    }

    /// Where a field is written; the nearest section or list around it if it is not written itself.
    pub fn place_of(&self, field: &str) -> Place {
        let mut path = field;
        loop {
            if let Some(&line) = self.lines.get(path) {
                return Place { file: self.place.file.clone(), line };
            }
            match path.rfind(['.', '[']) {
                Some(end) => path = &path[..end],
                None => return self.place.clone(),
            }
        }
    }

    /// The document as a typed value; unknown and mistyped fields are errors that say where.
    ///
    /// # Errors
    /// An unknown or mistyped field, with its path.
    pub fn decode<T: DeserializeOwned + Described>(&self) -> Result<T, DocumentError> {
        decode(Value::Object(self.fields.clone())).map_err(|problem| DocumentError::Field {
            place: self.place_of(&problem.field),
            field: problem.field,
            problem: problem.message,
        })
    }
}

/// A field and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Dotted path of the field.
    pub field: String,
    /// What is wrong with it.
    pub message: String,
}

/// Decodes strictly.
///
/// # Errors
/// An unknown or mistyped field, with its path.
pub fn decode<T: DeserializeOwned + Described>(value: Value) -> Result<T, Problem> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let field = error.path().to_string();
        let message = error.inner().to_string();
        let message = if message.starts_with("unknown field") { unknown_field(T::FIELDS, &field) } else { message };
        Problem { field, message }
    })
}

fn unknown_field(fields: &'static [schema::Field], path: &str) -> String {
    let (section, name) = path.rsplit_once('.').unwrap_or(("", path));
    let siblings =
        if section.is_empty() { fields } else { schema::find(fields, section).map_or(&[][..], |f| f.nested) };
    match closest(name, siblings.iter().map(|field| field.name)) {
        Some(near) => format!("unknown field; did you mean {near}?"),
        None => "unknown field".to_owned(),
    }
}

/// The candidate that is at most a third of its letters away.
pub fn closest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .map(|candidate| (edit_distance(&word.to_lowercase(), &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= candidate.len() / 3)
        .min()
        .map(|(_, candidate)| candidate)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// Untyped YAML; mappings keep repeated keys.
enum Node {
    Scalar(Value),
    Seq(Vec<Spanned<Node>>),
    Map(Vec<(Spanned<String>, Spanned<Node>)>),
}

fn flatten(
    file: &Path,
    path: &str,
    node: Spanned<Node>,
    lines: &mut BTreeMap<String, u64>,
) -> Result<Value, DocumentError> {
    match node.value {
        Node::Scalar(value) => Ok(value),
        Node::Seq(items) => {
            let mut list = Vec::with_capacity(items.len());
            for (index, item) in items.into_iter().enumerate() {
                let path = format!("{path}[{index}]");
                lines.insert(path.clone(), item.referenced.line());
                list.push(flatten(file, &path, item, lines)?);
            }
            Ok(Value::Array(list))
        }
        Node::Map(entries) => {
            let mut map = Map::new();
            let mut written = BTreeMap::new();
            for (key, value) in entries {
                let path = if path.is_empty() { key.value.clone() } else { format!("{path}.{}", key.value) };
                let line = key.referenced.line();
                // `null` is equivalent to an absent field, so that its line is not recorded.
                if !matches!(value.value, Node::Scalar(Value::Null)) {
                    lines.insert(path.clone(), line);
                }
                if let Some(first) = written.insert(key.value.clone(), line) {
                    let problem = format!("written twice; the first time in line {first}");
                    let place = Place { file: file.to_owned(), line };
                    return Err(DocumentError::Field { place, field: path, problem });
                }
                let value = flatten(file, &path, value, lines)?;
                map.insert(key.value, value);
            }
            Ok(Value::Object(map))
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Node, E> {
        serde_json::Number::from_f64(value)
            .map(|number| Node::Scalar(Value::Number(number)))
            .ok_or_else(|| E::custom("numbers must be finite"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Scalar(Value::Null))
    }

    fn visit_none<E: de::Error>(self) -> Result<Node, E> {
        self.visit_unit()
    }

    fn visit_some<D: de::Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        Node::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Node::Seq(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Node::Map(entries))
    }
}
