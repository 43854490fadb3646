//! The agent as a node of a real cluster, for tests of what people and controllers see of it.
//!
//! ```text
//! few per test binary:  Stage: a control plane, a node that tests share
//! one per test:         Tenant: a namespace, a node (the stage's or its own), the real kubectl
//! ```
//! Owns the stages and the waiting: everything waits on what the API server's watches tell, with a deadline, never for a
//! time. Refuses to judge. Tests that break the control plane or the agent have a stage alone ([`Cluster::alone`]); all
//! others share one, some at once ([`Cluster::join`]).

mod kubectl;
mod node;
mod tenant;
mod wait;

use std::path::PathBuf;
use std::sync::Arc;
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
use serde_json::json;
use tokio::sync::OnceCell;
use tokio::sync::Semaphore;
use tokio::sync::SemaphorePermit;
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

/// What the processors bear at once, beside a test that is alone.
const AT_ONCE: usize = 3;

static SHARED: Stage = Stage::new(AT_ONCE);
/// Two, since who waits for an API server to come back leaves the processors to another.
static ALONE: [Stage; 2] = [Stage::new(1), Stage::new(1)];

/// A control plane and the node on it. The end of the process is the end of its input, and so its own.
struct Stage {
    turns: Semaphore,
    plane: OnceLock<Mutex<ControlPlane>>,
    starting: Mutex<()>,
    node: OnceCell<Arc<ClusterNode>>,
}

/// The control plane in the hands of one test.
pub struct Cluster {
    stage: &'static Stage,
    ready: ControlPlaneReady,
    client: Client,
    _turn: SemaphorePermit<'static>,
}

impl Cluster {
    /// The control plane that nobody breaks.
    pub async fn join() -> Result<Self> {
        Self::on(&SHARED, SHARED.turn().await?).await
    }

    /// The control plane for one test alone, which may break and mend it and its node.
    pub async fn alone() -> Result<Self> {
        let [one, other] = &ALONE;
        tokio::select! {
            turn = one.turn() => Self::on(one, turn?).await,
            turn = other.turn() => Self::on(other, turn?).await,
        }
    }

    async fn on(stage: &'static Stage, turn: SemaphorePermit<'static>) -> Result<Self> {
        let ready = spawn_blocking(|| stage.plane().map(|plane| plane.ready().clone()))
            .await
            .context("starting the control plane panicked")??;
        let client = client(ready.kubeconfig.clone()).await?;
        Ok(Self { stage, ready, client, _turn: turn })
    }

    /// The node that all tests on this control plane share; started by whoever comes first.
    pub async fn node(&self) -> Result<Arc<ClusterNode>> {
        let start = async || ClusterNode::start(self, json!({})).await.map(Arc::new);
        self.stage.node.get_or_try_init(start).await.cloned()
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
        let stage = self.stage;
        spawn_blocking(move || order(&mut *stage.plane()?)).await.context("an order to the control plane panicked")?
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

impl Stage {
    const fn new(turns: usize) -> Self {
        let turns = Semaphore::const_new(turns);
        Self { turns, plane: OnceLock::new(), starting: Mutex::new(()), node: OnceCell::const_new() }
    }

    /// Waits for a place on it.
    async fn turn(&'static self) -> Result<SemaphorePermit<'static>> {
        self.turns.acquire().await.context("the stage is closed")
    }

    /// The control plane, started by whoever comes first.
    fn plane(&self) -> Result<MutexGuard<'_, ControlPlane>> {
        if self.plane.get().is_none() {
            let _starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
            if self.plane.get().is_none() {
                let started = ControlPlane::start(&ControlPlaneOptions::default())?;
                self.plane.set(Mutex::new(started)).map_err(|_| anyhow!("two control planes were started"))?;
            }
        }
        let plane = self.plane.get().context("the control plane is not there")?;
        // A test that failed while it gave an order broke nothing that the next order does not report.
        Ok(plane.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
