//! Why the main port cannot be served.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why the main port cannot be opened. Each error names the field or file.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// Webhook token review is enabled, but no API server is configured.
    #[error("authentication.webhook: no client provided, cannot use webhook authentication")]
    NoAuthenticationClient,
    /// Webhook authorization is enabled, but no API server is configured.
    #[error("authorization.mode: no client provided, cannot use webhook authorization")]
    NoAuthorizationClient,
    /// The mode is empty.
    #[error("authorization.mode: no authorization mode specified")]
    NoMode,
    /// The mode is unknown.
    #[error("authorization.mode: unknown authorization mode {0}")]
    UnknownMode(String),
    /// A TLS setting is not supported.
    #[error("{field}: {problem}")]
    Tls {
        /// Path of the field.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The certificate cannot be used.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The address cannot be bound.
    #[error("cannot bind the address {address} (fields address and port): {cause}")]
    Listen {
        /// Which address.
        address: SocketAddr,
        /// The system's error.
        cause: io::Error,
    },
    /// The system provides no random bytes.
    #[error("the system provides no random bytes")]
    Random,
}

/// Why a file with certificates or a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// It cannot be read.
    #[error("{field}: cannot read {}: {cause}", path.display())]
    Read {
        /// The field that names it.
        field: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// It cannot be written.
    #[error("cannot write {}: {cause}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        cause: io::Error,
    },
    /// Its content is invalid.
    #[error("{field}: {}: {problem}", path.display())]
    Content {
        /// The field that names it.
        field: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Only one file of the pair exists.
    #[error("{} exists but {} does not: both or neither must exist", present.display(), missing.display())]
    Half {
        /// The existing file.
        present: PathBuf,
        /// The missing file.
        missing: PathBuf,
    },
    /// A certificate cannot be generated.
    #[error("cannot generate a certificate for {host:?}: {problem}")]
    Make {
        /// For which host.
        host: String,
        /// What is wrong.
        problem: String,
    },
}
