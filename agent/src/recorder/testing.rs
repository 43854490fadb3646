//! A recorder for tests, whose events can be read.

use std::sync::Arc;

use super::EventType;
use super::Loss;
use super::Queue;
use super::Recorder;
use super::RecorderObserver;
use crate::model::Clock;

/// The events of a recorder.
pub struct RecordedEvents(Queue);

struct NoObserver;

impl RecorderObserver for NoObserver {
    fn lost(&self, _: Loss) {}
}

/// A recorder of node `node`, and its events.
pub fn listening() -> (Recorder, RecordedEvents) {
    let (recorder, queue) = Recorder::delivering("node", Clock::System, Arc::new(NoObserver));
    (recorder, RecordedEvents(queue))
}

impl RecordedEvents {
    /// The events since the last call: object and field path, type's first letter, reason and message.
    pub fn take(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        while let Some(event) = self.0.waiting() {
            let name = event.object.name.unwrap_or_default();
            let path = event.object.field_path.map(|path| format!(" {path}")).unwrap_or_default();
            let kind = if event.kind == EventType::Normal { 'N' } else { 'W' };
            lines.push(format!("{name}{path} {kind} {}: {}", event.reason, event.message));
        }
        lines
    }
}
