//! Tasks of the sources that fail.

use std::time::Duration;
use std::time::SystemTime;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::SourcesConfig;
use super::start;
use super::test_watcher::config;
use crate::model::Clock;
use crate::recorder::Recorder;

#[tokio::test]
async fn a_panic_ends_a_task_of_the_callers_set() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = SourcesConfig { static_pod_path: Some(folder.path().to_owned()), ..config() };
    // The last moment of all: a later one overflows, and the first set of pods has one.
    let clock = Clock::derived(SystemTime::UNIX_EPOCH + Duration::new(i64::MAX.unsigned_abs(), 999_999_999));
    let mut tasks = JoinSet::new();
    let (mut updates, _sources) = start(config, clock, Recorder::default(), &mut tasks, CancellationToken::new());
    assert!(updates.recv().await.is_none(), "the stream ends with the merger");
    let error = loop {
        if let Err(error) = tasks.join_next().await.expect("a task that has panicked") {
            break error;
        }
    };
    assert!(error.is_panic() && error.to_string().contains("merger of pod sources: "), "{error}");
}
