//! Filters the lines of a log by time, stream and limits. Pure, but for a log line of the agent.

use super::query::LogStreams;
use crate::log_format::Format;
use crate::log_format::Line;
use crate::log_format::Stamp;
use crate::log_format::Stream;

/// The log has an unknown format; its first line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnknownFormat(pub(super) Vec<u8>);

/// The requested lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct LineRules {
    /// Unix nanoseconds: older lines are left out.
    pub(super) since: i64,
    /// Prefix each line with its timestamp.
    pub(super) timestamps: bool,
    /// Maximum number of bytes.
    pub(super) limit: Option<u64>,
    /// Maximum number of lines that are parsed.
    pub(super) lines: Option<u64>,
    pub(super) stream: LogStreams,
}

/// Filters the lines of one log.
#[derive(Debug)]
pub(super) struct Filter {
    rules: LineRules,
    format: Option<Format>,
    /// The previous line was complete.
    at_line_start: bool,
    /// A line of which the start was taken, and its end was not.
    open: Option<OpenLine>,
}

/// What was decided at the start of a long line.
#[derive(Clone, Copy, Debug)]
struct OpenLine {
    is_wanted: bool,
    is_partial: bool,
}

impl Filter {
    pub(super) fn new(rules: LineRules) -> Self {
        Self { rules, format: None, at_line_start: true, open: None }
    }

    /// A limit was reached.
    pub(super) fn is_done(&self) -> bool {
        self.rules.lines == Some(0) || self.rules.limit == Some(0)
    }

    /// Appends a raw line to `out` in the form for the client. Lines that cannot be parsed are skipped.
    ///
    /// # Errors
    /// The first line has an unknown format.
    pub(super) fn take(&mut self, raw: &[u8], out: &mut Vec<u8>) -> Result<(), UnknownFormat> {
        if self.is_done() {
            return Ok(());
        }
        let format = match self.format {
            Some(format) => format,
            None => Format::detect(raw).ok_or_else(|| UnknownFormat(raw.to_vec()))?,
        };
        self.format = Some(format);
        let Some(line) = format.parse(raw) else {
            tracing::debug!(length = raw.len(), "skipping a log line that cannot be parsed");
            return Ok(());
        };
        if self.is_wanted(&line) {
            self.write(&line, out);
        }
        self.end_line(line.text.is_empty() || line.text.ends_with(b"\n"));
        Ok(())
    }

    /// Appends the start of a line that is too long to be held. Returns whether [`Self::take_rest`] can process the rest: not
    /// in a format that is parsed as a whole.
    pub(super) fn take_start(&mut self, start: &[u8], out: &mut Vec<u8>) -> bool {
        if self.format == Some(Format::DockerJson) {
            return false;
        }
        let Some(line) = Format::Cri.parse(start) else { return false };
        self.format = Some(Format::Cri);
        let open = OpenLine { is_wanted: !self.is_done() && self.is_wanted(&line), is_partial: line.is_partial };
        if open.is_wanted {
            self.write(&line, out);
        }
        self.open = Some(open);
        true
    }

    /// Whether the start of a line was taken, and its end was not.
    pub(super) fn is_inside_line(&self) -> bool {
        self.open.is_some()
    }

    /// Appends more of the line of which the start was taken, up to its newline.
    pub(super) fn take_rest(&mut self, part: &[u8], out: &mut Vec<u8>) {
        let Some(open) = self.open else { return };
        let text = part.strip_suffix(b"\n").filter(|_| open.is_partial).unwrap_or(part);
        if open.is_wanted {
            let before = out.len();
            out.extend_from_slice(text);
            self.limit(before, out);
        }
        if part.ends_with(b"\n") {
            self.open = None;
            self.end_line(!open.is_partial);
        }
    }

    /// The log ends here, or what is written next is no continuation.
    pub(super) fn end_log(&mut self) {
        if self.open.take().is_some() {
            self.end_line(false);
        }
    }

    fn end_line(&mut self, is_complete: bool) {
        if let Some(lines) = &mut self.rules.lines {
            *lines = lines.saturating_sub(1);
        }
        self.at_line_start = is_complete;
    }

    fn is_wanted(&self, line: &Line<'_>) -> bool {
        let is_stream = match self.rules.stream {
            LogStreams::All => true,
            LogStreams::Stdout => line.stream == Stream::Stdout,
            LogStreams::Stderr => line.stream == Stream::Stderr,
        };
        is_stream && line.nanos >= self.rules.since
    }

    fn write(&mut self, line: &Line<'_>, out: &mut Vec<u8>) {
        let before = out.len();
        if let Some(stamp) = Stamp::parse(&line.time).filter(|_| self.rules.timestamps && self.at_line_start) {
            stamp.write_fixed(out);
            out.push(b' ');
        }
        out.extend_from_slice(&line.text);
        self.limit(before, out);
    }

    /// Removes what was appended to the first `before` bytes beyond the limit.
    fn limit(&mut self, before: usize, out: &mut Vec<u8>) {
        if let Some(limit) = &mut self.rules.limit {
            let allowed = usize::try_from(*limit).unwrap_or(usize::MAX);
            out.truncate(before.saturating_add(allowed));
            *limit -= (out.len() - before) as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: [&str; 4] = [
        "2026-01-01T00:00:01Z stdout F one\n",
        "2026-01-01T00:00:02Z stderr P tw\n",
        "2026-01-01T00:00:02.5Z stderr F o\n",
        "2026-01-01T00:00:03Z stdout F three\n",
    ];
    const RULES: LineRules =
        LineRules { since: i64::MIN, timestamps: false, limit: None, lines: None, stream: LogStreams::All };

    fn filtered(rules: LineRules) -> String {
        let (mut filter, mut out) = (Filter::new(rules), Vec::new());
        for line in LOG {
            filter.take(line.as_bytes(), &mut out).unwrap();
        }
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn parts_are_joined() {
        assert_eq!(filtered(RULES), "one\ntwo\nthree\n");
        let stamped = "2026-01-01T00:00:01.000000000Z one\n2026-01-01T00:00:02.000000000Z two\n\
            2026-01-01T00:00:03.000000000Z three\n";
        assert_eq!(filtered(LineRules { timestamps: true, ..RULES }), stamped);
    }

    #[test]
    fn streams_ages_lines_and_bytes() {
        assert_eq!(filtered(LineRules { stream: LogStreams::Stderr, ..RULES }), "two\n");
        assert_eq!(filtered(LineRules { stream: LogStreams::Stdout, ..RULES }), "one\nthree\n");
        let since = Stamp::parse(b"2026-01-01T00:00:02.5Z").unwrap().nanos;
        assert_eq!(filtered(LineRules { since, ..RULES }), "o\nthree\n");
        assert_eq!(filtered(LineRules { since, lines: Some(2), ..RULES }), "", "lines that are too old count");
        assert_eq!(filtered(LineRules { lines: Some(3), ..RULES }), "one\ntwo\n", "parts count as lines");
        assert_eq!(filtered(LineRules { limit: Some(6), ..RULES }), "one\ntw");
        assert_eq!(filtered(LineRules { limit: Some(6), timestamps: true, ..RULES }), "2026-0", "time stamps count");
        let other = LineRules { limit: Some(6), stream: LogStreams::Stdout, ..RULES };
        assert_eq!(filtered(other), "one\nth", "what is not written does not count");
    }

    #[test]
    fn malformed_lines_are_skipped_unless_they_are_first() {
        let (mut filter, mut out) = (Filter::new(RULES), Vec::new());
        filter.take(LOG[0].as_bytes(), &mut out).unwrap();
        filter.take(b"\xff\xfe garbage\n", &mut out).unwrap();
        filter.take(LOG[3].as_bytes(), &mut out).unwrap();
        assert_eq!(out, b"one\nthree\n");
        let (mut limited, mut last) = (Filter::new(LineRules { lines: Some(2), ..RULES }), Vec::new());
        for line in [LOG[0].as_bytes(), b"\xff\xfe garbage\n", LOG[3].as_bytes(), LOG[0].as_bytes()] {
            limited.take(line, &mut last).unwrap();
        }
        assert_eq!(last, b"one\nthree\n", "only lines that are parsed count");
        let unknown = Filter::new(RULES).take(b"what\n", &mut out);
        assert_eq!(unknown, Err(UnknownFormat(b"what\n".to_vec())));
    }
}
