//! Sizes of volumes, at bounded cost: counting the files of a volume takes as long as it has many, so after each round the
//! walker rests for much longer than it worked. Nothing is counted without a request.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::Used;
use crate::kernel::usage::tree_usage_while;
use crate::model::PodUid;

/// How long one round may work.
const ROUND: Duration = Duration::from_secs(1);
/// The rest after a round, as a multiple of its work: 2 % of a processor at most.
const REST: u32 = 50;
/// The shortest rest.
const SHORTEST_REST: Duration = Duration::from_secs(10);
/// Results that were not requested during this time are dropped.
const KEPT: Duration = Duration::from_secs(600);

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

/// When a folder is counted again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recount {
    /// Now, also while the walker rests.
    Now,
    /// If the walker does not rest, and the last count is at least so old.
    After(Duration),
}

/// Sizes of folders by pod: the volume's name, and its size.
pub type Sizes = HashMap<PodUid, Vec<(String, Used)>>;

/// What is known of a folder. A folder that was too large to be counted has at least this size.
#[derive(Clone, Copy, Debug)]
struct Counted {
    used: Used,
    at: Instant,
    asked: Instant,
}

/// Counts folders and keeps the results.
#[derive(Debug, Default)]
pub(super) struct Walks(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    known: HashMap<(PodUid, String), Counted>,
    rest_until: Option<Instant>,
}

impl Walks {
    /// Sizes of these folders by pod and volume; those that were not counted yet are absent. Counts those that are due,
    /// longest ago first. If cancelled, the results of the round that runs are lost.
    pub(super) async fn sizes(&self, folders: Vec<Folder>, recount: Recount) -> Sizes {
        let mut state = self.0.lock().await;
        let wanted: Vec<(PodUid, String)> =
            folders.iter().map(|folder| (folder.uid.clone(), folder.volume.clone())).collect();
        state.count(folders, recount).await;
        state.sizes(wanted)
    }
}

impl State {
    fn sizes(&mut self, wanted: Vec<(PodUid, String)>) -> Sizes {
        let now = Instant::now();
        let mut sizes = Sizes::new();
        for key in wanted {
            if let Some(counted) = self.known.get_mut(&key) {
                counted.asked = now;
                sizes.entry(key.0).or_default().push((key.1, counted.used));
            }
        }
        self.known.retain(|_, counted| now.saturating_duration_since(counted.asked) < KEPT);
        sizes
    }

    fn counted_at(&self, folder: &Folder) -> Option<Instant> {
        self.known.get(&(folder.uid.clone(), folder.volume.clone())).map(|counted| counted.at)
    }

    async fn count(&mut self, folders: Vec<Folder>, recount: Recount) {
        let now = Instant::now();
        let rests = self.rest_until.is_some_and(|until| now < until);
        let is_due = |counted: Option<Instant>| match recount {
            Recount::Now => true,
            Recount::After(age) => !rests && counted.is_none_or(|at| now.saturating_duration_since(at) >= age),
        };
        let with_age = folders.into_iter().map(|folder| (self.counted_at(&folder), folder));
        let mut due: Vec<(Option<Instant>, Folder)> = with_age.filter(|(counted, _)| is_due(*counted)).collect();
        if due.is_empty() {
            return;
        }
        due.sort_by_key(|(counted, _)| *counted);
        let began = std::time::Instant::now();
        let counting = tokio::task::spawn_blocking(move || {
            let in_time = || began.elapsed() < ROUND;
            let in_round = due.into_iter().take_while(|_| in_time());
            in_round
                .map(|(_, folder)| {
                    let usage = tree_usage_while(&folder.path, in_time);
                    (folder, Used { bytes: usage.bytes, inodes: usage.inodes })
                })
                .collect::<Vec<_>>()
        });
        // A file system that hangs keeps its thread; the walker rests meanwhile.
        let counted = tokio::time::timeout(ROUND * 2, counting).await;
        let at = Instant::now();
        self.rest_until = Some(at + (began.elapsed() * REST).max(SHORTEST_REST));
        for (folder, used) in counted.into_iter().flatten().flatten() {
            self.known.insert((folder.uid, folder.volume), Counted { used, at, asked: at });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
