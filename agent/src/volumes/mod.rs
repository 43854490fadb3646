//! Files of pods on the node: their directories, emptyDir (on disk) and hostPath volumes, volumes made from API objects,
//! subPaths; and how all of it goes away again. What can take long (removing trees) is for a blocking task.
//!
//! Refuses volumes of other kinds (they are refused at admission), never follows a link out of a volume, and never
//! deletes across a mount point.
//!
//! ```text
//!  <root>/pods/<uid>/volumes/kubernetes.io~empty-dir/<volume>   content
//!                   /volumes/kubernetes.io~{configmap,secret,downward-api,projected}/<volume>   see `api/atomic.rs`
//!                   /plugins/kubernetes.io~empty-dir/<volume>/ready
//!                   /volume-subpaths/<volume>/<container>/<index>   bind mounts
//!                   /containers/<container>/<8 hex>   termination messages
//!                   /etc-hosts
//! ```

mod actual_state;
mod api;
mod empty_dir;
mod error;
mod host_path;
mod layout;
mod sub_path;
mod teardown;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeMount;

pub use api::InvalidPath;
pub use error::FailedVolume;
pub use error::VolumeError;
pub use layout::PodDirs;

use actual_state::ActualState;
use api::earliest;
use error::OnPath as _;

use crate::filesystem;
use crate::metrics::Metrics;
use crate::model::Amount;
use crate::model::spec;
use crate::objects::Objects;

/// The volumes of all pods below one root directory (`--root-dir`).
#[derive(Clone, Debug)]
pub struct Volumes {
    dirs: PodDirs,
    objects: Objects,
    allocatable: Arc<BTreeMap<String, Amount>>,
    actual: ActualState,
}

/// Until when volumes may stay as they are, if nothing they are made from changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RefreshDue {
    /// When a token is to be replaced.
    pub refresh_at: Option<SystemTime>,
    /// After how long objects that are not watched are to be read again.
    pub refresh_after: Option<Duration>,
}

impl Volumes {
    /// Volumes below `root`.
    pub fn new(root: &Path) -> Self {
        Self {
            dirs: PodDirs::new(root),
            objects: Objects::standalone(),
            allocatable: Arc::default(),
            actual: ActualState::default(),
        }
    }

    /// What is done to volumes is counted here.
    pub fn with_metrics(mut self, metrics: Arc<Metrics>) -> Self {
        self.actual = self.actual.with_metrics(metrics);
        self
    }

    /// Takes note of the volumes that an earlier run has left. To be called once, before anything is set up. Blocking.
    ///
    /// # Errors
    /// As [`Self::pods_on_disk`].
    pub fn reconstruct(&self) -> Result<(), VolumeError> {
        for uid in self.pods_on_disk()? {
            self.actual.reconstruct(&uid, &self.dirs.pod(&uid)?.join(layout::VOLUMES));
        }
        Ok(())
    }

    /// True if the machine swaps and its kernel cannot keep volumes in memory out of that, as kernels before 6.4. Blocking.
    ///
    /// # Errors
    /// It cannot be tried, for want of rights or of a directory.
    pub fn memory_may_be_swapped(&self) -> Result<bool, VolumeError> {
        Ok(api::machine_swaps() && !api::can_avoid_swap(&self.dirs.pods())?)
    }

    /// How many volumes are set up, by plugin (`kubernetes.io/secret`).
    pub fn set_up_by_plugin(&self) -> BTreeMap<&'static str, usize> {
        self.actual.totals()
    }

    /// The plugins of the volumes that a pod wants, one for each volume.
    pub fn plugins_wanted(pod: &Pod) -> impl Iterator<Item = &'static str> {
        mounted_volumes(pod).filter_map(actual_state::plugin_of)
    }

    /// Volumes are made from these objects; `allocatable` is what the node has to give.
    pub fn with_objects(mut self, objects: Objects, allocatable: BTreeMap<String, Amount>) -> Self {
        self.objects = objects;
        self.allocatable = Arc::new(allocatable);
        self
    }

    /// Where things are.
    pub fn dirs(&self) -> &PodDirs {
        &self.dirs
    }

    /// Makes the pod's directories, as far as missing.
    ///
    /// # Errors
    /// A UID that is no file name; a directory that cannot be made.
    pub fn make_pod_dirs(&self, uid: &str) -> Result<(), VolumeError> {
        let pod = self.dirs.pod(uid)?;
        for dir in [pod.clone(), pod.join(layout::VOLUMES), pod.join(layout::PLUGINS)] {
            make_dir(&dir)?;
        }
        Ok(())
    }

    /// Sets up every volume that a container mounts. What is set up already is left alone, except that hostPath types
    /// are checked anew, and what is made from API objects is brought up to date. `memory`: bytes that a volume in memory
    /// may take.
    ///
    /// # Errors
    /// Every volume that cannot be set up; the others are.
    pub async fn set_up(&self, pod: &Pod, memory: Option<i64>) -> Result<RefreshDue, Vec<FailedVolume>> {
        let mut failed = self.set_up_local(pod).await;
        match self.refresh(pod, memory).await {
            Ok(due) if failed.is_empty() => return Ok(due),
            Ok(_) => {}
            Err(more) => failed.extend(more),
        }
        Err(failed)
    }

    /// Sets up the volumes that are not made from API objects; returns those that failed.
    async fn set_up_local(&self, pod: &Pod) -> Vec<FailedVolume> {
        let local = mounted_volumes(pod).filter(|volume| api::Kind::of(volume).is_none()).cloned();
        let (all, local) = (self.clone(), local.collect::<Vec<Volume>>());
        if local.is_empty() {
            return Vec::new();
        }
        let (uid, group) = (uid_of(pod).to_owned(), fs_group(pod));
        let set_up = move |volume: Volume| {
            let began = Instant::now();
            let done = all.set_up_one(&uid, &volume, group);
            all.actual.mounted_once(&uid, &volume, began.elapsed(), done.is_ok());
            done.err().map(|error| FailedVolume { volume: volume.name, error })
        };
        // A host path may lie on a file system whose server does not answer.
        let work = tokio::task::spawn_blocking(move || local.into_iter().filter_map(set_up).collect());
        work.await.unwrap_or_else(|error| {
            let error = VolumeError::Interrupted(error.to_string());
            vec![FailedVolume { volume: String::new(), error }]
        })
    }

    fn set_up_one(&self, uid: &str, volume: &Volume, group: Option<u32>) -> Result<(), VolumeError> {
        if let Some(source) = &volume.host_path {
            host_path::check(&source.path, source.type_.as_deref().unwrap_or_default())
        } else if volume.empty_dir.is_some() {
            empty_dir::set_up(&self.dirs, uid, &volume.name, group)
        } else {
            Err(VolumeError::Unsupported { volume: volume.name.clone() })
        }
    }

    /// True if some volume of the pod is made from API objects or the pod itself, and changes with them.
    pub fn can_change(&self, pod: &Pod) -> bool {
        mounted_volumes(pod).any(|volume| api::Kind::of(volume).is_some())
    }

    /// Brings the volumes made from API objects up to date, running containers or not.
    ///
    /// # Errors
    /// Every volume that cannot be; it keeps its old content. The others are brought up to date.
    pub async fn refresh(&self, pod: &Pod, memory: Option<i64>) -> Result<RefreshDue, Vec<FailedVolume>> {
        let owners = api::Owners::of(pod);
        let (objects, allocatable) = (&self.objects, &*self.allocatable);
        let resolver = api::Resolver { objects, allocatable, pod, owners };
        let wanted = mounted_volumes(pod).filter_map(|volume| Some((volume, api::Kind::of(volume)?)));
        let resolved = wanted.map(async |(volume, kind)| {
            let began = Instant::now();
            (volume, kind, resolver.resolve(volume).await, began.elapsed())
        });
        let mut took_so_far = BTreeMap::new();
        let (mut jobs, mut failed, mut refresh_at) = (Vec::new(), Vec::new(), None);
        for (volume, kind, resolved, took) in futures_util::future::join_all(resolved).await {
            match resolved {
                Ok(resolved) => {
                    took_so_far.insert(volume.name.as_str(), (volume, took));
                    refresh_at = earliest(refresh_at, resolved.refresh_at);
                    jobs.push(api::Job {
                        uid: uid_of(pod).to_owned(),
                        volume: volume.name.clone(),
                        kind,
                        payload: resolved.payload,
                        nested: api::nested_mounts(pod, &volume.name),
                        owners,
                        size: memory,
                    });
                }
                Err(error) => {
                    self.actual.mounted(uid_of(pod), volume, took, false);
                    failed.push(FailedVolume { volume: volume.name.clone(), error });
                }
            }
        }
        for (name, took, error) in self.write(jobs).await {
            if let Some((volume, resolving)) = took_so_far.get(name.as_str()) {
                self.actual.mounted(uid_of(pod), volume, *resolving + took, error.is_none());
            }
            failed.extend(error.map(|error| FailedVolume { volume: name, error }));
        }
        if !failed.is_empty() {
            return Err(failed);
        }
        Ok(RefreshDue { refresh_at, refresh_after: self.objects.refresh_period(pod) })
    }

    /// Writes volumes on a thread that may block; returns how long each took, and why it failed.
    async fn write(&self, jobs: Vec<api::Job>) -> Vec<(String, Duration, Option<VolumeError>)> {
        if jobs.is_empty() {
            return Vec::new();
        }
        let dirs = self.dirs.clone();
        let write = move |job: api::Job| {
            let began = Instant::now();
            let written = job.run(&dirs);
            if let Ok(api::Written::Changed) = written {
                tracing::debug!(pod_uid = job.uid, volume = job.volume, "volume written");
            }
            (job.volume, began.elapsed(), written.err())
        };
        let work = tokio::task::spawn_blocking(move || jobs.into_iter().map(write).collect());
        work.await.unwrap_or_else(|error| {
            let error = VolumeError::Interrupted(error.to_string());
            vec![(String::new(), Duration::ZERO, Some(error))]
        })
    }

    /// True if a volume cannot be written by containers, whatever its mounts say.
    pub fn is_read_only(&self, pod: &Pod, volume: &str) -> bool {
        volumes(pod).find(|found| found.name == volume).is_some_and(|found| api::Kind::of(found).is_some())
    }

    /// The host path behind one `volumeMounts` entry; `sub_path` is `subPath` or the expanded `subPathExpr`, `index`
    /// the entry's position. With a subPath the volume's part is bind mounted, so that nobody can swap it for a link.
    ///
    /// # Errors
    /// There is no such volume; the subPath leads out of it or cannot be mounted.
    pub async fn mount_source(
        &self,
        pod: &Pod,
        container: &str,
        index: usize,
        mount: &VolumeMount,
        sub_path: Option<&str>,
    ) -> Result<PathBuf, VolumeError> {
        let volume = volumes(pod).find(|volume| volume.name == mount.name);
        let volume = volume.ok_or_else(|| VolumeError::NoSuchVolume { volume: mount.name.clone() })?;
        let path = match (&volume.host_path, api::Kind::of(volume)) {
            (Some(source), _) => PathBuf::from(&source.path),
            (None, Some(kind)) => self.dirs.volume(uid_of(pod), kind.plugin(), &volume.name)?,
            (None, None) => self.dirs.empty_dir(uid_of(pod), &volume.name)?,
        };
        let Some(sub_path) = sub_path.filter(|sub_path| !sub_path.is_empty()) else { return Ok(path) };
        if sub_path.starts_with('/') {
            return Err(VolumeError::AbsoluteSubPath(sub_path.to_owned()));
        }
        if sub_path::climbs(Path::new(sub_path)) {
            return Err(VolumeError::ClimbingSubPath(sub_path.to_owned()));
        }
        let target = self.dirs.sub_path(uid_of(pod), &volume.name, container, index)?;
        let (inside, at) = (PathBuf::from(sub_path), target.clone());
        let bound = tokio::task::spawn_blocking(move || sub_path::bind(&path, &inside, &at)).await;
        let (action, error) = match bound.map_err(|error| VolumeError::Interrupted(error.to_string()))? {
            Ok(()) => return Ok(target),
            Err(sub_path::Failure::Create(error)) => ("create subPath directory", error),
            Err(sub_path::Failure::Prepare(error)) => ("prepare subPath", error),
        };
        tracing::warn!(pod_uid = uid_of(pod), volume = mount.name, container, sub_path, %error, "cannot {action}");
        Err(VolumeError::SubPath { action, volume: mount.name.clone(), container: container.to_owned() })
    }

    /// Unmounts and deletes the pod's volumes; its other files stay. Deletes content only of plugins that this agent
    /// serves, and never across a mount point; a volume that must stay does not keep the others. Blocking.
    ///
    /// # Errors
    /// A volume that cannot be unmounted or deleted, or must not be.
    pub fn tear_down(&self, uid: &str) -> Result<(), VolumeError> {
        let Some(pod) = teardown::Directory::of_pod(&self.dirs, uid)? else { return Ok(()) };
        teardown::volumes(&pod, |plugin, volume, took, ok| self.actual.unmounted(uid, plugin, volume, took, ok))?;
        self.actual.torn_down(uid);
        Ok(())
    }

    /// True if nothing of the pod's volumes is left.
    pub fn is_torn_down(&self, uid: &str) -> bool {
        let Ok(pod) = self.dirs.pod(uid) else { return true };
        let is_empty = |dir: PathBuf| std::fs::read_dir(dir).map_or(true, |mut entries| entries.next().is_none());
        !pod.join(layout::SUB_PATHS).exists() && is_empty(pod.join(layout::VOLUMES))
    }

    /// UIDs of pods that have a directory.
    ///
    /// # Errors
    /// The directory of all pods cannot be read (a missing one has no pods).
    pub fn pods_on_disk(&self) -> Result<Vec<String>, VolumeError> {
        let dir = self.dirs.pods();
        let entries = match std::fs::read_dir(&dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            result => result.on("list", &dir)?,
        };
        let dirs = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        Ok(dirs.filter_map(|entry| entry.file_name().into_string().ok()).collect())
    }

    /// Removes the directory of a pod that is no more. Content of volumes is not deleted here: a volume that still has
    /// some keeps the directory. Blocking.
    ///
    /// # Errors
    /// A volume that is not torn down; something that cannot be deleted.
    pub fn remove_orphan(&self, uid: &str) -> Result<(), VolumeError> {
        match teardown::Directory::of_pod(&self.dirs, uid)? {
            Some(pod) => teardown::pod(&pod, &self.dirs),
            None => Ok(()),
        }
    }

    /// Makes an empty file for a container's termination message and returns its path. One per attempt; it stays until
    /// the pod's directory goes.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn make_termination_file(&self, uid: &str, container: &str) -> Result<PathBuf, VolumeError> {
        let dir = self.dirs.container(uid, container)?;
        make_dirs(&dir)?;
        let file = dir.join(format!("{:08x}", fastrand::u32(..)));
        std::fs::OpenOptions::new().write(true).create_new(true).open(&file).on("create", &file)?;
        set_mode(&file, 0o666)?;
        Ok(file)
    }

    /// Brings the pod's hosts file to `content` and returns its path. The file is changed in place: running containers
    /// have it mounted.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_hosts_file(&self, uid: &str, content: &str) -> Result<PathBuf, VolumeError> {
        let file = self.dirs.pod(uid)?.join(layout::HOSTS);
        // Containers can write the file: it may have any length.
        if filesystem::holds_exactly(&file, content.as_bytes()) {
            return Ok(file);
        }
        std::fs::write(&file, content).on("write", &file)?;
        set_mode(&file, 0o644)?;
        Ok(file)
    }
}

fn uid_of(pod: &Pod) -> &str {
    pod.metadata.uid.as_deref().unwrap_or_default()
}

fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    context.and_then(|context| context.fs_group).and_then(|group| u32::try_from(group).ok())
}

fn volumes(pod: &Pod) -> impl Iterator<Item = &Volume> {
    pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten())
}

/// Volumes some container mounts; others are not set up.
fn mounted_volumes(pod: &Pod) -> impl Iterator<Item = &Volume> {
    volumes(pod).filter(|volume| {
        let names = |mounts: &Option<Vec<VolumeMount>>| mounts.iter().flatten().any(|mount| mount.name == volume.name);
        spec::lasting_containers(pod).any(|container| names(&container.spec.volume_mounts))
            || spec::ephemeral_containers(pod).iter().any(|container| names(&container.volume_mounts))
    })
}

/// A directory only the agent's user and group can enter; one that is there is fine.
fn make_dir(dir: &Path) -> Result<(), VolumeError> {
    match std::fs::DirBuilder::new().mode(layout::PRIVATE).create(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => make_dirs(dir),
        result => result.on("create", dir),
    }
}

fn make_dirs(dir: &Path) -> Result<(), VolumeError> {
    std::fs::DirBuilder::new().recursive(true).mode(layout::PRIVATE).create(dir).on("create", dir)
}

fn set_mode(path: &Path, mode: u32) -> Result<(), VolumeError> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).on("set the mode of", path)
}
