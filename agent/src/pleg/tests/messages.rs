//! Termination messages of exits whose code becomes known, or another one, later.

use std::path::Path;

use tempfile::NamedTempFile;

use super::*;
use crate::model::ProvenExit;
use crate::pleg::MessageSource;
use crate::pleg::TerminationMessages;
use crate::pleg::termination::MessageReader;
use crate::pleg::testing::container;
use crate::pleg::testing::snapshot;

fn log() -> NamedTempFile {
    let log = NamedTempFile::new().expect("a file");
    std::fs::write(log.path(), "2026-01-01T00:00:00Z stderr F the end\n").expect("written");
    log
}

/// An exit without its code, of a container with this log. Its message is the end of that for an error.
fn codeless(log: &Path) -> v1::ContainerStatus {
    let policy = (runtime_keys::TERMINATION_POLICY.to_owned(), "FallbackToLogsOnError".to_owned());
    v1::ContainerStatus {
        annotations: BTreeMap::from([policy]),
        log_path: log.to_str().expect("a path in UTF-8").to_owned(),
        message: "the runtime's".to_owned(),
        ..exited("a", -1)
    }
}

#[tokio::test(start_paused = true)]
async fn the_message_is_that_of_the_kernels_code() {
    let log = log();
    for (code, message) in [(0, "the runtime's"), (3, "the runtime's: the end\n")] {
        let runtime = FakeRuntime::with(4711, "");
        runtime.set(running("a"));
        let pleg = Pleg::on(&runtime, unwatched);
        pleg.inspect("a").await;
        pleg.send(recorded("a", 4711, code)).await;
        runtime.set(codeless(log.path()));
        let ended = pleg.inspect("a").await;
        assert_eq!((ended.exit_code, ended.message.as_str()), (Some(code), message));
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_code_of_success_takes_the_message_of_an_error_away() {
    let (log, runtime) = (log(), FakeRuntime::with(4711, ""));
    runtime.set(running("a"));
    let ended = Arc::new(Notify::new());
    let pleg = Pleg::on(&runtime, ends_on(ended.clone(), 0));
    pleg.inspect("a").await;
    runtime.set(codeless(log.path()));
    let codeless = pleg.inspect("a").await;
    assert_eq!((codeless.exit_code, codeless.message.as_str()), (None, "the runtime's: the end\n"));
    ended.notify_one();
    sleep(Duration::from_millis(1)).await;
    let ended = pleg.cached("a");
    assert_eq!((ended.exit_code, ended.message.as_str()), (Some(0), "the runtime's"));
}

/// The record of an exit may come after the pidfd, and a further one may correct it.
#[tokio::test(start_paused = true)]
async fn the_message_of_a_proven_exit_is_read_again_for_another_code() {
    let (log, mut messages) = (log(), TerminationMessages::new(MessageReader::default()));
    let proven = ProvenExit { seen_at: Instant::now(), kernel_age: None, exit_code: None, oom_killed: false };
    for (exit_code, message) in [(None, ""), (Some(1), "the end\n"), (Some(0), "")] {
        let mut ended = container("a", "web", ContainerState::Exited);
        (ended.exit_code, ended.proven) = (exit_code, Some(proven));
        ended.termination.fallback_to_logs = true;
        ended.log_path = log.path().to_str().expect("a path in UTF-8").to_owned();
        let view = Arc::new(snapshot(Instant::now(), vec![ended]));
        let view = messages.complete(view, MessageSource::FileOrLog).await;
        assert_eq!(view.containers[0].message, message, "{exit_code:?}");
    }
}
