//! Compares records of kills with the counters of cgroups, so that no kill is lost with a record, and a mark of a process
//! that was exiting anyway is not taken for a kill. Pure.

use std::collections::HashMap;
use std::collections::VecDeque;

/// Cgroups with kills that are remembered.
const MAX_CGROUPS: usize = 8192;

/// OOM kills accounted for, by cgroup id.
#[derive(Debug, Default)]
pub struct KillCounters {
    counted: HashMap<u64, u64>,
    order: VecDeque<u64>,
}

/// What a counter value means for what was accounted before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterChange {
    /// The counter has not moved: the process was exiting, and was only given memory to do so.
    NotAKill,
    /// One kill more; before it, this many were not reported.
    Kill {
        /// Kills without a record.
        unreported: u64,
    },
}

impl KillCounters {
    /// The counter of a cgroup at a time without unreported kills: at its creation, or when watching it began.
    pub fn begin(&mut self, cgroup: u64, counter: u64) {
        if !self.counted.contains_key(&cgroup) {
            self.set(cgroup, counter);
        }
    }

    /// The cgroup was removed. Without this those of pods that come and go would take the places of those that stay.
    pub fn remove(&mut self, cgroup: u64) {
        let is_counted = self.counted.remove(&cgroup).is_some();
        // Most cgroups do not live long, and are near the end.
        if is_counted && let Some(place) = self.order.iter().rposition(|known| *known == cgroup) {
            self.order.remove(place);
        }
    }

    /// A record with the counter of its cgroup, which includes the kill. The first value of an unknown cgroup is a
    /// beginning: kills before it are not counted. `of_group`: the whole cgroup is killed (`memory.oom.group`); the kernel
    /// counts the process that it chose once more when it comes to it again, without a record.
    pub fn record(&mut self, cgroup: u64, counter: u64, of_group: bool) -> CounterChange {
        let known = self.counted.get(&cgroup).copied();
        // A counter that goes backwards is that of another cgroup, or the kernel's error: it begins anew.
        let before = known.filter(|before| *before <= counter).unwrap_or(counter.saturating_sub(1));
        self.set(cgroup, counter);
        if counter == before || counter == 0 {
            return CounterChange::NotAKill;
        }
        CounterChange::Kill { unreported: (counter - before - 1).saturating_sub(u64::from(of_group)) }
    }

    /// A kill whose record had no counter.
    pub fn uncounted(&mut self, cgroup: u64) {
        if let Some(counted) = self.counted.get_mut(&cgroup) {
            *counted += 1;
        }
    }

    /// The counter as it is read later; the number of kills that were not reported. For an unknown cgroup this is a
    /// beginning.
    pub fn reconcile(&mut self, cgroup: u64, counter: u64) -> u64 {
        let known = self.counted.get(&cgroup).copied();
        let unreported = known.map_or(0, |known| counter.saturating_sub(known));
        if known.is_none_or(|known| known != counter) {
            // A record that is still queued may be ahead of an older reading of the file, never behind it.
            self.set(cgroup, known.map_or(counter, |known| known.max(counter)));
        }
        unreported
    }

    fn set(&mut self, cgroup: u64, counter: u64) {
        if self.counted.insert(cgroup, counter).is_none() {
            self.order.push_back(cgroup);
        }
        while self.order.len() > MAX_CGROUPS {
            if let Some(oldest) = self.order.pop_front() {
                self.counted.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_and_counters_agree() {
        let mut counters = KillCounters::default();
        counters.begin(1, 0);
        assert_eq!(counters.record(1, 1, false), CounterChange::Kill { unreported: 0 });
        assert_eq!(counters.record(1, 2, false), CounterChange::Kill { unreported: 0 });
        assert_eq!(counters.record(1, 2, false), CounterChange::NotAKill, "the process was exiting already");
        assert_eq!(counters.reconcile(1, 2), 0);
    }

    #[test]
    fn the_chosen_process_of_a_group_is_counted_twice() {
        let mut counters = KillCounters::default();
        counters.begin(1, 0);
        assert_eq!(counters.record(1, 1, true), CounterChange::Kill { unreported: 0 }, "the chosen one");
        assert_eq!(counters.record(1, 2, true), CounterChange::Kill { unreported: 0 });
        assert_eq!(counters.record(1, 4, true), CounterChange::Kill { unreported: 0 }, "the chosen one was third");
        assert_eq!(counters.record(1, 6, true), CounterChange::Kill { unreported: 0 }, "one may be missed");
        assert_eq!(counters.record(1, 9, true), CounterChange::Kill { unreported: 1 });
    }

    #[test]
    fn lost_records_are_found_by_the_next_one_or_by_reading() {
        let mut counters = KillCounters::default();
        counters.begin(1, 0);
        assert_eq!(counters.record(1, 4, false), CounterChange::Kill { unreported: 3 });
        assert_eq!(counters.reconcile(1, 9), 5);
        assert_eq!(counters.reconcile(1, 9), 0);
        counters.uncounted(1);
        assert_eq!(counters.reconcile(1, 10), 0);
    }

    #[test]
    fn kills_before_the_first_sight_are_not_news() {
        let mut counters = KillCounters::default();
        assert_eq!(counters.reconcile(1, 7), 0);
        assert_eq!(counters.reconcile(1, 8), 1);
        assert_eq!(counters.record(2, 5, false), CounterChange::Kill { unreported: 0 });
        assert_eq!(counters.record(3, 0, false), CounterChange::NotAKill);
        counters.begin(2, 0);
        assert_eq!(counters.reconcile(2, 5), 0, "a later beginning changes nothing");
    }

    #[test]
    fn a_counter_that_goes_backwards_begins_anew() {
        let mut counters = KillCounters::default();
        counters.begin(1, 100);
        assert_eq!(counters.record(1, 1, false), CounterChange::Kill { unreported: 0 });
        assert_eq!(counters.record(1, 2, false), CounterChange::Kill { unreported: 0 });
        assert_eq!(counters.reconcile(1, 1), 0, "an older reading");
        assert_eq!(counters.reconcile(1, 3), 1);
    }

    #[test]
    fn cgroups_that_come_and_go_do_not_replace_those_that_stay() {
        let mut counters = KillCounters::default();
        counters.begin(0, 3);
        for cgroup in 1..2 * MAX_CGROUPS as u64 {
            counters.begin(cgroup, 0);
            counters.remove(cgroup);
        }
        assert_eq!(counters.record(0, 3, false), CounterChange::NotAKill, "the process was exiting already");
        assert_eq!(counters.reconcile(0, 5), 2);
        counters.remove(0);
        assert_eq!((counters.counted.len(), counters.order.len()), (0, 0));
    }

    #[test]
    fn is_bounded() {
        let mut counters = KillCounters::default();
        for cgroup in 0..3 * MAX_CGROUPS as u64 {
            counters.begin(cgroup, 1);
            counters.record(cgroup, 2, false);
        }
        assert_eq!((counters.counted.len(), counters.order.len()), (MAX_CGROUPS, MAX_CGROUPS));
    }
}
