//! Metrics of one worker's passes: keeps what was observed already, so that nothing is observed twice, also after a
//! restart of the agent.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::collections::HashSet;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodStatus;

use super::worker::WorkerObserver;
use crate::model::ContainerClass;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::PodSnapshot;
use crate::model::spec;

/// What one worker has reported to its observer.
#[derive(Debug, Default)]
pub(super) struct PassMetrics {
    /// The first pass has begun.
    pub(super) begun: bool,
    /// Exited containers that were observed and still exist in the runtime; `None` before the first observation.
    exited: Option<HashSet<ContainerId>>,
}

impl PassMetrics {
    /// Observes containers that exited since the last call. A proven exit is observed once the runtime has given its
    /// reason. `known` returns the last known status of the pod, and is called once.
    pub(super) fn observe_exits(
        &mut self,
        pod: Option<&Pod>,
        known: impl FnOnce(&Pod) -> Option<PodStatus>,
        view: &PodSnapshot,
        observer: &dyn WorkerObserver,
    ) {
        let observed = self.exited.get_or_insert_with(|| match pod {
            Some(pod) => observed_before(known(pod).as_ref(), view),
            // Its exits were observed while a source had it.
            None => dead(view).map(|container| container.id.clone()).collect(),
        });
        let (present, classes) = (view.containers_by_id(), classes_by_name(pod));
        observed.retain(|id| present.contains_key(id));
        for container in dead(view) {
            let Some(code) = container.exit_code else { continue };
            if observed.insert(container.id.clone()) {
                let class = classes.get(container.name.as_str()).copied().unwrap_or(ContainerClass::Regular);
                observer.container_exited(class, code, &container.reason);
            }
        }
    }
}

/// Exited containers of which the runtime has given the reason.
fn dead(view: &PodSnapshot) -> impl Iterator<Item = &ContainerStatus> {
    view.containers.iter().filter(|container| container.state == ContainerState::Exited && container.proven.is_none())
}

/// Exited containers that an earlier agent or worker has observed: those that the last known status shows as terminated,
/// and those that ended before another container of the pod was created, since the agent that created it knew of the exit.
/// An exit while no agent ran is neither. Without a status, as on a standalone node, the last exit of a pod is observed
/// again.
fn observed_before(known: Option<&PodStatus>, view: &PodSnapshot) -> HashSet<ContainerId> {
    let shown: HashSet<&str> = known.into_iter().flat_map(terminated).collect();
    // Such a container, if there is one, is among the two that were created last.
    let mut newest: Vec<&ContainerStatus> = view.containers.iter().collect();
    newest.sort_by_key(|container| Reverse(container.created_at));
    newest.truncate(2);
    let has_successor = |ended: &ContainerStatus| {
        newest.iter().any(|other| other.id != ended.id && other.created_at >= ended.finished_at)
    };
    let observed = dead(view).filter(|ended| shown.contains(ended.id.as_str()) || has_successor(ended));
    observed.map(|ended| ended.id.clone()).collect()
}

/// Ids of the containers that a status shows as terminated, now or before their last restart.
fn terminated(status: &PodStatus) -> impl Iterator<Item = &str> {
    let lists = [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    let containers = lists.into_iter().flatten().flatten();
    let states = containers.flat_map(|container| [&container.state, &container.last_state]).flatten();
    let ids = states.filter_map(|state| state.terminated.as_ref()?.container_id.as_deref());
    ids.map(|id| id.split_once("://").map_or(id, |(_, id)| id))
}

/// The classes of the containers that are not regular, by name. A container that the spec does not name counts as regular.
fn classes_by_name(pod: Option<&Pod>) -> HashMap<&str, ContainerClass> {
    let mut classes = HashMap::new();
    let Some(pod) = pod else { return classes };
    let init = spec::classified_init(pod).map(|init| (init.name(), init.class));
    let ephemeral = spec::ephemeral_containers(pod).iter();
    let ephemeral = ephemeral.map(|container| (container.name.as_str(), ContainerClass::Ephemeral));
    for (name, class) in init.chain(ephemeral) {
        classes.entry(name).or_insert(class);
    }
    classes
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::model::Pod as DesiredPod;
    use crate::model::testing;
    use crate::workers::act::SyncOutcome;

    #[derive(Default)]
    struct Observed(Mutex<Vec<String>>);

    impl WorkerObserver for Observed {
        fn planned(&self, _: Duration) {}
        fn acted(&self, _: Duration, _: &SyncOutcome) {}
        fn pass(&self, _: &'static str, _: Duration) {}
        fn begun(&self, _: &DesiredPod, _: Option<Duration>) {}
        fn container_exited(&self, class: ContainerClass, exit_code: i32, reason: &str) {
            self.0.lock().expect("not poisoned").push(format!("{class:?} {exit_code} {reason}"));
        }
        fn restarted(&self, _: bool) {}
        fn orphaned(&self) {}
        fn rejected(&self, _: &str) {}
        fn preempted(&self, _: &str) {}
    }

    impl Observed {
        fn take(&self) -> Vec<String> {
            std::mem::take(&mut *self.0.lock().expect("not poisoned"))
        }
    }

    fn exited(name: &str, code: i32, reason: &str) -> ContainerStatus {
        ContainerStatus { reason: reason.into(), ..testing::exited(name, 0, code) }
    }

    /// Of a pod whose first pass has seen no containers.
    fn begun(pod: &Pod, observer: &Observed) -> PassMetrics {
        let mut pass_metrics = PassMetrics::default();
        pass_metrics.observe_exits(Some(pod), |_| None, &testing::snapshot(Vec::new()), observer);
        pass_metrics
    }

    #[test]
    fn an_exit_is_observed_once_with_the_class_of_its_container() {
        let pod = testing::pod("Always", &["init", "side"], &["a", "b"]);
        let observed = Observed::default();
        let mut pass_metrics = begun(&pod, &observed);
        let mut observe = |containers| {
            pass_metrics.observe_exits(Some(&pod), |_| None, &testing::snapshot(containers), &observed);
            observed.take()
        };
        let all = || vec![exited("init", 0, "Completed"), exited("side", 137, "OOMKilled"), exited("a", 3, "Error")];
        assert_eq!(observe(all()), ["Init 0 Completed", "Sidecar 137 OOMKilled", "Regular 3 Error"]);
        assert_eq!(observe(all()), Vec::<String>::new());
        assert_eq!(observe(vec![testing::running("b", 0)]), Vec::<String>::new());
    }

    /// Containers: as many as an object of the API server has room for.
    #[test]
    fn thousands_of_exits_are_observed_once() {
        const COUNT: usize = 20_000;
        let names: Vec<String> = (0..COUNT).map(|number| format!("c{number}")).collect();
        let init: Vec<&str> = names.iter().map(String::as_str).collect();
        let (pod, observed) = (testing::pod("Always", &init, &[]), Observed::default());
        let view = testing::snapshot(init.iter().map(|name| exited(name, 0, "Completed")).collect());
        let mut pass_metrics = PassMetrics::default();
        pass_metrics.observe_exits(Some(&pod), |_| None, &view, &observed);
        let all = observed.take();
        assert!(all.len() == COUNT && all.iter().all(|of| of == "Init 0 Completed"), "{:?}", all.first());
        pass_metrics.observe_exits(Some(&pod), |_| None, &view, &observed);
        assert_eq!(observed.take().len(), 0);
    }

    #[test]
    fn a_proven_exit_is_observed_once_its_reason_is_known() {
        let pod = testing::pod("Always", &[], &["a"]);
        let observed = Observed::default();
        let mut pass_metrics = begun(&pod, &observed);
        let mut observe = |container| {
            pass_metrics.observe_exits(Some(&pod), |_| None, &testing::snapshot(vec![container]), &observed);
            observed.take()
        };
        assert_eq!(observe(testing::proven("a", 0, Some(3))), Vec::<String>::new());
        assert_eq!(observe(exited("a", 3, "Error")), ["Regular 3 Error"]);
    }

    #[test]
    fn an_exit_that_an_earlier_agent_has_observed_is_not_observed_again() {
        let pod = testing::pod("Always", &["init"], &["a"]);
        let shown = |list: &str, field: &str, id: &str| -> Option<PodStatus> {
            let terminated = json!({"terminated": {"exitCode": 1, "containerID": format!("containerd://{id}")}});
            let container = json!({"name": "a", "image": "", "imageID": "", "ready": false, "restartCount": 1});
            let mut status = json!({list: [container]});
            status[list][0][field] = terminated;
            Some(serde_json::from_value(status).expect("a status"))
        };
        let regular = |field, id| shown("containerStatuses", field, id);
        let old = || testing::exited("a", 0, 1);
        let nothing: &[&str] = &[];
        let table = [
            ("an exit while no agent ran", None, vec![old()], &["Regular 1 Error"][..]),
            ("the status shows another one", regular("state", "a-1"), vec![old()], &["Regular 1 Error"]),
            ("the status shows it", regular("state", "a-0"), vec![old()], nothing),
            ("as the last one", regular("lastState", "a-0"), vec![old()], nothing),
            ("init", shown("initContainerStatuses", "state", "init-0"), vec![exited("init", 0, "")], nothing),
            ("it was replaced", None, vec![testing::running("a", 1), old()], nothing),
            ("its successor exited", None, vec![testing::exited("a", 1, 2), old()], &["Regular 2 Error"]),
            ("init before main", None, vec![testing::running("a", 1), exited("init", 0, "")], nothing),
        ];
        for (what, known, containers, expected) in table {
            let (mut pass_metrics, observed) = (PassMetrics::default(), Observed::default());
            let view = testing::snapshot(containers);
            pass_metrics.observe_exits(Some(&pod), |_| known, &view, &observed);
            assert_eq!(observed.take(), expected, "{what}");
            pass_metrics.observe_exits(Some(&pod), |_| None, &view, &observed);
            assert_eq!(observed.take(), nothing, "{what}");
        }
        let (mut orphan, observed) = (PassMetrics::default(), Observed::default());
        orphan.observe_exits(None, |_| None, &testing::snapshot(vec![old()]), &observed);
        assert_eq!(observed.take(), nothing, "of a pod without a source");
    }
}
