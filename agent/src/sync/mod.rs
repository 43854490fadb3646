//! Order and dispatch: desired pods on one side, what happened on the other, handed to the pods' workers. Mirror pods
//! are kept in line here too; they never reach a worker.

mod mirrors;
mod orders;
mod shared;
mod task;

pub mod pods;

pub use mirrors::Mirrors;
pub use orders::KillOrder;
pub use orders::ORDER_CAPACITY;
pub use orders::Orders;
pub use shared::SharedPods;
pub use task::Leftovers;
pub use task::SyncLoop;
