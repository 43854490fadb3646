use std::time::Duration;

use k8s_openapi::api::core::v1::Pod as ApiPod;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::sources::decode::Manifest;

fn pod(name: &str) -> Pod {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "d"}, "spec": {"containers": []}});
    Arc::new(serde_json::from_value::<ApiPod>(pod).expect("a pod"))
}

/// A pod that names its file and version.
fn from(name: &str, mark: &str) -> Pod {
    let mut pod = ApiPod::clone(&pod(name));
    pod.metadata.uid = Some(mark.to_owned());
    Arc::new(pod)
}

fn good(pods: Vec<Pod>) -> Reading {
    Reading::Good(None, Manifest { pods, ..Manifest::default() })
}

fn bad() -> Reading {
    Reading::Bad(None, "broken".to_owned())
}

fn folder<const N: usize>(files: [(&str, Reading); N]) -> Listing {
    Listing::Folder(files.into_iter().map(|(name, reading)| (OsString::from(name), reading)).collect())
}

fn marks(result: &ListingResult) -> Option<Vec<String>> {
    let mark = |pod: &Pod| pod.metadata.uid.clone().or(pod.metadata.name.clone()).unwrap_or_default();
    result.set.as_ref().map(|set| set.iter().map(mark).collect())
}

struct Folder {
    store: Store,
    now: Instant,
}

impl Folder {
    fn new() -> Self {
        Self { store: Store::default(), now: Instant::now() }
    }

    fn after(&mut self, pause: Duration) -> &mut Self {
        self.now += pause;
        self
    }

    fn event(&mut self, listing: Listing) -> ListingResult {
        self.store.apply(listing, false, self.now)
    }

    fn periodic(&mut self, listing: Listing) -> ListingResult {
        self.store.apply(listing, true, self.now)
    }
}

fn set<const N: usize>(marks: [&str; N]) -> Option<Vec<String>> {
    Some(marks.map(str::to_owned).to_vec())
}

#[test]
fn the_first_scan_gives_a_set_even_if_empty_and_equal_sets_are_not_repeated() {
    let mut files = Folder::new();
    assert_eq!(marks(&files.periodic(Listing::Missing)), set([]));
    assert_eq!(marks(&files.periodic(Listing::Missing)), None);
    assert_eq!(marks(&files.event(folder([("a", good(vec![pod("a")]))]))), set(["a"]));
    assert_eq!(marks(&files.periodic(folder([("a", good(vec![pod("a")]))]))), None, "read again, equal");
    assert_eq!(marks(&files.periodic(folder([("a", Reading::Unchanged)]))), None);
}

/// A manifest that is being written when the agent starts: its pod has run since before.
#[test]
fn a_file_that_is_bad_at_the_first_scan_may_be_that_of_a_running_pod() {
    let good = |name: &str| good(vec![pod(name)]);
    let started = |running: [&str; 2]| Folder {
        store: Store::new(running.map(|name| format!("d/{name}")).into()),
        now: Instant::now(),
    };
    let outcome = |result: &ListingResult| (marks(result), result.is_incomplete);
    let kinds: [fn() -> Reading; 2] = [bad, || Reading::Held];
    for unusable in kinds {
        let mut files = started(["a", "b"]);
        let first = files.periodic(folder([("a", unusable()), ("b", good("b"))]));
        assert_eq!(outcome(&first), (set(["b"]), true));
        assert_eq!(first.rescan_at, Some(files.now + INCOMPLETE_LIMIT));
        assert_eq!(outcome(&files.event(folder([("a", unusable()), ("b", Reading::Unchanged)]))), (None, true));
        assert_eq!(outcome(&files.event(Listing::Unusable("is unreadable".to_owned()))), (None, true));
        let written = files.event(folder([("a", good("a")), ("b", Reading::Unchanged)]));
        assert_eq!((outcome(&written), written.rescan_at), ((set(["a", "b"]), false), None));
        let later = files.event(folder([("a", bad()), ("b", Reading::Unchanged), ("c", bad())]));
        assert_eq!(outcome(&later), (None, false), "the first set only");
    }

    let mut files = started(["a", "b"]);
    let both = || folder([("a", Reading::Held), ("b", good("b"))]);
    files.periodic(both());
    assert_eq!(outcome(&files.after(INCOMPLETE_LIMIT).event(both())), (set(["b"]), false), "it stays bad");
    let mut files = started(["a", "b"]);
    files.periodic(both());
    assert_eq!(outcome(&files.event(folder([("b", Reading::Unchanged)]))), (set(["b"]), false), "it is deleted");
    let mut files = started(["b", "b"]);
    assert_eq!(outcome(&files.periodic(both())), (set(["b"]), false), "nothing runs that it could define");
}

/// A shortage of descriptors may last longer than a manifest takes to be written.
#[test]
fn a_file_that_cannot_be_read_from_the_start_ends_no_running_pod() {
    let unreadable = || Reading::Unreadable("input/output error".to_owned());
    let both = |a: Reading| folder([("a", a), ("b", good(vec![pod("b")]))]);
    let outcome = |result: &ListingResult| (marks(result), result.is_incomplete);
    let started = || {
        let running = ["d/a", "d/b"].map(str::to_owned).into();
        let mut files = Folder { store: Store::new(running), now: Instant::now() };
        assert_eq!(outcome(&files.periodic(both(unreadable()))), (set(["b"]), true));
        for _ in 0..5 {
            let result = files.after(INCOMPLETE_LIMIT).periodic(both(unreadable()));
            assert_eq!((outcome(&result), result.rescan_at), ((None, true), Some(files.now + INCOMPLETE_LIMIT)));
            assert_eq!(result.reports, [], "reported once");
        }
        files
    };
    assert_eq!(outcome(&started().periodic(both(good(vec![pod("a")])))), (set(["a", "b"]), false), "it is read");
    let gone = folder([("b", Reading::Unchanged)]);
    assert_eq!(outcome(&started().periodic(gone)), (set(["b"]), false), "it is gone");
    let mut files = started();
    assert_eq!(outcome(&files.event(both(bad()))), (None, true), "it is being written");
    assert_eq!(outcome(&files.after(INCOMPLETE_LIMIT).event(both(bad()))), (set(["b"]), false), "it is invalid");
}

#[test]
fn a_vanished_file_keeps_its_pods_for_a_moment() {
    let mut files = Folder::new();
    files.periodic(folder([("a", good(vec![pod("a")]))]));
    let result = files.event(folder([]));
    assert_eq!((marks(&result), result.rescan_at), (None, Some(files.now + REMOVAL_DELAY)));
    let again = files.after(REMOVAL_DELAY).event(folder([]));
    assert_eq!((marks(&again), again.rescan_at), (set([]), None));
}

#[test]
fn a_file_that_comes_back_in_time_was_never_gone() {
    let mut files = Folder::new();
    files.periodic(folder([("a", good(vec![pod("a")]))]));
    files.event(Listing::Missing);
    assert_eq!(marks(&files.after(REMOVAL_DELAY / 2).event(folder([("a", good(vec![pod("a")]))]))), None);
    assert_eq!(marks(&files.after(REMOVAL_DELAY).event(folder([("a", Reading::Unchanged)]))), None);
}

#[test]
fn a_file_gone_bad_keeps_its_pods_until_a_second_scan_that_is_periodic() {
    let mut files = Folder::new();
    files.periodic(folder([("a", good(vec![pod("a")]))]));
    let result = files.event(folder([("a", bad())]));
    assert_eq!(result.reports, [Report::Bad("a".into(), "broken".into())]);
    assert_eq!(marks(&result), None);
    assert_eq!(marks(&files.event(folder([("a", bad())]))), None, "events do not count");
    let result = files.periodic(folder([("a", bad())]));
    assert_eq!((marks(&result), result.reports), (set([]), vec![]), "reported once");
    let result = files.event(folder([("a", good(vec![pod("a")]))]));
    assert_eq!((marks(&result), result.reports), (set(["a"]), vec![Report::Good("a".into())]));
}

#[test]
fn a_file_that_cannot_be_read_for_now_keeps_its_pods() {
    let unreadable = || Reading::Unreadable("too many open files".to_owned());
    let mut files = Folder::new();
    files.periodic(folder([("a", good(vec![pod("a")]))]));
    let result = files.periodic(folder([("a", unreadable())]));
    assert_eq!((marks(&result), result.reports), (None, vec![Report::Bad("a".into(), "too many open files".into())]));
    for _ in 0..3 {
        let result = files.periodic(folder([("a", unreadable())]));
        assert_eq!((marks(&result), result.reports), (None, vec![]), "reported once");
    }
    assert!(files.store.known().is_empty(), "it is read again");
    let result = files.event(folder([("a", good(vec![pod("a")]))]));
    assert_eq!((marks(&result), result.reports), (None, vec![Report::Good("a".into())]));

    let mut single = Folder::new();
    assert_eq!(marks(&single.periodic(Listing::Single(unreadable()))), None, "no set that lacks its pod");
}

#[test]
fn a_periodic_scan_that_first_sees_the_damage_takes_nothing_down() {
    let mut files = Folder::new();
    files.periodic(folder([("a", good(vec![pod("a")]))]));
    assert_eq!(marks(&files.periodic(folder([("a", bad())]))), None);
    assert_eq!(marks(&files.periodic(folder([("a", Reading::Unchanged)]))), set([]));
}

#[test]
fn a_file_being_written_is_as_it_was() {
    let mut files = Folder::new();
    files.periodic(folder([("a", good(vec![pod("a")])), ("b", Reading::Held)]));
    assert_eq!(marks(&files.event(folder([("a", Reading::Held), ("b", Reading::Held)]))), None);
    assert_eq!(marks(&files.event(folder([("a", Reading::Held), ("b", good(vec![pod("b")]))]))), set(["a", "b"]));
}

#[test]
fn of_two_files_with_one_pod_the_holder_keeps_it_until_a_periodic_scan() {
    let mut files = Folder::new();
    files.periodic(folder([("x.yaml", good(vec![from("x", "1")]))]));
    let both = || folder([("x.yaml", Reading::Unchanged), ("x.yaml~", good(vec![from("x", "2")]))]);
    assert_eq!(marks(&files.event(both())), None);
    let result = files.periodic(both());
    assert_eq!(marks(&result), set(["2"]), "the last file name wins");
    assert_eq!(result.reports, [Report::Conflict("d/x".into(), vec!["x.yaml".into(), "x.yaml~".into()])]);
    assert_eq!(files.periodic(both()).reports, [], "reported once");
    files.event(folder([("x.yaml", Reading::Unchanged)]));
    let result = files.after(REMOVAL_DELAY).event(folder([("x.yaml", Reading::Unchanged)]));
    assert_eq!(marks(&result), set(["1"]), "after deleting one of the two files the pod of the other is used");
}

#[test]
fn an_editor_that_moves_the_old_file_away_changes_the_pod_once() {
    let mut files = Folder::new();
    files.periodic(folder([("x.yaml", good(vec![from("x", "1")]))]));
    assert_eq!(marks(&files.event(folder([("x.yaml~", good(vec![from("x", "backup")]))]))), None);
    assert_eq!(marks(&files.event(folder([("x.yaml", Reading::Held), ("x.yaml~", Reading::Unchanged)]))), None);
    let saved = folder([("x.yaml", good(vec![from("x", "2")])), ("x.yaml~", Reading::Unchanged)]);
    assert_eq!(marks(&files.event(saved)), set(["2"]));
    assert_eq!(marks(&files.event(folder([("x.yaml", Reading::Unchanged)]))), None);
    assert_eq!(marks(&files.after(REMOVAL_DELAY).event(folder([("x.yaml", Reading::Unchanged)]))), None);
}

#[test]
fn ignored_documents_are_reported_once_until_they_are_gone() {
    let several = |name: &str| {
        Reading::Good(None, Manifest { pods: vec![pod(name)], ignores_documents: true, ..Manifest::default() })
    };
    let mut files = Folder::new();
    assert_eq!(files.periodic(folder([("a", good(vec![pod("a")]))])).reports, []);
    let result = files.event(folder([("a", several("a"))]));
    assert_eq!((marks(&result), result.reports), (None, vec![Report::IgnoresDocuments("a".into())]), "the same pod");
    for reading in [several("a"), several("b"), bad()] {
        let reports = files.periodic(folder([("a", reading)])).reports;
        assert!(!reports.contains(&Report::IgnoresDocuments("a".into())), "reported once");
    }
    files.event(folder([("a", good(vec![pod("b")]))]));
    let result = files.event(folder([("a", several("b"))]));
    assert_eq!(result.reports, [Report::IgnoresDocuments("a".into())], "added again");
}

#[test]
fn a_changed_name_inside_a_file_replaces_the_pod_at_once() {
    let mut files = Folder::new();
    files.periodic(folder([("a", good(vec![pod("old")]))]));
    assert_eq!(marks(&files.event(folder([("a", good(vec![pod("new")]))]))), set(["new"]));
}

#[test]
fn a_path_that_cannot_be_used_changes_nothing() {
    let mut files = Folder::new();
    files.periodic(folder([("a", good(vec![pod("a")]))]));
    let result = files.periodic(Listing::Unusable("cannot stat".into()));
    assert_eq!((marks(&result), result.reports), (None, vec![Report::Path("cannot stat".into())]));
    assert_eq!(files.periodic(Listing::Unusable("cannot stat".into())).reports, [], "reported once");
    assert_eq!(files.periodic(folder([("a", Reading::Unchanged)])).reports, [Report::PathGood]);
}

#[test]
fn a_single_file_that_is_bad_never_takes_its_pod_down() {
    let mut files = Folder::new();
    assert_eq!(marks(&files.periodic(Listing::Single(bad()))), None, "broken from the start: no set at all");
    assert_eq!(marks(&files.event(Listing::Single(good(vec![pod("a")])))), set(["a"]));
    for _ in 0..3 {
        assert_eq!(marks(&files.periodic(Listing::Single(bad()))), None);
        assert_eq!(marks(&files.periodic(Listing::Single(Reading::Unchanged))), None);
    }
    files.event(Listing::Missing);
    assert_eq!(marks(&files.after(REMOVAL_DELAY).event(Listing::Missing)), set([]));
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Good(u8),
    Bad,
    Held,
}

proptest! {
    /// Whatever happened before: once the folder is quiet, the set matches the files after two periodic scans.
    #[test]
    fn quiet_folders_converge(
        history in prop::collection::vec((prop::collection::btree_map(0u8..4, prop_oneof![
            (0u8..3).prop_map(Kind::Good), Just(Kind::Bad), Just(Kind::Held)], 0..4), any::<bool>(), 0u64..80), 0..10),
        last in prop::collection::btree_map(0u8..4, prop_oneof![(0u8..3).prop_map(Kind::Good), Just(Kind::Bad)], 0..4),
    ) {
        let listing = |files: &BTreeMap<u8, Kind>| Listing::Folder(files.iter().map(|(file, kind)| {
            let reading = match kind {
                Kind::Good(name) => good(vec![from(&format!("p{name}"), &format!("p{name} of {file}"))]),
                Kind::Bad => bad(),
                Kind::Held => Reading::Held,
            };
            (OsString::from(file.to_string()), reading)
        }).collect());
        let mut files = Folder::new();
        let mut seen: Option<Vec<String>> = None;
        for (step, periodic, pause) in &history {
            let now = files.after(Duration::from_millis(*pause)).now;
            seen = marks(&files.store.apply(listing(step), *periodic, now)).or(seen);
        }
        for _ in 0..3 {
            seen = marks(&files.after(REMOVAL_DELAY).periodic(listing(&last))).or(seen);
        }
        let mut expected: BTreeMap<u8, String> = BTreeMap::new();
        for (file, kind) in &last {
            if let Kind::Good(name) = kind {
                expected.insert(*name, format!("p{name} of {file}"));
            }
        }
        let mut seen = seen.unwrap_or_default();
        seen.sort();
        prop_assert_eq!(seen, expected.into_values().collect::<Vec<_>>());
    }
}
