//! The static pods that the runtime has when the agent starts.

use std::collections::BTreeMap;

use anyhow::Context as _;
use keblet_proto::cri::v1 as cri;

use crate::config::Settings;
use crate::model::Backoff;
use crate::model::ConfigSource;
use crate::model::runtime_keys;
use crate::runtime::FIRST_RETRY;
use crate::runtime::LAST_RETRY;
use crate::runtime::Runtime;
use crate::runtime::RuntimeError;
use crate::sources::adoption::Adoptions;
use crate::sources::adoption::StaticSandbox;
use crate::sources::static_pod::CONFIG_SOURCE;
use crate::workers::generate::names;

/// Reads them from the runtime. Without them the static pods of another kubelet would be replaced, so that this waits
/// until the runtime responds; cancelled by dropping it.
///
/// # Errors
/// The task that reads the record panicked.
pub(super) async fn find(settings: &Settings, runtime: &Runtime) -> anyhow::Result<Adoptions> {
    let mut backoff = Backoff::new(FIRST_RETRY, LAST_RETRY);
    let sandboxes = loop {
        match list(runtime).await {
            Ok(sandboxes) => break sandboxes,
            Err(error) => tracing::warn!(%error, "waiting for the list of static pods that run"),
        }
        tokio::time::sleep(backoff.failed(0.0)).await;
    };
    let root = settings.flags.root_dir.clone();
    let read = tokio::task::spawn_blocking(move || Adoptions::new(sandboxes, &root));
    read.await.context("reading the record of adopted static pods")
}

async fn list(runtime: &Runtime) -> Result<Vec<StaticSandbox>, RuntimeError> {
    let sandboxes = runtime.list_pod_sandboxes(cri::PodSandboxFilter::default()).await?;
    if !sandboxes.iter().any(is_from_file) {
        return Ok(Vec::new());
    }
    let containers = runtime.list_containers(cri::ContainerFilter::default()).await?;
    Ok(sandboxes.into_iter().filter(is_from_file).map(|sandbox| convert(sandbox, &containers)).collect())
}

fn is_from_file(sandbox: &cri::PodSandbox) -> bool {
    sandbox.annotations.get(CONFIG_SOURCE).is_some_and(|source| source == ConfigSource::File.as_str())
}

fn convert(sandbox: cri::PodSandbox, containers: &[cri::Container]) -> StaticSandbox {
    let label_of = |name: &str| sandbox.labels.get(name).cloned().unwrap_or_default();
    // The last instance of each, since its image may have been changed in place.
    let mut newest: BTreeMap<&str, &cri::Container> = BTreeMap::new();
    for container in containers.iter().filter(|container| container.pod_sandbox_id == sandbox.id) {
        let name = container.metadata.as_ref().map(|metadata| metadata.name.as_str()).unwrap_or_default();
        let known = newest.entry(name).or_insert(container);
        if container.created_at > known.created_at {
            *known = container;
        }
    }
    let hash = |container: &cri::Container| {
        container.annotations.get(runtime_keys::HASH).and_then(|text| u64::from_str_radix(text, 16).ok()).unwrap_or(0)
    };
    StaticSandbox {
        uid: label_of(runtime_keys::POD_UID),
        namespace: label_of(runtime_keys::POD_NAMESPACE),
        name: label_of(runtime_keys::POD_NAME),
        ready: sandbox.state == cri::PodSandboxState::SandboxReady as i32,
        created_at: sandbox.created_at,
        marked: names::static_uid_of_mark(&sandbox.annotations).map(str::to_owned),
        containers: newest.into_iter().map(|(name, container)| (name.to_owned(), hash(container))).collect(),
    }
}
