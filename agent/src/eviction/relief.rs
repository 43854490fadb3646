//! What precedes the eviction of a pod for a disk: what no pod needs is removed, and if that is not enough, the files of all
//! pods are measured. Both need the runtime and the disk, which may hang. What takes long goes on beside the passes of the
//! manager and delays no eviction for memory, process ids or another disk; an eviction for this disk waits for it, but
//! for each step no longer than [`LIMIT`]. While files cannot be measured, no pod is evicted for a disk.

use std::collections::HashMap;
use std::collections::HashSet;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::decision::Reclaim;
use super::manager::Manager;
use super::observe::Observe;
use super::pace;
use super::readings::is_met;
use crate::config::eviction::Signal;
use crate::config::eviction::Threshold;
use crate::model::Pod;
use crate::model::PodUid;
use crate::model::pod_ref;
use crate::stats::PodUsage;

/// How long a pass waits for the step that it begins.
const STEP_WAIT: Duration = Duration::from_secs(1);
/// How long the end of a step is waited for: as long as one call of the runtime takes that hangs, by default.
const LIMIT: Duration = Duration::from_secs(120);

/// Usage of pods; an error says why it cannot be measured.
type Usage = Result<HashMap<PodUid, PodUsage>, String>;

/// A step that has ended.
#[derive(Debug)]
enum Step {
    Reclaimed,
    /// The files of the pods `of` were measured, which ended `at`.
    Measured {
        of: HashSet<PodUid>,
        usage: Usage,
        at: Instant,
    },
}

/// The steps to relieve a disk.
#[derive(Debug, Default)]
pub(super) struct Relief {
    /// At most one for each disk, with what is removed from that.
    running: JoinSet<(Reclaim, Step)>,
    /// For what they run.
    awaited: Vec<Reclaim>,
    /// The last one, until the next one follows from it.
    ended: Option<(Reclaim, Step)>,
    containers: Removal,
    images: Removal,
    /// What measures files: at most one. It may outlast its step.
    measuring: JoinSet<()>,
}

/// The task that removes one kind of what no pod needs, at most one. It may outlast its step.
#[derive(Debug, Default)]
struct Removal {
    running: JoinSet<()>,
    /// Cancelled when it has ended.
    ended: CancellationToken,
}

impl Removal {
    /// Begins what `start` returns, unless the last one still runs: two would remove the same. Returns what is cancelled when
    /// the one that runs has ended.
    fn begin(&mut self, start: impl FnOnce() -> BoxFuture<'static, ()>) -> CancellationToken {
        while let Some(ended) = self.running.try_join_next() {
            if let Err(error) = ended {
                tracing::error!(%error, "cannot remove all unused containers and images");
            }
        }
        // Its task may still be about to return after it has ended.
        if self.running.is_empty() || self.ended.is_cancelled() {
            self.ended = CancellationToken::new();
            // It has ended if it panics, too.
            let (removing, ended) = (start(), self.ended.clone().drop_guard());
            self.running.spawn(async move {
                removing.await;
                drop(ended);
            });
        }
        self.ended.clone()
    }
}

impl Relief {
    /// A step runs beside the passes.
    fn is_running(&self) -> bool {
        !self.running.is_empty()
    }

    /// A step for the disk from which `what` is removed runs beside the passes.
    pub(super) fn is_running_for(&self, what: Reclaim) -> bool {
        self.awaited.contains(&what)
    }

    /// Waits until a step that runs has ended; forever if none does. Can be cancelled without a loss.
    pub(super) async fn next(&mut self) {
        match self.running.join_next().await {
            Some(Ok((what, step))) => {
                self.awaited.retain(|of| *of != what);
                self.ended = Some((what, step));
            }
            // It has panicked. For what it ran is not known, so that any may be begun again.
            Some(Err(error)) => {
                tracing::error!(%error, "cannot reclaim space of a file system under pressure");
                self.awaited.clear();
            }
            None => std::future::pending().await,
        }
    }

    /// Drops the result of a step that has ended: it was for a shortage that is over.
    pub(super) fn forget(&mut self) {
        self.ended = None;
    }

    /// The step that has ended, if the next one can follow from it: it was for `what`, and usage is fresh. The manager may have
    /// waited since for the end of another pod, or for a grace period.
    fn take(&mut self, what: Reclaim) -> Option<Step> {
        let (of, step) = self.ended.take()?;
        let is_old = matches!(step, Step::Measured { at, .. } if at.elapsed() > pace::LONGEST);
        (of == what && !is_old).then_some(step)
    }

    /// The step that removes what no pod needs, each kind by what `start` returns for it. A kind whose last removal still runs is
    /// waited for. Images are removed after the containers that use them, which are waited for half of the time at most.
    fn removal(
        &mut self,
        what: Reclaim,
        mut start: impl FnMut(Reclaim) -> BoxFuture<'static, ()>,
    ) -> BoxFuture<'static, Step> {
        let containers = what.containers.then(|| self.containers.begin(|| start(Reclaim { images: false, ..what })));
        let before = containers.clone();
        let images = what.images.then(|| {
            self.images.begin(|| {
                let removing = start(Reclaim { containers: false, ..what });
                Box::pin(async move {
                    if let Some(containers) = before {
                        // One that takes longer is waited for no more.
                        let _ = tokio::time::timeout(LIMIT / 2, containers.cancelled()).await;
                    }
                    removing.await;
                })
            })
        });
        Box::pin(async move {
            let all = async {
                for removed in [containers, images].into_iter().flatten() {
                    removed.cancelled().await;
                }
            };
            if tokio::time::timeout(LIMIT, all).await.is_err() {
                tracing::warn!(limit = ?LIMIT, "unused containers and images are not removed yet: pods may be evicted");
            }
            Step::Reclaimed
        })
    }

    /// The step that measures the files of the pods `of`. `None` if the last measurement still runs: each that hangs would keep
    /// a thread.
    fn measurement(
        &mut self,
        of: HashSet<PodUid>,
        start: impl FnOnce() -> BoxFuture<'static, Usage>,
    ) -> Option<BoxFuture<'static, Step>> {
        while self.measuring.try_join_next().is_some() {}
        if !self.measuring.is_empty() {
            return None;
        }
        let (sender, answer) = oneshot::channel();
        let measuring = start();
        self.measuring.spawn(async move {
            // Fails if it was not waited for.
            let _ = sender.send(measuring.await);
        });
        Some(Box::pin(async move {
            let usage = match tokio::time::timeout(LIMIT, answer).await {
                Ok(Ok(usage)) => usage,
                Ok(Err(_)) => Err("the measurement has panicked".to_owned()),
                Err(_) => Err(format!("it takes longer than {LIMIT:?}")),
            };
            Step::Measured { of, usage, at: Instant::now() }
        }))
    }

    /// Begins a step. Returns it if it ends soon.
    async fn begin(&mut self, of: Reclaim, step: impl Future<Output = Step> + Send + 'static) -> Option<Step> {
        self.awaited.push(of);
        self.running.spawn(async move { (of, step.await) });
        let ending = async {
            while self.is_running_for(of) {
                self.next().await;
            }
        };
        // If it takes longer, a later pass goes on from it.
        let _ = tokio::time::timeout(STEP_WAIT, ending).await;
        self.take(of)
    }
}

impl<O: Observe> Manager<O> {
    /// Carries out the steps for a `signal` of a disk for which `what` can be removed. Returns those of the pods that can be
    /// ranked, with their usage; `None` if enough was removed, or a step is still waited for.
    pub(super) async fn relieve_disk(
        &mut self,
        signal: Signal,
        what: Reclaim,
        thresholds: &[Threshold],
        mut pods: Vec<Pod>,
    ) -> Option<(Vec<Pod>, Usage)> {
        if self.relief.is_running_for(what) {
            return None;
        }
        let mut ended = self.relief.take(what);
        loop {
            let next = match ended {
                None if !what.is_any() => Step::Reclaimed,
                None => {
                    let step = self.relief.removal(what, |kind| self.parts.observe.reclaim(kind));
                    self.relief.begin(what, step).await?
                }
                Some(Step::Reclaimed) => {
                    if what.is_any() && !self.is_still_short(thresholds).await {
                        tracing::info!(signal = signal.as_str(), "enough was reclaimed without evicting a pod");
                        return None;
                    }
                    let of: HashSet<PodUid> = pods.iter().map(|pod| pod_ref(pod).uid).collect();
                    let Some(step) = self.relief.measurement(of, || self.parts.observe.usage(&pods, true)) else {
                        // Most likely the step for another disk measures.
                        if self.relief.is_running() {
                            return None;
                        }
                        return Some((pods, Err("the last measurement has not ended".to_owned())));
                    };
                    self.relief.begin(what, step).await?
                }
                Some(Step::Measured { of, usage, .. }) => {
                    // One that was started since would rank first, as a pod without usage.
                    pods.retain(|pod| of.contains(&pod_ref(pod).uid));
                    return Some((pods, usage));
                }
            };
            ended = Some(next);
        }
    }

    async fn is_still_short(&mut self, thresholds: &[Threshold]) -> bool {
        let now = self.parts.observe.readings().await;
        thresholds.iter().any(|threshold| is_met(threshold, &now, true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTAINERS: Reclaim = Reclaim { containers: true, images: false };
    const IMAGES: Reclaim = Reclaim { containers: false, images: true };
    const ALL: Reclaim = Reclaim { containers: true, images: true };

    #[tokio::test(start_paused = true)]
    async fn a_step_leads_to_the_next_one_only_for_the_same_disk_and_while_it_is_fresh() {
        let mut relief = Relief::default();
        for (passed, what, is_used) in [
            (STEP_WAIT, ALL, true),
            (STEP_WAIT, Reclaim { containers: false, ..ALL }, false),
            (pace::LONGEST + STEP_WAIT, ALL, false),
        ] {
            let slow = async {
                tokio::time::sleep(STEP_WAIT * 2).await;
                Step::Measured { of: HashSet::new(), usage: Ok(HashMap::new()), at: Instant::now() }
            };
            assert!(relief.begin(ALL, slow).await.is_none() && relief.is_running());
            // The manager waits for the end of a pod, and then handles the end of the step.
            tokio::time::sleep(STEP_WAIT + passed).await;
            relief.next().await;
            assert_eq!(relief.take(what).is_some(), is_used, "{passed:?} {what:?}");
            assert!(!relief.is_running() && relief.take(what).is_none());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_removal_that_hangs_is_waited_for_again_and_another_one_begins_after_its_end() {
        async fn panicking() {
            panic!("as a defect would");
        }
        let (mut relief, begin) = (Relief::default(), Instant::now());
        let (finish, finished) = oneshot::channel::<()>();
        let mut finished = Some(finished);
        let hanging = relief.removal(IMAGES, |_| {
            let finished = finished.take().unwrap();
            Box::pin(async move {
                let _ = finished.await;
            })
        });
        assert!(matches!(hanging.await, Step::Reclaimed));
        assert!((LIMIT..LIMIT + STEP_WAIT).contains(&begin.elapsed()), "{:?}", begin.elapsed());
        let waiting = relief.removal(IMAGES, |_| panic!("the first one still runs"));
        finish.send(()).unwrap();
        assert!(matches!(waiting.await, Step::Reclaimed));
        assert!(begin.elapsed() < LIMIT + STEP_WAIT, "it has ended: {:?}", begin.elapsed());
        let mut is_begun = false;
        let panics = relief.removal(IMAGES, |_| {
            is_begun = true;
            Box::pin(panicking())
        });
        assert!(matches!(panics.await, Step::Reclaimed) && is_begun);
    }

    /// The order in which kinds are removed, if `hanging` does not end.
    async fn removed(relief: &mut Relief, what: Reclaim, hanging: Reclaim) -> Vec<Reclaim> {
        let (sender, mut kinds) = tokio::sync::mpsc::unbounded_channel();
        let step = relief.removal(what, |kind| {
            let sender = sender.clone();
            Box::pin(async move {
                sender.send(kind).unwrap();
                if kind == hanging {
                    std::future::pending::<()>().await;
                }
            })
        });
        assert!(matches!(step.await, Step::Reclaimed));
        std::iter::from_fn(|| kinds.try_recv().ok()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_kind_whose_removal_hangs_does_not_keep_the_other_one_from_being_removed() {
        let (mut relief, begin) = (Relief::default(), Instant::now());
        assert_eq!(removed(&mut relief, IMAGES, IMAGES).await, [IMAGES]);
        let hung = begin.elapsed();
        assert_eq!(removed(&mut relief, CONTAINERS, IMAGES).await, [CONTAINERS]);
        assert_eq!(begin.elapsed(), hung, "the images are not waited for");
        assert_eq!(removed(&mut Relief::default(), ALL, CONTAINERS).await, [CONTAINERS, IMAGES]);
        let before = begin.elapsed();
        let in_order = removed(&mut Relief::default(), ALL, Reclaim::default()).await;
        assert_eq!(in_order, [CONTAINERS, IMAGES]);
        assert_eq!(begin.elapsed(), before, "nothing hangs");
    }

    #[tokio::test(start_paused = true)]
    async fn a_measurement_that_hangs_is_not_begun_again() {
        let (mut relief, begin) = (Relief::default(), Instant::now());
        let hanging = relief.measurement(HashSet::new(), || Box::pin(std::future::pending::<Usage>()));
        assert!(matches!(hanging.unwrap().await, Step::Measured { usage: Err(_), .. }));
        assert!((LIMIT..LIMIT + STEP_WAIT).contains(&begin.elapsed()), "{:?}", begin.elapsed());
        assert!(relief.measurement(HashSet::new(), || panic!("the first one still runs")).is_none());
        relief.measuring.shutdown().await;
        let nothing: Usage = Ok(HashMap::new());
        let next = relief.measurement(HashSet::new(), || Box::pin(std::future::ready(nothing)));
        assert!(matches!(next.unwrap().await, Step::Measured { usage: Ok(_), .. }));
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_for_one_disk_does_not_keep_another_disk_waiting() {
        let (mut relief, begin) = (Relief::default(), Instant::now());
        assert!(relief.begin(IMAGES, std::future::pending()).await.is_none());
        assert!(relief.is_running_for(IMAGES) && !relief.is_running_for(CONTAINERS));
        let short = async {
            tokio::time::sleep(STEP_WAIT / 2).await;
            Step::Reclaimed
        };
        assert!(matches!(relief.begin(CONTAINERS, short).await, Some(Step::Reclaimed)));
        assert_eq!(begin.elapsed(), STEP_WAIT + STEP_WAIT / 2);
        assert!(relief.is_running_for(IMAGES) && relief.take(IMAGES).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_that_panics_is_begun_again() {
        async fn panicking() -> Step {
            panic!("as a defect would");
        }
        let mut relief = Relief::default();
        assert!(relief.begin(ALL, panicking()).await.is_none() && !relief.is_running());
        let again = relief.begin(ALL, std::future::ready(Step::Reclaimed)).await;
        assert!(matches!(again, Some(Step::Reclaimed)), "{again:?}");
    }
}
