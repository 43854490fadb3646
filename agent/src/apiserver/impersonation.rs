//! Impersonation by a kubeconfig: the headers by which the API server executes requests as another user. Pure.

use std::fmt::Write as _;

use http::HeaderMap;
use http::HeaderName;
use http::HeaderValue;
use kube::config::AuthInfo;

const USER: HeaderName = HeaderName::from_static("impersonate-user");
const UID: HeaderName = HeaderName::from_static("impersonate-uid");
const GROUP: HeaderName = HeaderName::from_static("impersonate-group");
/// Before the key of an extra field.
const EXTRA: &str = "impersonate-extra-";

/// A field that cannot be sent, and why.
type Unsendable = (&'static str, String);

/// The headers of `as`, `as-uid`, `as-groups` and `as-user-extra`, as client-go sends them; none if no field is set.
///
/// # Errors
/// A field that cannot be sent, or `as` is missing beside the others.
pub(super) fn headers(user: &AuthInfo) -> Result<HeaderMap, Unsendable> {
    let name = user.impersonate.as_deref().unwrap_or_default();
    let uid = user.impersonate_uid.as_deref().unwrap_or_default();
    let groups = user.impersonate_groups.as_deref().unwrap_or_default();
    let has_extra = user.impersonate_user_extra.as_ref().is_some_and(|extra| !extra.is_empty());
    let mut headers = HeaderMap::new();
    if name.is_empty() {
        return match uid.is_empty() && groups.is_empty() && !has_extra {
            true => Ok(headers),
            false => Err(("as", "is required beside as-uid, as-groups and as-user-extra".to_owned())),
        };
    }
    add(&mut headers, "as", USER, name)?;
    if !uid.is_empty() {
        add(&mut headers, "as-uid", UID, uid)?;
    }
    for group in groups {
        add(&mut headers, "as-groups", GROUP, group)?;
    }
    for (key, values) in user.impersonate_user_extra.iter().flatten() {
        let name = HeaderName::from_bytes(format!("{EXTRA}{}", escaped(key)).as_bytes());
        let name = name.map_err(|_| ("as-user-extra", format!("{key:?} cannot be part of a header")))?;
        for value in values {
            add(&mut headers, "as-user-extra", name.clone(), value)?;
        }
    }
    Ok(headers)
}

fn add(headers: &mut HeaderMap, field: &'static str, name: HeaderName, text: &str) -> Result<(), Unsendable> {
    let value = HeaderValue::from_bytes(text.as_bytes());
    let value = value.map_err(|_| (field, format!("{text:?} has characters that are not allowed in a header")))?;
    headers.try_append(name, value).map(|_| ()).map_err(|error| (field, error.to_string()))
}

/// A key in the form in which names of headers can have it: other bytes, and `%`, are percent-encoded.
fn escaped(key: &str) -> String {
    key.bytes().fold(String::new(), |mut text, byte| {
        if byte.is_ascii_alphanumeric() || b"!#$&'*+-.^_`|~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            // Writing to a String does not fail.
            _ = write!(text, "%{byte:02X}");
        }
        text
    })
}
