//! Static pods from a URL, polled. An answer that cannot be used leaves the pods as they are.

use std::time::Duration;

use http::HeaderMap;
use http::HeaderName;
use http::HeaderValue;
use tokio::sync::mpsc;
use tokio::task::JoinError;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::SourceUpdate;
use super::decode;
use super::decode::MAX_MANIFEST_BYTES;
use super::decode::Manifest;
use super::decode::ManifestError;
use super::static_pod::Origin;
use crate::model::ConfigSource;
use crate::model::Pod;
use crate::model::quote::masked_url;
use crate::proxy::Proxies;

/// How long one request may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Failures in a row that are logged; later ones are not, until one request succeeds.
const LOGGED_FAILURES: u32 = 4;

/// Settings of the URL source.
#[derive(Clone)]
pub(super) struct HttpSource {
    /// The URL (`staticPodURL`).
    pub url: String,
    /// Headers of every request: name and values. May hold secrets, never logged.
    pub headers: Vec<(String, Vec<String>)>,
    /// Time between two requests (`httpCheckFrequency`).
    pub check_frequency: Duration,
    /// This node's name.
    pub node_name: String,
    /// Feature gate PreventStaticPodAPIReferences.
    pub prevent_api_references: bool,
    /// Proxies of requests.
    pub proxies: Proxies,
}

/// Why an answer gives no pods.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    /// The client could not be built.
    #[error("cannot set up requests to {url}: {source}")]
    Client {
        /// Where to.
        url: String,
        /// The cause.
        source: reqwest::Error,
    },
    /// No answer, or it broke off.
    #[error("cannot get {url}: {source}")]
    Request {
        /// The URL that was requested.
        url: String,
        /// The cause.
        source: reqwest::Error,
    },
    /// An answer other than 200.
    #[error("{url} answers {status}")]
    Status {
        /// The URL that was requested.
        url: String,
        /// Status of the response.
        status: reqwest::StatusCode,
    },
    /// More than a manifest may hold.
    #[error("the answer of {url} is too big: must be under {MAX_MANIFEST_BYTES} bytes")]
    TooBig {
        /// The URL that was requested.
        url: String,
    },
    /// An empty body: the pods of this source are removed.
    #[error("zero-length data received from {url}")]
    Empty {
        /// The URL that was requested.
        url: String,
    },
    /// Something else than pods.
    #[error("the answer of {url} is no usable manifest: {source}")]
    Manifest {
        /// The URL that was requested.
        url: String,
        /// What is wrong.
        source: ManifestError,
    },
}

impl HttpSource {
    /// Sends complete sets until cancelled or until the receiver is dropped.
    pub(super) async fn run(self, sets: mpsc::Sender<(ConfigSource, SourceUpdate)>, cancel: CancellationToken) {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = self.poll(sets) => {}
        }
    }

    async fn poll(self, sets: mpsc::Sender<(ConfigSource, SourceUpdate)>) {
        let client = match self.client() {
            Ok(client) => client,
            Err(error) => {
                tracing::error!(source = "http", "{error}");
                return;
            }
        };
        let headers = self.header_map();
        let mut tick = tokio::time::interval(self.check_frequency.max(Duration::from_millis(100)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_body = Vec::new();
        let mut failures = 0;
        loop {
            tick.tick().await;
            let answer = self.fetch(&client, &headers, &mut last_body).await;
            let set = match answer {
                Ok(set) => {
                    failures = 0;
                    set
                }
                Err(error) => {
                    failures += 1;
                    report(&error, failures);
                    matches!(error, FetchError::Empty { .. }).then(Vec::new)
                }
            };
            if let Some(set) = set
                && sets.send((ConfigSource::Http, SourceUpdate::Set(set))).await.is_err()
            {
                return;
            }
        }
    }

    fn client(&self) -> Result<reqwest::Client, FetchError> {
        let failed =
            |source: reqwest::Error| FetchError::Client { url: masked_url(&self.url), source: source.without_url() };
        let proxies = self.proxies.clone();
        // Decided for each connection, since a redirect may lead to another server.
        let proxy = reqwest::Proxy::custom(move |server: &reqwest::Url| {
            proxies.proxy_of(server.scheme(), server.host_str()?, server.port()).map(str::to_owned)
        });
        let builder = || reqwest::Client::builder().timeout(TIMEOUT).proxy(proxy.clone());
        // A node without authorities can still read plain HTTP, and every handshake with HTTPS fails with its reason.
        builder().build().or_else(|_| builder().tls_certs_only([]).build()).map_err(failed)
    }

    fn header_map(&self) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, values) in &self.headers {
            for value in values {
                match (HeaderName::try_from(name), HeaderValue::try_from(value)) {
                    (Ok(name), Ok(value)) => {
                        map.append(name, value);
                    }
                    _ => {
                        tracing::error!(source = "http", header = %name.escape_debug(), "staticPodURLHeader is no valid header, ignored")
                    }
                }
            }
        }
        map
    }

    /// The set, or `None` if the body is the one seen last. An unusable body is an error once; then it, too, is the
    /// one seen last.
    async fn fetch(
        &self,
        client: &reqwest::Client,
        headers: &HeaderMap,
        last: &mut Vec<u8>,
    ) -> Result<Option<Vec<Pod>>, FetchError> {
        let url = || masked_url(&self.url);
        let failed = |source: reqwest::Error| FetchError::Request { url: url(), source: source.without_url() };
        // Default headers of a client have one value each.
        let mut response = client.get(&self.url).headers(headers.clone()).send().await.map_err(failed)?;
        if response.status() != reqwest::StatusCode::OK {
            return Err(FetchError::Status { url: url(), status: response.status() });
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(failed)? {
            body.extend_from_slice(&chunk);
            if body.len() as u64 >= MAX_MANIFEST_BYTES {
                return Err(FetchError::TooBig { url: url() });
            }
        }
        if body.is_empty() {
            // The same body as before the empty one brings its pods back.
            last.clear();
            return Err(FetchError::Empty { url: url() });
        }
        if body == *last {
            return Ok(None);
        }
        let unusable = |source| FetchError::Manifest { url: url(), source };
        let decoded = self.decode(body).await;
        let (body, manifest) = decoded.map_err(|error| {
            let message = format!("decoding failed: {error}");
            unusable(ManifestError::whole(message))
        })?;
        *last = body;
        let manifest = manifest.map_err(unusable)?;
        if !manifest.unknown_fields.is_empty() {
            let fields = manifest.unknown_fields.join(", ");
            tracing::warn!(source = "http", url = url(), fields, "manifest sets unknown fields, ignored");
        }
        if manifest.ignores_documents {
            tracing::warn!(source = "http", url = url(), "{}", decode::FURTHER_DOCUMENTS);
        }
        Ok(Some(manifest.pods))
    }

    /// Decodes the body and returns it. A large one takes long: not on a thread of the runtime.
    ///
    /// # Errors
    /// The decoder panicked.
    async fn decode(&self, body: Vec<u8>) -> Result<(Vec<u8>, Result<Manifest, ManifestError>), JoinError> {
        let (location, node_name) = (self.url.clone(), self.node_name.clone());
        let prevent_api_references = self.prevent_api_references;
        let decoding = move || {
            let origin = Origin {
                // It is not known when the content of a URL changed.
                adoptions: None,
                source: ConfigSource::Http,
                location: &location,
                node_name: &node_name,
                prevent_api_references,
            };
            let manifest = decode::decode(&body, &origin);
            (body, manifest)
        };
        tokio::task::spawn_blocking(decoding).await
    }
}

fn report(error: &FetchError, failures: u32) {
    if failures < LOGGED_FAILURES {
        tracing::warn!(source = "http", failures, "{error}");
    } else if failures == LOGGED_FAILURES {
        tracing::warn!(source = "http", failures, "{error}; further failures are not logged until a request succeeds");
    } else {
        tracing::debug!(source = "http", failures, "{error}");
    }
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
