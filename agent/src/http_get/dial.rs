//! Connections to a host of probes and hooks.
//!
//! Sockets keep the default of closing in the background. Upstream sets SO_LINGER to one second, which on Linux makes
//! `close` wait for the peer: here that would be a thread of all tasks.

use std::net::IpAddr;
use std::net::Ipv4Addr;
use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use futures_util::future::Either;
use futures_util::future::select;
use socket2::SockRef;
use socket2::TcpKeepalive;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::DialError;
use super::error::io_reason;
use super::resolver::Resolver;

/// Names that are resolved at a time, for all probes and hooks of the node.
const LOOKUPS: usize = 64;
/// TCP keep-alive probes on connections without traffic, as upstream: a hook waits without a limit.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long the addresses of one family are tried alone, as upstream (RFC 6555).
const OTHER_FAMILY: Duration = Duration::from_millis(300);

static RESOLVER: LazyLock<Resolver> = LazyLock::new(|| Resolver::of_node(LOOKUPS));

/// Connects to a name or an address; an empty host is this node. Names are resolved by the node's resolver. Has no timeout of
/// its own: the caller sets one. Cancel-safe.
///
/// # Errors
/// The name cannot be resolved, or none of its addresses accepts the connection.
pub(crate) async fn dial(host: &str, port: u16) -> Result<TcpStream, DialError> {
    let stream = first_of(&addresses(host, port).await?, connect).await.map_err(|failed| {
        failed.unwrap_or_else(|| DialError::Lookup { host: host.to_owned(), reason: "no such host".to_owned() })
    })?;
    keep_alive(&stream);
    Ok(stream)
}

async fn connect(address: SocketAddr) -> Result<TcpStream, DialError> {
    let stream = TcpStream::connect(address).await;
    stream.map_err(|error| DialError::Connect { address: address.to_string(), reason: io_reason(&error) })
}

/// Connects to one of the addresses of a host: to those of the family of the first one in turn, and once these have
/// failed, or beside them after [`OTHER_FAMILY`], to those of the other family. A failure is that of the first address.
async fn first_of<T, F>(addresses: &[SocketAddr], connect: impl Fn(SocketAddr) -> F) -> Result<T, Option<DialError>>
where
    F: Future<Output = Result<T, DialError>>,
{
    let is_first_family = |address: &SocketAddr| addresses.first().map(SocketAddr::is_ipv4) == Some(address.is_ipv4());
    let (first, other): (Vec<SocketAddr>, Vec<SocketAddr>) = addresses.iter().copied().partition(is_first_family);
    let mut first = std::pin::pin!(in_turn(&first, &connect));
    if other.is_empty() {
        return first.await;
    }
    match timeout(OTHER_FAMILY, first.as_mut()).await {
        Ok(Ok(connected)) => return Ok(connected),
        Ok(Err(failed)) => return in_turn(&other, &connect).await.map_err(|_| failed),
        Err(_) => {}
    }
    let other = std::pin::pin!(in_turn(&other, &connect));
    match select(first, other).await {
        Either::Left((Err(failed), other)) => other.await.map_err(|_| failed),
        Either::Right((Err(_), first)) => first.await,
        Either::Left((connected, _)) | Either::Right((connected, _)) => connected,
    }
}

async fn in_turn<T, F>(addresses: &[SocketAddr], connect: impl Fn(SocketAddr) -> F) -> Result<T, Option<DialError>>
where
    F: Future<Output = Result<T, DialError>>,
{
    let mut failed = None;
    for address in addresses {
        match connect(*address).await {
            Ok(connected) => return Ok(connected),
            Err(error) => failed = failed.or(Some(error)),
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
    use std::net::Ipv6Addr;

    use tokio::net::TcpListener;
    use tokio::time::Instant;

    use super::*;

    fn both() -> [SocketAddr; 2] {
        [(Ipv6Addr::LOCALHOST, 80).into(), (Ipv4Addr::LOCALHOST, 80).into()]
    }

    #[tokio::test(start_paused = true)]
    async fn a_family_that_does_not_answer_takes_a_moment_only() {
        let began = Instant::now();
        for addresses in [both(), [both()[1], both()[0]]] {
            let connect = |address: SocketAddr| async move {
                if address == addresses[0] {
                    std::future::pending::<()>().await;
                }
                Ok::<_, DialError>(address)
            };
            let connecting = timeout(Duration::from_secs(60), first_of(&addresses, connect));
            assert_eq!(connecting.await.expect("in time").expect("connected"), addresses[1]);
        }
        assert!(began.elapsed() < 4 * OTHER_FAMILY, "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_that_of_the_first_address() {
        let refuse_after = |pause: Duration| {
            move |address: SocketAddr| async move {
                tokio::time::sleep(pause).await;
                Err::<(), _>(DialError::Connect { address: address.to_string(), reason: "refused".to_owned() })
            }
        };
        for pause in [Duration::ZERO, 2 * OTHER_FAMILY] {
            let failed = first_of(&both(), refuse_after(pause)).await.expect_err("refused").expect("an error");
            assert_eq!(failed.to_string(), "dial tcp [::1]:80: connect: refused");
        }
        assert!(first_of(&[], refuse_after(Duration::ZERO)).await.expect_err("no address").is_none());
    }

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
