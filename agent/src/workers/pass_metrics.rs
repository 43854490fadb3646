//! Metrics of one worker's passes: remembers what was observed already, so that nothing is observed twice.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::Pod;

use super::worker::WorkerObserver;
use crate::model::ContainerClass;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::PodSnapshot;
use crate::model::spec;

/// What one worker has reported to its observer.
#[derive(Debug, Default)]
pub(super) struct PassMetrics {
    /// The first pass has begun.
    pub(super) begun: bool,
    /// Exited containers that were observed and still exist in the runtime.
    exited: HashSet<ContainerId>,
}

impl PassMetrics {
    /// Observes containers that exited since the last call. A proven death is observed once the runtime has given its
    /// reason.
    pub(super) fn observe_exits(&mut self, pod: Option<&Pod>, view: &PodSnapshot, observer: &dyn WorkerObserver) {
        self.exited.retain(|id| view.by_id(id).is_some());
        for container in &view.containers {
            let exited = container.state == ContainerState::Exited && container.proven.is_none();
            let Some(code) = container.exit_code.filter(|_| exited) else { continue };
            if self.exited.insert(container.id.clone()) {
                observer.died(class_of(pod, &container.name), code, &container.reason);
            }
        }
    }
}

/// The list of the spec that names the container; a container that none names counts as regular.
fn class_of(pod: Option<&Pod>, name: &str) -> ContainerClass {
    let Some(pod) = pod else { return ContainerClass::Regular };
    if let Some(init) = spec::init_containers(pod).iter().find(|init| init.name == name) {
        return if spec::is_sidecar(init) { ContainerClass::Sidecar } else { ContainerClass::Init };
    }
    match spec::ephemeral_containers(pod).iter().any(|ephemeral| ephemeral.name == name) {
        true => ContainerClass::Ephemeral,
        false => ContainerClass::Regular,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

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
        fn died(&self, class: ContainerClass, exit_code: i32, reason: &str) {
            self.0.lock().expect("not poisoned").push(format!("{class:?} {exit_code} {reason}"));
        }
        fn restarted(&self, _: bool) {}
        fn orphaned(&self) {}
        fn rejected(&self, _: &str) {}
        fn preempted(&self, _: &str) {}
    }

    fn exited(name: &str, code: i32, reason: &str) -> crate::model::ContainerStatus {
        let status = testing::exited(name, 0, code);
        crate::model::ContainerStatus { reason: reason.into(), ..status }
    }

    #[test]
    fn an_exit_is_observed_once_with_the_class_of_its_container() {
        let pod = testing::pod("Always", &["init", "side"], &["a", "b"]);
        let (mut pass_metrics, observed) = (PassMetrics::default(), Observed::default());
        let mut observe = |containers| {
            pass_metrics.observe_exits(Some(&pod), &testing::snapshot(containers), &observed);
            std::mem::take(&mut *observed.0.lock().expect("not poisoned"))
        };
        let all = || vec![exited("init", 0, "Completed"), exited("side", 137, "OOMKilled"), exited("a", 3, "Error")];
        assert_eq!(observe(all()), ["Init 0 Completed", "Sidecar 137 OOMKilled", "Regular 3 Error"]);
        assert_eq!(observe(all()), Vec::<String>::new());
        assert_eq!(observe(vec![testing::running("b", 0)]), Vec::<String>::new());
    }

    #[test]
    fn a_proven_death_is_observed_once_its_reason_is_known() {
        let pod = testing::pod("Always", &[], &["a"]);
        let (mut pass_metrics, observed) = (PassMetrics::default(), Observed::default());
        pass_metrics.observe_exits(Some(&pod), &testing::snapshot(vec![testing::proven("a", 0, Some(3))]), &observed);
        assert_eq!(observed.0.lock().expect("not poisoned").len(), 0);
        pass_metrics.observe_exits(Some(&pod), &testing::snapshot(vec![exited("a", 3, "Error")]), &observed);
        assert_eq!(*observed.0.lock().expect("not poisoned"), ["Regular 3 Error"]);
    }
}
