//! One request on one connection. Dropping the future closes the connection.

use std::future::Future;
use std::pin::Pin;
use std::task::Context;

use bytes::Bytes;
use http::HeaderMap;
use http::HeaderValue;
use http::Request;
use http::Response;
use http::Uri;
use http::header;
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;

use super::HttpGet;
use super::HttpGetError;
use super::MAX_HEAD;
use super::dial::dial;
use super::http2::Http2;
use super::http2::TasksGuard;
use super::target::Scheme;
use super::tls;
use super::tls::HandshakeError;

/// The most headers of a response. The parser fills 64 bytes for each, however few there are, in every response.
const MAX_HEADERS: usize = 200;

/// The connection's other half, which has to be polled while its response is read; `None` once it has ended.
type Driver = Option<Pin<Box<dyn Future<Output = ()> + Send>>>;

/// The head of a response, with the connection that its body comes from.
pub(super) struct Exchange {
    pub(super) response: Response<Incoming>,
    driver: Driver,
    /// Those of HTTP/2, which drive themselves.
    _tasks: TasksGuard,
}

impl Exchange {
    /// Awaits the next frame of the body.
    pub(super) async fn next_frame(&mut self) -> Option<Result<hyper::body::Frame<Bytes>, hyper::Error>> {
        let body = self.response.body_mut();
        driven(&mut self.driver, http_body_util::BodyExt::frame(body)).await
    }
}

/// Sends a request and awaits the head of its response. Has no timeout: the caller sets one.
pub(super) async fn exchange(request: &HttpGet) -> Result<Exchange, HttpGetError> {
    let url = || request.url();
    let target = &request.target;
    let stream = dial(&target.host, target.port()).await;
    let stream = stream.map_err(|source| HttpGetError::Dial { url: url(), source })?;
    match target.scheme {
        Scheme::Http => over_http1(request, stream).await,
        // In line, it would make the task of each probe three times as large, which is copied when the probe starts.
        Scheme::Https => Box::pin(over_tls(request, stream)).await,
    }
}

async fn over_tls(request: &HttpGet, stream: TcpStream) -> Result<Exchange, HttpGetError> {
    let url = || request.url();
    let stream = tls::handshake(stream, request.target.host_without_zone(), request.http2).await;
    let stream = stream.map_err(|error| match error {
        HandshakeError::HttpResponse => HttpGetError::HttpResponseToHttps { url: url() },
        HandshakeError::Failed(reason) => HttpGetError::Tls { url: url(), reason },
    })?;
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2".as_slice());
    if is_http2 { over_http2(request, stream).await } else { over_http1(request, stream).await }
}

async fn over_http1(
    request: &HttpGet,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> Result<Exchange, HttpGetError> {
    let failed = |error: hyper::Error| exchange_failed(request, &error);
    let mut builder = http1::Builder::new();
    builder.title_case_headers(true).max_buf_size(MAX_HEAD).max_headers(MAX_HEADERS);
    // Servers that write headers in these forms are probed with success by upstream, whose client reads them.
    builder.allow_spaces_after_header_name_in_responses(true).allow_obsolete_multiline_headers_in_responses(true);
    let (mut sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(failed)?;
    let message = http1_message(request)?;
    let mut driver: Driver = Some(Box::pin(async move { _ = connection.await }));
    let response = driven(&mut driver, sender.send_request(message)).await.map_err(failed)?;
    Ok(Exchange { response, driver, _tasks: TasksGuard::default() })
}

async fn over_http2(
    request: &HttpGet,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> Result<Exchange, HttpGetError> {
    let failed = |error: hyper::Error| exchange_failed(request, &error);
    let Http2 { mut sender, tasks } = Http2::connect(stream).await.map_err(failed)?;
    let response = sender.send_request(http2_message(request)?).await.map_err(failed)?;
    Ok(Exchange { response, driver: None, _tasks: tasks })
}

fn http1_message(request: &HttpGet) -> Result<Request<Empty<Bytes>>, HttpGetError> {
    let authority = HeaderValue::from_str(&request.target.authority()).map_err(|error| invalid(request, &error))?;
    let uri = request.target.path_and_query().parse().map_err(|error| invalid(request, &error))?;
    let mut headers = HeaderMap::new();
    headers.insert(header::HOST, request.host.clone().unwrap_or(authority));
    headers.extend(request.headers.clone());
    Ok(message(uri, headers))
}

fn http2_message(request: &HttpGet) -> Result<Request<Empty<Bytes>>, HttpGetError> {
    let host = request.host.as_ref().and_then(|host| host.to_str().ok()).map(str::to_owned);
    let uri = Uri::builder()
        .scheme(request.target.scheme.name())
        .authority(host.unwrap_or_else(|| request.target.authority()))
        .path_and_query(request.target.path_and_query())
        .build()
        .map_err(|error| invalid(request, &error))?;
    let mut headers = request.headers.clone();
    // HTTP/2 has no headers for the connection.
    headers.remove(header::CONNECTION);
    Ok(message(uri, headers))
}

fn message(uri: Uri, headers: HeaderMap) -> Request<Empty<Bytes>> {
    let mut message = Request::new(Empty::new());
    *message.uri_mut() = uri;
    *message.headers_mut() = headers;
    message
}

fn invalid(request: &HttpGet, error: &dyn std::fmt::Display) -> HttpGetError {
    HttpGetError::Invalid { url: request.url(), reason: error.to_string() }
}

fn exchange_failed(request: &HttpGet, error: &hyper::Error) -> HttpGetError {
    HttpGetError::Exchange { url: request.url(), reason: reason(error) }
}

/// An error of the client with what caused it.
pub(super) fn reason(error: &hyper::Error) -> String {
    match std::error::Error::source(error) {
        _ if error.is_incomplete_message() => "EOF".to_owned(),
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// Awaits `work` while the connection is driven.
async fn driven<T>(driver: &mut Driver, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(move |cx: &mut Context<'_>| {
        if driver.as_mut().is_some_and(|driver| driver.as_mut().poll(cx).is_ready()) {
            *driver = None;
        }
        work.as_mut().poll(cx)
    })
    .await
}
