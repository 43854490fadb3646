//! Services and settings that executing a plan uses.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;

use tokio::sync::watch;

use super::Cause;
use super::gc::DeadContainers;
use super::hooks::PreStops;
use super::image::PullHistory;
use super::orphans::OrphanRemovals;
use crate::allocation::Allocations;
use crate::cgroups::Cgroups;
use crate::images::Images;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::objects::Objects;
use crate::pacing::Pacing;
use crate::pleg::PlegHandle;
use crate::recorder::Recorder;
use crate::runtime::Runtime;
use crate::startup::Startups;
use crate::user_namespaces::UserNamespaces;
use crate::volumes::Volumes;
use crate::workers::generate::NodeSettings;

/// Services of all pod workers, shared by reference. Holds no state of a pod but its image pull back-off,
/// its preStop hooks in progress, the removal of what an earlier one of its UID left, and its containers in excess of the
/// node's limits.
#[derive(Debug)]
pub struct ActContext {
    /// The container runtime.
    pub runtime: Runtime,
    /// Images and the limits on pulling them.
    pub images: Arc<Images>,
    /// API objects that pods refer to.
    pub objects: Objects,
    /// Pods' directories and volumes.
    pub volumes: Volumes,
    /// The cgroup tree; `None` with `cgroupsPerQOS: false`.
    pub cgroups: Option<Cgroups>,
    /// What is allocated to pods, and what was applied.
    pub allocations: Allocations,
    /// The node's settings for sandboxes and containers.
    pub settings: NodeSettings,
    /// Files of the node.
    pub files: NodeFiles,
    /// Why the runtime's network is not ready; `None` once it is. Not used for pods on the host's network.
    pub network: watch::Receiver<Option<String>>,
    /// Events.
    pub recorder: Recorder,
    /// The wall clock.
    pub clock: Clock,
    /// Durations of pulls.
    pub startups: Startups,
    /// Metrics, if there are any.
    pub metrics: Option<Arc<Metrics>>,
    /// Permits and priorities.
    pub pacing: Pacing,
    /// Ranges of ids of pods with a user namespace of their own; none without [`Self::with_user_namespaces`].
    pub user_namespaces: UserNamespaces,
    /// Exits of containers that are stopped; without it the runtime's answer is waited for.
    pub exits: Option<PlegHandle>,
    /// Limits on dead containers.
    pub dead_containers: DeadContainers,
    pub(super) pre_stops: PreStops,
    pub(super) orphans: OrphanRemovals,
    pulls: Mutex<PullHistory>,
}

/// Services that [`ActContext::new`] has no default for.
#[derive(Debug)]
pub struct ActServices {
    /// The container runtime.
    pub runtime: Runtime,
    /// Images and the limits on pulling them.
    pub images: Images,
    /// Pods' directories and volumes.
    pub volumes: Volumes,
    /// The cgroup tree; `None` with `cgroupsPerQOS: false`.
    pub cgroups: Option<Cgroups>,
    /// The node's settings for sandboxes and containers.
    pub settings: NodeSettings,
    /// Files of the node.
    pub files: NodeFiles,
    /// Why the runtime's network is not ready; `None` once it is.
    pub network: watch::Receiver<Option<String>>,
    /// Events.
    pub recorder: Recorder,
    /// The wall clock.
    pub clock: Clock,
    /// Permits and priorities.
    pub pacing: Pacing,
}

/// Files of the node that pods' files are made from or linked in.
#[derive(Clone, Debug)]
pub struct NodeFiles {
    /// `resolvConf`; `None` if set to the empty string.
    pub resolv_conf: Option<PathBuf>,
    /// The node's hosts file.
    pub hosts: PathBuf,
    /// Folder of links to all containers' logs; `None` for no links.
    pub log_links: Option<PathBuf>,
}

impl NodeFiles {
    /// The text of one of them. Comments may have any encoding: what is not UTF-8 is replaced.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) async fn read(file: &Path) -> Result<String, Cause> {
        let bytes = tokio::fs::read(file).await;
        let bytes = bytes.map_err(|error| Cause::file(format!("cannot read {}", file.display()), error))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

impl Default for NodeFiles {
    fn default() -> Self {
        Self {
            resolv_conf: Some("/etc/resolv.conf".into()),
            hosts: "/etc/hosts".into(),
            log_links: Some("/var/log/containers".into()),
        }
    }
}

impl ActContext {
    /// A context of these services.
    pub fn new(services: ActServices) -> Self {
        let ActServices { runtime, images, volumes, cgroups, settings, files, network, recorder, clock, pacing } =
            services;
        Self {
            runtime,
            images: Arc::new(images),
            objects: Objects::standalone(),
            volumes: volumes.with_recorder(recorder.clone()),
            cgroups,
            allocations: Allocations::default(),
            settings,
            files,
            network,
            recorder,
            clock,
            startups: Startups::default(),
            metrics: None,
            pacing,
            user_namespaces: UserNamespaces::default(),
            exits: None,
            dead_containers: DeadContainers::default(),
            pre_stops: PreStops::default(),
            orphans: OrphanRemovals::default(),
            pulls: Mutex::default(),
        }
    }

    /// Environments and volumes are made from these API objects; without this call there are none.
    pub fn with_objects(mut self, objects: Objects) -> Self {
        self.volumes = self.volumes.with_objects(objects.clone(), self.settings.resources.allocatable.clone());
        self.objects = objects;
        self
    }

    /// Pods with `hostUsers: false` get ranges of these; without this call they fail.
    pub fn with_user_namespaces(mut self, user_namespaces: UserNamespaces) -> Self {
        self.user_namespaces = user_namespaces;
        self
    }

    /// Updates metrics, if there are any.
    pub(super) fn count(&self, count: impl FnOnce(&Metrics)) {
        if let Some(metrics) = &self.metrics {
            count(metrics);
        }
    }

    pub(super) fn pulls(&self) -> std::sync::MutexGuard<'_, PullHistory> {
        // A panic elsewhere leaves a usable history behind.
        self.pulls.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
