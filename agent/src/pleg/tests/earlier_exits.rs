//! Exits without a code from before the agent started, and exits without a time.

use super::*;

/// An exit without its code, this long ago. The runtime may have the time without the code.
fn codeless(ago: Duration) -> v1::ContainerStatus {
    let finished_at = i64::try_from((WALL - ago).as_nanos()).expect("in range");
    v1::ContainerStatus { finished_at, ..exited("a", -1) }
}

#[tokio::test(start_paused = true)]
async fn what_ended_without_a_code_long_before_the_agent_started_is_reported_at_once() {
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(codeless(secs(3600)));
    let pleg = Pleg::on(&runtime, unwatched);
    assert_eq!(pleg.inspect("a").await.exit_code, Some(-1));
    sleep(secs(60)).await;
    assert_eq!((pleg.cached("a").exit_code, pleg.inspections()), (Some(-1), 1));
}

/// The earlier agent may have been killed while it held the code back.
#[tokio::test(start_paused = true)]
async fn a_code_is_waited_for_if_the_exit_was_just_before_the_agent_started() {
    for ended in [codeless(secs(1)), exited("a", -1)] {
        let runtime = FakeRuntime::with(4711, "");
        runtime.set(ended.clone());
        let pleg = Pleg::on(&runtime, unwatched);
        let first = pleg.inspect("a").await;
        assert_eq!((first.state, first.exit_code), (ContainerState::Exited, None));
        runtime.set(v1::ContainerStatus { finished_at: ended.finished_at, ..exited("a", 0) });
        assert_eq!(pleg.inspect("a").await.exit_code, Some(0));

        let runtime = FakeRuntime::with(4711, "");
        runtime.set(ended);
        let pleg = Pleg::on(&runtime, unwatched);
        pleg.inspect("a").await;
        sleep(secs(11)).await;
        assert_eq!(pleg.cached("a").exit_code, Some(-1), "not for longer than ever");
    }
}

/// Crash-loop back-off is counted from the time of the exit.
#[tokio::test(start_paused = true)]
async fn an_exit_that_the_runtime_reports_without_its_time_has_one() {
    let timeless = |id| v1::ContainerStatus { finished_at: NO_TIME, ..exited(id, 3) };
    let runtime = FakeRuntime::with(4711, "");
    runtime.set(running("a"));
    runtime.set(running("b"));
    let pleg = Pleg::on(&runtime, unwatched);
    pleg.inspect("a").await;
    runtime.set(timeless("a"));
    let seen = pleg.inspect("a").await.finished_at;
    assert!(u128::try_from(seen).is_ok_and(|seen| seen >= WALL.as_nanos()), "{seen}");
    runtime.set(timeless("b"));
    pleg.send(stopped(timeless("b"))).await;
    assert!(pleg.cached("b").finished_at >= seen, "of an event");
    sleep(secs(60)).await;
    assert_eq!(pleg.inspect("a").await.finished_at, seen, "it stays");
}
