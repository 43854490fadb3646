//! The collector's address: `tracing.endpoint`, in the syntax of gRPC names.

use std::fmt;
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net;
use std::path::PathBuf;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::Channel;
use tonic::transport::Endpoint;

/// The default of upstream's exporter.
const DEFAULT: &str = "localhost:4317";
/// The port of a gRPC name that has none.
const DEFAULT_PORT: u16 = 443;

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
            Self::Tcp(address) => Ok(Endpoint::from_shared(format!("http://{address}"))?.connect_lazy()),
            Self::Unix(path) => {
                let path = path.clone();
                Ok(lazy(move || UnixStream::connect(path.clone())))
            }
            Self::Abstract(name) => {
                let name = name.clone();
                Ok(lazy(move || std::future::ready(connect_abstract(&name))))
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
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector)
}

fn connect_abstract(name: &str) -> io::Result<UnixStream> {
    let stream = net::UnixStream::connect_addr(&net::SocketAddr::from_abstract_name(name)?)?;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

fn has_port(name: &str) -> bool {
    let port = name.rsplit_once(':').filter(|(host, _)| host.ends_with(']') || !host.contains(':'));
    port.is_some_and(|(_, port)| port.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

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
