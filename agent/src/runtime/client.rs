//! The handle to the runtime.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use keblet_proto::cri::v1::image_service_client::ImageServiceClient;
use keblet_proto::cri::v1::runtime_service_client::RuntimeServiceClient;
use tokio::io::AsyncRead;
use tokio::io::AsyncWrite;
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::transport::Channel;

use super::CallObserver;
use super::Operation;
use super::RuntimeEndpoint;
use super::call::Call;
use super::features::Streams;
use super::transport;

/// Largest message either way, as upstream has it.
pub(super) const MESSAGE_LIMIT: usize = 16 << 20;

/// A container runtime. Cheap to clone: all clones share the connection.
#[derive(Clone, Debug)]
pub struct Runtime {
    pub(super) inner: Arc<Inner>,
}

/// Settings of the client.
#[derive(Clone, Debug)]
pub struct RuntimeOptions {
    /// `runtimeRequestTimeout`: the deadline of every call that has no longer one.
    pub request_timeout: Duration,
    /// The feature gate `CRIListStreaming`: lists are streamed in portions, so that they may exceed the limit of a message.
    pub streams_lists: bool,
    /// Observes every call.
    pub observer: Arc<dyn CallObserver>,
}

impl Default for RuntimeOptions {
    /// Upstream's default of 2 minutes, without observer.
    fn default() -> Self {
        Self { request_timeout: Duration::from_secs(120), streams_lists: false, observer: Arc::new(()) }
    }
}

#[derive(Debug)]
pub(super) struct Inner {
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    runtime_endpoint: String,
    image_endpoint: String,
    options: RuntimeOptions,
    /// Whether lists are streamed, by service: until one does not know the call.
    pub(super) streams: Streams,
    /// A sandbox could not be made: the network may not be ready any more.
    pub(super) sandbox_failed: Notify,
    /// When the last container that has started was to be started.
    pub(super) started: watch::Sender<Option<Instant>>,
}

impl Runtime {
    /// A runtime behind a unix socket, which need not exist yet: the first call connects. `images` is
    /// `imageServiceEndpoint`, by default the runtime's own. Needs a tokio runtime around it.
    pub fn new(runtime: &RuntimeEndpoint, images: Option<&RuntimeEndpoint>, options: RuntimeOptions) -> Self {
        let channel = unix_channel(runtime);
        let image_channel = images.filter(|images| *images != runtime).map_or_else(|| channel.clone(), unix_channel);
        let image_endpoint = images.unwrap_or(runtime).to_string();
        Self::assemble(channel, runtime.to_string(), image_channel, image_endpoint, options)
    }

    /// A runtime behind any transport. `connect` opens a new stream whenever there is none; `name` replaces the endpoint
    /// in errors.
    pub fn with_connector<F, Fut, IO>(name: &str, connect: F, options: RuntimeOptions) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = io::Result<IO>> + Send + 'static,
        IO: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let channel = transport::channel(connect);
        Self::assemble(channel.clone(), name.to_owned(), channel, name.to_owned(), options)
    }

    fn assemble(
        runtime: Channel,
        runtime_endpoint: String,
        images: Channel,
        image_endpoint: String,
        options: RuntimeOptions,
    ) -> Self {
        let inner = Inner {
            runtime: RuntimeServiceClient::new(runtime)
                .max_decoding_message_size(MESSAGE_LIMIT)
                .max_encoding_message_size(MESSAGE_LIMIT),
            images: ImageServiceClient::new(images)
                .max_decoding_message_size(MESSAGE_LIMIT)
                .max_encoding_message_size(MESSAGE_LIMIT),
            runtime_endpoint,
            image_endpoint,
            streams: Streams::new(options.streams_lists),
            sandbox_failed: Notify::new(),
            started: watch::Sender::default(),
            options,
        };
        Self { inner: Arc::new(inner) }
    }

    /// The endpoint as errors show it.
    pub fn endpoint(&self) -> &str {
        &self.inner.runtime_endpoint
    }

    /// Forgets which calls the runtime lacks: another version of it answers.
    pub(super) fn forget_missing_calls(&self) {
        self.inner.streams.renew(self.inner.options.streams_lists);
    }

    pub(super) fn runtime(&self) -> RuntimeServiceClient<Channel> {
        self.inner.runtime.clone()
    }

    pub(super) fn images(&self) -> ImageServiceClient<Channel> {
        self.inner.images.clone()
    }

    /// A call to the runtime service with the usual deadline.
    pub(super) fn call<'a>(&'a self, operation: Operation, object: &'a str) -> Call<'a> {
        Call {
            operation,
            object,
            endpoint: &self.inner.runtime_endpoint,
            deadline: Some(self.inner.options.request_timeout),
            observer: &*self.inner.options.observer,
        }
    }

    /// A call to the image service with the usual deadline.
    pub(super) fn image_call<'a>(&'a self, operation: Operation, object: &'a str) -> Call<'a> {
        Call { endpoint: &self.inner.image_endpoint, ..self.call(operation, object) }
    }

    /// The usual deadline.
    pub(super) fn request_timeout(&self) -> Duration {
        self.inner.options.request_timeout
    }
}

fn unix_channel(endpoint: &RuntimeEndpoint) -> Channel {
    let path = endpoint.path().to_owned();
    transport::channel(move || UnixStream::connect(path.clone()))
}
