//! Observations during the demo: events of the agent, state of the runtime, timestamps of the containers.

use std::fs;
use std::path::PathBuf;

use keblet_peers::ContainerView;
use keblet_peers::PodView;

use super::event::Event;
use super::pods;

/// What the steps are checked against.
pub(super) struct ObservedState {
    /// What the agent reported, in order.
    pub events: Vec<Event>,
    /// The latest pods of the runtime.
    pub pods: Vec<PodView>,
    /// The folder of stamp files.
    pub stamps: PathBuf,
    pod_logs: PathBuf,
}

impl ObservedState {
    /// No observations yet.
    pub(super) fn new(stamps: PathBuf, pod_logs: PathBuf) -> Self {
        Self { events: Vec::new(), pods: Vec::new(), stamps, pod_logs }
    }

    /// A pod of the demo, as the runtime reports its newest sandbox.
    pub(super) fn pod(&self, name: &str) -> Option<&PodView> {
        let full = format!("{name}-{}", pods::NODE);
        self.pods.iter().filter(|pod| pod.name == full).max_by_key(|pod| pod.attempt)
    }

    /// The newest instance of a pod's container.
    pub(super) fn container(&self, pod: &str, container: &str) -> Option<&ContainerView> {
        self.pod(pod)?.latest(container)
    }

    /// The events of a pod.
    pub(super) fn events_of(&self, pod: &str) -> impl Iterator<Item = &Event> {
        self.events.iter().filter(move |event| event.pod_name() == pod)
    }

    /// The log of a pod's container, over all its instances.
    pub(super) fn output(&self, pod: &str, container: &str) -> String {
        let prefix = format!("default_{pod}-{}_", pods::NODE);
        let Ok(folders) = fs::read_dir(&self.pod_logs) else { return String::new() };
        let folders = folders.flatten().filter(|folder| folder.file_name().to_string_lossy().starts_with(&prefix));
        let files = folders.filter_map(|folder| fs::read_dir(folder.path().join(container)).ok());
        files.flat_map(Iterator::flatten).filter_map(|file| fs::read_to_string(file.path()).ok()).collect()
    }
}
