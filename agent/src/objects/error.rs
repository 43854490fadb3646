//! Errors of reading objects, with kubelet's messages.

/// Why an object, a token or the services cannot be read.
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
    /// It was not read yet.
    #[error("failed to sync {kind} cache: {cause}")]
    NotSynced {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// The cause.
        cause: String,
    },
    /// An invalid name.
    #[error("{kind} {name:?} cannot exist: the name is not a DNS subdomain")]
    BadName {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// The API server denied the request, or cannot be reached.
    #[error("{0}")]
    Api(String),
    /// There is no API server.
    #[error("not supported due to running kubelet in standalone mode")]
    Standalone,
    /// There is no API server to request tokens from.
    #[error("cannot use TokenManager when kubelet is in standalone mode")]
    StandaloneToken,
    /// No token was issued.
    #[error("failed to fetch token: {0}")]
    NoToken(String),
    /// The cached token has expired.
    #[error("token {key} expired and refresh failed: {cause}")]
    TokenExpired {
        /// The token's parameters.
        key: String,
        /// Why it was not replaced.
        cause: String,
    },
    /// The API server does not have this API.
    #[error("the API server does not serve {kind}")]
    NotServed {
        /// The resource.
        kind: &'static str,
    },
    /// No trust bundle of a signer matches.
    #[error("no clustertrustbundle of signer {signer:?} matches the label selector")]
    NoTrustBundle {
        /// The signer.
        signer: String,
    },
    /// A source of trust bundles that names neither a bundle nor a signer.
    #[error("a clusterTrustBundle source needs either name or signerName")]
    UnnamedTrustBundle,
    /// An invalid label selector.
    #[error("invalid label selector: {0}")]
    BadSelector(String),
    /// A text that is not PEM.
    #[error("{what} is not PEM: {cause}")]
    BadPem {
        /// Which text.
        what: String,
        /// What is wrong with it.
        cause: String,
    },
    /// A certificate of a pod was requested and is not issued yet.
    #[error("credential bundle is not issued yet")]
    NotIssued,
    /// The signer does not issue a certificate.
    #[error("PodCertificateRequest was permanently {verdict}: reason={reason:?} message={message:?}")]
    CertificateRefused {
        /// `denied` or `failed`.
        verdict: &'static str,
        /// The signer's reason.
        reason: String,
        /// Its explanation.
        message: String,
    },
    /// No certificate could be requested.
    #[error("cannot request a certificate: {0}")]
    NoCertificate(String),
    /// The services were not listed yet.
    #[error("services have not yet been read at least once, cannot construct envvars")]
    NoServices,
}

impl ObjectError {
    /// Whether the object does not exist, which satisfies an optional reference. One with an invalid name cannot.
    pub fn is_not_found(&self) -> bool {
        matches!(
            self,
            Self::NotFound { .. } | Self::BadName { .. } | Self::NotServed { .. } | Self::NoTrustBundle { .. }
        )
    }
}

/// The message of an API error, without the client's prefix.
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
