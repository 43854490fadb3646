//! A recorder whose events can be read back.

use std::sync::Arc;

use super::EventType;
use super::Loss;
use super::Queue;
use super::Recorder;
use super::RecorderObserver;
use crate::model::Clock;

/// What a recorder was told.
pub struct Told(Queue);

struct Nobody;

impl RecorderObserver for Nobody {
    fn lost(&self, _: Loss) {}
}

/// A recorder of node `node`, and what it is told.
pub fn listening() -> (Recorder, Told) {
    let (recorder, queue) = Recorder::delivering("node", Clock::System, Arc::new(Nobody));
    (recorder, Told(queue))
}

impl Told {
    /// The events since the last call: object and field path, type's first letter, reason and message.
    pub fn take(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        while let Some(told) = self.0.waiting() {
            let name = told.object.name.unwrap_or_default();
            let path = told.object.field_path.map(|path| format!(" {path}")).unwrap_or_default();
            let kind = if told.kind == EventType::Normal { 'N' } else { 'W' };
            lines.push(format!("{name}{path} {kind} {}: {}", told.reason, told.message));
        }
        lines
    }
}
