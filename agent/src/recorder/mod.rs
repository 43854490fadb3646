//! Events: the kubelet's reasons and messages on the objects they concern, sent to the API server.
//!
//! Owns the content of Event objects, aggregation, the spam filter, and delivery. Callers decide what is worth an event.
//! Nothing is kept over a restart.
//!
//! ```text
//!  modules ─▶ Recorder ─▶ log line
//!                └─▶ queue (1000; dropped when full) ─▶ delivery: correlate ─▶ create or patch, one at a time
//! ```
//!
//! Without an API server events are log lines and nothing else.

mod correlate;
#[cfg(test)]
mod correlate_tests;
mod delivery;
#[cfg(test)]
mod delivery_tests;
mod log_rate_limit;
mod object;
#[cfg(test)]
pub mod testing;
mod text;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::RwLock;
use std::sync::atomic::AtomicI64;
use std::sync::atomic::Ordering;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::mpsc;

pub use self::delivery::Deferral;
pub use self::delivery::Queue;
pub use self::object::EventType;
use self::object::Occurrence;
use crate::model::Clock;

/// Events that may wait for delivery; more are dropped and counted.
const QUEUE: usize = 1000;

/// Counts events that are not delivered. Calls must not block.
pub trait RecorderObserver: Send + Sync + 'static {
    /// An event was not delivered.
    fn lost(&self, why: Loss);
}

/// Why an event is not delivered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Loss {
    /// The queue is full.
    QueueFull,
    /// The spam filter dropped it: its object has too many events.
    Spam,
    /// The API server refused it.
    Rejected,
    /// The API server could not be reached often enough.
    Unreachable,
}

impl Loss {
    /// The cause as metrics spell it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::Spam => "spam",
            Self::Rejected => "rejected",
            Self::Unreachable => "unreachable",
        }
    }
}

/// Records events. Clones share the queue; no call blocks.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    node: Arc<str>,
    /// Of the Node object.
    node_uid: Arc<RwLock<Option<String>>>,
    sender: Option<Arc<Sender>>,
}

struct Sender {
    queue: mpsc::Sender<Occurrence>,
    clock: Clock,
    /// Events are named by their nanosecond: each gets its own.
    last_number: AtomicI64,
    observer: Arc<dyn RecorderObserver>,
}

impl Recorder {
    /// Events of this node as log lines only.
    pub fn logging(node: &str) -> Self {
        Self { node: node.into(), ..Self::default() }
    }

    /// Events of this node as log lines and for the API server, which [`Queue::deliver`] sends them to.
    pub fn delivering(node: &str, clock: Clock, observer: Arc<dyn RecorderObserver>) -> (Self, Queue) {
        let (queue, receiver) = mpsc::channel(QUEUE);
        let sender = Sender { queue, clock, last_number: AtomicI64::new(0), observer: observer.clone() };
        let recorder = Self { sender: Some(Arc::new(sender)), ..Self::logging(node) };
        (recorder, Queue::new(receiver, node, clock, observer))
    }

    /// An event on a pod, or on one of its containers (`field_path` like `spec.containers{web}`; empty for the pod). A
    /// static pod's events are on the static pod, not on the API's copy of it.
    pub fn pod_event(&self, pod: &Pod, field_path: &str, kind: EventType, reason: &str, message: &str) {
        self.event(object::pod(pod, field_path), kind, reason, message, BTreeMap::new());
    }

    /// An event on a pod, with annotations on the event.
    pub fn pod_event_annotated(
        &self,
        pod: &Pod,
        kind: EventType,
        reason: &str,
        message: &str,
        annotations: BTreeMap<String, String>,
    ) {
        self.event(object::pod(pod, ""), kind, reason, message, annotations);
    }

    /// Events on this node refer to its Node object by this UID from now on, as upstream's since 1.37: `kubectl describe node`
    /// shows them. Upstream's keep the first UID; a Node that is deleted and created again has another one.
    pub fn identify_node(&self, uid: &str) {
        // Replaced as a whole: a panic elsewhere leaves it usable.
        let mut known = self.node_uid.write().unwrap_or_else(PoisonError::into_inner);
        if known.as_deref() != Some(uid) {
            *known = Some(uid.to_owned());
        }
    }

    /// An event on this node.
    pub fn node_event(&self, kind: EventType, reason: &str, message: &str) {
        let uid = self.node_uid.read().unwrap_or_else(PoisonError::into_inner).clone();
        self.event(object::node(&self.node, uid), kind, reason, message, BTreeMap::new());
    }

    /// An event on any object. A reference without namespace is an object of the cluster.
    pub fn event(
        &self,
        object: ObjectReference,
        kind: EventType,
        reason: &str,
        message: &str,
        annotations: BTreeMap<String, String>,
    ) {
        let message = text::sanitize(message);
        log(&object, kind, reason, &message);
        let Some(sender) = &self.sender else { return };
        let (reason, message) = (reason.to_owned(), message.into_owned());
        let (nanos, recorded_at) = (sender.clock.wall_nanos(), sender.clock.now());
        let number = sender.next_number(nanos);
        let occurrence = Occurrence { object, kind, reason, message, annotations, nanos, recorded_at, number };
        if sender.queue.try_send(occurrence).is_err() {
            sender.observer.lost(Loss::QueueFull);
        }
    }
}

impl Sender {
    /// `now`, or a later nanosecond: later than every result before.
    fn next_number(&self, now: i64) -> i64 {
        let later = |last: i64| Some(now.max(last.saturating_add(1)));
        match self.last_number.fetch_update(Ordering::Relaxed, Ordering::Relaxed, later) {
            Ok(last) | Err(last) => now.max(last.saturating_add(1)),
        }
    }
}

fn log(object: &ObjectReference, kind: EventType, reason: &str, message: &str) {
    let empty = String::new();
    let part = |text: &Option<String>| text.as_ref().unwrap_or(&empty).clone();
    let (namespace, name) = (part(&object.namespace), part(&object.name));
    let (of, field_path) = (part(&object.kind), part(&object.field_path));
    let separator = if namespace.is_empty() { "" } else { "/" };
    let object = format_args!("{namespace}{separator}{name}");
    let message = text::one_line(message);
    match (kind, of.as_str()) {
        (EventType::Normal, "Pod") => {
            tracing::info!(target: "keblet::recorder", pod = %object, field_path, reason, "{message}");
        }
        (EventType::Warning, "Pod") => {
            tracing::warn!(target: "keblet::recorder", pod = %object, field_path, reason, "{message}");
        }
        (EventType::Normal, _) => {
            tracing::info!(target: "keblet::recorder", kind = of, %object, reason, "{message}");
        }
        (EventType::Warning, _) => {
            tracing::warn!(target: "keblet::recorder", kind = of, %object, reason, "{message}");
        }
    }
}

impl std::fmt::Debug for Sender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sender").field("free", &self.queue.capacity()).finish_non_exhaustive()
    }
}
