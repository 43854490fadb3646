//! Error responses of streams and commands.

use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::response::Response;
use tonic::Code;

use super::super::answer;
use crate::runtime::RuntimeError;

/// An error response.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    status: StatusCode,
    text: String,
}

impl Refusal {
    pub(super) fn bad(text: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, text: text.into() }
    }

    pub(super) fn not_found(text: impl Into<String>) -> Self {
        Self { status: StatusCode::NOT_FOUND, text: text.into() }
    }

    pub(super) fn internal(text: impl Into<String>) -> Self {
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, text: text.into() }
    }

    /// The text of the response.
    pub(super) fn text(&self) -> &str {
        &self.text
    }
}

impl From<RuntimeError> for Refusal {
    fn from(error: RuntimeError) -> Self {
        let status = match error.code() {
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self { status, text: error.rpc_text() }
    }
}

impl From<Refusal> for Response {
    fn from(refusal: Refusal) -> Self {
        if refusal.status == StatusCode::TOO_MANY_REQUESTS {
            return (refusal.status, [(header::RETRY_AFTER, "60")], refusal.text).into_response();
        }
        answer::error(refusal.status, refusal.text)
    }
}
