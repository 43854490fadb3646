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

/// Text in double quotes with control characters escaped, as Go's `%q` does.
pub(super) fn quote(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{b}' => out.push_str("\\v"),
            '\u{c}' => out.push_str("\\f"),
            c if u32::from(c) < 0x20 || c == '\u{7f}' => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c if c.is_control() => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_text_holds_no_control_characters() {
        assert_eq!(quote("c"), "\"c\"");
        assert_eq!(quote("a\"b\\c\n\u{1b}[31m\u{85}é"), "\"a\\\"b\\\\c\\n\\x1b[31m\\u0085é\"");
    }
}
