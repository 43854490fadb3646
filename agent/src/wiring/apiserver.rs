//! Access to the API server, if there is any.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::apiserver::ApiServer;
use crate::apiserver::Options;
use crate::apiserver::kubeconfig;
use crate::apiserver::tls;
use crate::cli::version;
use crate::config::Settings;
use crate::metrics::Metrics;

/// The clients of the API server that `--kubeconfig` names; `None` on a standalone node.
///
/// # Errors
/// The kubeconfig, or something it refers to, is missing or unusable.
pub fn connect(settings: &Settings, metrics: &Arc<Metrics>) -> anyhow::Result<Option<ApiServer>> {
    tls::install_crypto();
    let file = &settings.flags.kubeconfig;
    if file.is_empty() {
        tracing::info!("no --kubeconfig: running standalone");
        return Ok(None);
    }
    let access = kubeconfig::load(Path::new(file))?;
    let api = ApiServer::connect(&access, &options(settings), metrics.clone())?;
    tracing::info!(server = %access.server, kubeconfig = file, "using the API server");
    Ok(Some(api))
}

fn options(settings: &Settings) -> Options {
    let kubelet = &settings.kubelet;
    let lease = Duration::from_secs(u64::try_from(kubelet.node_lease_duration_seconds).unwrap_or(0));
    Options {
        per_second: kubelet.kube_api_qps,
        burst: kubelet.kube_api_burst,
        events_per_second: kubelet.event_record_qps,
        events_burst: kubelet.event_burst,
        heartbeat_timeout: kubelet.node_status_update_frequency.std().min(lease),
        versions: (version::KEBLET, version::KUBERNETES),
    }
}
