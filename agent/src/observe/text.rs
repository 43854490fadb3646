//! Texts for people: bounded, one line each, no control characters. Names of processes and messages of containers may
//! contain anything. Pure.

use std::time::Duration;

use crate::model::quote::turns_direction;

/// The text without control characters and those that turn its direction, cut to `limit` characters.
pub fn clean(text: &str, limit: usize) -> String {
    let replaced = |c: char| if c.is_control() || turns_direction(c) { '\u{fffd}' } else { c };
    let mut clean: String = text.chars().take(limit).map(replaced).collect();
    if text.chars().nth(limit).is_some() {
        clean.pop();
        clean.push('…');
    }
    clean
}

/// Bytes with a binary unit: `512`, `12.0Mi`.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["", "Ki", "Mi", "Gi", "Ti"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    match (unit, value < 10.0) {
        (0, _) => format!("{bytes}"),
        (_, true) => format!("{value:.1}{}", UNITS[unit]),
        (_, false) => format!("{value:.0}{}", UNITS[unit]),
    }
}

/// An age with one unit, as `kubectl` prints it: `5s`, `3m`, `4h`, `9d`.
pub fn age(age: Duration) -> String {
    match age.as_secs() {
        seconds @ 0..120 => format!("{seconds}s"),
        seconds @ 120..7200 => format!("{}m", seconds / 60),
        seconds @ 7200..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// The last values as blocks of eight heights; empty places for values that are missing.
pub fn sparkline(values: &[u8], width: usize) -> String {
    const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let shown = &values[values.len().saturating_sub(width)..];
    let missing = std::iter::repeat_n(' ', width - shown.len());
    // Small pressure matters: the heights are not linear.
    let block = |value: &u8| match value {
        0 => ' ',
        1..=2 => BLOCKS[0],
        3..=5 => BLOCKS[1],
        6..=10 => BLOCKS[2],
        11..=20 => BLOCKS[3],
        21..=35 => BLOCKS[4],
        36..=55 => BLOCKS[5],
        56..=80 => BLOCKS[6],
        81.. => BLOCKS[7],
    };
    missing.chain(shown.iter().map(block)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_neither_steers_nor_floods() {
        assert_eq!(clean("a\u{1b}[31m\nb", 20), "a\u{fffd}[31m\u{fffd}b");
        assert_eq!(clean("abc\u{202e}fed\u{2066}", 20), "abc\u{fffd}fed\u{fffd}");
        assert_eq!(clean(&"x".repeat(9), 4), "xxx…");
        assert_eq!(clean("xxxx", 4), "xxxx");
    }

    #[test]
    fn units() {
        for (value, text) in
            [(0, "0"), (999, "999"), (1024, "1.0Ki"), (10 << 20, "10Mi"), (1023 << 20, "1.0Gi"), (5 << 40, "5.0Ti")]
        {
            assert_eq!(bytes(value), text);
        }
        for (seconds, text) in [(0, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (172_800, "2d")] {
            assert_eq!(age(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn sparklines_are_right_aligned() {
        assert_eq!(sparkline(&[0, 1, 100], 5), "   ▁█");
        assert_eq!(sparkline(&[50, 1, 100], 2), "▁█");
    }
}
