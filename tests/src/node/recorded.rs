//! Events of the agent, recorded as the requests that send them.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use http_body_util::BodyExt as _;
use keblet::model::Clock;
use keblet::recorder::Deferral;
use keblet::recorder::Loss;
use keblet::recorder::Recorder;
use keblet::recorder::RecorderObserver;
use tokio_util::sync::CancellationToken;

/// Recorded requests: method, and the event or the patch of it.
pub type RecordedEvents = Arc<Mutex<Vec<(http::Method, serde_json::Value)>>>;

struct NothingIsLost;

impl RecorderObserver for NothingIsLost {
    fn lost(&self, why: Loss) {
        panic!("{why:?}");
    }
}

struct AtOnce;

impl Deferral for AtOnce {
    async fn ready(&self, _: Duration) {}
}

/// A recorder, and the requests that it sends. No event may be lost.
pub fn recorder() -> (Recorder, RecordedEvents) {
    let (recorder, queue) = Recorder::delivering("sim", Clock::System, Arc::new(NothingIsLost));
    let requests = RecordedEvents::default();
    let service = tower::service_fn({
        let requests = requests.clone();
        move |request: http::Request<kube::client::Body>| {
            let requests = requests.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
                let event = serde_json::from_slice(&body).map_err(std::io::Error::other)?;
                requests.lock().expect("not poisoned").push((head.method, event));
                let response = http::Response::builder().status(200);
                response.body(kube::client::Body::from(body.to_vec())).map_err(std::io::Error::other)
            }
        }
    });
    tokio::spawn(queue.deliver(kube::Client::new(service, "default"), AtOnce, CancellationToken::new()));
    (recorder, requests)
}
