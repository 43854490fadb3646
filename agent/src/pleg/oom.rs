//! Attributes OOM kills to containers. A process may be killed within milliseconds of its container's start, before any
//! snapshot contains it; such kills are queued, bounded in number, until a snapshot does.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::task::PlegTask;
use crate::events::OomFacts;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::Source;

/// Queued kills; beyond that the oldest is reported without a container.
const MAX_UNATTRIBUTED: usize = 64;

/// Kills in containers that no snapshot contains yet.
#[derive(Default)]
pub(super) struct UnattributedOomKills(VecDeque<OomFacts>);

impl PlegTask {
    /// The OOM killer chose a process. If it is a container's init, its exit will be marked as OOM-killed.
    pub(super) fn on_oom_facts(&mut self, facts: OomFacts) {
        self.exits.record_oom_victim(facts.pid);
        let snapshots = self.records.values().filter_map(|record| record.snapshot.as_ref());
        let owner = facts.container.as_ref().and_then(|id| {
            let owned = |snapshot| PodSnapshot::by_id(snapshot, id).map(|container| (snapshot, container));
            snapshots.map(|snapshot| &**snapshot).find_map(owned)
        });
        if owner.is_some() || facts.container.is_none() {
            self.report_oom(&facts, owner);
            return;
        }
        self.unattributed.0.push_back(facts);
        if self.unattributed.0.len() > MAX_UNATTRIBUTED
            && let Some(oldest) = self.unattributed.0.pop_front()
        {
            self.report_oom(&oldest, None);
        }
    }

    /// Reports the queued kills whose container is in the new snapshot.
    pub(super) fn attribute_oom_kills(&mut self, uid: &PodUid) {
        if self.unattributed.0.is_empty() {
            return;
        }
        let Some(snapshot) = self.records.get(uid).and_then(|record| record.snapshot.clone()) else { return };
        let (owned, rest) = std::mem::take(&mut self.unattributed.0)
            .into_iter()
            .partition(|facts: &OomFacts| facts.container.as_ref().is_some_and(|id| snapshot.by_id(id).is_some()));
        self.unattributed.0 = rest;
        let owned: VecDeque<OomFacts> = owned;
        for facts in owned {
            let container = facts.container.as_ref().and_then(|id| snapshot.by_id(id));
            self.report_oom(&facts, container.map(|container| (&*snapshot, container)));
        }
    }

    fn report_oom(&self, facts: &OomFacts, owner: Option<(&PodSnapshot, &ContainerStatus)>) {
        let is_init = owner.map(|(_, container)| container.pid == Some(facts.pid));
        self.config.observer.oom_kill(is_init);
        tracing::info!(
            target: "keblet::events",
            pod = owner.map(|(snapshot, _)| snapshot.pod.to_string()),
            container = owner.map(|(_, container)| container.name.as_str()),
            event = "OomKilled",
            source = Source::Kernel.as_str(),
            victim = facts.comm,
            victim_pid = facts.pid,
            is_init,
            anon_kib = facts.anon_kib,
            latency_ms = facts.at.age(Instant::now()).as_secs_f64() * 1000.0,
            "pod lifecycle event"
        );
    }
}
