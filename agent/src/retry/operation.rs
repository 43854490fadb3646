//! The operations that are retried: their names in metrics, their pauses, and the event of a failure.

use std::time::Duration;

use tokio::time::Instant;

use crate::model::Backoff;

/// What is retried. The name is the label of the metrics.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operation {
    /// Inspecting a pod or executing its plan (`SyncPod`).
    SyncPod,
    /// The same while the runtime's network is not ready.
    AwaitNetwork,
    /// Stopping a pod (`SyncTerminatingPod`).
    KillPod,
    /// Releasing volumes and cgroup (`SyncTerminatedPod`).
    ReleasePod,
    /// Removing exited containers and replaced sandboxes.
    CollectGarbage,
    /// Removing containers, sandboxes, logs and directories of a deleted pod.
    RemovePod,
    /// Removing directories and cgroup of a pod that this agent has not run.
    RemoveOrphan,
    /// Removing log folders of pods that are gone.
    CollectLogs,
    /// Rotating the log of a container.
    RotateLog,
    /// Removing what an earlier agent has left of a rotation that it did not finish.
    RecoverLog,
    /// Sending the status of a pod to the API server, or deleting the pod there when it has ended.
    SendStatus,
    /// Creating or deleting the mirror pod of a static pod.
    SyncMirrorPod,
    /// Unmounting and detaching a device that no pod uses any more.
    ReleaseDevice,
    /// Removing dead containers and unused images while the node is short of disk space. Tried again whenever the eviction
    /// manager needs space, without the pause.
    ReclaimDisk,
    /// Listing the static pods that run when the agent starts.
    AdoptStaticPods,
    /// Listing the images of the Node's status.
    ListImages,
    /// Setting the pod CIDR of the node in the runtime.
    SetPodCidr,
    /// Limiting the cgroup of all pods.
    EnforceAllocatable,
}

impl Operation {
    /// The label value.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SyncPod => "sync_pod",
            Self::AwaitNetwork => "await_network",
            Self::KillPod => "kill_pod",
            Self::ReleasePod => "release_pod",
            Self::CollectGarbage => "collect_garbage",
            Self::RemovePod => "remove_pod",
            Self::RemoveOrphan => "remove_orphan",
            Self::CollectLogs => "collect_logs",
            Self::RotateLog => "rotate_log",
            Self::RecoverLog => "recover_log",
            Self::SendStatus => "send_status",
            Self::SyncMirrorPod => "sync_mirror_pod",
            Self::ReleaseDevice => "release_device",
            Self::ReclaimDisk => "reclaim_disk",
            Self::AdoptStaticPods => "adopt_static_pods",
            Self::ListImages => "list_images",
            Self::SetPodCidr => "set_pod_cidr",
            Self::EnforceAllocatable => "enforce_allocatable",
        }
    }

    /// First and longest pause. The kubelet retries a pod after 10 s, and after 1 s without network; its volumes after half
    /// a second to two minutes.
    pub(super) const fn bounds(self) -> (Duration, Duration) {
        let (first, longest) = match self {
            Self::SyncPod | Self::KillPod | Self::ReleasePod => (10_000, 60_000),
            Self::ReclaimDisk => (10_000, 300_000),
            // With what is added at random, no longer than a minute: the Node shows old images meanwhile. A kubelet lists them
            // for each status.
            Self::ListImages => (10_000, 40_000),
            Self::AwaitNetwork => (1_000, 10_000),
            Self::AdoptStaticPods => (100, 3_000),
            Self::CollectGarbage => (60_000, 300_000),
            Self::RemovePod => (1_000, 300_000),
            Self::RecoverLog => (5_000, 300_000),
            // Logs grow while rotations fail, as in an outage of the runtime; a kubelet rotates again within 10 s after it.
            Self::RotateLog => (5_000, 60_000),
            // Without it no pod gets a network.
            Self::SetPodCidr => (5_000, 60_000),
            // With what is added at random, no longer than 10 s, the period in which a kubelet sends again.
            Self::SendStatus | Self::SyncMirrorPod => (100, 6_400),
            Self::RemoveOrphan | Self::CollectLogs | Self::ReleaseDevice => (500, 122_000),
            Self::EnforceAllocatable => (60_000, 60_000),
        };
        (Duration::from_millis(first), Duration::from_millis(longest))
    }

    /// True if housekeeping retries it: each of its passes covers the whole node, so that targets are not to be due one
    /// after the other.
    pub(super) const fn is_retried_together(self) -> bool {
        matches!(self, Self::RemovePod | Self::RemoveOrphan)
    }

    /// The back-off of a target that has not failed yet.
    pub(super) fn backoff(self) -> Backoff {
        let (first, longest) = self.bounds();
        Backoff::new(first, longest)
    }

    /// The event of a failure: its reason and message. As in the kubelet, every failure to enforce node allocatable is
    /// reported, and logs for every new reason; everything else once it is stuck.
    pub(super) fn event(self, target: &str, failure: &Failure) -> Option<(&'static str, String)> {
        let Failure { reason, is_new, became_stuck, since } = *failure;
        match self {
            Self::CollectLogs => is_new.then(|| ("ContainerGCFailed", reason.to_owned())),
            Self::EnforceAllocatable => {
                let message = format!("Failed to update Node Allocatable Limits {target}: {reason}");
                Some(("FailedNodeAllocatableEnforcement", message))
            }
            _ if !became_stuck => None,
            Self::RemoveOrphan => {
                let message = format!("orphaned pod {target:?} found, but volumes are not cleaned up: {reason}");
                Some(("OrphanedPodCleanupFailed", message))
            }
            _ => {
                let minutes = since.elapsed().as_secs() / 60;
                let message = format!("{} of {target} has failed for {minutes} minutes: {reason}", self.as_str());
                Some(("OperationStuck", message))
            }
        }
    }
}

/// What to report of a failed attempt.
pub(super) struct Failure<'a> {
    /// Why the attempt failed.
    pub(super) reason: &'a str,
    /// The reason is another than the last time.
    pub(super) is_new: bool,
    /// It has failed for [`STUCK_AFTER`](super::STUCK_AFTER) for the first time, and fewer than
    /// [`MOST_REPORTED`](super::MOST_REPORTED) others are stuck.
    pub(super) became_stuck: bool,
    /// When the first attempt in a row failed.
    pub(super) since: Instant,
}
