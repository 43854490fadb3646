//! A pod that does not thrash: it answers requests with what it reads from a file, and how long it takes is measured.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use crate::stamps::monotonic_now;
use crate::stamps::seconds;

/// Requests are sent in this rhythm, whether or not earlier ones are answered: a stall delays all that are sent in it.
const PERIOD: Duration = Duration::from_millis(200);
/// A request without an answer counts as one that took so long.
const LIMIT: Duration = Duration::from_secs(10);

/// A request.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Request {
    /// Nanoseconds of CLOCK_MONOTONIC.
    sent: u64,
    /// Seconds until it was answered.
    took: f64,
}

/// Asks for as long as it is kept.
#[derive(Debug)]
pub(super) struct Asking {
    requests: Arc<Mutex<Vec<Request>>>,
    _task: AbortOnDropHandle<()>,
}

impl Asking {
    /// Begins to ask.
    ///
    /// # Errors
    /// The HTTP client cannot be built.
    pub(super) fn begin(port: u16) -> anyhow::Result<Self> {
        // A connection for each request.
        let client = reqwest::Client::builder()
            .no_proxy()
            .timeout(LIMIT)
            .pool_max_idle_per_host(0)
            .tls_certs_only([])
            .build()?;
        let url = format!("http://127.0.0.1:{port}/");
        let requests = Arc::new(Mutex::new(Vec::new()));
        let answered = requests.clone();
        let task = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(PERIOD);
            let mut pending = JoinSet::new();
            loop {
                ticks.tick().await;
                let (client, url, answered) = (client.clone(), url.clone(), answered.clone());
                pending.spawn(async move {
                    let Ok(sent) = monotonic_now() else { return };
                    let result = client.get(url).send().await.and_then(|response| response.error_for_status());
                    let Ok(now) = monotonic_now() else { return };
                    let took = if result.is_ok() { seconds(sent, now) } else { LIMIT.as_secs_f64() };
                    answered.lock().unwrap_or_else(PoisonError::into_inner).push(Request { sent, took });
                });
                while pending.try_join_next().is_some() {}
            }
        });
        Ok(Self { requests, _task: AbortOnDropHandle::new(task) })
    }

    /// How long the requests took that were sent within this time; all of them must have been answered.
    pub(super) fn between(&self, begin: u64, end: u64) -> Vec<f64> {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.iter().filter(|request| (begin..end).contains(&request.sent)).map(|request| request.took).collect()
    }

    /// After this time every request that was sent before is answered, or counts as not answered.
    pub(super) fn limit() -> Duration {
        LIMIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_are_selected_by_when_they_were_sent() {
        let requests = [(5, 0.1), (10, 0.2), (19, 0.3), (20, 0.4)].map(|(sent, took)| Request { sent, took });
        let task = AbortOnDropHandle::new(tokio::spawn(async {}));
        let asking = Asking { requests: Arc::new(Mutex::new(requests.to_vec())), _task: task };
        assert_eq!(asking.between(10, 20), [0.2, 0.3]);
    }
}
