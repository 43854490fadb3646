//! One probe of one container: when it is due, and what its runs mean. Pure.
//!
//! ```text
//!  instance runs ─▶ [gated: startup probe has not succeeded] ─▶ due every period ─▶ threshold reached ─▶ result
//!        ▲                                                                             │ liveness failed, or startup
//!        └───────────────────────── another instance ◀──────────────────────────── on hold
//! ```
//!
//! Every instance of a container begins with the full thresholds. (Upstream keeps the count of a worker over crashes, so
//! that failures of a dead instance count against its successor.)

use std::time::Duration;

use k8s_openapi::api::core::v1::Probe;
use tokio::time::Instant;

use crate::model::ContainerId;
use crate::model::ProbeKind;
use crate::model::ProbeResult;

/// Pause after the first run that found a new instance not ready; doubles up to the period. Most servers listen within
/// this time, and are not kept out of service for a whole period. Upstream has extra runs, too: one per sync of the pod.
const EARLY_RETRY: Duration = Duration::from_millis(500);

/// The numbers of a probe's spec. Values that the API server would have replaced or rejected read as their defaults.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ProbeSpec {
    pub(super) initial_delay: Duration,
    pub(super) period: Duration,
    pub(super) timeout: Duration,
    success_threshold: u32,
    failure_threshold: u32,
}

impl ProbeSpec {
    pub(super) fn of(probe: &Probe) -> Self {
        let number = |value: Option<i32>, default: u32| {
            value.and_then(|value| u32::try_from(value).ok()).filter(|value| *value > 0).unwrap_or(default)
        };
        let seconds = |value, default| Duration::from_secs(number(value, default).into());
        Self {
            initial_delay: seconds(probe.initial_delay_seconds, 0),
            period: seconds(probe.period_seconds, 10),
            timeout: seconds(probe.timeout_seconds, 1),
            success_threshold: number(probe.success_threshold, 1),
            failure_threshold: number(probe.failure_threshold, 3),
        }
    }
}

/// The outcome of one run of a probe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RunResult {
    /// It succeeded.
    Success,
    /// It failed.
    Failure,
    /// It could not be carried out: counts for nothing.
    Error,
}

/// The beginning of an instance.
#[derive(Clone, Debug)]
pub(super) struct Beginning {
    pub(super) id: ContainerId,
    /// When the first run is due, unless the probe is gated.
    pub(super) first_run: Instant,
    /// The container's startup probe has not succeeded yet.
    pub(super) gated: bool,
    /// The result before the first run.
    pub(super) initial: ProbeResult,
}

/// Progress with one instance.
#[derive(Clone, Debug)]
struct Progress {
    id: ContainerId,
    due: Instant,
    gated: bool,
    on_hold: bool,
    /// The last outcome, and how often it was given in a row.
    streak: Option<(RunResult, u32)>,
    /// It has succeeded, or was ready before the agent started.
    was_ready: bool,
    /// Runs before the first success.
    early_runs: u32,
}

/// The state of one probe.
#[derive(Clone, Debug)]
pub(super) struct ProbeState {
    kind: ProbeKind,
    spec: ProbeSpec,
    progress: Option<Progress>,
}

impl ProbeState {
    pub(super) fn new(kind: ProbeKind, spec: ProbeSpec) -> Self {
        Self { kind, spec, progress: None }
    }

    pub(super) fn spec(&self) -> ProbeSpec {
        self.spec
    }

    /// The container may be killed for failures that begin with the first run.
    pub(super) fn first_failure_may_kill(&self) -> bool {
        match self.kind {
            ProbeKind::Liveness => true,
            ProbeKind::Startup => self.spec.failure_threshold == 1,
            ProbeKind::Readiness => false,
        }
    }

    /// The instance that is probed.
    pub(super) fn instance(&self) -> Option<&ContainerId> {
        self.progress.as_ref().map(|progress| &progress.id)
    }

    /// Another instance runs.
    pub(super) fn begin(&mut self, beginning: Beginning) {
        let was_ready = beginning.initial == ProbeResult::Success;
        self.progress = Some(Progress {
            id: beginning.id,
            due: beginning.first_run,
            gated: beginning.gated,
            on_hold: self.kind == ProbeKind::Startup && was_ready,
            streak: None,
            was_ready,
            early_runs: 0,
        });
    }

    /// The instance no longer runs.
    pub(super) fn end(&mut self) {
        self.progress = None;
    }

    /// When the next run is due; `None` if there is nothing to run.
    pub(super) fn due(&self) -> Option<Instant> {
        self.progress.as_ref().filter(|progress| !progress.gated && !progress.on_hold).map(|progress| progress.due)
    }

    /// The container's startup probe has succeeded: readiness is probed at once, liveness when its next run is due.
    pub(super) fn open_gate(&mut self, now: Instant) {
        let (kind, period) = (self.kind, self.spec.period);
        let Some(progress) = self.progress.as_mut().filter(|progress| progress.gated) else { return };
        progress.gated = false;
        progress.due = match kind {
            ProbeKind::Readiness => progress.due.max(now),
            ProbeKind::Liveness | ProbeKind::Startup => next_tick(progress.due, period, now),
        };
    }

    /// A run has ended. Returns the result if a threshold is reached; without a change of the outcome it is the same again.
    pub(super) fn complete(&mut self, run: RunResult, now: Instant) -> Option<ProbeResult> {
        let (kind, spec) = (self.kind, self.spec);
        let progress = self.progress.as_mut()?;
        // A run that outlasts the period is followed by the next one at once.
        progress.due = (progress.due + spec.period).max(now);
        if kind == ProbeKind::Readiness && run != RunResult::Success && !progress.was_ready {
            let pause = EARLY_RETRY.saturating_mul(2_u32.saturating_pow(progress.early_runs));
            progress.due = progress.due.min(now + pause.min(spec.period));
            progress.early_runs = progress.early_runs.saturating_add(1);
        }
        let (result, threshold) = match run {
            RunResult::Success => (ProbeResult::Success, spec.success_threshold),
            RunResult::Failure => (ProbeResult::Failure, spec.failure_threshold),
            RunResult::Error => return None,
        };
        progress.was_ready |= result == ProbeResult::Success;
        let before = progress.streak.filter(|(last, _)| *last == run).map_or(0, |(_, count)| count);
        let count = before.saturating_add(1);
        progress.streak = Some((run, count));
        if count < threshold {
            return None;
        }
        progress.on_hold = match kind {
            ProbeKind::Startup => true,
            ProbeKind::Liveness => result == ProbeResult::Failure,
            ProbeKind::Readiness => false,
        };
        Some(result)
    }
}

/// The first of `first`, `first + period`, … that is not over.
fn next_tick(first: Instant, period: Duration, now: Instant) -> Instant {
    let late = now.saturating_duration_since(first);
    let ticks = late.as_nanos().div_ceil(period.as_nanos().max(1));
    first + period.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX))
}
