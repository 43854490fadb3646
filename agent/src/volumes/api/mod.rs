//! Volumes made from API objects and the pod itself: configMap, secret, downwardAPI, projected. What is to be in them is
//! found out first (`resolve`, which may wait for the API server), then written in one step (`atomic`, which blocks).
//!
//! They belong to the agent: containers see them read-only, and a change of what they are made from changes them while
//! the containers run. Refuses trust bundles and pod certificates.

mod atomic;
mod content;
mod nested;
mod ownership;
mod payload;
mod resolve;
#[cfg(test)]
mod tests;
mod tmpfs;

use std::path::Path;

use k8s_openapi::api::core::v1::Volume;

pub use payload::InvalidPath;

pub(super) use atomic::Written;
pub(super) use ownership::Owners;
pub(super) use payload::Payload;
pub(super) use resolve::Resolver;
pub(super) use resolve::earliest;
pub(super) use tmpfs::can_avoid_swap;
pub(super) use tmpfs::machine_swaps;

use super::PodDirs;
use super::VolumeError;
use super::error::OnPath as _;

/// The kinds of volumes made from API objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    ConfigMap,
    Secret,
    DownwardApi,
    Projected,
}

impl Kind {
    /// Of a volume; `None` if something else provides it.
    pub(super) fn of(volume: &Volume) -> Option<Self> {
        let kinds = [
            (volume.config_map.is_some(), Self::ConfigMap),
            (volume.secret.is_some(), Self::Secret),
            (volume.downward_api.is_some(), Self::DownwardApi),
            (volume.projected.is_some(), Self::Projected),
        ];
        kinds.into_iter().find_map(|(is, kind)| is.then_some(kind))
    }

    /// The plugin's name with its slash escaped.
    pub(super) fn plugin(self) -> &'static str {
        match self {
            Self::ConfigMap => "kubernetes.io~configmap",
            Self::Secret => "kubernetes.io~secret",
            Self::DownwardApi => "kubernetes.io~downward-api",
            Self::Projected => "kubernetes.io~projected",
        }
    }

    /// Its content never reaches a disk.
    fn in_memory(self) -> bool {
        self != Self::ConfigMap
    }
}

/// One volume that is about to be written.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) uid: String,
    pub(super) volume: String,
    pub(super) kind: Kind,
    pub(super) payload: Payload,
    /// Mount points of other volumes inside this one.
    pub(super) nested: Vec<String>,
    pub(super) owners: Owners,
    /// Bytes a volume in memory may hold; `None`: no limit of its own.
    pub(super) size: Option<i64>,
}

impl Job {
    /// Makes the volume's directory if there is none and brings its content up to date. Blocking.
    pub(super) fn run(&self, dirs: &PodDirs) -> Result<Written, VolumeError> {
        let dir = dirs.volume(&self.uid, self.kind.plugin(), &self.volume)?;
        tmpfs::prepare(&dir, self.kind.in_memory().then_some(self.size))?;
        make_marker(&dirs.ready_marker(&self.uid, &format!("wrapped_{}", self.volume))?)?;
        nested::make(&dir, &self.nested, &self.payload)?;
        atomic::write(&dir, &self.payload, self.owners)
    }
}

/// Kubelets that take over later know by it that the directory is set up.
fn make_marker(marker: &Path) -> Result<(), VolumeError> {
    if marker.exists() {
        return Ok(());
    }
    if let Some(parent) = marker.parent() {
        super::make_dirs(parent)?;
    }
    std::fs::write(marker, "").on("create", marker)
}

/// Mount points of other volumes inside this one, in any container of the pod.
pub(super) fn nested_mounts(pod: &k8s_openapi::api::core::v1::Pod, volume: &str) -> Vec<String> {
    nested::of(pod, volume)
}
