//! Pod workers: one state machine per pod, the only code that starts, stops or removes containers.

pub mod generate;
