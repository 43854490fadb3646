//! Volumes made from API objects and the pod itself: configMap, secret, downwardAPI, projected. Their content is resolved
//! first (`resolve`, which may wait for the API server), then written in one step (`atomic`, which blocks).
//!
//! They belong to the agent: containers see them read-only, and they follow their objects while the containers run.

mod atomic;
mod content;
mod nested;
mod ownership;
mod payload;
mod resolve;
#[cfg(test)]
mod tests;
mod tmpfs;

use std::collections::BTreeMap;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Volume;

pub use payload::InvalidPath;

pub(super) use nested::NestedMounts;
pub(super) use tmpfs::can_avoid_swap;
pub(super) use tmpfs::machine_swaps;
pub(super) use tmpfs::mount_memory;

use super::VolumeError;
use super::error::OnPath as _;
use super::layout;
use super::plugin::Attributes;
use super::plugin::Ready;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::plugin::blocking;
use super::teardown::VolumeOnDisk;
use crate::model::Amount;
use crate::objects::Objects;
use crate::recorder::Recorder;
use atomic::Written;
use content::Downward;
use ownership::Owners;
use payload::Payload;
use resolve::Resolver;

/// The kinds of volumes made from API objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    ConfigMap,
    Secret,
    DownwardApi,
    Projected,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::ConfigMap, Self::Secret, Self::DownwardApi, Self::Projected];

    /// The content never reaches a disk.
    fn in_memory(self) -> bool {
        self != Self::ConfigMap
    }
}

/// The plugin of one of these kinds.
#[derive(Debug)]
pub(super) struct ObjectVolumes {
    kind: Kind,
    objects: Objects,
    allocatable: Arc<BTreeMap<String, Amount>>,
    recorder: Option<Recorder>,
}

impl ObjectVolumes {
    pub(super) fn new(
        kind: Kind,
        objects: Objects,
        allocatable: Arc<BTreeMap<String, Amount>>,
        recorder: Option<Recorder>,
    ) -> Self {
        Self { kind, objects, allocatable, recorder }
    }
}

impl VolumePlugin for ObjectVolumes {
    fn name(&self) -> &'static str {
        match self.kind {
            Kind::ConfigMap => "kubernetes.io/configmap",
            Kind::Secret => "kubernetes.io/secret",
            Kind::DownwardApi => "kubernetes.io/downward-api",
            Kind::Projected => "kubernetes.io/projected",
        }
    }

    fn supports(&self, volume: &Volume) -> bool {
        match self.kind {
            Kind::ConfigMap => volume.config_map.is_some(),
            Kind::Secret => volume.secret.is_some(),
            Kind::DownwardApi => volume.downward_api.is_some(),
            Kind::Projected => volume.projected.is_some(),
        }
    }

    fn attributes(&self) -> Attributes {
        Attributes { read_only: true, fs_group: true, refreshes: true, owns_content: true }
    }

    fn set_up<'a>(&'a self, target: Target<'a>) -> BoxFuture<'a, Result<Ready, VolumeError>> {
        Box::pin(async move {
            let owners = Owners { group: target.fs_group, ..Owners::of(target.pod) };
            let downward = Downward::new(target.pod, &self.allocatable);
            let (objects, recorder) = (&self.objects, self.recorder.as_ref());
            let resolver = Resolver { objects, downward, pod: target.pod, owners, recorder };
            let resolved = target.unless_over(resolver.resolve(target.volume)).await?;
            let write = VolumeWrite {
                dir: self.mount_path(target.dirs, target.uid, target.volume)?,
                marker: target.dirs.ready_marker(target.uid, &format!("wrapped_{}", target.volume.name))?,
                memory: self.kind.in_memory().then_some(target.memory),
                payload: resolved.payload,
                nested: target.uses.nested.of_volume(&target.volume.name),
                owners,
            };
            if blocking(move || write.run()).await? == Written::Changed {
                tracing::debug!(pod_uid = target.uid, volume = target.volume.name, "volume written");
            }
            Ok(Ready { refresh_at: resolved.refresh_at })
        })
    }

    fn tear_down<'a>(&'a self, volume: &'a VolumeOnDisk) -> BoxFuture<'a, Result<(), VolumeError>> {
        let volume = volume.clone();
        Box::pin(blocking(move || volume.delete()))
    }
}

/// One volume that is about to be written.
#[derive(Debug)]
struct VolumeWrite {
    dir: PathBuf,
    /// Marks the volume as set up for kubelets that take over later.
    marker: PathBuf,
    /// In memory, of at most so many bytes; `None`: on disk.
    memory: Option<Option<i64>>,
    payload: Payload,
    /// Mount points of other volumes inside this one.
    nested: Vec<String>,
    owners: Owners,
}

impl VolumeWrite {
    /// Makes the volume's directory if there is none and brings its content up to date. Blocking.
    fn run(&self) -> Result<Written, VolumeError> {
        tmpfs::prepare(&self.dir, self.memory)?;
        make_marker(&self.marker)?;
        let written = atomic::write(&self.dir, &self.payload, self.owners)?;
        // Afterwards: a link to what the volume no longer has would be in the way.
        nested::make(&self.dir, &self.nested, &self.payload)?;
        Ok(written)
    }
}

fn make_marker(marker: &Path) -> Result<(), VolumeError> {
    if marker.exists() {
        return Ok(());
    }
    if let Some(parent) = marker.parent() {
        layout::make_dirs(parent)?;
    }
    std::fs::write(marker, "").on("create", marker)
}
