//! Stamp files: start and end of a container's process, by the monotonic clock.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;

use nix::time::ClockId;
use nix::time::clock_gettime;

/// Appends `WORD NANOSECONDS` (CLOCK_MONOTONIC) to the stamp file, if there is one.
///
/// The line is written by one write(2), so that several processes may share a file.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write(path: &Option<PathBuf>, word: &str) -> Result<(), String> {
    let Some(path) = path else { return Ok(()) };
    let fail = |error: std::io::Error| format!("cannot append to stamp file {}: {error}", path.display());
    let mut file = OpenOptions::new().append(true).create(true).open(path).map_err(fail)?;
    let line = format!("{word} {}\n", now()?);
    file.write_all(line.as_bytes()).map_err(fail)
}

/// Nanoseconds of CLOCK_MONOTONIC.
///
/// # Errors
/// The clock cannot be read.
pub(crate) fn now() -> Result<u64, String> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_err(|errno| format!("cannot read the clock: {errno}"))?;
    // It counts from the boot: neither is negative.
    let [seconds, nanoseconds] = [now.tv_sec(), now.tv_nsec()].map(i64::unsigned_abs);
    Ok(seconds * 1_000_000_000 + nanoseconds)
}
