//! What must not change when a node is taken over: runtime, statuses, mounts, files.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Pod;
use keblet_peers::PodView;
use keblet_tests::cluster::Tenant;
use kube::api::ListParams;
use serde_json::Value;

const UNLIMITED: &str = "9007199254740988Ki";

/// The state of a node and of its pods.
pub(super) struct State {
    /// Sandboxes and containers with ids, attempts, PIDs and times.
    pub(super) runtime: BTreeMap<String, PodView>,
    /// Metadata that identifies a pod, and its status, by name.
    pods: BTreeMap<String, Value>,
    /// Lines of the mount table below the agent's folder, ids included: a mount that was replaced has another one.
    mounts: Vec<String>,
    /// Inode and permissions of files below the agent's folder for pods.
    files: BTreeMap<String, String>,
    /// Events of pods: reason, pod and count.
    events: BTreeMap<String, i32>,
}

impl State {
    pub(super) async fn read(tenant: &Tenant) -> Self {
        let runtime = tenant.node.pods().unwrap().into_iter();
        let runtime = runtime.filter(|pod| pod.namespace == tenant.namespace);
        let root = &tenant.node.node.root;
        let mut files = BTreeMap::new();
        list(root, &root.join("pods"), &mut files);
        Self {
            runtime: runtime.map(|pod| (pod.id.clone(), pod)).collect(),
            pods: pods(tenant).await,
            mounts: mounts(root),
            files,
            events: events(tenant).await,
        }
    }

    /// Differences to an earlier state, one line each. Pods that are created or deleted in between are `excepted`.
    pub(super) fn differences_to(&self, before: &Self, excepted: &[&str]) -> Vec<String> {
        let mut found = Vec::new();
        let is_excepted = |text: &str| excepted.iter().any(|name| text.contains(name));
        let runtime = |state: &Self| -> BTreeMap<String, String> {
            let pods = state.runtime.values().filter(|pod| !is_excepted(&pod.name));
            pods.map(|pod| (format!("runtime: {} {}", pod.name, pod.id), format!("{pod:?}"))).collect()
        };
        compare(&runtime(before), &runtime(self), &mut found);
        for (name, pod) in before.pods.iter().filter(|(name, _)| !is_excepted(name)) {
            difference(&format!("status of {name}"), pod, self.pods.get(name).unwrap_or(&Value::Null), &mut found);
        }
        let uids: Vec<&str> = [before, self]
            .into_iter()
            .flat_map(|state| state.pods.iter())
            .filter(|(name, _)| is_excepted(name))
            .filter_map(|(_, pod)| pod["uid"].as_str())
            .collect();
        let of_excepted = |text: &str| is_excepted(text) || uids.iter().any(|uid| text.contains(uid));
        // A kubelet leaves empty folders of pods that have ended until their objects are deleted.
        let ended =
            before.pods.values().filter(|pod| pod["phase"] == "Succeeded").filter_map(|pod| pod["uid"].as_str());
        let ended: Vec<&str> = ended.collect();
        let mounts = |state: &Self| -> BTreeMap<String, String> {
            let lines = state.mounts.iter().filter(|line| !of_excepted(line));
            lines.map(|line| (format!("mount: {line}"), String::new())).collect()
        };
        compare(&mounts(before), &mounts(self), &mut found);
        let files = |state: &Self| -> BTreeMap<String, String> {
            let is_ended = |path: &str| ended.iter().any(|uid| path.contains(uid));
            let files = state.files.iter().filter(|(path, _)| !of_excepted(path) && !is_ended(path));
            files.map(|(path, entry)| (format!("file: {path}"), entry.clone())).collect()
        };
        compare(&files(before), &files(self), &mut found);
        let events = |state: &Self| -> BTreeMap<String, String> {
            let events = state.events.iter().filter(|(event, _)| !is_excepted(event));
            events.map(|(event, count)| (format!("event: {event}"), count.to_string())).collect()
        };
        compare(&events(before), &events(self), &mut found);
        found
    }

    /// The running container of a pod: its PID.
    pub(super) fn pid(&self, pod: &str, container: &str) -> i32 {
        let pods = self.runtime.values().filter(|view| view.name == pod && view.ready);
        pods.filter_map(|view| view.latest(container)?.pid).next().unwrap()
    }

    /// Metadata and status of a pod.
    pub(super) fn pod(&self, name: &str) -> &Value {
        &self.pods[name]
    }
}

fn compare(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>, found: &mut Vec<String>) {
    for (key, value) in before {
        match after.get(key) {
            Some(now) if now == value => {}
            Some(now) => found.push(format!("{key}: {value} -> {now}")),
            None => found.push(format!("{key}: {value} is gone")),
        }
    }
    found.extend(
        after.iter().filter(|(key, _)| !before.contains_key(*key)).map(|(key, value)| format!("{key}: {value} is new")),
    );
}

/// The paths in which two values differ.
fn difference(path: &str, before: &Value, after: &Value, found: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(a), Value::Object(b)) => {
            for key in a.keys().chain(b.keys().filter(|key| !a.contains_key(*key))) {
                let value = |map: &serde_json::Map<String, Value>| map.get(key).cloned().unwrap_or(Value::Null);
                difference(&format!("{path}.{key}"), &value(a), &value(b), found);
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (index, (a, b)) in a.iter().zip(b).enumerate() {
                difference(&format!("{path}[{index}]"), a, b, found);
            }
        }
        _ if before == after => {}
        _ => found.push(format!("{path}: {before} -> {after}")),
    }
}

async fn pods(tenant: &Tenant) -> BTreeMap<String, Value> {
    let pods = tenant.api::<Pod>().list(&ListParams::default()).await.unwrap();
    let described = |pod: Pod| {
        let name = pod.metadata.name.clone().unwrap();
        let mut value = serde_json::to_value(pod.status).unwrap();
        // The API server keeps the order in which an agent has sent them, which has no meaning.
        if let Some(conditions) = value["conditions"].as_array_mut() {
            conditions.sort_by_key(|one| one["type"].to_string());
        }
        // With cgroup v1 a kubelet reports what the kernel shows for "no limit" as the pod's limit.
        if value["resources"]["limits"]["memory"] == UNLIMITED {
            value["resources"].as_object_mut().unwrap().remove("limits");
        }
        if value["resources"] == serde_json::json!({}) {
            value["resources"] = Value::Null;
        }
        value["uid"] = serde_json::json!(pod.metadata.uid);
        (name, value)
    };
    pods.into_iter().map(described).collect()
}

async fn events(tenant: &Tenant) -> BTreeMap<String, i32> {
    let mut counts = BTreeMap::new();
    for event in tenant.api::<Event>().list(&ListParams::default()).await.unwrap() {
        let of = |text: Option<String>| text.unwrap_or_default();
        let key = format!("{} {}: {}", of(event.involved_object.name), of(event.reason), of(event.message));
        *counts.entry(key).or_default() += event.count.unwrap_or(1);
    }
    counts
}

pub(super) fn mounts(root: &Path) -> Vec<String> {
    let root = root.display().to_string();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().filter(|line| line.contains(&format!("{root}/"))).map(str::to_owned).collect()
}

/// Files and folders with inode and mode. Content of tokens is replaced by any agent that starts: not descended into.
fn list(root: &Path, folder: &Path, found: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(metadata) = entry.path().symlink_metadata() else { continue };
        let path = entry.path();
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let is_token = name.contains("kube-api-access") || name.contains("~projected/");
        if !(is_token && name.contains("/..")) {
            found.insert(name, format!("inode {} mode {:o} gid {}", metadata.ino(), metadata.mode(), metadata.gid()));
        }
        if metadata.is_dir() && !is_token {
            list(root, &path, found);
        }
    }
}
