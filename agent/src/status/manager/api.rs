//! Calls about pods to the API server, as a trait for tests; [`KubePods`] is the real client.

use std::time::Duration;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::Client;
use kube::api::DeleteParams;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::api::PostParams;
use kube::api::Preconditions;
use serde_json::Value;

use crate::model::PodRef;

/// Timeout of a call. After it the call may or may not have been executed.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Why a call about a pod failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PodApiError {
    /// There is no such pod.
    #[error("the pod does not exist")]
    NotFound,
    /// The pod of that name is another one, or it changed underneath.
    #[error("conflict: {0}")]
    Conflict(String),
    /// The API server rejected it: nothing was changed.
    #[error("refused: {0}")]
    Refused(String),
    /// The API server failed, or a server that it called: it is unknown whether the call was executed.
    #[error("the API server failed: {0}")]
    Failed(String),
    /// It was executed; the pod in the answer cannot be decoded.
    #[error("the pod cannot be decoded: {0}")]
    Undecodable(String),
    /// It is unknown whether it was executed.
    #[error("no answer: {0}")]
    Unanswered(String),
}

impl PodApiError {
    /// True if the API server has answered, so that the call may fail for as long as its object is what it is. An outage
    /// concerns all calls.
    pub const fn is_answer(&self) -> bool {
        !matches!(self, Self::Unanswered(_))
    }
}

/// The future of an answer.
pub type Answer<'a, T> = BoxFuture<'a, Result<T, PodApiError>>;

/// Calls about pods. Dropping the future cancels the call, which may have been executed.
pub trait PodApi: Send + Sync + 'static {
    /// The pod of this name, whatever its UID.
    fn get<'a>(&'a self, pod: &'a PodRef) -> Answer<'a, Pod>;
    /// Changes the status by a strategic-merge patch; answers with the whole pod.
    fn patch_status<'a>(&'a self, pod: &'a PodRef, patch: &'a Value) -> Answer<'a, Pod>;
    /// Deletes the pod with this UID at once, without grace.
    fn delete<'a>(&'a self, pod: &'a PodRef) -> Answer<'a, ()>;
    /// Creates a pod; answers with it as the API has it.
    fn create<'a>(&'a self, pod: &'a Pod) -> Answer<'a, Pod>;
}

/// The API server's pods.
#[derive(Clone)]
pub struct KubePods {
    client: Client,
}

impl KubePods {
    /// Calls through this client, which keeps the rate limits.
    pub fn new(client: Client) -> Self {
        Self { client }
    }

    fn of(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.client.clone(), namespace)
    }
}

impl PodApi for KubePods {
    fn get<'a>(&'a self, pod: &'a PodRef) -> Answer<'a, Pod> {
        let pods = self.of(&pod.namespace);
        Box::pin(async move { answered(pods.get(&pod.name)).await })
    }

    fn patch_status<'a>(&'a self, pod: &'a PodRef, patch: &'a Value) -> Answer<'a, Pod> {
        let pods = self.of(&pod.namespace);
        let params = PatchParams::default();
        Box::pin(async move { answered(pods.patch_status(&pod.name, &params, &Patch::Strategic(patch))).await })
    }

    fn delete<'a>(&'a self, pod: &'a PodRef) -> Answer<'a, ()> {
        let pods = self.of(&pod.namespace);
        let preconditions = Preconditions { uid: Some(pod.uid.to_string()), ..Preconditions::default() };
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(preconditions),
            ..DeleteParams::default()
        };
        Box::pin(async move {
            match answered(pods.delete(&pod.name, &params)).await {
                Ok(_) | Err(PodApiError::Undecodable(_)) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }

    fn create<'a>(&'a self, pod: &'a Pod) -> Answer<'a, Pod> {
        let pods = self.of(pod.metadata.namespace.as_deref().unwrap_or_default());
        let params = PostParams::default();
        Box::pin(async move { answered(pods.create(&params, pod)).await })
    }
}

async fn answered<T>(call: impl Future<Output = Result<T, kube::Error>>) -> Result<T, PodApiError> {
    match tokio::time::timeout(ANSWER_LIMIT, call).await {
        Ok(answer) => answer.map_err(|error| failure(&error)),
        Err(_) => Err(PodApiError::Unanswered(format!("timeout after {ANSWER_LIMIT:?}"))),
    }
}

/// An answer of the 4xx kind is definite; after anything else the call may have been carried out.
fn failure(error: &kube::Error) -> PodApiError {
    match error {
        kube::Error::Api(status) => match status.code {
            404 => PodApiError::NotFound,
            409 => PodApiError::Conflict(status.message.clone()),
            400..=499 => PodApiError::Refused(format!("{} {}", status.code, status.message)),
            code => PodApiError::Failed(format!("{code} {}", status.message)),
        },
        // Well-formed, so that it is from an API server and complete.
        kube::Error::SerdeError(error) if error.is_data() => PodApiError::Undecodable(error.to_string()),
        error => PodApiError::Unanswered(chain(error)),
    }
}

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn definite_answers_differ_from_lost_ones() {
        let of =
            |code| failure(&kube::Error::Api(Box::new(Status { code, message: "why".into(), ..Status::default() })));
        assert_eq!(of(404), PodApiError::NotFound);
        assert_eq!(of(409), PodApiError::Conflict("why".into()));
        assert_eq!(of(403), PodApiError::Refused("403 why".into()));
        assert_eq!(of(422), PodApiError::Refused("422 why".into()));
        assert_eq!(of(429), PodApiError::Refused("429 why".into()));
        assert_eq!(of(500), PodApiError::Failed("500 why".into()));
        assert_eq!(of(504), PodApiError::Failed("504 why".into()));
        assert!([403, 404, 409, 500].into_iter().all(|code| of(code).is_answer()));
        let away = failure(&kube::Error::Service("connection refused".into()));
        assert!(!away.is_answer(), "{away:?}");
        let decoded = |text: &str| failure(&kube::Error::SerdeError(serde_json::from_str::<Pod>(text).unwrap_err()));
        let beyond = decoded(r#"{"status": {"startTime": "9999-12-31T23:59:59Z"}}"#);
        assert!(matches!(beyond, PodApiError::Undecodable(_)), "{beyond:?}");
        for other in ["<html>", r#"{"status": {"#, ""] {
            let lost = decoded(other);
            assert!(matches!(lost, PodApiError::Unanswered(_)), "{lost:?}");
        }
    }
}
