//! Decisions on tables and recorded traces.

mod history;
mod limits;
mod node;
mod ranking;
mod traces;

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;
use serde_json::json;
use tokio::time::Instant;

use super::readings::Reading;
use super::readings::Readings;
use crate::config::KubeletConfiguration;
use crate::config::eviction::Signal;
use crate::config::eviction::Threshold;
use crate::config::eviction::thresholds;
use crate::model::Amount;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::stats::ContainerUsage;
use crate::stats::FsUsage;
use crate::stats::PodUsage;

/// The pod `name` with the UID `name-uid`.
fn pod(name: &str, spec: Value) -> Pod {
    let mut spec = spec;
    if spec.get("containers").is_none() {
        spec["containers"] = json!([{"name": "main"}]);
    }
    let metadata = json!({"name": name, "namespace": "ns", "uid": format!("{name}-uid")});
    Arc::new(serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a pod"))
}

/// A pod with a container `main` that requests this amount.
fn requesting(name: &str, resource: &str, amount: &str) -> Pod {
    pod(name, json!({"containers": [{"name": "main", "resources": {"requests": {resource: amount}}}]}))
}

fn bytes(text: &str) -> u64 {
    text.parse::<Amount>().expect("a quantity").value().unsigned_abs()
}

fn used(text: &str) -> FsUsage {
    FsUsage { bytes: bytes(text), inodes: 1 }
}

/// The container `main` uses so much memory, and so does the pod.
fn memory(text: &str) -> PodUsage {
    let container = ContainerUsage { memory: Some(bytes(text)), ..ContainerUsage::default() };
    PodUsage { memory: container.memory, containers: [("main".to_owned(), container)].into(), ..PodUsage::default() }
}

/// The container `main` has a writable layer, logs, and the pod a volume `data`, of these sizes.
fn disks(rootfs: &str, logs: &str, data: &str) -> PodUsage {
    let container = ContainerUsage { memory: None, rootfs: Some(used(rootfs)), logs: Some(used(logs)) };
    PodUsage {
        containers: [("main".to_owned(), container)].into(),
        volumes: [("data".to_owned(), used(data))].into(),
        ..PodUsage::default()
    }
}

fn usage<const N: usize>(of: [(&Pod, PodUsage); N]) -> HashMap<PodUid, PodUsage> {
    of.into_iter().map(|(pod, usage)| (pod_ref(pod).uid, usage)).collect()
}

/// The thresholds of a configuration whose pods have no memory limit of their own.
fn configured(mut fields: Value) -> Vec<Threshold> {
    fields["enforceNodeAllocatable"] = json!(["none"]);
    if fields.get("evictionHard").is_none() {
        fields["evictionHard"] = json!({});
    }
    let kubelet: KubeletConfiguration = serde_json::from_value(fields).expect("a configuration");
    thresholds(&kubelet, false)
}

/// Readings with these available amounts, of a capacity of 1000Mi or 1000.
fn readings(at: Instant, signals: &[(Signal, &str)]) -> Readings {
    let reading = |(signal, available): &(Signal, &str)| {
        let capacity = if available.ends_with('i') { 1000 << 20 } else { 1000 };
        let available = available.parse::<Amount>().expect("a quantity").value();
        (*signal, Reading { available, capacity, at })
    };
    Readings { signals: signals.iter().map(reading).collect(), disks: None }
}
