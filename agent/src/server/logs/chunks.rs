//! A body in chunks of which few are unsent, and whose end is a write of its own.
//!
//! The API server passes logs to WebSocket clients with a reader that discards what it has read together with the end of
//! the body (`messageCopy` in k8s.io/streaming). So the end must not share a TLS record with the last chunk, and the
//! body has no Content-Length.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use futures_util::Stream;
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::Semaphore;

/// Chunks that are buffered for a client.
const MAX_CHUNKS: u32 = 2;

/// A chunk with its permit, which is released when the chunk was sent.
struct Chunk {
    bytes: Vec<u8>,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Chunk {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A body of these chunks. It takes the next one when at most one is unsent, and ends when all are sent.
pub(super) fn body(chunks: impl Stream<Item = Vec<u8>> + Send + 'static) -> Body {
    let unsent = Arc::new(Semaphore::new(MAX_CHUNKS as usize));
    let limited = stream::unfold((Box::pin(chunks), unsent), |(mut chunks, unsent)| async move {
        let permit = unsent.clone().acquire_owned().await.ok()?;
        let Some(bytes) = chunks.next().await else {
            drop(permit);
            // An error would be a closed semaphore, which has no more permits to wait for.
            let _ = unsent.acquire_many(MAX_CHUNKS).await;
            return None;
        };
        let chunk = Bytes::from_owner(Chunk { bytes, _permit: permit });
        Some((Ok::<Bytes, Infallible>(chunk), (chunks, unsent)))
    });
    Body::from_stream(limited)
}

/// A body of this text.
pub(super) fn text(text: String) -> Body {
    body(stream::iter([text.into_bytes()]))
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::poll;
    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn body_ends_after_its_chunks_were_sent() {
        let mut body = text("last line\n".to_owned());
        let first = body.frame().await.expect("a frame").expect("no error");
        assert_eq!(first.data_ref().map(AsRef::as_ref), Some(b"last line\n".as_slice()));
        let mut end = pin!(body.frame());
        assert!(poll!(end.as_mut()).is_pending(), "the end would be sent together with the chunk");
        drop(first);
        assert!(end.await.is_none());
    }

    #[tokio::test]
    async fn chunks_are_read_no_faster_than_they_are_sent() {
        let mut body = body(stream::iter([vec![0], vec![1], vec![2]]));
        let (first, second) = (body.frame().await, body.frame().await);
        let mut third = pin!(body.frame());
        assert!(poll!(third.as_mut()).is_pending());
        drop((first, second));
        assert!(third.await.is_some());
    }
}
