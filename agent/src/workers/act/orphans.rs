//! Removes what orphans left. A static pod comes back under the UID that it had before: one that is there again is spared, and
//! one that comes back during the removal waits for its end before anything of it is made.

use tokio::sync::watch;

use super::ActContext;
use super::PodError;
use super::pod_termination;

/// UIDs of which something is being removed, each as often as it is.
#[derive(Debug, Default)]
pub(super) struct OrphanRemovals(watch::Sender<Vec<String>>);

/// A removal, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct OrphanRemoval<'a> {
    all: &'a OrphanRemovals,
    uid: String,
}

impl OrphanRemovals {
    /// Begins a removal; `None` if the pod is `known`. Pods must be known before [`Self::ended`] is called for them.
    pub(super) fn begin(&self, uid: &str, known: impl Fn(&str) -> bool) -> Option<OrphanRemoval<'_>> {
        if known(uid) {
            return None;
        }
        let uid = uid.to_owned();
        self.0.send_modify(|uids| uids.push(uid.clone()));
        let removal = OrphanRemoval { all: self, uid };
        // Checked again: a pod that has become known may not have seen the removal, and one that does so from now on will.
        if known(&removal.uid) { None } else { Some(removal) }
    }

    /// Waits until nothing of this UID is being removed. Cancel-safe.
    pub(super) async fn ended(&self, uid: &str) {
        let mut uids = self.0.subscribe();
        let is_removed = |uids: &Vec<String>| uids.iter().any(|removed| removed == uid);
        if !is_removed(&uids.borrow()) {
            return;
        }
        tracing::info!(pod_uid = uid, "the pod waits until what an earlier pod of its UID left is removed");
        // The sender lives as long as `self`.
        let _ = uids.wait_for(|uids| !is_removed(uids)).await;
    }
}

impl Drop for OrphanRemoval<'_> {
    fn drop(&mut self) {
        self.all.0.send_modify(|uids| {
            if let Some(index) = uids.iter().position(|removed| *removed == self.uid) {
                uids.swap_remove(index);
            }
        });
    }
}

/// Removes cgroup, volumes, range of ids and directory of a pod that is neither `known` nor in the runtime. Returns false if it
/// is known by now.
///
/// # Errors
/// The first of them that cannot be removed.
pub async fn remove_orphan(ctx: &ActContext, uid: &str, known: impl Fn(&str) -> bool) -> Result<bool, PodError> {
    let Some(_removal) = ctx.orphans.begin(uid, known) else { return Ok(false) };
    pod_termination::cleanup_orphan(ctx, uid).await?;
    Ok(true)
}
