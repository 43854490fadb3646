//! The handle of a private container runtime, which the process `private-containerd` runs and cleans up.

use std::net::Ipv4Addr;
use std::path::Path;
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

/// Options of a private runtime.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Folder of its files [default: a new one in the temporary folder]. Removed at the end.
    pub dir: Option<PathBuf>,
    /// The supervisor's program [default: beside the running program].
    pub supervisor: Option<PathBuf>,
    /// The runtime reports the systemd cgroup driver (CRI `RuntimeConfig`) instead of cgroupfs.
    pub systemd_cgroup_driver: bool,
    /// With the systemd cgroup driver, runc creates scopes through the running systemd; otherwise runc still writes
    /// cgroup files itself.
    pub systemd_scopes: bool,
    /// Containers are made by [`Cache::current_runc`], which can map ids of mounts.
    pub current_runc: bool,
    /// Containers get a negative `oom_score_adj` and AppArmor profiles: the machine needs CAP_SYS_RESOURCE, a kernel with
    /// AppArmor, and apparmor_parser(8).
    pub unrestricted: bool,
}

/// Names and addresses of a running private runtime.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Ready {
    /// The folder of all its files. Put the agent's root folder here too, and its mounts are cleaned up as well.
    pub dir: PathBuf,
    /// The CRI socket.
    pub socket: PathBuf,
    /// The process id of containerd.
    pub pid: i32,
    /// A cgroup, as a path from the root of every hierarchy, that is removed at the end with its children.
    pub cgroup_root: String,
    /// The bridge that pods are attached to.
    pub bridge: String,
    /// The pods' network. Its first address is the host's.
    pub pod_subnet: String,
}

impl Ready {
    /// The host's address on the pods' bridge: not a loopback address and unique among private runtimes, so that it can
    /// be the address of a node.
    ///
    /// # Errors
    /// The network's address is malformed.
    pub fn host_address(&self) -> Result<Ipv4Addr> {
        let (network, _) = self.pod_subnet.split_once('/').context("the pods' network has no prefix")?;
        let network: Ipv4Addr = network.parse().with_context(|| format!("{network:?} is not an IPv4 address"))?;
        Ok(Ipv4Addr::from(u32::from(network) + 1))
    }
}

/// A container runtime with its own root, state, socket, network and cgroup.
///
/// Dropping it stops the runtime, removes all its resources and waits for that. The agent that uses it must have exited
/// before, or it restarts what is being removed; see [`Self::adopt`].
#[derive(Debug)]
pub struct PrivateContainerd {
    supervisor: Supervisor,
    ready: Ready,
}

impl PrivateContainerd {
    /// Starts a runtime and waits until it is ready and has its images.
    ///
    /// # Errors
    /// The cache is incomplete, or the runtime does not start.
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
        if options.systemd_scopes {
            command.arg("--systemd-scopes");
        }
        if options.current_runc {
            command.arg("--current-runc");
        }
        if options.unrestricted {
            command.arg("--unrestricted");
        }
        let (supervisor, ready) = Supervisor::start(PROGRAM, &mut command).context("no private container runtime")?;
        Ok(Self { supervisor, ready })
    }

    /// Names and addresses of the runtime.
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    /// The CRI endpoint in the form of `--container-runtime-endpoint`.
    pub fn endpoint(&self) -> String {
        format!("unix://{}", self.ready.socket.display())
    }

    /// Kills containerd with SIGKILL. Containers keep running.
    ///
    /// # Errors
    /// containerd does not run.
    pub fn kill(&mut self) -> Result<()> {
        self.call("kill").context("cannot kill containerd")
    }

    /// Starts containerd again after [`Self::kill`] and waits until it is ready.
    ///
    /// # Errors
    /// containerd runs already, or does not get ready.
    pub fn restart(&mut self) -> Result<()> {
        self.ready = self.call("start").context("cannot start containerd again")?;
        Ok(())
    }

    /// All pods, as the runtime reports them.
    ///
    /// # Errors
    /// The runtime does not answer.
    pub fn pods(&mut self) -> Result<Vec<PodView>> {
        self.call("list").context("cannot list the runtime's pods")
    }

    /// Registers a process that uses the runtime: if the supervisor's user is killed, it kills the process before the
    /// clean-up.
    ///
    /// # Errors
    /// The supervisor has exited.
    pub fn adopt(&mut self, pid: u32) -> Result<()> {
        self.call(&format!("adopt {pid}")).with_context(|| format!("cannot adopt process {pid}"))
    }

    /// Imports the images of an archive, for pods of Kubernetes.
    ///
    /// # Errors
    /// The archive cannot be read, or the runtime does not list its images in time.
    pub fn import(&mut self, archive: &Path) -> Result<()> {
        self.call(&format!("import {}", archive.display()))
    }

    /// Stops the runtime and removes all its resources.
    ///
    /// # Errors
    /// A resource could not be removed; the error lists them.
    pub fn stop(self) -> Result<()> {
        self.supervisor.stop()
    }

    fn call<T: for<'de> Deserialize<'de>>(&mut self, command: &str) -> Result<T> {
        self.supervisor.call(command)
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
