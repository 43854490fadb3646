//! Random schedules of faults, drawn from a seed.
//!
//! A schedule is plain data, printed with a failing seed, and ends by clearing all faults.

use std::time::Duration;

use tonic::Code;

use super::faults::CallFault;
use super::faults::EventFaults;
use super::faults::FaultKind;
use super::method::Method;
use super::program::Exit;
use super::sim::Recovery;
use super::sim::SimRuntime;

/// One action of a schedule.
#[derive(Clone, Debug)]
pub enum ScheduledAction {
    /// A container's init process exits.
    ExitContainer {
        /// Pod name.
        pod: String,
        /// Container name.
        container: String,
        /// How it exits.
        exit: Exit,
    },
    /// A pod's pause process exits.
    KillSandbox(String),
    /// Replaces the faults of events.
    SetEventFaults(EventFaults),
    /// Adds a rule for calls.
    AddCallFault(CallFault),
    /// Sets the delay between an exit and its report.
    SetExitReportDelay(Duration),
    /// The runtime process is killed.
    StopRuntime,
    /// The runtime process starts again, after [`ScheduledAction::StopRuntime`].
    StartRuntime(Recovery),
    /// The test acts on the agent or on the desired pods.
    Agent,
    /// Clears all faults.
    ClearFaults,
}

/// Actions with their times since the schedule's start, in order.
#[derive(Clone, Debug, Default)]
pub struct FaultSchedule {
    /// The actions.
    pub actions: Vec<(Duration, ScheduledAction)>,
}

impl FaultSchedule {
    /// `count` random actions within `span` on these (pod, container) pairs, then [`ScheduledAction::ClearFaults`].
    pub fn random(seed: u64, span: Duration, count: usize, targets: &[(String, String)]) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut actions = Vec::new();
        for _ in 0..count {
            let at = span.mul_f64(rng.f64());
            match random_action(&mut rng, targets) {
                ScheduledAction::StopRuntime => {
                    let back = (at + Duration::from_millis(rng.u64(0..3000))).min(span);
                    let replay_events = if rng.bool() { 0 } else { rng.usize(1..40) };
                    actions.push((at, ScheduledAction::StopRuntime));
                    actions.push((
                        back,
                        ScheduledAction::StartRuntime(Recovery { lose_exit_codes: rng.bool(), replay_events }),
                    ));
                }
                action => actions.push((at, action)),
            }
        }
        actions.sort_by_key(|(at, _)| *at);
        actions.push((span, ScheduledAction::ClearFaults));
        Self { actions }
    }

    /// Runs the schedule. `agent` is called at every [`ScheduledAction::Agent`].
    pub async fn run(self, sim: &SimRuntime, mut agent: impl AsyncFnMut()) {
        let start = tokio::time::Instant::now();
        let usual = sim.exit_report();
        let mut downs = 0_usize;
        for (at, action) in self.actions {
            tokio::time::sleep_until(start + at).await;
            match action {
                ScheduledAction::ExitContainer { pod, container, exit } => _ = sim.kill(&pod, &container, exit),
                ScheduledAction::KillSandbox(pod) => _ = sim.kill_sandboxes(&pod),
                ScheduledAction::SetEventFaults(faults) => sim.faults(|f| f.events = faults),
                ScheduledAction::AddCallFault(fault) => sim.faults(|f| f.add(fault)),
                ScheduledAction::SetExitReportDelay(delay) => sim.set_exit_report(delay),
                ScheduledAction::StopRuntime => {
                    downs += 1;
                    sim.go_down();
                }
                ScheduledAction::StartRuntime(recovery) => {
                    downs = downs.saturating_sub(1);
                    if downs == 0 {
                        sim.come_up(recovery);
                    }
                }
                ScheduledAction::Agent => agent().await,
                ScheduledAction::ClearFaults => {
                    sim.faults(|f| f.clear());
                    sim.set_exit_report(usual);
                }
            }
        }
    }
}

fn random_action(rng: &mut fastrand::Rng, targets: &[(String, String)]) -> ScheduledAction {
    let millis = |rng: &mut fastrand::Rng, most: u64| Duration::from_millis(rng.u64(0..most));
    let Some((pod, container)) = rng.choice(targets).cloned() else { return ScheduledAction::ClearFaults };
    match rng.u8(0..100) {
        0..40 => ScheduledAction::ExitContainer { pod, container, exit: random_exit(rng) },
        40..44 => ScheduledAction::KillSandbox(pod),
        44..58 => ScheduledAction::SetEventFaults(EventFaults {
            lost: rng.f64() * 0.5,
            late: rng.f64() * 0.5,
            late_by: millis(rng, 3000),
            doubled: rng.f64() * 0.5,
            swapped: rng.f64() * 0.5,
            bare: rng.f64() * 0.3,
            anonymous: rng.f64() * 0.3,
            stale: rng.f64() * 0.5,
            stale_by: millis(rng, 500),
            misdated: rng.f64() * 0.3,
        }),
        58..76 => ScheduledAction::AddCallFault(random_call_fault(rng)),
        76..82 => ScheduledAction::SetExitReportDelay(millis(rng, 2000)),
        82..90 => ScheduledAction::StopRuntime,
        _ => ScheduledAction::Agent,
    }
}

fn random_exit(rng: &mut fastrand::Rng) -> Exit {
    match rng.u8(0..4) {
        0 => Exit::Code(0),
        1 => Exit::Code(rng.u8(1..)),
        2 => Exit::Signal(11),
        _ => Exit::Oom,
    }
}

fn random_call_fault(rng: &mut fastrand::Rng) -> CallFault {
    use Method::*;
    const FAULTY: [Method; 13] = [
        RunPodSandbox,
        StopPodSandbox,
        PodSandboxStatus,
        ListPodSandbox,
        CreateContainer,
        StartContainer,
        StopContainer,
        RemoveContainer,
        ListContainers,
        ContainerStatus,
        PullImage,
        ImageStatus,
        ExecSync,
    ];
    // Some delays exceed every client deadline, so that calls take effect after the client gave up.
    let longest = if rng.u8(0..6) == 0 { 300_000 } else { 5000 };
    let delay = Duration::from_millis(rng.u64(1..longest));
    let method = FAULTY[rng.usize(..FAULTY.len())];
    // A kubelet waits for a pull or a postStart hook until it ends.
    let has_deadline = ![PullImage, ExecSync].contains(&method);
    let kind = match rng.u8(0..6) {
        2 | 3 if !has_deadline => FaultKind::Slow(delay),
        0 => FaultKind::Slow(delay),
        1 => FaultKind::LateAnswer(delay),
        2 => FaultKind::Hang,
        3 => FaultKind::HangAfter,
        4 => FaultKind::Fail(Code::Unknown, "simulated failure".to_owned()),
        _ => FaultKind::FailAfter(Code::Unknown, "simulated failure after the effect".to_owned()),
    };
    CallFault::on(method, kind).times(rng.u32(1..4))
}
