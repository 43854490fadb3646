//! The servers, from configuration to running task.

use std::sync::Arc;

use anyhow::Context as _;
use tokio::sync::oneshot;
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
use crate::server::secure::Serving;
use crate::server::secure::ServingSource;

/// Parts of the servers, beside the settings.
pub(super) struct Parts {
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

/// The servers in their task.
pub(super) struct Servers {
    /// The task.
    pub ended: JoinHandle<anyhow::Result<()>>,
    /// Receives once the main port is bound, or at once if there is none; closed if it cannot be bound.
    pub bound: oneshot::Receiver<()>,
}

/// Opens the ports and answers until `shutdown`, all in tasks of its own: keys may have to be made first, and the rest
/// of the agent need not wait for them. If the main or the read-only port cannot be opened, or the task panics, `shutdown`
/// is cancelled, and the task's result says why.
pub(super) fn start(settings: &Settings, parts: Parts, shutdown: CancellationToken) -> Servers {
    let (binding, bound) = oneshot::channel();
    let options = server::Options::new(&settings.kubelet, &settings.gates);
    let plain = server::run(options.clone(), parts.handles.clone(), parts.mounted.clone(), shutdown.clone());
    let settings = settings.clone();
    let ending = shutdown.clone();
    let serving = async move {
        let plain = async { plain.await.context("starting the servers") };
        let main = async {
            if settings.kubelet.enable_server {
                return main(&settings, options, parts, binding, shutdown).await;
            }
            announce(binding);
            Ok(())
        };
        tokio::try_join!(plain, main).map(drop)
    };
    Servers { ended: tokio::spawn(or_end(serving, ending)), bound }
}

/// The receiver is dropped if the agent ends.
fn announce(binding: oneshot::Sender<()>) {
    let _ = binding.send(());
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
    binding: oneshot::Sender<()>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let Parts { node, handles, mounted, reviews, serving } = parts;
    // First: the rest of the agent waits for it.
    let Some(listener) = shutdown.run_until_cancelled(secure::bind(&settings.kubelet)).await else { return Ok(()) };
    let listener = listener.context("starting the main server")?;
    announce(binding);
    let source = match serving {
        Some(serving) => ServingSource::Given(serving),
        None => files(settings.clone(), node.clone()).await?,
    };
    show_pair(&handles.configz, &source);
    let metrics = handles.metrics.clone();
    let reviews = reviews.map(|client| Arc::new(ApiReviews { client, metrics: metrics.clone() }) as Arc<dyn Reviews>);
    let opened = Secure::open(listener, &settings.kubelet, &settings.gates, &node, source, reviews, &metrics);
    let main = opened.context("starting the main server")?;
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
    use axum::Router;
    use futures_util::future::BoxFuture;
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;
    use tokio::net::TcpListener;

    use super::*;
    use crate::config::FlagValues;
    use crate::config::load;
    use crate::metrics::Metrics;
    use crate::server::AgentState;
    use crate::server::SensorReport;

    /// An agent that has nothing.
    struct NoAgent;

    impl AgentState for NoAgent {
        fn pods(&self) -> Vec<Arc<Pod>> {
            Vec::new()
        }

        fn running_pods(&self) -> Result<Vec<Arc<Pod>>, String> {
            Ok(Vec::new())
        }

        fn sensors(&self) -> Vec<SensorReport> {
            Vec::new()
        }

        fn sync_loop_age(&self) -> Option<std::time::Duration> {
            None
        }

        fn runtime_ready(&self) -> Result<(), String> {
            Ok(())
        }

        fn refresh_metrics(&self) -> BoxFuture<'_, ()> {
            Box::pin(async {})
        }

        fn set_verbosity(&self, _: u32) -> Result<(), String> {
            Ok(())
        }
    }

    /// Starts the servers of an agent with this main port, without the others.
    fn start_on(port: u16, enable_server: bool, shutdown: &CancellationToken) -> Servers {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("config.json");
        let config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": port,
            "healthzPort": 0,
            "enableServer": enable_server,
            // A pair in files is not there: the server ends once it is bound.
            "tlsCertFile": folder.path().join("none.crt"),
            "tlsPrivateKeyFile": folder.path().join("none.key"),
        });
        std::fs::write(&file, config.to_string()).expect("a file");
        let flags: FlagValues = [("config", file.to_str().expect("a path"))].into_iter().collect();
        let handles = Handles {
            agent: Arc::new(NoAgent),
            configz: Configz::new(json!({ "kubeletconfig": {} })),
            version: "v1.36.3",
            flags: Arc::default(),
            metrics: Metrics::new(),
        };
        let mounted = Mounted { debug: Router::new(), stats: Router::new() };
        let parts = Parts { node: "n1".to_owned(), handles, mounted, reviews: None, serving: None };
        start(&load(&flags).expect("settings"), parts, shutdown.clone())
    }

    /// Else an agent that is started beside another one acts on its pods until it gives up.
    #[tokio::test(start_paused = true)]
    async fn the_agent_learns_whether_its_port_is_bound() {
        let other = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let port = other.local_addr().expect("an address").port();
        let shutdown = CancellationToken::new();
        let servers = start_on(port, true, &shutdown);
        servers.bound.await.expect_err("another agent has it");
        servers.ended.await.expect("no panic").expect_err("it cannot serve");
        assert!(shutdown.is_cancelled());
        start_on(port, false, &CancellationToken::new()).bound.await.expect("there is no port to wait for");
        drop(other);
        start_on(port, true, &CancellationToken::new()).bound.await.expect("bound, whatever comes after");
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
