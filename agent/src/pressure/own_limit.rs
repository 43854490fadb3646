//! Waiting for a processor that comes from a pod's own CPU quota: the kernel counts throttled tasks as waiting, on the whole
//! node too, however idle its processors are. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

/// For how long CPU quotas have throttled each pod, by its name.
pub type Throttled = BTreeMap<String, Duration>;

/// Pods that are named at most.
const NAMED: usize = 3;

/// The pods whose quotas explain at least half of the waiting, longest first; none if they do not. Between two readings
/// tasks have waited for `waited`. A pod that has been created meanwhile counts from its creation.
pub fn explained_by(waited: Duration, before: &Throttled, now: &Throttled) -> Vec<String> {
    let grown = now.iter().map(|(pod, time)| (time.saturating_sub(before.get(pod).copied().unwrap_or_default()), pod));
    let mut grown: Vec<(Duration, &String)> = grown.filter(|(time, _)| !time.is_zero()).collect();
    let sum: Duration = grown.iter().map(|(time, _)| *time).sum();
    if sum < waited / 2 || waited.is_zero() {
        return Vec::new();
    }
    grown.sort_by(|(left, left_pod), (right, right_pod)| right.cmp(left).then(left_pod.cmp(right_pod)));
    grown.into_iter().take(NAMED).map(|(_, pod)| pod.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pods: &[(&str, u64)]) -> Throttled {
        pods.iter().map(|(name, millis)| ((*name).to_owned(), Duration::from_millis(*millis))).collect()
    }

    #[test]
    fn quotas_explain_waiting_that_is_not_longer_than_twice_their_throttling() {
        let waited = Duration::from_secs(1);
        let before = of(&[("a", 1000), ("b", 5000), ("gone", 7)]);
        assert_eq!(explained_by(waited, &before, &of(&[("a", 1700), ("b", 5000)])), ["a"]);
        assert_eq!(explained_by(waited, &before, &of(&[("a", 1200), ("b", 5400)])), ["b", "a"]);
        assert_eq!(explained_by(waited, &before, &of(&[("a", 1400), ("b", 5000)])), [] as [&str; 0], "others wait too");
        assert_eq!(explained_by(waited, &before, &of(&[("a", 1000), ("new", 600)])), ["new"]);
        assert_eq!(
            explained_by(waited, &before, &of(&[("a", 3), ("b", 4)])),
            [] as [&str; 0],
            "counters went backwards"
        );
        assert_eq!(explained_by(Duration::ZERO, &before, &before), [] as [&str; 0]);
    }
}
