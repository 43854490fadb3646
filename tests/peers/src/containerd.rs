//! The handle of a private container runtime. Owns the talk with `private-containerd`; refuses to clean up by itself,
//! which that process does better, also when this one is killed.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use serde::Deserialize;
use serde::Serialize;

use crate::Cache;
use crate::PodView;
use crate::supervisor;
use crate::supervisor::Supervisor;

const PROGRAM: &str = "private-containerd";

/// What a private runtime is started with.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where its files go; a new folder below the temporary folder if not given. Removed at the end.
    pub dir: Option<PathBuf>,
    /// The supervisor, if it does not lie beside the running program.
    pub supervisor: Option<PathBuf>,
    /// The runtime reports the systemd cgroup driver (CRI `RuntimeConfig`) instead of cgroupfs.
    pub systemd_cgroup_driver: bool,
}

/// What a running private runtime offers.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Ready {
    /// The folder of all its files. Put the agent's root folder here too, and its mounts are cleaned up as well.
    pub dir: PathBuf,
    /// The CRI socket.
    pub socket: PathBuf,
    /// The process id of containerd.
    pub pid: i32,
    /// A cgroup, named from the root of every hierarchy, that is removed at the end with all below it.
    pub cgroup_root: String,
    /// The bridge that pods are attached to.
    pub bridge: String,
    /// The pods' network. The host's address on it is the first one.
    pub pod_subnet: String,
}

impl Ready {
    /// The host's address on the pods' bridge: an address of this machine that is no loopback address and that no
    /// other runtime's host has, so that it can be the address of a node.
    pub fn host_address(&self) -> Result<Ipv4Addr> {
        let (network, _) = self.pod_subnet.split_once('/').context("the pods' network has no prefix")?;
        let network: Ipv4Addr = network.parse().with_context(|| format!("{network:?} is no IPv4 address"))?;
        Ok(Ipv4Addr::from(u32::from(network) + 1))
    }
}

/// A container runtime with its own root, state, socket, network and cgroup.
///
/// Dropping it stops the runtime and removes all that it brought forth, which takes as long as it takes. The agent
/// that used it must be gone before, or it starts again what is being removed; see [`Self::adopt`].
#[derive(Debug)]
pub struct PrivateContainerd {
    supervisor: Supervisor,
    ready: Ready,
}

impl PrivateContainerd {
    /// Starts a runtime and waits until it answers and has its images.
    pub fn start(cache: &Cache, options: &Options) -> Result<Self> {
        cache.check()?;
        let program = match &options.supervisor {
            Some(program) => program.clone(),
            None => supervisor::find(PROGRAM, "KEBLET_PRIVATE_CONTAINERD")?,
        };
        let mut command = Command::new(&program);
        command.arg("--cache").arg(cache.root());
        if let Some(dir) = &options.dir {
            command.arg("--dir").arg(dir);
        }
        if options.systemd_cgroup_driver {
            command.arg("--systemd-cgroup-driver");
        }
        let (supervisor, ready) = Supervisor::start(PROGRAM, &mut command).context("no private container runtime")?;
        Ok(Self { supervisor, ready })
    }

    /// What the runtime offers.
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    /// The CRI endpoint as the agent wants it.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.ready.socket.display())
    }

    /// Kills containerd with SIGKILL. Containers live on.
    pub fn kill(&mut self) -> Result<()> {
        self.order("kill").context("cannot kill containerd")
    }

    /// Starts containerd again after [`Self::kill`] and waits until it answers.
    pub fn restart(&mut self) -> Result<()> {
        self.ready = self.order("start").context("cannot start containerd again")?;
        Ok(())
    }

    /// What the runtime says of all its pods.
    pub fn pods(&mut self) -> Result<Vec<PodView>> {
        self.order("list").context("cannot list the runtime's pods")
    }

    /// Names a process that uses the runtime: should we be killed, it is killed too, before the clean-up.
    pub fn adopt(&mut self, pid: u32) -> Result<()> {
        self.order(&format!("adopt {pid}")).with_context(|| format!("cannot adopt process {pid}"))
    }

    /// Stops the runtime, removes all that it brought forth, and says what could not be removed.
    pub fn stop(self) -> Result<()> {
        self.supervisor.stop()
    }

    fn order<T: for<'de> Deserialize<'de>>(&mut self, order: &str) -> Result<T> {
        self.supervisor.order(order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_address_is_the_first_of_the_pod_subnet() {
        let ready = Ready {
            dir: "/d".into(),
            socket: "/s".into(),
            pid: 1,
            cgroup_root: "/c".into(),
            bridge: "kb".into(),
            pod_subnet: "10.64.7.0/24".into(),
        };
        assert_eq!(ready.host_address().unwrap(), Ipv4Addr::new(10, 64, 7, 1));
    }
}
