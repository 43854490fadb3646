//! Sizes of volumes, at bounded cost: counting the files of a volume takes as long as it has many, so after each round the
//! walker rests for much longer than it worked.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use crate::kernel::usage::tree_usage_while;
use crate::model::PodUid;
use crate::stats::Used;

/// How long one round may work.
const ROUND: Duration = Duration::from_secs(1);
/// The rest after a round, as a multiple of its work: 2 % of a processor at most.
const REST: u32 = 50;
/// The shortest rest.
const SHORTEST_REST: Duration = Duration::from_secs(10);

/// A folder to be counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Folder {
    pub(super) uid: PodUid,
    pub(super) volume: String,
    pub(super) path: PathBuf,
}

/// What is known of a folder. A folder that was too large to be counted has at least this size.
#[derive(Clone, Copy, Debug)]
struct Counted {
    used: Used,
    at: Instant,
}

/// Counts folders and keeps the results.
#[derive(Debug, Default)]
pub(super) struct Walks {
    known: HashMap<(PodUid, String), Counted>,
    rest_until: Option<Instant>,
}

impl Walks {
    /// Sizes of these folders by pod and volume; those that were not counted yet are absent. Counts those that were counted
    /// longest ago, unless the walker rests; `now`: also while it rests.
    pub(super) async fn sizes(&mut self, folders: Vec<Folder>, now: bool) -> HashMap<PodUid, Vec<(String, Used)>> {
        self.known.retain(|(uid, volume), _| folders.iter().any(|f| f.uid == *uid && f.volume == *volume));
        let rests = self.rest_until.is_some_and(|until| Instant::now() < until);
        if !folders.is_empty() && (now || !rests) {
            self.count(folders).await;
        }
        let mut sizes: HashMap<PodUid, Vec<(String, Used)>> = HashMap::new();
        for ((uid, volume), counted) in &self.known {
            sizes.entry(uid.clone()).or_default().push((volume.clone(), counted.used));
        }
        sizes
    }

    async fn count(&mut self, mut folders: Vec<Folder>) {
        folders
            .sort_by_key(|folder| self.known.get(&(folder.uid.clone(), folder.volume.clone())).map(|known| known.at));
        let began = std::time::Instant::now();
        let counting = tokio::task::spawn_blocking(move || {
            let in_time = || began.elapsed() < ROUND;
            let due = folders.into_iter().take_while(|_| in_time());
            due.map(|folder| {
                let usage = tree_usage_while(&folder.path, in_time);
                (folder, Used { bytes: usage.bytes, inodes: usage.inodes })
            })
            .collect::<Vec<_>>()
        });
        // A file system that hangs keeps its thread; the walker rests meanwhile.
        let counted = tokio::time::timeout(ROUND * 2, counting).await;
        let now = Instant::now();
        self.rest_until = Some(now + (began.elapsed() * REST).max(SHORTEST_REST));
        for (folder, used) in counted.into_iter().flatten().flatten() {
            self.known.insert((folder.uid, folder.volume), Counted { used, at: now });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn folders_are_counted_again_after_a_rest() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder { uid: "u".into(), volume: "v".to_owned(), path: dir.path().to_owned() };
        let mut walks = Walks::default();
        let mut inodes = async |now| walks.sizes(vec![folder.clone()], now).await[&PodUid::from("u")][0].1.inodes;
        assert_eq!(inodes(false).await, 1);
        std::fs::write(dir.path().join("file"), "x").unwrap();
        assert_eq!(inodes(false).await, 1, "the walker rests");
        assert_eq!(inodes(true).await, 2);
        assert!(walks.sizes(Vec::new(), false).await.is_empty(), "volumes that are gone are forgotten");
    }
}
