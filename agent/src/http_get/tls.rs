//! TLS with servers whose certificates are not verified, as upstream does: a pod's server has no name that an authority
//! could confirm.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::LazyLock;
use std::task::Context;
use std::task::Poll;

use rustls::ClientConfig;
use rustls::DigitallySignedStruct;
use rustls::SignatureScheme;
use rustls::client::Resumption;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::client::danger::ServerCertVerified;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::ServerName;
use rustls::pki_types::UnixTime;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::io::ReadBuf;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Why there is no TLS connection.
pub(super) enum HandshakeError {
    /// The server answered with an HTTP response.
    HttpResponse,
    /// Anything else.
    Failed(String),
}

/// Configurations without and with HTTP/2 on offer.
static CONFIGS: LazyLock<Result<[Arc<ClientConfig>; 2], rustls::Error>> =
    LazyLock::new(|| Ok([config(&[])?, config(&[b"h2", b"http/1.1"])?]));

fn config(protocols: &[&[u8]]) -> Result<Arc<ClientConfig>, rustls::Error> {
    let installed = || Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let provider = CryptoProvider::get_default().cloned().unwrap_or_else(installed);
    let any = Arc::new(AnyServer(provider.signature_verification_algorithms.supported_schemes()));
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let mut config = builder.dangerous().with_custom_certificate_verifier(any).with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    // Servers are as short-lived as their pods.
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Negotiates TLS. Has no timeout: the caller sets one.
pub(super) async fn handshake(
    stream: TcpStream,
    host: &str,
    http2: bool,
) -> Result<TlsStream<FirstBytes>, HandshakeError> {
    let failed = |error: &dyn std::fmt::Display| HandshakeError::Failed(error.to_string());
    let [without, with] = CONFIGS.as_ref().map_err(|error| failed(error))?;
    let name = if host.is_empty() { "127.0.0.1" } else { host };
    let name = ServerName::try_from(name.to_owned()).map_err(|error| failed(&error))?;
    let connector = TlsConnector::from(if http2 { with.clone() } else { without.clone() });
    let connecting = connector.connect(name, FirstBytes { stream, first: Vec::new() }).into_fallible();
    connecting.await.map_err(|(error, stream)| match stream.first.starts_with(b"HTTP/") {
        true => HandshakeError::HttpResponse,
        false => failed(&error),
    })
}

/// A socket whose first bytes are kept, to distinguish a server without TLS from other failures.
pub(super) struct FirstBytes {
    stream: TcpStream,
    first: Vec<u8>,
}

/// Length of `HTTP/`.
const KEPT: usize = 5;

impl AsyncRead for FirstBytes {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buffer);
        let missing = KEPT - self.first.len();
        let read = buffer.filled().get(before..).unwrap_or_default();
        self.first.extend(read.iter().take(missing));
        polled
    }
}

impl AsyncWrite for FirstBytes {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Accepts every certificate, also one that cannot be read.
#[derive(Debug)]
struct AnyServer(Vec<SignatureScheme>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.clone()
    }
}
