//! Sizes of volumes, at bounded cost: counting the files of a volume takes as long as it has many, so after each round the
//! walker rests for much longer than it worked. Nothing is counted without a request.
//!
//! The folders of a round take turns. One that is not counted when its turn ends is counted on in its next turn, in this round
//! or a later one; until then what was found of it is known.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::FsUsage;
use super::durations::Durations;
use crate::kernel::usage::TreeWalk;
use crate::metrics::MetricSource;
use crate::model::PodUid;

/// How long one round may work.
const ROUND: Duration = Duration::from_secs(1);
/// How long one folder may be counted while others wait.
const TURN: Duration = Duration::from_millis(250);
/// How long the end of a turn is waited for: a file system may hang.
const TURN_TIMEOUT: Duration = Duration::from_secs(2);
/// The rest after a round, as a multiple of its work: 2 % of a processor at most.
const REST: u32 = 50;
/// The shortest rest.
const SHORTEST_REST: Duration = Duration::from_secs(10);
/// Results that were not requested during this time are dropped.
const KEPT: Duration = Duration::from_secs(600);
/// Walks that are kept between turns. Beyond, a folder that takes several turns begins anew until another one is counted.
const MOST_UNFINISHED: usize = 8;
/// Files with several links that a walk may remember, in 1.2 MB. Of the walks that are kept one may remember more: a million
/// files take 19 MB.
const FEW_LINKED: usize = 100_000;
/// Turns that hang, each of which keeps a thread, before no other one begins.
const MOST_HANGING: usize = 2;

/// How long one folder may be counted without a pause.
const AT_ONCE: Duration = Duration::from_secs(600);

/// A folder to be counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder {
    /// Of its pod.
    pub uid: PodUid,
    /// The volume's name.
    pub volume: String,
    /// Where it is.
    pub path: PathBuf,
    /// The project of its file system that counts its files and no others.
    pub project: Option<u32>,
}

impl Folder {
    fn key(&self) -> Key {
        (self.uid.clone(), self.volume.clone())
    }
}

/// When a folder is counted again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recount {
    /// Now, also while the walker rests.
    Now,
    /// If the walker does not rest, and the last count is at least so old.
    After(Duration),
}

/// Sizes of folders by pod: the volume's name, and its size.
pub type Sizes = HashMap<PodUid, Vec<(String, FsUsage)>>;

/// The pod, and the volume's name.
type Key = (PodUid, String);
/// A walk at the end of a turn, and whether it is complete.
type Turn = (Walk, bool);

/// A walk through a folder.
#[derive(Debug)]
struct Walk {
    tree: TreeWalk,
    /// How long it has worked, in all turns.
    took: Duration,
}

impl Walk {
    fn new(folder: PathBuf) -> Self {
        Self { tree: TreeWalk::new(folder), took: Duration::ZERO }
    }

    /// Counts on for so long. True if everything is counted.
    fn advance(&mut self, limit: Duration) -> bool {
        let began = std::time::Instant::now();
        let is_complete = self.tree.advance(|| began.elapsed() < limit);
        self.took += began.elapsed();
        is_complete
    }

    fn used(&self) -> FsUsage {
        let usage = self.tree.usage();
        FsUsage { bytes: usage.bytes, inodes: usage.inodes }
    }
}

/// What is known of a folder.
#[derive(Debug)]
struct Counted {
    /// The last count, and when it was complete.
    complete: Option<(Instant, FsUsage)>,
    /// What a later walk has found so far.
    part: FsUsage,
    /// That walk.
    walk: Option<Walk>,
    /// When its last turn ended.
    turn: Instant,
    asked: Instant,
}

impl Counted {
    /// The folder has, or had when it was last counted, at least this size.
    fn used(&self) -> FsUsage {
        let complete = self.complete.map(|(_, used)| used).unwrap_or_default();
        FsUsage { bytes: complete.bytes.max(self.part.bytes), inodes: complete.inodes.max(self.part.inodes) }
    }

    fn is_wanted(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.asked) < KEPT
    }

    /// The walk to go on with; what one has found that was no longer requested is too old to be added to.
    fn take_walk(&mut self) -> Option<Walk> {
        let is_wanted = self.is_wanted(Instant::now());
        self.walk.take().filter(|_| is_wanted)
    }

    fn is_due(&self, now: Instant, age: Duration) -> bool {
        let is_old = |(at, _): (Instant, FsUsage)| now.saturating_duration_since(at) >= age;
        self.walk.is_some() || self.complete.is_none_or(is_old)
    }
}

/// Counts folders and keeps the results.
#[derive(Debug, Default)]
pub(super) struct Walks(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    known: HashMap<Key, Counted>,
    /// Turns that have not ended: one that hangs, or whose request was cancelled.
    running: HashMap<Key, JoinHandle<Turn>>,
    rest_until: Option<Instant>,
    limits: Limits,
    durations: Durations,
}

/// How long a round and a turn may take, and how many files all walks but one may remember.
#[derive(Clone, Copy, Debug)]
struct Limits {
    round: Duration,
    turn: Duration,
    few_linked: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { round: ROUND, turn: TURN, few_linked: FEW_LINKED }
    }
}

impl Walks {
    pub(super) fn new(durations: Durations) -> Self {
        Self(Mutex::new(State { durations, ..State::default() }))
    }

    /// Sizes of these folders by pod and volume; those that were not counted yet are absent. Counts those that are due, that
    /// whose last turn is longest ago first. If cancelled, a turn that runs goes on.
    pub(super) async fn sizes(&self, folders: Vec<Folder>, recount: Recount) -> Sizes {
        let mut state = self.0.lock().await;
        let wanted: Vec<Key> = folders.iter().map(Folder::key).collect();
        state.count(folders, recount).await;
        state.sizes(wanted)
    }
}

impl State {
    fn sizes(&mut self, wanted: Vec<Key>) -> Sizes {
        let now = Instant::now();
        let mut sizes = Sizes::new();
        for key in wanted {
            if let Some(counted) = self.known.get_mut(&key) {
                counted.asked = now;
                sizes.entry(key.0).or_default().push((key.1, counted.used()));
            }
        }
        self.known.retain(|_, counted| counted.is_wanted(now));
        sizes
    }

    async fn count(&mut self, folders: Vec<Folder>, recount: Recount) {
        self.note_ended().await;
        let mut waiting = self.due(folders, recount);
        let began = std::time::Instant::now();
        while self.running.len() < MOST_HANGING {
            let Some(folder) = waiting.pop_front() else { break };
            let left = self.limits.round.saturating_sub(began.elapsed());
            let goes_on = self.turn(&folder, left.min(self.limits.turn)).await;
            // After every turn, since the request may be cancelled in the next.
            self.rest_until = Some(Instant::now() + (began.elapsed() * REST).max(SHORTEST_REST));
            if began.elapsed() >= self.limits.round {
                break;
            }
            if goes_on {
                waiting.push_back(folder);
            }
        }
    }

    /// Folders that are to be counted, in the order of their turns.
    fn due(&self, folders: Vec<Folder>, recount: Recount) -> VecDeque<Folder> {
        let now = Instant::now();
        let rests = self.rest_until.is_some_and(|until| now < until);
        let is_due = |counted: Option<&Counted>| match recount {
            Recount::Now => true,
            Recount::After(age) => !rests && counted.is_none_or(|counted| counted.is_due(now, age)),
        };
        let mut due: Vec<(Option<Instant>, Folder)> = Vec::new();
        for folder in folders {
            let key = folder.key();
            let counted = self.known.get(&key);
            if is_due(counted) && !self.running.contains_key(&key) {
                due.push((counted.map(|counted| counted.turn), folder));
            }
        }
        due.sort_by_key(|(turn, _)| *turn);
        due.into_iter().map(|(_, folder)| folder).collect()
    }

    /// One turn of a folder. True if it is to have another one.
    async fn turn(&mut self, folder: &Folder, limit: Duration) -> bool {
        let key = folder.key();
        let begun = self.known.get_mut(&key).and_then(Counted::take_walk);
        let mut walk = begun.unwrap_or_else(|| Walk::new(folder.path.clone()));
        let walking = tokio::task::spawn_blocking(move || {
            let is_complete = walk.advance(limit);
            (walk, is_complete)
        });
        self.running.insert(key.clone(), walking);
        self.end_turn(key).await
    }

    /// Waits for the end of a turn. True if the folder is to have another one.
    async fn end_turn(&mut self, key: Key) -> bool {
        let Some(walking) = self.running.get_mut(&key) else { return false };
        // One that hangs keeps its thread, and nothing of the others is lost.
        let Ok(ended) = tokio::time::timeout(TURN_TIMEOUT, walking).await else { return false };
        self.running.remove(&key);
        // The agent is shutting down.
        let Ok(turn) = ended else { return false };
        self.note(key, turn)
    }

    /// Notes turns that have ended after their wait had timed out.
    async fn note_ended(&mut self) {
        let ended = self.running.iter().filter(|(_, walking)| walking.is_finished());
        let ended: Vec<Key> = ended.map(|(key, _)| key.clone()).collect();
        for key in ended {
            self.end_turn(key).await;
        }
    }

    /// Notes what was found. True if the walk goes on.
    fn note(&mut self, key: Key, (walk, is_complete): Turn) -> bool {
        let (now, used) = (Instant::now(), walk.used());
        let is_kept = self.has_room(&walk);
        let new = || Counted { complete: None, part: FsUsage::default(), walk: None, turn: now, asked: now };
        let counted = self.known.entry(key).or_insert_with(new);
        counted.turn = now;
        if is_complete {
            counted.complete = Some((now, used));
            counted.part = FsUsage::default();
            self.durations.observe(MetricSource::Walk, walk.took);
            return false;
        }
        counted.part = used;
        counted.walk = is_kept.then_some(walk);
        is_kept
    }

    /// True if there is memory to keep a walk until its next turn.
    fn has_room(&self, walk: &Walk) -> bool {
        let is_large = |walk: &Walk| walk.tree.remembered() > self.limits.few_linked;
        let kept: Vec<&Walk> = self.known.values().filter_map(|counted| counted.walk.as_ref()).collect();
        kept.len() < MOST_UNFINISHED && !(is_large(walk) && kept.iter().any(|kept| is_large(kept)))
    }
}

/// Sizes of folders, each counted without a pause; one that takes too long, or hangs, is absent.
pub(super) async fn counted_at_once(folders: Vec<Folder>, durations: &Durations) -> Sizes {
    let mut sizes = Sizes::new();
    for Folder { uid, volume, path, .. } in folders {
        let walking = tokio::task::spawn_blocking(move || {
            let mut walk = Walk::new(path);
            walk.advance(AT_ONCE).then_some(walk)
        });
        if let Ok(Ok(Some(walk))) = tokio::time::timeout(AT_ONCE + TURN_TIMEOUT, walking).await {
            durations.observe(MetricSource::Walk, walk.took);
            sizes.entry(uid).or_default().push((volume, walk.used()));
        }
    }
    sizes
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::metrics::Metrics;

    #[tokio::test(start_paused = true)]
    async fn folders_are_counted_again_after_a_rest_and_their_period() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |volume: &str| Folder {
            uid: "u".into(),
            volume: volume.to_owned(),
            path: dir.path().to_owned(),
            project: None,
        };
        let walks = Walks::default();
        let inodes = async |volume: &str, recount| {
            let sizes = walks.sizes(vec![folder(volume)], recount).await;
            sizes.get(&PodUid::from("u")).map(|of_pod| of_pod[0].1.inodes)
        };
        let minute = Recount::After(Duration::from_secs(60));
        assert_eq!(inodes("v", minute).await, Some(1));
        std::fs::write(dir.path().join("file"), "x").unwrap();
        assert_eq!(inodes("v", minute).await, Some(1), "the walker rests");
        assert_eq!(inodes("other", minute).await, None, "it was not counted yet");
        assert_eq!(inodes("v", Recount::Now).await, Some(2));
        std::fs::write(dir.path().join("more"), "x").unwrap();
        tokio::time::advance(Duration::from_secs(55)).await;
        assert_eq!(inodes("v", minute).await, Some(2), "it was counted less than a minute ago");
        assert_eq!(inodes("other", minute).await, Some(3), "the walker has rested");
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(inodes("v", minute).await, Some(3));
        tokio::time::advance(KEPT).await;
        assert!(walks.sizes(Vec::new(), minute).await.is_empty());
        assert!(walks.0.lock().await.known.is_empty(), "results without requests are dropped");
    }

    /// A round is one turn, and a turn counts 64 entries. Few files with several links are ten.
    fn impatient() -> Walks {
        let limits = Limits { round: Duration::ZERO, turn: Duration::ZERO, few_linked: 10 };
        Walks(Mutex::new(State { limits, ..State::default() }))
    }

    fn filled(dir: &Path, volume: &str, files: usize) -> Folder {
        let path = dir.join(volume);
        std::fs::create_dir_all(&path).unwrap();
        (0..files).for_each(|number| std::fs::write(path.join(number.to_string()), "").unwrap());
        Folder { uid: "u".into(), volume: volume.to_owned(), path, project: None }
    }

    fn inodes(sizes: &Sizes, volume: &str) -> Option<u64> {
        let of_pod = sizes.get(&PodUid::from("u"))?;
        of_pod.iter().find(|(name, _)| name == volume).map(|(_, used)| used.inodes)
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_folder_is_counted_in_several_rounds_and_delays_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let folders = [filled(dir.path(), "large", 200), filled(dir.path(), "small", 0)];
        let walks = impatient();
        let round = async || {
            tokio::time::advance(KEPT / 2).await;
            let sizes = walks.sizes(folders.to_vec(), Recount::After(Duration::ZERO)).await;
            (inodes(&sizes, "large"), inodes(&sizes, "small"))
        };
        assert_eq!(round().await, (Some(65), None));
        assert_eq!(round().await, (Some(65), Some(1)));
        assert_eq!(round().await, (Some(129), Some(1)));
        assert_eq!(round().await, (Some(129), Some(1)), "the small one was counted again");
        assert_eq!(round().await, (Some(193), Some(1)));
        round().await;
        assert_eq!(round().await, (Some(201), Some(1)));
        filled(dir.path(), "small", 100);
        assert_eq!(round().await, (Some(201), Some(65)), "more than the last count");
        assert_eq!(round().await, (Some(201), Some(65)), "less than the last count");
        let part = walks.0.lock().await.known[&folders[0].key()].part;
        assert_eq!(part.inodes, 65, "it is counted again");
    }

    #[tokio::test]
    async fn a_count_without_a_pause_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let (folders, metrics) =
            (vec![filled(dir.path(), "large", 200), filled(dir.path(), "small", 0)], Metrics::new());
        let sizes = counted_at_once(folders, &Durations::new(metrics.clone())).await;
        assert_eq!((inodes(&sizes, "large"), inodes(&sizes, "small")), (Some(201), Some(1)));
        assert!(metrics.render().unwrap().contains(&timed(2)));
    }

    /// So many walks were timed.
    fn timed(walks: u32) -> String {
        format!("kubelet_volume_metric_collection_duration_seconds_count{{metric_source=\"du\"}} {walks}\n")
    }

    #[tokio::test(start_paused = true)]
    async fn a_count_in_several_turns_is_timed_once() {
        let dir = tempfile::tempdir().unwrap();
        let (folder, walks, metrics) = (filled(dir.path(), "large", 200), impatient(), Metrics::new());
        walks.0.lock().await.durations = Durations::new(metrics.clone());
        let mut rounds = 0;
        while !metrics.render().unwrap().contains(&timed(1)) {
            tokio::time::advance(KEPT / 2).await;
            walks.sizes(vec![folder.clone()], Recount::After(KEPT * 100)).await;
            rounds += 1;
        }
        assert_eq!(rounds, 4, "64 entries in each of the first three");
    }

    #[tokio::test(start_paused = true)]
    async fn few_walks_are_kept_and_every_folder_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let folders: Vec<Folder> =
            (0..MOST_UNFINISHED + 2).map(|number| filled(dir.path(), &number.to_string(), 100)).collect();
        let walks = impatient();
        for _ in 0..2 * folders.len() + 2 {
            tokio::time::advance(KEPT / 2).await;
            walks.sizes(folders.clone(), Recount::After(KEPT * 100)).await;
            let state = walks.0.lock().await;
            let kept = state.known.values().filter(|counted| counted.walk.is_some()).count();
            assert!(kept <= MOST_UNFINISHED, "{kept}");
        }
        let state = walks.0.lock().await;
        let complete = |folder: &Folder| state.known[&folder.key()].complete.map(|(_, used)| used.inodes);
        assert!(folders.iter().all(|folder| complete(folder) == Some(101)));
    }

    #[tokio::test(start_paused = true)]
    async fn one_walk_with_many_hard_links_is_kept_and_every_folder_is_counted() {
        let dir = tempfile::tempdir().unwrap();
        let linked = |number: usize| {
            let folder = filled(dir.path(), &number.to_string(), 50);
            let path = |name: String| folder.path.join(name);
            for file in 0..50 {
                std::fs::hard_link(path(file.to_string()), path(format!("link-{file}"))).unwrap();
            }
            folder
        };
        let folders: Vec<Folder> = (0..4).map(linked).collect();
        let walks = impatient();
        for _ in 0..folders.len() * folders.len() {
            tokio::time::advance(KEPT / 2).await;
            walks.sizes(folders.clone(), Recount::After(KEPT * 100)).await;
            let state = walks.0.lock().await;
            let kept = state.known.values().filter_map(|counted| counted.walk.as_ref());
            let large = kept.filter(|walk| walk.tree.remembered() > state.limits.few_linked).count();
            assert!(large <= 1, "{large}");
        }
        let state = walks.0.lock().await;
        let complete = |folder: &Folder| state.known[&folder.key()].complete.map(|(_, used)| used.inodes);
        assert!(folders.iter().all(|folder| complete(folder) == Some(51)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_folder_that_hangs_costs_no_other_one_its_result() {
        let dir = tempfile::tempdir().unwrap();
        let folders = [filled(dir.path(), "hangs", 1), filled(dir.path(), "other", 2)];
        let (answer, answers) = std::sync::mpsc::channel::<()>();
        let mut walk = Walk::new(folders[0].path.clone());
        let hanging = tokio::task::spawn_blocking(move || {
            answers.recv().unwrap();
            let is_complete = walk.advance(Duration::MAX);
            (walk, is_complete)
        });
        let walks = Walks::default();
        walks.0.lock().await.running.insert(folders[0].key(), hanging);
        let round = async || {
            tokio::time::advance(KEPT / 2).await;
            let sizes = walks.sizes(folders.to_vec(), Recount::After(Duration::ZERO)).await;
            (inodes(&sizes, "hangs"), inodes(&sizes, "other"))
        };
        assert_eq!(round().await, (None, Some(3)));
        answer.send(()).unwrap();
        while round().await != (Some(2), Some(3)) {
            tokio::task::yield_now().await;
        }
    }
}
