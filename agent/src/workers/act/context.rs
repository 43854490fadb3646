//! What carrying out a plan needs.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;

use tokio::sync::Semaphore;
use tokio::sync::watch;

use super::image::PullHistory;
use super::turn;
use crate::images::Images;
use crate::kernel::cgroup::Cgroups;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::objects::Objects;
use crate::recorder::Recorder;
use crate::runtime::Runtime;
use crate::startup::Startups;
use crate::volumes::Volumes;
use crate::workers::generate::NodeSettings;

/// Hands and tools of all pod workers. Shared by reference; holds no state of any pod but what pulling its images
/// taught.
#[derive(Debug)]
pub struct ActContext {
    /// The container runtime.
    pub runtime: Runtime,
    /// Images and the limits on pulling them.
    pub images: Images,
    /// API objects that pods refer to.
    pub objects: Objects,
    /// Pods' directories and volumes.
    pub volumes: Volumes,
    /// The cgroup tree; `None` with `cgroupsPerQOS: false`.
    pub cgroups: Option<Cgroups>,
    /// What the node's configuration says of sandboxes and containers.
    pub settings: NodeSettings,
    /// Files of the node.
    pub files: NodeFiles,
    /// Why the runtime's network is not ready; `None` once it is. Pods on the host's network do not care.
    pub network: watch::Receiver<Option<String>>,
    /// Told what happened.
    pub recorder: Recorder,
    /// The wall clock.
    pub clock: Clock,
    /// Told how long pulls took.
    pub startups: Startups,
    /// Where what is done is counted, if it is.
    pub metrics: Option<Arc<Metrics>>,
    pulls: Mutex<PullHistory>,
    /// Turns at removing remains: slow work that nobody waits for.
    pub(super) removals: Semaphore,
    /// Turns at stopping pods.
    pub(super) stops: Semaphore,
}

/// Pods whose remains are removed at the same time.
const REMOVALS: usize = 2;

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
    /// Puts the tools together.
    #[expect(clippy::too_many_arguments, reason = "each tool is made elsewhere; there is nothing to default")]
    pub fn new(
        runtime: Runtime,
        images: Images,
        volumes: Volumes,
        cgroups: Option<Cgroups>,
        settings: NodeSettings,
        files: NodeFiles,
        network: watch::Receiver<Option<String>>,
        recorder: Recorder,
        clock: Clock,
    ) -> Self {
        let pulls = Mutex::new(PullHistory::default());
        let objects = Objects::standalone();
        Self {
            runtime,
            images,
            objects,
            volumes,
            cgroups,
            settings,
            files,
            network,
            recorder,
            clock,
            startups: Startups::default(),
            metrics: None,
            pulls,
            removals: Semaphore::new(REMOVALS),
            stops: turn::turns(),
        }
    }

    /// Environments and volumes are made from the objects of an API server; without this there are none.
    pub fn with_objects(mut self, objects: Objects) -> Self {
        self.volumes = self.volumes.with_objects(objects.clone(), self.settings.resources.allocatable.clone());
        self.objects = objects;
        self
    }

    /// Counts, if anything is counted.
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
