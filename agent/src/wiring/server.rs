//! The servers, from configuration to running task.

use std::sync::Arc;

use anyhow::Context as _;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::config::Settings;
use crate::server;
use crate::server::Handles;
use crate::server::Mounted;
use crate::server::secure;
use crate::server::secure::Reviews;
use crate::server::secure::Secure;
use crate::server::secure::Serving;
use crate::server::secure::ServingSource;

/// What the servers are made from, beside the settings.
pub struct Parts {
    /// Name of the node, and of the host a certificate is made for.
    pub node: String,
    /// What is read.
    pub handles: Handles,
    /// Paths of other rooms.
    pub mounted: Mounted,
    /// Access to the API server, if there is one.
    pub api: Option<kube::Client>,
    /// The serving certificate, if it is requested from the cluster.
    pub serving: Option<Serving>,
}

/// Opens the ports and answers until `shutdown`.
///
/// # Errors
/// What keeps the main port from being opened: the process is to end.
pub async fn start(settings: &Settings, parts: Parts, shutdown: CancellationToken) -> anyhow::Result<JoinHandle<()>> {
    let Parts { node, mut handles, mounted, api, serving } = parts;
    let options = server::Options::new(&settings.kubelet, &settings.gates);
    let main = if settings.kubelet.enable_server {
        let source = source(settings, &node, serving)?;
        show_pair(&mut handles, &source);
        let reviews = api.map(|client| Arc::new(client) as Arc<dyn Reviews>);
        let main = Secure::open(&settings.kubelet, &settings.gates, &node, source, reviews);
        Some(main.await.context("starting the main server")?)
    } else {
        None
    };
    Ok(tokio::spawn(server::run(options, handles, main, mounted, shutdown)))
}

/// Where the serving certificate comes from.
fn source(settings: &Settings, node: &str, serving: Option<Serving>) -> anyhow::Result<ServingSource> {
    if let Some(serving) = serving {
        return Ok(ServingSource::Given(serving));
    }
    let (config, gates) = (&settings.kubelet, &settings.gates);
    secure::serving_files(config, gates, &settings.flags.cert_dir, node).context("preparing the serving certificate")
}

/// Those who look at the configuration see the pair that was made.
fn show_pair(handles: &mut Handles, source: &ServingSource) {
    let ServingSource::Files { certificate, key, .. } = source else { return };
    let mut configz = serde_json::Value::clone(&handles.configz);
    configz["kubeletconfig"]["tlsCertFile"] = certificate.to_string_lossy().into();
    configz["kubeletconfig"]["tlsPrivateKeyFile"] = key.to_string_lossy().into();
    handles.configz = Arc::new(configz);
}
