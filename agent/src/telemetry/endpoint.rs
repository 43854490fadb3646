//! The collector's address: `tracing.endpoint`, in the syntax of gRPC names.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::Channel;
use tonic::transport::Endpoint;

/// The default of upstream's exporter.
const DEFAULT: &str = "localhost:4317";
/// The port of a gRPC name that has none.
const DEFAULT_PORT: u16 = 443;

/// How long connecting, and the answer to an export, may take: the default of upstream's exporter. The exporter here makes one
/// export at a time and limits none over a channel that it was given: one that is never answered would be the last.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A collector's address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Collector {
    /// Host and port.
    Tcp(String),
    /// A socket in the file system.
    Unix(PathBuf),
    /// A socket in Linux's abstract namespace.
    Abstract(String),
}

impl Collector {
    /// Parses an endpoint; an empty one is the default.
    pub(super) fn parse(endpoint: &str) -> Self {
        if let Some(path) = endpoint.strip_prefix("unix:") {
            return Self::Unix(path.strip_prefix("//").unwrap_or(path).into());
        }
        if let Some(name) = endpoint.strip_prefix("unix-abstract:") {
            return Self::Abstract(name.to_owned());
        }
        let name = match endpoint.strip_prefix("dns:") {
            // The authority would name another resolver, which is not supported.
            Some(rest) => rest.strip_prefix("//").and_then(|rest| rest.split_once('/')).map_or(rest, |(_, name)| name),
            None => endpoint,
        };
        match name {
            "" => Self::Tcp(DEFAULT.to_owned()),
            name if has_port(name) => Self::Tcp(name.to_owned()),
            name => Self::Tcp(format!("{name}:{DEFAULT_PORT}")),
        }
    }

    /// A lazy, unencrypted connection, as upstream's. Needs an async runtime.
    ///
    /// # Errors
    /// The address is invalid.
    pub(super) fn channel(&self) -> Result<Channel, tonic::transport::Error> {
        match self {
            Self::Tcp(address) => Ok(bounded(Endpoint::from_shared(format!("http://{address}"))?).connect_lazy()),
            Self::Unix(path) => {
                let path = path.clone();
                Ok(lazy(move || UnixStream::connect(path.clone())))
            }
            Self::Abstract(name) => {
                // How tokio names this namespace.
                let path = format!("\0{name}");
                Ok(lazy(move || UnixStream::connect(path.clone())))
            }
        }
    }
}

impl fmt::Display for Collector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Abstract(name) => write!(f, "unix-abstract:{name}"),
        }
    }
}

fn lazy<Fut>(connect: impl Fn() -> Fut + Send + Sync + 'static) -> Channel
where
    Fut: Future<Output = io::Result<UnixStream>> + Send + 'static,
{
    let connector = tower::service_fn(move |_| {
        let connecting = connect();
        async move { connecting.await.map(TokioIo::new) }
    });
    bounded(Endpoint::from_static("http://localhost")).connect_with_connector_lazy(connector)
}

fn bounded(endpoint: Endpoint) -> Endpoint {
    endpoint.connect_timeout(TIMEOUT).timeout(TIMEOUT)
}

fn has_port(name: &str) -> bool {
    let port = name.rsplit_once(':').filter(|(host, _)| host.ends_with(']') || !host.contains(':'));
    port.is_some_and(|(_, port)| port.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
    use opentelemetry_proto::tonic::collector::trace::v1::trace_service_client::TraceServiceClient;
    use socket2::Domain;
    use socket2::SockAddr;
    use socket2::Socket;
    use socket2::Type;
    use tokio::net::TcpListener;
    use tokio::net::UnixListener;

    use super::*;

    /// The kernel accepts connections to these collectors, and no process reads from them.
    #[tokio::test(start_paused = true)]
    async fn an_export_that_is_not_answered_ends() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("collector.sock");
        let _local = UnixListener::bind(&path).expect("a socket");
        let name = path.display().to_string();
        let named = UnixListener::bind(format!("\0{name}")).expect("a socket");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        for collector in [Collector::Tcp(address), Collector::Unix(path), Collector::Abstract(name)] {
            failed_export(&collector).await;
        }
        let connected = tokio::time::timeout(TIMEOUT, named.accept()).await;
        connected.expect("it was connected to").expect("accepted");
    }

    /// Where there is no room for one more connection, a blocking socket waits for it.
    #[tokio::test]
    async fn connecting_to_a_full_socket_does_not_block_the_thread() {
        let folder = tempfile::tempdir().expect("a folder");
        let name = folder.path().display().to_string();
        let address = SockAddr::unix(format!("\0{name}")).expect("an address");
        let collector = Socket::new(Domain::UNIX, Type::STREAM, None).expect("a socket");
        collector.bind(&address).expect("bound");
        collector.listen(0).expect("listening");
        let first = Socket::new(Domain::UNIX, Type::STREAM, None).expect("a socket");
        first.connect(&address).expect("the only place");
        failed_export(&Collector::Abstract(name)).await;
    }

    async fn failed_export(collector: &Collector) {
        let mut client = TraceServiceClient::new(collector.channel().expect("a valid address"));
        let export = client.export(ExportTraceServiceRequest::default());
        let ended = tokio::time::timeout(TIMEOUT * 6, export).await;
        ended.expect("in time").expect_err("there is no answer");
    }

    #[test]
    fn notations() {
        let tcp = |address: &str| Collector::Tcp(address.to_owned());
        let table = [
            ("", tcp("localhost:4317")),
            ("collector:4317", tcp("collector:4317")),
            ("192.0.2.1:1", tcp("192.0.2.1:1")),
            ("[2001:db8::1]:4317", tcp("[2001:db8::1]:4317")),
            ("[2001:db8::1]", tcp("[2001:db8::1]:443")),
            ("collector", tcp("collector:443")),
            ("dns:collector:4317", tcp("collector:4317")),
            ("dns:///collector:4317", tcp("collector:4317")),
            ("dns://192.0.2.53/collector:4317", tcp("collector:4317")),
            ("unix:/run/otel.sock", Collector::Unix("/run/otel.sock".into())),
            ("unix:///run/otel.sock", Collector::Unix("/run/otel.sock".into())),
            ("unix:otel.sock", Collector::Unix("otel.sock".into())),
            ("unix-abstract:otel", Collector::Abstract("otel".to_owned())),
        ];
        for (endpoint, expected) in table {
            assert_eq!(Collector::parse(endpoint), expected, "{endpoint}");
        }
    }
}
