//! The servers, from configuration to running task.

use std::sync::Arc;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::Settings;
use crate::server;
use crate::server::Configz;
use crate::server::Handles;
use crate::server::Mounted;
use crate::server::secure;
use crate::server::secure::ApiReviews;
use crate::server::secure::Reviews;
use crate::server::secure::Secure;
use crate::server::secure::SecureOptions;
use crate::server::secure::Serving;
use crate::server::secure::ServingSource;

/// Parts of the servers, beside the settings.
pub(super) struct Parts {
    /// The main port; `None` if it is disabled.
    pub listener: Option<TcpListener>,
    /// Name of the node, and of the host a certificate is made for.
    pub node: String,
    /// State that handlers read.
    pub handles: Handles,
    /// Routers of other modules.
    pub mounted: Mounted,
    /// The client for token and access reviews, if there is an API server.
    pub reviews: Option<kube::Client>,
    /// The serving certificate, if it is requested from the cluster.
    pub serving: Option<Serving>,
}

/// Binds the main port; `None` if it is disabled. Connections wait until [`start`] serves them, even while the first client
/// certificate is requested: clients of a kubelet limit the time of a TLS handshake.
///
/// # Errors
/// The port cannot be bound within 5 s.
pub(super) async fn bind(settings: &Settings) -> anyhow::Result<Option<TcpListener>> {
    if !settings.kubelet.enable_server {
        return Ok(None);
    }
    secure::bind(&settings.kubelet).await.map(Some).context("starting the main server")
}

/// Opens the other ports and answers until `shutdown`, all in tasks of its own: keys may have to be made first, and the rest
/// of the agent need not wait for them. If the read-only port cannot be opened, the main one cannot be served, or the task
/// panics, `shutdown` is cancelled, and the task's result says why.
pub(super) fn start(settings: &Settings, parts: Parts, shutdown: CancellationToken) -> JoinHandle<anyhow::Result<()>> {
    let options = server::Options::new(&settings.kubelet, &settings.gates);
    let plain = server::run(options.clone(), parts.handles.clone(), parts.mounted.clone(), shutdown.clone());
    let settings = settings.clone();
    let ending = shutdown.clone();
    let serving = async move {
        let plain = async { plain.await.context("starting the servers") };
        tokio::try_join!(plain, main(&settings, options, parts, shutdown)).map(drop)
    };
    tokio::spawn(or_end(serving, ending))
}

/// Cancels `shutdown` if this fails or panics: without its servers the agent only looks healthy. Logs why: another part may
/// not end in time, which is then the error that the agent ends with.
async fn or_end(serving: impl Future<Output = anyhow::Result<()>>, shutdown: CancellationToken) -> anyhow::Result<()> {
    let ending = shutdown.drop_guard();
    serving.await.inspect_err(|error| tracing::error!("stopping, as a server has failed: {error:#}"))?;
    ending.disarm();
    Ok(())
}

/// Waits for the servers if the agent stops. Called before the results of its other parts are returned: servers that failed
/// have cancelled `shutdown`, by which others may have failed.
///
/// # Errors
/// Why the servers failed.
pub(super) async fn stopped(
    serving: JoinHandle<anyhow::Result<()>>,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    if shutdown.is_cancelled() { serving.await.context("ending the servers")? } else { Ok(()) }
}

async fn main(
    settings: &Settings,
    options: server::Options,
    parts: Parts,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let Parts { listener, node, handles, mounted, reviews, serving } = parts;
    let Some(listener) = listener else { return Ok(()) };
    let source = match serving {
        Some(serving) => ServingSource::Given(serving),
        None => files(settings.clone(), node.clone()).await?,
    };
    show_pair(&handles.configz, &source);
    let metrics = handles.metrics.clone();
    let reviews = reviews.map(|client| Arc::new(ApiReviews { client, metrics: metrics.clone() }) as Arc<dyn Reviews>);
    let (config, gates) = (&settings.kubelet, &settings.gates);
    let secured = SecureOptions { config, gates, node: &node, serving: source, reviews, metrics: &metrics };
    let main = Secure::open(listener, secured).context("starting the main server")?;
    server::run_main(main, options, handles, mounted, shutdown).await;
    Ok(())
}

/// The serving pair in files, made if there is none.
async fn files(settings: Settings, node: String) -> anyhow::Result<ServingSource> {
    let make = move || {
        let (config, gates) = (&settings.kubelet, &settings.gates);
        secure::serving_files(config, gates, &settings.flags.cert_dir, &node)
    };
    let made = tokio::task::spawn_blocking(make).await.context("making the serving certificate")?;
    made.context("preparing the serving certificate")
}

/// Has `/configz` show the files of the serving pair.
fn show_pair(configz: &Configz, source: &ServingSource) {
    let ServingSource::Files { certificate, key, .. } = source else { return };
    configz.set("tlsCertFile", certificate.to_string_lossy());
    configz.set("tlsPrivateKeyFile", key.to_string_lossy());
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::cli::logging::Verbosity;
    use crate::config::FlagValues;
    use crate::config::load;
    use crate::wiring::run;

    /// Settings of an agent with this main port, and with a root directory in `folder` that is not there.
    fn settings(folder: &Path, port: u16, enable_server: bool) -> Settings {
        let (file, root) = (folder.join("config.json"), folder.join("root"));
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": port,
            "healthzPort": 0,
            "enableServer": enable_server,
        });
        std::fs::write(&file, config.to_string()).expect("a file");
        let flags = [("config", file.to_str().expect("a path")), ("root-dir", root.to_str().expect("a path"))];
        load(&flags.into_iter().collect::<FlagValues>()).expect("settings")
    }

    async fn port_in_use() -> (TcpListener, u16) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        (listener, port)
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_beside_another_one_ends_before_it_changes_anything() {
        let (folder, (_other, port)) = (tempfile::tempdir().expect("a folder"), port_in_use().await);
        let settings = settings(folder.path(), port, true);
        let root = settings.flags.root_dir.clone();
        let ended = run(settings, Verbosity::unchanging(), CancellationToken::new()).await;
        let error = format!("{:#}", ended.expect_err("the other agent has its port"));
        assert!(error.starts_with("starting the main server: "), "{error}");
        assert!(!root.exists(), "an agent makes its directories before it connects to anything");
    }

    #[tokio::test]
    async fn there_is_a_main_port_unless_it_is_disabled() {
        let (folder, (other, port)) = (tempfile::tempdir().expect("a folder"), port_in_use().await);
        assert!(bind(&settings(folder.path(), port, false)).await.expect("nothing to wait for").is_none());
        drop(other);
        let listener = bind(&settings(folder.path(), port, true)).await.expect("bound").expect("it is enabled");
        assert_eq!(listener.local_addr().expect("an address").port(), port);
    }

    async fn panics() -> anyhow::Result<()> {
        panic!("this test makes it panic")
    }

    #[tokio::test]
    async fn the_agent_ends_with_servers_that_fail_or_panic() {
        let shutdown = CancellationToken::new();
        tokio::spawn(or_end(async { Ok(()) }, shutdown.clone())).await.expect("no panic").expect("served");
        assert!(!shutdown.is_cancelled(), "there may be none");
        tokio::spawn(or_end(panics(), shutdown.clone())).await.expect_err("it panics");
        assert!(shutdown.is_cancelled());
        let shutdown = CancellationToken::new();
        or_end(async { anyhow::bail!("address in use") }, shutdown.clone()).await.expect_err("it fails");
        assert!(shutdown.is_cancelled());
    }

    #[tokio::test]
    async fn servers_that_fail_are_the_reason_why_the_agent_stops() {
        let shutdown = CancellationToken::new();
        let serving = tokio::spawn(or_end(async { anyhow::bail!("address in use") }, shutdown.clone()));
        shutdown.cancelled().await;
        let error = stopped(serving, &shutdown).await.expect_err("they failed");
        assert_eq!(format!("{error:#}"), "address in use");
        let serving = tokio::spawn(std::future::pending());
        stopped(serving, &CancellationToken::new()).await.expect("those that serve are not waited for");
    }
}
