//! Runtime state for the node's readiness. A runtime that is unreachable for less than half a minute does not make the node
//! NotReady, so that it can be restarted. Pure: time is an argument.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::runtime::RuntimeOffer;
use crate::runtime::RuntimeState;

/// For how long a runtime that was ready may be unreachable, or not ready, until it counts as down
/// (`maxWaitForContainerRuntime` of the kubelet).
const DOWN_THRESHOLD: Duration = Duration::from_secs(30);

/// State of the runtime at the last status update.
#[derive(Clone, Debug, Default)]
pub(super) struct RuntimeView {
    error: Option<String>,
    /// Of the last answer; `None` before the first one.
    network_error: Option<Option<String>>,
    /// The last offer of a ready runtime.
    offer: Option<Arc<RuntimeOffer>>,
    /// Since when it does not answer, or answers that it is not ready.
    unready_since: Option<Instant>,
}

impl RuntimeView {
    /// Updates with the newest state.
    pub(super) fn observe(&mut self, state: &RuntimeState, now: Instant) {
        match state {
            RuntimeState::Unknown => {}
            RuntimeState::Unreachable(_) => {
                self.unready_since.get_or_insert(now);
            }
            RuntimeState::NotReady { error, network_error } => {
                self.unready_since.get_or_insert(now);
                self.error = Some(error.clone());
                self.network_error = Some(network_error.clone());
            }
            RuntimeState::Ready { network_error, offer } => {
                self.unready_since = None;
                self.error = None;
                self.network_error = Some(network_error.clone());
                self.offer = Some(Arc::clone(offer));
            }
        }
    }

    /// The error of a runtime that was never ready, or has not been ready for too long.
    pub(super) fn unreachable_error(&self, now: Instant) -> Option<&'static str> {
        if self.offer.is_none() {
            return Some("container runtime status check may not have completed yet");
        }
        self.is_down(now).then_some("container runtime is down")
    }

    /// The runtime's condition `RuntimeReady`, if it is not met.
    pub(super) fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// The condition `NetworkReady`, if it is not met, whether the runtime itself is ready or not.
    pub(super) fn network_error(&self) -> Option<&str> {
        self.network_error.as_ref().map_or(Some("network state unknown"), Option::as_deref)
    }

    /// Version and features of the runtime, from its last successful status.
    pub(super) fn offer(&self) -> Option<&RuntimeOffer> {
        self.offer.as_deref()
    }

    /// When the runtime will count as down.
    pub(super) fn down_at(&self, now: Instant) -> Option<Instant> {
        self.unready_since.map(|since| since + DOWN_THRESHOLD).filter(|at| *at > now)
    }

    fn is_down(&self, now: Instant) -> bool {
        self.unready_since.is_some_and(|since| now >= since + DOWN_THRESHOLD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(network_error: Option<&str>) -> RuntimeState {
        RuntimeState::Ready { network_error: network_error.map(str::to_owned), offer: Arc::default() }
    }

    fn not_ready(network_error: Option<&str>) -> RuntimeState {
        let error = "container runtime not ready: x".to_owned();
        RuntimeState::NotReady { error, network_error: network_error.map(str::to_owned) }
    }

    #[tokio::test(start_paused = true)]
    async fn an_unreachable_runtime_counts_after_half_a_minute() {
        let (mut view, start) = (RuntimeView::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(view.unreachable_error(start), Some("container runtime status check may not have completed yet"));
        assert_eq!(view.network_error(), Some("network state unknown"));
        view.observe(&ready(None), start);
        assert_eq!((view.unreachable_error(start), view.error(), view.network_error()), (None, None, None));
        let gone = RuntimeState::Unreachable("refused".to_owned());
        view.observe(&gone, at(5));
        view.observe(&gone, at(20));
        assert_eq!((view.unreachable_error(at(34)), view.down_at(at(34))), (None, Some(at(35))));
        assert_eq!((view.unreachable_error(at(35)), view.down_at(at(35))), (Some("container runtime is down"), None));
        view.observe(&ready(None), at(40));
        assert_eq!(view.unreachable_error(at(100)), None);
    }

    #[tokio::test(start_paused = true)]
    async fn unmet_conditions_count_at_once() {
        let (mut view, now) = (RuntimeView::default(), Instant::now());
        view.observe(&not_ready(Some("no CNI")), now);
        assert!(view.unreachable_error(now).is_some(), "it was never ready");
        assert_eq!(view.network_error(), Some("no CNI"), "it has answered");
        view.observe(&ready(Some("no CNI")), now);
        assert_eq!((view.error(), view.network_error()), (None, Some("no CNI")));
        view.observe(&not_ready(None), now);
        assert_eq!((view.error(), view.unreachable_error(now)), (Some("container runtime not ready: x"), None));
        assert_eq!(view.network_error(), None, "the network is ready now");
        view.observe(&not_ready(Some("no CNI")), now);
        view.observe(&RuntimeState::Unreachable("refused".to_owned()), now);
        assert_eq!(view.network_error(), Some("no CNI"), "the last answer counts");
        assert!(view.offer().is_some(), "the last good offer is kept");
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_stays_unready_counts_as_down() {
        let (mut view, start) = (RuntimeView::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        view.observe(&ready(None), start);
        view.observe(&RuntimeState::Unreachable("refused".to_owned()), at(5));
        view.observe(&not_ready(None), at(20));
        assert_eq!((view.unreachable_error(at(34)), view.down_at(at(34))), (None, Some(at(35))));
        assert_eq!(view.unreachable_error(at(35)), Some("container runtime is down"));
        assert_eq!(view.error(), Some("container runtime not ready: x"));
        view.observe(&ready(None), at(40));
        assert_eq!((view.unreachable_error(at(100)), view.error()), (None, None));
    }
}
