//! An HTTPS server for tests: TLS 1.3, HTTP/2 or HTTP/1.1, client certificates requested, connections counted.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http::Response;
use http_body_util::BodyExt as _;
use http_body_util::Full;
use http_body_util::StreamBody;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Frame;
use hyper::body::Incoming;
use hyper_util::rt::TokioExecutor;
use hyper_util::rt::TokioIo;
use hyper_util::server::conn::auto;
use rcgen::BasicConstraints;
use rcgen::CertificateParams;
use rcgen::DnType;
use rcgen::IsCa;
use rcgen::Issuer;
use rcgen::KeyPair;
use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::server::WebPkiClientVerifier;
use socket2::SockRef;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::tls::install_crypto;

/// A certificate authority.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its certificate.
    pub pem: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "test authority");
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Certificate and key, PEM.
    pub(crate) fn issue(&self, name: &str) -> (String, String) {
        let mut params = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        (certificate.pem(), key.serialize_pem())
    }
}

/// What the server does with a request.
pub(crate) enum Reply {
    /// Answers with status, headers and body.
    Answer(u16, Vec<(&'static str, String)>, String),
    /// Sends these lines and then nothing, without ending.
    Open(String),
    /// Never answers.
    Hang,
}

impl Reply {
    pub(crate) fn json(status: u16, body: serde_json::Value) -> Self {
        Self::Answer(status, Vec::new(), body.to_string())
    }
}

/// A received request.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// Number of the connection, from 1.
    pub connection: usize,
    /// Subject of the client certificate.
    pub client: Option<String>,
    /// Path and query.
    pub path: String,
    /// Headers.
    pub headers: http::HeaderMap,
    /// Version of HTTP.
    pub version: http::Version,
}

/// How the first connection fails. Those after it are served.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FirstConnection {
    /// It is reset during the TLS handshake.
    Reset,
    /// It is closed as soon as there is a request on it, without an answer.
    Close,
    /// GOAWAY with this error code is sent as soon as there is a request on it, which is not processed.
    GoAway(u8),
}

type Handler = Arc<dyn Fn(&Seen) -> Reply + Send + Sync>;

/// The running server; ends, and breaks all its connections, when dropped.
pub(crate) struct TestServer {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    stop: CancellationToken,
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl TestServer {
    /// Supports HTTP/1.1 only.
    pub(crate) async fn start_http1(
        authority: &Authority,
        handler: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let mut config = config(authority);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Self::start_with(config, "127.0.0.1:0".parse().expect("an address"), None, handler).await
    }

    pub(crate) async fn start(authority: &Authority, handler: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_at(authority, "127.0.0.1:0".parse().expect("an address"), handler).await
    }

    /// Its first connection fails.
    pub(crate) async fn start_failing(
        authority: &Authority,
        first: FirstConnection,
        handler: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let address = "127.0.0.1:0".parse().expect("an address");
        Self::start_with(config(authority), address, Some(first), handler).await
    }

    pub(crate) async fn start_at(
        authority: &Authority,
        address: SocketAddr,
        handler: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::start_with(config(authority), address, None, handler).await
    }

    async fn start_with(
        config: ServerConfig,
        address: SocketAddr,
        first: Option<FirstConnection>,
        handler: impl Fn(&Seen) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(address).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let tls = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let stop = CancellationToken::new();
        let (log, handler, ending) = (seen.clone(), Arc::new(handler) as Handler, stop.clone());
        tokio::spawn(async move {
            let mut connection = 0;
            while let Some(Ok((tcp, _))) = ending.run_until_cancelled(listener.accept()).await {
                connection += 1;
                if let (Some(first), 1) = (first, connection) {
                    tokio::spawn(fail(tcp, tls.clone(), first));
                    continue;
                }
                let serving = serve(tcp, tls.clone(), connection, log.clone(), handler.clone());
                tokio::spawn(ending.clone().run_until_cancelled_owned(serving));
            }
        });
        Self { address, seen, stop }
    }

    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().expect("a log").clone()
    }

    /// Waits until the log fulfils a condition.
    pub(crate) async fn until(&self, wanted: impl Fn(&[Seen]) -> bool) -> Vec<Seen> {
        for _ in 0..1000 {
            let seen = self.seen();
            if wanted(&seen) {
                return seen;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("not as wanted: {:#?}", self.seen());
    }

    /// A kubeconfig for it in `folder`, with these lines of the user.
    pub(crate) fn kubeconfig(&self, folder: &Path, authority: &Authority, user: &str) -> std::path::PathBuf {
        std::fs::write(folder.join("ca.crt"), &authority.pem).expect("written");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
             clusters: [{{name: k, cluster: {{server: 'https://{}', certificate-authority: ca.crt}}}}]\n\
             users: [{{name: u, user: {{{user}}}}}]\n",
            self.address
        );
        let file = folder.join("kubeconfig");
        std::fs::write(&file, text).expect("written");
        file
    }
}

fn config(authority: &Authority) -> ServerConfig {
    install_crypto();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).expect("PEM")).expect("a root");
    let clients = WebPkiClientVerifier::builder(Arc::new(roots)).allow_unauthenticated().build().expect("a verifier");
    let (certificate, key) = authority.issue("server");
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).expect("PEM")];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("PEM");
    let builder = ServerConfig::builder().with_client_cert_verifier(clients);
    let mut config = builder.with_single_cert(chain, key).expect("a pair");
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config
}

/// Empty settings, then GOAWAY with last stream 0 and an error code below 256, of which the last byte is missing (RFC 9113,
/// 6.5 and 6.8).
const GOODBYE: &[u8] = b"\0\0\0\x04\0\0\0\0\0\0\0\x08\x07\0\0\0\0\0\0\0\0\0\0\0\0";

async fn fail(tcp: tokio::net::TcpStream, tls: tokio_rustls::TlsAcceptor, first: FirstConnection) {
    if matches!(first, FirstConnection::Reset) {
        // Closing it sends RST.
        return SockRef::from(&tcp).set_linger(Some(Duration::ZERO)).expect("an option");
    }
    let mut stream = tls.accept(tcp).await.expect("TLS");
    let mut read = Vec::new();
    // A frame of headers: type 1, on the first stream.
    while !read.windows(6).any(|part| matches!(part, [1, _, 0, 0, 0, 1])) {
        stream.read_buf(&mut read).await.expect("a request");
    }
    let FirstConnection::GoAway(code) = first else { return };
    stream.write_all(&[GOODBYE, &[code]].concat()).await.expect("written");
    // Until the client has closed the connection, too.
    drop(stream.read_to_end(&mut read).await);
}

async fn serve(
    tcp: tokio::net::TcpStream,
    tls: tokio_rustls::TlsAcceptor,
    connection: usize,
    log: Arc<Mutex<Vec<Seen>>>,
    handler: Handler,
) {
    let Ok(stream) = tls.accept(tcp).await else { return };
    let client = stream.get_ref().1.peer_certificates().map(|chain| subject(&chain[0]));
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let seen = Seen {
            connection,
            client: client.clone(),
            path: request.uri().path_and_query().map(ToString::to_string).unwrap_or_default(),
            headers: request.headers().clone(),
            version: request.version(),
        };
        let reply = handler(&seen);
        log.lock().expect("a log").push(seen);
        async move { Ok::<_, Infallible>(answer(reply).await) }
    });
    let mut server = auto::Builder::new(TokioExecutor::new());
    server.http2().max_concurrent_streams(100);
    // An error means that the client has disconnected.
    drop(server.serve_connection(TokioIo::new(stream), service).await);
}

fn subject(certificate: &CertificateDer<'_>) -> String {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).expect("a certificate");
    let name = parsed.subject().iter_common_name().next().expect("a common name");
    name.as_str().expect("text").to_owned()
}

async fn answer(reply: Reply) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
    match reply {
        Reply::Hang => std::future::pending().await,
        Reply::Open(lines) => {
            let first = futures_util::stream::iter([Ok(Frame::data(Bytes::from(lines)))]);
            let open = futures_util::StreamExt::chain(first, futures_util::stream::pending());
            Response::new(StreamBody::new(open).boxed_unsync())
        }
        Reply::Answer(status, headers, body) => {
            let mut response = Response::builder().status(status);
            for (name, value) in headers {
                response = response.header(name, value);
            }
            response.body(Full::from(body).boxed_unsync()).expect("a response")
        }
    }
}
