//! The configuration as `/configz` shows it.

use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::RwLock;

use serde_json::Value;

/// The effective configuration. Some of it becomes known while the agent starts: the cgroup driver of the runtime, the
/// certificate that was made. Clones share it.
#[derive(Clone, Debug)]
pub struct Configz(Arc<RwLock<Value>>);

impl Configz {
    /// Of a document with the standard configuration as `kubeletconfig`.
    pub fn new(document: Value) -> Self {
        Self(Arc::new(RwLock::new(document)))
    }

    /// Sets a field of the standard configuration.
    pub fn set(&self, field: &str, value: impl Into<Value>) {
        // A field is replaced whole.
        self.0.write().unwrap_or_else(PoisonError::into_inner)["kubeletconfig"][field] = value.into();
    }

    /// The document as JSON.
    pub fn text(&self) -> String {
        self.0.read().unwrap_or_else(PoisonError::into_inner).to_string()
    }
}
