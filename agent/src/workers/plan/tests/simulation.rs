//! Plans applied to a small world until nothing is left to do: a start makes a running instance or a leftover, a
//! kill makes a dead one, and each container exits a scripted number of times.

use std::collections::HashMap;
use std::time::Duration;

use proptest::prelude::*;

use super::Situation;
use super::strategies::situations;
use crate::model::ContainerClass;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodActions;
use crate::model::SandboxPlan;
use crate::model::StartContainer;
use crate::model::spec;
use crate::model::testing;
use crate::workers::backoff;

const STEPS: usize = 400;

/// The simulated state of a pod. Every container still has these ends ahead; `None` is a start that fails half-way.
pub(super) struct World {
    pub(super) situation: Situation,
    ends: HashMap<String, Vec<Option<i32>>>,
    /// Restart counts already used, as the names of log files would give.
    counts: HashMap<String, u32>,
    created: i64,
}

impl World {
    pub(super) fn new(mut situation: Situation, ends: &[Option<i32>]) -> Self {
        situation.restarting_all = false;
        situation.probes = crate::model::ProbeResults::default();
        for container in spec_containers(&mut situation) {
            container.startup_probe = None;
        }
        let names = situation.pod.spec.iter().flat_map(|spec| {
            spec.init_containers.iter().flatten().chain(&spec.containers).map(|container| container.name.clone())
        });
        let ends = names.map(|name| (name, ends.to_vec())).collect();
        Self { situation, ends, counts: HashMap::new(), created: 1_000_000 }
    }

    /// Plans and acts until nothing is left to do. The number of steps it took.
    fn settle(&mut self) -> Result<usize, TestCaseError> {
        self.settle_watched(|_| Ok(()))
    }

    /// `settle`, with a check of each situation before it is planned for.
    pub(super) fn settle_watched(
        &mut self,
        mut watch: impl FnMut(&mut Situation) -> Result<(), TestCaseError>,
    ) -> Result<usize, TestCaseError> {
        for step in 0..STEPS {
            watch(&mut self.situation)?;
            let actions = self.situation.plan();
            if self.is_settled(&actions) {
                return Ok(step);
            }
            self.apply(&actions)?;
            self.live_on();
        }
        let plan = self.situation.plan();
        Err(TestCaseError::fail(format!("still busy after {STEPS} steps: {plan:?} for {:#?}", self.situation)))
    }

    /// Nothing to do and no end ahead, or a pod that is killed for good: its phase keeps it from being planned again.
    fn is_settled(&self, actions: &PodActions) -> bool {
        let over = actions.kill_pod && actions.sandbox == SandboxPlan::None;
        let ends_ahead = self.ends.iter().any(|(name, ends)| matches!(ends.last(), Some(Some(_))) && self.runs(name))
            || self.init_runs();
        (actions.is_idle() && !actions.await_confirmation && !ends_ahead) || over
    }

    fn runs(&self, name: &str) -> bool {
        self.situation.snapshot.newest(name).is_some_and(|newest| newest.state == ContainerState::Running)
    }

    fn init_runs(&self) -> bool {
        spec::classified_init(&self.situation.pod).any(|c| c.class == ContainerClass::Init && self.runs(c.name()))
    }

    pub(super) fn apply(&mut self, actions: &PodActions) -> Result<(), TestCaseError> {
        let now = self.created;
        let snapshot = &mut self.situation.snapshot;
        for container in &mut snapshot.containers {
            let hit = actions.kill.iter().any(|kill| kill.id == container.id);
            if container.state != ContainerState::Exited && (actions.kill_pod || hit) {
                end(container, 137, now);
            }
        }
        if actions.kill_pod {
            snapshot.sandboxes.iter_mut().for_each(|sandbox| sandbox.ready = false);
        }
        let gone: Vec<_> = actions.remove.iter().chain(&actions.prune).map(|removal| removal.id.clone()).collect();
        snapshot.containers.retain(|container| !gone.contains(&container.id));
        if let SandboxPlan::Create { attempt, .. } = actions.sandbox {
            prop_assert!(snapshot.sandboxes.iter().all(|sandbox| sandbox.attempt < attempt));
            snapshot.sandboxes.insert(0, testing::sandbox(attempt));
        }
        for start in &actions.start {
            match &start.blocked {
                Some(blocked) => self.situation.now = self.situation.now.max(blocked.until),
                None => self.start(start)?,
            }
        }
        Ok(())
    }

    fn start(&mut self, start: &StartContainer) -> Result<(), TestCaseError> {
        prop_assert!(!self.runs(&start.name), "{} would run twice", start.name);
        let containers = &mut self.situation.snapshot.containers;
        containers.retain(|container| !start.replaces.contains(&container.id));
        let unstarted = |c: &ContainerStatus| c.name == start.name && c.state == ContainerState::Created;
        prop_assert!(!containers.iter().any(unstarted), "an unstarted {} is left beside the new one", start.name);
        if let Some(finished) = start.last_finished_at {
            let container = spec::lasting_containers(&self.situation.pod).find(|c| c.name() == start.name);
            let key = container.map(|c| backoff::crash_loop_key(&self.situation.pod, c.spec)).unwrap_or_default();
            let now = self.situation.now;
            self.situation.history.record(&key, backoff::wall_time(finished), now);
        }
        let used = self.counts.get(&start.name).copied();
        let count = start.restart_count.unwrap_or_else(|| used.map_or(0, |count| count + 1));
        prop_assert!(used.is_none_or(|used| count > used), "restart count of {} falls to {count}", start.name);
        self.counts.insert(start.name.clone(), count);
        self.created += 1;
        let ends = self.ends.entry(start.name.clone()).or_default();
        let fails = ends.last() == Some(&None);
        if fails {
            ends.pop();
        }
        let state = if fails { ContainerState::Created } else { ContainerState::Running };
        let mut instance = testing::status(&start.name, count, state);
        instance.id = format!("{}-{}", start.name, self.created).into();
        instance.created_at = self.created;
        instance.sandbox_id =
            self.situation.snapshot.sandboxes.first().map(|sandbox| sandbox.id.clone()).unwrap_or_default();
        self.situation.snapshot.containers.insert(0, instance);
        Ok(())
    }

    /// One running container comes to its next end, and one missing exit code is reported.
    fn live_on(&mut self) {
        let now = self.situation.now + Duration::from_secs(1);
        self.situation.now = now;
        let nanos = now.duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let nanos = i64::try_from(nanos).unwrap_or(i64::MAX);
        if let Some(mute) = self
            .situation
            .snapshot
            .containers
            .iter_mut()
            .find(|c| c.state == ContainerState::Exited && c.exit_code.is_none())
        {
            mute.exit_code = Some(1);
        }
        let init: Vec<_> = spec::classified_init(&self.situation.pod)
            .filter(|c| c.class == ContainerClass::Init)
            .map(|c| c.name().to_owned())
            .collect();
        let mut running = self.situation.snapshot.containers.iter_mut().filter(|c| c.state == ContainerState::Running);
        let next = running.find_map(|container| {
            let ends = self.ends.get_mut(&container.name)?;
            match ends.last() {
                Some(Some(_)) => ends.pop().flatten().map(|code| (container, code)),
                Some(None) | None if init.contains(&container.name) => Some((container, 0)),
                Some(None) | None => None,
            }
        });
        if let Some((container, code)) = next {
            end(container, code, nanos);
        }
    }
}

fn end(container: &mut crate::model::ContainerStatus, code: i32, now: i64) {
    container.state = ContainerState::Exited;
    container.exit_code = Some(code);
    container.finished_at = now;
}

fn spec_containers(situation: &mut Situation) -> impl Iterator<Item = &mut k8s_openapi::api::core::v1::Container> {
    situation.pod.spec.iter_mut().flat_map(|spec| spec.init_containers.iter_mut().flatten())
}

pub(super) fn ends() -> impl Strategy<Value = Vec<Option<i32>>> {
    proptest::collection::vec(prop::sample::select(vec![None, Some(0), Some(1), Some(42)]), 0..4)
}

proptest! {
    /// From any situation, with crashes, half-made starts and restarts of the whole pod on the way, a pod comes to
    /// rest, never runs a container twice and never lowers a restart count.
    #[test]
    fn plans_converge(situation in situations(), ends in ends()) {
        World::new(situation, &ends).settle()?;
    }
}

/// Checks the simulation itself: containers crash, are restarted and counted.
#[test]
fn a_crashing_pod_is_restarted_as_often_as_it_crashes() {
    let mut situation = Situation::new(testing::pod("Always", &["one"], &["a"]), vec![]);
    situation.snapshot.sandboxes.clear();
    let mut world = World::new(situation, &[Some(1), Some(1), None]);
    let steps = world.settle().expect("it settles");
    assert!(steps >= 8, "{steps}");
    let newest = world.situation.snapshot.newest("a").expect("a runs");
    assert_eq!((newest.state, newest.restart_count), (ContainerState::Running, 3));
    assert_eq!(world.situation.snapshot.newest("one").map(|c| c.exit_code), Some(Some(0)));
}
