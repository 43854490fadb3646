//! What all benchmarks are told alike, and what they do with it before they begin.

use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::bail;
use keblet_proto::cri::v1 as cri;

use super::report::Environment;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeEndpoint;
use keblet::runtime::RuntimeOptions;

/// Arguments of every benchmark.
#[derive(clap::Args, Clone, Debug)]
pub struct CommonArgs {
    /// Socket of the runtime [default: the first usual one that exists]
    #[arg(long, value_name = "unix:///PATH")]
    pub runtime_endpoint: Option<RuntimeEndpoint>,
    /// Image with the test program `/probe`; must be on the node
    #[arg(long, default_value = "keblet.local/probe:1")]
    pub image: String,
    /// Only these columns
    #[arg(long = "column", value_delimiter = ',')]
    pub columns: Vec<String>,
    /// The keblet to measure [default: the one beside this program or on the PATH]
    #[arg(long, value_name = "PATH")]
    pub agent: Option<PathBuf>,
    /// Folder for the report, as JSON and HTML
    #[arg(long, value_name = "DIR", default_value = "keblet-bench")]
    pub output: PathBuf,
    /// Fail when a target is missed or a pod went wrong
    #[arg(long)]
    pub check: bool,
}

/// What is measured on, and with.
pub(super) struct Ground {
    pub(super) endpoint: RuntimeEndpoint,
    pub(super) runtime: Runtime,
    pub(super) environment: Environment,
    /// The program.
    pub(super) keblet: PathBuf,
}

impl CommonArgs {
    /// Finds the runtime and the program, and sees that the image is there.
    pub(super) async fn ground(&self) -> anyhow::Result<Ground> {
        let found = || RuntimeEndpoint::discover(Path::new("/"));
        let endpoint = self.runtime_endpoint.clone().or_else(found);
        let endpoint = endpoint.context("no runtime socket in the usual places; name one with --runtime-endpoint")?;
        let runtime = Runtime::new(&endpoint, None, RuntimeOptions::default());
        let environment = Environment::read(runtime.version().await?)?;
        let image = cri::ImageSpec { image: self.image.clone(), ..Default::default() };
        if runtime.image_status(image).await?.is_none() {
            bail!("image {} is not on the node; import it or name another one with --image", self.image);
        }
        let keblet = match &self.agent {
            Some(agent) => agent.clone(),
            None => find_keblet()?,
        };
        Ok(Ground { endpoint, runtime, environment, keblet })
    }

    /// Those of all columns that are asked for. Each has a name of its own.
    pub(super) fn choose<C>(&self, all: Vec<C>, name: fn(&C) -> &str) -> anyhow::Result<Vec<C>> {
        let names: Vec<_> = all.iter().map(name).collect();
        if let Some((_, twice)) = names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)) {
            bail!("--peer {twice}: there is a column of that name already");
        }
        if let Some(unknown) = self.columns.iter().find(|wanted| !names.contains(&wanted.as_str())) {
            bail!("--column {unknown}: there is {}", names.join(", "));
        }
        let wanted = |column: &C| self.columns.is_empty() || self.columns.iter().any(|wanted| wanted == name(column));
        Ok(all.into_iter().filter(wanted).collect())
    }
}

/// The agent beside this program, else the first one on the PATH.
fn find_keblet() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot tell which program is running")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let beside = own.parent().map(Path::to_path_buf);
    let found = beside.into_iter().chain(std::env::split_paths(&path)).map(|folder| folder.join("keblet"));
    let found = found.into_iter().find(|program| program.is_file());
    found.with_context(|| format!("keblet is neither beside {} nor on the PATH; name one with --agent", own.display()))
}
