//! Which events are folded into one, counted up or dropped, as client libraries of the API do it. Pure: the time is an
//! argument.
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

/// Entries of each memory; the one unused for longest goes first.
const ENTRIES: usize = 4096;
/// From this many distinct messages on, events of one key are folded.
const DISTINCT: usize = 10;
/// Silence after which a key's messages are forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);
/// Events of one object and type that pass at once.
const BURST: f64 = 25.0;
/// Time until one more may pass.
const REFILL: Duration = Duration::from_secs(300);
/// In front of the message of folded events.
const COMBINED: &str = "(combined from similar events): ";

/// What to do with an event.
#[derive(Clone, PartialEq, Debug)]
pub(super) enum Verdict {
    /// Nothing: its object has had too many.
    Drop,
    /// Create it.
    Create(Event),
    /// It is known under its name: change it there. Should it be gone, it is to be created with that name.
    Patch(Event),
}

/// Memories of what was told. Holds hashes, not messages.
pub(super) struct Correlator {
    host: String,
    similar: Memory<Similar>,
    told: Memory<Told>,
    buckets: Memory<Bucket>,
}

/// 128 bits of SHA-256: messages are not ours, and must not be able to collide at will.
type Key = u128;

/// Messages of events that differ in nothing else.
struct Similar {
    messages: BTreeSet<Key>,
    last: i64,
}

/// An event that was told, and how often.
#[derive(Clone)]
struct Told {
    count: i32,
    first: Option<Time>,
    name: Option<String>,
}

/// A token bucket.
struct Bucket {
    tokens: f64,
    last: i64,
}

impl Correlator {
    pub(super) fn new(host: &str) -> Self {
        let (similar, told, buckets) = (Memory::default(), Memory::default(), Memory::default());
        Self { host: host.to_owned(), similar, told, buckets }
    }

    /// Decides about an event; `now` is in nanoseconds since the Unix epoch.
    pub(super) fn correlate(&mut self, occurrence: &Occurrence, now: i64) -> Verdict {
        let (event, key) = self.aggregate(occurrence, now);
        let verdict = self.count(event, key);
        if self.passes(occurrence, now) { verdict } else { Verdict::Drop }
    }

    /// The event itself, or the one that stands for many similar ones; and the key it is counted under.
    fn aggregate(&mut self, occurrence: &Occurrence, now: i64) -> (Event, Key) {
        let event = occurrence.event(&self.host);
        let kind = digest(b"similar", occurrence, &[&occurrence.reason]);
        let fresh = || Similar { messages: BTreeSet::new(), last: now };
        let similar = self.similar.entry(kind, fresh);
        if elapsed(similar.last, now) > FORGOTTEN_AFTER {
            similar.messages.clear();
        }
        similar.messages.insert(digest(b"message", occurrence, &[&occurrence.message]));
        similar.last = now;
        if similar.messages.len() < DISTINCT {
            let path = occurrence.object.field_path.as_deref().unwrap_or_default();
            return (event, digest(b"event", occurrence, &[&occurrence.reason, path, &occurrence.message]));
        }
        // Hashes are as good as random: which message is forgotten, nobody can tell.
        similar.messages.pop_first();
        (combined(event, occurrence, now), kind)
    }

    fn count(&mut self, mut event: Event, key: Key) -> Verdict {
        let told = self.told.entry(key, || Told { count: 0, first: None, name: None });
        let known = told.count > 0;
        if known {
            event.metadata.name = told.name.clone();
            event.first_timestamp = told.first.clone();
            event.count = Some(told.count.saturating_add(1));
        }
        *told = Told {
            count: event.count.unwrap_or(1),
            first: event.first_timestamp.clone(),
            name: event.metadata.name.clone(),
        };
        if known { Verdict::Patch(event) } else { Verdict::Create(event) }
    }

    fn passes(&mut self, occurrence: &Occurrence, now: i64) -> bool {
        let key = digest(b"spam", occurrence, &[]);
        let bucket = self.buckets.entry(key, || Bucket { tokens: BURST, last: now });
        let refilled = elapsed(bucket.last, now).as_secs_f64() / REFILL.as_secs_f64();
        *bucket = Bucket { tokens: (bucket.tokens + refilled).min(BURST), last: now.max(bucket.last) };
        if bucket.tokens < 1.0 {
            return false;
        }
        bucket.tokens -= 1.0;
        true
    }
}

/// What a patch of a known event says, as a strategic merge.
pub(super) fn patch(event: &Event) -> Value {
    json!({ "count": event.count, "lastTimestamp": event.last_timestamp, "message": event.message })
}

/// One event for many: of now, named anew, without what was particular of this one.
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
struct Memory<V>(LruCache<Key, V>);

impl<V> Default for Memory<V> {
    fn default() -> Self {
        Self(LruCache::unbounded())
    }
}

impl<V> Memory<V> {
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
