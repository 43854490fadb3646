//! The handle of a private control plane: etcd, API server, controller manager and scheduler on an address of their
//! own.
//!
//! The process `private-control-plane` runs them and owns their certificates and their folder.

use std::net::IpAddr;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::time::SystemTime;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use serde::Deserialize;
use serde::Serialize;

use crate::Cache;
use crate::supervisor;
use crate::supervisor::Supervisor;

const PROGRAM: &str = "private-control-plane";

/// A program of the control plane.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// The API server's store.
    Etcd,
    /// The API server.
    ApiServer,
    /// Controllers, garbage collection, signers, service accounts.
    ControllerManager,
    /// Binds pods to nodes.
    Scheduler,
    /// Serves the metrics of `kubectl top`. Not started with the others, but by [`ControlPlane::start_part`].
    MetricsServer,
}

impl Part {
    /// All of them, in the order in which they are started.
    pub const ALL: [Self; 5] =
        [Self::Etcd, Self::ApiServer, Self::ControllerManager, Self::Scheduler, Self::MetricsServer];

    /// The name of its program, and of its log.
    pub fn program(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::MetricsServer => "metrics-server",
        }
    }
}

/// Commands of `private-control-plane`.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlaneCommand {
    /// Kill with SIGKILL.
    Kill(Part),
    /// Send SIGTERM and wait until it has exited.
    Stop(Part),
    /// Start, and wait until it is ready.
    Start(Part),
    /// Send SIGSTOP: the process keeps its connections and answers nothing.
    Freeze(Part),
    /// Send SIGCONT.
    Thaw(Part),
    /// Compact etcd up to its current revision.
    Compact,
    /// Sign a certificate.
    Issue(Identity),
}

/// Subject of a certificate, for clients and servers.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Identity {
    /// The user name of a client.
    pub common_name: String,
    /// The group of a client.
    pub group: Option<String>,
    /// DNS names and IP addresses of a server.
    pub names: Vec<String>,
    /// Start of its validity [default: an hour ago].
    pub not_before: Option<SystemTime>,
    /// End of its validity [default: in a year].
    pub not_after: Option<SystemTime>,
}

/// The files of an issued certificate, in the control plane's folder.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Credentials {
    /// The certificate, PEM.
    pub certificate: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
    /// A kubeconfig that refers to both.
    pub kubeconfig: PathBuf,
}

/// What a node needs to join the cluster.
#[derive(Clone, Debug)]
pub struct NodeAccess {
    /// The node's name.
    pub name: String,
    /// The node's address.
    pub address: IpAddr,
    /// `system:node:NAME` in group `system:nodes`.
    pub client: Credentials,
    /// The serving certificate, which the API server trusts.
    pub serving: Credentials,
    /// The authority of client certificates that the node accepts.
    pub client_ca: PathBuf,
}

/// Options of a private control plane.
#[derive(Clone, Debug, Default)]
pub struct ControlPlaneOptions {
    /// The folder of the programs, as `cargo xtask peers` builds them [default: [`find_programs`]].
    pub programs: Option<PathBuf>,
    /// The supervisor's program [default: beside the running program].
    pub supervisor: Option<PathBuf>,
    /// Further arguments of kube-apiserver.
    pub api_server_arguments: Vec<String>,
}

/// Names and addresses of a running control plane.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ControlPlaneReady {
    /// The folder of all its files: certificates, kubeconfigs, data, and `PROGRAM.log` of each component.
    pub dir: PathBuf,
    /// The folder of the programs, kubectl among them.
    pub programs: PathBuf,
    /// The API server, `https://…`.
    pub server: String,
    /// The authority that signed all certificates, PEM.
    pub ca: PathBuf,
    /// An administrator's kubeconfig.
    pub kubeconfig: PathBuf,
    /// A kubeconfig with a bootstrap token, to request a node's client certificate.
    pub bootstrap_kubeconfig: PathBuf,
}

impl ControlPlaneReady {
    /// Path of kubectl.
    pub fn kubectl(&self) -> PathBuf {
        self.programs.join("kubectl")
    }

    /// Path of a component's log.
    pub fn log(&self, part: Part) -> PathBuf {
        self.dir.join(format!("{}.log", part.program()))
    }
}

/// A control plane with its own address, folder and certificates. Dropping it stops and removes it.
#[derive(Debug)]
pub struct ControlPlane {
    supervisor: Supervisor,
    ready: ControlPlaneReady,
}

impl ControlPlane {
    /// Starts a control plane and waits until nodes and pods can be created.
    ///
    /// # Errors
    /// A program is missing, or a component does not get ready.
    pub fn start(options: &ControlPlaneOptions) -> Result<Self> {
        let programs = match &options.programs {
            Some(programs) => programs.clone(),
            None => find_programs()?,
        };
        check_programs(&programs)?;
        let program = match &options.supervisor {
            Some(program) => program.clone(),
            None => supervisor::find(PROGRAM, "KEBLET_PRIVATE_CONTROL_PLANE")?,
        };
        let mut command = Command::new(&program);
        command.arg("--programs").arg(&programs).arg("--").args(&options.api_server_arguments);
        let (supervisor, ready) = Supervisor::start(PROGRAM, &mut command).context("no private control plane")?;
        Ok(Self { supervisor, ready })
    }

    /// Names and addresses of the control plane.
    pub fn ready(&self) -> &ControlPlaneReady {
        &self.ready
    }

    /// Kills a component with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill(&mut self, part: Part) -> Result<()> {
        self.call(&PlaneCommand::Kill(part)).with_context(|| format!("cannot kill {}", part.program()))
    }

    /// Stops a component with SIGTERM and waits until it has exited.
    ///
    /// # Errors
    /// It does not run.
    pub fn stop_part(&mut self, part: Part) -> Result<()> {
        self.call(&PlaneCommand::Stop(part)).with_context(|| format!("cannot stop {}", part.program()))
    }

    /// Starts a component that does not run and waits until it is ready.
    ///
    /// # Errors
    /// It runs already, or does not get ready.
    pub fn start_part(&mut self, part: Part) -> Result<()> {
        self.call(&PlaneCommand::Start(part)).with_context(|| format!("cannot start {}", part.program()))
    }

    /// Suspends a component: it keeps its connections and answers nothing.
    ///
    /// # Errors
    /// It does not run.
    pub fn freeze(&mut self, part: Part) -> Result<()> {
        self.call(&PlaneCommand::Freeze(part)).with_context(|| format!("cannot freeze {}", part.program()))
    }

    /// Resumes a suspended component.
    ///
    /// # Errors
    /// It does not run.
    pub fn thaw(&mut self, part: Part) -> Result<()> {
        self.call(&PlaneCommand::Thaw(part)).with_context(|| format!("cannot thaw {}", part.program()))
    }

    /// Compacts etcd up to its current revision, and returns the revision.
    ///
    /// A running API server still has recent changes in memory. For `410 Gone` on an old resource version, restart it
    /// afterwards.
    ///
    /// # Errors
    /// etcd does not answer.
    pub fn compact(&mut self) -> Result<i64> {
        self.call(&PlaneCommand::Compact).context("cannot compact etcd")
    }

    /// Issues a certificate.
    ///
    /// # Errors
    /// A name is invalid, or a file cannot be written.
    pub fn issue(&mut self, identity: &Identity) -> Result<Credentials> {
        self.call(&PlaneCommand::Issue(identity.clone()))
            .with_context(|| format!("cannot issue a certificate for {}", identity.common_name))
    }

    /// Issues the certificates of a node, which can join with them.
    ///
    /// # Errors
    /// As [`Self::issue`].
    pub fn node(&mut self, name: &str, address: IpAddr) -> Result<NodeAccess> {
        let user = format!("system:node:{name}");
        let group = Some("system:nodes".to_owned());
        let client = Identity { common_name: user.clone(), group: group.clone(), ..Identity::default() };
        let names = vec![name.to_owned(), address.to_string()];
        let serving = Identity { common_name: user, group, names, ..Identity::default() };
        Ok(NodeAccess {
            name: name.to_owned(),
            address,
            client: self.issue(&client)?,
            serving: self.issue(&serving)?,
            client_ca: self.ready.ca.clone(),
        })
    }

    /// Stops all components and removes the folder.
    ///
    /// # Errors
    /// Something could not be removed; the error lists it.
    pub fn stop(self) -> Result<()> {
        self.supervisor.stop()
    }

    fn call<T: for<'de> Deserialize<'de>>(&mut self, command: &PlaneCommand) -> Result<T> {
        let line = serde_json::to_string(command).context("cannot encode the command")?;
        self.supervisor.call(&line)
    }
}

/// The folder of upstream's programs: `KEBLET_CONTROL_PLANE`, or the output of `cargo xtask peers`.
///
/// # Errors
/// The path cannot be made absolute.
pub fn find_programs() -> Result<PathBuf> {
    let folder = match std::env::var_os("KEBLET_CONTROL_PLANE") {
        Some(folder) => PathBuf::from(folder),
        None => Cache::locate().peers(),
    };
    std::path::absolute(&folder).with_context(|| format!("no absolute path for {}", folder.display()))
}

/// Checks that all programs of a control plane exist.
///
/// # Errors
/// One is missing; the error names it.
pub fn check_programs(folder: &Path) -> Result<()> {
    let needed = Part::ALL.into_iter().map(Part::program).chain(["kubectl"]);
    if let Some(missing) = needed.map(|name| folder.join(name)).find(|path| !path.exists()) {
        bail!(
            "{} is missing: run `cargo xtask peers`, or name their folder in KEBLET_CONTROL_PLANE",
            missing.display()
        );
    }
    Ok(())
}
