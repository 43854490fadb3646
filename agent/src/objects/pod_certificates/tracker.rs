//! This node's PodCertificateRequests, by one watch: what the signers have answered.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;
use std::time::SystemTime;

use futures_util::StreamExt as _;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequestSpec;
use k8s_openapi::api::certificates::v1beta1::PodCertificateRequestStatus;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Api;
use kube::core::Object;
use kube::runtime::watcher::Config;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::apiserver::recovery::Recovered;
use crate::apiserver::watch::Event;
use crate::apiserver::watch::follow;
use crate::model::PodUid;
use crate::objects::ObjectError;
use crate::objects::panics::Panics;
use crate::objects::pem_blocks;
use crate::objects::registration::Listeners;

/// A list that was requested before a request was created, and does not have it, arrives within this time.
const LIST_LAG: Duration = Duration::from_secs(60);

/// A request, as the API has it.
pub(super) type CertificateRequest = Object<PodCertificateRequestSpec, PodCertificateRequestStatus>;

/// The state of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The signer has not answered.
    Pending,
    /// It has issued a certificate.
    Issued(Issued),
    /// It has not, and will not.
    Refused(Refusal),
}

/// A certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Issued {
    /// PEM, with nothing but certificates.
    pub(super) chain: String,
    pub(super) begin_refresh_at: Option<SystemTime>,
    pub(super) not_after: Option<SystemTime>,
}

/// Why there is no certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// Type of the condition, and reason of the event: `Denied` or `Failed`.
    pub(super) verdict: &'static str,
    pub(super) reason: String,
    pub(super) message: String,
}

impl Refusal {
    pub(super) fn verb(&self) -> &'static str {
        if self.verdict == DENIED { "was denied" } else { "failed" }
    }

    /// Upstream's `state` in metrics.
    pub(super) fn state(&self) -> &'static str {
        if self.verdict == DENIED { "denied" } else { "failed" }
    }
}

impl From<Refusal> for ObjectError {
    fn from(refusal: Refusal) -> Self {
        let verdict = refusal.state();
        Self::CertificateRefused { verdict, reason: refusal.reason, message: refusal.message }
    }
}

const ISSUED: &str = "Issued";
const DENIED: &str = "Denied";
const FAILED: &str = "Failed";

/// The outcome in a request's status.
fn outcome(status: Option<&PodCertificateRequestStatus>) -> Outcome {
    let Some(status) = status else { return Outcome::Pending };
    let conditions = || status.conditions.iter().flatten().filter(|condition| condition.status == "True");
    for verdict in [DENIED, FAILED] {
        if let Some(found) = conditions().find(|condition| condition.type_ == verdict) {
            let (reason, message) = (found.reason.clone(), found.message.clone());
            return Outcome::Refused(Refusal { verdict, reason, message });
        }
    }
    if !conditions().any(|condition| condition.type_ == ISSUED) {
        return Outcome::Pending;
    }
    let chain = status.certificate_chain.as_deref().unwrap_or_default();
    match pem_blocks::certificates(chain).map(pem_blocks::chain) {
        Ok(chain) if !chain.is_empty() => {
            let time = |time: &Option<Time>| time.as_ref().map(|time| SystemTime::from(time.0));
            let (begin_refresh_at, not_after) = (time(&status.begin_refresh_at), time(&status.not_after));
            Outcome::Issued(Issued { chain, begin_refresh_at, not_after })
        }
        chain => {
            let message = chain.err().map_or_else(|| "it is empty".to_owned(), |error| error.to_string());
            Outcome::Refused(Refusal { verdict: FAILED, reason: "InvalidCertificateChain".to_owned(), message })
        }
    }
}

/// One request.
#[derive(Debug)]
struct Tracked {
    pod: PodUid,
    outcome: Outcome,
    /// When it was created here or first seen.
    since: Instant,
}

/// All requests of this node. The watch ends with this.
pub(super) struct Tracker {
    shared: Arc<Shared>,
    _watch: AbortOnDropHandle<()>,
}

struct Shared {
    requests: Mutex<HashMap<String, Tracked>>,
    /// Counts changes.
    changes: watch::Sender<u64>,
    listeners: Arc<Listeners>,
}

impl Tracker {
    /// Watches the requests of this node, and notifies their pods of changes.
    pub(super) fn start(
        api: Api<CertificateRequest>,
        node: &str,
        recovered: Recovered,
        listeners: Arc<Listeners>,
        panics: &Panics,
    ) -> Self {
        let shared = Arc::new(Shared { requests: Mutex::default(), changes: watch::channel(0).0, listeners });
        let config = Config::default().fields(&format!("spec.nodeName={node}"));
        let requests = shared.clone();
        let watching = async move {
            let mut events = pin!(follow(api, config, recovered));
            let mut listed = Vec::new();
            while let Some(event) = events.next().await {
                match event {
                    Event::Init => listed = Vec::new(),
                    Event::InitApply(request) => {
                        listed.push(name(&request));
                        requests.seen(&request);
                    }
                    Event::InitKeep(request) => listed.push(request.name),
                    Event::InitDone => requests.keep(&std::mem::take(&mut listed)),
                    Event::Apply(request) => requests.seen(&request),
                    Event::Delete(request) => requests.gone(&request.name),
                }
            }
        };
        Self { shared, _watch: panics.spawn("watch of certificate requests", watching) }
    }

    /// A request was created.
    pub(super) fn created(&self, name: &str, pod: PodUid) {
        let tracked = Tracked { pod, outcome: Outcome::Pending, since: Instant::now() };
        // The watch may have been faster.
        self.shared.all().entry(name.to_owned()).or_insert(tracked);
    }

    /// The state of a request; `None` if it does not exist any more.
    pub(super) fn outcome(&self, name: &str) -> Option<Outcome> {
        self.shared.all().get(name).map(|tracked| tracked.outcome.clone())
    }

    /// Waits until a request is answered or gone, for so long at most.
    pub(super) async fn until_answered(&self, name: &str, limit: Duration) {
        let mut changes = self.shared.changes.subscribe();
        let answered = changes.wait_for(|_| self.outcome(name) != Some(Outcome::Pending));
        let _ = tokio::time::timeout(limit, answered).await;
    }
}

impl Shared {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Tracked>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen(&self, request: &CertificateRequest) {
        let pod: PodUid = request.spec.pod_uid.as_str().into();
        let outcome = outcome(request.status.as_ref());
        let tracked = Tracked { pod: pod.clone(), outcome, since: Instant::now() };
        let news = tracked.outcome != Outcome::Pending;
        let before = self.all().insert(name(request), tracked);
        let is_known =
            |before: Tracked| self.all().get(&name(request)).is_some_and(|now| now.outcome == before.outcome);
        if news && !before.is_some_and(is_known) {
            self.notify(&pod);
        }
    }

    /// A request was deleted; one that was not answered is made again.
    fn gone(&self, name: &str) {
        let gone = self.all().remove(name);
        if let Some(gone) = gone.filter(|gone| gone.outcome == Outcome::Pending) {
            self.notify(&gone.pod);
        }
    }

    /// A list is complete: requests that are not on it are gone, unless they are too new for it.
    fn keep(&self, listed: &[String]) {
        let is_gone = |name: &String, tracked: &Tracked| !listed.contains(name) && tracked.since.elapsed() > LIST_LAG;
        let gone: Vec<String> =
            self.all().iter().filter(|(name, tracked)| is_gone(name, tracked)).map(|(name, _)| name.clone()).collect();
        gone.iter().for_each(|name| self.gone(name));
    }

    fn notify(&self, pod: &PodUid) {
        self.changes.send_modify(|count| *count += 1);
        self.listeners.notify(|uid| uid == pod);
    }
}

fn name(request: &CertificateRequest) -> String {
    request.metadata.name.clone().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use serde_json::json;

    use super::*;

    fn said(status: Value) -> Outcome {
        outcome(Some(&serde_json::from_value(status).expect("a status")))
    }

    fn condition(kind: &str, status: &str) -> Value {
        json!({"type": kind, "status": status, "reason": "R", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"})
    }

    #[test]
    fn what_a_status_says() {
        assert_eq!(outcome(None), Outcome::Pending);
        assert_eq!(said(json!({})), Outcome::Pending);
        assert_eq!(said(json!({"conditions": [condition("Issued", "False")]})), Outcome::Pending);
        for verdict in ["Denied", "Failed"] {
            let refusal = Refusal { verdict, reason: "R".to_owned(), message: "m".to_owned() };
            assert_eq!(said(json!({"conditions": [condition(verdict, "True")]})), Outcome::Refused(refusal));
        }
        let block = pem_blocks::block("CERTIFICATE", vec![1; 5]);
        let issued =
            said(json!({"conditions": [condition("Issued", "True")], "certificateChain": format!("leaf\n{block}"),
            "beginRefreshAt": "1970-01-01T00:00:10Z", "notAfter": "1970-01-01T00:00:20Z"}));
        let at = |seconds| Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(issued, Outcome::Issued(Issued { chain: block, begin_refresh_at: at(10), not_after: at(20) }));
        let odd = said(json!({"conditions": [condition("Issued", "True")], "certificateChain": "none"}));
        assert!(matches!(odd, Outcome::Refused(Refusal { verdict: "Failed", .. })), "{odd:?}");
    }
}
