//! Random schedules: the choice of seeds, and a paused clock for each.
//!
//! `SIM_SEEDS=FROM..TO` runs these seeds, `SIM_SEEDS=fresh:COUNT` as many new ones, which are printed. For a failing
//! seed the command that repeats it is printed.

use std::io::Write as _;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::panic::catch_unwind;
use std::panic::resume_unwind;

/// Runs the schedule of every seed in `default`, or in `SIM_SEEDS` if that is set, one after the other.
///
/// # Panics
/// `SIM_SEEDS` is malformed, the runtime cannot be built, or `schedule` panics.
pub fn run<F: Future<Output = ()>>(default: Range<u64>, schedule: impl Fn(u64) -> F) {
    let seeds = match std::env::var("SIM_SEEDS") {
        Ok(text) => chosen(&text, fastrand::u64(..1 << 32)).unwrap_or_else(|| panic!("SIM_SEEDS={text} is malformed")),
        Err(_) => default,
    };
    if std::env::var_os("SIM_SEEDS").is_some() {
        print(&format!("random schedules: SIM_SEEDS={}..{}", seeds.start, seeds.end));
    }
    for seed in seeds {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        let runtime = runtime.expect("a runtime needs no resources beyond a thread and an epoll descriptor");
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| runtime.block_on(schedule(seed)))) {
            print(&format!("a random schedule failed; repeat it with SIM_SEEDS={seed}..{}", seed + 1));
            resume_unwind(panic);
        }
    }
}

/// Prints to standard error, past the test runner's capture of the output of passing tests.
fn print(line: &str) {
    // A closed standard error affects only this line.
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn chosen(text: &str, fresh: u64) -> Option<Range<u64>> {
    if let Some(count) = text.strip_prefix("fresh:") {
        return Some(fresh..fresh + count.parse::<u64>().ok()?);
    }
    let (from, to) = text.split_once("..")?;
    Some(from.parse().ok()?..to.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_chosen_by_range_or_count() {
        assert_eq!(chosen("7..9", 5), Some(7..9));
        assert_eq!(chosen("fresh:3", 5), Some(5..8));
        for malformed in ["", "7", "7..x", "fresh", "fresh:", "fresh:x"] {
            assert_eq!(chosen(malformed, 5), None, "{malformed:?}");
        }
    }

    #[test]
    fn each_schedule_runs_on_its_own_paused_clock() {
        let began = std::time::Instant::now();
        let ran = std::cell::RefCell::new(Vec::new());
        run(3..6, async |seed| {
            tokio::time::sleep(std::time::Duration::from_secs(3600)).await;
            ran.borrow_mut().push(seed);
        });
        // Other seeds may be selected by the environment.
        let ran = ran.borrow();
        assert!(!ran.is_empty() && ran.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{ran:?}");
        assert!(began.elapsed() < std::time::Duration::from_secs(60));
    }
}
