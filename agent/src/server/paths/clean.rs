//! Canonical paths: no empty segments, no `.`, no `..`.

use crate::model::spec::absolute_path;

/// A canonical path.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cleaned {
    /// The path as a client should have sent it, but for characters that it should have encoded.
    pub(super) text: String,
    /// Its segments, each decoded: an encoded slash does not separate segments.
    pub(super) segments: Vec<String>,
}

impl Cleaned {
    /// `None` for what is not a path: the targets `*` and `host:port`, and invalid percent encoding.
    pub(super) fn of(written: &str) -> Option<Self> {
        let rest = written.strip_prefix('/')?;
        let mut text = absolute_path(rest);
        if rest.ends_with('/') && text != "/" {
            text.push('/');
        }
        let segments = text[1..].split('/').map(decode).collect::<Option<Vec<_>>>()?;
        Some(Self { text, segments })
    }

    /// The path to redirect a client to: what may not stand in a path is encoded, and what the client has encoded stays
    /// as it is. Browsers take a backslash for a slash, and what follows two slashes for the name of a server.
    pub(super) fn location(&self) -> String {
        let mut location = String::with_capacity(self.text.len() + 1);
        push_encoded(&mut location, &self.text, b"-._~!$&'()*+,;=:@[]/%");
        location
    }

    /// The decoded path. An encoded slash becomes a slash like any other.
    pub(super) fn decoded(&self) -> String {
        format!("/{}", self.segments.join("/"))
    }
}

/// Decodes percent encoding. Invalid UTF-8 becomes replacement characters, which no name contains.
fn decode(segment: &str) -> Option<String> {
    if !segment.contains('%') {
        return Some(segment.to_owned());
    }
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let value = digit(rest.next()?)? * 16 + digit(rest.next()?)?;
            bytes.push(u8::try_from(value).ok()?);
        } else {
            bytes.push(byte);
        }
    }
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Encodes a decoded path, without a trailing slash.
pub(super) fn encode(decoded: &str) -> String {
    let mut text = String::with_capacity(decoded.len() + 1);
    for segment in decoded.trim_matches('/').split('/') {
        text.push('/');
        push_encoded(&mut text, segment, b"-._~");
    }
    text
}

/// Appends `part`. Its bytes are encoded unless they are letters, digits or among `plain`.
fn push_encoded(text: &mut String, part: &str, plain: &[u8]) {
    for byte in part.bytes() {
        if byte.is_ascii_alphanumeric() || plain.contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn canonical_paths() {
        for (written, text) in [
            ("/", "/"),
            ("/pods", "/pods"),
            ("/pods/", "/pods/"),
            ("//pods", "/pods"),
            ("/exec/../pods", "/pods"),
            ("/exec/./a//b/", "/exec/a/b/"),
            ("/../../etc", "/etc"),
            ("/a/..", "/"),
            ("/a/.", "/a"),
            ("/exec/%2e%2e/pods", "/exec/%2e%2e/pods"),
        ] {
            assert_eq!(Cleaned::of(written).expect(written).text, text, "{written}");
        }
    }

    #[test]
    fn malformed_paths() {
        for written in ["", "*", "host:10250", "/%", "/%4", "/%zz", "/a%2"] {
            assert_eq!(Cleaned::of(written), None, "{written}");
        }
    }

    #[test]
    fn an_encoded_slash_stays_in_its_segment_until_the_end() {
        let cleaned = Cleaned::of("/exec/a%2Fb/%63").expect("a path");
        assert_eq!(cleaned.segments, ["exec", "a/b", "c"]);
        assert_eq!(cleaned.decoded(), "/exec/a/b/c");
        assert_eq!(encode(&cleaned.decoded()), "/exec/a/b/c");
    }

    proptest! {
        #[test]
        fn cleaning_is_idempotent(written in "/([a.%/]|%2[eEfF]|\\.\\.){0,12}") {
            if let Some(cleaned) = Cleaned::of(&written) {
                prop_assert!(!cleaned.text.contains("//"));
                prop_assert_eq!(Cleaned::of(&cleaned.text).map(|again| again.text), Some(cleaned.text));
            }
        }

        #[test]
        fn decoding_reverses_encoding(decoded in "(/[^/]{1,5}){1,4}") {
            let encoded = encode(&decoded);
            prop_assert!(encoded.is_ascii());
            let segments: Vec<_> = encoded[1..].split('/').map(|s| decode(s).expect("well-formed")).collect();
            prop_assert_eq!(format!("/{}", segments.join("/")), decoded);
        }
    }
}
