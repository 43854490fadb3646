//! The sources at the agent's start, and tasks of them that fail.

use std::fs;
use std::time::Duration;
use std::time::SystemTime;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::SourcesConfig;
use super::SourcesHandle;
use super::adoption::Adoptions;
use super::adoption::StaticSandbox;
use super::start;
use super::test_watcher::Watcher;
use super::test_watcher::config;
use super::test_watcher::manifest;
use crate::model::Clock;
use crate::model::ConfigSource;
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

/// Else the agent ends the pod of a manifest that is being written when it starts.
#[tokio::test]
async fn a_bad_manifest_beside_a_running_static_pod_keeps_the_source_from_being_ready() {
    let (folder, root) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    fs::write(folder.path().join("a.yaml"), "").expect("written");
    fs::write(folder.path().join("b.yaml"), manifest("b", "1")).expect("written");
    let running = StaticSandbox {
        uid: "u".to_owned(),
        namespace: "default".to_owned(),
        name: "a-n".to_owned(),
        ready: true,
        created_at: 1,
        marked: None,
        containers: Vec::new(),
    };
    let adoptions = Adoptions::new(vec![running], root.path());
    let config = SourcesConfig { static_pod_path: Some(folder.path().to_owned()), adoptions, ..config() };
    let mut watcher = Watcher::start(config);
    watcher.until(["b-n=1"]).await;
    assert_eq!(watcher.handle.waiting_for(), [ConfigSource::File]);
    fs::remove_file(folder.path().join("a.yaml")).expect("removed");
    let was_complete = watcher.update_after(SourcesHandle::all_complete).await;
    assert!(!was_complete && watcher.handle.all_complete(), "by what the sync loop sees, which acts on it");
    assert_eq!(watcher.take_log(), ["add b-n", "add"], "an update says so, though no pod has changed");
    fs::write(folder.path().join("a.yaml"), manifest("a", "1")).expect("written");
    watcher.until(["a-n=1", "b-n=1"]).await;
}
