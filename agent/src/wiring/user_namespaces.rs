//! Ranges of ids for pods with a user namespace of their own.

use anyhow::Context as _;

use crate::config::Settings;
use crate::user_namespaces::StartError;
use crate::user_namespaces::UserNamespaces;
use crate::user_namespaces::node_range;
use crate::volumes::PodDirs;

/// Reads which ids pods can have and which are taken.
///
/// # Errors
/// The ids of the node cannot be determined or do not suffice; a pod's file cannot be read, or names ids that it cannot have.
pub(super) async fn open(settings: &Settings) -> anyhow::Result<UserNamespaces> {
    open_ranges(settings).await.context("create user namespace manager")
}

async fn open_ranges(settings: &Settings) -> anyhow::Result<UserNamespaces> {
    let kubelet = &settings.kubelet;
    let range = node_range(kubelet.user_namespaces.ids_per_pod, kubelet.max_pods).await?;
    let dirs = PodDirs::new(&settings.flags.root_dir);
    let opening = tokio::task::spawn_blocking(move || -> Result<UserNamespaces, StartError> {
        UserNamespaces::open(dirs, range)
    });
    Ok(opening.await.context("reading the ranges of pods")??)
}
