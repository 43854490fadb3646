//! Desired pods.
mod decode;
mod defaults;
mod documents;
mod field;
mod hash;
mod references;
pub mod static_pod;
mod validate;
