//! The two formats of container logs, line by line. Pure.
//!
//! ```text
//!  CRI     2016-10-06T00:17:09.669794202Z stdout P part of a line
//!  Docker  {"log":"a line\n","stream":"stdout","time":"2016-10-06T00:17:09.669794202Z"}
//! ```

mod stamp;

use std::borrow::Cow;

use serde::Deserialize;

pub use self::stamp::Stamp;

/// The format of a log. All lines of a file have the format of its first line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Time, stream, tags and text, with a space between them.
    Cri,
    /// A JSON object.
    DockerJson,
}

/// The output stream of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// The standard output.
    Stdout,
    /// The standard error.
    Stderr,
}

/// One line of the log.
#[derive(Debug, PartialEq, Eq)]
pub struct Line<'a> {
    /// Unix nanoseconds.
    pub nanos: i64,
    /// The timestamp as written; it is valid.
    pub time: Cow<'a, [u8]>,
    /// Where the container wrote it.
    pub stream: Stream,
    /// The container's line continues in the next one of the log.
    pub is_partial: bool,
    /// The container's output; with its newline, unless it is a partial line.
    pub text: Cow<'a, [u8]>,
}

impl Format {
    /// The format of the log that begins with `line`.
    pub fn detect(line: &[u8]) -> Option<Self> {
        [Self::Cri, Self::DockerJson].into_iter().find(|format| format.parse(line).is_some())
    }

    /// Parses a line with its newline; `None` if it has another format.
    pub fn parse(self, line: &[u8]) -> Option<Line<'_>> {
        match self {
            Self::Cri => cri(line),
            Self::DockerJson => docker(line),
        }
    }
}

fn cri(line: &[u8]) -> Option<Line<'_>> {
    let (time, rest) = split_at_space(line)?;
    let nanos = Stamp::parse(time)?.nanos;
    let (stream, rest) = split_at_space(rest)?;
    let stream = stream_of(stream)?;
    let (tags, mut text) = split_at_space(rest)?;
    let is_partial = tags.split(|byte| *byte == b':').next() == Some(b"P");
    if is_partial {
        text = text.strip_suffix(b"\n").unwrap_or(text);
    }
    Some(Line { nanos, time: Cow::Borrowed(time), stream, is_partial, text: Cow::Borrowed(text) })
}

fn docker(line: &[u8]) -> Option<Line<'_>> {
    #[derive(Deserialize)]
    struct DockerLine {
        #[serde(default)]
        log: String,
        stream: String,
        time: String,
    }
    let line_json: DockerLine = serde_json::from_slice(line).ok()?;
    let nanos = Stamp::parse(line_json.time.as_bytes())?.nanos;
    let stream = stream_of(line_json.stream.as_bytes())?;
    let time = Cow::Owned(line_json.time.into_bytes());
    let is_partial = !line_json.log.ends_with('\n');
    Some(Line { nanos, time, stream, is_partial, text: Cow::Owned(line_json.log.into_bytes()) })
}

fn stream_of(name: &[u8]) -> Option<Stream> {
    match name {
        b"stdout" => Some(Stream::Stdout),
        b"stderr" => Some(Stream::Stderr),
        _ => None,
    }
}

fn split_at_space(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|byte| *byte == b' ')?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(format: Format, line: &str) -> Option<(Stream, String)> {
        let line = format.parse(line.as_bytes())?;
        Some((line.stream, String::from_utf8_lossy(&line.text).into_owned()))
    }

    #[test]
    fn lines_of_both_formats() {
        let time = "2016-10-06T00:17:09.669794202Z";
        let cri = |rest: &str| text(Format::Cri, &format!("{time} {rest}"));
        assert_eq!(cri("stdout F whole line\n"), Some((Stream::Stdout, "whole line\n".to_owned())));
        assert_eq!(cri("stderr P a part\n"), Some((Stream::Stderr, "a part".to_owned())));
        assert_eq!(cri("stdout P:x:y tagged\n"), Some((Stream::Stdout, "tagged".to_owned())));
        assert_eq!(cri("stdout F \u{1b}[31mred\r\n"), Some((Stream::Stdout, "\u{1b}[31mred\r\n".to_owned())));
        assert_eq!(cri("stdout F \n"), Some((Stream::Stdout, "\n".to_owned())));
        assert_eq!(cri("stdin F x\n"), None);
        assert_eq!(cri("stdout F"), None);
        let docker = format!(r#"{{"log":"a \"line\"\n","stream":"stderr","time":"{time}"}}"#);
        assert_eq!(text(Format::DockerJson, &docker), Some((Stream::Stderr, "a \"line\"\n".to_owned())));
    }

    #[test]
    fn the_format_is_detected_from_the_first_line() {
        assert_eq!(Format::detect(b"2016-10-06T00:17:09Z stdout F x\n"), Some(Format::Cri));
        let docker = br#"{"log":"x","stream":"stdout","time":"2016-10-06T00:17:09Z"}"#;
        assert_eq!(Format::detect(docker), Some(Format::DockerJson));
        assert_eq!(Format::detect(b"free text\n"), None);
        assert_eq!(Format::detect(b""), None);
    }
}
