//! Pressure over the last measurements, for sparklines. Pure.

use std::collections::VecDeque;

use crate::observe::record::PressureRecord;
use crate::observe::record::Resource;

/// Measurements that are kept.
pub const SAMPLES: usize = 60;

/// Percent of time in which some task waited, by resource; the newest last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    samples: VecDeque<[u8; 3]>,
}

impl History {
    /// Adds a measurement; nothing measured counts as no wait.
    pub fn push(&mut self, record: Option<&PressureRecord>) {
        if self.samples.len() >= SAMPLES {
            self.samples.pop_front();
        }
        let percent = |resource| {
            let waiting = record.and_then(|record| record.waiting(resource));
            // A percentage fits; casts of floats saturate.
            waiting.map_or(0, |waiting| waiting.some.avg10.ceil().clamp(0.0, 100.0) as u8)
        };
        self.samples.push_back(Resource::ALL.map(percent));
    }

    /// The last `count` values of a resource, oldest first.
    pub fn last(&self, resource: Resource, count: usize) -> Vec<u8> {
        let column = Resource::ALL.iter().position(|one| *one == resource).unwrap_or_default();
        let skipped = self.samples.len().saturating_sub(count);
        self.samples.iter().skip(skipped).map(|sample| sample[column]).collect()
    }
}
