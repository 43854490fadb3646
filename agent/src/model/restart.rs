//! Whether a container is started again: restart policies of pod and container and the rules by exit code (KEP-5307), with
//! the whole-pod action (KEP-5532). Decides on one container at a time; the plan decides on the pod.

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::api::core::v1::ContainerRestartRuleOnExitCodes;
use k8s_openapi::api::core::v1::Pod;

use super::ContainerState;
use super::ContainerStatus;
use super::PodSnapshot;
use super::spec;

/// `restartPolicy` of a pod or container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RestartPolicy {
    /// Run again, whatever the exit code.
    Always,
    /// Run again unless the exit code is 0.
    OnFailure,
    /// Run once.
    Never,
}

impl RestartPolicy {
    /// `spec.restartPolicy`; absent or unknown means `Always`.
    pub fn of_pod(pod: &Pod) -> Self {
        Self::parse(pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()))
    }

    /// The policy in force for a container: its own, else the pod's.
    pub fn of_container(pod: &Pod, container: &Container, gates: RestartGates) -> Self {
        match container.restart_policy.as_deref() {
            Some(own) if gates.container_rules => Self::parse(Some(own)),
            _ => Self::of_pod(pod),
        }
    }

    fn parse(text: Option<&str>) -> Self {
        match text {
            Some("Never") => Self::Never,
            Some("OnFailure") => Self::OnFailure,
            _ => Self::Always,
        }
    }

    fn restarts_after(self, exit_code: i32) -> bool {
        match self {
            Self::Always => true,
            Self::OnFailure => exit_code != 0,
            Self::Never => false,
        }
    }
}

/// Feature gates restart decisions depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RestartGates {
    /// `ContainerRestartRules`: restart policies and rules of single containers.
    pub container_rules: bool,
    /// `RestartAllContainersOnContainerExits`.
    pub all_containers: bool,
}

impl Default for RestartGates {
    /// The gates' defaults in Kubernetes 1.36.
    fn default() -> Self {
        Self { container_rules: true, all_containers: true }
    }
}

/// The decision whether a container is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RestartDecision {
    /// Start it.
    Start,
    /// Leave it.
    Leave,
    /// It has exited, and the decision depends on an exit code that is not known yet.
    AwaitExitCode,
}

/// Whether a container whose newest instance is `newest` is to be started. Rules are read only if the container has
/// a policy of its own.
pub fn should_start(
    pod: &Pod,
    container: &Container,
    newest: Option<&ContainerStatus>,
    gates: RestartGates,
) -> RestartDecision {
    if spec::deletion_requested(pod) {
        return RestartDecision::Leave;
    }
    let Some(newest) = newest else {
        return RestartDecision::Start;
    };
    match (newest.state, newest.exit_code) {
        (ContainerState::Running, _) => RestartDecision::Leave,
        (ContainerState::Created | ContainerState::Unknown, _) => RestartDecision::Start,
        (ContainerState::Exited, _) if newest.start_was_cancelled() => RestartDecision::Start,
        (ContainerState::Exited, Some(code)) if restarts_after(pod, container, code, gates) => RestartDecision::Start,
        (ContainerState::Exited, Some(_)) => RestartDecision::Leave,
        (ContainerState::Exited, None) if restarts_after_any(pod, container, gates) => RestartDecision::Start,
        // Also where the policy is Never: the code still decides the phase, and with it whether the pod ends.
        (ContainerState::Exited, None) => RestartDecision::AwaitExitCode,
    }
}

/// Whether rules or policy restart the container after this exit code.
pub fn restarts_after(pod: &Pod, container: &Container, exit_code: i32, gates: RestartGates) -> bool {
    match matching_action(container, exit_code, gates) {
        Some("Restart") => true,
        Some("RestartAllContainers") if gates.all_containers => true,
        _ => RestartPolicy::of_container(pod, container, gates).restarts_after(exit_code),
    }
}

/// Whether this exit code of this container restarts the whole pod in place.
fn restarts_all_after(container: &Container, exit_code: i32, gates: RestartGates) -> bool {
    gates.all_containers && matching_action(container, exit_code, gates) == Some("RestartAllContainers")
}

/// Whether some exit code of this container could restart the whole pod in place.
pub fn may_restart_all(container: &Container, gates: RestartGates) -> bool {
    gates.all_containers && rules(container, gates).any(|(action, _)| action == "RestartAllContainers")
}

/// Whether a restart of all containers is due: because it has begun (`announced`: the pod's status says
/// AllContainersRestarting), or because a newest instance of an init or regular container exited with a code whose rule
/// demands it.
pub fn restart_all_due(pod: &Pod, snapshot: &PodSnapshot, announced: bool, gates: RestartGates) -> bool {
    let mut with_rule = spec::lasting_containers(pod).filter(|c| may_restart_all(c.spec, gates)).peekable();
    // Most pods have no such rule.
    if with_rule.peek().is_none() {
        return false;
    }
    let newest = snapshot.newest_by_name();
    let demands =
        |c: spec::SpecContainer<'_>| newest.get(c.name()).is_some_and(|of| demands_restart_all(c.spec, of, gates));
    announced || with_rule.any(demands)
}

/// Whether a restart of all containers is due and instances are still to be removed for it.
pub fn restart_all_pending(pod: &Pod, snapshot: &PodSnapshot, announced: bool, gates: RestartGates) -> bool {
    if !restart_all_due(pod, snapshot, announced, gates) {
        return false;
    }
    let newest = snapshot.newest_by_name();
    spec::lasting_containers(pod).any(|container| newest.contains_key(container.name()))
}

/// Whether another sandbox, of this attempt, is created for a pod whose sandbox is gone. With policy `Never` none is once
/// the pod has had containers, whatever the policies and rules of these.
pub fn may_replace_sandbox(pod: &Pod, snapshot: &PodSnapshot, attempt: u32) -> bool {
    RestartPolicy::of_pod(pod) != RestartPolicy::Never || attempt == 0 || snapshot.containers.is_empty()
}

/// Whether this instance exited with a code whose rule restarts the whole pod. The code of a cancelled start is not the
/// container's.
pub fn demands_restart_all(container: &Container, status: &ContainerStatus, gates: RestartGates) -> bool {
    status.state == ContainerState::Exited
        && !status.start_was_cancelled()
        && status.exit_code.is_some_and(|code| restarts_all_after(container, code, gates))
}

fn restarts_after_any(pod: &Pod, container: &Container, gates: RestartGates) -> bool {
    RestartPolicy::of_container(pod, container, gates) == RestartPolicy::Always && !may_restart_all(container, gates)
}

/// The action of the first rule that matches.
fn matching_action(container: &Container, exit_code: i32, gates: RestartGates) -> Option<&str> {
    let mut rules = rules(container, gates);
    rules.find(|(_, codes)| matches(codes, exit_code)).map(|(action, _)| action)
}

fn rules(container: &Container, gates: RestartGates) -> impl Iterator<Item = (&str, &ContainerRestartRuleOnExitCodes)> {
    let applies = gates.container_rules && container.restart_policy.is_some();
    let rules = container.restart_policy_rules.as_deref().filter(|_| applies).unwrap_or_default();
    rules.iter().filter_map(|rule| Some((rule.action.as_str(), rule.exit_codes.as_ref()?)))
}

fn matches(codes: &ContainerRestartRuleOnExitCodes, exit_code: i32) -> bool {
    let listed = codes.values.as_deref().unwrap_or_default().contains(&exit_code);
    match codes.operator.as_str() {
        "In" => listed,
        "NotIn" => !listed,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use k8s_openapi::api::core::v1::ContainerRestartRule;
    use proptest::prelude::*;

    use super::*;
    use crate::model::testing;

    const GATES: RestartGates = RestartGates { container_rules: true, all_containers: true };

    fn rule(action: &str, operator: &str, values: &[i32]) -> ContainerRestartRule {
        ContainerRestartRule {
            action: action.into(),
            exit_codes: Some(ContainerRestartRuleOnExitCodes {
                operator: operator.into(),
                values: Some(values.to_vec()),
            }),
        }
    }

    fn container(own: Option<&str>, rules: Vec<ContainerRestartRule>) -> Container {
        Container {
            restart_policy: own.map(Into::into),
            restart_policy_rules: Some(rules),
            ..testing::container("main")
        }
    }

    #[test]
    fn policies_decide_by_exit_code() {
        for (pod_policy, own, code, expected) in [
            ("Always", None, 0, true),
            ("Always", None, 1, true),
            ("OnFailure", None, 0, false),
            ("OnFailure", None, 1, true),
            ("Never", None, 0, false),
            ("Never", None, 1, false),
            ("SomethingNew", None, 0, true),
            ("Never", Some("Always"), 0, true),
            ("Always", Some("Never"), 1, false),
            ("Always", Some("OnFailure"), 0, false),
            ("Never", Some("OnFailure"), 137, true),
        ] {
            let pod = testing::pod(pod_policy, &[], &["main"]);
            let restarts = restarts_after(&pod, &container(own, vec![]), code, GATES);
            assert_eq!(restarts, expected, "{pod_policy} {own:?} {code}");
        }
    }

    #[test]
    fn the_first_matching_rule_wins() {
        let pod = testing::pod("Never", &[], &["main"]);
        let rules = vec![
            rule("Restart", "In", &[42]),
            rule("RestartAllContainers", "In", &[42, 43]),
            rule("SomethingNew", "In", &[44]),
            rule("Restart", "NotIn", &[0, 1, 43, 44]),
        ];
        let c = container(Some("Never"), rules.clone());
        for (code, restarts, all) in [
            (42, true, false),
            (43, true, true),
            (44, false, false),
            (45, true, false),
            (0, false, false),
            (1, false, false),
        ] {
            assert_eq!(restarts_after(&pod, &c, code, GATES), restarts, "{code}");
            assert_eq!(restarts_all_after(&c, code, GATES), all, "{code}");
        }
        let without_policy = container(None, rules);
        assert!(!restarts_after(&pod, &without_policy, 42, GATES), "rules need a policy of the container's own");
        let off = RestartGates { all_containers: false, ..GATES };
        assert!(!restarts_after(&pod, &c, 43, off));
        assert!(!restarts_all_after(&c, 43, off));
        let ungated = RestartGates { container_rules: false, ..GATES };
        assert!(!restarts_after(&pod, &c, 42, ungated));
        assert!(!restarts_all_after(&c, 43, ungated));
    }

    #[test]
    fn states_decide_before_policies() {
        let pod = testing::pod("Never", &[], &["main"]);
        let c = testing::container("main");
        assert_eq!(should_start(&pod, &c, None, GATES), RestartDecision::Start);
        for (state, expected) in [
            (ContainerState::Created, RestartDecision::Start),
            (ContainerState::Unknown, RestartDecision::Start),
            (ContainerState::Running, RestartDecision::Leave),
        ] {
            let status = testing::status("main", 0, state);
            assert_eq!(should_start(&pod, &c, Some(&status), GATES), expected, "{state:?}");
        }
        let cancelled = testing::cancelled("main", 0);
        let killed_launch =
            "failed to create containerd task: failed to start shim: start failed: : signal: killed: unknown";
        let not_found = "exec: \"context canceled\": executable file not found in $PATH: unknown";
        let own_message = testing::proven("main", 0, Some(1));
        for (instance, expected) in [
            (cancelled.clone(), RestartDecision::Start),
            (ContainerStatus { message: killed_launch.into(), ..cancelled.clone() }, RestartDecision::Start),
            (ContainerStatus { message: "exec failed".into(), ..cancelled.clone() }, RestartDecision::Leave),
            (ContainerStatus { message: not_found.into(), ..cancelled.clone() }, RestartDecision::Leave),
            (ContainerStatus { started_at: 1, ..cancelled.clone() }, RestartDecision::Leave),
            (ContainerStatus { started_at: 0, message: cancelled.message, ..own_message }, RestartDecision::Leave),
        ] {
            assert_eq!(should_start(&pod, &c, Some(&instance), GATES), expected, "{instance:?}");
        }
        let mut going = pod;
        going.metadata.deletion_timestamp = Some(testing::time(Duration::ZERO));
        assert_eq!(should_start(&going, &c, None, GATES), RestartDecision::Leave);
    }

    #[test]
    fn a_cancelled_start_restarts_no_other_container() {
        let demanding = container(Some("Never"), vec![rule("RestartAllContainers", "NotIn", &[0])]);
        let mut pod = testing::pod("Never", &[], &["main", "other"]);
        pod.spec.as_mut().expect("a spec").containers[0] = demanding.clone();
        for (instance, expected) in [(testing::exited("main", 0, 128), true), (testing::cancelled("main", 0), false)] {
            assert_eq!(should_start(&pod, &demanding, Some(&instance), GATES), RestartDecision::Start);
            let snapshot = testing::snapshot(vec![testing::running("other", 0), instance]);
            assert_eq!(restart_all_due(&pod, &snapshot, false, GATES), expected);
        }
    }

    #[test]
    fn an_unknown_code_waits_unless_every_code_means_the_same() {
        let dead = testing::proven("main", 0, None);
        let always = testing::pod("Always", &[], &["main"]);
        for (pod_policy, c, expected) in [
            ("Always", container(None, vec![]), RestartDecision::Start),
            ("OnFailure", container(None, vec![]), RestartDecision::AwaitExitCode),
            ("Never", container(None, vec![]), RestartDecision::AwaitExitCode),
            ("Always", container(Some("Always"), vec![rule("Restart", "In", &[1])]), RestartDecision::Start),
            (
                "Always",
                container(Some("Always"), vec![rule("RestartAllContainers", "In", &[1])]),
                RestartDecision::AwaitExitCode,
            ),
            ("Always", container(Some("Never"), vec![rule("Restart", "In", &[1])]), RestartDecision::AwaitExitCode),
        ] {
            let pod = testing::pod(pod_policy, &[], &["main"]);
            assert_eq!(should_start(&pod, &c, Some(&dead), GATES), expected, "{pod_policy} {c:?}");
        }
        let known = testing::proven("main", 0, Some(1));
        assert_eq!(should_start(&always, &testing::container("main"), Some(&known), GATES), RestartDecision::Start);
    }

    /// Containers: as many as an object of the API server has room for.
    #[test]
    fn a_restart_of_thousands_of_containers_is_pending_while_one_has_an_instance() {
        let names: Vec<String> = (0..20_000).map(|number| format!("c{number}")).collect();
        let mut pod = testing::pod("Always", &[], &names.iter().map(String::as_str).collect::<Vec<_>>());
        let demanding = container(Some("Never"), vec![rule("RestartAllContainers", "In", &[42])]);
        pod.spec.as_mut().expect("a spec").containers.push(demanding);
        let is_pending = |last: &str| {
            let ephemeral = names.iter().map(|name| testing::running(&format!("debug-{name}"), 0));
            let snapshot = testing::snapshot(ephemeral.chain([testing::running(last, 0)]).collect());
            restart_all_pending(&pod, &snapshot, true, GATES)
        };
        assert_eq!((is_pending("other"), is_pending("c7")), (false, true));
    }

    proptest! {
        /// What is decided without the code is what would be decided with it.
        #[test]
        fn early_decisions_hold_for_every_code(
            pod_policy in "Always|OnFailure|Never",
            own in proptest::option::of("Always|OnFailure|Never"),
            action in "Restart|RestartAllContainers",
            operator in "In|NotIn",
            listed in 0..3_i32,
            code in 0..3_i32,
        ) {
            let pod = testing::pod(&pod_policy, &[], &["main"]);
            let c = container(own.as_deref(), vec![rule(&action, &operator, &[listed])]);
            let early = should_start(&pod, &c, Some(&testing::proven("main", 0, None)), GATES);
            let late = should_start(&pod, &c, Some(&testing::proven("main", 0, Some(code))), GATES);
            prop_assert_ne!(early, RestartDecision::Leave);
            prop_assert_ne!(late, RestartDecision::AwaitExitCode);
            if early == RestartDecision::Start {
                prop_assert_eq!(late, RestartDecision::Start);
                prop_assert!(!restarts_all_after(&c, code, GATES));
            }
        }
    }
}
