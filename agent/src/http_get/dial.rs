//! Connections to a host of probes and hooks.
//!
//! Sockets keep the default of closing in the background. Upstream sets SO_LINGER to one second, which on Linux makes
//! `close` wait for the peer: here that would be a thread of all tasks.

use std::net::IpAddr;
use std::net::Ipv4Addr;
use std::net::SocketAddr;
use std::sync::LazyLock;

use tokio::net::TcpStream;

use super::DialError;
use super::error::io_reason;
use super::resolver::Resolver;

/// Names that are resolved at a time, for all probes and hooks of the node.
const LOOKUPS: usize = 64;

static RESOLVER: LazyLock<Resolver> = LazyLock::new(|| Resolver::of_node(LOOKUPS));

/// Connects to a name or an address; an empty host is this node. Names are resolved by the node's resolver. Waits as long
/// as the resolver and the kernel do: the caller sets the limit. Cancel-safe.
pub(crate) async fn dial(host: &str, port: u16) -> Result<TcpStream, DialError> {
    let mut failed = DialError::Lookup { host: host.to_owned(), reason: "no such host".to_owned() };
    for address in addresses(host, port).await? {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => {
                failed = DialError::Connect { address: address.to_string(), reason: io_reason(&error) };
            }
        }
    }
    Err(failed)
}

async fn addresses(host: &str, port: u16) -> Result<Vec<SocketAddr>, DialError> {
    if host.is_empty() {
        return Ok(vec![(Ipv4Addr::LOCALHOST, port).into()]);
    }
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![(address, port).into()]);
    }
    let found = RESOLVER.addresses(host, port).await;
    found.map_err(|reason| DialError::Lookup { host: host.to_owned(), reason })
}
