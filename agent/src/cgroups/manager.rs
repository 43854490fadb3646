//! Creates, limits and removes the cgroups of `kubepods`, the QoS classes and pods, with either driver and version.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use tokio::sync::Mutex;

use super::BurstableRequests;
use super::CgroupError;
use super::CgroupName;
use super::Driver;
use super::Layout;
use super::PodValues;
use super::QosClass;
use super::arithmetic;
use super::files;
use super::layout::below;
use super::limits;
use super::name::pod_uid_of;
use super::systemd::Systemd;
use crate::model::Backoff;

/// How often remaining processes are killed before giving up.
const KILL_ROUNDS: u32 = 5;
/// How often a removal is tried: a killed process leaves its cgroup a moment later.
const REMOVE_TRIES: u32 = 5;
/// First and longest pause between such rounds.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(160);

/// The classes that have a cgroup of their own.
const CLASSES: [QosClass; 2] = [QosClass::Burstable, QosClass::BestEffort];
/// All parents of pod cgroups.
const PARENTS: [QosClass; 3] = [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort];

/// Manages the cgroups below one root. Touches no cgroup outside of it, except that v2 has controllers enabled in the
/// ancestors. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Cgroups {
    layout: Arc<Layout>,
    driver: Driver,
    root: CgroupName,
    systemd: Option<Arc<Systemd>>,
    requests: Option<Arc<dyn BurstableRequests>>,
    /// Held while the weight of the Burstable class is computed and written, so that the last sum computed is the last
    /// one written.
    burstable: Arc<Mutex<()>>,
}

impl Cgroups {
    /// The tree below `root` (`cgroupRoot`). Creates nothing.
    ///
    /// # Errors
    /// The systemd driver on a node without systemd.
    pub fn new(layout: Layout, driver: Driver, root: CgroupName) -> Result<Self, CgroupError> {
        let systemd = match driver {
            Driver::Systemd => Some(Systemd::new()?),
            Driver::Cgroupfs => None,
        };
        Ok(Self::with(layout, driver, root, systemd))
    }

    pub(super) fn with(layout: Layout, driver: Driver, root: CgroupName, systemd: Option<Systemd>) -> Self {
        let (layout, systemd) = (Arc::new(layout), systemd.map(Arc::new));
        Self { layout, driver, root, systemd, requests: None, burstable: Arc::default() }
    }

    /// Weighs the Burstable class by these requests. Without them its weight is left alone.
    pub fn with_requests(self, requests: Arc<dyn BurstableRequests>) -> Self {
        Self { requests: Some(requests), ..self }
    }

    /// The hierarchies in use.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// `cgroup_parent` of a pod's sandbox: the full path with either driver.
    ///
    /// # Errors
    /// The UID is not a valid component of a cgroup name.
    pub fn parent_for_runtime(&self, class: QosClass, uid: &str) -> Result<String, CgroupError> {
        Ok(self.root.pod(class, uid)?.path(self.driver))
    }

    /// Creates `kubepods` and the QoS classes where missing. The root must exist.
    ///
    /// # Errors
    /// The root lacks paths or controllers; the kernel or systemd returns an error.
    pub async fn ensure_tree(&self) -> Result<(), CgroupError> {
        let missing = files::missing(&self.layout, &self.root.path(self.driver));
        if !missing.is_empty() {
            return Err(CgroupError::Missing {
                name: self.root.components().to_vec(),
                what: if self.layout.is_v2() { "controllers" } else { "paths" },
                missing: missing.join(", "),
            });
        }
        self.ensure(&self.root.kubepods(), &PodValues::default()).await?;
        for class in CLASSES {
            let values = PodValues { cpu_shares: arithmetic::MIN_SHARES, ..PodValues::default() };
            self.ensure(&self.root.class(class), &values).await?;
        }
        Ok(())
    }

    /// Path of `kubepods` in every hierarchy.
    pub fn kubepods_path(&self) -> String {
        self.root.kubepods().path(self.driver)
    }

    /// True if the pod's cgroup is complete. False for a UID that cannot name a cgroup.
    pub fn pod_exists(&self, class: QosClass, uid: &str) -> bool {
        let name = self.root.pod(class, uid);
        name.is_ok_and(|name| files::exists(&self.layout, &name.path(self.driver)))
    }

    /// Creates the pod's cgroup with these values, after updating the weight of the Burstable class. An existing cgroup
    /// is not changed.
    ///
    /// # Errors
    /// The kernel or systemd returns an error. A value that is not accepted is only logged.
    pub async fn ensure_pod(&self, class: QosClass, uid: &str, values: &PodValues) -> Result<(), CgroupError> {
        let name = self.root.pod(class, uid)?;
        if class == QosClass::Burstable {
            self.update_burstable_weight().await;
        }
        self.ensure(&name, values).await
    }

    /// Writes new values to a pod's cgroup.
    ///
    /// # Errors
    /// The first value that is not accepted.
    pub async fn update_pod(&self, class: QosClass, uid: &str, values: &PodValues) -> Result<(), CgroupError> {
        let name = self.root.pod(class, uid)?;
        self.write(&name, values).await
    }

    /// Kills the processes of the pod's cgroup, removes it, and updates the weight of the Burstable class. A cgroup that
    /// does not exist is not an error.
    ///
    /// # Errors
    /// Processes did not end, or a directory was not removed.
    pub async fn destroy_pod(&self, class: QosClass, uid: &str) -> Result<(), CgroupError> {
        let name = self.root.pod(class, uid)?;
        let path = name.path(self.driver);
        self.kill_processes(&path).await?;
        if let Some(systemd) = &self.systemd {
            systemd.stop(&name.unit()).await?;
        }
        self.remove(&path).await?;
        if class == QosClass::Burstable {
            self.update_burstable_weight().await;
        }
        Ok(())
    }

    /// UIDs and classes of the pods that have a cgroup in any hierarchy.
    pub fn pods(&self) -> BTreeMap<String, QosClass> {
        let mut found = BTreeMap::new();
        for class in PARENTS {
            let path = self.root.class(class).path(self.driver);
            for mount in self.layout.mounts() {
                let names = files::subdirs(&below(mount, &path));
                found.extend(names.iter().filter_map(|name| Some((pod_uid_of(name, self.driver)?, class))));
            }
        }
        found
    }

    /// Removes `kubepods` and everything below it, with its processes. For tests with a tree of their own.
    ///
    /// # Errors
    /// Processes did not end, or a directory was not removed.
    pub async fn destroy_tree(&self) -> Result<(), CgroupError> {
        for (uid, class) in self.pods() {
            self.destroy_pod(class, &uid).await?;
        }
        for name in CLASSES.map(|class| self.root.class(class)).into_iter().chain([self.root.kubepods()]) {
            if let Some(systemd) = &self.systemd {
                systemd.stop(&name.unit()).await?;
            }
            self.remove(&name.path(self.driver)).await?;
        }
        Ok(())
    }

    /// Sets the CPU weight of the Burstable class to the sum of the requests of its active pods, as the kubelet does
    /// before it creates a pod cgroup, after a pod was killed, and every minute. The present weight is read from the
    /// kernel: nothing is remembered, so a restart of the agent, or a node taken over from another kubelet, changes
    /// nothing. Until every source of pods has been read the weight is only raised. True once it has been.
    pub async fn update_burstable_weight(&self) -> bool {
        let Some(requests) = &self.requests else { return true };
        let _order = self.burstable.lock().await;
        let requested = requests.requested();
        let shares = arithmetic::shares(requested.milli_cpu);
        let name = self.root.class(QosClass::Burstable);
        let path = name.path(self.driver);
        let wanted = limits::to_cpu_weight(&self.layout, shares);
        let is_right = match limits::cpu_weight(&self.layout, &path) {
            Some(present) => present == wanted || (!requested.is_complete && present > wanted),
            // Not created yet, or without a cpu controller.
            None => true,
        };
        if !is_right {
            let values = PodValues { cpu_shares: shares, ..PodValues::default() };
            match self.write(&name, &values).await {
                Ok(()) => {
                    tracing::debug!(cgroup = path, milli_cpu = requested.milli_cpu, "updated the Burstable CPU weight")
                }
                Err(error) => {
                    tracing::warn!(cgroup = path, %error, "cannot update the CPU weight of the Burstable class")
                }
            }
        }
        requested.is_complete
    }

    async fn ensure(&self, name: &CgroupName, values: &PodValues) -> Result<(), CgroupError> {
        let path = name.path(self.driver);
        if files::exists(&self.layout, &path) {
            return Ok(());
        }
        if let Some(systemd) = &self.systemd {
            let parent = name.parent().filter(|parent| !parent.components().is_empty()).map(|parent| parent.unit());
            systemd.start(&name.unit(), parent.as_deref(), self.layout.is_v2()).await?;
        }
        self.blocking(&path, files::create).await?;
        if let Err(error) = self.write(name, values).await {
            tracing::warn!(cgroup = path, %error, "cannot set a limit of a new cgroup");
        }
        Ok(())
    }

    async fn write(&self, name: &CgroupName, values: &PodValues) -> Result<(), CgroupError> {
        if let Some(systemd) = &self.systemd {
            systemd.set(&name.unit(), values, self.layout.is_v2()).await?;
        }
        let values = self.rounded(values);
        self.blocking(&name.path(self.driver), move |layout, path| limits::write(layout, path, &values)).await
    }

    /// systemd keeps quotas in whole percents of a CPU; the file gets the same value.
    fn rounded(&self, values: &PodValues) -> PodValues {
        let mut values = values.clone();
        if let (Some(_), Some((quota @ 1.., period))) = (&self.systemd, values.cpu_max) {
            let per_second = arithmetic::systemd_quota_per_second(quota, period);
            let rounded = per_second.saturating_mul(period) / 1_000_000;
            values.cpu_max = Some((i64::try_from(rounded).unwrap_or(i64::MAX), period));
        }
        values
    }

    async fn kill_processes(&self, path: &str) -> Result<(), CgroupError> {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        for _ in 0..KILL_ROUNDS {
            let pids = self.blocking(path, |layout, path| Ok(files::pids(layout, path))).await?;
            if pids.is_empty() {
                return Ok(());
            }
            tracing::info!(cgroup = path, processes = pids.len(), "killing the remaining processes of a pod");
            for pid in pids {
                // Fails for a process that has already ended.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            tokio::time::sleep(backoff.failed(0.0)).await;
        }
        let pids = self.blocking(path, |layout, path| Ok(files::pids(layout, path))).await?;
        if pids.is_empty() { Ok(()) } else { Err(CgroupError::Survivors { path: path.to_owned() }) }
    }

    async fn remove(&self, path: &str) -> Result<(), CgroupError> {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        for _ in 1..REMOVE_TRIES {
            match self.blocking(path, files::remove).await {
                Ok(()) => return Ok(()),
                Err(error) => tracing::debug!(cgroup = path, %error, "cgroup not removed yet"),
            }
            tokio::time::sleep(backoff.failed(0.0)).await;
        }
        self.blocking(path, files::remove).await
    }

    /// Runs `work` on the cgroup at `path` on a thread that may block.
    async fn blocking<T: Send + 'static>(
        &self,
        path: &str,
        work: impl FnOnce(&Layout, &str) -> Result<T, CgroupError> + Send + 'static,
    ) -> Result<T, CgroupError> {
        let (layout, owned) = (self.layout.clone(), path.to_owned());
        let aborted =
            |error: tokio::task::JoinError| CgroupError::Aborted { path: path.to_owned(), reason: error.to_string() };
        tokio::task::spawn_blocking(move || work(&layout, &owned)).await.map_err(aborted)?
    }
}
