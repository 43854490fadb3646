//! Values in messages: in the double quotes of Go's `%q`, as upstream writes them, as excerpts, cut to a length, without
//! passwords. Pure.

use std::borrow::Cow;
use std::fmt;
use std::fmt::Write as _;

use url::Url;

/// `text` in double quotes, control and invisible characters escaped.
pub fn go_quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{b}' => out.push_str("\\v"),
            c if is_shown(c) => out.push(c),
            c => escape(&mut out, u32::from(c)),
        }
    }
    out.push('"');
    out
}

/// Writing to a string cannot fail.
fn escape(out: &mut String, code: u32) {
    let _ = match code {
        0..0x80 => write!(out, "\\x{code:02x}"),
        0x80..0x1_0000 => write!(out, "\\u{code:04x}"),
        _ => write!(out, "\\U{code:08x}"),
    };
}

/// Rust's own escaping spares what can be shown; it differs from Go's only in blanks other than the plain one. A
/// combining mark is shown, as long as it has something to combine with.
fn is_shown(c: char) -> bool {
    match c {
        ' '..='~' => true,
        c => !c.is_whitespace() && format!("a{c}").escape_debug().count() == 2,
    }
}

/// The longest part of a value that an error repeats, in characters.
const EXCERPT: usize = 120;

/// A value in a message: no control characters, no more than a line of it.
pub struct Excerpt<'a>(pub &'a str);

impl fmt::Display for Excerpt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut chars = self.0.chars();
        for c in chars.by_ref().take(EXCERPT) {
            if c == '"' || c == '\'' { write!(f, "{c}")? } else { write!(f, "{}", c.escape_debug())? }
        }
        if chars.next().is_some() { f.write_str("...") } else { Ok(()) }
    }
}

/// What stands for the rest of a text that is cut.
const CUT: &str = "...";

/// A text of no more than `limit` bytes: a longer one is cut between characters, and ends with dots.
pub fn shortened(text: &str, limit: usize) -> Cow<'_, str> {
    if text.len() <= limit {
        return Cow::Borrowed(text);
    }
    let end = text.floor_char_boundary(limit.saturating_sub(CUT.len()));
    Cow::Owned(format!("{}{CUT}", &text[..end]))
}

/// Characters that make the text around them read in another order.
pub fn turns_direction(c: char) -> bool {
    matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A URL in a message: its password is masked.
pub fn masked_url(text: &str) -> String {
    if let Ok(mut url) = Url::parse(text)
        && url.password().is_some()
        && url.set_password(Some("masked")).is_ok()
    {
        return url.into();
    }
    text.to_owned()
}

#[cfg(test)]
mod tests {
    use super::go_quoted;
    use super::shortened;

    #[test]
    fn long_texts_are_cut_between_characters() {
        let table = [
            ("", 4, ""),
            ("abcd", 4, "abcd"),
            ("abcde", 4, "a..."),
            ("éé", 4, "éé"),
            ("ééé", 5, "é..."),
            ("ééé", 4, "..."),
        ];
        for (text, limit, expected) in table {
            assert_eq!(shortened(text, limit), expected, "{text} in {limit}");
        }
    }

    #[test]
    fn quotes_as_go_does() {
        for (text, expected) in [
            ("", r#""""#),
            ("it's plain", r#""it's plain""#),
            ("a\"b\\c", r#""a\"b\\c""#),
            ("\u{7}\u{8}\u{c}\n\r\t\u{b}", r#""\a\b\f\n\r\t\v""#),
            ("\0\u{1b}\u{7f}", r#""\x00\x1b\x7f""#),
            ("\u{85}\u{a0}\u{2028}", r#""\u0085\u00a0\u2028""#),
            ("héllo 世界 🎈", r#""héllo 世界 🎈""#),
            ("\u{e000}\u{f0000}", r#""\ue000\U000f0000""#),
        ] {
            assert_eq!(go_quoted(text), expected);
        }
    }
}
