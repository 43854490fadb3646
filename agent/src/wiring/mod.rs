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
use tokio::sync::watch;
use tokio::task::JoinError;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::cli::logging::Verbosity;
use crate::config::Settings;
use crate::pipeline::Started;
use crate::retry::RetryTracker;
use apiserver::Connection;
use bootstrap::Bootstrap;
use bootstrap::Prepared;
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
    let (bootstrap, mut connection) = Bootstrap::prepare(settings, &mut tasks, shutdown.clone()).await?;
    let user_namespaces = user_namespaces::open(&bootstrap.settings).await?;
    let images = images::prepare(&bootstrap.settings, bootstrap.runtime.clone(), &bootstrap.metrics).await?;
    let own_node = bootstrap.join_cluster(&images, &mut tasks);
    let objects = objects::start(&bootstrap.settings, bootstrap.api.as_ref(), Some(own_node.node.clone()), &mut tasks);
    let credentials = images::credentials(&bootstrap.settings, &objects, &bootstrap.metrics).await?;
    let images = images.with_credentials(credentials);
    let (started, pipeline) = watch::channel(None);
    let stats = bootstrap.stats(&pipeline)?;
    let serving = bootstrap.serve(listener, verbosity, &own_node, &pipeline, stats.clone(), &mut tasks)?;
    notify::start(watchdog, &bootstrap.settings, bootstrap.shared.clone(), &mut tasks, &shutdown);

    let Some(version) = bootstrap.runtime_ready(&mut tasks).await? else {
        return serving.await.context("ending the servers")?;
    };
    let Some(offered) = bootstrap.offered(&own_node, &mut tasks).await? else {
        return unless_panicked(&mut tasks, serving).await?.context("ending the servers")?;
    };
    images.recover().await;
    let cgroups = bootstrap.cgroups(&mut tasks).await?;
    // Loading BPF programs takes seconds on a slow machine. What is loaded after the end is dropped with the process.
    let observing = shutdown.run_until_cancelled(bootstrap.observe(cgroups.as_ref(), &mut tasks));
    let Some((probes, (pleg, pleg_task))) = observing.await else {
        return serving.await.context("ending the servers")?;
    };
    let pleg_task = pleg_task.map_err(Arc::new).shared();
    let Bootstrap { settings, metrics, recorder, volumes_in_use, .. } = &bootstrap;
    let volumes = volumes::on_disk(settings, metrics, recorder, volumes_in_use, &bootstrap.node.name).await?;
    let pod_cgroups = cgroups.clone();
    let watched = eviction::Watched { cgroups: cgroups.clone(), stalls: bootstrap.stalls(probes) };
    let runtime_name = version.runtime_name;
    let prepared = Prepared { images, objects, volumes, user_namespaces, cgroups, offered, runtime_name };
    let retries = RetryTracker::new(recorder.clone(), Some(metrics.clone()));
    log_rotation::start(settings, pleg.clone(), bootstrap.runtime.clone(), retries.clone(), &mut tasks, &shutdown)?;
    let adoptions = adoption::find(&bootstrap.settings, &bootstrap.runtime, &retries);
    let adoptions = shutdown.run_until_cancelled(adoptions);
    let Some(adoptions) = unless_panicked(&mut tasks, adoptions).await? else {
        pleg_task.await.context("ending the PLEG")?;
        return serving.await.context("ending the servers")?;
    };
    let Started { running, garbage, sync } = bootstrap.start_pipeline(own_node, prepared, pleg, adoptions?, &mut tasks);
    memory::return_at_rest(bootstrap.pacing.priority.clone(), &mut tasks);
    bootstrap.await_node_shutdown(&running, &mut tasks);
    // Before the sync loop runs, which would start pods whose eviction is not finished.
    bootstrap.watch_resources(&running, garbage, watched, stats, &mut tasks).await;
    started.send_replace(Some(running));
    tracing::info!(node = &bootstrap.node.name, runtime = %version.runtime_version, "node agent started");
    let ended = until_ended(sync, &mut connection, pleg_task.clone(), &mut tasks, &shutdown).await;
    // The task that would resume a pod that is being evicted ends with the agent.
    if let Some(cgroups) = pod_cgroups {
        cgroups.resume_pods().await;
    }
    bootstrap.allocations.flush().await;
    server::stopped(serving, &shutdown).await?;
    ended?;
    pleg_task.await.context("ending the PLEG")
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
