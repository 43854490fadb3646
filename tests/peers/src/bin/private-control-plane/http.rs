//! HTTP/1.0 requests over TLS or TCP, one per connection, for starting and controlling a control plane.

use std::fs;
use std::net::IpAddr;
use std::net::SocketAddrV4;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use serde_json::Value;
use tokio::io::AsyncRead;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWrite;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;

const DEADLINE: Duration = Duration::from_secs(20);

/// A request.
pub(crate) struct Request<'a> {
    /// `GET`, `POST`, …
    pub method: &'a str,
    /// Path and query.
    pub path: &'a str,
    /// A JSON body, or null.
    pub body: Value,
}

/// An HTTP response.
pub(crate) struct Response {
    /// The status code.
    pub status: u16,
    /// The body.
    pub body: String,
}

/// A TLS client with one client certificate and one trusted authority.
#[derive(Clone)]
pub(crate) struct Client(TlsConnector);

impl Client {
    /// Reads certificate, key and authority.
    ///
    /// # Errors
    /// A file cannot be read or parsed, or key and certificate do not match.
    pub(crate) fn new(ca: &Path, certificate: &Path, key: &Path) -> Result<Self> {
        let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        let parse = |path: &Path| {
            CertificateDer::from_pem_slice(&read(path)?).with_context(|| format!("{} is not PEM", path.display()))
        };
        let mut roots = RootCertStore::empty();
        roots.add(parse(ca)?).with_context(|| format!("{} is not an authority", ca.display()))?;
        let key =
            PrivateKeyDer::from_pem_slice(&read(key)?).with_context(|| format!("{} is not a key", key.display()))?;
        let config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![parse(certificate)?], key)
            .context("certificate and key do not match")?;
        Ok(Self(TlsConnector::from(Arc::new(config))))
    }

    /// Sends a request over TLS.
    ///
    /// # Errors
    /// There is no valid response in time.
    pub(crate) async fn send(&self, address: SocketAddrV4, request: &Request<'_>) -> Result<Response> {
        let talk = async {
            let name = ServerName::IpAddress(IpAddr::V4(*address.ip()).into());
            let stream = self.0.connect(name, connect(address).await?).await.context("no TLS connection")?;
            exchange(stream, address, request).await
        };
        timeout(DEADLINE, talk).await.context("no response in time")?
    }
}

/// Sends a request over TCP.
///
/// # Errors
/// There is no valid response in time.
pub(crate) async fn send(address: SocketAddrV4, request: &Request<'_>) -> Result<Response> {
    let talk = async { exchange(connect(address).await?, address, request).await };
    timeout(DEADLINE, talk).await.context("no response in time")?
}

async fn connect(address: SocketAddrV4) -> Result<TcpStream> {
    TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))
}

/// HTTP/1.0: the response is not chunked and ends with the connection.
async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    address: SocketAddrV4,
    request: &Request<'_>,
) -> Result<Response> {
    let body = if request.body.is_null() { String::new() } else { request.body.to_string() };
    let head = format!(
        "{} {} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        request.method,
        request.path,
        body.len()
    );
    stream.write_all(head.as_bytes()).await.context("cannot send")?;
    stream.write_all(body.as_bytes()).await.context("cannot send")?;
    let mut response = Vec::new();
    if let Err(error) = stream.read_to_end(&mut response).await
        && response.is_empty()
    {
        return Err(error).context("cannot read the response");
    }
    parse(&String::from_utf8_lossy(&response))
}

fn parse(response: &str) -> Result<Response> {
    let Some((head, body)) = response.split_once("\r\n\r\n") else { bail!("the response is not HTTP: {response:?}") };
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok(Response {
        status: status.with_context(|| format!("the response has no status: {head:?}"))?,
        body: body.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_responses_parse() {
        let response = parse("HTTP/1.0 503 Service Unavailable\r\nA: b\r\n\r\nnot\r\n\r\nyet").unwrap();
        assert_eq!((response.status, response.body.as_str()), (503, "not\r\n\r\nyet"));
        assert!(parse("SSH-2.0\r\n").is_err());
        assert!(parse("HTTP/1.0\r\n\r\n").is_err());
    }
}
