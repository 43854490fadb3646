//! The HTTP GET action of probes and lifecycle hooks: the request of an `HTTPGetAction`, and sending it.
//!
//! What is sent follows from the action alone ([`HttpGet::new`], pure). The server is not trusted: each
//! request has a connection of its own, proxies are not used, certificates are not verified, redirects are followed only to
//! the same host, and of heads and bodies no more than [`MAX_HEAD`] and [`MAX_BODY`] is read.

mod connection;
mod dial;
mod error;
mod http2;
mod port;
mod redirect;
mod request;
mod resolver;
mod send;
mod target;
#[cfg(test)]
mod tests;
mod tls;

pub(crate) use dial::dial;
pub use error::DialError;
pub use error::HttpGetError;
pub(crate) use http2::Http2;
pub use port::PortError;
pub use port::resolve_port;
pub use request::Caller;
pub use request::HttpGet;
pub use send::Response;
pub use send::notify;
pub use send::send;
pub(crate) use target::join_host_port;

/// What is read of a response's body, in bytes; upstream's limit.
pub const MAX_BODY: usize = 10 * 1024;
/// The longest head of a response, in bytes. Upstream reads 10 MiB, which a container could make the agent hold for each
/// of its probes.
pub const MAX_HEAD: usize = 1024 * 1024;
