//! The agent as a node of a real cluster, for tests of what people and controllers see of it.
//!
//! ```text
//! one per test binary:  control plane, a node that tests share
//! one per test:         Tenant: a namespace, a node (shared or its own), the real kubectl
//! ```
//! Owns the stage and the waiting: everything waits on what the API server's watches tell, with a deadline, never for a
//! time. Refuses to judge. Tests that break the control plane hold it alone ([`Cluster::alone`]); all others at once
//! ([`Cluster::join`]).

mod kubectl;
mod node;
mod tenant;
mod wait;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::OnceLock;
use std::sync::PoisonError;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::anyhow;
use keblet_peers::ControlPlane;
use keblet_peers::ControlPlaneOptions;
use keblet_peers::ControlPlaneReady;
use kube::Client;
use kube::Config;
use kube::config::KubeConfigOptions;
use kube::config::Kubeconfig;
use tokio::sync::RwLock;
use tokio::sync::RwLockReadGuard;
use tokio::sync::RwLockWriteGuard;
use tokio::task::spawn_blocking;

pub use kubectl::Kubectl;
pub use kubectl::Said;
pub use kubectl::Session;
pub use node::ClusterNode;
pub use tenant::Tenant;
pub use wait::until;
pub use wait::until_gone;
pub use wait::until_some;

/// For anything that has to happen; generous, for a machine that does much else.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The one control plane of this process. The end of the process is the end of its input, and so its own.
static PLANE: OnceLock<Mutex<ControlPlane>> = OnceLock::new();
static STARTING: Mutex<()> = Mutex::new(());
static TURNS: RwLock<()> = RwLock::const_new(());

/// The control plane in the hands of one test.
pub struct Cluster {
    ready: ControlPlaneReady,
    client: Client,
    _turn: Turn,
}

/// Held to keep others from breaking what the test needs.
enum Turn {
    Shared { _guard: RwLockReadGuard<'static, ()> },
    Alone { _guard: RwLockWriteGuard<'static, ()> },
}

impl Cluster {
    /// The control plane, which nobody breaks while this is held.
    pub async fn join() -> Result<Self> {
        let turn = Turn::Shared { _guard: TURNS.read().await };
        Self::with(turn).await
    }

    /// The control plane for one test alone, which may break and mend it.
    pub async fn alone() -> Result<Self> {
        let turn = Turn::Alone { _guard: TURNS.write().await };
        Self::with(turn).await
    }

    async fn with(turn: Turn) -> Result<Self> {
        let ready = spawn_blocking(|| plane().map(|plane| plane.ready().clone()))
            .await
            .context("starting the control plane panicked")??;
        let client = client(ready.kubeconfig.clone()).await?;
        Ok(Self { ready, client, _turn: turn })
    }

    /// Where everything is.
    pub fn ready(&self) -> &ControlPlaneReady {
        &self.ready
    }

    /// A client with an administrator's rights.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Gives orders to the control plane, such as to kill a part. They take their time, so not on this thread.
    pub async fn order<T: Send + 'static>(
        &self,
        order: impl FnOnce(&mut ControlPlane) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        spawn_blocking(move || order(&mut *plane()?)).await.context("an order to the control plane panicked")?
    }
}

/// A client for whoever a kubeconfig names.
pub async fn client(kubeconfig: PathBuf) -> Result<Client> {
    let shown = kubeconfig.display().to_string();
    let config = Kubeconfig::read_from(&kubeconfig).with_context(|| format!("cannot read {shown}"))?;
    let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default())
        .await
        .with_context(|| format!("cannot use {shown}"))?;
    Client::try_from(config).with_context(|| format!("no client from {shown}"))
}

/// The control plane, started by whoever comes first.
fn plane() -> Result<MutexGuard<'static, ControlPlane>> {
    if PLANE.get().is_none() {
        let _starting = STARTING.lock().unwrap_or_else(PoisonError::into_inner);
        if PLANE.get().is_none() {
            let started = ControlPlane::start(&ControlPlaneOptions::default())?;
            PLANE.set(Mutex::new(started)).map_err(|_| anyhow!("two control planes were started"))?;
        }
    }
    let plane = PLANE.get().context("the control plane is not there")?;
    // A test that failed while it gave an order broke nothing that the next order does not report.
    Ok(plane.lock().unwrap_or_else(PoisonError::into_inner))
}
