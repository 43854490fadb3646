//! Why a request has no answer. The texts begin as those of upstream's client.

use std::io;

use super::PortError;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The name has no address.
    #[error("dial tcp: lookup {host}: {reason}")]
    Lookup {
        /// The name.
        host: String,
        /// The resolver's error.
        reason: String,
    },
    /// The address does not accept it.
    #[error("dial tcp {address}: connect: {reason}")]
    Connect {
        /// `address:port`.
        address: String,
        /// The system's error.
        reason: String,
    },
}

/// Why a request has no answer.
#[derive(Debug, thiserror::Error)]
pub enum HttpGetError {
    /// The action's port. The request is not sent: neither success nor failure of what it asks.
    #[error(transparent)]
    Port(#[from] PortError),
    /// The action's host can be in no URL. The request is not sent, as with a port that is none.
    #[error("parse \"{url}\": {reason}")]
    Host {
        /// The request.
        url: String,
        /// What is wrong with the host.
        reason: String,
    },
    /// The action's scheme, a header or the URL cannot be sent.
    #[error("Get \"{url}\": {reason}")]
    Invalid {
        /// The request.
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No connection.
    #[error("Get \"{url}\": {source}")]
    Dial {
        /// The request.
        url: String,
        /// The cause.
        source: DialError,
    },
    /// TLS could not be negotiated.
    #[error("Get \"{url}\": tls: {reason}")]
    Tls {
        /// The request.
        url: String,
        /// The cause.
        reason: String,
    },
    /// The answer to the TLS handshake was an HTTP response.
    #[error("Get \"{url}\": http: server gave HTTP response to HTTPS client")]
    HttpResponseToHttps {
        /// The request.
        url: String,
    },
    /// The connection ended or the server sent no valid head.
    #[error("Get \"{url}\": {reason}")]
    Exchange {
        /// The request.
        url: String,
        /// The cause.
        reason: String,
    },
    /// A redirect that cannot be followed.
    #[error("Get \"{url}\": {reason}")]
    Redirect {
        /// The location.
        url: String,
        /// The cause.
        reason: String,
    },
    /// No head of a response in time.
    #[error("Get \"{url}\": context deadline exceeded (Client.Timeout exceeded while awaiting headers)")]
    Timeout {
        /// The request.
        url: String,
    },
    /// There is a response, but its body is broken or does not end in time. Upstream's probes count it as an error, not as
    /// a failure.
    #[error("{reason}")]
    Body {
        /// The cause.
        reason: String,
    },
}

/// The kernel's text, without its number.
pub(super) fn io_reason(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => nix::errno::Errno::from_raw(number).desc().to_lowercase(),
        None => error.to_string(),
    }
}
