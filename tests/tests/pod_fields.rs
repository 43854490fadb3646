//! `docs/pod-spec.md` has a row for every field of the API types of a pod's spec and none for another, and names an existing
//! test for what it calls honoured.
//!
//! The fields are those that the API types ask a deserializer for.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::path::Path;

use k8s_openapi::api::core::v1;
use serde::Deserialize;
use serde::Deserializer;
use serde::de::Error as _;
use serde::de::Visitor;
use serde::de::value::Error;

/// A verdict of each kind.
const VERDICTS: [&str; 5] = ["honoured", "rejected", "control plane", "no effect", "Windows"];

/// Folders of tests on a real runtime.
const REAL: [&str; 2] = ["tests/tests/scenarios/", "tests/tests/cluster/"];

/// Honoured fields whose tests need no runtime: the machines of the tests have no SELinux, refuse negative
/// `oom_score_adj` outside of the virtual one, and their runtimes send SIGTERM whatever the signal; a taint that removes pods
/// would remove those of all tests; the iSCSI target has one portal without authenticated discovery.
const ELSEWHERE: [(&str, &str); 8] = [
    ("PodSpec", "priorityClassName"),
    ("PodSpec", "tolerations"),
    ("Lifecycle", "stopSignal"),
    ("PodSecurityContext", "seLinuxOptions"),
    ("SecurityContext", "seLinuxOptions"),
    ("ISCSIVolumeSource", "chapAuthDiscovery"),
    ("ISCSIVolumeSource", "iscsiInterface"),
    ("ISCSIVolumeSource", "portals"),
];

/// Records the fields of the struct that it is asked for, and has no value.
struct Fields<'a>(&'a mut Option<(&'static str, &'static [&'static str])>);

impl<'de> Deserializer<'de> for Fields<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Error> {
        Err(Error::custom("not a struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        _visitor: V,
    ) -> Result<V::Value, Error> {
        *self.0 = Some((name, fields));
        Err(Error::custom("only the names are wanted"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// Name and fields of an API type.
fn fields<'de, T: Deserialize<'de>>() -> (&'static str, BTreeSet<&'static str>) {
    let mut asked = None;
    assert!(T::deserialize(Fields(&mut asked)).is_err(), "nothing can be read");
    let (name, fields) = asked.expect("a struct");
    (name, fields.iter().copied().collect())
}

macro_rules! types {
    ($($name:ident)*) => { BTreeMap::from([$(fields::<v1::$name>()),*]) };
}

/// The types of a pod's spec that the document has tables for.
fn api_types() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    types! {
        PodSpec Container EphemeralContainer ContainerPort EnvVar EnvVarSource VolumeMount ResourceRequirements
        ContainerRestartRule Probe Lifecycle LifecycleHandler PodSecurityContext SecurityContext Volume EmptyDirVolumeSource
        HostPathVolumeSource ISCSIVolumeSource ConfigMapVolumeSource SecretVolumeSource DownwardAPIVolumeSource
        ProjectedVolumeSource VolumeProjection ImageVolumeSource PodDNSConfig HostAlias Affinity
    }
}

/// A row of the document.
struct Row<'a> {
    table: &'a str,
    field: &'a str,
    verdict: &'a str,
    shown_by: &'a str,
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
            rows.push(Row { table, field, verdict, shown_by: shown_by.trim_matches('`') });
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
    let mut documented: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for row in rows(&text) {
        let is_new = documented.entry(row.table).or_default().insert(row.field);
        assert!(is_new, "{}.{} has two rows", row.table, row.field);
    }
    for (name, fields) in api_types() {
        let documented = documented.remove(name).unwrap_or_default();
        let missing: Vec<_> = fields.difference(&documented).collect();
        let unknown: Vec<_> = documented.difference(&fields).collect();
        assert!(missing.is_empty() && unknown.is_empty(), "{name}: without a row {missing:?}, no fields {unknown:?}");
    }
    assert!(documented.is_empty(), "tables of no type: {:?}", documented.keys());
}

#[test]
fn verdicts_are_known_and_what_is_honoured_or_rejected_names_a_test() {
    for Row { table, field, verdict, shown_by } in rows(&document()) {
        assert!(VERDICTS.contains(&verdict), "{table}.{field}: {verdict:?}");
        if !matches!(verdict, "honoured" | "rejected") {
            continue;
        }
        let (path, test) = shown_by.split_once("::").unwrap_or_else(|| panic!("{table}.{field} names no test"));
        let source = std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(source.contains(&format!("fn {test}(")), "{table}.{field}: {path} has no {test}");
    }
}

#[test]
fn honoured_fields_are_shown_on_a_real_runtime() {
    let text = document();
    let honoured = rows(&text).into_iter().filter(|row| row.verdict == "honoured");
    let elsewhere: BTreeSet<_> = honoured
        .filter(|row| !REAL.iter().any(|folder| row.shown_by.starts_with(folder)))
        .map(|row| (row.table, row.field))
        .collect();
    assert_eq!(elsewhere, BTreeSet::from(ELSEWHERE));
}

#[test]
fn the_types_are_read_from_the_api() {
    let types = api_types();
    assert!(types["Container"].contains("livenessProbe") && types["PodSpec"].contains("hostUsers"));
    assert_eq!(types["PodDNSConfig"], BTreeSet::from(["nameservers", "options", "searches"]));
}
