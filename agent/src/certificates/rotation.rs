//! When a certificate is rotated. Pure: time and random numbers are arguments.

use std::time::Duration;
use std::time::SystemTime;

use super::pair::Leaf;
use super::template::Template;

/// Pause after a failed attempt; doubled after each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
/// Longest pause between attempts.
const LAST_PAUSE: Duration = Duration::from_secs(32);

/// When a certificate is rotated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// At once, for this reason.
    Now(String),
    /// Not before this moment.
    At(SystemTime),
}

/// The rotation deadline: at once without a certificate or with one that does not match its template, else after 70 %
/// to 90 % of its lifetime, depending on `random` in [0, 1).
pub(super) fn due(leaf: Option<&Leaf>, template: &Template, random: f64) -> Due {
    let Some(leaf) = leaf else { return Due::Now("there is none".to_owned()) };
    if let Some(why) = template.mismatch(leaf) {
        return Due::Now(why);
    }
    let life = leaf.not_after.duration_since(leaf.not_before).unwrap_or(Duration::ZERO);
    Due::At(leaf.not_before + life.mul_f64(0.7 + 0.2 * random))
}

/// Whether a certificate that was just issued may be due already: its signer does not follow the template, or the clocks
/// differ by more than its lifetime.
pub(super) fn is_useless(leaf: &Leaf, template: &Template, now: SystemTime) -> bool {
    match due(Some(leaf), template, 0.0) {
        Due::Now(_) => true,
        Due::At(at) => at <= now,
    }
}

/// The pause after this many failed attempts in a row (at least one); `random` in [0, 1).
pub(super) fn pause(failures: u32, random: f64) -> Duration {
    crate::model::backoff_delay(FIRST_PAUSE, LAST_PAUSE, failures).mul_f64(1.0 + 0.1 * random)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::pair;
    use super::*;

    fn at(second: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(second)
    }

    #[test]
    fn without_a_good_certificate_it_is_due_at_once() {
        let template = Template::client("n");
        assert!(matches!(due(None, &template, 0.5), Due::Now(_)));
        assert!(matches!(due(Some(&pair("system:node:m", 0, 100).leaf), &template, 0.5), Due::Now(_)));
        assert_eq!(due(Some(&pair("system:node:n", 1000, 2000).leaf), &template, 0.5), Due::At(at(1800)));
    }

    #[test]
    fn a_certificate_that_is_due_when_it_is_issued_is_useless() {
        let template = Template::client("n");
        let useless = |name: &str, now| is_useless(&pair(name, 1000, 2000).leaf, &template, at(now));
        assert!(!useless("system:node:n", 1000) && !useless("system:node:n", 1699));
        assert!(useless("system:node:n", 1700), "due with some random numbers");
        assert!(useless("system:node:n", 9000), "expired by our clock");
        assert!(useless("system:node:m", 1000));
    }

    proptest! {
        #[test]
        fn renewal_lies_between_seven_and_nine_tenths_of_life(from in 0u64..1_000_000, life in 10u64..1_000_000, random in 0.0f64..1.0) {
            let mut leaf = pair("system:node:n", 0, 1).leaf;
            (leaf.not_before, leaf.not_after) = (at(from), at(from + life));
            let Due::At(moment) = due(Some(&leaf), &Template::client("n"), random) else { panic!("a moment") };
            let part = moment.duration_since(leaf.not_before).expect("after").as_secs_f64() / life as f64;
            prop_assert!((0.6999..0.9001).contains(&part), "{part}");
        }
    }

    #[test]
    fn pauses_double_up_to_half_a_minute() {
        let seconds: Vec<u64> = (1..8).map(|failures| pause(failures, 0.0).as_secs()).collect();
        assert_eq!(seconds, [2, 4, 8, 16, 32, 32, 32]);
        assert_eq!(pause(1, 1.0), Duration::from_millis(2200));
        assert_eq!(pause(u32::MAX, 0.0), LAST_PAUSE);
    }
}
