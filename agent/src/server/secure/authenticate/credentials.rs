//! Bearer tokens in request headers. Pure.

use axum::http::HeaderMap;
use axum::http::HeaderName;
use axum::http::HeaderValue;
use axum::http::header;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use secrecy::SecretString;

const WEBSOCKET_PREFIX: &str = "base64url.bearer.authorization.k8s.io.";

/// The token of an `Authorization` header; other schemes and empty tokens are ignored.
pub(super) fn bearer(headers: &HeaderMap) -> Option<SecretString> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?.trim();
    let mut parts = value.splitn(3, ' ');
    let scheme = parts.next()?;
    let token = parts.next()?;
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then(|| token.into())
}

/// A token in a WebSocket protocol.
pub(super) struct WebSocketToken {
    pub(super) token: SecretString,
    /// The other protocols.
    pub(super) others: HeaderValue,
}

/// The token among the protocols of a WebSocket request.
///
/// # Errors
/// The token is malformed, repeated, or the only protocol.
pub(super) fn websocket(headers: &HeaderMap) -> Result<Option<WebSocketToken>, &'static str> {
    if !is_websocket(headers) {
        return Ok(None);
    }
    let mut token = None;
    let mut others = Vec::new();
    for protocol in list(headers, &header::SEC_WEBSOCKET_PROTOCOL) {
        let Some(encoded) = protocol.strip_prefix(WEBSOCKET_PREFIX) else {
            others.push(protocol);
            continue;
        };
        if token.is_some() {
            return Err("multiple bearer tokens among the WebSocket protocols");
        }
        let decoded = URL_SAFE_NO_PAD.decode(encoded).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        token = Some(decoded.ok_or("the bearer token among the WebSocket protocols is not base64url text")?);
    }
    let Some(token) = token.filter(|token| !token.is_empty()) else { return Ok(None) };
    if others.is_empty() {
        return Err("a bearer token among the WebSocket protocols needs another protocol beside it");
    }
    let others = HeaderValue::from_str(&others.join(",")).map_err(|_| "malformed WebSocket protocols")?;
    Ok(Some(WebSocketToken { token: token.into(), others }))
}

fn is_websocket(headers: &HeaderMap) -> bool {
    let says = |name: &HeaderName, wanted: &str| list(headers, name).iter().any(|one| one.eq_ignore_ascii_case(wanted));
    says(&header::UPGRADE, "websocket") && says(&header::CONNECTION, "upgrade")
}

/// The members of a list header, which may be repeated.
fn list<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Vec<&'a str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|one| !one.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret as _;

    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().expect("a header"));
        }
        headers
    }

    #[test]
    fn bearer_tokens() {
        for (value, expected) in [
            ("Bearer abc", Some("abc")),
            ("bearer abc", Some("abc")),
            ("BEARER abc def", Some("abc")),
            ("  Bearer abc  ", Some("abc")),
            ("Bearer", None),
            ("Bearer ", None),
            ("Bearer  abc", None),
            ("Basic abc", None),
            ("abc", None),
        ] {
            let found = bearer(&headers(&[("authorization", value)]));
            assert_eq!(found.as_ref().map(|token| token.expose_secret()), expected, "{value:?}");
        }
        assert!(bearer(&HeaderMap::new()).is_none());
    }

    const UPGRADE: [(&str, &str); 2] = [("upgrade", "websocket"), ("connection", "keep-alive, Upgrade")];

    fn asked(protocols: &[&str]) -> Result<Option<(String, String)>, &'static str> {
        let mut pairs = UPGRADE.to_vec();
        pairs.extend(protocols.iter().map(|value| ("sec-websocket-protocol", *value)));
        let found = websocket(&headers(&pairs))?;
        Ok(found.map(|found| (found.token.expose_secret().to_owned(), found.others.to_str().unwrap().to_owned())))
    }

    #[test]
    fn websocket_tokens() {
        // "hi there" in base64url.
        let token = "base64url.bearer.authorization.k8s.io.aGkgdGhlcmU";
        let expected = Ok(Some(("hi there".to_owned(), "v4.channel.k8s.io,v5.channel.k8s.io".to_owned())));
        assert_eq!(asked(&[&format!("v4.channel.k8s.io, {token}, v5.channel.k8s.io")]), expected);
        assert_eq!(asked(&["v4.channel.k8s.io", token, "v5.channel.k8s.io"]), expected);
        assert_eq!(asked(&["v4.channel.k8s.io"]), Ok(None));
        assert_eq!(asked(&["v4.channel.k8s.io", WEBSOCKET_PREFIX]), Ok(None), "an empty token is none");
        assert!(asked(&[token]).is_err(), "alone");
        assert!(asked(&["v4.channel.k8s.io", token, token]).is_err(), "twice");
        assert!(asked(&["v4.channel.k8s.io", &format!("{WEBSOCKET_PREFIX}a=")]).is_err(), "padding");
        assert!(asked(&["v4.channel.k8s.io", &format!("{WEBSOCKET_PREFIX}_w")]).is_err(), "not UTF-8");
    }

    #[test]
    fn only_websocket_requests_carry_such_tokens() {
        let token = "v4.channel.k8s.io, base64url.bearer.authorization.k8s.io.aGkgdGhlcmU";
        let plain = headers(&[("sec-websocket-protocol", token)]);
        assert!(websocket(&plain).expect("no error").is_none());
        let spdy = [("upgrade", "SPDY/3.1"), ("connection", "Upgrade"), ("sec-websocket-protocol", token)];
        assert!(websocket(&headers(&spdy)).expect("no error").is_none());
    }
}
