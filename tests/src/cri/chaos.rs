//! Random schedules of trouble: what happens to a node between two moments, drawn from a seed.
//!
//! A schedule is plain data, printed with a failing seed, and ends with everything healthy again.

use std::time::Duration;

use tonic::Code;

use super::faults::{CallFault, EventFaults, Trouble};
use super::method::Method;
use super::program::Exit;
use super::sim::{Recovery, SimRuntime};

/// One thing that happens.
#[derive(Clone, Debug)]
pub enum Step {
    /// A container dies.
    Die {
        /// Pod name.
        pod: String,
        /// Container name.
        container: String,
        /// How.
        exit: Exit,
    },
    /// A pod's pause process dies.
    KillSandbox(String),
    /// Events are troubled so from now on.
    Events(EventFaults),
    /// Calls are troubled so from now on, beside other rules.
    Calls(CallFault),
    /// The runtime takes this long from now on to report a death.
    ExitReport(Duration),
    /// The runtime process dies.
    Down,
    /// The runtime process is back, after [`Step::Down`].
    Up(Recovery),
    /// The client's turn: the test restarts the agent, or does whatever else the step means to it.
    Agent,
    /// All faults end.
    Calm,
}

/// Steps with their times since the schedule's start, in order.
#[derive(Clone, Debug, Default)]
pub struct Chaos {
    /// The steps.
    pub steps: Vec<(Duration, Step)>,
}

impl Chaos {
    /// `count` random steps within `span`, upon these (pod, container) pairs; calm at the end of it.
    pub fn random(seed: u64, span: Duration, count: usize, targets: &[(String, String)]) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut steps = Vec::new();
        for _ in 0..count {
            let at = span.mul_f64(rng.f64());
            match random_step(&mut rng, targets) {
                Step::Down => {
                    let back = (at + Duration::from_millis(rng.u64(0..3000))).min(span);
                    let replay_events = if rng.bool() { 0 } else { rng.usize(1..40) };
                    steps.push((at, Step::Down));
                    steps.push((back, Step::Up(Recovery { lose_exit_codes: rng.bool(), replay_events })));
                }
                step => steps.push((at, step)),
            }
        }
        steps.sort_by_key(|(at, _)| *at);
        steps.push((span, Step::Calm));
        Self { steps }
    }

    /// Lets the schedule happen. `agent` is called at every [`Step::Agent`].
    pub async fn run(self, sim: &SimRuntime, mut agent: impl AsyncFnMut()) {
        let start = tokio::time::Instant::now();
        let usual = sim.exit_report();
        let mut downs = 0_usize;
        for (at, step) in self.steps {
            tokio::time::sleep_until(start + at).await;
            match step {
                Step::Die { pod, container, exit } => _ = sim.kill(&pod, &container, exit),
                Step::KillSandbox(pod) => _ = sim.kill_sandboxes(&pod),
                Step::Events(faults) => sim.faults(|f| f.events = faults),
                Step::Calls(fault) => sim.faults(|f| f.add(fault)),
                Step::ExitReport(delay) => sim.set_exit_report(delay),
                Step::Down => {
                    downs += 1;
                    sim.go_down();
                }
                Step::Up(recovery) => {
                    downs = downs.saturating_sub(1);
                    if downs == 0 {
                        sim.come_up(recovery);
                    }
                }
                Step::Agent => agent().await,
                Step::Calm => {
                    sim.faults(|f| f.clear());
                    sim.set_exit_report(usual);
                }
            }
        }
    }
}

fn random_step(rng: &mut fastrand::Rng, targets: &[(String, String)]) -> Step {
    let millis = |rng: &mut fastrand::Rng, most: u64| Duration::from_millis(rng.u64(0..most));
    let Some((pod, container)) = rng.choice(targets).cloned() else { return Step::Calm };
    match rng.u8(0..100) {
        0..40 => Step::Die { pod, container, exit: random_exit(rng) },
        40..44 => Step::KillSandbox(pod),
        44..58 => Step::Events(EventFaults {
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
        58..76 => Step::Calls(random_call_fault(rng)),
        76..82 => Step::ExitReport(millis(rng, 2000)),
        82..90 => Step::Down,
        _ => Step::Agent,
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
    const TROUBLED: [Method; 10] = [
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
    ];
    // Some delays outlast every deadline a client may set, so that effects come when nobody waits any more.
    let longest = if rng.u8(0..6) == 0 { 300_000 } else { 5000 };
    let delay = Duration::from_millis(rng.u64(1..longest));
    let trouble = match rng.u8(0..6) {
        0 => Trouble::Slow(delay),
        1 => Trouble::LateAnswer(delay),
        2 => Trouble::Hang,
        3 => Trouble::HangAfter,
        4 => Trouble::Fail(Code::Unknown, "simulated failure".to_owned()),
        _ => Trouble::FailAfter(Code::Unknown, "simulated failure after the effect".to_owned()),
    };
    CallFault::on(TROUBLED[rng.usize(..TROUBLED.len())], trouble).times(rng.u32(1..4))
}
