//! Random pods and snapshots of them. At most the newest instance of a container runs.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Probe;
use proptest::prelude::*;

use super::Situation;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::ProbeResult;
use crate::model::testing;
use crate::workers::backoff;

/// Any situation, sensible or not.
pub(super) fn situations() -> impl Strategy<Value = Situation> {
    pods().prop_flat_map(|pod| {
        let names = container_names(&pod);
        let histories: Vec<_> = names.iter().map(|name| history(name.clone())).collect();
        let sandboxes = proptest::collection::vec((prop::bool::weighted(0.7), prop::bool::weighted(0.9)), 0..3);
        (Just(pod), histories, sandboxes, any::<(bool, u8)>(), probe_results(names)).prop_map(assemble)
    })
}

/// Container name, liveness and startup result.
type Probes = Vec<(String, Option<ProbeResult>, Option<ProbeResult>)>;

/// Pod, instances by container, (ready, has an IP) by sandbox, (restart announced, time), probe results.
type Parts = (Pod, Vec<Vec<ContainerStatus>>, Vec<(bool, bool)>, (bool, u8), Probes);

fn assemble((pod, histories, sandboxes, (announced, seconds), probes): Parts) -> Situation {
    let mut containers = histories.concat();
    containers.sort_by_key(|status| std::cmp::Reverse(status.created_at));
    let mut situation = Situation::new(pod, containers);
    situation.snapshot.sandboxes = (0..)
        .zip(sandboxes)
        .map(|(attempt, (ready, has_ip))| {
            let mut sandbox = testing::sandbox(attempt);
            sandbox.ready = ready;
            if !has_ip {
                sandbox.ips.clear();
            }
            sandbox
        })
        .collect();
    situation.snapshot.sandboxes.reverse();
    situation.restarting_all = announced && seconds > 200;
    situation.now = backoff::wall_time(testing::at(i64::from(seconds) * 4));
    for (name, liveness, startup) in probes {
        let newest = situation.snapshot.newest(&name).map(|status| status.id.clone());
        if let Some(id) = newest {
            situation.probes.liveness.extend(liveness.map(|result| (id.clone(), result)));
            situation.probes.startup.extend(startup.map(|result| (id, result)));
        }
    }
    situation
}

pub(super) fn pods() -> impl Strategy<Value = Pod> {
    let init = proptest::collection::vec(containers(true), 0..4);
    let regular = proptest::collection::vec(containers(false), 1..4);
    ("Always|OnFailure|Never", init, regular, any::<bool>(), prop::bool::weighted(0.1)).prop_map(
        |(policy, init, regular, ephemeral, deleting)| {
            let mut pod = testing::pod(&policy, &[], &[]);
            let spec = pod.spec.get_or_insert_default();
            spec.init_containers = Some(named("init", init));
            spec.containers = named("main", regular);
            pod.metadata.deletion_timestamp = deleting.then(|| testing::time(std::time::Duration::ZERO));
            if ephemeral { testing::with_ephemeral(pod, "debug") } else { pod }
        },
    )
}

fn named(prefix: &str, mut containers: Vec<Container>) -> Vec<Container> {
    for (index, container) in containers.iter_mut().enumerate() {
        container.name = format!("{prefix}-{index}");
    }
    containers
}

fn containers(init: bool) -> impl Strategy<Value = Container> {
    let policy = prop::option::weighted(0.5, "Always|OnFailure|Never");
    let rule = prop::option::weighted(0.3, "Restart|RestartAllContainers");
    (policy, rule, prop::bool::weighted(0.2)).prop_map(move |(policy, rule, probed)| {
        let mut container = testing::container("");
        if let (Some(policy), Some(action)) = (&policy, &rule) {
            super::set_rule(&mut container, policy, action);
        }
        container.restart_policy = policy;
        if probed && init {
            container.startup_probe = Some(Probe::default());
            container.liveness_probe = Some(Probe::default());
        }
        container
    })
}

fn container_names(pod: &Pod) -> Vec<String> {
    let spec = pod.spec.clone().unwrap_or_default();
    let lasting = spec.init_containers.unwrap_or_default().into_iter().chain(spec.containers).map(|c| c.name);
    lasting.chain(spec.ephemeral_containers.unwrap_or_default().into_iter().map(|c| c.name)).collect()
}

/// Instances of one container, newest first: any state for the newest, exited before that.
fn history(name: String) -> impl Strategy<Value = Vec<ContainerStatus>> {
    (0_u32..4, states(), prop::sample::select(vec![None, Some(0), Some(1), Some(42)]), prop::bool::weighted(0.9))
        .prop_map(move |(instances, newest, code, same_definition)| {
            let mut statuses: Vec<_> = (0..instances).rev().map(|attempt| testing::exited(&name, attempt, 1)).collect();
            if let Some(first) = statuses.first_mut() {
                let attempt = instances - 1;
                *first = match newest {
                    ContainerState::Exited => testing::proven(&name, attempt, code),
                    other => testing::status(&name, attempt, other),
                };
                first.hash = if same_definition { first.hash } else { 0 };
            }
            statuses
        })
}

fn states() -> impl Strategy<Value = ContainerState> {
    prop_oneof![
        4 => Just(ContainerState::Running),
        4 => Just(ContainerState::Exited),
        1 => Just(ContainerState::Created),
        1 => Just(ContainerState::Unknown),
    ]
}

fn probe_results(names: Vec<String>) -> impl Strategy<Value = Probes> {
    let result = || {
        let results = vec![ProbeResult::Success, ProbeResult::Success, ProbeResult::Failure, ProbeResult::Unknown];
        prop::option::weighted(0.3, prop::sample::select(results))
    };
    let each: Vec<_> = names.into_iter().map(|name| (Just(name), result(), result())).collect();
    each
}
