use tokio::time::Instant;

use super::*;
use crate::model::ProvenExit;
use crate::model::SandboxStatus;
use crate::model::testing::sandbox as sandbox_status;
use crate::pleg::testing::container;
use crate::pleg::testing::snapshot;

const BEGAN: i64 = 1_000_000_000_000;

fn exited(id: &str, name: &str, code: i32, finished: i64) -> ContainerStatus {
    let mut status = container(id, name, ContainerState::Exited);
    (status.exit_code, status.finished_at, status.reason) = (Some(code), finished, "Error".to_owned());
    status
}

fn proven(id: &str, name: &str) -> ContainerStatus {
    let mut status = exited(id, name, 137, BEGAN + 5);
    status.reason.clear();
    let proof = ProvenExit { seen_at: Instant::now(), kernel_age: None, exit_code: Some(137), oom_killed: true };
    status.proven = Some(proof);
    status
}

fn update(known: &mut KnownPod, containers: Vec<ContainerStatus>) -> Vec<Record> {
    known.update(&snapshot(Instant::now(), containers), BEGAN)
}

fn exits(records: &[Record]) -> Vec<(&str, Option<i32>, ExitSource, bool)> {
    let exits = records.iter().filter_map(|record| match record {
        Record::Exit(exit) => Some((exit.id.as_str(), exit.exit.exit_code, exit.source, exit.earlier)),
        _ => None,
    });
    exits.collect()
}

#[tokio::test]
async fn a_pod_existed_if_a_sandbox_or_container_is_older() {
    let created = |created_at| ContainerStatus { created_at, ..container("a", "web", ContainerState::Running) };
    let of = |sandbox: i64, container: i64| PodSnapshot {
        sandboxes: vec![SandboxStatus { created_at: sandbox, ..sandbox_status(0) }],
        ..snapshot(Instant::now(), vec![created(container)])
    };
    for (sandbox, container, expected) in
        [(BEGAN, BEGAN + 1, false), (BEGAN - 1, BEGAN + 1, true), (BEGAN + 2, BEGAN - 1, true)]
    {
        assert_eq!(existed(&of(sandbox, container), BEGAN), expected, "{sandbox} {container}");
    }
}

#[tokio::test]
async fn a_pod_is_reported_when_it_changes() {
    let mut known = KnownPod::default();
    let running = || vec![container("a", "web", ContainerState::Running)];
    let records = update(&mut known, running());
    let [Record::Pod(pod)] = &records[..] else { panic!("{records:?}") };
    assert_eq!((pod.containers[0].name.as_str(), pod.containers[0].state), ("web", RunState::Running));
    assert_eq!(update(&mut known, running()), []);
    let [Record::Pod(gone)] = &known.removed()[..] else { panic!("not removed") };
    assert!(gone.removed);
}

#[tokio::test]
async fn exits_before_the_start_are_marked() {
    let mut known = KnownPod::default();
    let all = || vec![exited("b", "web", 1, BEGAN + 1), exited("a", "web", 2, BEGAN - 1)];
    let records = update(&mut known, all());
    let expected = [("a", Some(2), ExitSource::Runtime, true), ("b", Some(1), ExitSource::Runtime, false)];
    assert_eq!(exits(&records), expected, "the oldest first");
    assert_eq!(exits(&update(&mut known, all())), [], "once");
}

#[tokio::test]
async fn an_exit_is_reported_once_its_code_is_known() {
    let mut known = KnownPod::default();
    let codeless = |id| ContainerStatus { exit_code: None, ..exited(id, "web", 0, BEGAN + 1) };
    assert_eq!(exits(&update(&mut known, vec![codeless("a")])), []);
    let records = update(&mut known, vec![exited("a", "web", 7, BEGAN + 1)]);
    assert_eq!(exits(&records), [("a", Some(7), ExitSource::Runtime, false)]);
    update(&mut known, vec![codeless("b")]);
    assert_eq!(exits(&known.removed()), [("b", None, ExitSource::Runtime, false)], "or will never be");
}

#[tokio::test]
async fn a_proven_exit_is_reported_with_the_runtimes_reason() {
    let mut known = KnownPod::default();
    update(&mut known, vec![container("a", "web", ContainerState::Running)]);
    let records = update(&mut known, vec![proven("a", "web")]);
    assert_eq!(exits(&records), []);
    let Record::Pod(pod) = &records[0] else { panic!("{records:?}") };
    assert_eq!(pod.containers[0].state, RunState::Exited, "the pod is shown as it is");
    assert!(pod.containers[0].last_exit.as_ref().unwrap().oom_killed);
    let records = update(&mut known, vec![exited("a", "web", 137, BEGAN + 5)]);
    assert_eq!(exits(&records), [("a", Some(137), ExitSource::Kernel, false)]);
}

#[tokio::test]
async fn an_exit_of_a_container_that_the_runtime_no_longer_lists_is_reported_from_the_kernel() {
    let mut known = KnownPod::default();
    update(&mut known, vec![proven("a", "web")]);
    let records = update(&mut known, vec![container("b", "web", ContainerState::Running)]);
    assert_eq!(exits(&records), [("a", Some(137), ExitSource::Kernel, false)]);
    let Record::Pod(pod) = &records[0] else { panic!("{records:?}") };
    assert_eq!(pod.containers[0].last_exit.as_ref().unwrap().exit_code, Some(137), "it is the last exit of web");
    update(&mut known, vec![proven("b", "web")]);
    assert_eq!(exits(&known.removed()), [("b", Some(137), ExitSource::Kernel, false)]);
}

#[tokio::test]
async fn the_instance_before_tells_the_last_exit() {
    let mut known = KnownPod::default();
    let mut running = container("b", "web", ContainerState::Running);
    running.restart_count = 4;
    let records = update(&mut known, vec![running, exited("a", "web", 3, BEGAN - 1)]);
    let Record::Pod(pod) = &records[0] else { panic!("{records:?}") };
    assert_eq!(pod.containers.len(), 1);
    assert_eq!((pod.containers[0].id.as_str(), pod.containers[0].restarts), ("b", 4));
    assert_eq!(pod.containers[0].last_exit.as_ref().unwrap().exit_code, Some(3));
}
