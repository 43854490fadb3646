//! The series that queries use, and those that exist.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use keblet::metrics::encode_text;
use keblet::observe::metrics::families;
use keblet::observe::replay;
use keblet::observe::state::ObservedNode;

/// Labels by series.
pub(super) type Series = BTreeMap<String, BTreeSet<String>>;

/// Labels that Prometheus adds, `node` by the chart's PodMonitor.
const ADDED: [&str; 3] = ["instance", "job", "node"];
const PREFIXES: [&str; 4] = ["keblet_", "process_", "kubelet_", "container_"];

/// The series of `keblet observe`, from a recorded node on which everything happens.
pub(super) fn of_observe() -> Series {
    let recording = super::read("agent/src/observe/testdata/recording.jsonl");
    of(&replay::read(recording.as_bytes()).unwrap())
}

/// Those of a node on which nothing has happened yet.
pub(super) fn of_beginning() -> Series {
    of(&ObservedNode::default())
}

fn of(node: &ObservedNode) -> Series {
    let text = String::from_utf8(encode_text(&families(node)).unwrap()).unwrap();
    let mut series = Series::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, labels) = line.split_once('{').unwrap_or((line.split(' ').next().unwrap(), ""));
        let labels = labels.split('"').step_by(2).filter_map(|part| part.trim_start_matches(',').strip_suffix('='));
        series.entry(name.to_owned()).or_default().extend(labels.map(str::to_owned));
    }
    series
}

/// The series in a query, each with the labels that its selector names.
pub(super) fn queried(query: &str) -> Series {
    let mut series = Series::new();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut rest = query;
    while let Some(start) = rest.find(is_word) {
        let word: String = rest[start..].chars().take_while(|c| is_word(*c)).collect();
        rest = &rest[start + word.len()..];
        if !PREFIXES.iter().any(|prefix| word.starts_with(prefix)) {
            continue;
        }
        let labels = series.entry(word).or_default();
        if let Some(selector) = rest.strip_prefix('{') {
            let end = selector.find('}').expect("a selector ends");
            let names = selector[..end].split(',').filter_map(|matcher| matcher.split(['=', '!']).next());
            labels.extend(names.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()));
            rest = &selector[end..];
        }
    }
    series
}

/// The series whose increase a query asks for.
pub(super) fn increased(query: &str) -> Vec<&str> {
    let arguments = query.match_indices("increase(").map(|(start, found)| &query[start + found.len()..]);
    arguments.map(|rest| &rest[..rest.find(['{', '[']).expect("a selector or a range")]).collect()
}

/// The labels by which a query groups.
fn grouped(query: &str) -> BTreeSet<String> {
    let groups = query.match_indices("by (").map(|(start, found)| &query[start + found.len()..]);
    let names = groups.flat_map(|rest| rest[..rest.find(')').expect("a group ends")].split(','));
    names.map(|name| name.trim().to_owned()).collect()
}

/// Checks that a query uses at least one series, and only such series and labels as exist.
pub(super) fn check(query: &str, existing: &Series) {
    let queried = queried(query);
    assert!(!queried.is_empty(), "no series in {query}");
    let mut known: BTreeSet<String> = ADDED.map(str::to_owned).into();
    for (name, labels) in &queried {
        let labels_of = existing.get(name).unwrap_or_else(|| panic!("{name} does not exist: {query}"));
        known.extend(labels_of.iter().cloned());
        let unknown = labels.iter().find(|label| !labels_of.contains(*label) && !ADDED.contains(&label.as_str()));
        assert_eq!(unknown, None, "{name} has no such label: {query}");
    }
    let unknown: Vec<String> = grouped(query).difference(&known).cloned().collect();
    assert_eq!(unknown, Vec::<String>::new(), "labels of no series: {query}");
}

#[test]
fn series_and_labels_are_found_in_queries() {
    let query = "sum by (pod, le) (rate(keblet_a_total{pod=~\"x,y\",scope!=\"z\"}[5m])) / keblet_b > 0";
    let found = queried(query);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["keblet_a_total", "keblet_b"]);
    assert!(found["keblet_a_total"].contains("scope") && found["keblet_b"].is_empty());
    assert_eq!(grouped(query).into_iter().collect::<Vec<_>>(), ["le", "pod"]);
    assert_eq!(increased("sum(increase(a{b=\"c\"}[5m])) > 0 or increase(d[1m])"), ["a", "d"]);
    assert!(of_observe()["keblet_oom_kills_total"].contains("victim"));
}
