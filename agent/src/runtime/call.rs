//! One CRI call: its deadline, its errors, its observer.

use std::fmt;
use std::time::Duration;

use prost::Message;
use tokio::time::Instant;
use tonic::Code;
use tonic::Request;
use tonic::Response;
use tonic::Status;
use tracing::Instrument as _;

use super::Operation;
use super::RuntimeError;
use super::client::MESSAGE_LIMIT;
use crate::telemetry;

/// Observes every finished call. Cancelled calls are not reported, nor is the event stream once it is established.
pub trait CallObserver: Send + Sync {
    /// Must not block.
    fn finished(&self, call: FinishedCall);
}

/// Observes nothing.
impl CallObserver for () {
    fn finished(&self, _: FinishedCall) {}
}

/// A finished call.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FinishedCall {
    /// Which call; `Operation::metric` is upstream's label.
    pub operation: Operation,
    /// From its start to its answer or failure.
    pub duration: Duration,
    /// The status code of a failure.
    pub error: Option<Code>,
}

/// A call before it is sent.
pub(super) struct Call<'a> {
    pub(super) operation: Operation,
    pub(super) object: &'a str,
    pub(super) endpoint: &'a str,
    pub(super) deadline: Option<Duration>,
    pub(super) observer: &'a dyn CallObserver,
}

impl Call<'_> {
    /// Gives the call another deadline, or none.
    pub(super) fn within(mut self, deadline: Option<Duration>) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sends `message` by way of `rpc` and waits for the answer until the deadline. The runtime receives the deadline too,
    /// so that it gives up at the same time.
    ///
    /// tonic's futures hold a large message several times over, so they are boxed.
    ///
    /// # Errors
    /// No connection, no answer until the deadline, an error from the runtime, or a message over the size limit.
    pub(super) fn send<M: Message, T>(
        &self,
        message: M,
        rpc: impl AsyncFnOnce(Request<M>) -> Result<Response<T>, Status>,
    ) -> impl Future<Output = Result<T, RuntimeError>> {
        let length = message.encoded_len();
        let mut request = Request::new(message);
        if let Some(deadline) = self.deadline {
            request.set_timeout(deadline);
        }
        let span = telemetry::call(self.operation.service(), self.operation.rpc());
        telemetry::pass_on(&span, request.metadata_mut());
        let answer = Box::pin(rpc(request));
        let recorded = span.clone();
        let outcome = async move {
            if length > MESSAGE_LIMIT {
                return Err(self.too_large(length));
            }
            let outcome = self.observe(answer).await.map(Response::into_inner);
            telemetry::called(&recorded, outcome.as_ref().err().map_or(Code::Ok, RuntimeError::code));
            outcome
        };
        outcome.instrument(span)
    }

    async fn observe<T>(&self, answer: impl Future<Output = Result<T, Status>>) -> Result<T, RuntimeError> {
        let start = Instant::now();
        let outcome = self.await_until_deadline(start, answer).await;
        let duration = start.elapsed();
        let error = outcome.as_ref().err().map(RuntimeError::code);
        self.observer.finished(FinishedCall { operation: self.operation, duration, error });
        tracing::trace!(operation = %self.operation, object = self.object, ?duration, ?error, "CRI call");
        outcome
    }

    async fn await_until_deadline<T>(
        &self,
        start: Instant,
        answer: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, RuntimeError> {
        let Some(deadline) = self.deadline else {
            return answer.await.map_err(|status| self.error(&status));
        };
        match tokio::time::timeout(deadline, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            // tonic watches the same deadline and reports it as a cancelled call.
            Ok(Err(status)) if status.code() == Code::Cancelled && start.elapsed() >= deadline => {
                Err(self.expired(deadline))
            }
            Ok(Err(status)) => Err(self.error(&status)),
            Err(_) => Err(self.expired(deadline)),
        }
    }

    /// The value that the answer must have.
    ///
    /// # Errors
    /// It is missing.
    pub(super) fn required<T>(&self, missing: &'static str, value: Option<T>) -> Result<T, RuntimeError> {
        value.ok_or_else(|| RuntimeError::Incomplete { operation: self.operation, object: self.object.into(), missing })
    }

    /// The id that the answer must have.
    ///
    /// # Errors
    /// It is empty.
    pub(super) fn required_id(&self, missing: &'static str, id: String) -> Result<String, RuntimeError> {
        self.required(missing, Some(id).filter(|id| !id.is_empty()))
    }

    pub(super) fn error(&self, status: &Status) -> RuntimeError {
        RuntimeError::from_status(self.operation, self.object, self.endpoint, status)
    }

    /// Reported here, because tonic would only reset the stream.
    fn too_large(&self, length: usize) -> RuntimeError {
        let message = format!("the request has {length} bytes, more than the limit of {MESSAGE_LIMIT}");
        self.error(&Status::out_of_range(message))
    }

    fn expired(&self, deadline: Duration) -> RuntimeError {
        RuntimeError::Deadline {
            operation: self.operation,
            object: self.object.into(),
            endpoint: self.endpoint.into(),
            deadline,
        }
    }
}

impl fmt::Debug for dyn CallObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CallObserver")
    }
}
