//! Names of tasks in the message of their panic, and the end of tasks.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::panic::resume_unwind;

use futures_util::FutureExt as _;
use tokio_util::sync::CancellationToken;

/// The task of this name. If it panics, so does this, with a message that begins with the name: a `JoinError` does not name
/// the task that has ended.
pub async fn named(name: &'static str, task: impl Future<Output = ()>) {
    if let Err(panic) = AssertUnwindSafe(task).catch_unwind().await {
        resume_unwind(Box::new(format!("{name}: {}", message(&*panic))));
    }
}

/// The task, which ends with `shutdown`.
pub async fn until(shutdown: CancellationToken, task: impl Future) {
    shutdown.run_until_cancelled(task).await;
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn fails(reason: &'static str) {
        assert!(!reason.is_empty(), "no reason");
        panic!("{reason}")
    }

    #[tokio::test]
    async fn a_panic_names_its_task() {
        for (reason, expected) in [("file lost", "reader: file lost"), ("", "reader: no reason")] {
            let failed = tokio::spawn(named("reader", fails(reason))).await.expect_err("a panic");
            assert_eq!(message(&*failed.into_panic()), expected);
        }
    }

    #[tokio::test]
    async fn a_task_may_end() {
        tokio::spawn(named("reader", async {})).await.expect("no panic");
    }
}
