//! An image registry on loopback for tests: the published `distribution`, which `cargo xtask setup` builds, and in front of it
//! a proxy through which runtimes pull, and which makes faults.
//!
//! ```text
//!  test ── push ─────────────────────────────▶ registry ── blobs ─▶ folder of the runtime
//!  runtime ── pull ─▶ proxy: faults, record ──────▲
//! ```
//! Plain HTTP, which runtimes use for registries on loopback.

mod api;
mod image;
mod process;
mod proxy;

use std::panic::resume_unwind;
use std::thread;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;
use keblet_peers::PrivateContainerd;
use tokio::runtime::Runtime;

pub use self::image::Image;
pub use self::proxy::Fault;
pub use self::proxy::Request;

use self::api::Api;
use self::process::Process;
use self::proxy::Proxy;

/// The tag of all images.
const TAG: &str = "1";

/// A registry and its proxy.
pub struct Registry {
    process: Process,
    api: Api,
    proxy: Proxy,
    background: Background,
}

impl Registry {
    /// Starts a registry, with its files in the folder of this runtime, which removes them. It demands one of these users and
    /// passwords of each request, unless there are none. `None` if the registry is not built: the test is skipped.
    ///
    /// # Errors
    /// The registry does not start, or no port is free.
    ///
    /// # Panics
    /// As [`keblet_skip::skip`].
    pub fn start(containerd: &mut PrivateContainerd, users: &[(&str, &str)]) -> Result<Option<Self>> {
        let program = Cache::locate().registry();
        if !program.exists() {
            keblet_skip::skip("no image registry: run `cargo xtask setup` with Go");
            return Ok(None);
        }
        let mut process = Process::new(program, &containerd.ready().dir.join("registry"), users)?;
        process.start(containerd)?;
        let background = Background::start()?;
        let http = reqwest::Client::builder().no_proxy().redirect(reqwest::redirect::Policy::none()).build();
        let http = http.context("cannot make an HTTP client")?;
        let api = Api::new(http.clone(), process.address(), users.first().copied());
        let proxy = background.run(Proxy::start(http, process.address()))?;
        Ok(Some(Self { process, api, proxy, background }))
    }

    /// The full name of an image: `127.0.0.1:port/repository:1`.
    pub fn image(&self, repository: &str) -> String {
        format!("{}:{TAG}", self.repository(repository))
    }

    /// The name of a repository in configurations of credentials, and before a digest.
    pub fn repository(&self, repository: &str) -> String {
        format!("{}/{repository}", self.proxy.address())
    }

    /// Pushes the image that [`Self::image`] names, in place of one that was pushed before.
    ///
    /// # Errors
    /// The registry does not accept it.
    pub fn push(&self, repository: &str, image: &Image) -> Result<()> {
        self.push_as(repository, TAG, image)
    }

    /// Pushes an image with another tag.
    ///
    /// # Errors
    /// The registry does not accept it.
    pub fn push_as(&self, repository: &str, tag: &str, image: &Image) -> Result<()> {
        self.proxy.add_layer(image.own_layer());
        let pushed = self.background.run(self.api.push(repository, tag, image));
        pushed.with_context(|| format!("cannot push {repository}:{tag}"))
    }

    /// From now on, pulls from this repository have this fault.
    pub fn set_fault(&self, repository: &str, fault: Fault) {
        self.proxy.set_fault(repository, Some(fault));
    }

    /// Removes the fault of a repository.
    pub fn remove_fault(&self, repository: &str) {
        self.proxy.set_fault(repository, None);
    }

    /// Whether a layer of the repository is being held in the middle ([`Fault::Held`]).
    pub fn is_held(&self, repository: &str) -> bool {
        self.proxy.is_held(repository)
    }

    /// The requests of runtimes since the last call.
    pub fn take_requests(&self) -> Vec<Request> {
        self.proxy.take_requests()
    }

    /// Kills the registry with SIGKILL. The proxy remains, and closes connections without an answer.
    ///
    /// # Errors
    /// It cannot be killed or waited for.
    pub fn kill(&mut self) -> Result<()> {
        self.process.kill()
    }

    /// Starts it again, with the images that it had.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn restart(&mut self, containerd: &mut PrivateContainerd) -> Result<()> {
        self.process.start(containerd)
    }
}

/// Runs the proxy, and requests of tests, which may be asynchronous themselves.
struct Background(Option<Runtime>);

impl Background {
    fn start() -> Result<Self> {
        Ok(Self(Some(Runtime::new().context("cannot start the runtime of the registry's proxy")?)))
    }

    /// Waits for the future, on a thread of its own: that of an asynchronous test must not.
    fn run<T: Send>(&self, future: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let runtime = self.0.as_ref().context("the registry's proxy has ended")?;
        let ended = thread::scope(|scope| scope.spawn(|| runtime.block_on(future)).join());
        ended.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // Without waiting for its tasks, which an asynchronous test must not either.
        self.0.take().into_iter().for_each(Runtime::shutdown_background);
    }
}
