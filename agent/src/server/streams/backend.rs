//! Connections to the runtime's streaming server.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Uri;
use rustls::pki_types::ServerName;
use rustls_platform_verifier::ConfigVerifierExt as _;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;

/// Timeout of the connection; the streaming server is on this node.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to the streaming server.
pub(super) trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

/// The address of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Backend {
    host: String,
    port: u16,
    tls: bool,
    /// Path and query of the request.
    pub(super) target: Uri,
}

/// The streaming server cannot be reached.
#[derive(Debug, thiserror::Error)]
pub(super) enum BackendError {
    #[error("URL is not set")]
    NoUrl,
    #[error("the runtime gave the stream URL {url:?}: {why}")]
    Malformed { url: String, why: String },
    #[error("error dialing backend: unknown scheme: {0}")]
    UnknownScheme(String),
    #[error("error dialing backend: {host}:{port}: {source}")]
    Dial { host: String, port: u16, source: io::Error },
}

impl Backend {
    /// Parses the runtime's URL.
    ///
    /// # Errors
    /// The URL is empty, malformed, or has an unknown scheme.
    pub(super) fn parse(url: &str) -> Result<Self, BackendError> {
        if url.is_empty() {
            return Err(BackendError::NoUrl);
        }
        let malformed = |why: String| BackendError::Malformed { url: url.to_owned(), why };
        let uri: Uri = url.parse().map_err(|error: axum::http::uri::InvalidUri| malformed(error.to_string()))?;
        let tls = match uri.scheme_str() {
            None | Some("http") => false,
            Some("https") => true,
            Some(other) => return Err(BackendError::UnknownScheme(other.to_owned())),
        };
        let host = uri.host().ok_or_else(|| malformed("it has no host".to_owned()))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let target = uri.path_and_query().map_or("/", |path| path.as_str()).parse();
        let target = target.map_err(|error: axum::http::uri::InvalidUri| malformed(error.to_string()))?;
        Ok(Self { host, port, tls, target })
    }

    /// Host and port, as a request names them.
    pub(super) fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Opens a connection. TLS is verified against the system's roots.
    ///
    /// # Errors
    /// The streaming server cannot be reached.
    pub(super) async fn connect(&self) -> Result<Box<dyn Connection>, BackendError> {
        let dial = |source| BackendError::Dial { host: self.host.clone(), port: self.port, source };
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, self.open());
        match connecting.await {
            Ok(connection) => connection.map_err(dial),
            Err(_) => Err(dial(io::Error::new(io::ErrorKind::TimedOut, "it does not accept connections"))),
        }
    }

    async fn open(&self) -> io::Result<Box<dyn Connection>> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        stream.set_nodelay(true)?;
        if !self.tls {
            return Ok(Box::new(stream));
        }
        let config = rustls::ClientConfig::with_platform_verifier().map_err(io::Error::other)?;
        let name = ServerName::try_from(self.host.clone()).map_err(io::Error::other)?;
        Ok(Box::new(tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_runtimes() {
        let backend = Backend::parse("http://127.0.0.1:4711/exec/token?x=1").unwrap();
        assert_eq!((backend.host.as_str(), backend.port, backend.tls), ("127.0.0.1", 4711, false));
        assert_eq!(backend.target, "/exec/token?x=1");
        let secure = Backend::parse("https://[::1]/attach/t").unwrap();
        assert_eq!((secure.host.as_str(), secure.port, secure.tls), ("::1", 443, true));
        assert_eq!((backend.authority().as_str(), secure.authority().as_str()), ("127.0.0.1:4711", "[::1]:443"));
        for (url, expected) in [
            ("", "URL is not set"),
            ("ftp://h/x", "error dialing backend: unknown scheme: ftp"),
            ("/exec/t", "the runtime gave the stream URL \"/exec/t\": it has no host"),
        ] {
            assert_eq!(Backend::parse(url).unwrap_err().to_string(), expected);
        }
    }

    #[tokio::test]
    async fn a_refused_connection_is_an_error() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/x", listener.local_addr().unwrap());
        drop(listener);
        let error = Backend::parse(&url).unwrap().connect().await.err().expect("no listener").to_string();
        assert!(error.starts_with("error dialing backend: 127.0.0.1:"), "{error}");
    }
}
