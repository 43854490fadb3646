//! A log in which every event is one line: messages quote runtimes, containers and manifests, and none of those may add
//! lines or send control sequences to a terminal.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io;

use tracing_subscriber::fmt::MakeWriter;

use crate::model::quote::turns_direction;

/// Makes writers that are handed one event at a time.
pub(super) struct Lines<W> {
    /// Where the lines go.
    pub(super) writer: W,
    /// The subscriber colours lines, so escape sequences are its own.
    pub(super) colour: bool,
}

impl<'a, W: MakeWriter<'a>> MakeWriter<'a> for Lines<W> {
    type Writer = Line<W::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        Line { writer: self.writer.make_writer(), colour: self.colour }
    }

    fn make_writer_for(&'a self, meta: &tracing::Metadata<'_>) -> Self::Writer {
        Line { writer: self.writer.make_writer_for(meta), colour: self.colour }
    }
}

/// One event on its way out.
pub(super) struct Line<W> {
    writer: W,
    colour: bool,
}

impl<W: io::Write> io::Write for Line<W> {
    /// The subscriber writes an event in one piece, and its line end is the last byte.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = event.strip_suffix(b"\n").unwrap_or(event);
        match escaped(&String::from_utf8_lossy(text), self.colour) {
            Cow::Borrowed(_) => self.writer.write_all(event)?,
            // In one piece as well: other threads write too.
            Cow::Owned(mut clean) => {
                clean.push('\n');
                self.writer.write_all(clean.as_bytes())?;
            }
        }
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}

fn escaped(text: &str, colour: bool) -> Cow<'_, str> {
    let steers = |c: char| turns_direction(c) || (c.is_control() && !(colour && c == '\u{1b}'));
    if !text.contains(steers) {
        return Cow::Borrowed(text);
    }
    let mut clean = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        // Writing to a string cannot fail.
        let _ = match c {
            c if !steers(c) => clean.write_char(c),
            '\n' => clean.write_str("\\n"),
            '\r' => clean.write_str("\\r"),
            '\t' => clean.write_str("\\t"),
            c => write!(clean, "\\u{:04x}", u32::from(c)),
        };
    }
    Cow::Owned(clean)
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn only_colours_of_our_own_are_let_through() {
        let text = "a\tb\nc\u{1b}[31m\u{7f}\u{9b}ü";
        assert_eq!(escaped(text, false), "a\\tb\\nc\\u001b[31m\\u007f\\u009bü");
        assert_eq!(escaped(text, true), "a\\tb\\nc\u{1b}[31m\\u007f\\u009bü");
        assert_eq!(escaped("abc\u{202e}fed", true), "abc\\u202efed");
        assert_eq!(escaped("plain", false), "plain");
    }
}
