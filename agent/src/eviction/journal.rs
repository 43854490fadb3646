//! Evictions that are not finished, in the file `evictions.json`: an agent that is killed in between finishes them
//! after its restart, and the pods' statuses have the reason. An eviction is finished when the API server has the pod's end:
//! an agent that starts before would start the pod again. Entries that no longer apply to their pod are ignored.
//! Pods that are preempted by a critical one are recorded in the same way. One that is preempted and evicted, in either order,
//! keeps the first reason and the shorter grace period, as its worker does.

use std::fs;
use std::io;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use serde::Deserialize;
use serde::Serialize;

use super::message::REASON;
use super::writer::Pending;
use super::writer::Writer;
use crate::filesystem;
use crate::model::Clock;
use crate::model::PodUid;
use crate::status::TerminationReason;
use crate::sync::RecordPreemption;
use crate::sync::preemption_reason;

const NAME: &str = "evictions.json";
/// How long after its decision an agent may create containers of the pod, in nanoseconds.
const LATE_STARTS: i64 = 30_000_000_000;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Longest file that is read, bytes; the agent writes some hundred for each pod that is being ended.
const MAX_FILE: usize = 16 << 20;

/// Why a pod is ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reason {
    /// The node ran short of a resource, or the pod exceeded a limit. All entries of earlier versions.
    #[default]
    Evicted,
    /// A critical pod takes what it held.
    Preempting,
}

/// An eviction that was decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EvictionRecord {
    /// The pod.
    pub(super) uid: String,
    /// Why it is ended.
    #[serde(default)]
    pub(super) reason: Reason,
    /// Seconds that it gets to end.
    pub(super) grace: i64,
    /// For its status.
    pub(super) message: String,
    /// The pod is not at fault: its status gets the condition `DisruptionTarget`.
    pub(super) disruption: bool,
    /// When it was decided, in nanoseconds since the Unix epoch.
    #[serde(default)]
    pub(super) decided_at: i64,
    /// When an agent last knew that it is not finished; 0 if none has renewed it.
    #[serde(default)]
    pub(super) renewed_at: i64,
    /// The boot of the machine in which it was decided.
    #[serde(default)]
    pub(super) boot_id: String,
}

impl EvictionRecord {
    /// For the pod's status.
    pub(super) fn termination_reason(&self) -> TerminationReason {
        match self.reason {
            Reason::Evicted => {
                let disruption = self.disruption.then(|| self.message.clone());
                TerminationReason { reason: REASON, message: self.message.clone(), disruption }
            }
            Reason::Preempting => preemption_reason(),
        }
    }

    /// True if it was decided in this boot, and its pod may still be ending: its grace period and `period` have not passed
    /// since it was last known not to be finished. An entry from the future is not used: the clock was set.
    fn is_current(&self, boot_id: &str, now: i64, period: Duration) -> bool {
        let grace = Duration::from_secs(u64::try_from(self.grace).unwrap_or(0));
        let limit = i64::try_from(grace.saturating_add(period).as_nanos()).unwrap_or(i64::MAX);
        self.boot_id == boot_id && (0..=limit).contains(&self.age(now))
    }

    /// How long ago it was last known not to be finished, in nanoseconds; below 0 if the clock was set back since.
    fn age(&self, now: i64) -> i64 {
        now.saturating_sub(self.decided_at.max(self.renewed_at))
    }

    /// The entry of a pod that is being ended since `earlier` was decided: the reason for which it is ended stays, and its
    /// grace period only gets shorter.
    fn after(self, earlier: Self) -> Self {
        let Self { reason, message, disruption, grace, .. } = earlier;
        Self { reason, message, disruption, grace: grace.min(self.grace), ..self }
    }

    fn renew(&mut self, now: i64) {
        self.decided_at = self.decided_at.min(now);
        self.renewed_at = now;
    }

    /// True if a container of the pod was created after the decision and before this agent was started: another kubelet has
    /// continued to run the pod. The agent that decided may still have created some for a while, as the pod's worker was
    /// starting them. Creations are in nanoseconds since the Unix epoch, as `started_at`.
    pub(super) fn is_outlived(&self, created: &[i64], started_at: i64) -> bool {
        let since = self.decided_at.saturating_add(LATE_STARTS);
        created.iter().any(|created| (since..started_at).contains(created))
    }
}

/// The file with its entries. Clones share them; no lock is held across an await.
#[derive(Clone, Debug)]
pub struct Journal {
    path: PathBuf,
    /// This boot of the machine; empty if it cannot be read.
    boot_id: String,
    entries: Arc<Mutex<Entries>>,
}

#[derive(Debug)]
struct Entries {
    /// What an earlier agent has not finished.
    inherited: Vec<EvictionRecord>,
    /// Of this agent.
    own: Vec<EvictionRecord>,
    /// Started by the first change.
    writer: Option<Writer>,
}

impl Entries {
    /// An inherited entry of the pod is replaced: nothing may have been done for it yet.
    fn add(&mut self, entry: EvictionRecord) {
        let earlier = self.own.iter().find(|known| known.uid == entry.uid).cloned();
        self.take_out(&entry.uid);
        self.own.push(match earlier {
            Some(earlier) => entry.after(earlier),
            None => entry,
        });
    }

    fn take_out(&mut self, uid: &str) -> bool {
        let before = self.inherited.len() + self.own.len();
        self.inherited.retain(|known| known.uid != uid);
        self.own.retain(|known| known.uid != uid);
        self.inherited.len() + self.own.len() != before
    }

    /// See [`Journal::renew`].
    fn renew(&mut self, now: i64, age: Duration, is_awaited: impl Fn(&PodUid) -> bool) -> bool {
        let current = 0..i64::try_from(age.as_nanos()).unwrap_or(i64::MAX);
        let awaited = self.inherited.iter_mut().filter(|entry| is_awaited(&PodUid::from(entry.uid.as_str())));
        let mut has_renewed = false;
        for entry in self.own.iter_mut().chain(awaited) {
            if !current.contains(&entry.age(now)) {
                entry.renew(now);
                has_renewed = true;
            }
        }
        has_renewed
    }

    /// Has the file replaced with these entries. Returns the write that can be waited for.
    fn send(&mut self, path: &Path) -> Option<Pending> {
        let entries: Vec<&EvictionRecord> = self.inherited.iter().chain(&self.own).collect();
        match serde_json::to_vec(&entries) {
            Ok(content) => self.writer.get_or_insert_with(|| Writer::start(path)).send(content),
            Err(error) => {
                tracing::warn!(%error, "cannot encode the evictions that are not finished");
                None
            }
        }
    }
}

impl Journal {
    /// Reads the file below the agent's root directory; a missing or invalid one has no entries. Blocks.
    pub fn open(root: &Path) -> Self {
        let path = root.join(NAME);
        let inherited = read(&path).unwrap_or_else(|error| {
            let file = path.display();
            tracing::warn!(%file, %error, "cannot read the record of unfinished evictions; the next one replaces it");
            Vec::new()
        });
        let boot_id = fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned();
        let entries = Arc::new(Mutex::new(Entries { inherited, own: Vec::new(), writer: None }));
        Self { path, boot_id, entries }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        // Lists are changed by one call each: a panic elsewhere leaves them usable.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This boot of the machine.
    pub(super) fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// Evictions that an earlier agent has not finished.
    pub(super) fn inherited(&self) -> Vec<EvictionRecord> {
        self.lock().inherited.clone()
    }

    /// Evictions of this agent.
    pub(super) fn own(&self) -> Vec<EvictionRecord> {
        self.lock().own.clone()
    }

    /// Has the sync loop record here the pods that it preempts: a later agent would start them again beside the critical pod.
    pub fn record_of_preemptions(&self, clock: Clock) -> RecordPreemption {
        let journal = self.clone();
        Arc::new(move |uid: PodUid, grace: i64| {
            let journal = journal.clone();
            let entry = EvictionRecord {
                uid: uid.to_string(),
                reason: Reason::Preempting,
                grace,
                message: preemption_reason().message,
                disruption: true,
                decided_at: clock.wall_nanos(),
                renewed_at: 0,
                boot_id: journal.boot_id.clone(),
            };
            Box::pin(async move { journal.add(entry).await })
        })
    }

    /// Adds an eviction of this agent, before anything is done to the pod.
    pub(super) async fn add(&self, entry: EvictionRecord) {
        self.lock().add(entry);
        self.write().await;
    }

    /// Removes the entry of a pod.
    pub(super) async fn remove(&self, uid: &PodUid) {
        let is_removed = self.lock().take_out(uid.as_str());
        if is_removed {
            self.write().await;
        }
    }

    /// This agent has carried out an eviction of an earlier one.
    pub(super) fn take_over(&self, uid: &PodUid) {
        let Entries { inherited, own, .. } = &mut *self.lock();
        own.extend(inherited.extract_if(.., |known| known.uid == uid.as_str()));
    }

    /// Renews entries that are older than `age`, or from the future: those of this agent, and inherited ones of pods that are
    /// still awaited. None of them is finished; `now` is in nanoseconds since the Unix epoch.
    pub(super) async fn renew(&self, now: i64, age: Duration, is_awaited: impl Fn(&PodUid) -> bool) {
        let has_renewed = self.lock().renew(now, age, is_awaited);
        if has_renewed {
            self.write().await;
        }
    }

    /// Removes inherited entries of another boot, and those whose grace period and `period` have passed; `now` is in
    /// nanoseconds since the Unix epoch.
    pub(super) async fn remove_stale(&self, now: i64, period: Duration) {
        let stale = {
            let inherited = &mut self.lock().inherited;
            let before = inherited.len();
            inherited.retain(|entry| entry.is_current(&self.boot_id, now, period));
            before - inherited.len()
        };
        if stale > 0 {
            tracing::info!(stale, "ignoring outdated records of unfinished evictions; their pods stay");
            self.write().await;
        }
    }

    /// Removes all inherited entries, and returns them.
    pub(super) async fn take_inherited(&self) -> Vec<EvictionRecord> {
        let inherited = std::mem::take(&mut self.lock().inherited);
        if !inherited.is_empty() {
            self.write().await;
        }
        inherited
    }

    /// Has the file written. A disk without space, or one that blocks, costs the record, not the eviction.
    async fn write(&self) {
        let pending = self.lock().send(&self.path);
        if let Some(pending) = pending {
            pending.wait().await;
        }
    }
}

/// A missing file has no entries.
fn read(path: &Path) -> io::Result<Vec<EvictionRecord>> {
    match filesystem::read_bounded(path, MAX_FILE) {
        Ok(text) => Ok(serde_json::from_slice(&text)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt as _;

    use super::*;
    use crate::filesystem::testing::InPlace;
    use crate::filesystem::testing::in_time;

    fn entry(uid: &str) -> EvictionRecord {
        let (uid, message, boot_id) = (uid.to_owned(), "low".to_owned(), "boot".to_owned());
        let (decided_at, renewed_at) = (20 * SECOND, 0);
        let reason = Reason::Evicted;
        EvictionRecord { uid, reason, grace: 1, message, disruption: true, decided_at, renewed_at, boot_id }
    }

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn an_entry_counts_in_its_boot_and_for_a_while() {
        let period = Duration::from_secs(10);
        let current = |boot: &str, second: i64| entry("a").is_current(boot, second * SECOND, period);
        let seconds = [19, 20, 31, 32].map(|second| current("boot", second));
        assert_eq!(seconds, [false, true, true, false], "until its grace period and ten seconds have passed");
        assert!(!current("another", 20));
        let forever = EvictionRecord { grace: i64::MAX, ..entry("a") };
        assert!(forever.is_current("boot", i64::MAX, period));
        let renewed = EvictionRecord { renewed_at: 30 * SECOND, ..entry("a") };
        assert!(renewed.is_current("boot", 41 * SECOND, period) && !renewed.is_current("boot", 42 * SECOND, period));
    }

    #[test]
    fn a_container_that_another_kubelet_has_started_since_ends_an_entry() {
        let outlived = |created: &[i64]| entry("a").is_outlived(created, 90 * SECOND);
        assert!(!outlived(&[]) && !outlived(&[10 * SECOND, 20 * SECOND]), "it ran when the eviction was decided");
        assert!(!outlived(&[10 * SECOND, 49 * SECOND]), "the agent that decided was starting it");
        assert!(outlived(&[10 * SECOND, 50 * SECOND]));
        assert!(!outlived(&[10 * SECOND, 90 * SECOND]), "this agent has started it again");
        let renewed = EvictionRecord { renewed_at: 45 * SECOND, ..entry("a") };
        assert!(renewed.is_outlived(&[50 * SECOND], 90 * SECOND), "the agent that decided does not start it so late");
    }

    #[test]
    fn what_lies_in_place_of_the_file_has_no_entries_and_stays() {
        for found in InPlace::ALL {
            let dir = tempfile::tempdir().unwrap();
            let (root, file) = (dir.path().to_owned(), dir.path().join(NAME));
            found.put(&file).unwrap();
            let journal = in_time(move || Journal::open(&root)).expect("no other process is waited for");
            assert!(journal.inherited().is_empty() && found.is_at(&file), "{found:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn stale_entries_are_removed_from_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let untimed = r#"{"uid": "old", "grace": 1, "message": "low", "disruption": true}"#;
        let boot_id = Journal::open(dir.path()).boot_id().to_owned();
        let mine = EvictionRecord { boot_id, ..entry("mine") };
        let [current, another] = [&mine, &entry("of another boot")].map(|one| serde_json::to_string(one).unwrap());
        fs::write(dir.path().join(NAME), format!("[{untimed}, {current}, {another}]")).unwrap();
        let journal = Journal::open(dir.path());
        assert_eq!(journal.inherited().len(), 3, "an earlier version has written one of them");
        assert_eq!(journal.inherited()[0].termination_reason().reason, "Evicted");
        journal.remove_stale(21 * SECOND, Duration::from_secs(10)).await;
        assert_eq!(Journal::open(dir.path()).inherited(), [mine]);
    }

    #[tokio::test(start_paused = true)]
    async fn entries_that_are_not_finished_stay_current() {
        let dir = tempfile::tempdir().unwrap();
        let at = |uid: &str, second: i64| EvictionRecord { decided_at: second * SECOND, ..entry(uid) };
        let journal = Journal::open(dir.path());
        for entry in [at("awaited", 20), at("another", 20)] {
            journal.add(entry).await;
        }
        let journal = Journal::open(dir.path());
        for entry in [at("old", 20), at("new", 21), at("of the future", 31)] {
            journal.add(entry).await;
        }
        journal.renew(30 * SECOND, Duration::from_secs(10), |uid| uid.as_str() == "awaited").await;
        let renewed = |entry: EvictionRecord| EvictionRecord { renewed_at: 30 * SECOND, ..entry };
        let (awaited, another) = (renewed(at("awaited", 20)), at("another", 20));
        let own = [renewed(at("old", 20)), at("new", 21), renewed(at("of the future", 30))];
        assert_eq!((journal.inherited(), journal.own()), (vec![awaited, another], own.to_vec()));
        assert_eq!(Journal::open(dir.path()).inherited()[2..], own, "in the file too");
    }

    #[tokio::test(start_paused = true)]
    async fn entries_outlive_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path());
        for uid in ["a", "b", "a"] {
            journal.add(entry(uid)).await;
        }
        journal.remove(&"b".into()).await;
        assert!(journal.inherited().is_empty(), "they are its own");
        let next = Journal::open(dir.path());
        assert_eq!((next.inherited(), next.own()), (vec![entry("a")], Vec::new()));
        next.add(entry("c")).await;
        next.take_over(&"a".into());
        assert_eq!((next.inherited(), next.own()), (Vec::new(), vec![entry("c"), entry("a")]));
        let last = Journal::open(dir.path());
        last.add(entry("d")).await;
        assert_eq!(last.take_inherited().await, [entry("a"), entry("c")]);
        assert_eq!(Journal::open(dir.path()).inherited(), [entry("d")]);
        fs::write(dir.path().join(NAME), "{").unwrap();
        assert!(Journal::open(dir.path()).inherited().is_empty(), "a broken file");
        assert!(read(&dir.path().join("missing")).is_ok_and(|entries| entries.is_empty()));
        assert!(read(&dir.path().join(NAME)).is_err() && read(dir.path()).is_err(), "warned of, with the file's name");
        let nowhere = Journal::open(Path::new("/no/such/folder"));
        nowhere.add(entry("a")).await;
        assert_eq!(nowhere.own().len(), 1, "what cannot be written counts until the process ends");
    }

    #[tokio::test(start_paused = true)]
    async fn a_preempted_pod_is_ended_again_for_the_same_reason() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path());
        journal.record_of_preemptions(Clock::System)("web".into(), 20).await;
        let kept = Journal::open(dir.path()).inherited();
        assert_eq!(kept, journal.own(), "the eviction manager sees what the sync loop has recorded");
        assert_eq!((kept[0].uid.as_str(), kept[0].grace), ("web", 20));
        assert_eq!(kept[0].termination_reason(), preemption_reason());
        assert!(kept[0].is_current(journal.boot_id(), Clock::System.wall_nanos(), Duration::from_secs(10)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_is_preempted_and_evicted_keeps_the_first_reason_and_the_shorter_grace_period() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path());
        let preempt = journal.record_of_preemptions(Clock::System);
        preempt("preempted".into(), 20).await;
        journal.add(EvictionRecord { disruption: false, ..entry("preempted") }).await;
        journal.add(entry("evicted")).await;
        preempt("evicted".into(), 20).await;
        let next = Journal::open(dir.path());
        let kept = next.inherited();
        assert_eq!(kept.iter().map(|entry| entry.uid.as_str()).collect::<Vec<_>>(), ["preempted", "evicted"]);
        let reasons = [preemption_reason(), entry("evicted").termination_reason()];
        assert_eq!(kept.iter().map(EvictionRecord::termination_reason).collect::<Vec<_>>(), reasons);
        assert_eq!(kept.iter().map(|entry| entry.grace).collect::<Vec<_>>(), [1, 1]);
        assert!(kept[1].decided_at > entry("evicted").decided_at, "its containers may run for longer");
        next.add(entry("preempted")).await;
        assert_eq!(next.own(), [entry("preempted")], "nothing was done for the reason of an earlier agent");
    }

    /// In real time, as a call that hangs stops a paused clock: a pipe is opened for writing when it is opened for reading.
    #[tokio::test]
    async fn a_disk_that_blocks_is_not_waited_for_and_gets_the_newest_entries_later() {
        let dir = tempfile::tempdir().unwrap();
        let (file, partial) = (dir.path().join(NAME), dir.path().join("evictions.partial"));
        nix::unistd::mkfifo(&partial, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let journal = Journal::open(dir.path());
        let adding = async {
            for uid in ["a", "b", "c"] {
                journal.add(entry(uid)).await;
            }
        };
        let added = tokio::time::timeout(Duration::from_secs(20), adding).await;
        let _reader = fs::File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&partial).unwrap();
        assert!(added.is_ok(), "it waits for the disk");
        let written = async {
            while !fs::metadata(&file).is_ok_and(|found| found.is_file()) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), written).await.expect("the newest entries are written");
        assert_eq!(Journal::open(dir.path()).inherited(), [entry("a"), entry("b"), entry("c")]);
    }
}
