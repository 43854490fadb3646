//! Order and dispatch: desired pods on one side, what happened on the other, handed to the pods' workers.

mod shared;
mod task;

pub mod pods;

pub use shared::SharedPods;
pub use task::Leftovers;
pub use task::SyncLoop;
