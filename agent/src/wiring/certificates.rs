//! The serving certificate that the cluster signs, where the configuration asks for one.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Node;
use rustls::sign::CertifiedKey;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::apiserver::ApiServer;
use crate::certificates::Pair;
use crate::certificates::Purpose;
use crate::certificates::RotationManager;
use crate::certificates::ServerHealth;
use crate::certificates::Store;
use crate::certificates::Template;
use crate::config::Feature;
use crate::config::Settings;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::named;

/// The serving certificate; `None` until the first one is signed, and while the last one has expired.
pub(super) type Serving = watch::Receiver<Option<Arc<CertifiedKey>>>;

/// What the serving certificate is made from.
pub(super) struct Parts<'a> {
    /// The configuration.
    pub settings: &'a Settings,
    /// The node's name.
    pub node_name: &'a str,
    /// The API server; `None` when standalone.
    pub api: Option<&'a ApiServer>,
    /// The own Node as last seen.
    pub node: watch::Receiver<Option<Arc<Node>>>,
    /// What is counted.
    pub metrics: &'a Arc<Metrics>,
}

/// Keeps the serving certificate of `serverTLSBootstrap` valid, in `tasks`; `None` if that is off. Its names follow the
/// addresses of the Node as the API server has them. Without an API server an existing pair is served as it is.
///
/// # Errors
/// A pair is there but cannot be used.
pub(super) fn serving(
    parts: Parts<'_>,
    tasks: &mut JoinSet<()>,
    shutdown: &CancellationToken,
) -> anyhow::Result<Option<Serving>> {
    let Parts { settings, node_name, api, node, metrics } = parts;
    if !settings.kubelet.server_tls_bootstrap || !settings.gates.enabled(Feature::RotateKubeletServerCertificate) {
        return Ok(None);
    }
    let store = store(settings);
    let first = store.load().context("serving certificate")?.map(Arc::new);
    let expires = first.as_ref().map(|pair| pair.leaf.not_after);
    let (current, seen) = watch::channel(first);
    let (shown, serving) = watch::channel(None);
    tasks.spawn(named("serving certificate", hand_on(seen, shown, shutdown.clone())));
    let Some(api) = api else {
        metrics.certificates.serving_expires(expires, Clock::System);
        let forever = shutdown.clone();
        tasks.spawn(async move {
            forever.cancelled().await;
            drop(current);
        });
        return Ok(Some(serving));
    };
    let (templates, template) = watch::channel(None);
    let following = follow_addresses(node_name.to_owned(), node, templates, shutdown.clone());
    tasks.spawn(named("names of the serving certificate", following));
    let manager = RotationManager {
        store,
        template,
        clients: Box::new(api.clone()),
        clock: Clock::System,
        metrics: metrics.clone(),
        server_health: ServerHealth::default(),
        at_once: false,
    };
    tasks.spawn(named("rotation of the serving certificate", manager.run(current, shutdown.clone())));
    Ok(Some(serving))
}

/// Where the certificate is kept: in the files of the configuration, or else in the certificate directory.
fn store(settings: &Settings) -> Store {
    let kubelet = &settings.kubelet;
    let configured = [&kubelet.tls_cert_file, &kubelet.tls_private_key_file].map(PathBuf::from);
    let configured = configured.iter().all(|path| !path.as_os_str().is_empty()).then(|| configured.clone().into());
    Store::new(&settings.flags.cert_dir, Purpose::Serving, configured)
}

async fn follow_addresses(
    node_name: String,
    mut nodes: watch::Receiver<Option<Arc<Node>>>,
    templates: watch::Sender<Option<Template>>,
    shutdown: CancellationToken,
) {
    let following = async {
        loop {
            let addresses = nodes.borrow_and_update().as_ref().and_then(|node| node.status.clone()?.addresses);
            // A deleted Node removes no names.
            if let Some(template) = Template::serving(&node_name, &addresses.unwrap_or_default()) {
                templates.send_if_modified(|known| {
                    let changed = known.as_ref() != Some(&template);
                    *known = Some(template);
                    changed
                });
            }
            if nodes.changed().await.is_err() {
                // Keeps the last names.
                return std::future::pending().await;
            }
        }
    };
    shutdown.run_until_cancelled(following).await;
}

async fn hand_on(
    mut pairs: watch::Receiver<Option<Arc<Pair>>>,
    shown: watch::Sender<Option<Arc<CertifiedKey>>>,
    shutdown: CancellationToken,
) {
    let handing = async {
        loop {
            shown.send_replace(pairs.borrow_and_update().as_ref().map(|pair| pair.certified.clone()));
            if pairs.changed().await.is_err() {
                return;
            }
        }
    };
    shutdown.run_until_cancelled(handing).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apiserver::test_server::Authority;

    #[tokio::test]
    async fn without_an_api_server_the_remaining_lifetime_is_that_of_the_existing_pair() {
        let folder = tempfile::tempdir().expect("a folder");
        let (certificate, key) = Authority::new().issue("n");
        for (name, text) in [("kubelet-server.crt", certificate), ("kubelet-server.key", key)] {
            std::fs::write(folder.path().join(name), text).expect("written");
        }
        let place = folder.path().to_string_lossy();
        let flags = [("cert-dir", &*place), ("rotate-server-certificates", "true")];
        let settings = crate::config::load(&flags.into_iter().collect()).expect("valid settings");
        let (metrics, mut tasks, shutdown) = (Metrics::new(), JoinSet::new(), CancellationToken::new());
        let node = watch::channel(None).1;
        let parts = Parts { settings: &settings, node_name: "n", api: None, node, metrics: &metrics };
        let served = serving(parts, &mut tasks, &shutdown).expect("a pair");
        assert!(served.is_some() && tasks.len() == 2, "the caller watches {} tasks", tasks.len());
        let text = metrics.render().expect("metrics");
        let left = text.lines().find_map(|line| line.strip_prefix("kubelet_certificate_manager_server_ttl_seconds "));
        let left: f64 = left.expect("a gauge").parse().expect("a number");
        assert!(left > 1e6 && left.is_finite(), "{left}");
    }
}
