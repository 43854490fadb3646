//! The proxy in front of the registry: forwards requests, records them, and makes faults.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Error;
use anyhow::Result;
use anyhow::anyhow;
use bytes::Bytes;
use http::HeaderValue;
use http::Method;
use http::StatusCode;
use http::header::AUTHORIZATION;
use http::header::CONNECTION;
use http::header::CONTENT_LENGTH;
use http::header::RANGE;
use http::header::RETRY_AFTER;
use http::header::TRANSFER_ENCODING;
use http::header::WWW_AUTHENTICATE;
use http_body_util::BodyExt as _;
use http_body_util::Empty;
use http_body_util::StreamBody;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Frame;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use reqwest::Client;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;

/// Pieces of a layer, between which it can be slow or held.
const PIECES: u64 = 32;
/// `Retry-After` of status 429, seconds.
const RETRY_AFTER_SECONDS: HeaderValue = HeaderValue::from_static("1");
const CHALLENGE: HeaderValue = HeaderValue::from_static("Basic realm=\"tests\"");

/// What goes wrong with pulls from a repository, until the fault is removed. Layers are those that no other image has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Requests for manifests have this status, and the headers that go with 401 and 429.
    Status(u16),
    /// The connection ends in the middle of a layer.
    HalfLayer,
    /// A layer takes so long, and never stops for more than a small part of it.
    Slow(Duration),
    /// A layer stops after its first piece.
    Held,
    /// A layer is not what its digest says.
    WrongLayer,
    /// A manifest is not what its digest says.
    WrongManifest,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its path.
    pub path: String,
    /// Its `Authorization`.
    pub authorization: Option<String>,
    /// Status of the answer.
    pub status: u16,
}

type Body = UnsyncBoxBody<Bytes, Error>;

/// A proxy. Its tasks end with their runtime.
pub(super) struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    http: Client,
    registry: SocketAddr,
    /// Faults by repository.
    faults: watch::Sender<BTreeMap<String, Fault>>,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    requests: Vec<Request>,
    /// Repositories with a layer that is held.
    held: BTreeSet<String>,
    /// Digests of the layers that faults concern.
    layers: BTreeSet<String>,
}

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Target<'a> {
    /// By tag or digest.
    Manifest(&'a str),
    /// By digest.
    Blob(&'a str),
    Other,
}

impl Proxy {
    pub(super) async fn start(http: Client, registry: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("no port for the registry's proxy")?;
        let address = listener.local_addr().context("the registry's proxy has no address")?;
        let shared = Shared { http, registry, faults: watch::Sender::default(), seen: Mutex::default() };
        let shared = Arc::new(shared);
        tokio::spawn(shared.clone().serve(listener));
        Ok(Self { address, shared })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Faults of layers concern this one too.
    pub(super) fn add_layer(&self, digest: &str) {
        self.shared.seen().layers.insert(digest.to_owned());
    }

    pub(super) fn set_fault(&self, repository: &str, fault: Option<Fault>) {
        self.shared.faults.send_modify(|faults| {
            faults.remove(repository);
            faults.extend(fault.map(|fault| (repository.to_owned(), fault)));
        });
    }

    pub(super) fn is_held(&self, repository: &str) -> bool {
        self.shared.seen().held.contains(repository)
    }

    pub(super) fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.shared.seen().requests)
    }
}

impl Shared {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn serve(self: Arc<Self>, listener: TcpListener) {
        while let Ok((stream, _)) = listener.accept().await {
            let shared = self.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| shared.clone().answer(request));
                // Faults close connections, and so do clients.
                drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
            });
        }
    }

    async fn answer(self: Arc<Self>, request: http::Request<Incoming>) -> Result<http::Response<Body>> {
        let path = request.uri().path().to_owned();
        let authorization = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let authorization = authorization.map(str::to_owned);
        let (repository, target) = parse(&path);
        let fault = self.faults.borrow().get(repository).copied();
        let fault = fault.filter(|fault| concerns(*fault, request.method(), target, &self.seen().layers));
        let response = match fault {
            Some(Fault::Status(status)) => refusal(status)?,
            _ => self.forward(&request, repository, fault).await?,
        };
        let status = response.status().as_u16();
        self.seen().requests.push(Request { path, authorization, status });
        Ok(response)
    }

    /// The registry's answer. An error closes the connection without one.
    async fn forward(
        self: &Arc<Self>,
        request: &http::Request<Incoming>,
        repository: &str,
        fault: Option<Fault>,
    ) -> Result<http::Response<Body>> {
        let mut headers = request.headers().clone();
        headers.remove(CONNECTION);
        if fault == Some(Fault::HalfLayer) {
            // What follows on the first half never arrives.
            headers.remove(RANGE);
        }
        let url = format!("http://{}{}", self.registry, request.uri());
        let asked = self.http.request(request.method().clone(), &url).headers(headers).send();
        let response = asked.await.with_context(|| format!("no answer to {url}"))?;
        let (status, mut headers) = (response.status(), response.headers().clone());
        for own in [CONNECTION, TRANSFER_ENCODING] {
            headers.remove(own);
        }
        let size = headers.get(CONTENT_LENGTH).and_then(|size| size.to_str().ok()?.parse().ok()).unwrap_or(0);
        let (sender, pieces) = mpsc::channel(1);
        let copy = Copy { shared: self.clone(), repository: repository.to_owned(), fault, size, sender };
        tokio::spawn(copy.run(response));
        let mut answer = http::Response::new(StreamBody::new(ReceiverStream::new(pieces)).boxed_unsync());
        (*answer.status_mut(), *answer.headers_mut()) = (status, headers);
        Ok(answer)
    }

    /// Waits until a layer of this repository is not held any more.
    async fn hold(&self, repository: &str) {
        self.seen().held.insert(repository.to_owned());
        let mut faults = self.faults.subscribe();
        // The sender is a part of this.
        drop(faults.wait_for(|faults| faults.get(repository) != Some(&Fault::Held)).await);
        self.seen().held.remove(repository);
    }
}

/// Copies the body of an answer.
struct Copy {
    shared: Arc<Shared>,
    repository: String,
    fault: Option<Fault>,
    /// Of the whole body, bytes.
    size: u64,
    sender: mpsc::Sender<Result<Frame<Bytes>>>,
}

impl Copy {
    async fn run(self, mut from: reqwest::Response) {
        if let Err(error) = self.copy(&mut from).await {
            // Cuts the answer off. Fails if the client has closed the connection.
            drop(self.sender.send(Err(error)).await);
        }
    }

    async fn copy(&self, from: &mut reqwest::Response) -> Result<()> {
        let largest = usize::try_from(self.size.div_ceil(PIECES).max(1))?;
        let mut sent = 0;
        while let Some(mut chunk) = from.chunk().await.context("the registry's answer ends early")? {
            while !chunk.is_empty() {
                let piece = chunk.split_to(largest.min(chunk.len()));
                let length = piece.len() as u64;
                let piece = self.spoil(piece, sent).await?;
                self.sender.send(Ok(Frame::data(piece))).await.context("the client is gone")?;
                sent += length;
            }
        }
        Ok(())
    }

    /// Applies the fault to a piece after `sent` bytes.
    async fn spoil(&self, piece: Bytes, sent: u64) -> Result<Bytes> {
        let length = piece.len() as u64;
        match self.fault {
            Some(Fault::HalfLayer) if sent + length > self.size / 2 => {
                return Err(anyhow!("half of the layer was sent"));
            }
            Some(Fault::Slow(all)) => {
                let part = length as f64 / self.size.max(1) as f64;
                tokio::time::sleep(all.mul_f64(part.min(1.0))).await;
            }
            Some(Fault::Held) if sent > 0 => self.shared.hold(&self.repository).await,
            Some(Fault::WrongLayer | Fault::WrongManifest) => return Ok(piece.iter().map(|byte| !byte).collect()),
            _ => {}
        }
        Ok(piece)
    }
}

/// Repository and target of a path like `/v2/repository/blobs/sha256:…`.
fn parse(path: &str) -> (&str, Target<'_>) {
    let rest = path.strip_prefix("/v2/").unwrap_or_default();
    if let Some((repository, reference)) = rest.rsplit_once("/manifests/") {
        return (repository, Target::Manifest(reference));
    }
    match rest.rsplit_once("/blobs/") {
        Some((repository, digest)) => (repository, Target::Blob(digest)),
        None => ("", Target::Other),
    }
}

/// Whether a fault concerns a request.
fn concerns(fault: Fault, method: &Method, target: Target<'_>, layers: &BTreeSet<String>) -> bool {
    match (fault, target) {
        (Fault::Status(_), Target::Manifest(_)) => true,
        (Fault::WrongManifest, Target::Manifest(reference)) => {
            method == Method::GET && reference.starts_with("sha256:")
        }
        (Fault::Status(_) | Fault::WrongManifest, _) => false,
        (_, Target::Blob(digest)) => method == Method::GET && layers.contains(digest),
        (_, Target::Manifest(_) | Target::Other) => false,
    }
}

fn refusal(status: u16) -> Result<http::Response<Body>> {
    let mut answer = http::Response::new(Empty::new().map_err(|never| match never {}).boxed_unsync());
    *answer.status_mut() = StatusCode::from_u16(status).with_context(|| format!("{status} is no status of HTTP"))?;
    let header = match answer.status() {
        StatusCode::UNAUTHORIZED => Some((WWW_AUTHENTICATE, CHALLENGE)),
        StatusCode::TOO_MANY_REQUESTS => Some((RETRY_AFTER, RETRY_AFTER_SECONDS)),
        _ => None,
    };
    answer.headers_mut().extend(header);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_concern_the_requests_that_they_name() {
        let layers = BTreeSet::from(["sha256:ab".to_owned()]);
        let (repository, manifest) = parse("/v2/a/b/manifests/sha256:cd");
        assert_eq!((repository, manifest), ("a/b", Target::Manifest("sha256:cd")));
        let (_, tag) = parse("/v2/a/manifests/1");
        let (_, layer) = parse("/v2/a/blobs/sha256:ab");
        let (_, config) = parse("/v2/a/blobs/sha256:ef");
        let (_, ping) = parse("/v2/");
        let all = [manifest, tag, layer, config, ping];
        let concerned = |fault| all.map(|target| concerns(fault, &Method::GET, target, &layers));
        assert_eq!(concerned(Fault::Status(500)), [true, true, false, false, false]);
        assert_eq!(concerned(Fault::WrongManifest), [true, false, false, false, false]);
        for fault in [Fault::HalfLayer, Fault::Held, Fault::WrongLayer, Fault::Slow(Duration::ZERO)] {
            assert_eq!(concerned(fault), [false, false, true, false, false], "{fault:?}");
        }
        assert!(!concerns(Fault::WrongManifest, &Method::HEAD, manifest, &layers));
    }
}
