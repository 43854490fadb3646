//! Responses and parameters that several handlers share.

use axum::body::Body;
use axum::extract::Request;
use axum::http::Method;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::response::Response;

/// An error as upstream's router writes it: the text alone, without a newline.
pub(super) fn error(status: StatusCode, text: impl Into<String>) -> Response {
    (status, text.into()).into_response()
}

/// The decoded parameters of a query, in their order.
pub(super) fn query_of(uri: &axum::http::Uri) -> Vec<(String, String)> {
    let parsed = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(uri);
    parsed.map(|query| query.0).unwrap_or_default()
}

/// Longest form that is read, in bytes.
const FORM_LIMIT: usize = 64 * 1024;

/// Parameters of a request.
pub(super) struct Parameters {
    /// Of the query.
    pub(super) query: Vec<(String, String)>,
    /// Of the form, then of the query.
    pub(super) all: Vec<(String, String)>,
}

/// The parameters of a request, and the request without its form.
pub(super) async fn with_parameters(request: Request) -> (Request, Parameters) {
    let query = query_of(request.uri());
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if request.method() != Method::POST || !kind.starts_with("application/x-www-form-urlencoded") {
        let all = query.clone();
        return (request, Parameters { query, all });
    }
    let (head, body) = request.into_parts();
    let form = axum::body::to_bytes(body, FORM_LIMIT).await.unwrap_or_default();
    let form = format!("/?{}", String::from_utf8_lossy(&form)).parse().map(|uri| query_of(&uri));
    let all = form.unwrap_or_default().into_iter().chain(query.clone()).collect();
    (Request::from_parts(head, Body::empty()), Parameters { query, all })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_posted_form_comes_before_the_query() {
        let form = "application/x-www-form-urlencoded; charset=utf-8";
        for (method, kind, expected) in [
            (Method::POST, form, "output=1&input=a b&output=0"),
            (Method::POST, "text/plain", "output=0"),
            (Method::PUT, form, "output=0"),
        ] {
            let request = axum::http::Request::builder().method(method.clone()).uri("/exec/a/b/c?output=0");
            let request = request.header(header::CONTENT_TYPE, kind).body(Body::from("output=1&input=a+b")).unwrap();
            let (_, Parameters { query, all }) = with_parameters(request).await;
            let text = |parameters: Vec<(String, String)>| {
                parameters.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("&")
            };
            assert_eq!((text(query).as_str(), text(all).as_str()), ("output=0", expected), "{method} {kind}");
        }
    }
}
