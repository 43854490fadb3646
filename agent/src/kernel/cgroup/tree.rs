//! The agent's part of the cgroup tree, under either driver and either version.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use tokio::sync::Mutex;

use super::CgroupError;
use super::CgroupName;
use super::Driver;
use super::Layout;
use super::PodValues;
use super::QosClass;
use super::arith;
use super::files;
use super::layout::below;
use super::name::pod_uid_of;
use super::systemd::Systemd;

/// How often leftover processes are killed before giving up.
const KILL_ROUNDS: u32 = 5;
/// How often a removal is tried: a killed process leaves its cgroup a moment later.
const REMOVE_TRIES: u32 = 5;
/// First pause between such rounds; each next one is twice as long.
const PAUSE: Duration = Duration::from_millis(10);

/// The classes with a cgroup of their own.
const CLASSES: [QosClass; 2] = [QosClass::Burstable, QosClass::BestEffort];
/// Where pods can be.
const PLACES: [QosClass; 3] = [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort];

/// Makes, writes and removes the cgroups of pods below one root. Never touches a cgroup outside of it, except that v2
/// has controllers enabled on the way down.
#[derive(Debug)]
pub struct Cgroups {
    layout: Layout,
    driver: Driver,
    root: CgroupName,
    systemd: Option<Systemd>,
    /// Milli-cpu requested by each Burstable pod that has a cgroup: what its class weighs.
    burstable: Mutex<BTreeMap<String, i64>>,
}

impl Cgroups {
    /// The tree below `root` (`cgroupRoot`). Touches nothing yet.
    ///
    /// # Errors
    /// The systemd driver without systemd.
    pub fn new(layout: Layout, driver: Driver, root: CgroupName) -> Result<Self, CgroupError> {
        let systemd = match driver {
            Driver::Systemd => Some(Systemd::new()?),
            Driver::Cgroupfs => None,
        };
        Ok(Self { layout, driver, root, systemd, burstable: Mutex::default() })
    }

    #[cfg(test)]
    pub(super) fn with_systemd(layout: Layout, root: CgroupName, systemd: Systemd) -> Self {
        Self { layout, driver: Driver::Systemd, root, systemd: Some(systemd), burstable: Mutex::default() }
    }

    /// The hierarchies in use.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// What the runtime is told as `cgroup_parent` of a pod: the full path under either driver.
    ///
    /// # Errors
    /// A UID that cannot be part of a cgroup's name.
    pub fn parent_for_runtime(&self, class: QosClass, uid: &str) -> Result<String, CgroupError> {
        Ok(self.root.pod(class, uid)?.path(self.driver))
    }

    /// Makes `kubepods` and the classes below it, as far as missing. The root must exist.
    ///
    /// # Errors
    /// The root is missing or incomplete; the kernel or systemd refuses.
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
            let values = PodValues { cpu_shares: arith::MIN_SHARES, ..PodValues::default() };
            self.ensure(&self.root.class(class), &values).await?;
        }
        Ok(())
    }

    /// Path of the cgroup that all pods live below, in every hierarchy.
    pub fn kubepods_path(&self) -> String {
        self.root.kubepods().path(self.driver)
    }

    /// True if the pod's cgroup is complete. A UID that cannot name a cgroup has none.
    pub fn pod_exists(&self, class: QosClass, uid: &str) -> bool {
        let name = self.root.pod(class, uid);
        name.is_ok_and(|name| files::exists(&self.layout, &name.path(self.driver)))
    }

    /// Makes the pod's cgroup with these values unless it is there already: an existing one is not touched.
    /// `milli_cpu` is what the pod requests; the class is weighed anew by it.
    ///
    /// # Errors
    /// The kernel or systemd refuses. A value that cannot be written is only logged.
    pub async fn ensure_pod(
        &self,
        class: QosClass,
        uid: &str,
        milli_cpu: i64,
        values: &PodValues,
    ) -> Result<(), CgroupError> {
        let name = self.root.pod(class, uid)?;
        if class == QosClass::Burstable {
            self.weigh_burstable(|pods| pods.insert(uid.to_owned(), milli_cpu) != Some(milli_cpu)).await;
        }
        self.ensure(&name, values).await
    }

    /// Writes new values into a pod's cgroup.
    ///
    /// # Errors
    /// The first value that cannot be written.
    pub async fn update_pod(&self, class: QosClass, uid: &str, values: &PodValues) -> Result<(), CgroupError> {
        let name = self.root.pod(class, uid)?;
        self.write(&name, values).await
    }

    /// Kills what is left in the pod's cgroup and removes it. One that is not there is fine.
    ///
    /// # Errors
    /// Processes that survive, or a directory that cannot be removed.
    pub async fn destroy_pod(&self, class: QosClass, uid: &str) -> Result<(), CgroupError> {
        let name = self.root.pod(class, uid)?;
        let path = name.path(self.driver);
        self.kill_leftovers(&path).await?;
        if let Some(systemd) = &self.systemd {
            systemd.stop(&name.unit()).await?;
        }
        self.remove(&path).await?;
        self.weigh_burstable(|pods| pods.remove(uid).is_some()).await;
        Ok(())
    }

    /// Gives an orphaned pod the smallest share of the cpu.
    ///
    /// # Errors
    /// The value cannot be written.
    pub async fn starve_pod(&self, class: QosClass, uid: &str) -> Result<(), CgroupError> {
        self.update_pod(class, uid, &PodValues { cpu_shares: arith::MIN_SHARES, ..PodValues::default() }).await
    }

    /// UIDs and classes of the pods that have a cgroup in any hierarchy.
    pub fn pods(&self) -> BTreeMap<String, QosClass> {
        let mut found = BTreeMap::new();
        for class in PLACES {
            let path = self.root.class(class).path(self.driver);
            for mount in self.layout.mounts() {
                let names = files::subdirs(&below(mount, &path));
                found.extend(names.iter().filter_map(|name| Some((pod_uid_of(name, self.driver)?, class))));
            }
        }
        found
    }

    /// Removes everything below and including `kubepods`, processes too: for who made a tree of its own.
    ///
    /// # Errors
    /// Processes that survive, or a directory that cannot be removed.
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

    async fn ensure(&self, name: &CgroupName, values: &PodValues) -> Result<(), CgroupError> {
        let path = name.path(self.driver);
        if files::exists(&self.layout, &path) {
            return Ok(());
        }
        if let Some(systemd) = &self.systemd {
            let parent = name.parent().filter(|parent| !parent.components().is_empty()).map(|parent| parent.unit());
            systemd.start(&name.unit(), parent.as_deref(), self.layout.is_v2()).await?;
        }
        files::create(&self.layout, &path)?;
        if let Err(error) = self.write(name, values).await {
            tracing::warn!(cgroup = path, %error, "value of a new cgroup not written");
        }
        Ok(())
    }

    async fn write(&self, name: &CgroupName, values: &PodValues) -> Result<(), CgroupError> {
        if let Some(systemd) = &self.systemd {
            systemd.set(&name.unit(), values, self.layout.is_v2()).await?;
        }
        files::write_values(&self.layout, &name.path(self.driver), &self.rounded(values))
    }

    /// systemd keeps quotas in whole percents; the file gets what it will say.
    fn rounded(&self, values: &PodValues) -> PodValues {
        let mut values = values.clone();
        if let (Some(_), Some((quota @ 1.., period))) = (&self.systemd, values.cpu_max) {
            let per_second = arith::systemd_quota_per_second(quota, period);
            let rounded = per_second.saturating_mul(period) / 1_000_000;
            values.cpu_max = Some((i64::try_from(rounded).unwrap_or(i64::MAX), period));
        }
        values
    }

    /// The Burstable class weighs as much as its pods request together.
    async fn weigh_burstable(&self, change: impl FnOnce(&mut BTreeMap<String, i64>) -> bool) {
        let mut pods = self.burstable.lock().await;
        if !change(&mut pods) {
            return;
        }
        let milli_cpu = pods.values().fold(0i64, |sum, own| sum.saturating_add(*own));
        let name = self.root.class(QosClass::Burstable);
        let values = PodValues { cpu_shares: arith::shares(milli_cpu), ..PodValues::default() };
        if let Err(error) = self.write(&name, &values).await {
            tracing::warn!(cgroup = name.path(self.driver), %error, "class not weighed anew");
        }
    }

    async fn kill_leftovers(&self, path: &str) -> Result<(), CgroupError> {
        let mut pause = PAUSE;
        for _ in 0..KILL_ROUNDS {
            let pids = files::pids(&self.layout, path);
            if pids.is_empty() {
                return Ok(());
            }
            tracing::info!(cgroup = path, processes = pids.len(), "killing what is left of a pod");
            for pid in pids {
                // A process that is gone by now is what is wanted.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        if files::pids(&self.layout, path).is_empty() {
            return Ok(());
        }
        Err(CgroupError::Survivors { path: path.to_owned() })
    }

    async fn remove(&self, path: &str) -> Result<(), CgroupError> {
        let mut pause = PAUSE;
        for _ in 1..REMOVE_TRIES {
            match files::remove(&self.layout, path) {
                Ok(()) => return Ok(()),
                Err(error) => tracing::debug!(cgroup = path, %error, "not removed yet"),
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        files::remove(&self.layout, path)
    }
}
