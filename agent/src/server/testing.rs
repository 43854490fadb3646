//! Servers of both kinds and clients for them, for tests.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use rustls::ClientConfig;
use rustls::RootCertStore;
use rustls::pki_types::ServerName;
use serde_json::json;
use tokio::io::AsyncRead;
use tokio::io::AsyncReadExt;
use tokio::io::AsyncWrite;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

use super::AgentState;
use super::Configz;
use super::EnabledHandlers;
use super::Handles;
use super::Metrics;
use super::Mounted;
use super::Options;
use super::SensorReport;
use super::run_main;
use super::secure::Reviews;
use super::secure::Secure;
use super::secure::SecureOptions;
use super::secure::ServingSource;
use super::secure::testing::Authority;
use super::secure::testing::Pair;
use crate::config::FeatureGates;
use crate::config::KubeletConfiguration;

/// The main port with all its handlers.
pub(super) const ALL_ON: EnabledHandlers = EnabledHandlers {
    debugging: true,
    profiling: true,
    debug_flags: true,
    system_logs: true,
    checkpoint: true,
    flagz: true,
    statusz: true,
};

/// Timeout of everything in these tests.
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

/// An agent whose state the test sets.
struct TestAgent {
    pods: Vec<Arc<Pod>>,
    /// `u64::MAX`: the loop has not started.
    sync_loop_seconds: Arc<AtomicU64>,
}

impl AgentState for TestAgent {
    fn pods(&self) -> Vec<Arc<Pod>> {
        self.pods.clone()
    }

    fn running_pods(&self) -> Result<Vec<Arc<Pod>>, String> {
        Err("no runtime yet".to_owned())
    }

    fn sensors(&self) -> Vec<SensorReport> {
        let down = SensorReport { sensor: "exits", state: "down", reason: Some("no CAP_BPF".to_owned()) };
        vec![down, SensorReport { sensor: "relist", state: "up", reason: None }]
    }

    fn sync_loop_age(&self) -> Option<Duration> {
        let seconds = self.sync_loop_seconds.load(Ordering::Relaxed);
        (seconds != u64::MAX).then(|| Duration::from_secs(seconds))
    }

    fn runtime_ready(&self) -> Result<(), String> {
        Err("no runtime yet".to_owned())
    }

    /// Needs a thread that may block, as a part of the agent's refresh does.
    fn refresh_metrics(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { tokio::task::spawn_blocking(|| ()).await.expect("no panic") })
    }

    fn set_verbosity(&self, _: u32) -> Result<(), String> {
        Ok(())
    }
}

/// Handles on an agent with these pods.
pub(super) fn handles(pods: Vec<Arc<Pod>>, sync_loop_seconds: Arc<AtomicU64>) -> Handles {
    Handles {
        agent: Arc::new(TestAgent { pods, sync_loop_seconds }),
        configz: Configz::new(json!({"kubeletconfig": {"port": 10250}})),
        version: "v1.36.3",
        flags: Arc::new([("v".to_owned(), "2".to_owned())].into()),
        metrics: Metrics::new(),
    }
}

/// A free port.
pub(super) async fn free_port() -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    listener.local_addr().expect("an address")
}

/// An answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// Status line and headers, in lower case.
    pub(super) head: String,
    pub(super) body: String,
}

/// One request on a connection of its own.
pub(super) async fn exchange(stream: impl AsyncRead + AsyncWrite, method: &str, path: &str, headers: &str) -> Answer {
    let mut stream = std::pin::pin!(stream);
    let text = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(text.as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    // The server may close without close_notify; the received bytes are used.
    let read = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut answer)).await.expect("in time");
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) =
        answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer to {path}: {read:?} {answer}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    Answer { status, head: head.to_lowercase(), body: body.to_owned() }
}

/// A running main port.
pub(super) struct MainPort {
    pub(super) address: SocketAddr,
    /// The authority of the server's certificate and of its clients'.
    pub(super) authority: Arc<Authority>,
    pub(super) folder: tempfile::TempDir,
    pub(super) metrics: Arc<Metrics>,
    pub(super) shutdown: CancellationToken,
    pub(super) task: tokio::task::JoinHandle<()>,
}

/// Builds a [`MainPort`].
pub(super) struct Setup {
    pub(super) config: KubeletConfiguration,
    pub(super) gates: FeatureGates,
    pub(super) reviews: Option<Arc<dyn Reviews>>,
    pub(super) mounted: Mounted,
    pub(super) pods: Vec<Arc<Pod>>,
    authority: Arc<Authority>,
    folder: tempfile::TempDir,
}

impl Setup {
    /// With a client authority and a serving pair in files.
    pub(super) fn new(reviews: Option<Arc<dyn Reviews>>) -> Self {
        let authority = Arc::new(Authority::new("tests"));
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
        let serving = authority.server("localhost");
        let files = [("ca.crt", authority.pem()), ("tls.crt", serving.chain_pem()), ("tls.key", serving.key_pem())];
        for (name, text) in files {
            std::fs::write(path(name), text).expect("written");
        }
        let address = "127.0.0.1".to_owned();
        let mut config = KubeletConfiguration { address, port: 0, ..KubeletConfiguration::default() };
        config.authentication.x509.client_ca_file = path("ca.crt");
        (config.tls_cert_file, config.tls_private_key_file) = (path("tls.crt"), path("tls.key"));
        let router = Router::new;
        let mounted = Mounted { debug: router(), stats: router() };
        Self { config, gates: FeatureGates::default(), reviews, mounted, pods: Vec::new(), authority, folder }
    }

    pub(super) async fn open(&self) -> Result<Secure, super::secure::SetupError> {
        let source =
            super::secure::serving_files(&self.config, &self.gates, self.folder.path(), "localhost").expect("a pair");
        self.open_with(source).await
    }

    async fn open_with(&self, source: ServingSource) -> Result<Secure, super::secure::SetupError> {
        let listener = super::secure::bind(&self.config).await?;
        let reviews = self.reviews.clone();
        let (config, gates, metrics) = (&self.config, &self.gates, Metrics::new());
        let options = SecureOptions { config, gates, node: "n1", serving: source, reviews, metrics: &metrics };
        Secure::open(listener, options)
    }

    pub(super) async fn start(self) -> MainPort {
        let main = self.open().await.expect("opens");
        self.serve(main).await
    }

    pub(super) async fn start_with(self, source: ServingSource) -> MainPort {
        let main = self.open_with(source).await.expect("opens");
        self.serve(main).await
    }

    async fn serve(self, main: Secure) -> MainPort {
        let address = main.address().expect("an address");
        let mut options = Options::new(&self.config, &self.gates);
        (options.healthz, options.read_only) = (None, None);
        let handles = handles(self.pods, Arc::default());
        let metrics = handles.metrics.clone();
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(run_main(main, options, handles, self.mounted, shutdown.clone()));
        MainPort { address, authority: self.authority, folder: self.folder, metrics, shutdown, task }
    }
}

impl MainPort {
    /// The configuration of a client that trusts the tests' authority, with its certificate if it has one.
    pub(super) fn client(&self, pair: Option<&Pair>) -> ClientConfig {
        client_of(&[&self.authority], pair)
    }

    pub(super) async fn connect(&self, config: ClientConfig) -> std::io::Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(self.address).await?;
        let name = ServerName::try_from("localhost").expect("a name");
        TlsConnector::from(Arc::new(config)).connect(name, stream).await
    }

    pub(super) async fn ask(&self, pair: Option<&Pair>, method: &str, path: &str, headers: &str) -> Answer {
        let stream = self.connect(self.client(pair)).await.expect("a connection");
        exchange(stream, method, path, headers).await
    }
}

/// A client's configuration that trusts these authorities.
pub(super) fn client_of(authorities: &[&Authority], pair: Option<&Pair>) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    for authority in authorities {
        roots.add(authority.der()).expect("an authority");
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.expect("versions").with_root_certificates(roots);
    match pair {
        Some(pair) => builder.with_client_auth_cert(pair.chain.clone(), pair.private()).expect("a pair"),
        None => builder.with_no_client_auth(),
    }
}
