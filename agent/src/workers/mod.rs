//! Pod workers: one state machine per pod, the only code that starts, stops or removes containers.

pub mod generate;
//! Pod workers: one state machine per pod, the only part that starts or stops containers.

pub mod backoff;
pub mod plan;
pub mod refuse;
