//! Back-off of crash loops and image pulls: a [`Backoff`] for each key, and upstream's rule of when it is forgotten, by
//! time instead of by a success. Reads no clock, does not sleep, and does not decide what is retried: crash loops are timed by
//! the wall clock, as the ends of containers are, and pulls by a monotonic one. In memory only: a restarted agent begins anew.

use std::collections::HashMap;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;

use crate::model::Backoff;
use crate::model::Blocked;
use crate::model::fnv1a_64;
use crate::model::go_duration;

const BASE: Duration = Duration::from_secs(10);
/// Longest image pull back-off, and the default for crash loops.
pub const DEFAULT_MAX: Duration = Duration::from_secs(300);
/// A container that ran longer than this after its start attempt is no crash loop; independent of the maximum.
const CRASH_LOOP_RESET: Duration = Duration::from_secs(600);

/// Back-off state of many keys. Grows with `record`, shrinks with `gc`.
#[derive(Clone, Debug)]
pub struct BackoffHistory {
    first: Backoff,
    reset_after: Duration,
    entries: HashMap<String, BackoffEntry>,
}

#[derive(Clone, Debug)]
struct BackoffEntry {
    backoff: Backoff,
    last_update: SystemTime,
}

impl BackoffHistory {
    /// For crash-looping containers. `max` is `crashLoopBackOff.maxContainerRestartPeriod` (1 s to 300 s); a maximum
    /// below the base lowers the base.
    pub fn for_crash_loops(max: Duration) -> Self {
        Self { first: Backoff::new(BASE, max), reset_after: CRASH_LOOP_RESET, entries: HashMap::new() }
    }

    /// For image pulls: 10 s doubling to 300 s, forgotten after 600 s without a failure.
    pub fn for_image_pulls() -> Self {
        Self { first: Backoff::new(BASE, DEFAULT_MAX), reset_after: 2 * DEFAULT_MAX, entries: HashMap::new() }
    }

    /// Whether `key` must still wait, counted from `event` (a container's end). An entry last updated too long
    /// before the event does not count.
    pub fn blocked_since(&self, key: &str, event: SystemTime, now: SystemTime) -> Option<Blocked> {
        let entry = self.live(key, event)?;
        entry.blocks(event, now)
    }

    /// Whether `key` must still wait, counted from its own last record (a failed pull).
    pub fn blocked(&self, key: &str, now: SystemTime) -> Option<Blocked> {
        let entry = self.live(key, now)?;
        entry.blocks(entry.last_update, now)
    }

    /// Notes an attempt: the base delay for a fresh key (or one last updated too long before `event`), twice the
    /// last one otherwise. For containers `event` is the end of the instance that is replaced, and the record is due
    /// when the start is attempted, whatever comes of it; for pulls it is now, and due on failure only.
    pub fn record(&mut self, key: &str, event: SystemTime, now: SystemTime) {
        let mut backoff = self.live(key, event).map_or(self.first, |entry| entry.backoff);
        backoff.failed(0.0);
        self.entries.insert(key.to_owned(), BackoffEntry { backoff, last_update: now });
    }

    /// Removes expired entries.
    pub fn gc(&mut self, now: SystemTime) {
        let reset_after = self.reset_after;
        self.entries.retain(|_, entry| !entry.expired(now, reset_after));
    }

    fn live(&self, key: &str, event: SystemTime) -> Option<&BackoffEntry> {
        self.entries.get(key).filter(|entry| !entry.expired(event, self.reset_after))
    }
}

impl BackoffEntry {
    fn blocks(&self, since: SystemTime, now: SystemTime) -> Option<Blocked> {
        let backoff = self.backoff.pause();
        let blocked = Blocked { backoff, until: since + backoff };
        (now < blocked.until).then_some(blocked)
    }

    fn expired(&self, event: SystemTime, after: Duration) -> bool {
        event.duration_since(self.last_update).is_ok_and(|idle| idle > after)
    }
}

/// The crash-loop key of a container: a new UID, image or resources start afresh.
pub fn crash_loop_key(pod: &Pod, container: &Container) -> String {
    let part = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &pod.metadata;
    let identity = [
        part(&metadata.name),
        part(&metadata.namespace),
        part(&metadata.uid),
        container.name.clone(),
        part(&container.image),
        resources_text(container),
    ];
    format!("{:x}", fnv1a_64(identity.join("/").into_bytes()))
}

/// The back-off key of an image pull: per pod, with the image as the spec spells it.
pub fn image_pull_key(pod_uid: &str, image: &str) -> String {
    format!("{pod_uid}_{image}")
}

/// Message of the result CrashLoopBackOff and, through it, of the container's waiting state.
pub fn crash_loop_message(pod: &Pod, container: &str, backoff: Duration) -> String {
    let part = |text: &Option<String>| text.clone().unwrap_or_default();
    let metadata = &pod.metadata;
    let pod = format!("{}_{}({})", part(&metadata.name), part(&metadata.namespace), part(&metadata.uid));
    let backoff = go_duration(Duration::from_secs(backoff.as_secs()));
    format!("back-off {backoff} restarting failed container={container} pod={pod}")
}

/// Wall-clock time of a runtime timestamp (nanoseconds since the Unix epoch).
pub fn wall_time(nanos: i64) -> SystemTime {
    let distance = Duration::from_nanos(nanos.unsigned_abs());
    let time = if nanos < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(distance)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(distance)
    };
    time.unwrap_or(SystemTime::UNIX_EPOCH)
}

fn resources_text(container: &Container) -> String {
    let resources = container.resources.as_ref();
    let list = |title: &str, map: Option<&std::collections::BTreeMap<_, _>>| {
        let entries = map.into_iter().flatten();
        entries
            .map(|(name, quantity): (&String, &k8s_openapi::apimachinery::pkg::api::resource::Quantity)| {
                format!("{title}.{name}={};", quantity.0)
            })
            .collect::<String>()
    };
    list("limits", resources.and_then(|r| r.limits.as_ref()))
        + &list("requests", resources.and_then(|r| r.requests.as_ref()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::api::core::v1::ResourceRequirements;
    use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
    use proptest::prelude::*;

    use super::*;
    use crate::model::testing;

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000 + seconds)
    }

    fn crash_loops() -> BackoffHistory {
        BackoffHistory::for_crash_loops(DEFAULT_MAX)
    }

    /// Crashes at once after every start, restarted as soon as allowed; the delays seen.
    fn delays(history: &mut BackoffHistory, rounds: usize) -> Vec<u64> {
        let mut now = at(0);
        let mut delays = Vec::new();
        for _ in 0..rounds {
            let finished = now;
            let delay = history.blocked_since("k", finished, now).map_or(Duration::ZERO, |blocked| blocked.backoff);
            now = finished + delay;
            assert_eq!(history.blocked_since("k", finished, now), None, "the delay is over when it ends");
            history.record("k", finished, now);
            delays.push(delay.as_secs());
        }
        delays
    }

    #[test]
    fn doubles_up_to_the_maximum() {
        assert_eq!(delays(&mut crash_loops(), 8), [0, 10, 20, 40, 80, 160, 300, 300]);
        let short = Duration::from_secs(30);
        assert_eq!(delays(&mut BackoffHistory::for_crash_loops(short), 5), [0, 10, 20, 30, 30]);
        let shorter = Duration::from_secs(3);
        assert_eq!(delays(&mut BackoffHistory::for_crash_loops(shorter), 3), [0, 3, 3]);
    }

    #[test]
    fn blocks_until_the_end_counted_from_the_crash() {
        let mut history = crash_loops();
        history.record("k", at(0), at(0));
        let blocked = history.blocked_since("k", at(5), at(14)).expect("blocked");
        assert_eq!(blocked, Blocked { backoff: Duration::from_secs(10), until: at(15) });
        assert_eq!(history.blocked_since("k", at(5), at(15)), None);
        assert_eq!(history.blocked_since("other", at(5), at(5)), None);
    }

    #[test]
    fn ten_minutes_without_a_crash_reset_the_delay() {
        let mut history = crash_loops();
        history.record("k", at(0), at(0));
        history.record("k", at(1), at(1));
        assert!(history.blocked_since("k", at(601), at(601)).is_some(), "exactly ten minutes do not suffice");
        assert_eq!(history.blocked_since("k", at(602), at(602)), None);
        history.record("k", at(602), at(602));
        let again = history.blocked_since("k", at(603), at(603)).expect("blocked");
        assert_eq!(again.backoff, Duration::from_secs(10));
    }

    #[test]
    fn a_clock_set_back_still_blocks() {
        let mut history = crash_loops();
        history.record("k", at(100), at(100));
        assert!(history.blocked_since("k", at(50), at(40)).is_some());
    }

    #[test]
    fn pulls_count_from_the_last_failure() {
        let mut history = BackoffHistory::for_image_pulls();
        assert_eq!(history.blocked("k", at(0)), None);
        history.record("k", at(0), at(0));
        history.record("k", at(10), at(10));
        assert_eq!(history.blocked("k", at(29)).map(|b| b.until), Some(at(30)));
        assert_eq!(history.blocked("k", at(30)), None);
        history.record("k", at(700), at(700));
        assert_eq!(history.blocked("k", at(700)).map(|b| b.backoff), Some(Duration::from_secs(10)));
    }

    #[test]
    fn gc_drops_only_what_has_expired() {
        let mut history = crash_loops();
        history.record("old", at(0), at(0));
        history.record("young", at(500), at(500));
        history.gc(at(600));
        assert_eq!(history.entries.len(), 2);
        history.gc(at(601));
        assert_eq!(history.entries.len(), 1);
        history.gc(at(2000));
        assert!(history.entries.is_empty());
    }

    #[test]
    fn uid_name_image_and_resources_are_part_of_the_key() {
        let pod = testing::pod("Always", &[], &["main"]);
        let container = testing::container("main");
        let key = crash_loop_key(&pod, &container);
        let mut renewed = pod.clone();
        renewed.metadata.uid = Some("other".into());
        let limit = BTreeMap::from([("cpu".to_owned(), Quantity("1".into()))]);
        let resized = Container {
            resources: Some(ResourceRequirements { limits: Some(limit), ..Default::default() }),
            ..container.clone()
        };
        let request = BTreeMap::from([("cpu".to_owned(), Quantity("1".into()))]);
        let requesting = Container {
            resources: Some(ResourceRequirements { requests: Some(request), ..Default::default() }),
            ..container.clone()
        };
        let changed = Container { image: Some("image:2".into()), ..container.clone() };
        let neighbour = Container { name: "neighbour".into(), ..container.clone() };
        assert_eq!(crash_loop_key(&pod, &container), key);
        assert_ne!(crash_loop_key(&pod, &neighbour), key, "of the same image");
        assert_ne!(crash_loop_key(&pod, &requesting), key);
        assert_ne!(crash_loop_key(&pod, &requesting), crash_loop_key(&pod, &resized), "a request is no limit");
        assert_ne!(crash_loop_key(&renewed, &container), key);
        assert_ne!(crash_loop_key(&pod, &resized), key);
        assert_ne!(crash_loop_key(&pod, &changed), key);
    }

    #[test]
    fn messages_spell_durations_like_the_api() {
        let pod = testing::pod("Always", &[], &["main"]);
        assert_eq!(
            crash_loop_message(&pod, "main", Duration::from_millis(80_900)),
            "back-off 1m20s restarting failed container=main pod=pod_ns(uid)"
        );
    }

    proptest! {
        #[test]
        fn never_waits_longer_than_the_maximum(max in 1_u64..300, events in proptest::collection::vec(0_u64..2000, 1..50)) {
            let mut history = BackoffHistory::for_crash_loops(Duration::from_secs(max));
            let mut now = 0;
            for pause in events {
                now += pause;
                if let Some(blocked) = history.blocked_since("k", at(now), at(now)) {
                    prop_assert!(blocked.backoff <= Duration::from_secs(max));
                    now += blocked.backoff.as_secs();
                }
                history.record("k", at(now), at(now));
            }
        }
    }
}
