//! The order in which the containers of a terminating pod are stopped: a sidecar after every regular container and the sidecar
//! after it (KEP-753). All others wait for none.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::watch;

use crate::model::ContainerClass;
use crate::model::spec;

/// The containers of a terminating pod that sidecars wait for. Regular ones are counted together: a pod may have thousands of
/// both, and each sidecar waits for all of them. By default nothing is waited for, as for a container that is stopped alone.
#[derive(Default)]
pub(super) struct TerminationOrder<'a> {
    /// How many regular containers are not stopped yet.
    regular: watch::Sender<usize>,
    /// How many instances of a sidecar are not stopped yet, by its name.
    sidecars: HashMap<&'a str, watch::Sender<usize>>,
    /// The sidecar after each, by name.
    next: HashMap<&'a str, &'a str>,
}

impl<'a> TerminationOrder<'a> {
    /// The order of the containers that run, by name.
    pub(super) fn new<'b>(pod: &'a Pod, running: impl Iterator<Item = &'b str>) -> Self {
        let sidecars = spec::classified_init(pod).filter(|init| init.class == ContainerClass::Sidecar);
        let sidecars: Vec<&'a str> = sidecars.map(|sidecar| sidecar.name()).collect();
        let next = sidecars.iter().copied().zip(sidecars.iter().copied().skip(1)).collect();
        let (mut order, specs) = (Self { next, ..Self::default() }, spec::lasting_by_name(pod));
        for container in running.filter_map(|name| specs.get(name)) {
            let count: &watch::Sender<usize> = match container.class {
                ContainerClass::Regular => &order.regular,
                ContainerClass::Sidecar => order.sidecars.entry(container.name()).or_default(),
                ContainerClass::Init | ContainerClass::Ephemeral => continue,
            };
            count.send_modify(|left| *left += 1);
        }
        order
    }

    /// A container is stopped. One that cannot be is waited for until the grace period ends, as upstream.
    pub(super) fn stopped(&self, class: ContainerClass, name: &str) {
        let count = match class {
            ContainerClass::Regular => Some(&self.regular),
            ContainerClass::Sidecar => self.sidecars.get(name),
            ContainerClass::Init | ContainerClass::Ephemeral => None,
        };
        if let Some(count) = count {
            count.send_modify(|left| *left = left.saturating_sub(1));
        }
    }

    /// Waits until a sidecar may be stopped.
    pub(super) async fn turn_of(&self, sidecar: &str) {
        for count in self.before(sidecar) {
            let mut count = count.subscribe();
            // The sender lives as long as `self`.
            let _ = count.wait_for(|left| *left == 0).await;
        }
    }

    /// What a sidecar waits for.
    fn before(&self, sidecar: &str) -> impl Iterator<Item = &watch::Sender<usize>> {
        let next = self.next.get(sidecar).and_then(|next| self.sidecars.get(next));
        std::iter::once(&self.regular).chain(next)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::model::testing;

    fn may_stop(order: &TerminationOrder<'_>, sidecar: &str) -> bool {
        order.turn_of(sidecar).now_or_never().is_some()
    }

    #[test]
    fn sidecars_end_last_and_in_reverse() {
        let pod = testing::pod("Always", &["once", "side1", "side2", "side3"], &["a", "b", "c"]);
        let order = TerminationOrder::new(&pod, ["a", "b", "once", "side1", "side2", "other"].into_iter());
        order.stopped(ContainerClass::Regular, "a");
        order.stopped(ContainerClass::Init, "once");
        assert!(!may_stop(&order, "side2"), "a regular container runs");
        order.stopped(ContainerClass::Regular, "b");
        assert!(may_stop(&order, "side2"), "the sidecar after it does not run");
        assert!(!may_stop(&order, "side1"));
        order.stopped(ContainerClass::Sidecar, "side2");
        assert!(may_stop(&order, "side1"));
    }

    #[test]
    fn a_container_that_is_stopped_alone_waits_for_none() {
        assert!(may_stop(&TerminationOrder::default(), "side"));
    }

    /// Each waiting for each other would take hundreds of millions of waits.
    #[test]
    fn of_thousands_of_containers_each_waits_for_two_counts_at_most() {
        let names = |prefix: &str| (0..10_000).map(|number| format!("{prefix}{number}")).collect::<Vec<_>>();
        let (sidecars, regular) = (names("side"), names("main"));
        let [init, main] = [&sidecars, &regular].map(|names| names.iter().map(String::as_str).collect::<Vec<_>>());
        let pod = testing::pod("Always", &init, &main);
        let order = TerminationOrder::new(&pod, init.iter().chain(&main).copied());
        assert!(init.iter().all(|sidecar| order.before(sidecar).count() <= 2 && !may_stop(&order, sidecar)));
        main.iter().for_each(|name| order.stopped(ContainerClass::Regular, name));
        for sidecar in init.iter().rev() {
            assert!(may_stop(&order, sidecar), "{sidecar}");
            order.stopped(ContainerClass::Sidecar, sidecar);
        }
    }
}
