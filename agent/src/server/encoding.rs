//! Turns in which large responses are encoded: pods, metrics and usage of a full node are megabytes, whose encoding and
//! compression takes up to hundreds of milliseconds. The threads that everything else runs on are two: exits, probes and pod
//! workers would wait for clients that read metrics.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::Semaphore;
use tokio::task::JoinError;
use tokio::task::spawn_blocking;

use super::answer;

/// Responses that are encoded at the same time.
const AT_ONCE: usize = 2;

/// Gives turns. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Turns(Arc<Semaphore>);

impl Default for Turns {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(AT_ONCE)))
    }
}

impl Turns {
    /// Waits for a turn. Cancel-safe.
    pub(super) async fn next(&self) -> Turn {
        // The semaphore is never closed.
        Turn { _permit: self.0.clone().acquire_owned().await.ok() }
    }

    /// The response that `encode` makes in the next turn, on a thread that may block.
    pub(super) async fn encoded(&self, encode: impl FnOnce() -> Response + Send + 'static) -> Response {
        self.next().await.encoded(encode).await
    }
}

/// A turn, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    _permit: Option<OwnedSemaphorePermit>,
}

impl Turn {
    /// The response that `encode` makes, on a thread that may block.
    pub(super) async fn encoded(self, encode: impl FnOnce() -> Response + Send + 'static) -> Response {
        let encoding = spawn_blocking(move || {
            // Held by the thread, which works on when the client has gone.
            let _turn = self;
            encode()
        });
        // A panic in it is logged.
        encoding.await.unwrap_or_else(|error: JoinError| {
            answer::error(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot encode the response: {error}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;

    use axum::response::IntoResponse as _;
    use futures_util::future::join_all;

    use super::*;

    #[tokio::test]
    async fn a_few_are_encoded_at_the_same_time() {
        let turns = Turns::default();
        // Reached only by two at a time.
        let (both, running, most) =
            (Arc::new(Barrier::new(AT_ONCE)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let encode = |_| {
            let (both, running, most) = (both.clone(), running.clone(), most.clone());
            turns.encoded(move || {
                most.fetch_max(running.fetch_add(1, SeqCst) + 1, SeqCst);
                both.wait();
                running.fetch_sub(1, SeqCst);
                "done".into_response()
            })
        };
        let all = join_all((0..4 * AT_ONCE).map(encode)).await;
        assert!(all.iter().all(|response| response.status() == StatusCode::OK));
        assert_eq!(most.load(SeqCst), AT_ONCE);
    }

    #[tokio::test]
    async fn a_panic_fails_its_response_alone() {
        let turns = Turns::default();
        for _ in 0..=AT_ONCE {
            let failed = turns.encoded(|| panic!("this test makes it panic")).await;
            assert_eq!(failed.status(), StatusCode::INTERNAL_SERVER_ERROR);
        }
        assert_eq!(turns.encoded(|| "done".into_response()).await.status(), StatusCode::OK);
    }
}
