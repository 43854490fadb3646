//! How old a paginated list may be. Pure.

use super::watch_errors::too_new;

/// How old a paginated list may be.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Freshness {
    /// Any state that the server has cached: nothing is known yet.
    Any,
    /// Not older than this resource version, which is known.
    NotOlderThan(String),
    /// The latest: the server does not have what is known.
    Latest,
}

impl Freshness {
    /// Of the list after a watch from `version` that cannot be resumed. One in the future may never come: the server was
    /// restored to an earlier state, or lags behind.
    pub(super) fn after(error: &kube::Error, version: String) -> Self {
        let in_future = matches!(error, kube::Error::Api(status) if too_new(status));
        if in_future || version.is_empty() { Self::Latest } else { Self::NotOlderThan(version) }
    }

    /// The resource version that the first page must not be older than; `None` for the latest.
    pub(super) fn version(&self) -> Option<String> {
        match self {
            Self::Any => Some("0".to_owned()),
            Self::NotOlderThan(version) => Some(version.clone()),
            Self::Latest => None,
        }
    }
}
