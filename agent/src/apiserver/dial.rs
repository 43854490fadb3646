//! One connection: TCP, a proxy if there is one, TLS. All within one time limit.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering;
use std::task::Context;
use std::task::Poll;
use std::time::Duration;
use std::time::Instant;

use http::Uri;
use hyper_rustls::FixedServerNameResolver;
use hyper_rustls::HttpsConnector;
use hyper_rustls::HttpsConnectorBuilder;
use hyper_rustls::MaybeHttpsStream;
use hyper_util::client::legacy::connect::Connection as _;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::GaiAddrs;
use hyper_util::client::legacy::connect::dns::GaiResolver;
use hyper_util::client::legacy::connect::dns::Name;
use hyper_util::client::legacy::connect::proxy::SocksV5;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::proxy::matcher::Intercept;
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tower::Service;
use tower::ServiceExt as _;
use tower::util::BoxCloneSyncService;

use crate::metrics::Metrics;
use crate::proxy::Proxies;

/// TCP, proxy and TLS handshake together.
const TIMEOUT: Duration = Duration::from_secs(30);
/// TCP's own probes on silent connections, with the figures of Go's dialer: after this time,
const KEEPALIVE: Duration = Duration::from_secs(30);
/// then in this interval,
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// and after so many without an answer the connection is broken.
const KEEPALIVE_PROBES: u32 = 9;

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Tcp = BoxCloneSyncService<Uri, TokioIo<TcpStream>, BoxError>;

/// How connections are made.
pub struct Dialing {
    /// TLS of `https` URLs.
    pub tls: ClientConfig,
    /// The name that the server's certificate must be for, instead of the URL's host.
    pub server_name: Option<ServerName<'static>>,
    /// `proxy-url`, for any server.
    pub proxy: Option<Uri>,
    /// Those of the environment, without `proxy-url`.
    pub proxies: Proxies,
    /// Offer HTTP/2.
    pub http2: bool,
    /// Metrics of DNS lookups.
    pub metrics: Arc<Metrics>,
}

/// The system's resolver, timed.
#[derive(Clone)]
struct Resolver {
    system: GaiResolver,
    metrics: Arc<Metrics>,
}

impl Service<Name> for Resolver {
    type Response = GaiAddrs;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<GaiAddrs, std::io::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), std::io::Error>> {
        self.system.poll_ready(cx)
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let (metrics, host, began) = (self.metrics.clone(), name.as_str().to_owned(), Instant::now());
        let found = self.system.call(name);
        Box::pin(async move {
            let found = found.await;
            metrics.rest_client.looked_up(&host, began.elapsed());
            found
        })
    }
}

/// Opens connections.
#[derive(Clone)]
pub struct Dialer {
    https: HttpsConnector<Tcp>,
    /// Only connections with HTTP/2 are accepted.
    http2_only: bool,
    /// The server declined HTTP/2.
    declined: Arc<AtomicBool>,
}

/// The server does not support HTTP/2.
#[derive(Debug, thiserror::Error)]
#[error("the server does not support HTTP/2")]
struct Declined;

impl Dialer {
    /// For connections to `server` only.
    pub fn new(dialing: Dialing, server: &Uri) -> Self {
        let proxy = proxy(&dialing, server);
        let resolver = Resolver { system: GaiResolver::new(), metrics: dialing.metrics };
        let tcp = tcp(proxy.as_ref(), resolver);
        let builder = HttpsConnectorBuilder::new().with_tls_config(dialing.tls).https_or_http();
        let builder = match dialing.server_name {
            Some(name) => builder.with_server_name_resolver(FixedServerNameResolver::new(name)),
            None => builder,
        };
        let https = if dialing.http2 {
            builder.enable_http1().enable_http2().wrap_connector(tcp)
        } else {
            builder.enable_http1().wrap_connector(tcp)
        };
        let http2_only = dialing.http2 && server.scheme_str() == Some("https");
        Self { https, http2_only, declined: Arc::default() }
    }

    /// Whether connections without HTTP/2 fail.
    pub fn http2_only(&self) -> bool {
        self.http2_only
    }

    /// The same, but with any HTTP version if the server has declined HTTP/2.
    pub fn adapted(&self) -> Self {
        Self { http2_only: self.http2_only && !self.declined.load(Ordering::Relaxed), ..self.clone() }
    }
}

fn proxy(dialing: &Dialing, server: &Uri) -> Option<Intercept> {
    let proxy = match &dialing.proxy {
        Some(proxy) => proxy.to_string(),
        None => dialing.proxies.proxy_of(server.scheme_str()?, server.host()?, server.port_u16())?.to_owned(),
    };
    // Reads the proxy's URL alone: what goes through it is decided.
    Matcher::builder().all(proxy).build().intercept(server)
}

fn tcp(proxy: Option<&Intercept>, resolver: Resolver) -> Tcp {
    let mut tcp = HttpConnector::new_with_resolver(resolver);
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(KEEPALIVE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_PROBES));
    let Some(proxy) = proxy else { return BoxCloneSyncService::new(tcp.map_err(BoxError::from)) };
    if proxy.uri().scheme_str().is_some_and(|scheme| scheme.starts_with("socks5")) {
        let socks = SocksV5::new(proxy.uri().clone(), tcp);
        let socks = match proxy.raw_auth() {
            Some((user, password)) => socks.with_auth(user.to_owned(), password.to_owned()),
            None => socks,
        };
        return BoxCloneSyncService::new(socks.map_err(BoxError::from));
    }
    let tunnel = Tunnel::new(proxy.uri().clone(), tcp);
    let tunnel = match proxy.basic_auth() {
        Some(auth) => tunnel.with_auth(auth.clone()),
        None => tunnel,
    };
    BoxCloneSyncService::new(tunnel.map_err(BoxError::from))
}

impl Service<Uri> for Dialer {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.https.poll_ready(cx)
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let connecting = self.https.call(to);
        let (http2_only, declined) = (self.http2_only, self.declined.clone());
        Box::pin(async move {
            let Ok(connected) = tokio::time::timeout(TIMEOUT, connecting).await else {
                return Err(format!("no connection within {TIMEOUT:?}").into());
            };
            let stream = connected?;
            if http2_only && !stream.connected().is_negotiated_h2() {
                declined.store(true, Ordering::Relaxed);
                return Err(Declined.into());
            }
            Ok(stream)
        })
    }
}
