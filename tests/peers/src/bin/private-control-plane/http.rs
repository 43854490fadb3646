//! One HTTP request at a time, over TLS or in the open. Owns what starting and ordering a control plane need of HTTP;
//! refuses to keep connections and to be a client for anybody else.

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
pub struct Request<'a> {
    /// `GET`, `POST`, …
    pub method: &'a str,
    /// Path and query.
    pub path: &'a str,
    /// A JSON body, or null for none.
    pub body: Value,
}

/// An answer.
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The body, whatever it is.
    pub body: String,
}

/// Talks TLS as one identity and trusts one authority.
#[derive(Clone)]
pub struct Client(TlsConnector);

impl Client {
    /// Reads the identity and the authority.
    pub fn new(ca: &Path, certificate: &Path, key: &Path) -> Result<Self> {
        let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        let parse = |path: &Path| {
            CertificateDer::from_pem_slice(&read(path)?).with_context(|| format!("{} is no PEM", path.display()))
        };
        let mut roots = RootCertStore::empty();
        roots.add(parse(ca)?).with_context(|| format!("{} is no authority", ca.display()))?;
        let key = PrivateKeyDer::from_pem_slice(&read(key)?).with_context(|| format!("{} is no key", key.display()))?;
        let config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![parse(certificate)?], key)
            .context("certificate and key do not fit each other")?;
        Ok(Self(TlsConnector::from(Arc::new(config))))
    }

    /// Sends a request over TLS.
    pub async fn send(&self, address: SocketAddrV4, request: &Request<'_>) -> Result<Answer> {
        let talk = async {
            let name = ServerName::IpAddress(IpAddr::V4(*address.ip()).into());
            let stream = self.0.connect(name, connect(address).await?).await.context("no TLS connection")?;
            exchange(stream, address, request).await
        };
        timeout(DEADLINE, talk).await.context("no answer in time")?
    }
}

/// Sends a request in the open.
pub async fn send(address: SocketAddrV4, request: &Request<'_>) -> Result<Answer> {
    let talk = async { exchange(connect(address).await?, address, request).await };
    timeout(DEADLINE, talk).await.context("no answer in time")?
}

async fn connect(address: SocketAddrV4) -> Result<TcpStream> {
    TcpStream::connect(address).await.with_context(|| format!("nobody answers at {address}"))
}

/// HTTP/1.0: the answer comes unchunked and ends with the connection.
async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    address: SocketAddrV4,
    request: &Request<'_>,
) -> Result<Answer> {
    let body = if request.body.is_null() { String::new() } else { request.body.to_string() };
    let head = format!(
        "{} {} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        request.method,
        request.path,
        body.len()
    );
    stream.write_all(head.as_bytes()).await.context("cannot send")?;
    stream.write_all(body.as_bytes()).await.context("cannot send")?;
    let mut answer = Vec::new();
    if let Err(error) = stream.read_to_end(&mut answer).await
        && answer.is_empty()
    {
        return Err(error).context("cannot read the answer");
    }
    parse(&String::from_utf8_lossy(&answer))
}

fn parse(answer: &str) -> Result<Answer> {
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { bail!("the answer is no HTTP: {answer:?}") };
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok(Answer { status: status.with_context(|| format!("the answer has no status: {head:?}"))?, body: body.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_responses_parse() {
        let answer = parse("HTTP/1.0 503 Service Unavailable\r\nA: b\r\n\r\nnot\r\n\r\nyet").unwrap();
        assert_eq!((answer.status, answer.body.as_str()), (503, "not\r\n\r\nyet"));
        assert!(parse("SSH-2.0\r\n").is_err());
        assert!(parse("HTTP/1.0\r\n\r\n").is_err());
    }
}
