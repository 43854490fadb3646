//! The runtime's events of stopped containers.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use anyhow::Context as _;
use futures_util::StreamExt;
use keblet::runtime::ContainerEvents;
use keblet_proto::cri::v1 as cri;
use tokio::sync::oneshot;

/// Stopped containers, and waiters for others.
#[derive(Debug, Default)]
pub(crate) struct StopEvents {
    containers: Mutex<HashMap<String, StopEvent>>,
}

#[derive(Debug)]
enum StopEvent {
    Stopped,
    Awaited(oneshot::Sender<()>),
}

impl StopEvents {
    /// Reads `events` until the stream ends; then all waits fail.
    pub(crate) async fn read(&self, mut events: ContainerEvents) {
        while let Some(Ok(event)) = events.next().await {
            if event.container_event_type() == cri::ContainerEventType::ContainerStoppedEvent {
                self.stopped(event.container_id);
            }
        }
        self.lock().clear();
    }

    fn stopped(&self, id: String) {
        if let Some(StopEvent::Awaited(waiter)) = self.lock().insert(id, StopEvent::Stopped) {
            // A waiter that was dropped needs no notification.
            let _ = waiter.send(());
        }
    }

    /// Returns once the container has stopped.
    ///
    /// # Errors
    /// The event stream ended.
    pub(super) async fn wait(&self, id: &str) -> anyhow::Result<()> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut containers = self.lock();
            if let Some(StopEvent::Stopped) = containers.get(id) {
                return Ok(());
            }
            containers.insert(id.to_owned(), StopEvent::Awaited(sender));
        }
        receiver.await.context("the event stream ended")
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, StopEvent>> {
        self.containers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn stops_before_and_after_the_begin_of_a_wait_are_reported() {
        let events = StopEvents::default();
        events.stopped("early".to_owned());
        events.wait("early").now_or_never().expect("already reported").unwrap();

        let mut late = std::pin::pin!(events.wait("late"));
        assert!(late.as_mut().now_or_never().is_none());
        events.stopped("other".to_owned());
        assert!(late.as_mut().now_or_never().is_none());
        events.stopped("late".to_owned());
        late.await.unwrap();
    }

    #[tokio::test]
    async fn waiting_fails_when_the_stream_ends() {
        let events = StopEvents::default();
        let mut wait = std::pin::pin!(events.wait("a"));
        assert!(wait.as_mut().now_or_never().is_none());
        events.lock().clear();
        assert!(wait.await.is_err());
    }
}
