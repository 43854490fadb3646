//! Plan and status agree: the statuses published while plans are executed are legal, monotonic and converge.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::PodStatus;
use proptest::prelude::*;

use super::Situation;
use super::simulation::World;
use super::simulation::ends;
use super::strategies::pods;
use crate::model::PodUid;
use crate::model::spec;
use crate::status;
use crate::status::StatusInput;
use crate::status::StatusStore;

/// Checks that no status contradicts an earlier one.
struct Listener {
    store: StatusStore,
    counts: HashMap<String, i32>,
    phase: String,
}

impl Listener {
    fn new(situation: &Situation) -> Self {
        Self { store: StatusStore::new(situation.gates), counts: HashMap::new(), phase: String::new() }
    }

    fn hear(&mut self, situation: &mut Situation) -> Result<(), TestCaseError> {
        let uid = PodUid::from("uid");
        let nothing = PodStatus::default();
        let status = status::generate(&StatusInput {
            pod: &situation.pod,
            snapshot: &situation.snapshot,
            old: self.store.basis("uid", &situation.pod, None).unwrap_or(&nothing),
            probes: None,
            reasons: &HashMap::new(),
            qos_class: "BestEffort",
            resources: None,
            resize: status::ResizeView::default(),
            recursive_read_only: false,
            stop_signals: false,
            is_terminal: false,
            runtime_type: "sim",
            node: &status::NodeAddresses::default(),
            gates: situation.gates,
            now: situation.now,
        });
        let lists = [&status.init_container_statuses, &status.container_statuses];
        for container in lists.into_iter().flatten().flatten() {
            let count = self.counts.entry(container.name.clone()).or_default();
            prop_assert!(container.restart_count >= *count, "the restart count of {} falls", container.name);
            *count = container.restart_count;
        }
        let phase = status.phase.clone().unwrap_or_default();
        prop_assert!(!self.is_over() || phase == self.phase, "{} becomes {phase}", self.phase);
        self.phase = phase;
        situation.restarting_all = status
            .conditions
            .iter()
            .flatten()
            .any(|condition| condition.type_ == "AllContainersRestarting" && condition.status == "True");
        let legal = self.store.set(&uid, &situation.pod, None, status, situation.now);
        prop_assert!(legal.is_ok(), "{legal:?}");
        Ok(())
    }

    fn is_over(&self) -> bool {
        self.phase == "Succeeded" || self.phase == "Failed"
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// From its first sync until it is settled, the status is true: Running while a regular container runs at the end,
    /// Succeeded or Failed once its plan is to kill it for good.
    #[test]
    fn the_status_follows_the_plan(pod in pods(), ends in ends()) {
        let mut situation = Situation::new(pod, vec![]);
        situation.pod.metadata.deletion_timestamp = None;
        situation.snapshot.sandboxes.clear();
        let mut listener = Listener::new(&situation);
        let mut world = World::new(situation, &ends);
        world.settle_watched(|situation| listener.hear(situation))?;
        let last = world.situation.plan();
        if last.kill_pod {
            world.apply(&last)?;
            listener.hear(&mut world.situation)?;
            prop_assert!(listener.is_over(), "{} after {last:?}", listener.phase);
        } else {
            prop_assert_eq!(listener.phase.as_str(), "Running");
            let regular = |name: &str| spec::regular_containers(&world.situation.pod).iter().any(|c| c.name == name);
            prop_assert!(world.situation.snapshot.running().any(|instance| regular(&instance.name)));
        }
    }
}
