//! Image references: `[host[:port]/]path[:tag][@digest]`. Pure.

/// A text that names no image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("couldn't parse image name {image:?}: {problem}")]
pub struct ReferenceError {
    /// What was given.
    pub image: String,
    /// What is wrong with it.
    pub problem: &'static str,
}

/// The reference with `:latest` added if it has neither tag nor digest.
///
/// # Errors
/// The text is no image reference.
pub fn with_default_tag(image: &str) -> Result<String, ReferenceError> {
    let parts = parse(image).map_err(|problem| ReferenceError { image: image.to_owned(), problem })?;
    Ok(if parts.tag.is_some() || parts.digest.is_some() { image.to_owned() } else { format!("{image}:latest") })
}

/// True if the reference has the tag `latest`, written or not: what `imagePullPolicy` defaults by.
pub fn is_latest(image: &str) -> bool {
    parse(image).is_ok_and(|parts| match (parts.tag, parts.digest) {
        (Some(tag), _) => tag == "latest",
        (None, digest) => digest.is_none(),
    })
}

struct Parts<'a> {
    tag: Option<&'a str>,
    digest: Option<&'a str>,
}

fn parse(image: &str) -> Result<Parts<'_>, &'static str> {
    const FORMAT: &str = "invalid reference format";
    if image.len() == 64 && image.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
        return Err("invalid repository name, cannot specify 64-byte hexadecimal strings");
    }
    let (rest, digest) = match image.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (image, None),
    };
    if digest.is_some_and(|digest| !is_digest(digest)) {
        return Err(FORMAT);
    }
    // A colon after the last slash starts a tag; before it, a port.
    let last_slash = rest.rfind('/').map_or(0, |slash| slash + 1);
    let (name, tag) = match rest[last_slash..].find(':') {
        Some(colon) => (&rest[..last_slash + colon], Some(&rest[last_slash + colon + 1..])),
        None => (rest, None),
    };
    if tag.is_some_and(|tag| !is_tag(tag)) {
        return Err(FORMAT);
    }
    let path = match name.split_once('/') {
        Some((host, path)) if is_host(host) => path,
        _ => name,
    };
    if path.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err("invalid reference format: repository name must be lowercase");
    }
    if name.len() > 255 {
        return Err("repository name must not be more than 255 characters");
    }
    if path.split('/').all(is_component) { Ok(Parts { tag, digest }) } else { Err(FORMAT) }
}

/// The first part of a name is a host if it could not be part of a path: with a dot, a port, upper case, or `localhost`.
fn is_host(text: &str) -> bool {
    let marked = text == "localhost" || text.contains(['.', ':']) || text.bytes().any(|b| b.is_ascii_uppercase());
    if !marked {
        return false;
    }
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
    let bracketed = host.starts_with('[') && host.ends_with(']') && host.len() > 2;
    port_is_fine && (bracketed || host.split('.').all(label))
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
}
