//! Sanitizes messages: they quote runtimes, registries and containers, so any character can be in them. Pure.

use std::borrow::Cow;
use std::fmt::Write as _;

use crate::model::quote::shortened;
use crate::model::quote::turns_direction;

/// Longest message, in bytes. Above everything that is bounded at its source, such as the output of a probe.
pub(super) const MESSAGE_LIMIT: usize = 16 << 10;

/// The message without control characters, cut to [`MESSAGE_LIMIT`]. Line breaks and tabs stay.
pub(super) fn sanitize(message: &str) -> Cow<'_, str> {
    let message = escape(message, |c| matches!(c, '\n' | '\t'));
    if message.len() <= MESSAGE_LIMIT {
        return message;
    }
    Cow::Owned(shortened(&message, MESSAGE_LIMIT).into_owned())
}

/// The message as one line of a log.
pub(super) fn one_line(message: &str) -> Cow<'_, str> {
    escape(message, |_| false)
}

fn escape(message: &str, keep: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_control = |c: char| (c.is_control() || turns_direction(c)) && !keep(c);
    if !message.contains(is_control) {
        return Cow::Borrowed(message);
    }
    let mut clean = String::with_capacity(message.len() + 16);
    for c in message.chars() {
        let number = u32::from(c);
        let written = match c {
            c if !is_control(c) => {
                clean.push(c);
                Ok(())
            }
            '\n' => clean.write_str("\\n"),
            '\r' => clean.write_str("\\r"),
            '\t' => clean.write_str("\\t"),
            _ if number < 0x80 => write!(clean, "\\x{number:02x}"),
            _ => write!(clean, "\\u{number:04x}"),
        };
        debug_assert!(written.is_ok(), "writing to a string cannot fail");
    }
    Cow::Owned(clean)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_steers_a_terminal_is_spelled_out() {
        let table = [
            ("plain: \"quoted\" é 日本", "plain: \"quoted\" é 日本"),
            ("two\nlines\tand a tab", "two\nlines\tand a tab"),
            ("\x1b[31mred\x1b[0m\r\n", "\\x1b[31mred\\x1b[0m\\r\n"),
            ("bell\x07 nul\0 del\x7f", "bell\\x07 nul\\x00 del\\x7f"),
            ("c1 \u{9b}31m", "c1 \\u009b31m"),
            ("abc\u{202e}fed", "abc\\u202efed"),
        ];
        for (message, expected) in table {
            assert_eq!(sanitize(message), expected);
        }
        assert_eq!(one_line("a\nb\tc\r"), "a\\nb\\tc\\r");
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        let whole = "x".repeat(MESSAGE_LIMIT);
        assert_eq!(sanitize(&whole), whole);
        let cut = sanitize(&"é".repeat(MESSAGE_LIMIT)).into_owned();
        assert!(cut.len() <= MESSAGE_LIMIT && cut.ends_with("é...") && cut.len() > MESSAGE_LIMIT - 4, "{}", cut.len());
    }

    proptest! {
        #[test]
        fn any_message_is_bounded_and_has_no_control_characters(message in any::<String>(), times in 1_usize..2000) {
            let clean = sanitize(&message.repeat(times)).into_owned();
            prop_assert!(clean.len() <= MESSAGE_LIMIT);
            prop_assert!(!clean.chars().any(|c| c.is_control() && c != '\n' && c != '\t'));
            prop_assert!(!one_line(&clean).contains(['\n', '\t']));
        }
    }
}
