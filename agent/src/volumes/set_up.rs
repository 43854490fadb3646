//! Sets up the volumes of pods, and refreshes them.
//!
//! Each volume is set up in a task of its own, which nothing interrupts: its caller may give up, and a teardown of the pod
//! waits for it.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Volume;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::FailedVolume;
use super::Step;
use super::VolumeError;
use super::Volumes;
use super::in_progress::SettingUp;
use super::plugin::Ready;
use super::plugin::SET_UP_TIMEOUT;
use super::plugin::Target;
use super::plugin::VolumePlugin;
use super::uid_of;
use super::uses::ContainerUses;
use super::uses::mounted_volumes;
use crate::kernel::usage::MeasuredBy;

/// How long the start of a container waits for the refresh of a volume that has content already.
const REFRESH_LIMIT: Duration = Duration::from_secs(2);

/// When volumes are to be refreshed, if none of the objects they are made from changes before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RefreshDue {
    /// When a token is to be replaced.
    pub refresh_at: Option<SystemTime>,
    /// After how long objects that are not watched are to be read again.
    pub refresh_after: Option<Duration>,
}

/// What the set-ups of a pod's volumes have in common.
#[derive(Debug)]
struct OfPod {
    pod: Pod,
    /// Bytes that a volume in memory may take.
    memory: Option<i64>,
    uses: ContainerUses,
    /// They are brought up to date, and no container waits for them.
    is_refresh: bool,
}

/// A volume to be set up, and how long that is waited for; `None`: until it ends.
type Wanted<'a> = (&'a Volume, Option<Duration>);

impl Volumes {
    /// Sets up every volume that a container mounts. What is set up already is left alone, except that volumes made from API
    /// objects are refreshed; one that cannot be, or not within two seconds, keeps its content. `memory`: bytes that a volume
    /// in memory may take. If the future is dropped, what has begun goes on in the background, and [`Self::tear_down`] waits
    /// for it.
    ///
    /// # Errors
    /// Every volume that cannot be set up; the others are.
    pub async fn set_up(&self, pod: &Pod, memory: Option<i64>) -> Result<(), Vec<FailedVolume>> {
        let setting_up = self.in_progress.set_up(uid_of(pod)).await;
        let mut wanted: Vec<Wanted<'_>> = Vec::new();
        for volume in mounted_volumes(pod) {
            match self.plugins.of(volume).filter(|plugin| self.is_set_up(pod, volume, *plugin)) {
                Some(plugin) if plugin.is_of_host(uid_of(pod), volume) => {}
                kept => {
                    let refreshes = kept.is_some_and(|plugin| plugin.attributes().refreshes);
                    wanted.push((volume, refreshes.then_some(REFRESH_LIMIT)));
                }
            }
        }
        let done = self.set_up_those(&setting_up, (pod, false), memory, &wanted).await;
        let mut failed = Vec::new();
        for (done, (volume, limit)) in done.into_iter().zip(&wanted) {
            // The refresh of what has content reports and retries it; containers get the content that is there.
            if let (Err(error), None) = (done, limit) {
                failed.push(FailedVolume { volume: volume.name.clone(), error });
            }
        }
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    fn is_set_up(&self, pod: &Pod, volume: &Volume, plugin: &dyn VolumePlugin) -> bool {
        self.actual.is_set_up(uid_of(pod), &plugin.backing(uid_of(pod), volume))
    }

    /// True if some volume of the pod changes with API objects or the pod itself, may grow, or was not set up by this
    /// agent yet.
    pub fn can_change(&self, pod: &Pod) -> bool {
        mounted_volumes(pod).any(|volume| self.is_to_refresh(pod, volume))
    }

    /// For a pod that a predecessor has started the claims are read, and the volumes are checked.
    fn is_to_refresh(&self, pod: &Pod, volume: &Volume) -> bool {
        let plugin = self.plugins.of(volume);
        plugin.is_some_and(|plugin| {
            let changes = plugin.attributes().refreshes || plugin.can_grow(uid_of(pod), volume);
            changes || !self.is_set_up(pod, volume, plugin)
        })
    }

    /// True if a refresh of the volume expands it, and does nothing else.
    fn only_grows(&self, pod: &Pod, volume: &Volume) -> bool {
        let plugin = self.plugins.of(volume);
        plugin.is_some_and(|plugin| plugin.can_grow(uid_of(pod), volume) && self.is_set_up(pod, volume, plugin))
    }

    /// Time until the next check for changes without a notification: of objects that are not watched, and of capacities.
    fn refresh_after(&self, pod: &Pod) -> Option<Duration> {
        let grows = |volume| self.plugins.of(volume).is_some_and(|plugin| plugin.can_grow(uid_of(pod), volume));
        let period = self.objects.refresh_period(pod);
        period.or_else(|| self.objects.reading_period().filter(|_| mounted_volumes(pod).any(grows)))
    }

    /// Brings the volumes made from API objects up to date, running containers or not, expands those whose capacity has
    /// grown, and sets up those that this agent has not yet. If the future is dropped, what has begun goes on as with
    /// [`Self::set_up`].
    ///
    /// # Errors
    /// Every volume that cannot be; it keeps its old content. The others are brought up to date.
    pub async fn refresh(&self, pod: &Pod, memory: Option<i64>) -> Result<RefreshDue, Vec<FailedVolume>> {
        let setting_up = self.in_progress.set_up(uid_of(pod)).await;
        let outdated = mounted_volumes(pod).filter(|volume| self.is_to_refresh(pod, volume));
        let wanted: Vec<Wanted<'_>> = outdated.map(|volume| (volume, Some(SET_UP_TIMEOUT))).collect();
        let done = self.set_up_those(&setting_up, (pod, true), memory, &wanted).await;
        let (mut failed, mut refresh_at) = (Vec::new(), None);
        for (done, (volume, _)) in done.into_iter().zip(&wanted) {
            match done {
                Ok(ready) => refresh_at = refresh_at.into_iter().chain(ready.refresh_at).min(),
                Err(error) => failed.push(FailedVolume { volume: volume.name.clone(), error }),
            }
        }
        match failed.is_empty() {
            true => Ok(RefreshDue { refresh_at, refresh_after: self.refresh_after(pod) }),
            false => Err(failed),
        }
    }

    /// Sets up these volumes beside each other; of a pod that has them already, brings them up to date if `is_refresh`.
    async fn set_up_those(
        &self,
        setting_up: &SettingUp,
        (pod, is_refresh): (&Pod, bool),
        memory: Option<i64>,
        wanted: &[Wanted<'_>],
    ) -> Vec<Result<Ready, VolumeError>> {
        let of_pod = Arc::new(OfPod { pod: pod.clone(), memory, uses: ContainerUses::of(pod), is_refresh });
        let mut attempts = Vec::new();
        for (volume, limit) in wanted {
            attempts.push(within(*limit, self.set_up_in_task(setting_up, &of_pod, volume)));
        }
        join_all(attempts).await
    }

    /// Sets a volume up in a task, once none does so, nor another volume of the same claim. One that may grow is refreshed
    /// beside that. A future that is dropped before has begun nothing.
    async fn set_up_in_task(
        &self,
        setting_up: &SettingUp,
        of_pod: &Arc<OfPod>,
        volume: &Volume,
    ) -> Result<Ready, VolumeError> {
        let requested = Instant::now();
        // An expansion locks the place of the device, and may take long: the restart of a container does not wait for it.
        let alone = match of_pod.is_refresh && self.only_grows(&of_pod.pod, volume) {
            true => None,
            false => Some(setting_up.lock(lock_name(volume)).await),
        };
        let (own, setting_up, of_pod, volume) = (self.clone(), setting_up.clone(), of_pod.clone(), volume.clone());
        let task = async move {
            let _alone = alone;
            own.set_up_one(&setting_up, &of_pod, &volume, requested).await
        };
        let done = tokio::spawn(task.in_current_span()).await;
        done.unwrap_or_else(|error| Err(VolumeError::Interrupted(error.to_string())))
    }

    async fn set_up_one(
        &self,
        setting_up: &SettingUp,
        of_pod: &OfPod,
        volume: &Volume,
        requested: Instant,
    ) -> Result<Ready, VolumeError> {
        let OfPod { pod, memory, uses, is_refresh } = of_pod;
        let plugin = self.plugins.of(volume);
        let plugin = plugin.ok_or_else(|| VolumeError::Unsupported { volume: volume.name.clone() })?;
        let (uid, over) = (uid_of(pod), setting_up.over());
        let fs_group = super::fs_group(pod).filter(|_| plugin.attributes().fs_group);
        let began = Instant::now();
        let (dirs, actual, memory, is_refresh) = (&self.dirs, &self.actual, *memory, *is_refresh);
        let target = Target { dirs, actual, pod, uid, volume, uses, fs_group, memory, is_refresh, over };
        let done = plugin.set_up(target).await;
        // It is set up; or, as upstream, there is no volume yet of which an attempt could be counted or timed.
        if matches!(done, Err(VolumeError::Step { step: Step::Expand | Step::MapAffinity, .. } | VolumeError::Claim(_)))
        {
            return done;
        }
        let (mut name, backing) = plugin.backing(uid, volume);
        let mut is_map = false;
        // Then it is not recorded what the volume is.
        if let Err(VolumeError::Step { step, source, .. }) = &done {
            match (step, &**source) {
                (Step::MountAffinity(of_volume), _) => name = *of_volume,
                (step, VolumeError::InUse(of_volume)) => (name, is_map) = (*of_volume, matches!(step, Step::Map(_))),
                _ => {}
            }
        }
        let refreshes = plugin.attributes().refreshes;
        let is_device = is_map || plugin.measured_by(uid, volume) == Some(MeasuredBy::Device);
        let operation = if is_device { "map_volume" } else { "volume_mount" };
        let is_counted = actual.mounted(uid, &backing, (name, refreshes), operation, began.elapsed(), done.is_ok());
        let waited = actual.attempted(uid, &volume.name, requested, done.is_ok());
        // Of a raw device the kubelet does not time that.
        if is_counted && done.is_ok() && !is_device {
            actual.mounted_after(name, waited);
        }
        done
    }
}

/// Volumes with the same one are set up one after another: those of one claim have the same directory or device.
fn lock_name(volume: &Volume) -> &str {
    let claim = volume.persistent_volume_claim.as_ref();
    claim.map_or(&volume.name, |claim| &claim.claim_name)
}

/// Waits for a set-up, if `limit` is given at most for so long; it goes on then.
async fn within(
    limit: Option<Duration>,
    set_up: impl Future<Output = Result<Ready, VolumeError>>,
) -> Result<Ready, VolumeError> {
    match limit {
        Some(limit) => tokio::time::timeout(limit, set_up).await.unwrap_or(Err(VolumeError::GoesOn(limit))),
        None => set_up.await,
    }
}
