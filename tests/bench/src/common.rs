//! Arguments of all benchmarks, and checks before a benchmark.

use std::path::Path;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeEndpoint;
use keblet::runtime::RuntimeOptions;
use keblet_proto::cri::v1 as cri;

use super::participant::Participant;
use super::report::Environment;

/// Arguments of every benchmark.
#[derive(clap::Args, Clone, Debug)]
pub struct CommonArgs {
    /// Socket of the runtime [default: the first existing one of the usual paths]
    #[arg(long, value_name = "unix:///PATH")]
    pub runtime_endpoint: Option<RuntimeEndpoint>,
    /// Image with the test program `/probe`; must exist on the node
    #[arg(long, default_value = "keblet.local/probe:1")]
    pub image: String,
    /// Measure only these participants
    #[arg(long = "participant", value_name = "NAME", value_delimiter = ',')]
    pub participants: Vec<String>,
    /// The keblet to measure [default: the one beside this program or on the PATH]
    #[arg(long, value_name = "PATH")]
    pub agent: Option<PathBuf>,
    /// Measure the agent also with the KebletConfiguration of FILE, as participant `keblet NAME`
    #[arg(long = "agent-variant", value_name = "NAME=FILE")]
    pub variants: Vec<Variant>,
    /// Measure everything this many times, the participants in rotating order
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// Observe idle agents only in the first of these runs
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub idle_runs: u32,
    /// Folder for the report: JSON of each run and of all, Markdown and HTML
    #[arg(long, value_name = "DIR", default_value = "keblet-bench")]
    pub output: PathBuf,
    /// The commit that is measured, for the report
    #[arg(long, default_value = "unknown")]
    pub commit: String,
}

/// keblet in another configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Variant {
    /// The suffix of its name, after `keblet`.
    pub name: String,
    /// A KebletConfiguration.
    pub file: PathBuf,
}

impl FromStr for Variant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, file) = name_and_value(text, "NAME=FILE")?;
        Ok(Self { name, file: file.into() })
    }
}

/// Another node agent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Its name in the report.
    pub name: String,
    /// A shell command with placeholders.
    pub command: String,
}

impl Peer {
    pub(crate) fn uses(&self, placeholder: &str) -> bool {
        self.command.contains(placeholder)
    }
}

impl FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, command) = name_and_value(text, "NAME=COMMAND")?;
        Ok(Self { name, command })
    }
}

fn name_and_value(text: &str, form: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() && !value.trim().is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("expected {form}, neither of them empty")),
    }
}

/// What every benchmark needs: a runtime with the image, and the agent's program.
pub(crate) struct Prerequisites {
    pub(crate) endpoint: RuntimeEndpoint,
    pub(crate) runtime: Runtime,
    pub(crate) environment: Environment,
    /// The agent's program.
    pub(crate) keblet: PathBuf,
}

impl CommonArgs {
    /// Finds the runtime and the program, and checks that the image exists.
    ///
    /// # Errors
    /// One of them is missing, or the runtime does not respond.
    pub(crate) async fn prerequisites(&self) -> anyhow::Result<Prerequisites> {
        let found = || RuntimeEndpoint::discover(Path::new("/"));
        let endpoint = self.runtime_endpoint.clone().or_else(found);
        let endpoint = endpoint.context("no runtime socket in the usual places; set one with --runtime-endpoint")?;
        let runtime = Runtime::new(&endpoint, None, RuntimeOptions::default());
        let environment = Environment::read(runtime.version().await?)?;
        let image = cri::ImageSpec { image: self.image.clone(), ..Default::default() };
        if runtime.image_status(image).await?.is_none() {
            bail!("image {} is not on the node; import it or set another one with --image", self.image);
        }
        let keblet = match &self.agent {
            Some(agent) => agent.clone(),
            None => find_keblet()?,
        };
        Ok(Prerequisites { endpoint, runtime, environment, keblet })
    }

    /// The variants of the agent.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn variants(&self) -> anyhow::Result<Vec<Participant>> {
        let read = |Variant { name, file }: &Variant| {
            let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
            Ok(Participant::Keblet { name: format!("keblet {name}"), configuration: Some(text) })
        };
        self.variants.iter().map(read).collect()
    }
}

/// Makes the kernel free the memory cgroups that earlier pods have left, then reads the agent's program again: a removed
/// cgroup stays until the last cached object that is charged to it is reclaimed, and thousands of them slow down everything
/// that follows. Without the permission it does nothing.
pub(crate) fn free_removed_cgroups(keblet: &Path) {
    // 2: dentries and inodes, with the page cache of the latter.
    if let Err(error) = std::fs::write("/proc/sys/vm/drop_caches", "2") {
        tracing::warn!(%error, "cannot drop the kernel's caches; removed cgroups slow down later measurements");
        return;
    }
    // An agent whose program has to be read from the disk starts seconds later than a bare client.
    if let Err(error) = std::fs::read(keblet) {
        tracing::warn!(%error, path = %keblet.display(), "cannot read the agent's program");
    }
}

/// The agent beside this program, else the first one on the PATH.
fn find_keblet() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot determine the path of this program")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let beside = own.parent().map(Path::to_path_buf);
    let mut programs = beside.into_iter().chain(std::env::split_paths(&path)).map(|folder| folder.join("keblet"));
    let found = programs.find(|program| program.is_file());
    found.with_context(|| format!("keblet is neither beside {} nor on the PATH; set one with --agent", own.display()))
}

/// Parses a duration of at least a second.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration < Duration::from_secs(1) => Err("at least a second".to_owned()),
        Ok(duration) => Ok(duration),
        Err(error) => Err(error.to_string()),
    }
}
