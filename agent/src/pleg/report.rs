//! What the PLEG reports of a change of its cache: lifecycle events with the moment they happened, and the pods whose
//! workers have to be woken.

use std::time::Duration;

use tokio::time::Instant;

use super::diff::Change;
use super::diff::adds_exit_code;
use super::diff::diff;
use super::task::PlegTask;
use crate::model::Clock;
use crate::model::ContainerId;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::KernelMoment;
use crate::model::LifecycleEvent;
use crate::model::LifecycleKind;
use crate::model::PodSnapshot;
use crate::model::Source;

impl PlegTask {
    /// Reports the changes between two snapshots of a pod, and wakes its worker if it has not received them.
    pub(super) fn emit(&self, old: Option<&PodSnapshot>, new: Option<&PodSnapshot>, source: Source) {
        let Some(pod) = new.or(old).map(|s| &s.pod) else { return };
        let changes = diff(old, new);
        let before = old.map(PodSnapshot::containers_by_id).unwrap_or_default();
        let now = new.map(PodSnapshot::containers_by_id).unwrap_or_default();
        // `ContainerDied` also comes with the removal of a container that was created and never started: no exit.
        let unstarted = |id: &ContainerId| {
            before.get(id).is_some_and(|c| c.state == ContainerState::Created) && !now.contains_key(id)
        };
        let is_exit = |change: &Change| change.kind == LifecycleKind::ContainerDied && !unstarted(&change.id);
        let exit = changes.iter().any(is_exit) || adds_exit_code(old, new);
        for change in changes {
            let happened = now.get(&change.id).and_then(|c| happened(c, change.kind, self.config.clock));
            let event = LifecycleEvent {
                pod: pod.clone(),
                kind: change.kind,
                container: change.id,
                container_name: change.name,
                exit_code: change.exit_code,
                source,
                happened,
            };
            self.report_event(&event);
        }
        // A worker that requested the inspection gets the snapshot itself. But it may already be past its decision, and an
        // exit must not be missed, nor the code of a proven exit that the decision waits for.
        if (source != Source::Worker || exit) && !same_state(old, new) {
            self.dirty.mark(pod.uid.clone());
        }
    }

    fn report_event(&self, event: &LifecycleEvent) {
        let latency = event.happened.map(|moment| moment.age(Instant::now()));
        self.config.observer.event(event, latency);
        if event.kind == LifecycleKind::ContainerChanged {
            return;
        }
        tracing::info!(
            target: "keblet::events",
            pod = %event.pod,
            pod_uid = %event.pod.uid,
            container = event.container_name,
            id = event.container.as_str(),
            event = event.kind.as_str(),
            source = event.source.as_str(),
            exit_code = event.exit_code,
            latency_ms = latency.map(|l| l.as_secs_f64() * 1000.0),
            "pod lifecycle event"
        );
    }
}

/// When it happened: the probe's time for a proven exit, else the runtime's time stamp.
fn happened(container: &ContainerStatus, kind: LifecycleKind, clock: Clock) -> Option<KernelMoment> {
    let (now, wall) = (Instant::now(), clock.wall_nanos());
    let stamp = match (kind, &container.proven) {
        (LifecycleKind::ContainerDied, Some(exit)) => {
            return Some(KernelMoment(exit.seen_at.checked_sub(exit.kernel_age.unwrap_or_default())?));
        }
        (LifecycleKind::ContainerDied, None) if container.state == ContainerState::Exited => container.finished_at,
        (LifecycleKind::ContainerStarted, _) => container.started_at,
        _ => return None,
    };
    let age = u64::try_from(wall.checked_sub(stamp).filter(|_| stamp > 0)?).ok()?;
    now.checked_sub(Duration::from_nanos(age)).map(KernelMoment)
}

/// True if nothing but the sample time differs.
fn same_state(old: Option<&PodSnapshot>, new: Option<&PodSnapshot>) -> bool {
    match (old, new) {
        (Some(old), Some(new)) => {
            old.containers == new.containers && old.sandboxes == new.sandboxes && old.ips == new.ips
        }
        (None, Some(new)) => new.containers.is_empty() && new.sandboxes.is_empty(),
        (Some(old), None) => old.containers.is_empty() && old.sandboxes.is_empty(),
        (None, None) => true,
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::model::ProvenExit;
    use crate::pleg::testing;

    const STARTED: LifecycleKind = LifecycleKind::ContainerStarted;
    const DIED: LifecycleKind = LifecycleKind::ContainerDied;

    #[tokio::test(start_paused = true)]
    async fn a_change_happened_when_the_kernel_or_else_the_runtime_says() {
        let secs = Duration::from_secs;
        tokio::time::advance(secs(100)).await;
        let clock = Clock::derived(SystemTime::UNIX_EPOCH + secs(1_000_000));
        let now = Instant::now();
        let age = |of: &ContainerStatus, kind| happened(of, kind, clock).map(|moment| moment.age(now));
        let mut of = testing::container("c", "main", ContainerState::Exited);
        (of.started_at, of.finished_at) = (clock.wall_nanos_before(secs(70)), clock.wall_nanos_before(secs(30)));
        assert_eq!((age(&of, STARTED), age(&of, DIED)), (Some(secs(70)), Some(secs(30))));
        assert_eq!(age(&of, LifecycleKind::ContainerChanged), None);
        let proof = |kernel_age| ProvenExit { seen_at: now - secs(2), kernel_age, exit_code: None, oom_killed: false };
        of.proven = Some(proof(Some(secs(1))));
        assert_eq!((age(&of, STARTED), age(&of, DIED)), (Some(secs(70)), Some(secs(3))), "the probe's time");
        of.proven = Some(proof(None));
        assert_eq!(age(&of, DIED), Some(secs(2)), "when it was seen");
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_credible_time_stamp_nothing_is_known_of_when_it_happened() {
        let clock = Clock::derived(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000));
        let mut of = testing::container("c", "main", ContainerState::Exited);
        for stamp in [0, -1, clock.wall_nanos() + 1, i64::MIN] {
            (of.started_at, of.finished_at) = (stamp, stamp);
            assert_eq!((happened(&of, STARTED, clock), happened(&of, DIED, clock)), (None, None), "{stamp}");
        }
        // Removed before it was started.
        of.state = ContainerState::Created;
        of.finished_at = clock.wall_nanos();
        assert_eq!(happened(&of, DIED, clock), None);
    }
}
