//! OOM kills that only counters or the runtime show: those before observing began, and all of them where neither probe nor
//! kernel log report any. Pure.

use std::collections::HashMap;

use tokio::time::Instant;

use super::sample::CountedKills;
use crate::observe::record::Confidence;
use crate::observe::record::OomRecord;
use crate::observe::record::PodName;
use crate::observe::record::Scope;
use crate::observe::record::Victim;

/// Pods whose kills are compared at most; a node runs far fewer.
const PODS: usize = 4096;
/// Measurements after which a pod that was in none of them is taken for gone, and what was recorded for it is dropped.
const MEASUREMENTS: u32 = 300;

/// Compares counters with those of the measurement before.
#[derive(Debug, Default)]
pub(super) struct KillCounts {
    pods: HashMap<String, Known>,
    /// Kills of pods that were not measured yet and that the probe or the kernel log has reported, by UID; and measurements
    /// since the first of them.
    recorded: HashMap<String, (Recorded, u32)>,
    /// Kills that were reported as earlier ones and that have no verdict yet, by UID of the pod.
    awaited: HashMap<String, Awaited>,
    /// When the reading of the counters that are compared began.
    began: Option<Instant>,
}

/// Kills by the container's id.
type Recorded = HashMap<Option<String>, u64>;

#[derive(Debug, Default)]
struct Known {
    /// It was measured.
    measured: bool,
    /// Kills counted in the pod's own cgroup.
    of_pod: u64,
    /// Kills counted in containers that exist, by id.
    of_containers: HashMap<String, u64>,
}

#[derive(Debug)]
struct Awaited {
    /// When the measurement began that reported them: a later kill is another one.
    began: Instant,
    kills: Recorded,
    /// Measurements since then.
    measurements: u32,
}

/// A container that has exited, as the runtime reports it: its name and id.
pub(super) type Dead = (String, String);

impl KillCounts {
    /// After a measurement: removes pods without a cgroup.
    pub(super) fn retain(&mut self, exists: impl Fn(&str) -> bool) {
        self.pods.retain(|uid, _| exists(uid));
        self.recorded.retain(|_, (_, measurements)| {
            *measurements += 1;
            *measurements < MEASUREMENTS
        });
        // Also those of pods that are gone: a verdict may come after that.
        self.awaited.retain(|_, awaited| {
            awaited.measurements += 1;
            awaited.measurements < MEASUREMENTS
        });
    }

    /// The runtime no longer has the pod.
    pub(super) fn removed(&mut self, uid: &str) {
        self.recorded.remove(uid);
    }

    /// Takes a kill that was reported: the first measurement of its pod contains it.
    pub(super) fn recorded(&mut self, record: &OomRecord) {
        let Some(pod) = record.pod.as_ref().filter(|pod| !self.pods.contains_key(&pod.uid)) else { return };
        if self.recorded.len() < PODS || self.recorded.contains_key(&pod.uid) {
            let (of_pod, _) = self.recorded.entry(pod.uid.clone()).or_default();
            *of_pod.entry(record.container_id.clone()).or_default() += record.kills;
        }
    }

    /// A measurement began at `at`: its counters contain every kill before.
    pub(super) fn measuring(&mut self, at: Instant) {
        self.began = Some(at);
    }

    /// Whether a kill of `at`, whose verdict comes only now, was reported as an earlier one: a verdict may wait for the
    /// inspection of a pod.
    pub(super) fn was_counted(&mut self, record: &OomRecord, at: Instant) -> bool {
        let awaited = record.pod.as_ref().and_then(|pod| self.awaited.get_mut(&pod.uid));
        let Some(awaited) = awaited.filter(|awaited| at < awaited.began) else { return false };
        // Kills of containers that were gone are reported of the pod.
        for id in [&record.container_id, &None] {
            if let Some(left) = awaited.kills.get_mut(id).filter(|left| **left > 0) {
                *left -= 1;
                return true;
            }
        }
        false
    }

    /// Takes the counters of a pod. `existed`: the pod was there before observing began; then its first counts are of
    /// earlier kills, and `dead` are its containers of which the runtime says that they were OOM-killed.
    pub(super) fn measured(&mut self, counted: &CountedKills, existed: bool, dead: &[Dead]) -> Vec<OomRecord> {
        if self.pods.len() >= PODS && !self.pods.contains_key(&counted.pod.uid) {
            return Vec::new();
        }
        let known = self.pods.entry(counted.pod.uid.clone()).or_default();
        let is_first = !std::mem::replace(&mut known.measured, true);
        let new = known.grown(counted);
        let (recorded, _) = self.recorded.remove(&counted.pod.uid).unwrap_or_default();
        if !is_first || !existed {
            return new;
        }
        let records = earlier(counted, dead, &recorded);
        self.await_verdicts(&counted.pod.uid, &records);
        records
    }

    /// Kills before observing began in a pod that has no cgroup any more: those of `dead`, as in [`Self::measured`]. If a
    /// cgroup is found later, it has counted them.
    pub(super) fn without_cgroup(&mut self, pod: &PodName, dead: &[Dead]) -> Vec<OomRecord> {
        let recorded = self.recorded.get(&pod.uid).map(|(recorded, _)| recorded);
        let records: Vec<OomRecord> = unrecorded(pod, dead, recorded).collect();
        self.await_verdicts(&pod.uid, &records);
        records.iter().for_each(|record| self.recorded(record));
        records
    }

    fn await_verdicts(&mut self, uid: &str, records: &[OomRecord]) {
        let is_known = self.awaited.contains_key(uid);
        let Some(began) = self.began.filter(|_| !records.is_empty() && (is_known || self.awaited.len() < PODS)) else {
            return;
        };
        let new = || Awaited { began, kills: Recorded::new(), measurements: 0 };
        let awaited = self.awaited.entry(uid.to_owned()).or_insert_with(new);
        (awaited.began, awaited.measurements) = (began, 0);
        for record in records {
            *awaited.kills.entry(record.container_id.clone()).or_default() += record.kills;
        }
    }
}

impl Known {
    /// Kills since the measurement before. The counter of the pod includes containers that are gone.
    fn grown(&mut self, counted: &CountedKills) -> Vec<OomRecord> {
        let mut of_containers = HashMap::new();
        let mut records = Vec::new();
        for (name, id, count) in &counted.of_containers {
            let grown = count.saturating_sub(self.of_containers.get(id).copied().unwrap_or(0));
            if grown > 0 {
                records.push(record(&counted.pod, Some((name, id)), Victim::Unknown, grown, false));
            }
            of_containers.insert(id.clone(), *count);
        }
        self.of_containers = of_containers;
        if let Some(count) = counted.of_pod {
            let reported: u64 = records.iter().map(|record| record.kills).sum();
            let grown = count.saturating_sub(std::mem::replace(&mut self.of_pod, count)).saturating_sub(reported);
            if grown > 0 {
                records.push(record(&counted.pod, None, Victim::Unknown, grown, false));
            }
        }
        records
    }
}

/// Kills before observing began: those counted in containers that exist, dead containers of the runtime, and the rest.
fn earlier(counted: &CountedKills, dead: &[Dead], recorded: &Recorded) -> Vec<OomRecord> {
    let mut records = Vec::new();
    for (name, id, count) in &counted.of_containers {
        let count = count.saturating_sub(recorded.get(&Some(id.clone())).copied().unwrap_or(0));
        if count > 0 {
            records.push(record(&counted.pod, Some((name, id)), Victim::Unknown, count, true));
        }
    }
    records.extend(unrecorded(&counted.pod, dead, Some(recorded)));
    let reported: u64 = records.iter().map(|record| record.kills).chain(recorded.values().copied()).sum();
    let rest = counted.of_pod.unwrap_or(0).saturating_sub(reported);
    if rest > 0 {
        records.push(record(&counted.pod, None, Victim::Unknown, rest, true));
    }
    records
}

/// Kills that only the runtime reports.
fn unrecorded(pod: &PodName, dead: &[Dead], recorded: Option<&Recorded>) -> impl Iterator<Item = OomRecord> {
    let is_recorded = move |id: &str| recorded.is_some_and(|recorded| recorded.contains_key(&Some(id.to_owned())));
    let left = dead.iter().filter(move |(_, id)| !is_recorded(id));
    left.map(move |(name, id)| by_runtime(pod, (name, id), true))
}

/// A kill of which the process is not known.
fn record(pod: &PodName, container: Option<(&str, &str)>, victim: Victim, kills: u64, earlier: bool) -> OomRecord {
    OomRecord {
        pod: Some(pod.clone()),
        container: container.map(|(name, _)| name.to_owned()),
        container_id: container.map(|(_, id)| id.to_owned()),
        victim,
        process: None,
        scope: Scope::Unknown,
        limit_bytes: None,
        limit_cgroup: None,
        memory: None,
        kills,
        earlier,
        confidence: Confidence::Counter,
        missing: ["process", "relation", "scope", "limit-bytes", "memory", "time"].map(str::to_owned).into(),
    }
}

/// A kill of a container's main process that only the runtime reported.
pub(super) fn by_runtime(pod: &PodName, container: (&str, &str), earlier: bool) -> OomRecord {
    OomRecord {
        confidence: Confidence::Runtime,
        missing: ["process", "scope", "limit-bytes", "memory", "time"].map(str::to_owned).into(),
        ..record(pod, Some(container), Victim::Main, 1, earlier)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kills_of(of_pod: Option<u64>, containers: &[(&str, u64)]) -> CountedKills {
        let pod = PodName { namespace: "ns".into(), name: "web".into(), uid: "u".into() };
        let of_containers = containers.iter().map(|(id, count)| ((*id).into(), (*id).into(), *count)).collect();
        CountedKills { pod, of_pod, of_containers }
    }

    fn brief(records: &[OomRecord]) -> Vec<(Option<&str>, Victim, u64)> {
        records.iter().map(|record| (record.container.as_deref(), record.victim, record.kills)).collect()
    }

    #[test]
    fn kills_before_the_start_are_reported_once() {
        let mut kills = KillCounts::default();
        let dead = [("old".to_owned(), "gone".to_owned())];
        let records = kills.measured(&kills_of(Some(6), &[("a", 2), ("b", 0)]), true, &dead);
        assert_eq!(
            brief(&records),
            [(Some("a"), Victim::Unknown, 2), (Some("old"), Victim::Main, 1), (None, Victim::Unknown, 3)]
        );
        assert!(records.iter().all(|record| record.earlier && record.confidence != Confidence::Kernel));
        for _ in 0..3 {
            assert_eq!(kills.measured(&kills_of(Some(6), &[("a", 2), ("b", 0)]), true, &dead), []);
        }
    }

    #[test]
    fn kills_that_are_recorded_during_the_start_are_reported_once() {
        let mut kills = KillCounts::default();
        let counted = kills_of(Some(6), &[("a", 2)]);
        for id in [Some("a"), Some("gone"), None] {
            let of_container = id.map(|id| ("name", id));
            kills.recorded(&record(&counted.pod, of_container, Victim::Child, 1, false));
        }
        let records = kills.measured(&counted, true, &[]);
        assert_eq!(brief(&records), [(Some("a"), Victim::Unknown, 1), (None, Victim::Unknown, 2)]);
        kills.recorded(&record(&counted.pod, None, Victim::Child, 1, false));
        assert_eq!((kills.measured(&counted, true, &[]), kills.recorded.len()), (Vec::new(), 0));
    }

    #[test]
    fn a_dead_container_whose_kill_has_a_verdict_is_reported_once() {
        let dead = [("old".to_owned(), "gone".to_owned())];
        for has_cgroup in [true, false] {
            let (mut kills, counted) = (KillCounts::default(), kills_of(Some(2), &[]));
            let verdict = record(&counted.pod, Some(("old", "gone")), Victim::Main, 1, false);
            kills.recorded(&verdict);
            let records = match has_cgroup {
                true => kills.measured(&counted, true, &dead),
                false => kills.without_cgroup(&counted.pod, &dead),
            };
            let of_pod = has_cgroup.then_some((None, Victim::Unknown, 1));
            assert_eq!(brief(&records), of_pod.into_iter().collect::<Vec<_>>(), "cgroup: {has_cgroup}");
        }
    }

    /// A verdict waits for the inspection of its pod, which may have ended meanwhile.
    #[test]
    fn verdicts_on_earlier_kills_are_not_reported_after_their_pod_has_ended() {
        let dead = [("old".to_owned(), "gone".to_owned())];
        for has_cgroup in [true, false] {
            let (mut kills, counted, before) = (KillCounts::default(), kills_of(Some(1), &[]), Instant::now());
            kills.measuring(before + std::time::Duration::from_secs(1));
            let records = match has_cgroup {
                true => kills.measured(&counted, true, &dead),
                false => kills.without_cgroup(&counted.pod, &dead),
            };
            assert_eq!(brief(&records), [(Some("old"), Victim::Main, 1)], "cgroup: {has_cgroup}");
            kills.retain(|_| false);
            kills.removed(&counted.pod.uid);
            let verdict = record(&counted.pod, Some(("old", "gone")), Victim::Main, 1, false);
            assert_eq!([(); 2].map(|()| kills.was_counted(&verdict, before)), [true, false], "cgroup: {has_cgroup}");
            (1..MEASUREMENTS).for_each(|_| kills.retain(|_| false));
            assert!(kills.awaited.is_empty());
        }
    }

    /// As the counter of a cgroup that is found after all.
    #[test]
    fn kills_of_a_pod_without_cgroup_are_not_counted_again() {
        let (mut kills, counted) = (KillCounts::default(), kills_of(Some(1), &[]));
        let dead = [("old".to_owned(), "gone".to_owned())];
        assert_eq!(kills.without_cgroup(&counted.pod, &dead).len(), 1);
        assert_eq!(kills.measured(&counted, true, &[]), []);
    }

    #[test]
    fn kills_that_are_recorded_in_a_pod_that_is_measured_late_are_reported_once() {
        let (mut kills, counted) = (KillCounts::default(), kills_of(Some(3), &[("a", 2)]));
        kills.recorded(&record(&counted.pod, Some(("name", "a")), Victim::Child, 1, false));
        // Other pods are measured meanwhile.
        kills.retain(|_| false);
        let records = kills.measured(&counted, true, &[]);
        assert_eq!(brief(&records), [(Some("a"), Victim::Unknown, 1), (None, Victim::Unknown, 1)]);
        let unmeasured = PodName { uid: "v".into(), ..counted.pod };
        kills.recorded(&record(&unmeasured, None, Victim::Child, 1, false));
        kills.removed("v");
        assert!(kills.recorded.is_empty());
    }

    #[test]
    fn verdicts_after_the_first_measurement_are_on_kills_that_it_has_reported_or_on_later_ones() {
        let (mut kills, counted) = (KillCounts::default(), kills_of(Some(2), &[("a", 1)]));
        let (before, step) = (Instant::now(), std::time::Duration::from_secs(1));
        kills.measuring(before + step);
        assert_eq!(kills.measured(&counted, true, &[]).len(), 2);
        let verdict = |id| record(&counted.pod, Some(("name", id)), Victim::Child, 1, false);
        assert!(!kills.was_counted(&verdict("a"), before + step), "not before the counters were read");
        let reported = ["a", "gone", "a", "gone"].map(|id| kills.was_counted(&verdict(id), before));
        assert_eq!(reported, [true, true, false, false], "each once");
        let other = PodName { uid: "v".into(), ..counted.pod.clone() };
        assert!(!kills.was_counted(&OomRecord { pod: Some(other), ..verdict("a") }, before));
    }

    /// The verdict on a kill may come after the runtime has removed the pod.
    #[test]
    fn kills_that_are_recorded_in_a_pod_that_is_gone_are_forgotten() {
        let (mut kills, pod) = (KillCounts::default(), kills_of(None, &[]).pod);
        kills.removed(&pod.uid);
        kills.recorded(&record(&pod, None, Victim::Child, 1, false));
        (1..MEASUREMENTS).for_each(|_| kills.retain(|_| false));
        assert_eq!(kills.recorded.len(), 1, "it may be measured late");
        kills.retain(|_| false);
        assert!(kills.recorded.is_empty());
    }

    #[test]
    fn kills_are_counted_once() {
        let mut kills = KillCounts::default();
        let records = kills.measured(&kills_of(Some(1), &[("a", 1)]), false, &[]);
        assert_eq!(brief(&records), [(Some("a"), Victim::Unknown, 1)], "the pod is new, and so are its kills");
        assert!(!records[0].earlier);
        assert_eq!(kills.measured(&kills_of(Some(1), &[("a", 1)]), false, &[]), []);
        assert_eq!(kills.measured(&kills_of(Some(1), &[]), false, &[]), [], "the container is gone, its kill is known");
    }

    #[test]
    fn a_kill_whose_container_is_gone_is_counted_in_the_pod() {
        let mut kills = KillCounts::default();
        kills.measured(&kills_of(Some(0), &[("a", 0)]), true, &[]);
        assert_eq!(brief(&kills.measured(&kills_of(Some(1), &[]), true, &[])), [(None, Victim::Unknown, 1)]);
    }

    #[test]
    fn without_counters_of_pods_those_of_containers_count() {
        let mut kills = KillCounts::default();
        kills.measured(&kills_of(None, &[("a", 4)]), true, &[]);
        let records = kills.measured(&kills_of(None, &[("a", 4), ("b", 2)]), true, &[]);
        assert_eq!(brief(&records), [(Some("b"), Victim::Unknown, 2)]);
        assert_eq!(kills.measured(&kills_of(None, &[("a", 4), ("b", 2)]), true, &[]), []);
    }

    #[test]
    fn counters_that_go_backwards_report_nothing() {
        let mut kills = KillCounts::default();
        kills.measured(&kills_of(Some(5), &[]), true, &[]);
        for _ in 0..3 {
            assert_eq!(kills.measured(&kills_of(Some(2), &[]), true, &[]), []);
        }
    }
}
