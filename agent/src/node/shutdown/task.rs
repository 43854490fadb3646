//! Waits for shutdowns, terminates the pods, releases the inhibitor lock.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Logind;
use super::LogindError;
use super::file::StateFile;
use super::file::Times;
use super::logind::DelayLock;
use super::plan;
use super::plan::Group;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::Pod;
use crate::recorder::EventType;
use crate::recorder::Recorder;

/// Pause before a reconnect to the bus.
const RECONNECT: Duration = Duration::from_secs(1);

/// Terminates pods for a shutdown.
pub trait PodTerminator: Send + Sync + 'static {
    /// The pods that have not terminated.
    fn pods(&self) -> Vec<Pod>;
    /// Requests the termination of a pod within `grace` seconds. The token is cancelled when nothing of it is running or
    /// mounted.
    fn terminate(&self, pod: &Pod, grace: i64) -> impl Future<Output = CancellationToken> + Send;
}

/// True from the begin of a shutdown until it is cancelled.
pub type Down = watch::Sender<bool>;

/// Inputs of a graceful shutdown.
pub struct Shutdown<P> {
    /// In order of termination; not empty.
    pub groups: Vec<Group>,
    /// Terminates pods.
    pub pods: P,
    /// Published for readiness and admission.
    pub down: Down,
    /// The state file, if times are stored (KEP-2712).
    pub state_file: Option<StateFile>,
    /// Events of the node.
    pub recorder: Recorder,
    /// Times of the last shutdown.
    pub metrics: Arc<Metrics>,
    /// Wall clock.
    pub clock: Clock,
}

/// How a connection to logind ended.
enum ConnectionEnd {
    /// It was not established.
    Refused(LogindError),
    /// It was lost.
    Lost,
}

impl<P: PodTerminator> Shutdown<P> {
    /// Waits for shutdowns until `ending`. If the first connection by `connect` fails, this is logged and not retried; a
    /// connection that is lost later is retried.
    pub async fn run<C, F>(self, connect: C, ending: CancellationToken)
    where
        C: Fn() -> F + Send,
        F: Future<Output = Result<Logind, LogindError>> + Send,
    {
        if let Some(file) = &self.state_file {
            let (start, end) = file.read().await.unix();
            self.metrics.node.graceful_shutdown(start, end);
        }
        ending.run_until_cancelled(self.run_loop(connect)).await;
    }

    async fn run_loop<C, F>(&self, connect: C)
    where
        C: Fn() -> F + Send,
        F: Future<Output = Result<Logind, LogindError>> + Send,
    {
        let mut first = true;
        loop {
            let ended = match connect().await {
                Ok(logind) => self.handle_signals(&logind).await,
                Err(error) => ConnectionEnd::Refused(error),
            };
            match ended {
                ConnectionEnd::Refused(error) if first => {
                    tracing::error!(%error, "failed to start node shutdown manager");
                    return;
                }
                ConnectionEnd::Refused(error) => tracing::debug!(%error, "cannot reconnect to logind"),
                ConnectionEnd::Lost => tracing::warn!("lost the connection to logind"),
            }
            first = false;
            tokio::time::sleep(RECONNECT).await;
        }
    }

    /// Holds the lock and handles signals until the connection is lost.
    async fn handle_signals(&self, logind: &Logind) -> ConnectionEnd {
        if let Err(error) = logind.allow_delay(plan::needed(&self.groups)).await {
            return ConnectionEnd::Refused(error);
        }
        let signals = match logind.shutdowns().await {
            Ok(signals) => signals,
            Err(error) => return ConnectionEnd::Refused(error),
        };
        let mut lock = match self.catch_up(logind).await {
            Ok(lock) => lock,
            Err(error) => return ConnectionEnd::Refused(error),
        };
        let mut signals = std::pin::pin!(signals);
        while let Some(down) = signals.next().await {
            if down == *self.down.borrow() {
                continue;
            }
            if down {
                self.shut_down(&mut lock).await;
            } else if let Err(error) = self.cancel_shutdown(logind, &mut lock).await {
                tracing::error!(%error, "cannot take the shutdown inhibitor lock again");
            }
        }
        ConnectionEnd::Lost
    }

    /// Takes the lock, which logind refuses during a shutdown. A shutdown that was begun or cancelled without a connection
    /// is handled now.
    async fn catch_up(&self, logind: &Logind) -> Result<Option<DelayLock>, LogindError> {
        let mut lock = None;
        let (is_down, was_down) = (logind.is_shutting_down().await?, *self.down.borrow());
        match (is_down, was_down) {
            (true, true) => {}
            (true, false) => self.shut_down(&mut lock).await,
            (false, true) => self.cancel_shutdown(logind, &mut lock).await?,
            (false, false) => lock = Some(logind.inhibit().await?),
        }
        if lock.is_some() {
            tracing::info!(delay = ?plan::needed(&self.groups), "holding the shutdown inhibitor lock");
        }
        Ok(lock)
    }

    async fn shut_down(&self, lock: &mut Option<DelayLock>) {
        self.recorder.node_event(EventType::Normal, "Shutdown", "Shutdown manager detected shutdown event");
        self.down.send_replace(true);
        let times = Times::began(self.clock.wall());
        // Beside it: a disk that is slow must not use up the time of the pods.
        tokio::join!(self.store_times(&times), self.terminate_pods());
        self.store_times(&times.ended(self.clock.wall())).await;
        // Releases the lock: the shutdown continues.
        *lock = None;
    }

    async fn cancel_shutdown(&self, logind: &Logind, lock: &mut Option<DelayLock>) -> Result<(), LogindError> {
        self.recorder.node_event(EventType::Normal, "Shutdown", "Shutdown manager detected shutdown cancellation");
        self.down.send_replace(false);
        self.store_times(&Times::default()).await;
        *lock = Some(logind.inhibit().await?);
        Ok(())
    }

    /// Terminates group by group, each within its period.
    async fn terminate_pods(&self) {
        for (group, pods) in plan::order(&self.groups, self.pods.pods()) {
            let (priority, count) = (group.priority, pods.len());
            tracing::info!(priority, pods = count, limit = ?group.period, "terminating pods for a node shutdown");
            // A period of zero limits the wait alone: every pod is terminated.
            let mut ends = Vec::with_capacity(count);
            for pod in &pods {
                ends.push(self.pods.terminate(pod, plan::grace(&group, pod)).await);
            }
            let ends = join_all(ends.iter().map(CancellationToken::cancelled));
            if tokio::time::timeout(group.period, ends).await.is_err() {
                tracing::warn!(priority, limit = ?group.period, "some pods did not terminate in time");
            }
        }
    }

    async fn store_times(&self, times: &Times) {
        if let Some(file) = &self.state_file {
            let (start, end) = times.unix();
            self.metrics.node.graceful_shutdown(start, end);
            file.write(times).await;
        }
    }
}
