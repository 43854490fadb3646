//! Snapshots of pods as records: the present state of a pod, and which exits are new. Pure.

use std::collections::BTreeMap;
use std::collections::BTreeSet;

use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodRef;
use crate::model::PodSnapshot;
use crate::observe::record::ContainerView;
use crate::observe::record::ExitInfo;
use crate::observe::record::ExitRecord;
use crate::observe::record::ExitSource;
use crate::observe::record::PodName;
use crate::observe::record::PodRecord;
use crate::observe::record::Record;
use crate::observe::record::RunState;
use crate::observe::record::Timestamp;
use crate::observe::text::clean;

/// Longest message of an exit, and longest name, in characters.
const MESSAGE: usize = 300;
const NAME: usize = 253;

/// A pod as last reported.
#[derive(Debug, Default)]
pub(super) struct KnownPod {
    record: PodRecord,
    /// Instances whose exit was reported and that the runtime still has.
    reported: BTreeSet<String>,
    /// Instances whose exit the kernel reported and the runtime has not confirmed, or the runtime reported without its code:
    /// container, exit, and which of the two was first.
    unconfirmed: BTreeMap<String, (String, ExitInfo, ExitSource)>,
}

/// The pod's name.
pub(super) fn name_of(pod: &PodRef) -> PodName {
    PodName { namespace: clean(&pod.namespace, NAME), name: clean(&pod.name, NAME), uid: clean(pod.uid.as_str(), NAME) }
}

/// The pod was there before `began` (nanoseconds since the Unix epoch): something of it that the runtime still has is older.
pub(super) fn existed(snapshot: &PodSnapshot, began: i64) -> bool {
    let sandboxes = snapshot.sandboxes.iter().map(|sandbox| sandbox.created_at);
    let containers = snapshot.containers.iter().map(|container| container.created_at);
    sandboxes.chain(containers).any(|created_at| created_at < began)
}

impl KnownPod {
    /// The pod's name.
    pub(super) fn name(&self) -> &PodName {
        &self.record.pod
    }

    /// The newest instance of each of its containers.
    pub(super) fn containers(&self) -> &[ContainerView] {
        &self.record.containers
    }

    /// Takes a snapshot; returns what is new. Exits before `began` (nanoseconds since the Unix epoch) are marked as
    /// earlier.
    ///
    /// An exit that the kernel has proven is reported when the runtime has confirmed it and has given a reason, one without
    /// its code when that is known; both when the instance is gone.
    pub(super) fn update(&mut self, snapshot: &PodSnapshot, began: i64) -> Vec<Record> {
        let record = self.view(snapshot);
        let mut exits = self.new_exits(snapshot, &record.pod, began);
        let known = std::mem::replace(&mut self.record, record);
        let mut records = Vec::with_capacity(exits.len() + 1);
        if known != self.record {
            records.push(Record::Pod(self.record.clone()));
        }
        records.append(&mut exits);
        records
    }

    /// The runtime no longer has the pod.
    pub(super) fn removed(self) -> Vec<Record> {
        let pod = self.record.pod;
        let gone = |(id, (container, exit, source)): (String, (String, ExitInfo, ExitSource))| {
            Record::Exit(ExitRecord { pod: pod.clone(), container, id, exit, source, earlier: false })
        };
        let mut records: Vec<Record> = self.unconfirmed.into_iter().map(gone).collect();
        records.push(Record::Pod(PodRecord { pod: pod.clone(), removed: true, ..PodRecord::default() }));
        records
    }

    fn view(&self, snapshot: &PodSnapshot) -> PodRecord {
        let newest = snapshot.sandboxes.first();
        let mut containers: Vec<ContainerView> = Vec::new();
        // Newest first: the first of a name is its newest instance, the next one the one before.
        for status in &snapshot.containers {
            match containers.iter_mut().find(|view| view.name == status.name) {
                None => containers.push(self.container_view(status)),
                Some(view) if view.last_exit.is_none() => view.last_exit = exit_info(status),
                Some(_) => {}
            }
        }
        containers.sort_by(|a, b| a.name.cmp(&b.name));
        PodRecord {
            pod: name_of(&snapshot.pod),
            removed: false,
            sandbox_ready: newest.is_some_and(|sandbox| sandbox.ready),
            host_network: newest.is_some_and(|sandbox| sandbox.host_network),
            ips: snapshot.ips.clone(),
            containers,
        }
    }

    fn container_view(&self, status: &ContainerStatus) -> ContainerView {
        let before = self.record.containers.iter().find(|view| view.name == status.name);
        ContainerView {
            name: clean(&status.name, NAME),
            id: status.id.to_string(),
            image: clean(&status.image, MESSAGE),
            state: run_state(status.state),
            restarts: status.restart_count.max(status.attempt),
            started_at: Timestamp::from_nanos(status.started_at),
            // The instance before may be removed already.
            last_exit: exit_info(status).or_else(|| before?.last_exit.clone()),
        }
    }

    fn new_exits(&mut self, snapshot: &PodSnapshot, pod: &PodName, began: i64) -> Vec<Record> {
        let mut exits = Vec::new();
        // Oldest first.
        for status in snapshot.containers.iter().rev().filter(|status| status.state == ContainerState::Exited) {
            let id = status.id.to_string();
            let Some(exit) = exit_info(status).filter(|_| !self.reported.contains(&id)) else { continue };
            let container = clean(&status.name, NAME);
            let reporter = if status.proven.is_some() { ExitSource::Kernel } else { ExitSource::Runtime };
            let source = self.unconfirmed.remove(&id).map_or(reporter, |(_, _, first)| first);
            // Without its code the runtime is queried again.
            if status.proven.is_some() || status.exit_code.is_none() {
                self.unconfirmed.insert(id, (container, exit, source));
                continue;
            }
            self.reported.insert(id.clone());
            let earlier = (1..began).contains(&status.finished_at);
            exits.push(Record::Exit(ExitRecord { pod: pod.clone(), container, id, exit, source, earlier }));
        }
        let exists = |id: &String| snapshot.containers.iter().any(|status| status.id.as_str() == id);
        self.reported.retain(exists);
        let gone = self.unconfirmed.extract_if(.., |id, _| !exists(id));
        exits.extend(gone.map(|(id, (container, exit, source))| {
            Record::Exit(ExitRecord { pod: pod.clone(), container, id, exit, source, earlier: false })
        }));
        exits
    }
}

fn run_state(state: ContainerState) -> RunState {
    match state {
        ContainerState::Created => RunState::Created,
        ContainerState::Running => RunState::Running,
        ContainerState::Exited => RunState::Exited,
        ContainerState::Unknown => RunState::Unknown,
    }
}

fn exit_info(status: &ContainerStatus) -> Option<ExitInfo> {
    let exited = status.state == ContainerState::Exited;
    exited.then(|| ExitInfo {
        exit_code: status.exit_code,
        reason: clean(&status.reason, NAME),
        message: clean(&status.message, MESSAGE),
        finished_at: Timestamp::from_nanos(status.finished_at),
        oom_killed: status.reason == "OOMKilled" || status.proven.is_some_and(|proof| proof.oom_killed),
    })
}

#[cfg(test)]
#[path = "pods_tests.rs"]
mod tests;
