//! Diff between the pods of a source and its new set, as updates for the sync loop. Pure: time is an argument.
//!
//! Each source has its own map; pods of different sources are never compared.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::collections::HashMap;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod as ApiPod;

use super::static_pod::CONFIG_MIRROR;
use super::static_pod::CONFIG_SEEN;
use super::static_pod::CONFIG_SOURCE;
use crate::model::ConfigSource;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::PodUpdate;

/// The desired pods of one source, by UID. Only this module changes it.
#[derive(Clone, Debug, Default)]
pub struct PodMap {
    pods: HashMap<String, Pod>,
    /// A first set has been merged, and it was complete.
    seen_set: bool,
    /// UIDs of pods that the source has and that cannot be decoded.
    undecodable: BTreeSet<String>,
}

impl PodMap {
    /// No set has been merged yet.
    pub fn is_unmerged(&self) -> bool {
        !self.seen_set
    }

    /// What was merged is not all that the source has: the next set yields an update in any case, as the first one does.
    pub fn await_set(&mut self) {
        self.seen_set = false;
    }

    /// The source has these pods, which cannot be decoded, and no others such. Returns them, but those that are in the map, if
    /// they are others than before.
    pub fn keep_undecodable(&mut self, uids: &[String]) -> Option<PodUpdate> {
        let unknown = uids.iter().filter(|uid| !self.pods.contains_key(*uid)).cloned().collect();
        self.set_undecodable(unknown)
    }

    /// These pods can be decoded, or are gone. Returns those that still cannot be, if they are others than before.
    pub fn decoded<'a>(&mut self, uids: impl Iterator<Item = &'a String>) -> Option<PodUpdate> {
        let mut left = self.undecodable.clone();
        uids.for_each(|uid| _ = left.remove(uid));
        self.set_undecodable(left)
    }

    fn set_undecodable(&mut self, uids: BTreeSet<String>) -> Option<PodUpdate> {
        let is_news = uids != self.undecodable;
        self.undecodable = uids;
        let uids = || self.undecodable.iter().map(|uid| PodUid::from(uid.as_str())).collect();
        is_news.then(|| PodUpdate::Undecodable(ConfigSource::Api, uids()))
    }

    /// Those of the pods of these UIDs that are in it.
    pub fn known(&self, uids: &[String]) -> Vec<Pod> {
        uids.iter().filter_map(|uid| self.pods.get(uid).cloned()).collect()
    }
}

/// The updates from one set to the next, in the order of delivery.
#[derive(Clone, Debug, Default)]
pub struct MergeResult {
    /// Removals, additions, updates, deletions, reconciliations; empty kinds left out.
    pub updates: Vec<PodUpdate>,
    /// Pods dropped because an earlier pod of the same set has their name.
    pub duplicates: Vec<Pod>,
}

impl MergeResult {
    /// With this update before the others.
    pub fn preceded_by(mut self, first: Option<PodUpdate>) -> Self {
        self.updates.splice(0..0, first);
        self
    }

    /// With this update behind the others.
    pub fn followed_by(mut self, last: Option<PodUpdate>) -> Self {
        self.updates.extend(last);
        self
    }
}

/// Annotations that belong to this agent: they differ between two readings of the same pod and mean no change.
const LOCAL_ANNOTATIONS: [&str; 3] = [CONFIG_SOURCE, CONFIG_MIRROR, CONFIG_SEEN];

/// Brings `map` to `set`, the complete set of `source` as of `now`. The first set always yields an update, if only an
/// empty ADD, by which the sync loop marks the source as ready.
pub fn merge(map: &mut PodMap, source: ConfigSource, set: Vec<Pod>, now: SystemTime) -> MergeResult {
    let mut lists = Lists::default();
    let mut duplicates = Vec::new();
    let mut names = HashSet::new();
    let mut pods = HashMap::with_capacity(set.len());
    for pod in set {
        if !names.insert(full_name(&pod)) {
            duplicates.push(pod);
            continue;
        }
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let kept = lists.sort_in(map.pods.get(&uid), pod, source, now);
        pods.insert(uid, kept);
    }
    lists.removes = map.pods.iter().filter(|(uid, _)| !pods.contains_key(*uid)).map(|(_, pod)| pod.clone()).collect();
    map.pods = pods;
    let first = !std::mem::replace(&mut map.seen_set, true);
    MergeResult { updates: lists.in_order(source, first), duplicates }
}

/// Adds or replaces the `changed` pods in `map` and removes the UIDs in `removed`. Compares with no other pod: two pods
/// of one name both stay until one of them is removed.
pub fn change(
    map: &mut PodMap,
    source: ConfigSource,
    changed: Vec<Pod>,
    removed: &[String],
    now: SystemTime,
) -> MergeResult {
    let mut lists = Lists::default();
    for pod in changed {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let kept = lists.sort_in(map.pods.get(&uid), pod, source, now);
        map.pods.insert(uid, kept);
    }
    lists.removes = removed.iter().filter_map(|uid| map.pods.remove(uid)).collect();
    MergeResult { updates: lists.in_order(source, false), duplicates: Vec::new() }
}

/// Pods by what happened to them.
#[derive(Default)]
struct Lists {
    removes: Vec<Pod>,
    adds: Vec<Pod>,
    updates: Vec<Pod>,
    deletes: Vec<Pod>,
    reconciles: Vec<Pod>,
}

impl Lists {
    /// Adds `pod` to the list it belongs to and returns the object to keep in place of `old`.
    fn sort_in(&mut self, old: Option<&Pod>, pod: Pod, source: ConfigSource, now: SystemTime) -> Pod {
        let Some(old) = old else {
            let pod = first_seen(pod, source, now);
            self.adds.push(pod.clone());
            return pod;
        };
        match difference(old, &pod) {
            Difference::None => old.clone(),
            Difference::Status => {
                let pod = with_status(old, &pod);
                self.reconciles.push(pod.clone());
                pod
            }
            Difference::Semantic => {
                let pod = with_semantics(old, &pod);
                let deleted = pod.metadata.deletion_timestamp.is_some();
                if deleted { &mut self.deletes } else { &mut self.updates }.push(pod.clone());
                pod
            }
        }
    }

    /// Updates in the order of delivery. The `first` ones of a source are at least an empty ADD.
    fn in_order(mut self, source: ConfigSource, first: bool) -> Vec<PodUpdate> {
        self.removes.sort_by_cached_key(full_name);
        let alive = first && self.adds.is_empty() && self.updates.is_empty() && self.deletes.is_empty();
        let some = |kind: fn(ConfigSource, Vec<Pod>) -> PodUpdate, pods: Vec<Pod>, even_empty: bool| {
            (even_empty || !pods.is_empty()).then(|| kind(source, pods))
        };
        let kinds = [
            some(PodUpdate::Remove, self.removes, false),
            some(PodUpdate::Add, self.adds, alive),
            some(PodUpdate::Update, self.updates, false),
            some(PodUpdate::Delete, self.deletes, false),
            some(PodUpdate::Reconcile, self.reconciles, false),
        ];
        kinds.into_iter().flatten().collect()
    }
}

/// `name_namespace`.
fn full_name(pod: &Pod) -> String {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    format!("{name}_{namespace}")
}

fn first_seen(pod: Pod, source: ConfigSource, now: SystemTime) -> Pod {
    let mut pod = Arc::unwrap_or_clone(pod);
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(CONFIG_SOURCE.to_owned(), source.as_str().to_owned());
    annotations.insert(CONFIG_SEEN.to_owned(), humantime::format_rfc3339_nanos(now).to_string());
    Arc::new(pod)
}

enum Difference {
    None,
    Status,
    Semantic,
}

fn difference(old: &ApiPod, new: &ApiPod) -> Difference {
    let same = old.spec == new.spec
        && or_empty(&old.metadata.labels) == or_empty(&new.metadata.labels)
        && old.metadata.deletion_timestamp == new.metadata.deletion_timestamp
        && old.metadata.deletion_grace_period_seconds == new.metadata.deletion_grace_period_seconds
        && foreign(old).eq(foreign(new));
    match (same, old.status == new.status) {
        (false, _) => Difference::Semantic,
        (true, false) => Difference::Status,
        (true, true) => Difference::None,
    }
}

fn or_empty(map: &Option<BTreeMap<String, String>>) -> Option<&BTreeMap<String, String>> {
    map.as_ref().filter(|m| !m.is_empty())
}

fn foreign(pod: &ApiPod) -> impl Iterator<Item = (&String, &String)> {
    pod.metadata.annotations.iter().flatten().filter(|(key, _)| !LOCAL_ANNOTATIONS.contains(&key.as_str()))
}

fn with_status(old: &ApiPod, new: &ApiPod) -> Pod {
    let mut pod = ApiPod { status: new.status.clone(), ..old.clone() };
    pod.metadata.resource_version = new.metadata.resource_version.clone();
    Arc::new(pod)
}

/// The new content in the old object: owner references and finalizers stay, and so do the local annotations. The resource
/// version orders statuses.
fn with_semantics(old: &ApiPod, new: &ApiPod) -> Pod {
    let mut pod = ApiPod { spec: new.spec.clone(), status: new.status.clone(), ..old.clone() };
    pod.metadata.resource_version = new.metadata.resource_version.clone();
    pod.metadata.labels = new.metadata.labels.clone();
    pod.metadata.deletion_timestamp = new.metadata.deletion_timestamp.clone();
    pod.metadata.deletion_grace_period_seconds = new.metadata.deletion_grace_period_seconds;
    pod.metadata.generation = new.metadata.generation;
    let local = old.metadata.annotations.iter().flatten().filter(|(key, _)| LOCAL_ANNOTATIONS.contains(&key.as_str()));
    let annotations = foreign(new).chain(local).map(|(k, v)| (k.clone(), v.clone())).collect();
    pod.metadata.annotations = Some(annotations);
    Arc::new(pod)
}
