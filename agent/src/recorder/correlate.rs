//! Correlates events as client-go's `EventCorrelator` does: aggregates similar ones, counts repetitions, drops spam. Pure:
//! the time is an argument.
//!
//! ```text
//!  event ─▶ aggregate ─▶ count ─▶ spam filter ─▶ create, patch or nothing
//! ```

use std::collections::BTreeSet;
use std::hash::Hash;
use std::time::Duration;

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use lru::LruCache;
use serde_json::Value;
use serde_json::json;
use sha2::Digest as _;
use sha2::Sha256;

use super::object;
use super::object::Occurrence;

/// Entries of each cache; the least recently used is evicted first.
const ENTRIES: usize = 4096;
/// From this many distinct messages on, events of one key are aggregated.
const DISTINCT: usize = 10;
/// A key's messages expire when it had no event for this long.
const AGGREGATION_INTERVAL: Duration = Duration::from_secs(600);
/// Events of one object and type that pass at once.
const BURST: f64 = 25.0;
/// Time until one more may pass.
const REFILL: Duration = Duration::from_secs(300);
/// Prefix of the message of aggregated events.
const COMBINED: &str = "(combined from similar events): ";

/// What to do with an event.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum CorrelationResult {
    /// Drop it: its object has too many.
    Drop,
    /// Create it.
    Create(Event),
    /// Patch the event of this name; if it no longer exists, create it with that name.
    Patch(Event),
}

/// Caches of recent events. They hold hashes, not messages.
pub(super) struct Correlator {
    host: String,
    similar: BoundedCache<Similar>,
    delivered: BoundedCache<EventSeries>,
    buckets: BoundedCache<Bucket>,
}

/// 128 bits of SHA-256: messages are not ours, and must not be able to collide at will.
type Key = u128;

/// Messages of events that differ in nothing else.
struct Similar {
    messages: BTreeSet<Key>,
    last: i64,
}

/// An event and its repetitions.
#[derive(Clone)]
struct EventSeries {
    count: i32,
    first: Option<Time>,
    name: Option<String>,
}

/// A token bucket.
struct Bucket {
    tokens: f64,
    last: Duration,
}

impl Correlator {
    pub(super) fn new(host: &str) -> Self {
        let (similar, delivered, buckets) = (BoundedCache::default(), BoundedCache::default(), BoundedCache::default());
        Self { host: host.to_owned(), similar, delivered, buckets }
    }

    /// Decides about an event; `now` is in nanoseconds since the Unix epoch, `uptime` monotonic: a clock that was set back would
    /// not fill the bucket of the spam filter until it has caught up.
    pub(super) fn correlate(&mut self, occurrence: &Occurrence, now: i64, uptime: Duration) -> CorrelationResult {
        let (event, key) = self.aggregate(occurrence, now);
        let result = self.count(event, key);
        if self.passes(occurrence, uptime) { result } else { CorrelationResult::Drop }
    }

    /// The event itself, or the aggregate of many similar ones; and the key it is counted under.
    fn aggregate(&mut self, occurrence: &Occurrence, now: i64) -> (Event, Key) {
        let event = occurrence.event(&self.host);
        let kind = digest(b"similar", occurrence, &[&occurrence.reason]);
        let fresh = || Similar { messages: BTreeSet::new(), last: now };
        let similar = self.similar.entry(kind, fresh);
        if elapsed(similar.last, now) > AGGREGATION_INTERVAL {
            similar.messages.clear();
        }
        similar.messages.insert(digest(b"message", occurrence, &[&occurrence.message]));
        similar.last = now;
        if similar.messages.len() < DISTINCT {
            let path = occurrence.object.field_path.as_deref().unwrap_or_default();
            return (event, digest(b"event", occurrence, &[&occurrence.reason, path, &occurrence.message]));
        }
        // Any message will do; the first hash is as good as random.
        similar.messages.pop_first();
        (combined(event, occurrence, now), kind)
    }

    fn count(&mut self, mut event: Event, key: Key) -> CorrelationResult {
        let series = self.delivered.entry(key, || EventSeries { count: 0, first: None, name: None });
        let known = series.count > 0;
        if known {
            event.metadata.name = series.name.clone();
            event.first_timestamp = series.first.clone();
            event.count = Some(series.count.saturating_add(1));
        }
        *series = EventSeries {
            count: event.count.unwrap_or(1),
            first: event.first_timestamp.clone(),
            name: event.metadata.name.clone(),
        };
        if known { CorrelationResult::Patch(event) } else { CorrelationResult::Create(event) }
    }

    fn passes(&mut self, occurrence: &Occurrence, uptime: Duration) -> bool {
        let key = digest(b"spam", occurrence, &[]);
        let bucket = self.buckets.entry(key, || Bucket { tokens: BURST, last: uptime });
        let refilled = uptime.saturating_sub(bucket.last).as_secs_f64() / REFILL.as_secs_f64();
        *bucket = Bucket { tokens: (bucket.tokens + refilled).min(BURST), last: uptime };
        if bucket.tokens < 1.0 {
            return false;
        }
        bucket.tokens -= 1.0;
        true
    }
}

/// The strategic merge patch of a repeated event.
pub(super) fn patch(event: &Event) -> Value {
    json!({ "count": event.count, "lastTimestamp": event.last_timestamp, "message": event.message })
}

/// One event for many similar ones, with a name and timestamps of its own.
fn combined(event: Event, occurrence: &Occurrence, now: i64) -> Event {
    let name = occurrence.object.name.as_deref().unwrap_or_default();
    let mut event = event;
    event.metadata.name = Some(object::event_name(name, now));
    event.metadata.annotations = None;
    event.message = Some(format!("{COMBINED}{}", occurrence.message));
    event.reporting_component = None;
    event.reporting_instance = None;
    event.first_timestamp = Some(object::time(now));
    event.last_timestamp = Some(object::time(now));
    event
}

/// What makes events alike: their object and type, and then `more`. The source is always this agent.
fn digest(purpose: &[u8], occurrence: &Occurrence, more: &[&str]) -> Key {
    let object = &occurrence.object;
    let of_object = [&object.kind, &object.namespace, &object.name, &object.uid, &object.api_version];
    let of_object = of_object.map(|part| part.as_deref().unwrap_or_default());
    let mut hash = Sha256::new_with_prefix(purpose);
    for part in of_object.iter().chain([&occurrence.kind.as_str()]).chain(more) {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    let bytes: [u8; 32] = hash.finalize().into();
    let (half, _) = bytes.split_at(16);
    half.iter().fold(0, |key, byte| key << 8 | Key::from(*byte))
}

fn elapsed(since: i64, now: i64) -> Duration {
    Duration::from_nanos(u64::try_from(now.saturating_sub(since)).unwrap_or(0))
}

/// At most [`ENTRIES`]; grows only as needed.
struct BoundedCache<V>(LruCache<Key, V>);

impl<V> Default for BoundedCache<V> {
    fn default() -> Self {
        Self(LruCache::unbounded())
    }
}

impl<V> BoundedCache<V> {
    fn entry(&mut self, key: Key, fresh: impl FnOnce() -> V) -> &mut V
    where
        Key: Hash + Eq,
    {
        if self.0.len() >= ENTRIES && !self.0.contains(&key) {
            self.0.pop_lru();
        }
        self.0.get_or_insert_mut(key, fresh)
    }
}
