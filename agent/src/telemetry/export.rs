//! Export of spans: sampled, batched, over OTLP.

use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry::global;
use opentelemetry::propagation::TextMapCompositePropagator;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::ExporterBuildError;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_otlp::WithTonicConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::BaggagePropagator;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::Sampler;
use opentelemetry_sdk::trace::SdkTracerProvider;
use thiserror::Error;
use tracing::Level;
use tracing_subscriber::Layer;
use tracing_subscriber::Registry;
use tracing_subscriber::filter::Targets;

use super::TARGET;
use super::endpoint::Collector;
use crate::config::kubelet_sections::Tracing;

/// `service.name` of every span.
const SERVICE: &str = "kubelet";
/// The instrumentation scope.
const SCOPE: &str = "keblet";
/// Timeout of the export at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// The layer that records spans. It has to be the first layer of the registry.
pub type SpanLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// Why spans cannot be exported.
#[derive(Debug, Error)]
pub enum SpansError {
    /// The endpoint is not an address.
    #[error("tracing.endpoint {endpoint:?}")]
    Endpoint {
        /// As configured.
        endpoint: String,
        /// What is wrong with it.
        source: tonic::transport::Error,
    },
    /// The exporter cannot be built.
    #[error("could not configure tracer provider for {collector}")]
    Exporter {
        /// Its address.
        collector: String,
        /// What is wrong.
        source: ExporterBuildError,
    },
}

/// The export of spans.
#[derive(Debug)]
pub struct Spans {
    provider: SdkTracerProvider,
}

impl Spans {
    /// Prepares the export of this host's spans; the collector need not be reachable. Needs an async runtime.
    ///
    /// # Errors
    /// The endpoint is invalid.
    pub fn new(config: &Tracing, host: &str) -> Result<Self, SpansError> {
        let endpoint = config.endpoint.as_deref().unwrap_or_default();
        let collector = Collector::parse(endpoint);
        let channel =
            collector.channel().map_err(|source| SpansError::Endpoint { endpoint: endpoint.to_owned(), source })?;
        let exporter = SpanExporter::builder().with_tonic().with_channel(channel).build();
        let exporter = exporter.map_err(|source| SpansError::Exporter { collector: collector.to_string(), source })?;
        let resource = Resource::builder()
            .with_service_name(SERVICE)
            .with_attribute(KeyValue::new("host.name", host.to_owned()))
            .build();
        let provider = SdkTracerProvider::builder()
            .with_sampler(sampler(config.sampling_rate_per_million.unwrap_or(0)))
            .with_resource(resource)
            .with_batch_exporter(exporter)
            .build();
        global::set_text_map_propagator(TextMapCompositePropagator::new(vec![
            Box::new(TraceContextPropagator::new()),
            Box::new(BaggagePropagator::new()),
        ]));
        Ok(Self { provider })
    }

    /// The layer that records the spans of this process.
    pub fn layer(&self) -> SpanLayer {
        let layer = tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer(SCOPE))
            .with_location(false)
            .with_threads(false)
            .with_level(false)
            .with_target(false)
            .with_tracked_inactivity(false);
        layer.with_filter(Targets::new().with_target(TARGET, Level::TRACE)).boxed()
    }

    /// Exports the remaining spans. Blocks for two seconds at most.
    pub fn end(self) {
        if let Err(error) = self.provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT) {
            tracing::warn!(%error, "cannot export the last spans");
        }
    }
}

/// Spans with a sampled parent are sampled; others at this rate per million, by default none.
fn sampler(per_million: i32) -> Sampler {
    let root = match per_million {
        ..=0 => Sampler::AlwaysOff,
        rate => Sampler::TraceIdRatioBased(f64::from(rate) / 1e6),
    };
    Sampler::ParentBased(Box::new(root))
}
