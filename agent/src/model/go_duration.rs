//! Durations in the notation of Go's `time.Duration`, which upstream's messages and configuration use.

use std::time::Duration;

/// `856ms`, `1.234s`, `2m3.4s`, `1h0m0s`.
pub fn go_duration(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    match nanos {
        0 => "0s".to_owned(),
        1..1_000 => format!("{nanos}ns"),
        1_000..1_000_000 => decimal(nanos, 1_000, "µs"),
        1_000_000..1_000_000_000 => decimal(nanos, 1_000_000, "ms"),
        _ => {
            let minutes = duration.as_secs() / 60;
            let seconds = decimal(nanos % 60_000_000_000, 1_000_000_000, "s");
            match (minutes / 60, minutes % 60) {
                (0, 0) => seconds,
                (0, minutes) => format!("{minutes}m{seconds}"),
                (hours, minutes) => format!("{hours}h{minutes}m{seconds}"),
            }
        }
    }
}

/// `value / unit` with as many decimals as it needs.
fn decimal(value: u128, unit: u128, suffix: &str) -> String {
    let (whole, fraction) = (value / unit, value % unit);
    if fraction == 0 {
        return format!("{whole}{suffix}");
    }
    let width = unit.ilog10() as usize;
    let digits = format!("{fraction:0width$}");
    format!("{whole}.{}{suffix}", digits.trim_end_matches('0'))
}
