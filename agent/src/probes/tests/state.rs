//! Thresholds and due times of one probe.

use k8s_openapi::api::core::v1::Probe;
use tokio::time::Instant;

use super::after;
use crate::model::ContainerId;
use crate::model::ProbeKind;
use crate::model::ProbeKind::Liveness;
use crate::model::ProbeKind::Readiness;
use crate::model::ProbeKind::Startup;
use crate::model::ProbeResult;
use crate::probes::state::Beginning;
use crate::probes::state::ProbeSpec;
use crate::probes::state::ProbeState;
use crate::probes::state::RunResult;

fn spec(success: i32, failure: i32, period: i32) -> ProbeSpec {
    ProbeSpec::of(&Probe {
        success_threshold: Some(success),
        failure_threshold: Some(failure),
        period_seconds: Some(period),
        ..Probe::default()
    })
}

fn begun(kind: ProbeKind, spec: ProbeSpec, gated: bool, initial: ProbeResult, at: Instant) -> ProbeState {
    let mut state = ProbeState::new(kind, spec);
    state.begin(Beginning { id: ContainerId::from("a"), first_run: at, gated, initial });
    state
}

/// What is published after each of these outcomes (`S`, `F`, `E`): the same letters, `.` for nothing.
fn story(kind: ProbeKind, spec: ProbeSpec, outcomes: &str) -> String {
    let now = Instant::now();
    let mut state = begun(kind, spec, false, ProbeResult::Failure, now);
    let published = outcomes.chars().map(|outcome| {
        let outcome = match outcome {
            'S' => RunResult::Success,
            'F' => RunResult::Failure,
            _ => RunResult::Error,
        };
        match state.complete(outcome, now) {
            Some(ProbeResult::Success) => 'S',
            Some(ProbeResult::Failure) => 'F',
            _ => '.',
        }
    });
    published.collect()
}

#[test]
fn a_result_needs_as_many_equal_outcomes_as_its_threshold_says() {
    for (kind, success, failure, outcomes, expected) in [
        (Liveness, 1, 3, "SFFSFFF", "S..S..F"),
        (Liveness, 1, 1, "F", "F"),
        (Readiness, 3, 3, "SSFSSS", ".....S"),
        (Readiness, 1, 3, "SFFSFFFF", "S..S..FF"),
        (Readiness, 1, 2, "FEF", "..F"),
        (Liveness, 1, 1, "EEE", "..."),
        (Startup, 1, 3, "FFF", "..F"),
    ] {
        assert_eq!(story(kind, spec(success, failure, 10), outcomes), expected, "{kind:?} {outcomes}");
    }
}

#[test]
fn a_failed_liveness_and_any_startup_result_hold_the_probe_until_the_next_instance() {
    let now = Instant::now();
    for (kind, outcome, is_held) in [
        (Liveness, RunResult::Failure, true),
        (Liveness, RunResult::Success, false),
        (Startup, RunResult::Failure, true),
        (Startup, RunResult::Success, true),
        (Readiness, RunResult::Failure, false),
    ] {
        let mut state = begun(kind, spec(1, 1, 10), false, ProbeResult::Unknown, now);
        state.complete(outcome, now);
        assert_eq!(state.due().is_none(), is_held, "{kind:?} {outcome:?}");
        let next =
            Beginning { id: ContainerId::from("b"), first_run: now, gated: false, initial: ProbeResult::Unknown };
        state.begin(next);
        assert_eq!(state.due(), Some(now), "another instance");
    }
}

#[test]
fn another_instance_has_the_full_threshold() {
    let now = Instant::now();
    let mut state = begun(Liveness, spec(1, 2, 10), false, ProbeResult::Success, now);
    assert_eq!(state.complete(RunResult::Failure, now), None);
    state.begin(Beginning { id: ContainerId::from("b"), first_run: now, gated: false, initial: ProbeResult::Success });
    assert_eq!(state.complete(RunResult::Failure, now), None);
    assert_eq!(state.complete(RunResult::Failure, now), Some(ProbeResult::Failure));
}

#[test]
fn runs_are_a_period_apart_and_late_ones_follow_at_once() {
    let origin = Instant::now();
    let at = |seconds| after(origin, seconds);
    let mut state = begun(Liveness, spec(1, 3, 10), false, ProbeResult::Success, at(3.0));
    assert_eq!(state.due(), Some(at(3.0)));
    for (completed, due) in [(3.1, 13.0), (15.0, 23.0), (47.0, 47.0), (47.5, 57.0)] {
        state.complete(RunResult::Success, at(completed));
        assert_eq!(state.due(), Some(at(due)), "completed at {completed}");
    }
    state.end();
    assert_eq!(state.due(), None);
}

#[test]
fn a_container_that_is_not_ready_yet_is_probed_again_early() {
    let origin = Instant::now();
    let at = |seconds| after(origin, seconds);
    let mut state = begun(Readiness, spec(1, 3, 3), false, ProbeResult::Failure, origin);
    for (now, due) in [(0.0, 0.5), (0.5, 1.5), (1.5, 3.5), (3.5, 6.5)] {
        state.complete(RunResult::Failure, at(now));
        assert_eq!(state.due(), Some(at(due)), "failed at {now}");
    }
    state.complete(RunResult::Success, at(6.5));
    state.complete(RunResult::Failure, at(9.5));
    assert_eq!(state.due(), Some(at(12.5)), "it was ready");
    let mut before = begun(Readiness, spec(1, 3, 3), false, ProbeResult::Success, origin);
    before.complete(RunResult::Failure, origin);
    assert_eq!(before.due(), Some(at(3.0)), "it was ready before the agent started");
    let mut startup = begun(Startup, spec(1, 3, 3), false, ProbeResult::Unknown, origin);
    startup.complete(RunResult::Failure, origin);
    assert_eq!(startup.due(), Some(at(3.0)), "the threshold counts");
}

#[test]
fn gated_probes_wait_for_the_startup_probe() {
    let origin = Instant::now();
    let at = |seconds| after(origin, seconds);
    for (kind, first, opened, due) in [
        (Readiness, 0.0, 32.0, 32.0),
        (Readiness, 40.0, 32.0, 40.0),
        (Liveness, 2.0, 32.0, 32.0),
        (Liveness, 2.0, 33.0, 42.0),
        (Liveness, 40.0, 32.0, 40.0),
    ] {
        let mut state = begun(kind, spec(1, 3, 10), true, ProbeResult::Failure, at(first));
        assert_eq!(state.due(), None);
        state.open_gate(at(opened));
        assert_eq!(state.due(), Some(at(due)), "{kind:?} {first} {opened}");
    }
    let mut open = begun(Liveness, spec(1, 3, 10), false, ProbeResult::Success, origin);
    open.open_gate(at(5.0));
    assert_eq!(open.due(), Some(origin), "it was not gated");
}

#[test]
fn a_container_that_has_started_is_not_asked_for_it() {
    let state = begun(Startup, spec(1, 3, 10), false, ProbeResult::Success, Instant::now());
    assert_eq!(state.due(), None);
}

#[test]
fn missing_and_impossible_numbers_are_the_defaults() {
    let defaults = ProbeSpec::of(&Probe::default());
    assert_eq!((defaults.initial_delay.as_secs(), defaults.period.as_secs(), defaults.timeout.as_secs()), (0, 10, 1));
    let wrong = |value| Probe {
        initial_delay_seconds: Some(value),
        period_seconds: Some(value),
        timeout_seconds: Some(value),
        success_threshold: Some(value),
        failure_threshold: Some(value),
        ..Probe::default()
    };
    assert_eq!(ProbeSpec::of(&wrong(0)), defaults);
    assert_eq!(ProbeSpec::of(&wrong(-1)), defaults);
    let mut longest = begun(Readiness, ProbeSpec::of(&wrong(i32::MAX)), false, ProbeResult::Failure, Instant::now());
    for _ in 0..200 {
        assert_eq!(longest.complete(RunResult::Failure, Instant::now()), None);
    }
}
