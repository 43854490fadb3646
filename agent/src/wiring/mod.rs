//! Makes the services from the configuration, connects them, runs them until the agent ends. Decides nothing: the pod
//! pipeline is joined in [`crate::pipeline`].

mod admission;
mod adoption;
mod apiserver;
mod bootstrap;
mod certificates;
mod cgroups;
mod daemon_cgroups;
mod eviction;
mod images;
mod iptables;
mod lock_file;
mod log_rotation;
mod memory;
mod node;
mod node_object;
mod node_shutdown;
mod notify;
mod objects;
mod observers;
mod oom_score;
mod open_files;
mod pod_sources;
mod pods;
mod policies;
mod pressure;
mod recording;
mod resizes;
mod sensors;
mod server;
mod spans;
mod streams;
mod tasks;
mod user_namespaces;
mod volumes;

use std::sync::Arc;

use anyhow::Context as _;
use futures_util::FutureExt as _;
use futures_util::TryFutureExt as _;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinError;
use tokio::task::JoinHandle;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::allocation::Allocations;
use crate::cgroups::Cgroups;
use crate::cli::logging::Verbosity;
use crate::config::Settings;
use crate::images::Images;
use crate::objects::Objects;
use crate::pipeline::Running;
use crate::pipeline::Started;
use crate::retry::RetryTracker;
use crate::stats::Stats;
use crate::user_namespaces::UserNamespaces;
use apiserver::Connection;
use bootstrap::Bootstrap;
use bootstrap::Prepared;
use node_object::NodeHandles;
pub use observers::Observers;
pub use spans::spans;
use tasks::panicked;
use tasks::sync_ended;
use tasks::unless_panicked;

/// Runs the agent until `shutdown` is cancelled. Containers are left running.
///
/// # Errors
/// What keeps the agent from starting: a port in use, directories that cannot be made, cgroups that cannot be set up.
pub async fn run(settings: Settings, verbosity: Verbosity, shutdown: CancellationToken) -> anyhow::Result<()> {
    let watchdog = notify::watchdog()?;
    let locked = shutdown.run_until_cancelled(lock_file::hold(&settings)).await;
    let Some(_lock) = locked.transpose()? else { return Ok(()) };
    // Aborted when the agent ends.
    let mut tasks = JoinSet::new();
    lock_file::watch_contention(&settings, &mut tasks, &shutdown)?;
    // Before the rest: an agent that is started beside another one must not change its pods, its Node or kernel flags.
    let bound = shutdown.run_until_cancelled(server::bind(&settings)).await;
    let Some(listener) = bound.transpose()? else { return Ok(()) };
    let agent = Agent::prepare(settings, &mut tasks, &shutdown).await?;
    let servers = agent.serve(listener, verbosity, &mut tasks)?;
    let bootstrap = &agent.bootstrap;
    notify::start(watchdog, &bootstrap.settings, bootstrap.shared.clone(), &mut tasks, &shutdown);
    agent.run_pods(servers, &mut tasks, &shutdown).await
}

/// The agent before the runtime answers.
struct Agent {
    bootstrap: Bootstrap,
    connection: Connection,
    own_node: NodeHandles,
    images: Images,
    objects: Objects,
    user_namespaces: UserNamespaces,
}

/// The servers, and what they read.
struct Servers {
    serving: JoinHandle<anyhow::Result<()>>,
    stats: Stats,
    /// The pipeline, once it runs.
    started: watch::Sender<Option<Running>>,
}

impl Servers {
    /// Waits until they end.
    ///
    /// # Errors
    /// Why they failed.
    async fn ended(self) -> anyhow::Result<()> {
        self.serving.await.context("ending the servers")?
    }
}

impl Agent {
    /// Makes what needs no runtime. The node joins the cluster.
    ///
    /// # Errors
    /// What keeps the agent from starting.
    async fn prepare(
        settings: Settings,
        tasks: &mut JoinSet<()>,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<Self> {
        let (bootstrap, connection) = Bootstrap::prepare(settings, tasks, shutdown.clone()).await?;
        let Bootstrap { settings, metrics, runtime, api, .. } = &bootstrap;
        let user_namespaces = user_namespaces::open(settings).await?;
        let images = images::prepare(settings, runtime.clone(), metrics).await?;
        let own_node = bootstrap.join_cluster(&images, tasks);
        let objects = objects::start(settings, api.as_ref(), Some(own_node.node.clone()), tasks);
        let credentials = images::credentials(settings, &objects, metrics).await?;
        let images = images.with_credentials(credentials);
        Ok(Self { bootstrap, connection, own_node, images, objects, user_namespaces })
    }

    /// Starts the servers; `listener` has the main port.
    ///
    /// # Errors
    /// `cgroupRoot` is not a name of a cgroup; the serving certificate is there but cannot be used.
    fn serve(
        &self,
        listener: Option<TcpListener>,
        verbosity: Verbosity,
        tasks: &mut JoinSet<()>,
    ) -> anyhow::Result<Servers> {
        let (started, pipeline) = watch::channel(None);
        let stats = self.bootstrap.stats(&pipeline)?;
        let serving = self.bootstrap.serve(listener, verbosity, &self.own_node, &pipeline, stats.clone(), tasks)?;
        Ok(Servers { serving, stats, started })
    }

    /// Waits for the runtime, and runs pods until the agent ends.
    ///
    /// # Errors
    /// What keeps the agent from starting or ends it before `shutdown`.
    async fn run_pods(
        self,
        servers: Servers,
        tasks: &mut JoinSet<()>,
        shutdown: &CancellationToken,
    ) -> anyhow::Result<()> {
        let Self { bootstrap, mut connection, own_node, images, objects, user_namespaces } = self;
        let Some(version) = bootstrap.runtime_ready(tasks).await? else { return servers.ended().await };
        let Some(offered) = bootstrap.offered(&own_node, tasks).await? else {
            return unless_panicked(tasks, servers.ended()).await?;
        };
        images.recover().await;
        let cgroups = bootstrap.cgroups(tasks).await?;
        // Loading BPF programs takes seconds on a slow machine. What is loaded after the end is dropped with the process.
        let observing = shutdown.run_until_cancelled(bootstrap.observe(cgroups.as_ref(), tasks));
        let Some((probes, (pleg, pleg_task))) = observing.await else { return servers.ended().await };
        let pleg_task = pleg_task.map_err(Arc::new).shared();
        let volumes = bootstrap.volumes().await?;
        let watched = eviction::Watched { cgroups: cgroups.clone(), stalls: bootstrap.stalls(probes) };
        let (pod_cgroups, runtime_name) = (cgroups.clone(), version.runtime_name);
        let prepared = Prepared { images, objects, volumes, user_namespaces, cgroups, offered, runtime_name };
        let retries = RetryTracker::new(bootstrap.recorder.clone(), Some(bootstrap.metrics.clone()));
        let (settings, runtime) = (&bootstrap.settings, &bootstrap.runtime);
        log_rotation::start(settings, pleg.clone(), runtime.clone(), retries.clone(), tasks, shutdown)?;
        let finding = shutdown.run_until_cancelled(adoption::find(settings, runtime, &retries));
        let Some(adoptions) = unless_panicked(tasks, finding).await?.transpose()? else {
            pleg_task.await.context("ending the PLEG")?;
            return servers.ended().await;
        };
        let Started { running, garbage, sync } = bootstrap.start_pipeline(own_node, prepared, pleg, adoptions, tasks);
        memory::return_at_rest(bootstrap.pacing.priority.clone(), tasks);
        bootstrap.await_node_shutdown(&running, tasks);
        // Before the sync loop runs, which would start pods whose eviction is not finished.
        bootstrap.watch_resources(&running, garbage, watched, servers.stats, tasks).await;
        servers.started.send_replace(Some(running));
        tracing::info!(node = &bootstrap.node.name, runtime = %version.runtime_version, "node agent started");
        let ended = until_ended(sync, &mut connection, pleg_task.clone(), tasks, shutdown).await;
        leave_pods(pod_cgroups, &bootstrap.allocations).await;
        server::stopped(servers.serving, shutdown).await?;
        ended?;
        pleg_task.await.context("ending the PLEG")
    }
}

/// Leaves the pods as the next agent is to find them.
async fn leave_pods(cgroups: Option<Cgroups>, allocations: &Allocations) {
    // The task that would resume a pod that is being evicted ends with the agent.
    if let Some(cgroups) = cgroups {
        cgroups.resume_pods().await;
    }
    allocations.flush().await;
}

/// Waits until the agent ends: at `shutdown`, or because a part of it fails.
///
/// # Errors
/// Why it ends before `shutdown`.
async fn until_ended(
    sync: impl Future<Output = ()>,
    connection: &mut Connection,
    pleg_task: impl Future<Output = Result<(), Arc<JoinError>>>,
    tasks: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    tokio::select! {
        () = sync => sync_ended(tasks, shutdown).await,
        () = connection.lost() => Err(anyhow::anyhow!(
            "no client certificate for too long although the API server is healthy; a restart may obtain one"
        )),
        // Without one of them the agent would manage its pods incompletely.
        Err(error) = pleg_task => Err(error).context("running the PLEG"),
        error = panicked(tasks) => Err(error),
    }
}
