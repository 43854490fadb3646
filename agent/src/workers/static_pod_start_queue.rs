//! The start queue of static pods: at most one UID of a full name (`name_namespace`) is started at a time, in order of
//! arrival. The kubelet polls for this every 10 s; here the next UID is woken when the name is released.

use std::collections::HashMap;
use std::collections::HashSet;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use tokio::sync::Notify;

use crate::model::PodUid;

#[derive(Default)]
struct Name {
    owner: Option<PodUid>,
    waiting: VecDeque<PodUid>,
}

/// Owner and waiting UIDs of each full name. Clones share them.
#[derive(Clone, Default)]
pub struct StaticPodStartQueue {
    names: Arc<Mutex<HashMap<String, Name>>>,
    released: Arc<Notify>,
}

impl StaticPodStartQueue {
    /// Adds `uid` to the queue of the name, unless it owns it or waits already.
    pub fn enqueue(&self, full_name: &str, uid: &PodUid) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let name = names.entry(full_name.to_owned()).or_default();
        if name.owner.as_ref() != Some(uid) && !name.waiting.contains(uid) {
            name.waiting.push_back(uid.clone());
        }
    }

    /// True if `uid` owns the name; it becomes the owner if the name is free and `uid` is first in the queue.
    pub fn try_acquire(&self, full_name: &str, uid: &PodUid) -> bool {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let name = names.entry(full_name.to_owned()).or_default();
        if name.owner.is_none() && name.waiting.front() == Some(uid) {
            name.waiting.pop_front();
            name.owner = Some(uid.clone());
        }
        name.owner.as_ref() == Some(uid)
    }

    /// Releases the name, or removes `uid` from its queue.
    pub fn release(&self, full_name: &str, uid: &PodUid) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(name) = names.get_mut(full_name) {
            name.waiting.retain(|waiting| waiting != uid);
            if name.owner.as_ref() == Some(uid) {
                name.owner = None;
            }
            if name.owner.is_none() && name.waiting.is_empty() {
                names.remove(full_name);
            }
        }
        drop(names);
        self.released.notify_waiters();
    }

    /// Releases the names of all UIDs that are not in `kept`, and removes those from the queues: of pods whose worker panicked
    /// and that are gone.
    pub fn retain(&self, kept: &HashSet<PodUid>) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.retain(|_, name| {
            name.owner.take_if(|owner| !kept.contains(&*owner));
            name.waiting.retain(|uid| kept.contains(uid));
            name.owner.is_some() || !name.waiting.is_empty()
        });
        drop(names);
        self.released.notify_waiters();
    }

    /// Waits until any name is released. Create the future before `try_acquire`, so that no release is missed.
    pub fn released(&self) -> impl Future<Output = ()> + '_ {
        self.released.notified()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_waiting_uid_acquires_a_released_name() {
        let queue = StaticPodStartQueue::default();
        let [a, b, c] = ["a", "b", "c"].map(PodUid::from);
        for uid in [&a, &b, &c] {
            queue.enqueue("web_default", uid);
        }
        assert!(!queue.try_acquire("web_default", &b), "not first in the queue");
        assert!(queue.try_acquire("web_default", &a));
        assert!(queue.try_acquire("web_default", &a), "the owner acquires again");
        queue.release("web_default", &b);
        assert!(!queue.try_acquire("web_default", &c), "one that has only waited does not release the name");
        queue.release("web_default", &a);
        assert!(queue.try_acquire("web_default", &c), "a UID that left the queue is skipped");
    }

    #[tokio::test]
    async fn pods_that_are_gone_neither_own_a_name_nor_wait_for_one() {
        let queue = StaticPodStartQueue::default();
        let [gone, also_gone, waiting, other] = ["gone", "also-gone", "waiting", "other"].map(PodUid::from);
        for uid in [&gone, &also_gone, &waiting] {
            queue.enqueue("web_default", uid);
        }
        queue.enqueue("db_default", &other);
        assert!(queue.try_acquire("web_default", &gone) && queue.try_acquire("db_default", &other));
        let released = queue.released();
        queue.retain(&HashSet::from([waiting.clone(), other.clone()]));
        released.await;
        assert!(queue.try_acquire("web_default", &waiting));
        queue.enqueue("db_default", &waiting);
        assert!(!queue.try_acquire("db_default", &waiting), "its owner is still there");
    }
}
