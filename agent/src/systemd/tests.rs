//! Valid and invalid settings of the watchdog.

use super::*;

fn configured(usec: Option<&str>, pid: Option<&str>) -> Result<Option<Watchdog>, String> {
    let variable = |name: &str| match name {
        "WATCHDOG_USEC" => usec.map(str::to_owned),
        "WATCHDOG_PID" => pid.map(str::to_owned),
        _ => None,
    };
    Watchdog::configured(variable, 7).map_err(|error| error.to_string())
}

#[test]
fn settings() {
    let every = |millis| Ok(Some(Watchdog { interval: Duration::from_millis(millis) }));
    let too_small = |timeout: &str| Err(format!("configure watchdog timeout too small: {timeout}"));
    let no_number = |name: &str, value: &str| {
        Err(format!("configure watchdog: error converting {name}: {value:?} is not a number"))
    };
    let not_positive = || Err("configure watchdog: error WATCHDOG_USEC must be a positive number".to_owned());
    let table = [
        (None, None, Ok(None)),
        (Some(""), Some("7"), Ok(None)),
        (None, Some("x"), Ok(None)),
        (Some("30000000"), None, every(15_000)),
        (Some("30000000"), Some(""), every(15_000)),
        (Some("30000000"), Some("7"), every(15_000)),
        (Some("1000001"), None, Ok(Some(Watchdog { interval: Duration::from_nanos(500_000_500) }))),
        (Some("30000000"), Some("8"), Ok(None)),
        (Some("500000"), Some("8"), Ok(None)),
        (Some("1000000"), None, too_small("1s")),
        (Some("500000"), Some("7"), too_small("500ms")),
        (Some("0"), None, not_positive()),
        (Some("-5"), None, not_positive()),
        (Some("soon"), None, no_number("WATCHDOG_USEC", "soon")),
        (Some("30000000"), Some("me"), no_number("WATCHDOG_PID", "me")),
    ];
    for (usec, pid, expected) in table {
        assert_eq!(configured(usec, pid), expected, "WATCHDOG_USEC={usec:?} WATCHDOG_PID={pid:?}");
    }
}
