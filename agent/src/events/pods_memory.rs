//! `memory.events` of the cgroup of all pods (cgroup v2): the kernel announces when a limit was reached, a protection broken
//! or a process killed. Wakes the eviction manager where its own readings may have changed by that.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::StreamExt as _;
use inotify::EventStream;
use inotify::Inotify;
use inotify::WatchMask;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::sensors::Sensor;
use super::sensors::SensorState;
use super::sensors::SensorStates;
use crate::model::Backoff;

/// Shortest time between two readings: a container at its limit causes an event for each reclaim.
const PAUSE: Duration = Duration::from_millis(100);
/// Pauses before a cgroup that is not there, or is removed, is watched again: it may be made again.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// See [`FIRST_RETRY`]. Also the longest time between two readings: not every kernel reports that a cgroup was removed.
const LAST_RETRY: Duration = Duration::from_secs(60);

/// Counters of the two files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Counters {
    /// Below the protection of a pod memory was reclaimed.
    low: u64,
    /// Processes of pods were killed.
    kills: u64,
    /// The limit of all pods was reached. Limits of containers are their own matter.
    limit: u64,
}

impl Counters {
    /// Blocks for the time of two files of the kernel.
    fn read(cgroup: &Path) -> io::Result<Self> {
        let table = |name: &str| -> io::Result<HashMap<String, u64>> {
            let text = std::fs::read_to_string(cgroup.join(name))?;
            let entry = |line: &str| {
                let (key, value) = line.split_once(' ')?;
                Some((key.to_owned(), value.trim().parse().ok()?))
            };
            Ok(text.lines().filter_map(entry).collect())
        };
        let all = table("memory.events")?;
        // Since Linux 5.2.
        let own = table("memory.events.local").unwrap_or_default();
        let of = |table: &HashMap<String, u64>, key: &str| table.get(key).copied().unwrap_or(0);
        let limit = of(&own, "max").saturating_add(of(&own, "high")).saturating_add(of(&own, "oom"));
        Ok(Self { low: of(&all, "low"), kills: of(&all, "oom_kill"), limit })
    }
}

/// Sends the time on `wake` when memory of all pods runs short; `cgroup`: their folder, `None` with cgroup v1. Ends when
/// `wake` has no receiver, or at once with cgroup v1. While the cgroup cannot be watched, the state has the reason.
pub async fn follow(cgroup: Option<PathBuf>, sensor_states: SensorStates, wake: mpsc::Sender<Instant>) {
    let set = |state| sensor_states.set(Sensor::MemoryEvents, state);
    let Some(cgroup) = cgroup else {
        return set(SensorState::Down("only cgroup v2 has memory.events".to_owned()));
    };
    let mut backoff = Backoff::new(FIRST_RETRY, LAST_RETRY);
    loop {
        let began = Instant::now();
        let Err(error) = follow_existing(&cgroup, &sensor_states, &wake).await else { return };
        set(SensorState::Down(format!("{}: {error}", cgroup.display())));
        if began.elapsed() >= LAST_RETRY {
            backoff.succeeded();
        }
        tokio::select! {
            () = wake.closed() => return,
            () = tokio::time::sleep(backoff.failed(0.0)) => {}
        }
    }
}

/// Follows a cgroup until `wake` has no receiver.
///
/// # Errors
/// It cannot be watched, or was removed.
async fn follow_existing(cgroup: &Path, sensor_states: &SensorStates, wake: &mpsc::Sender<Instant>) -> io::Result<()> {
    let mut events = watch(cgroup)?;
    let (watched, mut known) = read(cgroup).await?;
    sensor_states.set(Sensor::MemoryEvents, SensorState::Up);
    loop {
        tokio::select! {
            event = events.next() => event.ok_or(io::ErrorKind::UnexpectedEof)?.map(drop)?,
            () = wake.closed() => return Ok(()),
            () = tokio::time::sleep(LAST_RETRY) => {}
        }
        let at = Instant::now();
        let (found, now) = read(cgroup).await?;
        if found != watched {
            return Err(io::Error::other("the cgroup was made again"));
        }
        if now != std::mem::replace(&mut known, now) {
            // A full channel holds a notification that was not taken yet.
            let _ = wake.try_send(at);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// The number of the cgroup, and its counters.
async fn read(cgroup: &Path) -> io::Result<(u64, Counters)> {
    let cgroup = cgroup.to_owned();
    let reading = move || -> io::Result<_> { Ok((std::fs::metadata(&cgroup)?.ino(), Counters::read(&cgroup)?)) };
    tokio::task::spawn_blocking(reading).await.map_err(io::Error::other)?
}

/// The kernel reports changes of these files as modifications.
fn watch(cgroup: &Path) -> io::Result<EventStream<Vec<u8>>> {
    let inotify = Inotify::init()?;
    inotify.watches().add(cgroup.join("memory.events"), WatchMask::MODIFY | WatchMask::DELETE_SELF)?;
    let own = cgroup.join("memory.events.local");
    if own.exists() {
        inotify.watches().add(own, WatchMask::MODIFY)?;
    }
    inotify.into_event_stream(vec![0; 1024])
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn until(sensor_states: &SensorStates, state: &str) {
        let mut changes = sensor_states.subscribe();
        while sensor_states.get(Sensor::MemoryEvents).is_none_or(|known| known.as_str() != state) {
            changes.changed().await.expect("the sender lives");
        }
    }

    #[test]
    fn limits_of_containers_are_their_own_matter() {
        let dir = tempfile::tempdir().expect("a folder");
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("written");
        let read = || Counters::read(dir.path()).expect("readable");
        put("memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\n");
        assert_eq!(read(), Counters::default());
        put("memory.events", "low 0\nhigh 9\nmax 9\noom 1\noom_kill 0\n");
        assert_eq!(read(), Counters::default());
        put("memory.events", "low 1\nhigh 9\nmax 9\noom 1\noom_kill 2\nbroken\n");
        put("memory.events.local", "max 3\nhigh 4\noom 5\n");
        assert_eq!(read(), Counters { low: 1, kills: 2, limit: 12 });
    }

    #[tokio::test]
    async fn a_kill_and_the_limit_of_all_pods_wake_the_manager() {
        let dir = tempfile::tempdir().expect("a folder");
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).expect("written");
        put("memory.events", "low 0\noom_kill 0\n");
        put("memory.events.local", "max 0\n");
        let (sensor_states, (wake, mut woken)) = (SensorStates::default(), mpsc::channel(1));
        let following = tokio::spawn(follow(Some(dir.path().to_owned()), sensor_states.clone(), wake));
        until(&sensor_states, "up").await;
        put("memory.events", "low 0\noom_kill 1\n");
        assert!(woken.recv().await.is_some());
        put("memory.events.local", "max 1\n");
        assert!(woken.recv().await.is_some());
        drop(woken);
        following.await.expect("it ends");
    }

    #[tokio::test]
    async fn with_cgroup_v1_the_sensor_is_down() {
        let (sensor_states, (wake, mut woken)) = (SensorStates::default(), mpsc::channel(1));
        follow(None, sensor_states.clone(), wake).await;
        let reason = sensor_states.get(Sensor::MemoryEvents).and_then(|state| state.reason().map(str::to_owned));
        assert_eq!(reason.as_deref(), Some("only cgroup v2 has memory.events"));
        assert_eq!(woken.recv().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_cgroup_that_is_made_later_or_again_is_watched() {
        let dir = tempfile::tempdir().expect("a folder");
        let cgroup = dir.path().join("kubepods");
        let (sensor_states, (wake, mut woken)) = (SensorStates::default(), mpsc::channel(1));
        let following = tokio::spawn(follow(Some(cgroup.clone()), sensor_states.clone(), wake));
        let down = |expected: &str| {
            let reason = sensor_states.get(Sensor::MemoryEvents).and_then(|state| state.reason().map(str::to_owned));
            assert!(reason.as_ref().is_some_and(|reason| reason.contains(expected)), "{reason:?}");
        };
        let put = |text: &str| std::fs::write(cgroup.join("memory.events"), text).expect("written");
        let make = || {
            std::fs::create_dir(&cgroup).expect("made");
            put("oom_kill 0\n");
        };
        for _ in 0..2 {
            until(&sensor_states, "down").await;
            down("/kubepods: No such file");
            make();
            until(&sensor_states, "up").await;
            put("oom_kill 1\n");
            assert!(woken.recv().await.is_some());
            std::fs::remove_dir_all(&cgroup).expect("removed");
        }
        until(&sensor_states, "down").await;
        make();
        until(&sensor_states, "up").await;
        // Nothing is reported of the file that is watched.
        std::fs::rename(&cgroup, dir.path().join("old")).expect("renamed");
        make();
        until(&sensor_states, "down").await;
        down("/kubepods: the cgroup was made again");
        until(&sensor_states, "up").await;
        put("oom_kill 1\n");
        assert!(woken.recv().await.is_some());
        drop(woken);
        following.await.expect("it ends");
    }
}
