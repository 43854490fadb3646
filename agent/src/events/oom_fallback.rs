//! OOM kills without the probe: the kernel log, and the counters of cgroups for what it leaves out.
//!
//! The log names process, cgroup and limit, except while kills are frequent; counters name the cgroup only, as long as it
//! exists.

use std::collections::HashSet;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use nix::time::ClockId;
use tokio::sync::mpsc;
use tokio::task::JoinError;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::Hint;
use super::oom::OomSource;
use super::oom::kills_of;
use super::sensors::Sensor;
use super::sensors::SensorState;
use super::sensors::SensorStates;
use crate::cgroups::CgroupId;
use crate::cgroups::Hierarchy;
use crate::kernel::index::ContainerIndex;
use crate::kernel::index::place_of;
use crate::kernel::kmsg::KernelLog;
use crate::kernel::oom_log::GROUP_PAUSE;
use crate::kernel::oom_log::OomLogEntry;
use crate::kernel::oom_log::OomLogParser;
use crate::model::KernelMoment;
use crate::model::OomRecord;

/// How often counters are read: nothing announces them.
const PERIOD: Duration = Duration::from_secs(10);
/// How long after it was written a line of the log is read at the latest.
const LONGEST_DELAY: Duration = Duration::from_secs(10);

/// Where OOM kills are looked for.
#[derive(Clone, Debug)]
pub struct FallbackOptions {
    /// The cgroup of all pods in the watched hierarchy.
    pub cgroup_root: String,
    /// The kernel log.
    pub log: PathBuf,
}

/// Forwards OOM kills from now on until `shutdown`, by the future, which is to be run in a task. Reads the counters of all
/// containers first, which the kernel answers from memory.
pub fn start(
    options: FallbackOptions,
    hierarchy: Hierarchy,
    hints: mpsc::Sender<Hint>,
    sensor_states: &SensorStates,
    shutdown: CancellationToken,
) -> impl Future<Output = ()> + Send + use<> {
    let log = Log { open: open(&options.log, sensor_states), path: options.log };
    let mut fallback = Fallback::new(hierarchy, options.cgroup_root);
    fallback.begin();
    let sensor_states = sensor_states.clone();
    async move {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = fallback.follow(log, hints, sensor_states) => {}
        }
    }
}

struct Log {
    path: PathBuf,
    /// Nothing while it cannot be read.
    open: Option<KernelLog>,
}

/// The log, and the state of its sensor.
fn open(path: &Path, sensor_states: &SensorStates) -> Option<KernelLog> {
    match KernelLog::open(path) {
        Ok(log) => {
            sensor_states.set(Sensor::KernelLog, SensorState::Up);
            Some(log)
        }
        Err(error) => {
            sensor_states.set(Sensor::KernelLog, SensorState::Down(format!("{}: {error}", path.display())));
            None
        }
    }
}

/// The cgroups of pods, and what they have counted.
struct Reading {
    found: Vec<(CgroupId, String)>,
    /// Kills in containers.
    counters: Vec<(CgroupId, u64)>,
}

/// Reads the counters of all containers. Blocks.
fn read(hierarchy: &Hierarchy, root: &str) -> Reading {
    let found = walk(hierarchy, root);
    let containers = found.iter().filter(|(_, path)| place_of(path).container.is_some());
    let counters = containers.filter_map(|(id, path)| Some((*id, kills_of(hierarchy, path)?))).collect();
    Reading { found, counters }
}

/// The cgroups of pods, with that of all of them. Blocks.
fn walk(hierarchy: &Hierarchy, root: &str) -> Vec<(CgroupId, String)> {
    let root = hierarchy.id_of(root).ok().map(|id| (id, root.to_owned()));
    let mut found: Vec<(CgroupId, String)> = root.into_iter().collect();
    let mut at = 0;
    while let Some((_, path)) = found.get(at).cloned() {
        found.extend(hierarchy.children(&path));
        at += 1;
    }
    found
}

struct Fallback {
    source: OomSource,
    index: ContainerIndex,
    known: HashSet<CgroupId>,
    /// Those in the log that no reading has found, and that are younger than the beginning of the last reading.
    young: HashSet<CgroupId>,
    /// Those that were young when it began: it finds them, unless they are gone.
    awaited: HashSet<CgroupId>,
    parser: OomLogParser,
    /// When the kill that the parser holds is reported without a further line.
    release: Option<Instant>,
    hierarchy: Hierarchy,
    root: String,
}

impl Fallback {
    fn new(hierarchy: Hierarchy, root: String) -> Self {
        Self {
            source: OomSource::new(hierarchy.clone()),
            index: ContainerIndex::new(),
            known: HashSet::new(),
            young: HashSet::new(),
            awaited: HashSet::new(),
            parser: OomLogParser::default(),
            release: None,
            hierarchy,
            root,
        }
    }

    /// Kills before it are not reported. Blocks.
    fn begin(&mut self) {
        self.found(walk(&self.hierarchy, &self.root));
        self.source.begin(&self.index);
    }

    async fn follow(mut self, mut log: Log, hints: mpsc::Sender<Hint>, sensor_states: SensorStates) {
        let mut ticks = tokio::time::interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        let mut reading = None;
        loop {
            let release = self.release;
            let records: Vec<OomRecord> = tokio::select! {
                // Lines first: the counters that are read contain their kills.
                biased;
                line = next(&mut log.open) => match line {
                    Ok(line) => self.on_line(&line).into_iter().collect(),
                    Err(error) => {
                        sensor_states.set(Sensor::KernelLog, SensorState::Down(error.to_string()));
                        log.open = None;
                        continue;
                    }
                },
                () = tokio::time::sleep_until(release.unwrap_or_else(Instant::now)), if release.is_some() => {
                    self.release().into_iter().collect()
                }
                done = ended(&mut reading) => {
                    reading = None;
                    // A panic in it is logged; the next one counts what it would have.
                    done.map(|done| self.on_reading(done)).unwrap_or_default()
                }
                _ = ticks.tick() => {
                    // It may have failed for lack of memory or descriptors. Kills since then are counted.
                    log.open = log.open.or_else(|| open(&log.path, &sensor_states));
                    reading.get_or_insert_with(|| {
                        self.reading_begins();
                        let (hierarchy, root) = (self.hierarchy.clone(), self.root.clone());
                        tokio::task::spawn_blocking(move || read(&hierarchy, &root))
                    });
                    continue;
                }
            };
            for record in records {
                if hints.send(Hint::Oom(Box::new(record))).await.is_err() {
                    return;
                }
            }
        }
    }

    fn on_line(&mut self, line: &str) -> Option<OomRecord> {
        let entry = self.parser.record(line, |pid| self.source.cgroup_of(pid));
        if entry.is_some() {
            self.release = None;
        }
        if self.parser.is_holding() {
            self.release.get_or_insert_with(|| Instant::now() + GROUP_PAUSE);
        }
        self.on_entry(entry?)
    }

    /// No line has followed the last kill.
    fn release(&mut self) -> Option<OomRecord> {
        self.release = None;
        let entry = self.parser.release()?;
        self.on_entry(entry)
    }

    fn on_entry(&mut self, entry: OomLogEntry) -> Option<OomRecord> {
        let id = entry.cgroup.as_deref().and_then(|path| self.source.id_in_log(path));
        if let Some(id) = id.filter(|id| !self.known.contains(id)) {
            // The next reading would take this kill for one that the log does not contain.
            self.source.created(id);
            self.young.insert(id);
        }
        let moment = just_read(moment(entry.at_micros), Instant::now());
        self.source.on_log(entry, moment)
    }

    /// What the log names from now on may be younger than what the reading finds.
    fn reading_begins(&mut self) {
        self.awaited.extend(self.young.drain());
    }

    /// Kills that the log does not contain.
    fn on_reading(&mut self, reading: Reading) -> Vec<OomRecord> {
        // The counters contain the last one of the log, which must not be reported twice.
        let mut records: Vec<OomRecord> = self.release().into_iter().collect();
        for id in self.found(reading.found) {
            self.source.created(id);
        }
        for gone in self.awaited.drain().filter(|id| !self.known.contains(id)) {
            self.source.removed(gone);
        }
        records.extend(self.source.reconcile(&self.index, reading.counters));
        records
    }

    /// Brings the index up to date; returns the new cgroups.
    fn found(&mut self, found: Vec<(CgroupId, String)>) -> Vec<CgroupId> {
        let present: HashSet<CgroupId> = found.iter().map(|(id, _)| *id).collect();
        for id in self.known.difference(&present) {
            self.index.cgroup_removed(*id);
            self.source.removed(*id);
        }
        let new: Vec<_> = found.into_iter().filter(|(id, _)| !self.known.contains(id)).collect();
        new.iter().for_each(|(id, path)| self.index.cgroup_created(*id, None, path));
        self.known = present;
        new.into_iter().map(|(id, _)| id).collect()
    }
}

/// The next record of the log; never without one.
async fn next(log: &mut Option<KernelLog>) -> std::io::Result<String> {
    match log {
        Some(log) => log.next().await,
        None => std::future::pending().await,
    }
}

/// What was read; never without a reading.
async fn ended(reading: &mut Option<JoinHandle<Reading>>) -> Result<Reading, JoinError> {
    match reading {
        Some(reading) => reading.await,
        None => std::future::pending().await,
    }
}

/// The time of a line that was read now. One that seems to be old was written now: the clock of the log has drifted.
fn just_read(moment: KernelMoment, now: Instant) -> KernelMoment {
    if moment.age(now) > LONGEST_DELAY { KernelMoment(now) } else { moment }
}

/// A time of the log, whose clock starts with the monotonic one and, unlike that, is not adjusted: after weeks they may be
/// minutes apart.
pub(super) fn moment(at_micros: u64) -> KernelMoment {
    let now = Instant::now();
    let since_boot = nix::time::clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    let age = since_boot.saturating_sub(Duration::from_micros(at_micros));
    KernelMoment(now.checked_sub(age).unwrap_or(now))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroups::HierarchyKind;
    use crate::model::OomConfidence;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    /// The lines of a kill in the container.
    fn lines(pid: u32) -> [String; 2] {
        let path = format!("/kubepods/poduid/{ID}");
        let chosen =
            format!("constraint=CONSTRAINT_MEMCG,oom_memcg={path},task_memcg={path},task=hungry,pid={pid},uid=0");
        let killed = format!("Memory cgroup out of memory: Killed process {pid} (hungry) total-vm:9kB, anon-rss:1kB, ");
        [format!("6,1,1000,-;oom-kill:{chosen}"), format!("3,2,1001,-;{killed}file-rss:2kB, shmem-rss:3kB, UID:0")]
    }

    /// A v2 hierarchy with one container that counts its kills.
    fn node(folder: &std::path::Path) -> (Fallback, impl Fn(u64)) {
        let container = folder.join(format!("kubepods/poduid/{ID}"));
        std::fs::create_dir_all(&container).unwrap();
        let count = move |kills: u64| {
            std::fs::write(container.join("memory.events.local"), format!("oom_kill {kills}\n")).unwrap();
        };
        count(0);
        let hierarchy =
            Hierarchy { kind: HierarchyKind::Unified, number: 0, mount: folder.to_owned(), root: "/".to_owned() };
        let mut fallback = Fallback::new(hierarchy, "/kubepods".to_owned());
        fallback.begin();
        (fallback, count)
    }

    #[tokio::test]
    async fn a_clock_of_the_log_that_has_drifted_makes_no_kill_old() {
        let folder = tempfile::tempdir().unwrap();
        let (mut fallback, _) = node(folder.path());
        assert!(lines(41).iter().all(|line| fallback.on_line(line).is_none()));
        let record = fallback.release().expect("a kill");
        assert!(record.moment.age(Instant::now()) < LONGEST_DELAY, "its time is a millisecond after the boot");
        let now = Instant::now() + Duration::from_secs(1000);
        for (age, expected) in [(0, 0), (8, 8), (10, 10), (11, 0), (300, 0)] {
            let moment = KernelMoment(now - Duration::from_secs(age));
            assert_eq!(just_read(moment, now).age(now), Duration::from_secs(expected), "{age}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_log_that_could_not_be_opened_is_opened_later() {
        let folder = tempfile::tempdir().unwrap();
        let hierarchy = node(folder.path()).0.hierarchy;
        let path = folder.path().join("log");
        let options = FallbackOptions { cgroup_root: "/kubepods".to_owned(), log: path.clone() };
        let ((hints, _hinted), sensor_states) = (mpsc::channel(1), SensorStates::default());
        let following = start(options, hierarchy, hints, &sensor_states, CancellationToken::new());
        assert!(matches!(sensor_states.get(Sensor::KernelLog), Some(SensorState::Down(_))));
        // Like the log it is there on every machine, and can be waited for.
        std::os::unix::fs::symlink("/proc/sys/kernel/hostname", path).unwrap();
        let mut changes = sensor_states.subscribe();
        tokio::spawn(following);
        tokio::time::timeout(2 * PERIOD, changes.changed()).await.expect("in time").expect("it runs");
        assert_eq!(sensor_states.get(Sensor::KernelLog), Some(SensorState::Up));
    }

    #[tokio::test]
    async fn a_kill_in_a_new_container_is_reported_once() {
        let folder = tempfile::tempdir().unwrap();
        let (known, count) = node(folder.path());
        let mut fallback = Fallback::new(known.hierarchy, known.root);
        count(1);
        assert!(lines(41).iter().all(|line| fallback.on_line(line).is_none()));
        for (kills, expected) in [(1, vec![Some(41)]), (1, vec![]), (3, vec![None, None])] {
            count(kills);
            let reading = read(&fallback.hierarchy, &fallback.root);
            let records = fallback.on_reading(reading).into_iter().map(|record| record.pid);
            assert_eq!(records.collect::<Vec<_>>(), expected, "{kills}");
        }
    }

    #[tokio::test]
    async fn a_kill_in_a_container_that_starts_during_a_reading_is_reported_once() {
        let folder = tempfile::tempdir().unwrap();
        let (known, count) = node(folder.path());
        let mut fallback = Fallback::new(known.hierarchy, known.root);
        count(1);
        fallback.reading_begins();
        let earlier = || Reading { found: Vec::new(), counters: Vec::new() };
        assert!(lines(41).iter().all(|line| fallback.on_line(line).is_none()));
        assert_eq!(fallback.on_reading(earlier()).len(), 1, "of the log");
        fallback.reading_begins();
        let reading = read(&fallback.hierarchy, &fallback.root);
        assert_eq!(fallback.on_reading(reading), [], "its counter contains that kill");
        assert!(fallback.young.is_empty() && fallback.awaited.is_empty());
    }

    #[tokio::test]
    async fn a_container_that_is_gone_before_it_is_found_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (known, _) = node(folder.path());
        let mut fallback = Fallback::new(known.hierarchy, known.root);
        assert!(lines(41).iter().all(|line| fallback.on_line(line).is_none()));
        assert!(fallback.release().is_some());
        assert_eq!(fallback.young.len(), 1);
        std::fs::remove_dir_all(folder.path().join("kubepods")).unwrap();
        fallback.reading_begins();
        let reading = read(&fallback.hierarchy, &fallback.root);
        assert_eq!(fallback.on_reading(reading), []);
        assert!(fallback.young.is_empty() && fallback.awaited.is_empty());
    }

    #[test]
    fn the_log_is_followed_while_counters_are_read() {
        // One thread for file calls, which is busy.
        let mut builder = tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_all().start_paused(true).max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let (fallback, count) = node(folder.path());
            let (release, released) = std::sync::mpsc::channel::<()>();
            let busy = tokio::task::spawn_blocking(move || released.recv());
            let ((hints, mut hinted), log) = (mpsc::channel(1), Log { path: folder.path().join("log"), open: None });
            tokio::spawn(fallback.follow(log, hints, SensorStates::default()));
            tokio::task::yield_now().await;
            count(1);
            tokio::time::advance(PERIOD + Duration::from_millis(1)).await;
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            assert!(hinted.try_recv().is_err(), "the thread of everything else has read them");
            drop(release);
            busy.await.unwrap().unwrap_err();
            assert!(matches!(hinted.recv().await, Some(Hint::Oom(_))));
        });
    }

    #[tokio::test]
    async fn the_last_kill_of_the_log_waits_for_no_further_line() {
        let folder = tempfile::tempdir().unwrap();
        let (mut fallback, count) = node(folder.path());
        let (first, second) = (lines(41), lines(42));
        assert!(first.iter().all(|line| fallback.on_line(line).is_none()));
        assert!(fallback.release.is_some_and(|due| due <= Instant::now() + GROUP_PAUSE));
        assert_eq!(fallback.on_line(&second[0]).and_then(|record| record.pid), Some(41));
        assert_eq!(fallback.release, None);
        assert_eq!(fallback.on_line(&second[1]), None);
        assert!(fallback.release.is_some());
        count(3);
        let reading = read(&fallback.hierarchy, &fallback.root);
        let records = fallback.on_reading(reading).into_iter().map(|record| (record.source, record.pid));
        let records: Vec<_> = records.collect();
        assert_eq!(records, [(OomConfidence::Log, Some(42)), (OomConfidence::Counter, None)], "each kill once");
        assert_eq!((fallback.release, fallback.release()), (None, None));
    }
}
