//! The user of a request.

use std::collections::BTreeMap;

/// An authenticated client. Requests carry it as an extension.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// Such as `system:node:worker-1`.
    pub name: String,
    /// Empty if the authenticator gives none.
    pub uid: String,
    /// In the order of the authenticator.
    pub groups: Vec<String>,
    /// Further attributes from the authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
}
