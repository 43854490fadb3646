//! Random schedules: which seeds, and each on a paused clock of its own.

use std::ops::Range;

/// Runs the schedule of every seed in `default`, or in `SIM_SEEDS=from..to` if that is set, one after the other.
///
/// # Panics
/// There is no runtime to be had; what `schedule` finds wrong.
pub fn run<F: Future<Output = ()>>(default: Range<u64>, schedule: impl Fn(u64) -> F) {
    for seed in chosen(std::env::var("SIM_SEEDS").ok().as_deref()).unwrap_or(default) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(schedule(seed));
    }
}

fn chosen(text: Option<&str>) -> Option<Range<u64>> {
    let (from, to) = text?.split_once("..")?;
    Some(from.parse().ok()?..to.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_chosen_by_a_range() {
        assert_eq!(chosen(Some("7..9")), Some(7..9));
        for none in [None, Some(""), Some("7"), Some("7..x")] {
            assert_eq!(chosen(none), None, "{none:?}");
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
        assert_eq!(*ran.borrow(), [3, 4, 5]);
        assert!(began.elapsed() < std::time::Duration::from_secs(60));
    }
}
