//! Order and dispatch: desired pods on one side, what happened on the other, handed to the pods' workers.

pub mod pods;
