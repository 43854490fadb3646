//! Which redirects are followed. Pure.

use http::HeaderMap;
use http::HeaderValue;
use http::StatusCode;
use http::header;
use url::Url;

use super::HttpGet;
use super::HttpGetError;
use super::target::Scheme;
use super::target::Target;

/// Requests in all, redirected ones included.
const MAX_REQUESTS: usize = 10;

/// The request that follows after a response to `request`, which was the `count`-th in a row that `first` began; `None` if
/// the response is final. Followed are only redirects to the host of the first request.
pub(super) fn next_request(
    first: &HttpGet,
    request: &HttpGet,
    count: usize,
    status: StatusCode,
    headers: &HeaderMap,
) -> Result<Option<HttpGet>, HttpGetError> {
    if !matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308) {
        return Ok(None);
    }
    let Some(location) = headers.get(header::LOCATION).filter(|location| !location.is_empty()) else { return Ok(None) };
    let text = String::from_utf8_lossy(location.as_bytes()).into_owned();
    let failed = |reason: String| HttpGetError::Redirect { url: text.clone(), reason };
    let broken = |error: String| failed(format!("failed to parse Location header {text:?}: {error}"));
    let base = Url::parse(&resolvable(&request.target)).map_err(|error| broken(error.to_string()))?;
    let url = base.join(&text).map_err(|error| broken(error.to_string()))?;
    let is_relative = Url::parse(&text) == Err(url::ParseError::RelativeUrlWithoutBase) && !text.starts_with("//");
    let first_host = Url::parse(&resolvable(&first.target)).ok().and_then(|url| url.host_str().map(str::to_owned));
    if url.host_str().map(str::to_owned) != first_host {
        return Ok(None);
    }
    let Some(target) = Target::of_url(&url) else {
        return Err(failed(format!("unsupported protocol scheme {:?}", url.scheme())));
    };
    if count >= MAX_REQUESTS {
        return Err(failed(format!("stopped after {MAX_REQUESTS} redirects")));
    }
    // The same host: it is reached through its zone, which a location does not have.
    let has_zone = request.target.host.contains('%');
    let target = if has_zone { target.with_host(&request.target.host) } else { target };
    Ok(Some(follow(request, target, is_relative)))
}

/// The target as a URL that locations can be resolved against: the empty host is this node, and URLs have no zones.
fn resolvable(target: &Target) -> String {
    match target.host_without_zone() {
        "" => target.with_host("127.0.0.1").to_string(),
        host => target.with_host(host).to_string(),
    }
}

fn follow(request: &HttpGet, target: Target, is_relative: bool) -> HttpGet {
    let mut headers = request.headers.clone();
    let leaves_tls = request.target.scheme == Scheme::Https && target.scheme == Scheme::Http;
    headers.remove(header::REFERER);
    if !leaves_tls && let Ok(referer) = HeaderValue::from_str(&request.url()) {
        headers.insert(header::REFERER, referer);
    }
    HttpGet { target, headers, host: request.host.clone().filter(|_| is_relative), http2: request.http2 }
}
