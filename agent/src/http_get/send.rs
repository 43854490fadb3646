//! Sends a request, follows redirects, reads the response.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use hyper::body::Body as _;
use tokio::time::Instant;
use tokio::time::timeout_at;

use super::HttpGet;
use super::HttpGetError;
use super::MAX_BODY;
use super::connection::Exchange;
use super::connection::exchange;
use super::connection::reason;
use super::redirect::next_request;

/// The final response.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Response {
    /// Its status.
    pub status: StatusCode,
    /// Its body up to [`MAX_BODY`] bytes, as sent (compressed if the server did so).
    pub body: Bytes,
}

/// Sends a request and follows redirects to the same host, all within `timeout`. Dropping the future closes the connection.
///
/// # Errors
/// There is no complete response; any status is one.
pub async fn send(request: &HttpGet, timeout: Duration) -> Result<Response, HttpGetError> {
    let deadline = Instant::now() + timeout;
    let answered = timeout_at(deadline, redirected(request)).await;
    let mut exchange = answered.unwrap_or_else(|_| Err(HttpGetError::Timeout { url: request.url() }))?;
    let read = timeout_at(deadline, read_body(&mut exchange)).await;
    let body = read.unwrap_or_else(|_| {
        let reason = "context deadline exceeded (Client.Timeout or context cancellation while reading body)";
        Err(HttpGetError::Body { reason: reason.to_owned() })
    })?;
    Ok(Response { status: exchange.response.status(), body })
}

/// Sends a request and follows redirects to the same host, for a sender that does not use the content of the body.
/// Waits for the response as long as the server does, so the caller has to limit it. That includes the body, up to
/// [`MAX_BODY`]: a server may send the head first and then do what it is asked for. As upstream, a body that is announced to
/// be longer is not waited for. Dropping the future closes the connection.
///
/// # Errors
/// There is no response; any status is one.
pub async fn notify(request: &HttpGet) -> Result<StatusCode, HttpGetError> {
    let mut exchange = redirected(request).await?;
    let announced = exchange.response.body().size_hint().exact();
    if announced.is_none_or(|length| length <= MAX_BODY as u64) {
        // Its content is not used, and it need not be complete.
        let _ = read_body(&mut exchange).await;
    }
    Ok(exchange.response.status())
}

/// The head of the final response.
async fn redirected(first: &HttpGet) -> Result<Exchange, HttpGetError> {
    let mut request = first.clone();
    let mut count = 1;
    loop {
        let exchange = exchange(&request).await?;
        let (status, headers) = (exchange.response.status(), exchange.response.headers());
        match next_request(first, &request, count, status, headers)? {
            Some(next) => request = next,
            None => return Ok(exchange),
        }
        count += 1;
    }
}

async fn read_body(exchange: &mut Exchange) -> Result<Bytes, HttpGetError> {
    let mut body = Vec::new();
    while body.len() < MAX_BODY
        && let Some(frame) = exchange.next_frame().await
    {
        let frame = frame.map_err(|error| HttpGetError::Body { reason: reason(&error) })?;
        if let Ok(data) = frame.into_data() {
            let missing = MAX_BODY - body.len();
            body.extend_from_slice(&data[..data.len().min(missing)]);
        }
    }
    Ok(body.into())
}
