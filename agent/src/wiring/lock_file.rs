//! `--lock-file`: agents that name the same file run one after another. With `--exit-on-lock-contention` the agent ends
//! as soon as another process opens the file.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use futures_util::StreamExt as _;
use inotify::EventStream;
use inotify::Inotify;
use inotify::WatchMask;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::config::Settings;
use crate::filesystem;
use crate::model::named;

/// Waits for the lock, which is held until the returned file is closed; `None` if no file is configured. When cancelled,
/// the lock may still be taken, by a thread that ends with the process.
///
/// # Errors
/// The file cannot be opened or locked.
pub(super) async fn hold(settings: &Settings) -> anyhow::Result<Option<File>> {
    let flags = &settings.flags;
    if flags.lock_file.is_empty() {
        return Ok(None);
    }
    let path = PathBuf::from(&flags.lock_file);
    let locked = lock(path.clone()).await.with_context(|| format!("locking {} (--lock-file)", path.display()))?;
    Ok(Some(locked))
}

/// With `--exit-on-lock-contention`, has a task cancel `shutdown` when another process opens the file.
///
/// # Errors
/// The file cannot be watched.
pub(super) fn watch_contention(
    settings: &Settings,
    tasks: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let flags = &settings.flags;
    if flags.lock_file.is_empty() || !flags.exit_on_lock_contention {
        return Ok(());
    }
    let path = PathBuf::from(&flags.lock_file);
    let opened = watch(&path)
        .with_context(|| format!("watching {} (--lock-file) with --exit-on-lock-contention", path.display()))?;
    tasks.spawn(named("contention of the lock file", end_on_contention(opened, path, shutdown.clone())));
    Ok(())
}

async fn lock(path: PathBuf) -> std::io::Result<File> {
    filesystem::blocking(move || {
        // Opening the file is enough to hold the lock, or to end an agent with --exit-on-lock-contention. A pipe that is
        // opened for writing alone would wait for a reader.
        let file = File::options().create(true).read(true).append(true).mode(0o600).open(&path)?;
        if file.try_lock().is_err() {
            tracing::info!(file = %path.display(), "waiting for the lock file");
            file.lock()?;
        }
        Ok(file)
    })
    .await
}

/// Events of processes that open or remove the file.
fn watch(path: &Path) -> std::io::Result<EventStream<[u8; 1024]>> {
    let inotify = Inotify::init()?;
    inotify.watches().add(path, WatchMask::OPEN | WatchMask::DELETE_SELF)?;
    inotify.into_event_stream([0; 1024])
}

async fn end_on_contention(mut opened: EventStream<[u8; 1024]>, path: PathBuf, shutdown: CancellationToken) {
    if shutdown.run_until_cancelled(opened.next()).await.is_some() {
        tracing::info!(file = %path.display(), "another process opened the lock file; the agent ends");
        shutdown.cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::FlagValues;
    use crate::config::load;

    fn settings(path: &Path, exits: bool) -> Settings {
        let exits = if exits { "true" } else { "false" };
        let flags = [("lock-file", path.to_str().expect("a path")), ("exit-on-lock-contention", exits)];
        load(&flags.into_iter().collect::<FlagValues>()).expect("valid flags")
    }

    #[tokio::test]
    async fn one_agent_at_a_time_holds_the_lock() {
        let folder = tempfile::tempdir().expect("a folder");
        let settings = settings(&folder.path().join("lock"), false);
        let first = hold(&settings).await.expect("a lock").expect("a file");
        let mut second = Box::pin(hold(&settings));
        assert!(tokio::time::timeout(Duration::from_millis(50), &mut second).await.is_err(), "two agents hold it");
        drop(first);
        assert!(second.await.expect("a lock").is_some());
    }

    #[tokio::test]
    async fn a_pipe_can_be_locked() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lock");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        let settings = settings(&path, false);
        let held = tokio::time::timeout(Duration::from_secs(30), hold(&settings)).await;
        assert!(held.expect("no reader is waited for").expect("a lock").is_some());
    }

    #[tokio::test]
    async fn other_users_cannot_open_the_file() {
        use std::os::unix::fs::PermissionsExt as _;

        let folder = tempfile::tempdir().expect("a folder");
        let locked = hold(&settings(&folder.path().join("lock"), true)).await.expect("a lock").expect("a file");
        assert_eq!(locked.metadata().expect("its mode").permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn contention_ends_the_holder_only_on_request() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("lock");
        let (mut tasks, shutdown) = (JoinSet::new(), CancellationToken::new());
        let held = hold(&settings(&path, true)).await.expect("a lock");
        watch_contention(&settings(&path, false), &mut tasks, &shutdown).expect("nothing to watch");
        assert!(tasks.is_empty());
        watch_contention(&settings(&path, true), &mut tasks, &shutdown).expect("watched");
        assert!(!shutdown.is_cancelled(), "the agent's own open is no contention");
        File::open(&path).expect("the file exists");
        shutdown.cancelled().await;
        assert!(held.is_some());
        tasks.join_next().await.expect("the caller notices its end").expect("no panic");
    }

    #[tokio::test]
    async fn a_lock_file_that_cannot_be_made_names_its_flag() {
        let error = hold(&settings(Path::new("/nonexistent/lock"), false)).await;
        let error = format!("{:#}", error.expect_err("no folder"));
        assert!(error.starts_with("locking /nonexistent/lock (--lock-file): "), "{error}");
    }
}
