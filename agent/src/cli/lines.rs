//! A log in which every event is one line: messages quote runtimes, containers and manifests, and none of those may add
//! lines, send control sequences to a terminal, or make lines as large as a field of a pod.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io;

use tracing_subscriber::fmt::MakeWriter;

use crate::model::quote::shortened;
use crate::model::quote::turns_direction;

/// The longest line of text, or value in a line of JSON, in bytes before control characters are escaped: longer than the
/// line of an event with the longest message.
pub(super) const LIMIT: usize = 20 * 1024;
/// Ends the colours of a line that is cut.
const RESET: &str = "\x1b[0m";

/// Makes writers that are handed one event at a time.
pub(super) struct Lines<W> {
    /// Where the lines go.
    pub(super) writer: W,
    /// The subscriber colours lines, so escape sequences are its own.
    pub(super) colour: bool,
    /// The longest line in bytes, without escaped characters.
    pub(super) limit: usize,
}

impl<'a, W: MakeWriter<'a>> MakeWriter<'a> for Lines<W> {
    type Writer = Line<W::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        Line { writer: self.writer.make_writer(), colour: self.colour, limit: self.limit }
    }

    fn make_writer_for(&'a self, meta: &tracing::Metadata<'_>) -> Self::Writer {
        Line { writer: self.writer.make_writer_for(meta), colour: self.colour, limit: self.limit }
    }
}

/// One event on its way out.
pub(super) struct Line<W> {
    writer: W,
    colour: bool,
    limit: usize,
}

impl<W: io::Write> io::Write for Line<W> {
    /// The subscriber writes an event in one piece, and its line end is the last byte.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(event.strip_suffix(b"\n").unwrap_or(event));
        let kept = shortened(&text, self.limit);
        let is_cut = kept.len() < text.len();
        match escaped(&kept, self.colour) {
            Cow::Borrowed(_) if !is_cut => self.writer.write_all(event)?,
            // In one piece as well: other threads write too.
            clean => {
                let end = if is_cut && self.colour { RESET } else { "" };
                self.writer.write_all(format!("{clean}{end}\n").as_bytes())?;
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
    use std::io::Write as _;

    use super::Line;
    use super::escaped;

    /// Wherever it is cut: an escape sequence that is not complete is ended by the next one.
    #[test]
    fn a_line_that_is_cut_ends_with_its_colours() {
        for (colour, event, expected) in [
            (false, "12345678\n", "12345678\n"),
            (false, "123456789\n", "12345...\n"),
            (false, "1\n3456789\n", "1\\n345...\n"),
            (true, "\u{1b}[31mé\n", "\u{1b}[31mé\n"),
            (true, "1234\u{1b}[31m5\n", "1234\u{1b}...\u{1b}[0m\n"),
        ] {
            let mut line = Line { writer: Vec::<u8>::new(), colour, limit: 8 };
            line.write_all(event.as_bytes()).expect("written");
            assert_eq!(String::from_utf8_lossy(&line.writer), expected, "{event:?}");
        }
    }

    #[test]
    fn only_colours_of_our_own_are_let_through() {
        let text = "a\tb\nc\u{1b}[31m\u{7f}\u{9b}ü";
        assert_eq!(escaped(text, false), "a\\tb\\nc\\u001b[31m\\u007f\\u009bü");
        assert_eq!(escaped(text, true), "a\\tb\\nc\u{1b}[31m\\u007f\\u009bü");
        assert_eq!(escaped("abc\u{202e}fed", true), "abc\\u202efed");
        assert_eq!(escaped("plain", false), "plain");
    }
}
