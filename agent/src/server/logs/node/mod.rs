//! `/logs/`: the node's own logs, as files and, if enabled, by queries of services (KEP-2258).
//!
//! Serves the files of one directory and the journal. Paths with `..` are refused. As by upstream, requests for a path
//! follow all symbolic links, and queries only relative ones that stay inside the directory.

mod files;
mod journal;
mod query;
mod ranges;

use std::io::Write as _;
use std::path::PathBuf;

use axum::Router;
use axum::body::Body;
use axum::extract::Path;
use axum::extract::Request;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::HeaderValue;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::Response;
use axum::routing::any;
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::Stream;
use futures_util::StreamExt as _;
use futures_util::stream;

use self::journal::LogSources;
use self::query::BadQuery;
use self::query::NodeLogQuery;
use super::super::answer;
use super::super::health;

#[derive(Clone)]
struct NodeLogs {
    places: LogSources,
    queries: bool,
}

/// The router of `/logs`. `queries` is `enableSystemLogQuery`.
pub fn router(folder: PathBuf, queries: bool) -> Router {
    let places = LogSources { journalctl: "journalctl".into(), folder };
    Router::new()
        .route("/logs", any(root))
        .route("/logs/", any(root))
        .route("/logs/{*path}", any(below))
        .with_state(NodeLogs { places, queries })
}

async fn root(State(logs): State<NodeLogs>, request: Request) -> Response {
    logs.answer("", request).await
}

async fn below(State(logs): State<NodeLogs>, Path(path): Path<String>, request: Request) -> Response {
    logs.answer(&path, request).await
}

impl NodeLogs {
    async fn answer(&self, path: &str, request: Request) -> Response {
        let parameters = answer::query_of(request.uri());
        let headers = request.headers();
        if !self.queries || !query::is_query(&parameters) {
            return files::serve(&self.places.folder, path, request.uri().query(), headers).await;
        }
        match query::parse(&parameters, path) {
            Err(BadQuery::Undecodable(text)) => refusal(StatusCode::BAD_REQUEST, &text),
            Err(BadQuery::Invalid(text)) => refusal(StatusCode::NOT_ACCEPTABLE, &text),
            Ok(NodeLogQuery::File(file)) => match files::find_below(&self.places.folder, &file).await {
                Ok(()) => files::show(files::below(&self.places.folder, &file), headers).await,
                Err(error) => {
                    let text = format!("query: Invalid value: {file:?}: {error}");
                    refusal(StatusCode::NOT_ACCEPTABLE, &text)
                }
            },
            Ok(NodeLogQuery::Services(services, options)) => {
                let pieces = journal::logs(&self.places, services, options).await;
                stream_text(pieces, headers)
            }
        }
    }
}

/// The response to an invalid query.
fn refusal(status: StatusCode, text: &str) -> Response {
    health::text((status, format!("{text}\n")))
}

fn stream_text(pieces: impl Stream<Item = Bytes> + Send + 'static, headers: &HeaderMap) -> Response {
    let compress = headers.get(header::ACCEPT_ENCODING).is_some_and(|accepted| accepted == "gzip");
    let certain = |piece| Ok::<_, std::convert::Infallible>(piece);
    let body =
        if compress { Body::from_stream(gzip(pieces).map(certain)) } else { Body::from_stream(pieces.map(certain)) };
    let mut response = Response::new(body);
    let kind = HeaderValue::from_static("text/plain;charset=UTF-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    if compress {
        response.headers_mut().insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// Compresses chunk by chunk, with the memory of one chunk and the compressor's window.
fn gzip(pieces: impl Stream<Item = Bytes> + Send + 'static) -> impl Stream<Item = Bytes> + Send + 'static {
    let encoder = GzEncoder::new(Vec::new(), Compression::fast());
    stream::unfold((Box::pin(pieces), Some(encoder)), |(mut pieces, encoder)| async move {
        let mut encoder = encoder?;
        match pieces.next().await {
            Some(piece) => {
                // Writing to memory cannot fail.
                let _ = encoder.write_all(&piece).and_then(|()| encoder.flush());
                let out = std::mem::take(encoder.get_mut());
                Some((Bytes::from(out), (pieces, Some(encoder))))
            }
            None => Some((Bytes::from(encoder.finish().unwrap_or_default()), (pieces, None))),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use http_body_util::BodyExt as _;
    use tower::ServiceExt as _;

    use super::*;

    async fn get(router: &Router, target: &str) -> (u16, String) {
        let request = axum::http::Request::get(target).body(Body::empty()).unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8_lossy(&body).into_owned())
    }

    #[tokio::test]
    async fn files_and_queries() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("syslog"), "text").unwrap();
        let router = router(dir.path().to_owned(), true);
        assert_eq!(get(&router, "/logs/syslog").await, (200, "text".to_owned()));
        assert_eq!(get(&router, "/logs?query=./syslog").await, (200, "text".to_owned()));
        assert_eq!(get(&router, "/logs/%2e%2e/%2e%2e/etc/passwd").await.0, 404);
        for (target, status) in [("?query=./none", 406), ("?query=/x.log", 406), ("?query=a&tailLines=x", 400)] {
            assert_eq!(get(&router, &format!("/logs{target}")).await.0, status, "{target}");
        }
        let refused = (406, "path not allowed in query mode\n".to_owned());
        assert_eq!(get(&router, "/logs/syslog?query=a").await, refused);
        let files_only = super::router(dir.path().to_owned(), false);
        assert!(get(&files_only, "/logs?query=/x").await.1.contains("syslog"), "queries are off: a listing");
    }

    #[tokio::test]
    async fn queries_do_not_leave_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("log");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(dir.path().join("secret"), "secret").unwrap();
        std::fs::write(folder.join("syslog"), "text").unwrap();
        for (link, target) in [("inside", "syslog"), ("outside", "../secret"), ("absolute", "/etc/passwd")] {
            std::os::unix::fs::symlink(target, folder.join(link)).unwrap();
        }
        let router = router(folder, true);
        assert_eq!(get(&router, "/logs?query=./inside").await, (200, "text".to_owned()));
        for link in ["outside", "absolute"] {
            let (status, body) = get(&router, &format!("/logs?query=./{link}")).await;
            assert_eq!(status, 406, "{body}");
            assert!(body.contains("path escapes from parent"), "{body}");
        }
    }

    #[tokio::test]
    async fn paths_of_directories_end_in_a_slash_and_those_of_files_do_not() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a:b")).unwrap();
        std::fs::write(dir.path().join("a:b/log"), "text").unwrap();
        let router = router(dir.path().to_owned(), false);
        for (target, to) in [("a:b", "a%3Ab/"), ("a:b?x=1", "a%3Ab/?x=1"), ("a:b/log/", "../log")] {
            let request = axum::http::Request::get(format!("/logs/{target}")).body(Body::empty()).unwrap();
            let response = router.clone().oneshot(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::MOVED_PERMANENTLY, "{target}");
            assert_eq!(response.headers()[header::LOCATION], to, "{target}");
        }
        assert!(get(&router, "/logs/a:b/").await.1.contains("<a href=\"log\">log</a>"));
    }

    #[tokio::test]
    async fn gzip_is_used_if_it_is_the_only_accepted_encoding() {
        let pieces = || stream::iter(["some ", "text"].map(|piece| Bytes::from_static(piece.as_bytes())));
        let headers = [(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip"))].into_iter().collect();
        let response = stream_text(pieces(), &headers);
        assert_eq!(response.headers()[header::CONTENT_ENCODING], "gzip");
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let mut text = String::new();
        flate2::read::GzDecoder::new(&body[..]).read_to_string(&mut text).unwrap();
        assert_eq!(text, "some text");
        let plain = stream_text(
            pieces(),
            &[(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip, br"))].into_iter().collect(),
        );
        assert_eq!(plain.into_body().collect().await.unwrap().to_bytes(), "some text");
    }
}
