//! A recorded node for tests.

use crate::observe::replay;
use crate::observe::state::ObservedNode;

pub(crate) const RECORDING: &str = include_str!("../testdata/recording.jsonl");

/// The node at the end of the recording.
pub(crate) fn node() -> ObservedNode {
    replay::read(RECORDING.as_bytes()).expect("the recording is valid")
}
