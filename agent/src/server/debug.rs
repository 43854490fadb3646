//! `/debug/flags/v` and `/debug/pprof/`.
//!
//! A Rust program cannot produce profiles in the format of Go's runtime; the endpoints respond so and name `perf`.

use axum::body::to_bytes;
use axum::extract::Request;
use axum::http::Method;
use axum::http::StatusCode;
use axum::http::header;
use axum::response::IntoResponse;
use axum::response::Response;

use super::health::text;

/// Longest body that is read, in bytes.
const MAX_BODY: usize = 1024;

/// `PUT /debug/flags/v`: sets the verbosity of the log.
pub(super) async fn verbosity(set: impl FnOnce(u32) -> Result<(), String>, request: Request) -> Response {
    if request.method() != Method::PUT {
        return text((StatusCode::NOT_ACCEPTABLE, "unsupported http method\n".to_owned()));
    }
    let wanted = match to_bytes(request.into_body(), MAX_BODY).await {
        Ok(body) => String::from_utf8_lossy(&body).into_owned(),
        Err(error) => return text((StatusCode::BAD_REQUEST, format!("error reading http request body: {error}\n"))),
    };
    // Digits only: no sign, no space.
    let digits = !wanted.is_empty() && wanted.bytes().all(|byte| byte.is_ascii_digit());
    let Some(level) = wanted.parse::<u32>().ok().filter(|_| digits) else {
        let body = format!("failed to set klog.logging.verbosity to {wanted:?}: not an unsigned number of 32 bits\n");
        return text((StatusCode::BAD_REQUEST, body));
    };
    match set(level) {
        Ok(()) => text((StatusCode::OK, format!("successfully set klog.logging.verbosity to {wanted}\n"))),
        Err(error) => {
            text((StatusCode::BAD_REQUEST, format!("failed to set klog.logging.verbosity to {wanted}: {error}\n")))
        }
    }
}

/// `GET /debug/pprof/{name}`.
pub(super) async fn profile(decoded: &str) -> Response {
    let name = decoded.trim_matches('/').strip_prefix("debug/pprof/").unwrap_or_default();
    match name {
        "cmdline" => match tokio::fs::read("/proc/self/cmdline").await {
            Ok(line) => {
                let line = String::from_utf8_lossy(&line).trim_end_matches('\0').to_owned();
                text((StatusCode::OK, line))
            }
            Err(error) => text((StatusCode::INTERNAL_SERVER_ERROR, format!("cannot read the command line: {error}\n"))),
        },
        // No symbols, so that clients do not send addresses to resolve.
        "symbol" => text((StatusCode::OK, "num_symbols: 0\n".to_owned())),
        "profile" | "trace" => {
            let why = "this agent makes no such profile of itself; use perf on its process\n";
            text((StatusCode::NOT_IMPLEMENTED, why.to_owned()))
        }
        _ => {
            let head = [
                (header::CONTENT_TYPE.as_str(), "text/plain; charset=utf-8"),
                (header::X_CONTENT_TYPE_OPTIONS.as_str(), "nosniff"),
                ("x-go-pprof", "1"),
            ];
            (StatusCode::NOT_FOUND, head, "Unknown profile\n").into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use axum::body::Body;

    use super::*;

    async fn put(method: Method, body: &'static str) -> (StatusCode, String, Option<u32>) {
        let given = Mutex::new(None);
        let set = |level| {
            *given.lock().expect("not poisoned") = Some(level);
            if level > 10 { Err("too much".to_owned()) } else { Ok(()) }
        };
        let mut request = Request::new(Body::from(body));
        *request.method_mut() = method;
        let response = verbosity(set, request).await;
        let status = response.status();
        let body = to_bytes(response.into_body(), 10_000).await.expect("a body");
        let given = *given.lock().expect("not poisoned");
        (status, String::from_utf8(body.to_vec()).expect("text"), given)
    }

    #[tokio::test]
    async fn verbosity_is_set() {
        let done = "successfully set klog.logging.verbosity to 4\n".to_owned();
        assert_eq!(put(Method::PUT, "4").await, (StatusCode::OK, done, Some(4)));
        let refused = "unsupported http method\n".to_owned();
        assert_eq!(put(Method::GET, "4").await, (StatusCode::NOT_ACCEPTABLE, refused, None));
        for bad in ["", "-1", "+1", " 4", "4\n", "x", "4294967296"] {
            let (status, body, given) = put(Method::PUT, bad).await;
            assert_eq!((status, given), (StatusCode::BAD_REQUEST, None), "{bad:?}");
            assert!(body.ends_with('\n'));
        }
        assert_eq!(put(Method::PUT, "11").await.0, StatusCode::BAD_REQUEST);
    }

    #[tokio::test]
    async fn profiles() {
        for (path, status) in [
            ("/debug/pprof/cmdline", StatusCode::OK),
            ("/debug/pprof/symbol", StatusCode::OK),
            ("/debug/pprof/profile", StatusCode::NOT_IMPLEMENTED),
            ("/debug/pprof/trace/", StatusCode::NOT_IMPLEMENTED),
            ("/debug/pprof/heap", StatusCode::NOT_FOUND),
            ("/debug/pprof/../secret", StatusCode::NOT_FOUND),
        ] {
            assert_eq!(profile(path).await.status(), status, "{path}");
        }
    }
}
