//! Answers that several handlers give in the same words.

use axum::http::HeaderMap;
use axum::http::Method;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse as _;
use axum::response::Response;

/// An error as the router of parameterised paths writes it: the text alone, without a newline.
pub(super) fn error(status: StatusCode, text: impl Into<String>) -> Response {
    (status, text.into()).into_response()
}

/// What is wrong with a request to a handler that takes only `methods` and declares no content type of its own: another
/// method, or an `Accept` without `*/*`.
///
/// # Errors
/// The answer to give.
pub(super) fn admit(methods: &[Method], method: &Method, headers: &HeaderMap) -> Result<(), Box<Response>> {
    admit_types(methods, method, headers, "")
}

/// The same for a handler whose answers are JSON.
///
/// # Errors
/// The answer to give.
pub(super) fn admit_json(methods: &[Method], method: &Method, headers: &HeaderMap) -> Result<(), Box<Response>> {
    admit_types(methods, method, headers, "application/json")
}

fn admit_types(methods: &[Method], method: &Method, headers: &HeaderMap, kind: &str) -> Result<(), Box<Response>> {
    if !methods.contains(method) {
        let allow: Vec<&str> = methods.iter().map(Method::as_str).collect();
        let allow = [(header::ALLOW, allow.join(", "))];
        return Err(Box::new((StatusCode::METHOD_NOT_ALLOWED, allow, "405: Method Not Allowed").into_response()));
    }
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    let fits = |one: &str| {
        let one = one.split(';').next().unwrap_or_default().trim();
        one == "*/*" || (one == kind && !kind.is_empty())
    };
    if !accept.is_empty() && !accept.split(',').any(fits) {
        let body = format!("406: Not Acceptable\n\nAvailable representations: {kind}");
        return Err(Box::new(error(StatusCode::NOT_ACCEPTABLE, body)));
    }
    Ok(())
}

/// The parameters of a query, in their order, decoded.
pub(super) fn query_of(uri: &axum::http::Uri) -> Vec<(String, String)> {
    let parsed = axum::extract::Query::<Vec<(String, String)>>::try_from_uri(uri);
    parsed.map(|query| query.0).unwrap_or_default()
}

/// Text in double quotes, escaped so that no control character reaches a terminal: the form that clients of the Go
/// implementation know (`%q`).
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

    #[test]
    fn methods_and_types() {
        let headers = |accept: &str| [(header::ACCEPT, accept.parse().unwrap())].into_iter().collect::<HeaderMap>();
        let status = |method: Method, accept: &str| match admit(&[Method::GET, Method::POST], &method, &headers(accept))
        {
            Ok(()) => 200,
            Err(answer) => answer.status().as_u16(),
        };
        assert_eq!(status(Method::GET, ""), 200);
        assert_eq!(status(Method::POST, "text/html, */*;q=0.8"), 200);
        assert_eq!(status(Method::GET, "application/json"), 406);
        assert_eq!(status(Method::HEAD, ""), 405);
        let refused = admit(&[Method::GET, Method::POST], &Method::PUT, &HeaderMap::new()).unwrap_err();
        assert_eq!(refused.headers()[header::ALLOW], "GET, POST");
    }
}
