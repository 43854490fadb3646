use std::sync::Arc;

use k8s_openapi::api::core::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use proptest::prelude::*;

use super::*;

fn pod(grace: Option<i64>, deletion: Option<i64>) -> Pod {
    Arc::new(v1::Pod {
        metadata: ObjectMeta {
            deletion_timestamp: deletion.map(|_| Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH)),
            deletion_grace_period_seconds: deletion,
            ..Default::default()
        },
        spec: Some(v1::PodSpec { termination_grace_period_seconds: grace, ..Default::default() }),
        status: None,
    })
}

fn state() -> PodState {
    PodState::new(PodRef { uid: "u".into(), namespace: "default".into(), name: "p".into() })
}

fn killed(grace: Option<i64>) -> Request {
    Request::Kill(KillOptions { grace, ..KillOptions::default() })
}

#[test]
fn the_grace_period_only_shrinks_and_is_at_least_one_second() {
    let mut s = state();
    s.request(Request::Create(pod(Some(30), None)));
    assert!(s.request(killed(None)).cancel, "the first kill cancels");
    assert_eq!(s.termination_options().grace, Some(30));
    assert!(s.request(killed(Some(60))).cancel, "the termination has a deadline from now on");
    assert!(!s.request(killed(Some(60))).cancel);
    assert_eq!(s.termination_options().grace, Some(30), "longer is ignored");
    assert!(s.request(killed(Some(5))).cancel, "shorter cancels");
    assert_eq!(s.termination_options().grace, Some(5));
    s.request(killed(Some(0)));
    assert_eq!(s.termination_options().grace, Some(1));
}

#[test]
fn a_deletion_timestamp_terminates_the_pod_with_its_own_grace() {
    let mut s = state();
    s.request(Request::Create(pod(Some(30), None)));
    s.take_work();
    assert!(s.request(Request::Update(pod(Some(30), Some(7)))).cancel);
    assert_eq!(s.take_work(), Some(Phase::Terminating));
    assert_eq!(s.termination_options().grace, Some(7));
    assert!(!s.content_may_be_removed(), "its containers still write their logs");
    s.terminating_done();
    assert_eq!(s.take_work(), Some(Phase::Terminated));
    assert!(s.content_may_be_removed());
}

#[test]
fn what_a_pod_leaves_is_removed_if_it_is_deleted_or_evicted_and_kept_if_it_ended_by_itself() {
    let finished = |terminate: &dyn Fn(&mut PodState)| {
        let mut s = state();
        s.request(Request::Create(pod(Some(30), None)));
        s.take_work();
        terminate(&mut s);
        let before = s.content_may_be_removed();
        assert_eq!(s.take_work(), Some(Phase::Terminating));
        s.terminating_done();
        (before, s.content_may_be_removed())
    };
    let evicted = || Request::Kill(KillOptions { evicted: true, ..KillOptions::default() });
    assert_eq!(finished(&PodState::sync_was_terminal), (false, false), "its logs can still be read");
    assert_eq!(finished(&|s| _ = s.request(killed(None))), (false, false), "its object may exist, as at a shutdown");
    assert_eq!(finished(&|s| _ = s.request(evicted())), (true, true));
    assert_eq!(finished(&|s| _ = s.orphaned()), (false, true), "no source desires it");
}

#[test]
fn a_pod_that_no_source_desires_any_more_ends_with_its_own_grace_period() {
    let mut s = state();
    s.request(Request::Create(pod(Some(30), None)));
    s.take_work();
    assert_eq!(s.orphaned(), Reaction { wake: true, cancel: true });
    assert_eq!(s.take_work(), Some(Phase::Terminating));
    let options = s.termination_options();
    assert_eq!((options.grace, options.immediately), (Some(30), false));
    assert_eq!(s.orphaned(), Reaction { wake: true, cancel: false }, "it is being stopped already");
    s.request(killed(Some(5)));
    assert_eq!((s.orphaned().cancel, s.termination_options().grace), (false, Some(5)), "a shorter one stays");
    s.terminating_done();
    s.terminated_done();
    assert_eq!(s.orphaned(), Reaction::default());
}

#[test]
fn a_create_after_termination_was_requested_is_kept_for_later() {
    let mut s = state();
    s.request(Request::Create(pod(None, None)));
    s.request(killed(None));
    assert!(!s.restart_requested());
    let woken = Reaction { wake: true, cancel: false };
    assert_eq!(s.request(Request::Create(pod(None, None))), woken, "its teardown is not delayed any more");
    assert!(s.restart_requested());
}

#[test]
fn a_pod_known_to_the_runtime_alone_is_finished_once_it_is_stopped() {
    let mut s = state();
    assert!(s.request(Request::KillRuntimeOnly).wake);
    assert_eq!(s.take_work(), Some(Phase::Terminating));
    s.terminating_done();
    assert_eq!((s.phase(), s.take_work()), (Phase::Finished, None));
}

#[test]
fn every_request_while_terminating_runs_the_step_again() {
    let mut s = state();
    s.request(Request::Create(pod(None, None)));
    s.request(killed(None));
    assert_eq!(s.take_work(), Some(Phase::Terminating));
    assert_eq!(s.take_work(), None);
    s.request(Request::Sync);
    assert_eq!(s.take_work(), Some(Phase::Terminating));
}

#[test]
fn a_worker_that_waits_after_a_failure_takes_requests_but_no_syncs() {
    let mut s = state();
    s.request(Request::Create(pod(None, None)));
    assert_eq!(s.take_request(), Some(Phase::Syncing));
    s.request(Request::Sync);
    assert_eq!(s.take_request(), None);
    s.request(killed(None));
    assert_eq!(s.take_request(), Some(Phase::Terminating));
    assert_eq!((s.take_work(), s.take_work()), (Some(Phase::Terminating), None), "the sync is still pending");
}

#[test]
fn finished_is_final() {
    let mut s = state();
    s.request(Request::Create(pod(None, None)));
    s.request(killed(None));
    s.take_work();
    s.terminating_done();
    s.take_work();
    s.terminated_done();
    for request in [Request::Sync, killed(Some(1)), Request::Update(pod(None, None)), Request::KillRuntimeOnly] {
        assert_eq!(s.request(request), Reaction::default());
    }
    assert_eq!(s.take_work(), None);
}

fn any_request() -> impl Strategy<Value = Request> {
    prop_oneof![
        Just(Request::Create(pod(Some(30), None))),
        Just(Request::Update(pod(Some(10), None))),
        (0i64..40).prop_map(|s| Request::Update(pod(Some(10), Some(s)))),
        Just(Request::Sync),
        proptest::option::of(0i64..60).prop_map(killed),
        Just(Request::KillRuntimeOnly),
    ]
}

proptest! {
    #[test]
    fn phases_go_one_way_and_grace_never_grows(steps in proptest::collection::vec((any_request(), any::<bool>()), 0..40)) {
            let mut s = state();
        let mut phase = s.phase();
        let mut grace: Option<i64> = None;
        for (request, work) in steps {
            s.request(request);
            if work && let Some(work) = s.take_work() {
                match work {
                    Phase::Terminating => s.terminating_done(),
                    Phase::Terminated => s.terminated_done(),
                    Phase::Syncing | Phase::Finished => {}
                }
            }
            prop_assert!(s.phase() >= phase);
            if let (Some(before), Some(after)) = (grace, s.termination_options().grace) {
                prop_assert!(after <= before && after >= 1);
            }
            phase = s.phase();
            grace = s.termination_options().grace;
        }
    }
}

fn killed_for(reason: &'static str) -> Request {
    let reason = TerminationReason { reason, message: String::new(), disruption: None };
    Request::Kill(KillOptions { termination_reason: Some(Arc::new(reason)), ..KillOptions::default() })
}

fn reason(state: &PodState) -> Option<&'static str> {
    state.termination_reason().map(|reason| reason.reason)
}

#[test]
fn the_first_reason_stays_and_a_deletion_has_none() {
    let mut s = state();
    s.request(Request::Create(pod(Some(30), None)));
    s.request(Request::Update(pod(Some(30), Some(3600))));
    assert_eq!(s.take_work(), Some(Phase::Terminating));
    assert_eq!(reason(&s), None);
    s.request(killed_for("Terminated"));
    assert_eq!((reason(&s), s.take_work()), (Some("Terminated"), Some(Phase::Terminating)), "it is published");
    s.request(killed_for("Evicted"));
    assert_eq!(reason(&s), Some("Terminated"));
    s.terminating_done();
    assert_eq!(reason(&s), Some("Terminated"));
}

#[test]
fn a_kill_is_not_why_a_pod_ended_by_itself_or_was_stopped_before() {
    let mut s = state();
    s.request(Request::Create(pod(None, None)));
    s.take_work();
    s.sync_was_terminal();
    s.request(killed_for("Evicted"));
    assert_eq!(reason(&s), None, "its containers have exited");

    let mut s = state();
    s.request(Request::Create(pod(None, Some(5))));
    s.take_work();
    s.terminating_done();
    s.request(killed_for("Evicted"));
    assert_eq!(reason(&s), None, "its phase is decided");
}

#[test]
fn the_stopped_token_is_cancelled_when_the_pod_is_stopped() {
    let kill = |stopped: &CancellationToken| {
        Request::Kill(KillOptions { stopped: Some(stopped.clone()), ..KillOptions::default() })
    };
    let mut s = state();
    let (first, second, late) = (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
    s.request(Request::Create(pod(None, None)));
    s.request(kill(&first));
    assert_eq!(s.take_work(), Some(Phase::Terminating));
    s.request(kill(&second));
    assert!(!first.is_cancelled() && !second.is_cancelled());
    s.terminating_done();
    assert!(first.is_cancelled() && second.is_cancelled(), "whatever is still to be released");
    s.request(kill(&late));
    assert!(late.is_cancelled());
    s.terminated_done();
    let finished = CancellationToken::new();
    s.request(kill(&finished));
    assert!(finished.is_cancelled());

    let mut unstarted = state();
    let stopped = CancellationToken::new();
    unstarted.request(Request::Create(pod(None, None)));
    unstarted.request(kill(&stopped));
    unstarted.finish_unstarted();
    assert!(stopped.is_cancelled(), "it never ran");
}

#[test]
fn the_finished_token_is_cancelled_when_the_pod_is_finished() {
    let mut s = state();
    s.request(Request::Create(pod(None, None)));
    let termination_reason =
        Some(Arc::new(TerminationReason { reason: "Terminated", message: String::new(), disruption: None }));
    let kill = |finished: &CancellationToken| {
        let finished = Some(finished.clone());
        Request::Kill(KillOptions {
            termination_reason: termination_reason.clone(),
            finished,
            ..KillOptions::default()
        })
    };
    let (first, late) = (CancellationToken::new(), CancellationToken::new());
    s.request(kill(&first));
    assert_eq!(s.termination_reason(), termination_reason);
    s.terminating_done();
    assert!(!first.is_cancelled(), "its volumes are still there");
    s.terminated_done();
    assert!(first.is_cancelled());
    s.request(kill(&late));
    assert!(late.is_cancelled(), "there is nothing to wait for");
}
