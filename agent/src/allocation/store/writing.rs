//! When the files of the records are written.

use std::sync::Arc;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::runtime::Handle;

use super::Allocations;
use super::State;
use super::Which;
use crate::allocation::records::Next;
use crate::allocation::records::Records;
use crate::allocation::records::Urgency;

/// How long the end of the agent may wait for the files.
const LONGEST_FLUSH: Duration = Duration::from_secs(2);

/// Picks one of the waits of a record.
type Wait = fn(&mut Records) -> &mut bool;

impl Allocations {
    /// Starts a write of the file of a record that was changed.
    pub(super) fn store(&self, mut state: MutexGuard<'_, State>, which: Which, urgency: Urgency) {
        state.records(which).mark_changed(urgency);
        match urgency {
            Urgency::Soon => self.write_soon(state, which),
            Urgency::AtOnce => self.write_now(state, which),
        }
    }

    /// Has the file of a record written, together with what changes until the last write is a while ago.
    fn write_soon(&self, mut state: MutexGuard<'_, State>, which: Which) {
        let records = state.records(which);
        let pause = records.collected_for();
        if pause.is_zero() || Handle::try_current().is_err() {
            self.write_now(state, which);
        } else if !std::mem::replace(&mut records.collecting, true) {
            drop(state);
            self.write_after(pause, which, |records| &mut records.collecting);
        }
    }

    /// Has the file of a record written, unless a task does that already.
    fn write_now(&self, mut state: MutexGuard<'_, State>, which: Which) {
        if !state.records(which).begin_writing() {
            return;
        }
        drop(state);
        let this = self.clone();
        let write = move || this.write(which);
        match Handle::try_current() {
            Ok(handle) => drop(handle.spawn_blocking(write)),
            Err(_) => write(),
        }
    }

    /// Has a record written after a pause, if no change has done that by then. Without a runtime the next change does.
    fn write_after(&self, pause: Duration, which: Which, wait: Wait) {
        let Ok(handle) = Handle::try_current() else { return };
        let shared = Arc::downgrade(&self.0);
        handle.spawn(async move {
            tokio::time::sleep(pause).await;
            let Some(this) = shared.upgrade().map(Self) else { return };
            let mut state = this.state();
            let records = state.records(which);
            *wait(records) = false;
            if records.changed.is_some() {
                this.write_now(state, which);
            }
        });
    }

    /// Writes a record until what it lacks can wait. The caller has begun that. Blocks.
    pub(super) fn write(&self, which: Which) {
        while self.write_once(which) {}
        self.0.idle.notify_all();
        let state = self.state();
        // It may have been postponed until this write ended.
        if which == Which::Actuated && state.allocated.changed == Some(Urgency::AtOnce) {
            self.write_now(state, Which::Allocated);
        }
    }

    /// True if more is to be written at once.
    fn write_once(&self, which: Which) -> bool {
        let mut state = self.state();
        // An agent that finds what a resize allocates, but not what was applied before, would take the resize for applied.
        if which == Which::Allocated && state.actuated.on_disk < state.allocated_after {
            state.allocated.postpone();
            return false;
        }
        let content = state.records(which).take_content();
        drop(state);
        let Some(content) = content else { return false };
        // Without the lock, for which the sync loop and the workers wait.
        let written = content.write();
        let mut state = self.state();
        let next = state.records(which).ended(&content, written);
        match next {
            Next::Nothing => {}
            Next::Write(Urgency::AtOnce) => return true,
            Next::Write(Urgency::Soon) => self.write_soon(state, which),
            Next::Retry(pause) => {
                drop(state);
                self.write_after(pause, which, |records| &mut records.retrying);
            }
        }
        false
    }

    /// Writes what is not on disk yet, for the end of the agent. What cannot be written is reported and given up.
    pub async fn flush(&self) {
        let this = self.clone();
        let flushing = tokio::task::spawn_blocking(move || {
            // In this order: the second one waits for the first.
            this.flush_record(Which::Actuated);
            this.flush_record(Which::Allocated);
        });
        if tokio::time::timeout(LONGEST_FLUSH, flushing).await.is_err() {
            tracing::error!("the records of resources were not stored within {LONGEST_FLUSH:?}");
        }
    }

    /// Writes what a record lacks, after the write in progress. Blocks.
    fn flush_record(&self, which: Which) {
        let mut state = self.state();
        while state.records(which).writing {
            state = self.0.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let records = state.records(which);
        if records.changed.is_some() && records.begin_writing() {
            drop(state);
            self.write(which);
        }
    }
}
