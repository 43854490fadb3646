//! What other rooms ask of the sync loop: pods to be ended against their will, and no new ones.

use tokio::sync::mpsc;
use tokio::sync::watch;

use crate::model::PodUid;
use crate::workers::state::KillOptions;

/// Orders that may wait for the loop.
pub const ORDER_CAPACITY: usize = 256;

/// A pod is to end, whatever its sources say.
#[derive(Debug)]
pub struct KillOrder {
    /// The pod; one that is not there has ended already.
    pub uid: PodUid,
    /// How, and why.
    pub options: KillOptions,
}

/// Where orders come from.
#[derive(Debug)]
pub struct Orders {
    /// Pods to end.
    pub kills: mpsc::Receiver<KillOrder>,
    /// The machine goes down: no new pods.
    pub closed: watch::Receiver<bool>,
}

impl Orders {
    /// Nobody orders anything.
    pub fn none() -> Self {
        Self { kills: mpsc::channel(1).1, closed: watch::channel(false).1 }
    }
}
