//! Delivery of the runtime's container events to readers.
//!
//! Two behaviours are simulated. containerd 1.7: one queue of 1,000 shared by all readers; events accumulate while
//! nothing reads, each is delivered to one reader, overflow is dropped, and a reader whose connection was closed
//! consumes one more. containerd 2: a queue per reader, and events before its connection are lost.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::Duration;

use keblet_proto::cri::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

/// Slots of a queue, as in containerd.
pub const QUEUE_SLOTS: usize = 1000;

/// How long a stream of [`Delivery::EndsAtOnce`] is open.
const END_DELAY: Duration = Duration::from_millis(100);

/// How events reach readers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// One queue, each event to one reader (containerd 1.7).
    Shared,
    /// A queue for each reader (containerd 2).
    PerReader,
    /// The runtime has no such call: Unimplemented.
    Unsupported,
    /// The stream ends without an event (CRI-O without `enable_pod_events`), but not before other calls are answered.
    EndsAtOnce,
}

type Event = v1::ContainerEventResponse;
type SharedReceiver = Arc<tokio::sync::Mutex<mpsc::Receiver<Event>>>;

/// The queue, or queues.
#[derive(Debug)]
pub(super) struct EventQueue {
    delivery: Delivery,
    state: Mutex<State>,
    dropped: AtomicU64,
    delivered: Arc<AtomicU64>,
}

#[derive(Debug)]
struct State {
    shared: (mpsc::Sender<Event>, SharedReceiver),
    readers: Vec<mpsc::Sender<Event>>,
    recent: VecDeque<Event>,
}

impl EventQueue {
    /// An empty queue.
    pub(super) fn new(delivery: Delivery) -> Self {
        let state = State { shared: shared(), readers: Vec::new(), recent: VecDeque::new() };
        Self { delivery, state: Mutex::new(state), dropped: AtomicU64::new(0), delivered: Arc::default() }
    }

    /// Events lost because a queue was full.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Events sent on a reader's connection.
    pub(super) fn delivered(&self) -> u64 {
        self.delivered.load(Ordering::Relaxed)
    }

    /// Adds an event without waiting.
    pub(super) fn push(&self, event: Event) {
        let mut state = self.lock();
        if state.recent.len() == QUEUE_SLOTS {
            state.recent.pop_front();
        }
        state.recent.push_back(event.clone());
        let lose = || _ = self.dropped.fetch_add(1, Ordering::Relaxed);
        match self.delivery {
            Delivery::Shared => {
                if state.shared.0.try_send(event).is_err() {
                    lose();
                }
            }
            Delivery::PerReader => state.readers.retain(|reader| match reader.try_send(event.clone()) {
                Ok(()) => true,
                Err(mpsc::error::TrySendError::Full(_)) => {
                    lose();
                    true
                }
                Err(mpsc::error::TrySendError::Closed(_)) => false,
            }),
            Delivery::Unsupported | Delivery::EndsAtOnce => {}
        }
    }

    /// A new reader's stream. Ends when `lifetime` is cancelled.
    ///
    /// # Errors
    /// Unimplemented without an event stream.
    pub(super) fn read(&self, lifetime: CancellationToken) -> Result<ReceiverStream<Result<Event, Status>>, Status> {
        let receiver = match self.delivery {
            Delivery::Unsupported => return Err(Status::unimplemented("unknown method GetContainerEvents")),
            Delivery::EndsAtOnce => {
                let (open, stream) = mpsc::channel(1);
                tokio::spawn(async move {
                    tokio::time::sleep(END_DELAY).await;
                    drop(open);
                });
                return Ok(ReceiverStream::new(stream));
            }
            Delivery::Shared => Arc::clone(&self.lock().shared.1),
            Delivery::PerReader => {
                let (sender, receiver) = mpsc::channel(QUEUE_SLOTS);
                self.lock().readers.push(sender);
                Arc::new(tokio::sync::Mutex::new(receiver))
            }
        };
        let (to_connection, stream) = mpsc::channel(1);
        let delivered = Arc::clone(&self.delivered);
        // Waits for the next event even if its connection is closed, and loses that event, as containerd does.
        let forward = async move {
            while let Some(event) = next(&receiver).await {
                if to_connection.send(Ok(event)).await.is_err() {
                    return;
                }
                delivered.fetch_add(1, Ordering::Relaxed);
            }
        };
        tokio::spawn(async move { lifetime.run_until_cancelled_owned(forward).await });
        Ok(ReceiverStream::new(stream))
    }

    /// The queue after a restart of the runtime: empty, or with the last `replay` events.
    pub(super) fn reset(&self, replay: usize) {
        let mut state = self.lock();
        state.shared = shared();
        state.readers.clear();
        let skip = state.recent.len().saturating_sub(replay);
        for event in state.recent.iter().skip(skip) {
            // The new queue is no longer than the retained events.
            let _ = state.shared.0.try_send(event.clone());
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn next(receiver: &SharedReceiver) -> Option<Event> {
    receiver.lock().await.recv().await
}

fn shared() -> (mpsc::Sender<Event>, SharedReceiver) {
    let (sender, receiver) = mpsc::channel(QUEUE_SLOTS);
    (sender, Arc::new(tokio::sync::Mutex::new(receiver)))
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt;

    use super::*;

    fn event(id: usize) -> Event {
        Event { container_id: id.to_string(), ..Default::default() }
    }

    async fn ids(stream: &mut ReceiverStream<Result<Event, Status>>, count: usize) -> Vec<String> {
        let events: Vec<_> = stream.take(count).collect().await;
        events.into_iter().map(|event| event.expect("no reader fails here").container_id).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn shared_queue_drops_events_beyond_its_capacity() {
        let queue = EventQueue::new(Delivery::Shared);
        (0..QUEUE_SLOTS + 5).for_each(|id| queue.push(event(id)));
        assert_eq!(queue.dropped(), 5);
        let mut reader = queue.read(CancellationToken::new()).expect("supported");
        let all = ids(&mut reader, QUEUE_SLOTS).await;
        assert_eq!((all.first().map(String::as_str), all.last().map(String::as_str)), (Some("0"), Some("999")));
    }

    #[tokio::test(start_paused = true)]
    async fn disconnected_reader_consumes_one_event() {
        let queue = EventQueue::new(Delivery::Shared);
        let disconnected = queue.read(CancellationToken::new()).expect("supported");
        tokio::task::yield_now().await;
        drop(disconnected);
        let mut reader = queue.read(CancellationToken::new()).expect("supported");
        tokio::task::yield_now().await;
        (0..3).for_each(|id| queue.push(event(id)));
        assert_eq!(ids(&mut reader, 2).await, ["1", "2"]);
    }

    #[tokio::test(start_paused = true)]
    async fn per_reader_queues_deliver_every_event_to_every_reader() {
        let queue = EventQueue::new(Delivery::PerReader);
        queue.push(event(0));
        let mut readers = [0, 1].map(|_| queue.read(CancellationToken::new()).expect("supported"));
        (1..3).for_each(|id| queue.push(event(id)));
        for reader in &mut readers {
            assert_eq!(ids(reader, 2).await, ["1", "2"]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn restart_clears_or_replays_the_queue() {
        let queue = EventQueue::new(Delivery::Shared);
        (0..4).for_each(|id| queue.push(event(id)));
        queue.reset(2);
        queue.push(event(4));
        let mut reader = queue.read(CancellationToken::new()).expect("supported");
        assert_eq!(ids(&mut reader, 3).await, ["2", "3", "4"]);
    }
}
