//! The start gate of static pods: two UIDs of one full name (`name_namespace`) never act at the same time.
//!
//! Upstream polls here every 10 s; this gate wakes the next one at once.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use tokio::sync::Notify;

use crate::model::PodUid;

#[derive(Default)]
struct Name {
    holder: Option<PodUid>,
    waiting: VecDeque<PodUid>,
}

/// Who holds and who waits for each full name. Cheap to clone.
#[derive(Clone, Default)]
pub struct StartGate {
    names: Arc<Mutex<HashMap<String, Name>>>,
    freed: Arc<Notify>,
}

impl StartGate {
    /// Queues up for a name.
    pub fn join(&self, full_name: &str, uid: &PodUid) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let name = names.entry(full_name.to_owned()).or_default();
        if name.holder.as_ref() != Some(uid) && !name.waiting.contains(uid) {
            name.waiting.push_back(uid.clone());
        }
    }

    /// True if `uid` holds the name, taking it if it is free and `uid` is next.
    pub fn try_enter(&self, full_name: &str, uid: &PodUid) -> bool {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let name = names.entry(full_name.to_owned()).or_default();
        if name.holder.is_none() && name.waiting.front() == Some(uid) {
            name.waiting.pop_front();
            name.holder = Some(uid.clone());
        }
        name.holder.as_ref() == Some(uid)
    }

    /// Gives the name, or the place in the queue, back.
    pub fn leave(&self, full_name: &str, uid: &PodUid) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(name) = names.get_mut(full_name) {
            name.waiting.retain(|waiting| waiting != uid);
            if name.holder.as_ref() == Some(uid) {
                name.holder = None;
            }
            if name.holder.is_none() && name.waiting.is_empty() {
                names.remove(full_name);
            }
        }
        drop(names);
        self.freed.notify_waiters();
    }

    /// Waits until some name is given back. Create it before `try_enter`, so that nothing is missed.
    pub fn freed(&self) -> impl Future<Output = ()> + '_ {
        self.freed.notified()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_in_line_enters_when_the_holder_leaves() {
        let gate = StartGate::default();
        let [a, b, c] = ["a", "b", "c"].map(PodUid::from);
        for uid in [&a, &b, &c] {
            gate.join("web_default", uid);
        }
        assert!(!gate.try_enter("web_default", &b), "not its turn");
        assert!(gate.try_enter("web_default", &a));
        assert!(gate.try_enter("web_default", &a), "holding is entering");
        gate.leave("web_default", &b);
        gate.leave("web_default", &a);
        assert!(gate.try_enter("web_default", &c), "an edited-away intermediate is skipped");
    }
}
