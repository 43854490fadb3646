//! The handle of a private control plane: etcd, API server, controller manager and scheduler on an address of their own.
//!
//! Owns the talk with `private-control-plane`, which owns the processes, their certificates and their folder. Refuses to
//! speak the Kubernetes API for its users: they have kubectl and a kubeconfig.

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
    /// The store behind the API server.
    Etcd,
    /// The API server.
    ApiServer,
    /// Controllers, garbage collection, signers, service accounts.
    ControllerManager,
    /// Binds pods to nodes.
    Scheduler,
    /// Serves what `kubectl top` shows. Not started with the others: [`ControlPlane::start_part`] does.
    MetricsServer,
}

impl Part {
    /// All of them, in the order in which they can be started.
    pub const ALL: [Self; 5] =
        [Self::Etcd, Self::ApiServer, Self::ControllerManager, Self::Scheduler, Self::MetricsServer];

    /// The name of its program, which is also the name of its log.
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

/// What `private-control-plane` does when told.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Kill with SIGKILL.
    Kill(Part),
    /// End with SIGTERM and wait.
    Stop(Part),
    /// Start, and wait until it is ready.
    Start(Part),
    /// Stop with SIGSTOP: it stays, holds its connections and answers nothing.
    Freeze(Part),
    /// Let it go on.
    Thaw(Part),
    /// Forget the store's history up to now.
    Compact,
    /// Sign a certificate.
    Issue(Identity),
}

/// Somebody whom the control plane's authority vouches for, as client and as server.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Identity {
    /// The user name of a client.
    pub common_name: String,
    /// The group of a client.
    pub group: Option<String>,
    /// DNS names and IP addresses of a server.
    pub names: Vec<String>,
    /// From when it is valid; an hour ago if not given.
    pub not_before: Option<SystemTime>,
    /// Until when it is valid; a year from now if not given.
    pub not_after: Option<SystemTime>,
}

/// The files of a signed identity. They lie in the control plane's folder.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Credentials {
    /// The certificate, PEM.
    pub certificate: PathBuf,
    /// Its private key, PEM.
    pub key: PathBuf,
    /// Access to the API server with both, which it names by path.
    pub kubeconfig: PathBuf,
}

/// What a node needs to join.
#[derive(Clone, Debug)]
pub struct NodeAccess {
    /// The node's name.
    pub name: String,
    /// The node's address.
    pub address: IpAddr,
    /// `system:node:NAME` in group `system:nodes`.
    pub client: Credentials,
    /// What the node serves with; the API server trusts it.
    pub serving: Credentials,
    /// Whose client certificates the node accepts.
    pub client_ca: PathBuf,
}

/// What a private control plane is started with.
#[derive(Clone, Debug, Default)]
pub struct ControlPlaneOptions {
    /// The folder of the programs, as `cargo xtask peers` makes it; found by [`find_programs`] if not given.
    pub programs: Option<PathBuf>,
    /// The supervisor, if it does not lie beside the running program.
    pub supervisor: Option<PathBuf>,
    /// Further arguments of kube-apiserver.
    pub api_server_arguments: Vec<String>,
}

/// What a running control plane offers.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ControlPlaneReady {
    /// The folder of all its files: certificates, kubeconfigs, data, and `PROGRAM.log` of each part.
    pub dir: PathBuf,
    /// The folder of the programs, kubectl among them.
    pub programs: PathBuf,
    /// The API server, `https://…`.
    pub server: String,
    /// The authority that signed all certificates, PEM.
    pub ca: PathBuf,
    /// Access for an administrator.
    pub kubeconfig: PathBuf,
    /// Access with a bootstrap token, to request a node's client certificate.
    pub bootstrap_kubeconfig: PathBuf,
}

impl ControlPlaneReady {
    /// The real kubectl.
    pub fn kubectl(&self) -> PathBuf {
        self.programs.join("kubectl")
    }

    /// What a part printed.
    pub fn log(&self, part: Part) -> PathBuf {
        self.dir.join(format!("{}.log", part.program()))
    }
}

/// A control plane with its own address, folder and certificates. Dropping it ends and removes it.
#[derive(Debug)]
pub struct ControlPlane {
    supervisor: Supervisor,
    ready: ControlPlaneReady,
}

impl ControlPlane {
    /// Starts one and waits until it is ready for nodes and pods.
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

    /// What it offers.
    pub fn ready(&self) -> &ControlPlaneReady {
        &self.ready
    }

    /// Kills a part with SIGKILL.
    pub fn kill(&mut self, part: Part) -> Result<()> {
        self.order(&Order::Kill(part)).with_context(|| format!("cannot kill {}", part.program()))
    }

    /// Ends a part with SIGTERM and waits.
    pub fn stop_part(&mut self, part: Part) -> Result<()> {
        self.order(&Order::Stop(part)).with_context(|| format!("cannot stop {}", part.program()))
    }

    /// Starts a part that does not run and waits until it is ready.
    pub fn start_part(&mut self, part: Part) -> Result<()> {
        self.order(&Order::Start(part)).with_context(|| format!("cannot start {}", part.program()))
    }

    /// Lets a part hang: it keeps its connections and answers nothing.
    pub fn freeze(&mut self, part: Part) -> Result<()> {
        self.order(&Order::Freeze(part)).with_context(|| format!("cannot freeze {}", part.program()))
    }

    /// Lets a frozen part go on.
    pub fn thaw(&mut self, part: Part) -> Result<()> {
        self.order(&Order::Thaw(part)).with_context(|| format!("cannot thaw {}", part.program()))
    }

    /// Makes etcd forget its history and returns the revision up to which it did.
    ///
    /// A running API server still has recent changes in memory. For `410 Gone` on an old resource version, restart it
    /// afterwards.
    pub fn compact(&mut self) -> Result<i64> {
        self.order(&Order::Compact).context("cannot compact etcd")
    }

    /// Has a certificate signed.
    pub fn issue(&mut self, identity: &Identity) -> Result<Credentials> {
        self.order(&Order::Issue(identity.clone()))
            .with_context(|| format!("cannot issue a certificate for {}", identity.common_name))
    }

    /// Has the certificates of a node signed, which then may join.
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

    /// Ends all parts, removes the folder, and says what could not be removed.
    pub fn stop(self) -> Result<()> {
        self.supervisor.stop()
    }

    fn order<T: for<'de> Deserialize<'de>>(&mut self, order: &Order) -> Result<T> {
        let order = serde_json::to_string(order).context("cannot encode the order")?;
        self.supervisor.order(&order)
    }
}

/// Where upstream's programs are: `KEBLET_CONTROL_PLANE`, or where `cargo xtask peers` puts them.
pub fn find_programs() -> Result<PathBuf> {
    let folder = match std::env::var_os("KEBLET_CONTROL_PLANE") {
        Some(folder) => PathBuf::from(folder),
        None => Cache::locate().peers(),
    };
    std::path::absolute(&folder).with_context(|| format!("no absolute path for {}", folder.display()))
}

/// Says which program is missing for a control plane.
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
