//! Grace periods, minimum reclaim, conditions and their transition period.

use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use super::super::history::History;
use super::super::history::ThresholdStates;
use super::*;
use crate::model::Pressures;

const MINUTE: Duration = Duration::from_secs(60);
const NONE: Pressures = Pressures { memory: false, disk: false, pid: false };
const MEMORY: Pressures = Pressures { memory: true, ..NONE };

/// A history that is given readings by the second.
struct Observed {
    history: History,
    thresholds: Vec<Threshold>,
    start: Instant,
}

impl Observed {
    fn new(fields: serde_json::Value) -> Self {
        Self { history: History::default(), thresholds: configured(fields), start: Instant::now() }
    }

    fn at(&mut self, second: u64, signals: &[(Signal, &str)]) -> ThresholdStates {
        let now = self.start + Duration::from_secs(second);
        self.history.step(&self.thresholds, &readings(now, signals), MINUTE, now)
    }

    fn memory(&mut self, second: u64, available: &str) -> (bool, Pressures) {
        let step = self.at(second, &[(Signal::MemoryAvailable, available)]);
        (!step.due.is_empty(), step.pressures)
    }
}

#[tokio::test]
async fn a_hard_threshold_is_acted_on_at_once() {
    let mut observed = Observed::new(json!({"evictionHard": {"memory.available": "100Mi"}}));
    assert_eq!(observed.memory(0, "100Mi"), (false, NONE), "not below");
    assert_eq!(observed.memory(10, "99Mi"), (true, MEMORY));
    assert_eq!(observed.memory(20, "200Mi"), (false, MEMORY), "the condition stays");
    assert_eq!(observed.memory(69, "200Mi"), (false, MEMORY));
    assert_eq!(observed.memory(70, "200Mi"), (false, NONE), "a minute after it was last observed");
}

#[tokio::test]
async fn a_soft_threshold_waits_for_its_grace_period_without_interruption() {
    let soft =
        json!({"evictionSoft": {"memory.available": "30%"}, "evictionSoftGracePeriod": {"memory.available": "30s"}});
    let mut observed = Observed::new(soft);
    let step = observed.at(0, &[(Signal::MemoryAvailable, "299Mi")]);
    assert_eq!((step.due.len(), step.pressures), (0, MEMORY), "the condition needs no grace period");
    assert_eq!(step.next_due, Some(observed.start + Duration::from_secs(30)));
    assert!(!observed.memory(29, "299Mi").0);
    assert!(!observed.memory(29, "301Mi").0, "interrupted");
    assert!(!observed.memory(31, "299Mi").0);
    assert!(!observed.memory(60, "299Mi").0);
    assert!(observed.memory(61, "299Mi").0);
}

#[tokio::test]
async fn what_was_acted_on_needs_the_minimum_reclaim() {
    let fields = json!({
        "evictionHard": {"memory.available": "100Mi"}, "evictionMinimumReclaim": {"memory.available": "50Mi"},
    });
    let mut observed = Observed::new(fields);
    assert!(!observed.memory(0, "120Mi").0);
    assert!(observed.memory(1, "90Mi").0);
    assert!(observed.memory(2, "149Mi").0);
    assert!(!observed.memory(3, "150Mi").0);
    assert!(!observed.memory(4, "120Mi").0, "the threshold itself counts again");
}

#[tokio::test]
async fn statistics_that_do_not_advance_cause_no_second_eviction() {
    let mut observed = Observed::new(json!({"evictionHard": {"nodefs.available": "10%"}}));
    let now = observed.start;
    let low = readings(now, &[(Signal::NodeFsAvailable, "99Mi")]);
    let due = |observed: &mut Observed, seconds: u64, readings: &Readings| {
        let now = now + Duration::from_secs(seconds);
        let step = observed.history.step(&observed.thresholds, readings, MINUTE, now);
        (step.due.len(), step.pressures.disk)
    };
    assert_eq!(due(&mut observed, 0, &low), (1, true));
    assert_eq!(due(&mut observed, 10, &low), (0, true), "the same measurement");
    let missing = readings(now, &[]);
    assert_eq!(due(&mut observed, 20, &missing), (0, true), "without a measurement a threshold cannot be met");
    assert_eq!(due(&mut observed, 80, &missing), (0, false));
}

#[tokio::test]
async fn memory_comes_first_of_several_and_disks_last() {
    let hard = json!({"evictionHard": {
        "pid.available": "10%", "nodefs.available": "10%", "memory.available": "10%", "imagefs.inodesFree": "10%",
    }});
    let mut observed = Observed::new(hard);
    let signals = [
        (Signal::PidAvailable, "99"),
        (Signal::ImageFsInodesFree, "99"),
        (Signal::NodeFsAvailable, "99Mi"),
        (Signal::MemoryAvailable, "99Mi"),
    ];
    let step = observed.at(0, &signals);
    let order: Vec<&str> = step.due.iter().map(|threshold| threshold.signal.as_str()).collect();
    assert_eq!(order, ["memory.available", "pid.available", "nodefs.available", "imagefs.inodesFree"]);
    assert_eq!(step.pressures, Pressures { memory: true, disk: true, pid: true });
}

#[tokio::test]
async fn the_end_of_the_next_condition_is_awaited() {
    let hard = json!({"evictionHard": {"memory.available": "100Mi", "pid.available": "10%"}});
    let mut observed = Observed::new(hard);
    observed.at(0, &[(Signal::PidAvailable, "99")]);
    observed.at(10, &[(Signal::MemoryAvailable, "99Mi")]);
    let end = |second| {
        let now = observed.start + Duration::from_secs(second);
        observed.history.next_transition(MINUTE, now).map(|end| end.duration_since(observed.start).as_secs())
    };
    assert_eq!([10, 59, 60, 69, 70].map(end), [Some(60), Some(60), Some(70), Some(70), None]);
}

#[tokio::test]
async fn without_a_transition_period_a_condition_ends_with_its_cause() {
    let mut observed = Observed::new(json!({"evictionHard": {"memory.available": "100Mi"}}));
    let mut pressures = |second, available| {
        let now = observed.start + Duration::from_secs(second);
        let low = readings(now, &[(Signal::MemoryAvailable, available)]);
        observed.history.step(&observed.thresholds, &low, Duration::ZERO, now).pressures
    };
    assert_eq!((pressures(0, "1Mi"), pressures(1, "200Mi")), (MEMORY, NONE));
}
