//! Ends the pauses of retries when the API server is available again: a long pause after the last of many errors must
//! not outlast the errors.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::StatusCode;
use tokio::sync::watch;
use tokio::time::Instant;

/// All waiting callers retry within this time, each at a random moment.
const SPREAD: Duration = Duration::from_secs(1);

/// Observes the outcomes of all requests.
#[derive(Debug, Default)]
pub struct Recovery {
    unavailable: Arc<AtomicBool>,
    recovered: watch::Sender<()>,
}

impl Recovery {
    /// A request was not answered.
    pub fn failed(&self) {
        self.unavailable.store(true, Ordering::Relaxed);
    }

    /// A request was answered. Only success counts as recovery: a starting server answers with errors for a while, and
    /// a proxy answers in its place. Errors for a single kind of object are no outage: its callers must not be woken by
    /// the success of other requests.
    pub fn answered(&self, status: StatusCode) {
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE => self.failed(),
            status if status.is_success() && self.unavailable.swap(false, Ordering::Relaxed) => self.over(),
            _ => {}
        }
    }

    /// What failed so far may succeed now: ends all pauses.
    pub fn over(&self) {
        self.recovered.send_replace(());
    }

    /// A handle to wait with.
    pub fn subscribe(&self) -> Recovered {
        let (unavailable, recovered) = (self.unavailable.clone(), self.recovered.subscribe());
        Recovered(Some(Waiting { unavailable, recovered }))
    }
}

/// Ends pauses early. The default value never does.
#[derive(Clone, Debug, Default)]
pub struct Recovered(Option<Waiting>);

#[derive(Clone, Debug)]
struct Waiting {
    unavailable: Arc<AtomicBool>,
    recovered: watch::Receiver<()>,
}

impl Recovered {
    /// An answer broke off that had been served for a while. Its request was answered, so nothing else reports the outage
    /// if the server is back before the next request.
    pub(super) fn broke_off(&self) {
        if let Some(waiting) = &self.0 {
            waiting.unavailable.store(true, Ordering::Relaxed);
        }
    }

    /// Waits for `pause`, or until shortly after the server has recovered (true). A recovery since the last wait counts, so
    /// that none is missed between an error and the pause after it. Can be cancelled.
    pub async fn wait(&mut self, pause: Duration) -> bool {
        let until = Instant::now() + pause;
        let over = async {
            let recovered = match &mut self.0 {
                Some(waiting) => waiting.recovered.changed().await.is_ok(),
                None => false,
            };
            if !recovered {
                std::future::pending().await
            }
        };
        let recovered = tokio::time::timeout_at(until, over).await.is_ok();
        if recovered {
            let soon = Instant::now() + SPREAD.mul_f64(fastrand::f64());
            tokio::time::sleep_until(soon.min(until)).await;
        }
        recovered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    async fn waited(recovered: &mut Recovered) -> Duration {
        let began = Instant::now();
        recovered.wait(LONG).await;
        began.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_success_after_an_outage_ends_pauses() {
        let recovery = Recovery::default();
        let mut recovered = recovery.subscribe();
        recovery.answered(StatusCode::OK);
        assert_eq!(waited(&mut recovered).await, LONG, "there was no outage");
        recovery.failed();
        for still_starting in [403, 429, 500, 503, 401] {
            recovery.answered(StatusCode::from_u16(still_starting).expect("a status"));
        }
        assert_eq!(waited(&mut recovered).await, LONG, "nothing has succeeded");
        recovery.answered(StatusCode::CREATED);
        assert!(waited(&mut recovered).await <= SPREAD, "the recovery was before the wait");
        recovery.answered(StatusCode::OK);
        assert_eq!(waited(&mut recovered).await, LONG, "one recovery ends one pause");
        for absence in [StatusCode::UNAUTHORIZED, StatusCode::BAD_GATEWAY, StatusCode::SERVICE_UNAVAILABLE] {
            recovery.answered(absence);
            recovery.answered(StatusCode::OK);
            assert!(waited(&mut recovered).await <= SPREAD, "{absence}");
        }
        for no_absence in [StatusCode::FORBIDDEN, StatusCode::TOO_MANY_REQUESTS, StatusCode::INTERNAL_SERVER_ERROR] {
            recovery.answered(no_absence);
            recovery.answered(StatusCode::OK);
            assert_eq!(waited(&mut recovered).await, LONG, "{no_absence}");
        }
        assert_eq!(waited(&mut Recovered::default()).await, LONG);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_broke_off_is_an_outage_until_the_next_success() {
        let recovery = Recovery::default();
        let (broken, mut waiting) = (recovery.subscribe(), recovery.subscribe());
        broken.broke_off();
        assert_eq!(waited(&mut waiting).await, LONG);
        recovery.answered(StatusCode::OK);
        assert!(waited(&mut waiting).await <= SPREAD);
        recovery.answered(StatusCode::OK);
        assert_eq!(waited(&mut waiting).await, LONG);
        Recovered::default().broke_off();
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_callers_retry_at_different_moments() {
        let recovery = Recovery::default();
        recovery.failed();
        let waiting: Vec<_> = (0..200)
            .map(|_| {
                let mut recovered = recovery.subscribe();
                tokio::spawn(async move {
                    recovered.wait(LONG).await;
                    Instant::now()
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_secs(5)).await;
        let back = Instant::now();
        recovery.answered(StatusCode::OK);
        let mut tenths = [0; 10];
        for waiter in waiting {
            let after = waiter.await.expect("no panic") - back;
            assert!(after <= SPREAD + Duration::from_millis(1), "{after:?}");
            tenths[usize::try_from(after.as_millis() / 100).expect("small").min(9)] += 1;
        }
        assert!(tenths.iter().all(|asking| *asking < 60), "{tenths:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_never_made_longer() {
        let recovery = Recovery::default();
        let mut recovered = recovery.subscribe();
        recovery.over();
        let began = Instant::now();
        recovered.wait(Duration::from_millis(10)).await;
        assert!(began.elapsed() <= Duration::from_millis(10), "{:?}", began.elapsed());
    }
}
