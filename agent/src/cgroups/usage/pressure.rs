//! Pressure stall information (<https://docs.kernel.org/accounting/psi.html>).

use std::path::Path;

/// Both lines of a pressure file; zero on kernels without it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    /// At least one task waited.
    pub some: PressureLine,
    /// All tasks waited.
    pub full: PressureLine,
}

/// One line of a pressure file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PressureLine {
    /// Microseconds of waiting since the start.
    pub total: u64,
    /// Percent of the last 10 seconds.
    pub avg10: f64,
    /// Of the last minute.
    pub avg60: f64,
    /// Of the last five minutes.
    pub avg300: f64,
}

impl Pressure {
    /// From the text of a pressure file.
    pub fn parse(text: &str) -> Self {
        let line = |name: &str| {
            let fields = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            let value = |key: &str| fields.split(' ').find_map(|field| field.strip_prefix(key)?.strip_prefix('='));
            let percent = |key: &str| value(key).and_then(|text| text.parse().ok()).unwrap_or(0.0);
            PressureLine {
                total: value("total").and_then(|text| text.parse().ok()).unwrap_or(0),
                avg10: percent("avg10"),
                avg60: percent("avg60"),
                avg300: percent("avg300"),
            }
        };
        Self { some: line("some "), full: line("full ") }
    }

    /// From a pressure file; zero if it is not readable.
    pub(crate) fn read(file: &Path) -> Self {
        std::fs::read_to_string(file).map(|text| Self::parse(&text)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_lines() {
        let text =
            "some avg10=1.50 avg60=0.25 avg300=0.00 total=1234\nfull avg10=0.00 avg60=0.00 avg300=3.00 total=99\n";
        let pressure = Pressure::parse(text);
        assert_eq!(pressure.some, PressureLine { total: 1234, avg10: 1.5, avg60: 0.25, avg300: 0.0 });
        assert_eq!((pressure.full.total, pressure.full.avg300), (99, 3.0));
        assert_eq!(Pressure::parse("what"), Pressure::default());
    }
}
