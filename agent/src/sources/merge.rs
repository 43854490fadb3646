//! From one complete set of pods of a source to the steps that lead there. Pure: time is an argument.
//!
//! Each source has its own map; pods of different sources never meet here.

use std::collections::BTreeMap;
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
use crate::model::PodUpdate;

/// What one source wants, by UID. Only [`merge`] changes it.
#[derive(Clone, Debug, Default)]
pub struct PodMap {
    pods: HashMap<String, Pod>,
    /// A first set has been merged.
    seen_set: bool,
}

/// The steps from one set to the next, in the order of delivery.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    /// Removals, additions, updates, deletions, reconciliations; empty kinds left out.
    pub updates: Vec<PodUpdate>,
    /// Pods dropped because an earlier pod of the same set has their name.
    pub duplicates: Vec<Pod>,
}

/// Annotations that belong to this agent: they differ between two readings of the same pod and mean no change.
const LOCAL_ANNOTATIONS: [&str; 3] = [CONFIG_SOURCE, CONFIG_MIRROR, CONFIG_SEEN];

/// Brings `map` to `set`, the complete set of `source` as of `now`. The first set always yields an update, if only an
/// empty ADD: that is how the sync loop learns that the source is alive.
pub fn merge(map: &mut PodMap, source: ConfigSource, set: Vec<Pod>, now: SystemTime) -> Steps {
    let mut steps = Steps::default();
    let (mut adds, mut updates, mut deletes, mut reconciles) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut names = HashSet::new();
    let mut pods = HashMap::with_capacity(set.len());
    for pod in set {
        if !names.insert(full_name(&pod)) {
            steps.duplicates.push(pod);
            continue;
        }
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let kept = match map.pods.get(&uid) {
            None => {
                let pod = first_seen(pod, source, now);
                adds.push(pod.clone());
                pod
            }
            Some(old) => match difference(old, &pod) {
                Difference::None => old.clone(),
                Difference::Status => {
                    let pod = with_status(old, &pod);
                    reconciles.push(pod.clone());
                    pod
                }
                Difference::Semantic => {
                    let pod = with_semantics(old, &pod);
                    let list = if pod.metadata.deletion_timestamp.is_some() { &mut deletes } else { &mut updates };
                    list.push(pod.clone());
                    pod
                }
            },
        };
        pods.insert(uid, kept);
    }
    let mut removes: Vec<Pod> =
        map.pods.iter().filter(|(uid, _)| !pods.contains_key(*uid)).map(|(_, pod)| pod.clone()).collect();
    removes.sort_by_cached_key(full_name);
    map.pods = pods;

    let nothing_yet = !map.seen_set;
    map.seen_set = true;
    let alive = nothing_yet && adds.is_empty() && updates.is_empty() && deletes.is_empty();
    let some = |list: &Vec<Pod>| !list.is_empty();
    steps.updates.extend(Some(removes).filter(some).map(|pods| PodUpdate::Remove(source, pods)));
    steps.updates.extend(Some(adds).filter(|l| some(l) || alive).map(|pods| PodUpdate::Add(source, pods)));
    steps.updates.extend(Some(updates).filter(some).map(|pods| PodUpdate::Update(source, pods)));
    steps.updates.extend(Some(deletes).filter(some).map(|pods| PodUpdate::Delete(source, pods)));
    steps.updates.extend(Some(reconciles).filter(some).map(|pods| PodUpdate::Reconcile(source, pods)));
    steps
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
/// version tells how old the status is.
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
