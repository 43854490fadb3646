//! Interface to the machine, replaced in tests.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use keblet_proto::cri::v1 as cri;

use super::addresses::AddressConfig;
use super::addresses::Network;
use super::interfaces::Interfaces;
use super::machine::Machine;
use super::machine::RootFs;
use super::network;
use crate::runtime::Runtime;

/// This machine and its container runtime. Calls may be cancelled by dropping.
pub trait Host: Send + Sync + 'static {
    /// Identity and sizes of the machine.
    fn machine(&self) -> impl Future<Output = Machine> + Send;
    /// Addresses and names.
    fn network(&self) -> impl Future<Output = Network> + Send;
    /// The images on this node.
    fn images(&self) -> impl Future<Output = Result<Vec<cri::Image>, String>> + Send;
    /// Sets the pods' address range in the runtime (`UpdateRuntimeConfig`).
    fn set_pod_cidr(&self, cidr: &str) -> impl Future<Output = Result<(), String>> + Send;
}

/// The machine this process runs on.
#[derive(Clone, Debug)]
pub struct ThisHost {
    runtime: Runtime,
    root_dir: PathBuf,
    root_fs: RootFs,
    addresses: AddressConfig,
    interfaces: Arc<Mutex<Interfaces>>,
}

impl ThisHost {
    /// The machine with this runtime; `root_dir` is the agent's own directory, `root_fs` the size of its file system.
    pub fn new(runtime: Runtime, root_dir: PathBuf, root_fs: RootFs, addresses: AddressConfig) -> Self {
        Self { runtime, root_dir, root_fs, addresses, interfaces: Arc::new(Mutex::new(Interfaces::new())) }
    }
}

impl Host for ThisHost {
    async fn machine(&self) -> Machine {
        let (root_dir, root_fs) = (self.root_dir.clone(), self.root_fs.clone());
        // The file system of the root directory may be slow. The thread fails only if it panics.
        let reading = tokio::task::spawn_blocking(move || Machine::read("/".as_ref(), &root_dir, &root_fs));
        reading.await.unwrap_or_default()
    }

    async fn network(&self) -> Network {
        // A panic elsewhere leaves them usable.
        let interfaces = self.interfaces.lock().unwrap_or_else(PoisonError::into_inner).read();
        network::read(&self.addresses, &interfaces).await
    }

    async fn images(&self) -> Result<Vec<cri::Image>, String> {
        self.runtime.list_images(None).await.map_err(|error| error.to_string())
    }

    async fn set_pod_cidr(&self, cidr: &str) -> Result<(), String> {
        self.runtime.set_pod_cidr(cidr).await.map_err(|error| error.to_string())
    }
}
