//! `docs/pod-spec.md` has a row for every field of the API types of a pod's spec and none for another, and names an existing
//! test for what it calls honoured. It names the types that have no table.
//!
//! The types and fields are those that a pod's spec asks a deserializer for.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::Path;
use std::slice::Iter;

use k8s_openapi::api::core::v1::PodSpec;
use serde::Deserialize as _;
use serde::Deserializer;
use serde::de::DeserializeSeed;
use serde::de::MapAccess;
use serde::de::SeqAccess;
use serde::de::Visitor;
use serde::de::value::Error;
use serde::de::value::StrDeserializer;

/// A verdict of each kind.
const VERDICTS: [&str; 5] = ["honoured", "rejected", "control plane", "no effect", "Windows"];

/// Verdicts on types none of whose fields the node acts on.
const UNTABLED: [&str; 3] = ["rejected", "control plane", "Windows"];

/// Folders of tests on a real runtime, and a program of them.
const REAL: [&str; 3] = ["tests/tests/scenarios/", "tests/tests/cluster/", "tests/tests/cluster_kubeadm.rs"];

/// API types with their fields.
type Types = BTreeMap<&'static str, BTreeSet<&'static str>>;

/// Has a value for whatever an API type asks for, and records the fields of each struct. Structs without a table get no
/// fields, so that the types below them are not walked.
struct Walk<'a> {
    types: &'a mut Types,
    untabled: &'a BTreeMap<&'a str, &'a str>,
}

impl Walk<'_> {
    fn reborrow(&mut self) -> Walk<'_> {
        Walk { types: self.types, untabled: self.untabled }
    }
}

/// Key of the only entry of a map; lists have one entry too.
static ENTRY: [&str; 1] = ["key"];

impl<'de> Deserializer<'de> for Walk<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_str("")
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_bool(false)
    }

    fn deserialize_i32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_i32(0)
    }

    fn deserialize_i64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_i64(0)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_seq(Entries { keys: ENTRY.iter(), walk: self })
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(Entries { keys: ENTRY.iter(), walk: self })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.types.entry(name).or_default().extend(fields);
        let walked: &'static [&'static str] = if self.untabled.contains_key(name) { &[] } else { fields };
        visitor.visit_map(Entries { keys: walked.iter(), walk: self })
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct tuple tuple_struct enum
        identifier ignored_any
    }
}

/// Fields of a struct, or the entry of a map or list.
struct Entries<'a> {
    keys: Iter<'static, &'static str>,
    walk: Walk<'a>,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Error> {
        self.keys.next().map(|key| seed.deserialize(StrDeserializer::<Error>::new(key))).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        seed.deserialize(self.walk.reborrow())
    }
}

impl<'de> SeqAccess<'de> for Entries<'_> {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Error> {
        self.keys.next().map(|_| seed.deserialize(self.walk.reborrow())).transpose()
    }
}

/// The type of a pod's spec and all types below it, but none below those without a table.
fn api_types(untabled: &BTreeMap<&str, &str>) -> Types {
    let mut types = Types::new();
    PodSpec::deserialize(Walk { types: &mut types, untabled }).expect("a spec with every field");
    types
}

/// Types that the document has no table for, with the verdict on all of their fields.
fn untabled(text: &str) -> BTreeMap<&str, &str> {
    let (_, section) = text.split_once("\n## Types without a table\n").expect("the section");
    let mut types = BTreeMap::new();
    for line in section.lines().take_while(|line| !line.starts_with("## ")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if let [_, names, verdict, _, _] = cells.as_slice() {
            types.extend(names.split('`').skip(1).step_by(2).map(|name| (name, *verdict)));
        }
    }
    types
}

/// A row of the document.
struct Row<'a> {
    table: &'a str,
    field: &'a str,
    verdict: &'a str,
    /// Tests, each as `PATH::NAME`.
    shown_by: Vec<&'a str>,
}

fn rows(text: &str) -> Vec<Row<'_>> {
    let mut table = "";
    let mut rows = Vec::new();
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            table = heading;
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let field = cells.get(1).and_then(|cell| cell.strip_prefix('`')?.strip_suffix('`'));
        if let (Some(field), [_, _, verdict, _, shown_by, _]) = (field, cells.as_slice()) {
            let shown_by = shown_by.split(", ").map(|test| test.trim_matches('`')).collect();
            rows.push(Row { table, field, verdict, shown_by });
        }
    }
    rows
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository")
}

fn document() -> String {
    std::fs::read_to_string(root().join("docs/pod-spec.md")).expect("docs/pod-spec.md")
}

#[test]
fn every_field_has_one_row_and_every_row_a_field() {
    let text = document();
    let untabled = untabled(&text);
    let types = api_types(&untabled);
    let unknown: Vec<_> = untabled.keys().filter(|name| !types.contains_key(**name)).collect();
    assert!(unknown.is_empty(), "no types of a pod's spec: {unknown:?}");
    let mut documented: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for row in rows(&text) {
        let is_new = documented.entry(row.table).or_default().insert(row.field);
        assert!(is_new, "{}.{} has two rows", row.table, row.field);
    }
    for (name, fields) in types.into_iter().filter(|(name, _)| !untabled.contains_key(*name)) {
        let documented = documented.remove(name).unwrap_or_default();
        let missing: Vec<_> = fields.difference(&documented).collect();
        let unknown: Vec<_> = documented.difference(&fields).collect();
        assert!(missing.is_empty() && unknown.is_empty(), "{name}: without a row {missing:?}, no fields {unknown:?}");
    }
    assert!(documented.is_empty(), "tables of no type: {:?}", documented.keys());
}

#[test]
fn verdicts_are_known_and_what_is_honoured_or_rejected_names_a_test() {
    let text = document();
    for (name, verdict) in untabled(&text) {
        assert!(UNTABLED.contains(&verdict), "{name} needs a table: {verdict:?}");
    }
    for Row { table, field, verdict, shown_by } in rows(&text) {
        assert!(VERDICTS.contains(&verdict), "{table}.{field}: {verdict:?}");
        if !matches!(verdict, "honoured" | "rejected") {
            continue;
        }
        for name in shown_by {
            let (path, test) = name.split_once("::").unwrap_or_else(|| panic!("{table}.{field} names no test"));
            let source = std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(source.contains(&format!("fn {test}(")), "{table}.{field}: {path} has no {test}");
        }
    }
}

#[test]
fn honoured_fields_are_shown_on_a_real_runtime() {
    let text = document();
    let is_real = |test: &&str| REAL.iter().any(|folder| test.starts_with(folder));
    let honoured = rows(&text).into_iter().filter(|row| row.verdict == "honoured");
    let elsewhere: Vec<_> =
        honoured.filter(|row| !row.shown_by.iter().any(is_real)).map(|row| (row.table, row.field)).collect();
    assert!(elsewhere.is_empty(), "without a test on a real runtime: {elsewhere:?}");
}

#[test]
fn the_types_are_read_from_the_api() {
    let types = api_types(&untabled(&document()));
    assert!(types["Container"].contains("livenessProbe") && types["PodSpec"].contains("hostUsers"));
    assert_eq!(types["PodDNSConfig"], BTreeSet::from(["nameservers", "options", "searches"]));
    assert_eq!(types["HTTPHeader"], BTreeSet::from(["name", "value"]), "of a list in a probe of a container");
    assert!(types.contains_key("PodAffinity") && !types.contains_key("PodAffinityTerm"), "not below what has no table");
}
