//! Who asks.

use std::collections::BTreeMap;

/// An authenticated client. Requests carry it as an extension.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// Such as `system:node:worker-1`.
    pub name: String,
    /// Empty if the authenticator knows none.
    pub uid: String,
    /// In the authenticator's order.
    pub groups: Vec<String>,
    /// What else the authenticator said.
    pub extra: BTreeMap<String, Vec<String>>,
}
