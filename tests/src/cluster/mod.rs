//! The agent as a node of a real cluster, for tests of what controllers, users and kubectl observe.
//!
//! ```text
//! few per test binary:  ControlPlaneSlot: a control plane, a node that tests share
//! one per test:         Tenant: a namespace, a node (shared or its own), the real kubectl
//! ```
//! Every wait is on a watch of the API server, with a deadline. Tests that break the control plane or the agent have a
//! control plane to themselves ([`Cluster::exclusive`]); all others share one, some at a time ([`Cluster::shared`]).

mod kubectl;
mod node;
mod remains;
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
pub use kubectl::Output;
pub use kubectl::Session;
pub use node::ClusterNode;
pub use tenant::Tenant;
pub use wait::until;
pub use wait::until_gone;
pub use wait::until_some;

/// Deadline of every wait; generous, for a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(90);

/// Tests that use the shared control plane at the same time, beside those on exclusive ones.
const AT_ONCE: usize = 3;

static SHARED: ControlPlaneSlot = ControlPlaneSlot::new(AT_ONCE);
/// Two, since a test that waits for an API server to restart uses no CPU.
static EXCLUSIVE: [ControlPlaneSlot; 2] = [ControlPlaneSlot::new(1), ControlPlaneSlot::new(1)];

/// A control plane and its shared node, both started on first use. Removed when the test process exits.
struct ControlPlaneSlot {
    permits: Semaphore,
    plane: OnceLock<Mutex<ControlPlane>>,
    starting: Mutex<()>,
    node: OnceCell<Arc<ClusterNode>>,
}

/// A control plane in use by a test.
pub struct Cluster {
    slot: &'static ControlPlaneSlot,
    ready: ControlPlaneReady,
    client: Client,
    _permit: SemaphorePermit<'static>,
}

impl Cluster {
    /// The shared control plane; a test must not break it.
    ///
    /// # Errors
    /// The control plane does not start.
    pub async fn shared() -> Result<Self> {
        Self::on(&SHARED, SHARED.acquire().await?).await
    }

    /// A control plane for this test only, which may break it and its node.
    ///
    /// # Errors
    /// The control plane does not start.
    pub async fn exclusive() -> Result<Self> {
        let [one, other] = &EXCLUSIVE;
        tokio::select! {
            permit = one.acquire() => Self::on(one, permit?).await,
            permit = other.acquire() => Self::on(other, permit?).await,
        }
    }

    async fn on(slot: &'static ControlPlaneSlot, permit: SemaphorePermit<'static>) -> Result<Self> {
        let ready = spawn_blocking(|| slot.plane().map(|plane| plane.ready().clone()))
            .await
            .context("starting the control plane panicked")??;
        let client = client(ready.kubeconfig.clone()).await?;
        Ok(Self { slot, ready, client, _permit: permit })
    }

    /// The node that all tests on this control plane share, started on first use.
    ///
    /// # Errors
    /// The node does not become Ready.
    pub async fn node(&self) -> Result<Arc<ClusterNode>> {
        let start = async || ClusterNode::start(self, json!({})).await.map(Arc::new);
        self.slot.node.get_or_try_init(start).await.cloned()
    }

    /// Names and addresses of the control plane.
    pub fn ready(&self) -> &ControlPlaneReady {
        &self.ready
    }

    /// A client with administrator rights.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Runs a function on the control plane, such as killing a component, on a blocking thread.
    ///
    /// # Errors
    /// The control plane does not start, or the function fails.
    pub async fn on_control_plane<T: Send + 'static>(
        &self,
        command: impl FnOnce(&mut ControlPlane) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let slot = self.slot;
        spawn_blocking(move || command(&mut *slot.plane()?)).await.context("a command to the control plane panicked")?
    }
}

/// A client with the identity of a kubeconfig.
///
/// # Errors
/// The kubeconfig cannot be read or has no usable identity.
pub async fn client(kubeconfig: PathBuf) -> Result<Client> {
    let shown = kubeconfig.display().to_string();
    let config = Kubeconfig::read_from(&kubeconfig).with_context(|| format!("cannot read {shown}"))?;
    let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default())
        .await
        .with_context(|| format!("cannot use {shown}"))?;
    Client::try_from(config).with_context(|| format!("no client from {shown}"))
}

impl ControlPlaneSlot {
    const fn new(permits: usize) -> Self {
        let permits = Semaphore::const_new(permits);
        Self { permits, plane: OnceLock::new(), starting: Mutex::new(()), node: OnceCell::const_new() }
    }

    /// Waits for a permit.
    async fn acquire(&'static self) -> Result<SemaphorePermit<'static>> {
        self.permits.acquire().await.context("the semaphore is closed")
    }

    /// The control plane, started on first use.
    fn plane(&self) -> Result<MutexGuard<'_, ControlPlane>> {
        if self.plane.get().is_none() {
            let _starting = self.starting.lock().unwrap_or_else(PoisonError::into_inner);
            if self.plane.get().is_none() {
                let started = ControlPlane::start(&ControlPlaneOptions::default())?;
                self.plane.set(Mutex::new(started)).map_err(|_| anyhow!("two control planes were started"))?;
            }
        }
        let plane = self.plane.get().context("the control plane was not started")?;
        // A test that panicked with the lock held leaves no state that later commands do not report.
        Ok(plane.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
