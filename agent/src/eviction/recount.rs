//! Limits on files. Sizes of large volumes are added up over minutes, between which their files change; a file that moves to
//! another directory meanwhile is counted twice. So the files of a pod that seems to exceed a limit are counted again without
//! a pause, and that count decides. Both run beside the passes of the manager: a runtime that hangs, or a large volume, delays
//! no eviction.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::task::JoinError;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::decision::IMMEDIATE;
use super::decision::Victim;
use super::local_limits;
use super::local_limits::Excess;
use super::local_limits::Needs;
use super::manager::Cause;
use super::manager::Manager;
use super::message::Notice;
use super::observe::Observe;
use super::readings::DiskLayout;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::model::spec;
use crate::stats::PodUsage;
use crate::stats::Sizes;

/// How often limits on files are checked.
const LIMITS_PERIOD: Duration = Duration::from_secs(10);
/// Pods whose files are counted again at a time. More wait for the end of a count.
const MOST_RECOUNTS: usize = 2;
/// The pause before the files of a pod are counted again that exceeded no limit, as a multiple of the time it took.
const PAUSE: u32 = 50;
/// The longest such pause: files that are written meanwhile have no limit.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Checks of the limits of all pods, and recounts of the files of some.
#[derive(Debug, Default)]
pub(super) struct Recounts {
    /// At most one.
    check: JoinSet<Vec<(Pod, PodUsage)>>,
    check_due: Option<Instant>,
    /// Pods that seemed to exceed a limit in the last check.
    suspects: Vec<(Pod, PodUsage)>,
    /// Those of them whose files are not counted again yet.
    waiting: VecDeque<(Pod, PodUsage)>,
    running: JoinSet<Recounted>,
    /// Pods that are counted, also those whose result was not used yet; with the end of the pause, those whose result was used.
    pods: HashMap<PodUid, Option<Instant>>,
    ended: Vec<Recounted>,
}

/// The usage of a pod, with the count of its volumes that decides.
#[derive(Debug)]
struct Recounted {
    pod: Pod,
    usage: PodUsage,
    took: Duration,
}

/// Pods with the usage that limits are compared with; an error says why it cannot be measured.
type Measured = BoxFuture<'static, Result<HashMap<PodUid, PodUsage>, String>>;

impl Recounts {
    /// Waits until a check has found pods that seem to exceed a limit, or the files of one are counted; forever if nothing
    /// runs. Can be cancelled without a loss.
    pub(super) async fn next(&mut self) {
        while self.suspects.is_empty() && self.ended.is_empty() {
            tokio::select! {
                Some(checked) = self.check.join_next() => {
                    // What no longer seems to exceed a limit waits no more.
                    self.waiting.clear();
                    self.suspects = checked.unwrap_or_default();
                }
                Some(recounted) = self.running.join_next() => self.keep(recounted),
                else => std::future::pending().await,
            }
        }
    }

    fn keep(&mut self, recounted: Result<Recounted, JoinError>) {
        match recounted {
            Ok(recounted) => self.ended.push(recounted),
            // It has panicked. Which pod it counted is not known, so that any may be counted again.
            Err(error) => {
                tracing::error!(%error, "the files of a pod that seems to exceed a limit were not counted");
                self.pods.clear();
            }
        }
    }

    /// A check is due, and the last one has ended.
    fn is_check_due(&mut self, now: Instant) -> bool {
        let is_due = self.check.is_empty() && self.check_due.is_none_or(|due| now >= due);
        if is_due {
            self.check_due = Some(now + LIMITS_PERIOD);
        }
        is_due
    }

    fn start_check(&mut self, pods: Vec<(Pod, Needs)>, measured: Measured, layout: DiskLayout) {
        self.check.spawn(async move {
            let mut usage = match measured.await {
                Ok(usage) => usage,
                Err(error) => {
                    tracing::warn!(error, "cannot check limits on the files of pods");
                    return Vec::new();
                }
            };
            let exceeding = pods.into_iter().filter_map(|(pod, _)| {
                let usage = usage.remove(&pod_ref(&pod).uid)?;
                local_limits::excess(&pod, &usage, layout).is_some().then_some((pod, usage))
            });
            exceeding.collect()
        });
    }

    /// Removes pods that are gone and pauses that have ended.
    fn tidy(&mut self, pods: &[Pod], now: Instant) {
        let is_there = |uid: &PodUid| pods.iter().any(|pod| pod_ref(pod).uid == *uid);
        self.pods.retain(|uid, pause| is_there(uid) && pause.is_none_or(|end| now < end));
        self.suspects.retain(|(pod, _)| is_there(&pod_ref(pod).uid));
        self.waiting.retain(|(pod, _)| is_there(&pod_ref(pod).uid));
    }

    /// The next pod whose files may be counted again.
    fn next_suspect(&mut self) -> Option<(Pod, PodUsage)> {
        self.waiting.extend(self.suspects.drain(..));
        if self.running.len() >= MOST_RECOUNTS {
            return None;
        }
        while let Some((pod, usage)) = self.waiting.pop_front() {
            if !self.pods.contains_key(&pod_ref(&pod).uid) {
                return Some((pod, usage));
            }
        }
        None
    }

    fn start(&mut self, pod: Pod, mut usage: PodUsage, sizes: BoxFuture<'static, Sizes>) {
        let uid = pod_ref(&pod).uid;
        self.pods.insert(uid.clone(), None);
        self.running.spawn(async move {
            let began = Instant::now();
            let counted = sizes.await.remove(&uid);
            usage.volumes.extend(counted.into_iter().flatten());
            Recounted { pod, usage, took: began.elapsed() }
        });
    }

    /// Pods of these that exceed a limit by the count that decides. Each is returned once.
    fn take_exceeding(&mut self, pods: &[Pod], layout: DiskLayout, now: Instant) -> Vec<(Pod, Excess)> {
        while let Some(recounted) = self.running.try_join_next() {
            self.keep(recounted);
        }
        let mut exceeding = Vec::new();
        for Recounted { pod, usage, took } in self.ended.drain(..) {
            let uid = pod_ref(&pod).uid;
            // The pod may have other limits by now, or have ended.
            let Some(pod) = pods.iter().find(|known| pod_ref(known).uid == uid) else { continue };
            match local_limits::excess(pod, &usage, layout) {
                Some(excess) => exceeding.push((pod.clone(), excess)),
                None => tracing::debug!(pod = %pod_ref(pod).full_name(), "files that moved were counted twice"),
            }
            self.pods.insert(uid, Some(now + LIMITS_PERIOD.max((took * PAUSE).min(LONGEST_PAUSE))));
        }
        exceeding
    }
}

impl<O: Observe> Manager<O> {
    /// Evicts pods that exceed their limits on files. Returns true if it evicted any.
    pub(super) async fn enforce_limits(&mut self, pods: &[Pod], layout: DiskLayout, cause: Cause) -> bool {
        if !self.parts.policy.local_storage {
            return false;
        }
        let now = Instant::now();
        self.recounts.tidy(pods, now);
        let exceeding = self.recounts.take_exceeding(pods, layout, now);
        // Both go on while pods end.
        self.recount_suspects();
        if self.recounts.is_check_due(now) {
            self.check_limits(pods, layout);
        }
        let mut recorded = Vec::new();
        for (pod, Excess { limit, message }) in exceeding {
            let notice = Notice { message, ..Notice::default() };
            let victim = Victim { pod, grace: IMMEDIATE, suspend: false, notice };
            recorded.push(self.record(victim, limit, false, cause).await);
        }
        if recorded.is_empty() {
            return false;
        }
        self.end(&recorded).await;
        true
    }

    fn check_limits(&mut self, pods: &[Pod], layout: DiskLayout) {
        let evictable = pods.iter().filter(|pod| !spec::is_critical(pod));
        let limited: Vec<(Pod, Needs)> =
            evictable.map(|pod| (pod.clone(), Needs::of(pod))).filter(|(_, needs)| needs.is_any()).collect();
        if !limited.is_empty() {
            let measured = self.parts.observe.limited(&limited);
            self.recounts.start_check(limited, measured, layout);
        }
    }

    /// Starts to count the files of pods again that seem to exceed a limit.
    fn recount_suspects(&mut self) {
        while let Some((pod, usage)) = self.recounts.next_suspect() {
            let sizes = self.parts.observe.recount(&pod);
            self.recounts.start(pod, usage, sizes);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;

    fn suspect(number: usize) -> (Pod, PodUsage) {
        let metadata = json!({"name": format!("p{number}"), "namespace": "ns", "uid": format!("uid-{number}")});
        let pod = serde_json::from_value(json!({"metadata": metadata})).expect("a pod");
        (Arc::new(pod), PodUsage::default())
    }

    #[tokio::test(start_paused = true)]
    async fn all_pods_that_a_check_finds_are_counted_again_before_the_next_check() {
        let suspects: Vec<_> = (0..5).map(suspect).collect();
        let pods: Vec<Pod> = suspects.iter().map(|(pod, _)| pod.clone()).collect();
        let mut recounts = Recounts { suspects, ..Recounts::default() };
        let counting = async {
            while recounts.pods.values().flatten().count() < pods.len() {
                recounts.tidy(&pods, Instant::now());
                while let Some((pod, usage)) = recounts.next_suspect() {
                    let sizes = async {
                        tokio::time::sleep(Duration::from_secs(1)).await;
                        Sizes::new()
                    };
                    recounts.start(pod, usage, Box::pin(sizes));
                }
                assert!(recounts.running.len() <= MOST_RECOUNTS);
                recounts.next().await;
                assert!(recounts.take_exceeding(&pods, DiskLayout::Shared, Instant::now()).is_empty());
            }
        };
        assert!(tokio::time::timeout(LIMITS_PERIOD, counting).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_count_that_found_no_excess_is_repeated_the_later_the_longer_it_took() {
        for (took, pause) in [(0, 10), (1, 50), (4, 200), (60, 300)] {
            let ((pod, usage), mut recounts) = (suspect(0), Recounts::default());
            let pods = [pod.clone()];
            let sizes = async move {
                tokio::time::sleep(Duration::from_secs(took)).await;
                Sizes::new()
            };
            recounts.start(pod.clone(), usage.clone(), Box::pin(sizes));
            recounts.next().await;
            assert!(recounts.take_exceeding(&pods, DiskLayout::Shared, Instant::now()).is_empty());
            let mut is_counted_again = || {
                recounts.tidy(&pods, Instant::now());
                recounts.suspects = vec![(pod.clone(), usage.clone())];
                recounts.next_suspect().is_some()
            };
            tokio::time::advance(Duration::from_secs(pause - 1)).await;
            assert!(!is_counted_again(), "{took}");
            tokio::time::advance(Duration::from_secs(2)).await;
            assert!(is_counted_again(), "{took}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_the_next_check_does_not_find_is_not_counted_again() {
        let mut recounts = Recounts { waiting: [suspect(0)].into(), ..Recounts::default() };
        recounts.start_check(Vec::new(), Box::pin(async { Ok(HashMap::new()) }), DiskLayout::Shared);
        assert!(tokio::time::timeout(LIMITS_PERIOD, recounts.next()).await.is_err(), "nothing was found");
        assert!(recounts.next_suspect().is_none());
    }
}
