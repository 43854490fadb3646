//! The agent's tasks. A panic of one ends the agent: it would go on and look healthy, without what the task does. The next
//! start has all of them again.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// How long a panic is waited for once its task has dropped what others receive from.
const PANIC_LIMIT: Duration = Duration::from_secs(1);

/// Waits until one of the tasks panics, and returns why the agent ends. Tasks may end otherwise.
pub(super) async fn panicked(tasks: &mut JoinSet<()>) -> anyhow::Error {
    loop {
        match tasks.join_next().await {
            Some(Err(error)) if error.is_panic() => {
                return anyhow::Error::new(error).context("running a task of the agent");
            }
            Some(_) => {}
            None => std::future::pending().await,
        }
    }
}

/// The output of `future`, unless one of the tasks panics before.
///
/// # Errors
/// A task panicked.
pub(super) async fn unless_panicked<T>(tasks: &mut JoinSet<()>, future: impl Future<Output = T>) -> anyhow::Result<T> {
    tokio::select! {
        error = panicked(tasks) => Err(error),
        output = future => Ok(output),
    }
}

/// How the agent ends with its sync loop, whose stream of desired pods ends when the task that sends them panics.
///
/// # Errors
/// It is not `shutdown` that has ended the loop.
pub(super) async fn sync_ended(tasks: &mut JoinSet<()>, shutdown: &CancellationToken) -> anyhow::Result<()> {
    if shutdown.is_cancelled() {
        return Ok(());
    }
    // The task counts as ended a moment after its stream.
    let panic = tokio::time::timeout(PANIC_LIMIT, panicked(tasks)).await;
    Err(panic.unwrap_or_else(|_| anyhow::anyhow!("the sync loop has ended: it receives no desired pods any more")))
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::Instant;

    use super::*;
    use crate::model::named;

    async fn fails_soon() {
        tokio::time::sleep(Duration::from_millis(10)).await;
        panic!("no such pod")
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_ends_what_waits_with_the_name_of_the_task() {
        let mut tasks = JoinSet::new();
        tasks.spawn(named("watch of pods", fails_soon()));
        let error = unless_panicked(&mut tasks, pending::<()>()).await.expect_err("a task panics");
        let text = format!("{error:#}");
        assert!(text.starts_with("running a task of the agent: "), "{text}");
        assert!(text.contains("watch of pods: no such pod"), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn tasks_that_end_or_are_cancelled_end_nothing() {
        let mut tasks = JoinSet::new();
        tasks.spawn(async {});
        tasks.spawn(pending()).abort();
        let waiting = tokio::time::sleep(Duration::from_secs(1));
        unless_panicked(&mut tasks, waiting).await.expect("no panic");
        assert!(tasks.is_empty(), "both were noticed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_sync_loop_that_ends_is_an_error_unless_the_agent_stops() {
        let (mut tasks, shutdown, began) = (JoinSet::new(), CancellationToken::new(), Instant::now());
        tasks.spawn(pending());
        let error = sync_ended(&mut tasks, &shutdown).await.expect_err("without a reason");
        assert!(error.to_string().contains("no desired pods") && began.elapsed() < 2 * PANIC_LIMIT, "{error}");
        shutdown.cancel();
        sync_ended(&mut tasks, &shutdown).await.expect("stopped");
    }

    #[tokio::test(start_paused = true)]
    async fn the_panic_that_has_ended_the_sync_loop_is_named() {
        let (mut tasks, shutdown) = (JoinSet::new(), CancellationToken::new());
        let (sender, mut stream) = tokio::sync::mpsc::channel::<()>(1);
        tasks.spawn(async move {
            drop(sender);
            named("merger of pods", fails_soon()).await;
        });
        assert_eq!(stream.recv().await, None);
        let error = sync_ended(&mut tasks, &shutdown).await.expect_err("a task panics");
        assert!(format!("{error:#}").contains("merger of pods: no such pod"), "{error:#}");
    }
}
