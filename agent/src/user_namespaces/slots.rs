//! Which ranges are taken, and by which pod. Pure, but for the random place where a search begins.

use std::collections::HashMap;
use std::collections::HashSet;

use super::IdRange;
use super::Mapping;
use super::UserNamespaceError;

/// The node's ids, cut into equal ranges.
#[derive(Debug)]
pub(super) struct Slots {
    range: IdRange,
    taken: HashSet<u32>,
    by_pod: HashMap<String, u32>,
}

impl Slots {
    pub(super) fn new(range: IdRange) -> Self {
        Self { range, taken: HashSet::new(), by_pod: HashMap::new() }
    }

    pub(super) fn has(&self, uid: &str) -> bool {
        self.by_pod.contains_key(uid)
    }

    pub(super) fn uids(&self) -> Vec<String> {
        self.by_pod.keys().cloned().collect()
    }

    /// Gives a pod the range of its file.
    ///
    /// # Errors
    /// It is none of the node's ranges, another pod's, or not the one that the pod has already.
    pub(super) fn record(&mut self, uid: &str, mapping: Mapping) -> Result<(), UserNamespaceError> {
        let slot = self.slot(mapping)?;
        match self.by_pod.get(uid) {
            Some(known) if *known == slot => Ok(()),
            Some(_) => Err(UserNamespaceError::Different { uid: uid.to_owned() }),
            None if self.taken.contains(&slot) => Err(UserNamespaceError::Taken { uid: uid.to_owned() }),
            None => {
                self.hold(uid, slot);
                Ok(())
            }
        }
    }

    /// The range that a pod has, or a free one.
    ///
    /// # Errors
    /// All are taken.
    pub(super) fn take(&mut self, uid: &str) -> Result<Mapping, UserNamespaceError> {
        let slot = match self.by_pod.get(uid) {
            Some(known) => *known,
            None => {
                // Ids of one pod that another one finds in files should not reveal when it was started.
                let free = self.free_from(fastrand::u32(..self.range.usable_slots().max(1)));
                free.ok_or(UserNamespaceError::NoFreeRange)?
            }
        };
        self.hold(uid, slot);
        Ok(self.range.mapping(slot))
    }

    /// The first free range from `start` on, with those before it last.
    pub(super) fn free_from(&self, start: u32) -> Option<u32> {
        let slots = self.range.usable_slots();
        let is_free = |slot: &u32| !self.taken.contains(slot);
        (start..slots).find(is_free).or_else(|| (0..start.min(slots)).find(is_free))
    }

    /// A pod's range can be given to others.
    pub(super) fn free(&mut self, uid: &str) {
        if let Some(slot) = self.by_pod.remove(uid) {
            self.taken.remove(&slot);
        }
    }

    fn hold(&mut self, uid: &str, slot: u32) {
        self.taken.insert(slot);
        self.by_pod.insert(uid.to_owned(), slot);
    }

    fn slot(&self, mapping: Mapping) -> Result<u32, UserNamespaceError> {
        let Mapping { first, length } = mapping;
        if length != self.range.per_pod() {
            return Err(UserNamespaceError::Length { length });
        }
        if !first.is_multiple_of(length) {
            return Err(UserNamespaceError::Offset { first });
        }
        self.range.slot(first).ok_or(UserNamespaceError::OutOfRange { first })
    }
}
