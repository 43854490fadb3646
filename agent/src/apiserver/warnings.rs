//! Warnings that answers of the API server carry in `Warning` headers (RFC 7234, section 5.5).

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::PoisonError;

use http::Response;
use http::header::WARNING;

/// Different warnings that are remembered.
const MOST: usize = 64;

/// Warnings that were logged. Each is logged once, as long as there are few: an admission webhook may warn of each status.
#[derive(Debug, Default)]
pub(super) struct Warned(Mutex<HashSet<String>>);

impl Warned {
    /// Whether it was not logged yet; from now on it was.
    pub(super) fn is_new(&self, warning: &str) -> bool {
        let mut warned = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.len() >= MOST && !warned.contains(warning) {
            warned.clear();
        }
        warned.insert(warning.to_owned())
    }
}

/// The warnings of an answer (code 299), as about a deprecated field or a violated policy. Each has a header of its own.
pub(super) fn warnings<B>(answer: &Response<B>) -> Vec<String> {
    let values = answer.headers().get_all(WARNING).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
    values.filter_map(|value| quoted(value.strip_prefix("299 ")?)).collect()
}

/// The first quoted text, unless it is empty or, as in client-go, has control characters.
fn quoted(text: &str) -> Option<String> {
    let (_, rest) = text.split_once('"')?;
    let (mut inner, mut characters) = (String::new(), rest.chars());
    loop {
        match characters.next()? {
            '"' => return Some(inner).filter(|inner| !inner.is_empty() && !inner.contains(char::is_control)),
            '\\' => inner.push(characters.next()?),
            other => inner.push(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_read_from_their_headers() {
        let read = |values: &[&str]| {
            let answer = values.iter().fold(Response::builder(), |answer, value| answer.header(WARNING, *value));
            warnings(&answer.body(()).expect("a response"))
        };
        let two = [r#"299 - "spec.x: deprecated""#, r#"299 agent "would violate \"restricted\"" "a date""#];
        assert_eq!(read(&two), ["spec.x: deprecated", r#"would violate "restricted""#]);
        for other in [r#"199 - "miscellaneous""#, r#"299 - """#, r#"299 - "no end"#, "299 - \"a\tb\"", "299 -", ""] {
            assert!(read(&[other]).is_empty(), "{other}");
        }
        assert!(read(&[]).is_empty());
    }

    #[test]
    fn each_is_logged_once_and_few_are_remembered() {
        let warned = Warned::default();
        assert!(warned.is_new("a") && !warned.is_new("a"));
        for other in 1..MOST {
            assert!(warned.is_new(&other.to_string()));
        }
        assert!(!warned.is_new("a"), "none was removed yet");
        assert!(warned.is_new("b") && warned.is_new("a"));
    }
}
