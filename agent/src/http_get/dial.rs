//! Connections to a host of probes and hooks.
//!
//! Sockets keep the default of closing in the background. Upstream sets SO_LINGER to one second, which on Linux makes
//! `close` wait for the peer: here that would be a thread of all tasks.

use std::net::IpAddr;
use std::net::Ipv4Addr;
use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use socket2::SockRef;
use socket2::TcpKeepalive;
use tokio::net::TcpStream;

use super::DialError;
use super::error::io_reason;
use super::resolver::Resolver;

/// Names that are resolved at a time, for all probes and hooks of the node.
const LOOKUPS: usize = 64;
/// TCP keep-alive probes on connections without traffic, as upstream: a hook waits without a limit.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

static RESOLVER: LazyLock<Resolver> = LazyLock::new(|| Resolver::of_node(LOOKUPS));

/// Connects to a name or an address; an empty host is this node. Names are resolved by the node's resolver. Waits as long
/// as the resolver and the kernel do: the caller sets the limit. Cancel-safe.
pub(crate) async fn dial(host: &str, port: u16) -> Result<TcpStream, DialError> {
    let mut failed = DialError::Lookup { host: host.to_owned(), reason: "no such host".to_owned() };
    for address in addresses(host, port).await? {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                keep_alive(&stream);
                return Ok(stream);
            }
            Err(error) => {
                failed = DialError::Connect { address: address.to_string(), reason: io_reason(&error) };
            }
        }
    }
    Err(failed)
}

/// Lets the kernel end the connection when the peer's machine has been gone for some minutes.
fn keep_alive(stream: &TcpStream) {
    let keep_alive = TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE);
    // The connection serves without these options, too.
    let _ = SockRef::from(stream).set_tcp_keepalive(&keep_alive);
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

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_peer_whose_machine_is_gone_is_noticed_by_the_kernel() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let stream = dial("127.0.0.1", port).await.expect("connected");
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().expect("an option"));
        let times = [socket.tcp_keepalive_time(), socket.tcp_keepalive_interval()];
        assert_eq!(times.map(|time| time.expect("an option")), [KEEP_ALIVE, KEEP_ALIVE]);
    }
}
