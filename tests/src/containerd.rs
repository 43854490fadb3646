//! A real container runtime for one test. Owns nothing itself: the runtime cleans up in a process of its own, also when
//! the test is killed.
//!
//! Tests that use it need root and what `cargo xtask setup` fetches, so they are marked
//! `#[ignore = "real runtime"]`; `cargo xtask test` runs them where they can run, and says so where not.

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;
use keblet_peers::Options;
use keblet_peers::PrivateContainerd;
use keblet_peers::Ready;
use keblet_proto::cri::v1::image_service_client::ImageServiceClient;
use keblet_proto::cri::v1::runtime_service_client::RuntimeServiceClient;
use tonic::transport::Channel;
use tonic::transport::Endpoint;

/// A private containerd and a connection to it that is not the agent's.
#[derive(Debug)]
pub struct TestContainerd {
    containerd: PrivateContainerd,
    channel: Channel,
}

impl TestContainerd {
    /// Starts a runtime with the test images; takes about 0.2 s.
    pub fn start() -> Result<Self> {
        let containerd = PrivateContainerd::start(&Cache::locate(), &Options::default())?;
        let address = format!("unix:{}", containerd.ready().socket.display());
        // Lazy, so that it connects again by itself after the runtime was killed.
        let channel = Endpoint::from_shared(address).context("the socket is no address")?.connect_lazy();
        Ok(Self { containerd, channel })
    }

    /// Its socket, cgroup and folder; files below the folder are removed at the end.
    pub fn ready(&self) -> &Ready {
        self.containerd.ready()
    }

    /// The CRI endpoint as the agent wants it.
    pub fn endpoint(&self) -> String {
        self.containerd.endpoint()
    }

    /// A client of its pods and containers.
    pub fn runtime(&self) -> RuntimeServiceClient<Channel> {
        RuntimeServiceClient::new(self.channel.clone())
    }

    /// A client of its images.
    pub fn images(&self) -> ImageServiceClient<Channel> {
        ImageServiceClient::new(self.channel.clone())
    }

    /// Kills containerd with SIGKILL; containers live on.
    pub fn kill(&mut self) -> Result<()> {
        self.containerd.kill()
    }

    /// Starts containerd again and waits until it answers.
    pub fn restart(&mut self) -> Result<()> {
        self.containerd.restart()
    }

    /// Removes all pods, stops the runtime, and fails if anything is left. The agent must have ended before.
    pub fn stop(self) -> Result<()> {
        self.containerd.stop()
    }
}
