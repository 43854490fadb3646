//! Creates, limits and removes the cgroups of `kubepods`, the QoS classes and pods, with either driver and version; limits
//! cgroups that others created.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::CgroupError;
use super::CgroupName;
use super::CgroupValues;
use super::Driver;
use super::Layout;
use super::LimitWrites;
use super::PodRequests;
use super::QosPolicy;
use super::arithmetic;
use super::current::Current;
use super::files;
use super::freezer::Suspensions;
use super::layout::below;
use super::limited::LimitedPods;
use super::limits;
use super::name::pod_uid_of;
use super::systemd::Systemd;
use crate::metrics::Metrics;
use crate::model::Backoff;
use crate::model::LoggedReasons;
use crate::model::QosClass;

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
    pub(super) driver: Driver,
    pub(super) root: CgroupName,
    systemd: Option<Arc<Systemd>>,
    pub(super) requests: Option<Arc<dyn PodRequests>>,
    pub(super) policy: QosPolicy,
    /// Held while the values of the QoS classes are computed and written, so that the last sum computed is the last one
    /// written. Has what was logged of failures by cgroup.
    pub(super) qos: Arc<Mutex<LoggedReasons>>,
    /// Which pods need not be limited again.
    limited: LimitedPods,
    pub(super) limit_writes: LimitWrites,
    pub(super) suspensions: Suspensions,
    pub(super) metrics: Option<Arc<Metrics>>,
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
        Self {
            layout,
            driver,
            root,
            systemd,
            requests: None,
            policy: QosPolicy::default(),
            qos: Arc::default(),
            limited: LimitedPods::default(),
            limit_writes: LimitWrites::default(),
            suspensions: Suspensions::default(),
            metrics: None,
        }
    }

    /// Counts operations in these metrics.
    pub fn with_metrics(self, metrics: Arc<Metrics>) -> Self {
        Self { metrics: Some(metrics), ..self }
    }

    /// Counts writes of limits here; earlier clones do not.
    pub fn with_limit_writes(self, limit_writes: LimitWrites) -> Self {
        Self { limit_writes, ..self }
    }

    /// Keeps the QoS classes at what these requests and this policy give. Without them the classes are left alone.
    pub fn with_requests(self, requests: Arc<dyn PodRequests>, policy: QosPolicy) -> Self {
        Self { requests: Some(requests), policy, ..self }
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
    /// The machine, the root or one of them lacks paths or controllers: no pod below could be limited. The kernel or systemd
    /// returns an error.
    pub async fn ensure_tree(&self) -> Result<(), CgroupError> {
        let missing = self.layout.missing_controllers();
        if !missing.is_empty() {
            return Err(CgroupError::MissingControllers(missing));
        }
        self.check_exists(&self.root).await?;
        self.ensure(&self.root.kubepods(), &CgroupValues::default()).await?;
        for class in CLASSES {
            let values = CgroupValues { cpu_shares: arithmetic::MIN_SHARES, ..CgroupValues::default() };
            self.ensure(&self.root.class(class), &values).await?;
        }
        Ok(())
    }

    /// Checks that a cgroup is complete.
    ///
    /// # Errors
    /// It lacks paths or controllers.
    pub(super) async fn check_exists(&self, name: &CgroupName) -> Result<(), CgroupError> {
        let missing = self.blocking(&name.path(self.driver), |layout, path| Ok(files::missing(layout, path))).await?;
        if missing.is_empty() {
            return Ok(());
        }
        let what = if self.layout.is_v2() { "controllers" } else { "paths" };
        Err(CgroupError::Missing { name: name.quoted(), what, missing: missing.join(", ") })
    }

    /// Writes what differs from these values to a cgroup that exists, be it of this tree or not. True if anything did.
    ///
    /// # Errors
    /// The cgroup lacks paths or controllers, or the first value that is not accepted.
    pub async fn update_existing(&self, name: &CgroupName, values: &CgroupValues) -> Result<bool, CgroupError> {
        self.check_exists(name).await?;
        let wanted = self.rounded(values);
        let compare = move |layout: &Layout, path: &str| {
            let current = Current::read(layout, path, &wanted);
            Ok(current.differing(&wanted, layout.is_v2(), arithmetic::page_size()))
        };
        let differing = self.blocking(&name.path(self.driver), compare).await?;
        if differing.is_empty() {
            return Ok(false);
        }
        self.counted("update", self.write(name, &differing)).await?;
        tracing::info!(cgroup = name.path(self.driver), values = ?differing, "updated the limits of a cgroup");
        Ok(true)
    }

    /// The driver in use.
    pub fn driver(&self) -> Driver {
        self.driver
    }

    /// `cgroupRoot`
    pub fn root(&self) -> &CgroupName {
        &self.root
    }

    /// Path of `kubepods` in every hierarchy.
    pub fn kubepods_path(&self) -> String {
        self.root.kubepods().path(self.driver)
    }

    /// Path of the parent of the pods of this class in every hierarchy.
    pub fn class_path(&self, class: QosClass) -> String {
        self.root.class(class).path(self.driver)
    }

    /// True if the pod's cgroup is complete. False for a UID that cannot name a cgroup.
    pub fn pod_exists(&self, class: QosClass, uid: &str) -> bool {
        let name = self.root.pod(class, uid);
        name.is_ok_and(|name| files::exists(&self.layout, &name.path(self.driver)))
    }

    /// True if this process has limited the pod's cgroup, by [`Self::ensure_pod`].
    pub fn has_limited(&self, uid: &str) -> bool {
        self.limited.contains(uid)
    }

    /// Creates the pod's cgroup with these values, after updating the QoS classes. One that exists gets those that differ,
    /// unless this process has limited it.
    ///
    /// # Errors
    /// The kernel or systemd returns an error: the cgroup may be without limits until the next call. A value that the kernel
    /// does not accept is only logged.
    pub async fn ensure_pod(&self, class: QosClass, uid: &str, values: &CgroupValues) -> Result<(), CgroupError> {
        let name = self.root.pod(class, uid)?;
        if self.depends_on(class) {
            self.update_qos_classes().await;
        }
        let path = name.path(self.driver);
        if !files::exists(&self.layout, &path) {
            let creation = async {
                self.create(&name).await?;
                unless_refused(&path, self.write(&name, values).await)
            };
            self.counted("create", creation).await?;
        } else if !self.limited.contains(uid) {
            unless_refused(&path, self.update_existing(&name, values).await.map(drop))?;
        }
        self.limited.add(uid);
        Ok(())
    }

    /// Writes new values to a pod's cgroup.
    ///
    /// # Errors
    /// The first value that is not accepted.
    pub async fn update_pod(&self, class: QosClass, uid: &str, values: &CgroupValues) -> Result<(), CgroupError> {
        let name = self.root.pod(class, uid)?;
        self.counted("update", self.write(&name, values)).await
    }

    /// The class below which the pod has a cgroup in any hierarchy; `None` if it has none.
    pub fn class_of(&self, uid: &str) -> Option<QosClass> {
        PARENTS.into_iter().find(|class| {
            let path = self.root.pod(*class, uid).map(|name| name.path(self.driver));
            path.is_ok_and(|path| self.layout.mounts().iter().any(|mount| below(mount, &path).is_dir()))
        })
    }

    /// Kills the processes of the pod's cgroup. True if there were any; a cgroup that does not exist has none.
    ///
    /// # Errors
    /// The cgroup cannot be read, or processes did not end.
    pub async fn kill_pod(&self, class: QosClass, uid: &str) -> Result<bool, CgroupError> {
        self.kill_processes(&self.root.pod(class, uid)?.path(self.driver)).await
    }

    /// Kills the processes of the pod's cgroup, removes it, and updates the QoS classes. A cgroup that does not exist is not
    /// an error.
    ///
    /// # Errors
    /// Processes did not end, or a directory was not removed.
    pub async fn destroy_pod(&self, class: QosClass, uid: &str) -> Result<(), CgroupError> {
        let name = self.root.pod(class, uid)?;
        self.limited.remove(uid);
        self.kill_pod(class, uid).await?;
        self.counted("destroy", self.destroy(&name)).await?;
        if self.depends_on(class) {
            self.update_qos_classes().await;
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
            self.destroy(&name).await?;
        }
        Ok(())
    }

    /// Creates a cgroup of this tree unless it exists. Values that it does not get, the QoS loop writes.
    ///
    /// # Errors
    /// It cannot be created, or lacks controllers then: the kernel enables none for a cgroup whose parent has processes.
    async fn ensure(&self, name: &CgroupName, values: &CgroupValues) -> Result<(), CgroupError> {
        let path = name.path(self.driver);
        if files::exists(&self.layout, &path) {
            return Ok(());
        }
        let creation = async {
            self.create(name).await?;
            // Precedes the values: with them systemd may disable controllers that it does not use itself. The next cgroup has
            // them enabled again.
            self.check_exists(name).await?;
            if let Err(error) = self.write(name, values).await {
                not_limited(&path, &error);
            }
            Ok::<(), CgroupError>(())
        };
        self.counted("create", creation).await
    }

    /// Creates a cgroup, without values.
    async fn create(&self, name: &CgroupName) -> Result<(), CgroupError> {
        if let Some(systemd) = &self.systemd {
            let parent = name.parent().filter(|parent| !parent.components().is_empty()).map(|parent| parent.unit());
            systemd.start(&name.unit(), parent.as_deref(), self.layout.is_v2()).await?;
        }
        self.blocking(&name.path(self.driver), files::create).await
    }

    async fn destroy(&self, name: &CgroupName) -> Result<(), CgroupError> {
        if let Some(systemd) = &self.systemd {
            systemd.stop(&name.unit()).await?;
        }
        self.remove(&name.path(self.driver)).await
    }

    /// Counts an operation (`create`, `update`, `destroy`) with its duration.
    pub(super) async fn counted<T>(&self, operation: &'static str, work: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let done = work.await;
        if let Some(metrics) = &self.metrics {
            metrics.cgroups.operation(operation, began.elapsed());
        }
        done
    }

    pub(super) async fn write(&self, name: &CgroupName, values: &CgroupValues) -> Result<(), CgroupError> {
        if let Some(systemd) = &self.systemd {
            let set = systemd.set(&name.unit(), values, self.layout.is_v2()).await;
            // Also after a failure: systemd may have written some of them.
            self.limit_writes.add();
            set?;
        }
        let (values, limit_writes) = (self.rounded(values), self.limit_writes.clone());
        let write = move |layout: &Layout, path: &str| {
            let written = limits::write(layout, path, &values);
            // Also after a failure: other values of the cgroup may have been written.
            limit_writes.add();
            written
        };
        self.blocking(&name.path(self.driver), write).await
    }

    /// systemd keeps quotas in whole percents of a CPU; the file gets the same value.
    pub(super) fn rounded(&self, values: &CgroupValues) -> CgroupValues {
        let mut values = values.clone();
        if let (Some(_), Some((quota @ 1.., period))) = (&self.systemd, values.cpu_max) {
            let per_second = arithmetic::systemd_quota_per_second(quota, period);
            let rounded = per_second.saturating_mul(period) / 1_000_000;
            values.cpu_max = Some((i64::try_from(rounded).unwrap_or(i64::MAX), period));
        }
        values
    }

    /// True if there were any.
    async fn kill_processes(&self, path: &str) -> Result<bool, CgroupError> {
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        for round in 0..KILL_ROUNDS {
            let pids = self.blocking(path, |layout, path| Ok(files::pids(layout, path))).await?;
            if pids.is_empty() {
                return Ok(round > 0);
            }
            tracing::info!(cgroup = path, processes = pids.len(), "killing the remaining processes of a pod");
            for pid in pids {
                // Fails for a process that has already ended.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            tokio::time::sleep(backoff.failed(0.0)).await;
        }
        let pids = self.blocking(path, |layout, path| Ok(files::pids(layout, path))).await?;
        if pids.is_empty() { Ok(true) } else { Err(CgroupError::Survivors { path: path.to_owned() }) }
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
    pub(super) async fn blocking<T: Send + 'static>(
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

/// Only logs what the kernel refuses of the first values of a cgroup: it would refuse it the next time, too. What systemd
/// returns stays an error: nothing is written then.
fn unless_refused(path: &str, written: Result<(), CgroupError>) -> Result<(), CgroupError> {
    match written {
        Err(error @ (CgroupError::Limit { .. } | CgroupError::Io { .. })) => {
            not_limited(path, &error);
            Ok(())
        }
        written => written,
    }
}

fn not_limited(path: &str, error: &CgroupError) {
    tracing::warn!(cgroup = path, %error, "cannot set a limit of a new cgroup");
}
