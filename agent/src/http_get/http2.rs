//! HTTP/2 connections whose tasks end with them, whatever the server does.

use std::future::Future;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;

use hyper::body::Body;
use hyper::client::conn::http2;
use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::task::JoinSet;

use super::MAX_HEAD;

/// What a server may send ahead of being read, in bytes.
const WINDOW: u32 = 64 * 1024;

/// A connection. Dropping it closes it.
pub(crate) struct Http2<B> {
    /// Sends requests.
    pub(crate) sender: http2::SendRequest<B>,
    pub(super) tasks: TasksGuard,
}

impl<B> Http2<B>
where
    B: Body + Send + Unpin + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    /// Begins a connection over `stream`. Waits as long as the server does: the caller sets the limit.
    ///
    /// # Errors
    /// The connection ended.
    pub(crate) async fn connect<S>(stream: S) -> Result<Self, hyper::Error>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let tasks = TasksGuard::default();
        let mut builder = http2::Builder::new(tasks.0.clone());
        builder.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW);
        builder.max_header_list_size(u32::try_from(MAX_HEAD).unwrap_or(u32::MAX));
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await?;
        tasks.0.execute(async move { _ = connection.await });
        Ok(Self { sender, tasks })
    }
}

/// Starts the tasks of a connection.
#[derive(Clone, Default)]
pub(super) struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Tasks {
    fn execute(&self, task: F) {
        self.lock().spawn(task);
    }
}

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, JoinSet<()>> {
        // A set of tasks is usable whatever a holder of the lock did.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the tasks. They hold their set themselves, so it would not be dropped.
#[derive(Default)]
pub(super) struct TasksGuard(Tasks);

impl Drop for TasksGuard {
    fn drop(&mut self) {
        self.0.lock().abort_all();
    }
}
