//! Why an object could not be had, in the words users of kubelets know.

/// An object, a token or the services that cannot be had now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// The API server has no such object.
    #[error("{kind} {name:?} not found")]
    NotFound {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// No registered pod refers to it.
    #[error("object {namespace:?}/{name:?} not registered")]
    NotRegistered {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// It has not been read yet.
    #[error("failed to sync {kind} cache: {cause}")]
    NotSynced {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// Why not.
        cause: String,
    },
    /// A name no object can have.
    #[error("{kind} {name:?} cannot exist: the name is not a DNS subdomain")]
    BadName {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// What was given.
        name: String,
    },
    /// The API server refused to hand it out, or cannot be reached.
    #[error("{0}")]
    Api(String),
    /// There is no API server.
    #[error("not supported due to running kubelet in standalone mode")]
    Standalone,
    /// There is no API server to ask for tokens.
    #[error("cannot use TokenManager when kubelet is in standalone mode")]
    StandaloneToken,
    /// No token could be had.
    #[error("failed to fetch token: {0}")]
    NoToken(String),
    /// The token in memory is no longer valid.
    #[error("token {key} expired and refresh failed: {cause}")]
    TokenExpired {
        /// What it claims.
        key: String,
        /// Why there is no new one.
        cause: String,
    },
    /// The service watch has not had its first answer.
    #[error("services have not yet been read at least once, cannot construct envvars")]
    NoServices,
}

impl ObjectError {
    /// The object does not exist: an optional reference to it is satisfied.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }
}

/// What an API call failed with, without the client's own decoration.
pub(super) fn describe(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => status.message.clone(),
        error => error.to_string(),
    }
}

/// The HTTP status of an API error.
pub(super) fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}
