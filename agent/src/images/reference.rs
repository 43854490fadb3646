//! Image references: `[host[:port]/]path[:tag][@digest]`. Pure.

use std::borrow::Cow;

/// A text that names no image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("couldn't parse image name {image:?}: {problem}")]
pub struct ReferenceError {
    /// What was given.
    pub image: String,
    /// What is wrong with it.
    pub problem: String,
}

/// The reference with `:latest` added if it has neither tag nor digest.
///
/// # Errors
/// The text is no image reference.
pub fn with_default_tag(image: &str) -> Result<String, ReferenceError> {
    let parts = checked(image)?;
    Ok(if parts.tag.is_some() || parts.digest.is_some() { image.to_owned() } else { format!("{image}:latest") })
}

/// The repository by which credentials are looked up: with its registry, without tag and digest (`busybox` is
/// `docker.io/library/busybox`).
///
/// # Errors
/// The text is no image reference.
pub(super) fn repository(image: &str) -> Result<String, ReferenceError> {
    let parts = checked(image)?;
    Ok(format!("{}/{}", parts.domain, parts.path))
}

/// The reference without tag and digest, otherwise as it is written: what access records and allow-lists name.
pub(super) fn without_tag(image: &str) -> &str {
    let name = image.split_once('@').map_or(image, |(name, _)| name);
    split_tag(name).0
}

/// True if the reference has the tag `latest`, written or not: what `imagePullPolicy` defaults by.
pub fn is_latest(image: &str) -> bool {
    parse(image).is_ok_and(|parts| match (parts.tag, parts.digest) {
        (Some(tag), _) => tag == "latest",
        (None, digest) => digest.is_none(),
    })
}

/// True if the text is an image's id and no name: a digest, or its hexadecimal digits alone.
pub(super) fn is_id(text: &str) -> bool {
    text.starts_with("sha256:") || is_bare_id(text)
}

/// 64 hexadecimal digits, which are no name.
fn is_bare_id(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// What a reference consists of; registry and path as they are normalised.
struct Parts<'a> {
    domain: &'a str,
    path: Cow<'a, str>,
    tag: Option<&'a str>,
    digest: Option<&'a str>,
}

/// Registry of names without one.
const DEFAULT_DOMAIN: &str = "docker.io";

fn checked(image: &str) -> Result<Parts<'_>, ReferenceError> {
    parse(image).map_err(|problem| ReferenceError { image: image.to_owned(), problem })
}

fn parse(image: &str) -> Result<Parts<'_>, String> {
    let malformed = || "invalid reference format".to_owned();
    if is_bare_id(image) {
        return Err(format!("invalid repository name ({image}), cannot specify 64-byte hexadecimal strings"));
    }
    let (rest, digest) = match image.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (image, None),
    };
    let (name, tag) = split_tag(rest);
    let (domain, path) = normalised(name);
    if path.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err(format!("invalid reference format: repository name ({path}) must be lowercase"));
    }
    if digest.is_some_and(|digest| !is_digest(digest)) || tag.is_some_and(|tag| !is_tag(tag)) || !is_domain(domain) {
        return Err(malformed());
    }
    if path.len() > 255 {
        return Err("repository name must not be more than 255 characters".to_owned());
    }
    if path.split('/').all(is_component) { Ok(Parts { domain, path, tag, digest }) } else { Err(malformed()) }
}

/// A colon after the last slash starts a tag; before it, a port.
fn split_tag(rest: &str) -> (&str, Option<&str>) {
    let last_slash = rest.rfind('/').map_or(0, |slash| slash + 1);
    match rest[last_slash..].find(':') {
        Some(colon) => (&rest[..last_slash + colon], Some(&rest[last_slash + colon + 1..])),
        None => (rest, None),
    }
}

/// Registry and path of a name. The first segment is a registry if it could not be part of a path: with a dot, a port or
/// upper case, or `localhost`.
fn normalised(name: &str) -> (&str, Cow<'_, str>) {
    let is_domain = |text: &str| {
        text == "localhost" || text.contains(['.', ':']) || text.bytes().any(|byte| byte.is_ascii_uppercase())
    };
    let (domain, path) = match name.split_once('/') {
        Some(("index.docker.io", path)) => (DEFAULT_DOMAIN, path),
        Some((domain, path)) if is_domain(domain) => (domain, path),
        _ => (DEFAULT_DOMAIN, name),
    };
    match domain == DEFAULT_DOMAIN && !path.contains('/') {
        true => (domain, Cow::Owned(format!("library/{path}"))),
        false => (domain, Cow::Borrowed(path)),
    }
}

fn is_domain(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (text, None),
    };
    let port_is_fine = port.is_none_or(|port| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()));
    let label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_address = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit() || b == b':');
    port_is_fine && address.map_or_else(|| host.split('.').all(label), is_address)
}

/// Lower-case alphanumerics, with single separators `.`, `_`, `__` or dashes between them.
fn is_component(text: &str) -> bool {
    let is_plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    let edges = bytes.first().copied().is_some_and(is_plain) && bytes.last().copied().is_some_and(is_plain);
    let separators = text.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit()).filter(|run| !run.is_empty());
    edges && separators.into_iter().all(|run| matches!(run, "." | "_" | "__") || run.bytes().all(|b| b == b'-'))
}

fn is_tag(text: &str) -> bool {
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let mut bytes = text.bytes();
    text.len() <= 128 && bytes.next().is_some_and(is_word) && bytes.all(|b| is_word(b) || b == b'.' || b == b'-')
}

/// `algorithm:hex`, for the known algorithms of full length.
fn is_digest(text: &str) -> bool {
    let Some((algorithm, hex)) = text.split_once(':') else { return false };
    let length = match algorithm {
        "sha256" => 64,
        "sha384" => 96,
        "sha512" => 128,
        _ => return false,
    };
    hex.len() == length && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_added_where_they_lack() {
        let digest = format!("app@sha256:{}", "a".repeat(64));
        let table = [
            ("busybox", "busybox:latest"),
            ("busybox:1.36", "busybox:1.36"),
            ("localhost:5000/app", "localhost:5000/app:latest"),
            ("localhost:5000/app:v1", "localhost:5000/app:v1"),
            ("registry.example/a/b-c/d__e", "registry.example/a/b-c/d__e:latest"),
            ("[::1]:5000/app", "[::1]:5000/app:latest"),
            ("HOST/app", "HOST/app:latest"),
            (digest.as_str(), digest.as_str()),
        ];
        for (given, expected) in table {
            assert_eq!(with_default_tag(given).as_deref(), Ok(expected), "{given}");
        }
    }

    #[test]
    fn what_names_no_image_is_refused() {
        let hex = "a".repeat(64);
        let table = [
            "",
            "UPPER",
            "host.example/Upper",
            "app:",
            "app:-x",
            "app:a b",
            "a//b",
            "/app",
            "app/",
            "a..b",
            "_a",
            "app@sha256:zz",
            "app@md5:00",
            "http://host/app",
            "a_b.io/app",
            "[x]/app",
            hex.as_str(),
        ];
        for given in table {
            let error = with_default_tag(given).expect_err(given).to_string();
            assert!(error.starts_with("couldn't parse image name"), "{error}");
        }
    }

    #[test]
    fn latest_is_latest_written_or_not() {
        let digest = format!("a@sha256:{}", "0".repeat(64));
        for (image, expected) in [("a", true), ("a:latest", true), ("a:1", false), (digest.as_str(), false)] {
            assert_eq!(is_latest(image), expected, "{image}");
        }
    }

    #[test]
    fn the_message_names_the_repository() {
        let problem = with_default_tag("r.io/App:1").expect_err("upper case").to_string();
        assert!(problem.ends_with("invalid reference format: repository name (App) must be lowercase"), "{problem}");
    }

    #[test]
    fn repositories_have_a_registry_and_no_tag() {
        let digest = format!("r.io/a:1@sha256:{}", "a".repeat(64));
        for (image, expected, written) in [
            ("busybox", "docker.io/library/busybox", "busybox"),
            ("busybox:1", "docker.io/library/busybox", "busybox"),
            ("me/app", "docker.io/me/app", "me/app"),
            ("index.docker.io/app", "docker.io/library/app", "index.docker.io/app"),
            ("docker.io/app:1", "docker.io/library/app", "docker.io/app"),
            ("localhost/app", "localhost/app", "localhost/app"),
            ("r.io:5000/a/b:1", "r.io:5000/a/b", "r.io:5000/a/b"),
            (digest.as_str(), "r.io/a", "r.io/a"),
        ] {
            assert_eq!(repository(image).as_deref(), Ok(expected), "{image}");
            assert_eq!(without_tag(image), written, "{image}");
        }
        repository("docker.io/").expect_err("no path");
    }
}
