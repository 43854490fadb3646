//! `memory.events` of the cgroup of all pods (cgroup v2): the kernel announces when a limit was reached, a protection broken
//! or a process killed. Wakes the eviction manager where its own readings may have changed by that.

use std::collections::HashMap;
use std::io;
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

/// Shortest time between two readings: a container at its limit causes an event for each reclaim.
const PAUSE: Duration = Duration::from_millis(100);

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

/// Sends the time on `wake` when memory of all pods runs short; `cgroup`: their folder, `None` with cgroup v1. Ends when `wake` has
/// no receiver or the cgroup is removed, or at once if it cannot be watched, with the reason in its state.
pub async fn follow(cgroup: Option<PathBuf>, sensor_states: SensorStates, wake: mpsc::Sender<Instant>) {
    let set = |state| sensor_states.set(Sensor::MemoryEvents, state);
    let Some(cgroup) = cgroup else {
        return set(SensorState::Down("only cgroup v2 has memory.events".to_owned()));
    };
    let down = |error: &io::Error| SensorState::Down(format!("{}: {error}", cgroup.display()));
    let mut events = match watch(&cgroup) {
        Ok(events) => events,
        Err(error) => return set(down(&error)),
    };
    let mut known = match read(&cgroup).await {
        Ok(counters) => counters,
        Err(error) => return set(down(&error)),
    };
    set(SensorState::Up);
    loop {
        tokio::select! {
            event = events.next() => if event.is_none() { return },
            () = wake.closed() => return,
        }
        let at = Instant::now();
        match read(&cgroup).await {
            Ok(now) => {
                if now != std::mem::replace(&mut known, now) {
                    // A full channel holds a notification that was not taken yet.
                    let _ = wake.try_send(at);
                }
            }
            Err(error) => return set(down(&error)),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

async fn read(cgroup: &Path) -> io::Result<Counters> {
    let cgroup = cgroup.to_owned();
    tokio::task::spawn_blocking(move || Counters::read(&cgroup)).await.map_err(io::Error::other)?
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

    async fn until_up(sensor_states: &SensorStates) {
        let mut changes = sensor_states.subscribe();
        while sensor_states.get(Sensor::MemoryEvents).is_none() {
            changes.changed().await.expect("the sender lives");
        }
        assert_eq!(sensor_states.get(Sensor::MemoryEvents), Some(SensorState::Up));
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
        until_up(&sensor_states).await;
        put("memory.events", "low 0\noom_kill 1\n");
        assert!(woken.recv().await.is_some());
        put("memory.events.local", "max 1\n");
        assert!(woken.recv().await.is_some());
        drop(woken);
        following.await.expect("it ends");
    }

    #[tokio::test]
    async fn without_the_file_the_sensor_is_down() {
        let (sensor_states, (wake, mut woken)) = (SensorStates::default(), mpsc::channel(1));
        follow(None, sensor_states.clone(), wake.clone()).await;
        let down = |reason: &str| Some(SensorState::Down(reason.to_owned()));
        assert_eq!(sensor_states.get(Sensor::MemoryEvents), down("only cgroup v2 has memory.events"));
        follow(Some("/no/such/cgroup".into()), sensor_states.clone(), wake).await;
        assert!(
            matches!(sensor_states.get(Sensor::MemoryEvents), Some(SensorState::Down(reason)) if reason.starts_with("/no/such/cgroup: "))
        );
        assert_eq!(woken.recv().await, None);
    }
}
