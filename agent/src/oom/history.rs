//! Earlier verdicts, as far as later ones and the reasons of exits depend on them. Bounded. Pure.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::time::Duration;

use crate::model::ContainerId;
use crate::model::KernelMoment;
use crate::model::OomConfidence;
use crate::model::OomRecord;
use crate::model::OomVerdict;

/// Containers whose main process was killed that are remembered until they are removed.
const MAX_CONTAINERS: usize = 4096;
/// Kills of whole cgroups, and single kills, that are remembered.
const MAX_RECENT: usize = 1024;
/// The kernel kills a whole cgroup within milliseconds. Later it kills nothing more in the same cgroup instance.
const ONE_EVENT: Duration = Duration::from_secs(1);
/// How far the times of one kill by two sources lie apart.
const ONE_KILL: Duration = Duration::from_secs(10);

/// Earlier verdicts.
#[derive(Debug, Default)]
pub struct OomHistory {
    main_killed: HashMap<ContainerId, OomConfidence>,
    order: VecDeque<ContainerId>,
    groups: VecDeque<(u64, KernelMoment)>,
    recent: VecDeque<(u32, KernelMoment)>,
}

impl OomHistory {
    /// Another process of the same group was killed by the same event.
    pub fn is_repeated(&self, record: &OomRecord) -> bool {
        let Some(group) = record.group else { return false };
        let is_same = |(id, at): &(u64, KernelMoment)| *id == group && distance(*at, record.moment) < ONE_EVENT;
        self.groups.iter().rev().any(is_same)
    }

    /// The kill is known from another source.
    pub fn is_known(&self, record: &OomRecord) -> bool {
        let Some(pid) = record.pid else { return false };
        let is_same = |(id, at): &(u32, KernelMoment)| *id == pid && distance(*at, record.moment) < ONE_KILL;
        self.recent.iter().rev().any(is_same)
    }

    /// Adds a verdict.
    pub fn add(&mut self, record: &OomRecord, verdict: &OomVerdict) {
        if let Some(group) = record.group {
            push(&mut self.groups, (group, record.moment));
        }
        if let Some(pid) = record.pid {
            push(&mut self.recent, (pid, record.moment));
        }
        let Some(container) = verdict.container.as_ref().filter(|_| verdict.killed_main()) else { return };
        if self.main_killed.insert(container.id.clone(), verdict.confidence).is_none() {
            self.order.push_back(container.id.clone());
        }
        while self.order.len() > MAX_CONTAINERS {
            if let Some(oldest) = self.order.pop_front() {
                self.main_killed.remove(&oldest);
            }
        }
    }

    /// The evidence of an OOM kill of the container's main process.
    pub fn main_killed(&self, container: &ContainerId) -> Option<OomConfidence> {
        self.main_killed.get(container).copied()
    }
}

fn distance(a: KernelMoment, b: KernelMoment) -> Duration {
    if a.0 > b.0 { a.0 - b.0 } else { b.0 - a.0 }
}

fn push<T>(queue: &mut VecDeque<T>, item: T) {
    queue.push_back(item);
    if queue.len() > MAX_RECENT {
        queue.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::model::OomTime;
    use crate::oom::verdict::decide;

    fn record(pid: u32, group: Option<u64>, at: Instant) -> OomRecord {
        OomRecord { pid: Some(pid), group, ..OomRecord::new(OomConfidence::Kernel, KernelMoment(at)) }
    }

    fn add(history: &mut OomHistory, record: &OomRecord) {
        let verdict = decide(record, None, history.is_repeated(record), OomTime(0));
        history.add(record, &verdict);
    }

    #[test]
    fn the_first_victim_of_a_group_is_its_event() {
        let (mut history, at) = (OomHistory::default(), Instant::now());
        let (first, second) = (record(1, Some(7), at), record(2, Some(7), at + Duration::from_millis(2)));
        assert!(!history.is_repeated(&first));
        add(&mut history, &first);
        assert!(history.is_repeated(&second));
        assert!(!history.is_repeated(&record(3, Some(8), at)), "another group");
        assert!(!history.is_repeated(&record(3, None, at)), "a single kill");
        assert!(!history.is_repeated(&record(3, Some(7), at + ONE_EVENT)), "another event");
    }

    #[test]
    fn a_kill_is_known_by_pid_and_time() {
        let (mut history, at) = (OomHistory::default(), Instant::now());
        add(&mut history, &record(1, None, at));
        assert!(history.is_known(&record(1, None, at + Duration::from_secs(2))));
        assert!(!history.is_known(&record(2, None, at)));
        assert!(!history.is_known(&record(1, None, at + ONE_KILL)), "the pid was used again");
    }

    #[test]
    fn is_bounded() {
        let (mut history, at) = (OomHistory::default(), Instant::now());
        for pid in 0..10_000 {
            let record = record(pid, Some(pid.into()), at);
            let mut verdict = decide(&record, None, false, OomTime(0));
            verdict.victim = crate::model::OomVictim::Main;
            let id = ContainerId::from(pid.to_string());
            verdict.container = Some(crate::model::OomContainer { id, name: String::new() });
            history.add(&record, &verdict);
        }
        assert_eq!((history.groups.len(), history.recent.len()), (MAX_RECENT, MAX_RECENT));
        assert_eq!((history.main_killed.len(), history.order.len()), (MAX_CONTAINERS, MAX_CONTAINERS));
        assert_eq!(history.main_killed(&"9999".into()), Some(OomConfidence::Kernel));
    }
}
