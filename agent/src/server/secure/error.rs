//! Why the main port cannot be served.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// What keeps the main port from being opened. Each names the field or file at fault.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// Tokens are to be reviewed by an API server that there is none of.
    #[error("authentication.webhook: no client provided, cannot use webhook authentication")]
    NoAuthenticationClient,
    /// Access is to be reviewed by an API server that there is none of.
    #[error("authorization.mode: no client provided, cannot use webhook authorization")]
    NoAuthorizationClient,
    /// The mode is empty.
    #[error("authorization.mode: no authorization mode specified")]
    NoMode,
    /// The mode is none there is.
    #[error("authorization.mode: unknown authorization mode {0}")]
    UnknownMode(String),
    /// A TLS setting that cannot be met.
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
        /// What the system said.
        cause: io::Error,
    },
    /// The system has no random bytes.
    #[error("the system gives no random bytes")]
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
        /// What the system said.
        cause: io::Error,
    },
    /// It cannot be written.
    #[error("cannot write {}: {cause}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// It does not hold what it should.
    #[error("{field}: {}: {problem}", path.display())]
    Content {
        /// The field that names it.
        field: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// One of a pair is missing.
    #[error("{} exists but {} does not: both or neither must be there", present.display(), missing.display())]
    Half {
        /// The one that is there.
        present: PathBuf,
        /// The one that is not.
        missing: PathBuf,
    },
    /// A certificate cannot be made.
    #[error("cannot make a certificate for {host:?}: {problem}")]
    Make {
        /// For which host.
        host: String,
        /// What is wrong.
        problem: String,
    },
}
