//! Inspections that panic, and rechecks at the wrong time.

use std::sync::atomic::AtomicBool;

use tokio::time::timeout;

use super::*;
use crate::runtime::FinishedCall;

/// Panics in the task of the call that ends next, once it is asked to.
#[derive(Default)]
struct PanicsOnce(AtomicBool);

impl CallObserver for PanicsOnce {
    fn finished(&self, _: FinishedCall) {
        assert!(!self.0.swap(false, Relaxed), "this test makes the call panic");
    }
}

#[tokio::test(start_paused = true)]
async fn callers_are_answered_although_their_inspection_panicked() {
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(running("a"));
    let calls = Arc::new(PanicsOnce::default());
    let pleg = Pleg::observed(&runtime, unwatched, calls.clone());
    pleg.inspect("a").await;
    // The first relist has ended by then.
    sleep(secs(1)).await;
    calls.0.store(true, Relaxed);
    let answer = timeout(secs(60), pleg.handle.inspect(&uid())).await.expect("an answer");
    let error = answer.expect_err("it panicked").to_string();
    assert_eq!(error, "inspecting pod p: the inspection panicked");
    runtime.set(exited("a", 3));
    assert_eq!(pleg.inspect("a").await.exit_code, Some(3), "the next one is as any");
}

/// A recheck that is due earlier than the worker may act does not answer the hints that came meanwhile.
#[tokio::test(start_paused = true)]
async fn hints_for_an_acting_worker_are_answered_after_a_recheck_that_came_too_early() {
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(running("a"));
    let pleg = Pleg::on(&runtime, unwatched);
    pleg.inspect("a").await;
    runtime.set(exited("a", -1));
    assert_eq!(pleg.inspect("a").await.exit_code, None, "there is a recheck for it in a second");
    sleep(Duration::from_millis(500)).await;
    pleg.handle.acting(&uid()).await;
    sleep(Duration::from_millis(1)).await;
    let b = ContainerId::from("b");
    runtime.set(running("b"));
    pleg.tell(Hint::Runtime { uid: uid(), id: b.clone(), expect: Expect::Started, exited: None }).await;
    let is_known = || pleg.handle.cached(&uid()).is_some_and(|snapshot| snapshot.by_id(&b).is_some());
    assert!(!is_known(), "the worker's own inspection is waited for");
    sleep(secs(2)).await;
    assert!(is_known(), "it has taken more than a second");
}
