//! The whole agent under random schedules: deaths, lost and garbled events, failing, hanging and late calls, runtime
//! restarts, killed agents, pods removed and added. Whatever happened:
//!
//! - no container name ever has two live instances in a pod,
//! - no restart count falls,
//! - no agent tells a death twice, and every death is told,
//! - once the fault ends, what is desired runs and nothing else does.
//!
//! `SIM_SEEDS=from..to` runs other seeds; a failure names its seed and prints schedule and history.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use keblet_proto::cri::v1::{PodSandboxState, PodSandboxStatus};
use keblet_tests::cri::*;
use keblet_tests::node::{Agent, PodOf, Seen, Senses, pod};
use keblet_tests::seeds;
use tokio::time::Instant;

const SPAN: Duration = Duration::from_secs(25);
/// Long enough for a hung call's deadline, a full crash-loop back-off and a periodic list, one after the other.
const CONVERGENCE: Duration = Duration::from_secs(3600);
const NAMES: [&str; 3] = ["a", "b", "c"];

fn pod_called(name: &str, generation: u32) -> PodOf {
    let pod = match name {
        "a" => pod("a").running("main", "exit 1 700ms until 2").running("side", "run"),
        "b" => pod("b").after("init", "exit 0 20ms").running("main", "run"),
        _ => pod("c").host_pid().running("main", "exit 0 1s until 2 fork"),
    };
    pod.uid(&format!("{name}-uid-{generation}"))
}

/// One schedule's node, agent and what is desired of it.
struct World<'a> {
    seed: u64,
    sim: SimRuntime,
    root: &'a Path,
    senses: Senses,
    rng: fastrand::Rng,
    desired: BTreeMap<&'static str, u32>,
    generation: u32,
    /// What each agent saw, oldest first.
    seen: Vec<Seen>,
    agent: Option<Agent>,
}

impl World<'_> {
    fn start_agent(&mut self) {
        self.agent = None;
        let seen = Seen::default();
        let pods = self.desired.iter().map(|(name, generation)| pod_called(name, *generation).build()).collect();
        self.agent = Some(Agent::start_seeing(&self.sim, self.senses, self.root, pods, seen.clone()));
        self.seen.push(seen);
    }

    /// The agent is killed and started again, or a pod goes, or comes under a new UID.
    async fn agent_step(&mut self) {
        let name = NAMES[self.rng.usize(..NAMES.len())];
        match self.rng.u8(0..3) {
            0 => self.start_agent(),
            1 => {
                if let Some((agent, generation)) = self.agent.as_ref().zip(self.desired.remove(name)) {
                    agent.remove(pod_called(name, generation).build()).await;
                }
            }
            _ => {
                if let (Some(agent), false) = (&self.agent, self.desired.contains_key(name)) {
                    self.generation += 1;
                    agent.add(pod_called(name, self.generation).build()).await;
                    self.desired.insert(name, self.generation);
                }
            }
        }
    }

    /// What is desired runs, and nothing else does.
    fn converged(&self, trace: &Trace) -> bool {
        let mut expected = 0;
        let lives = self.desired.iter().all(|(name, generation)| {
            let containers: &[&str] = if *name == "a" { &["main", "side"] } else { &["main"] };
            expected += containers.len();
            let uid = format!("{name}-uid-{generation}");
            containers
                .iter()
                .all(|container| trace.live(name, container).is_some_and(|i| i.pod_uid == uid && settled(i)))
        });
        lives && trace.live_count() == expected
    }

    /// Waits until what is desired runs, in sandboxes that are ready, and stays so.
    async fn settle(&self, plan: &str) {
        let start = Instant::now();
        loop {
            if let Err(timed_out) = self.sim.until("converged", CONVERGENCE, |trace| self.converged(trace)).await {
                panic!("seed {}, {:?}: {:?} desired\n{plan}\n{timed_out}", self.seed, self.senses, self.desired);
            }
            tokio::time::sleep(Duration::from_secs(5)).await;
            if self.sim.trace(|trace| self.converged(trace)) && NAMES.iter().all(|name| self.grounded(name)) {
                return;
            }
            assert!(
                start.elapsed() < CONVERGENCE,
                "seed {} keeps changing\n{plan}\n{}",
                self.seed,
                self.sim.trace(Trace::clone)
            );
        }
    }

    /// A desired pod has one ready sandbox; of those no longer desired nothing is left.
    fn grounded(&self, name: &str) -> bool {
        let uid = self.desired.get(name).map(|generation| format!("{name}-uid-{generation}"));
        let sandboxes = self.sim.sandboxes(name);
        let known = |s: &PodSandboxStatus| s.metadata.as_ref().map(|metadata| &metadata.uid) == uid.as_ref();
        let ready = sandboxes.iter().filter(|s| s.state() == PodSandboxState::SandboxReady).count();
        sandboxes.iter().all(known) && ready == usize::from(uid.is_some())
    }

    /// Holds at every moment, so judged once at the end of all.
    fn judge(&self, plan: &str) {
        let trace = self.sim.trace(Trace::clone);
        let told = || format!("seed {}, {:?}\n{plan}\n{trace}", self.seed, self.senses);
        assert!(trace.duplicates().is_empty(), "{:#?}\n{}", trace.duplicates(), told());
        // Init containers start anew with a new sandbox.
        let fallen: Vec<_> = trace.fallen_attempts().into_iter().filter(|i| i.container != "init").collect();
        assert!(fallen.is_empty(), "{fallen:#?}\n{}", told());
        for instance in trace.instances().iter().filter(|i| i.exited.is_some()) {
            let deaths: Vec<usize> = self.seen.iter().map(|seen| seen.deaths(&instance.id)).collect();
            assert!(deaths.iter().all(|n| *n <= 1), "{} died {deaths:?} times\n{}", instance.id, told());
            assert!(deaths.contains(&1), "the death of {} was never told\n{}", instance.id, told());
        }
    }
}

/// Past its scripted crashes.
fn settled(instance: &Instance) -> bool {
    instance.attempt >= 2 || instance.container == "side" || instance.pod.ends_with("/b")
}

async fn schedule(seed: u64) {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("hosts"), "127.0.0.1 localhost\n").expect("a hosts file");
    let sim = SimRuntime::new(Options { seed, jitter: 0.3, ..Options::default() });
    sim.images(|images| images.store("busybox", 1));
    let senses = [Senses::ALL, Senses::EVENTS, Senses::ALL, Senses { probes: false, ..Senses::ALL }, Senses::LISTS];
    let mut world = World {
        seed,
        sim: sim.clone(),
        root: folder.path(),
        senses: senses[usize::try_from(seed % 5).unwrap_or(0)],
        rng: fastrand::Rng::with_seed(seed),
        desired: NAMES.iter().map(|name| (*name, 0)).collect(),
        generation: 0,
        seen: Vec::new(),
        agent: None,
    };
    world.start_agent();
    let targets: Vec<_> = NAMES.iter().map(|name| (name.to_string(), "main".to_owned())).collect();
    let faults = FaultSchedule::random(seed, SPAN, 10, &targets);
    let plan = format!("{faults:#?}");
    faults.run(&sim, async || world.agent_step().await).await;
    world.settle(&plan).await;
    world.judge(&plan);
}

#[test]
fn random_schedules_first_half() {
    seeds::run(0..50, schedule);
}

#[test]
fn random_schedules_second_half() {
    seeds::run(50..100, schedule);
}
