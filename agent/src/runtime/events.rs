//! The runtime's event stream.

use std::fmt;
use std::pin::Pin;
use std::task::Context;
use std::task::Poll;
use std::time::Duration;

use futures_util::Stream;
use futures_util::StreamExt;
use futures_util::stream;
use futures_util::stream::BoxStream;
use keblet_proto::cri::v1 as cri;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::Code;

use super::Operation;
use super::Runtime;
use super::RuntimeError;

/// A stream without an event that ends within this time has no events. CRI-O without `enable_pod_events` ends it at once, but
/// may answer `Version` before that.
const MAY_END: Duration = Duration::from_secs(1);

/// The stream of container events. Ends when the runtime closes it, or with an error as last item. Dropping it cancels the
/// subscription.
pub struct ContainerEvents(Option<BoxStream<'static, Result<cri::ContainerEventResponse, RuntimeError>>>);

impl Stream for ContainerEvents {
    type Item = Result<cri::ContainerEventResponse, RuntimeError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(events) = &mut self.0 else { return Poll::Ready(None) };
        let item = std::task::ready!(events.poll_next_unpin(cx));
        if !matches!(item, Some(Ok(_))) {
            self.0 = None;
        }
        Poll::Ready(item)
    }
}

impl fmt::Debug for ContainerEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ContainerEvents")
    }
}

impl Runtime {
    /// Subscribes to container events. Returns once the subscription is established, so that a list requested afterwards
    /// leaves no gap: at the first event, or when the stream has stayed open for a second. The stream itself has no deadline.
    ///
    /// Runtimes built with grpc-go send nothing, not even headers, before the first event. An answer to a `Version` call
    /// sent after the subscription on the same connection shows that the subscription was received.
    ///
    /// # Errors
    /// The runtime does not answer within the deadline, or answers with an error. A stream that ends without an event counts
    /// as unimplemented.
    pub async fn container_events(&self) -> Result<ContainerEvents, RuntimeError> {
        let mut events = self.open_events();
        let first = tokio::select! {
            biased;
            first = events.next() => Some(first),
            open = self.stays_open() => open.map(|()| None)?,
        };
        let first = match first {
            None => None,
            Some(Some(Ok(event))) => Some(Ok(event)),
            Some(Some(Err(error))) => return Err(error),
            Some(None) => return Err(ended()),
        };
        Ok(ContainerEvents(Some(stream::iter(first).chain(events).boxed())))
    }

    /// Changes with every container that this client has started, to the moment when it sent the request.
    pub(crate) fn starts(&self) -> watch::Receiver<Option<Instant>> {
        self.inner.started.subscribe()
    }

    /// Returns when a stream that was requested before stays open, unless it has ended by then.
    async fn stays_open(&self) -> Result<(), RuntimeError> {
        self.version().await?;
        tokio::time::sleep(MAY_END).await;
        Ok(())
    }

    /// The stream itself; sends its request when first polled.
    fn open_events(&self) -> BoxStream<'static, Result<cri::ContainerEventResponse, RuntimeError>> {
        let opening = self.clone();
        let reading = self.clone();
        stream::once(async move {
            let call = opening.call(Operation::GetContainerEvents, "").within(None);
            let open = async |r| opening.runtime().get_container_events(r).await;
            call.send(cri::GetEventsRequest {}, open).await
        })
        .flat_map(move |opened| match opened {
            Ok(events) => {
                let reading = reading.clone();
                let explain = move |status| reading.call(Operation::GetContainerEvents, "").error(&status);
                events.map(move |event| event.map_err(&explain)).boxed()
            }
            Err(error) => stream::once(async { Err(error) }).boxed(),
        })
        .boxed()
    }
}

fn ended() -> RuntimeError {
    RuntimeError::Failed {
        operation: Operation::GetContainerEvents,
        object: "".into(),
        code: Code::Unimplemented,
        message: "the runtime ended the event stream without an event".into(),
    }
}
