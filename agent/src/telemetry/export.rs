//! The way of spans to the collector: sampled, batched, over OTLP.

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
/// Name of the spans' instrument.
const SCOPE: &str = "keblet";
/// What is not exported then, is not.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Collects spans for the collector. It goes first onto the bare registry.
pub type SpanLayer = Box<dyn Layer<Registry> + Send + Sync>;

/// Why spans cannot be exported.
#[derive(Debug, Error)]
pub enum SpansError {
    /// The endpoint is no address.
    #[error("tracing.endpoint {endpoint:?}")]
    Endpoint {
        /// As configured.
        endpoint: String,
        /// What is wrong with it.
        source: tonic::transport::Error,
    },
    /// The exporter cannot be made.
    #[error("could not configure tracer provider for {collector}")]
    Exporter {
        /// Where to.
        collector: String,
        /// What is wrong.
        source: ExporterBuildError,
    },
}

/// Spans on their way.
#[derive(Debug)]
pub struct Spans {
    provider: SdkTracerProvider,
}

impl Spans {
    /// Prepares the export of this host's spans; the collector need not be there. To be called within the async runtime.
    ///
    /// # Errors
    /// If the endpoint makes no sense.
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

    /// What makes spans of this program's passes, calls and requests.
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

    /// Exports what is left. Blocks, but not for long.
    pub fn end(self) {
        if let Err(error) = self.provider.shutdown_with_timeout(LAST_WORDS) {
            tracing::warn!(%error, "the last spans were not exported");
        }
    }
}

/// Who has a sampled parent is sampled; else so many of a million, by default none.
fn sampler(per_million: i32) -> Sampler {
    let root = match per_million {
        ..=0 => Sampler::AlwaysOff,
        rate => Sampler::TraceIdRatioBased(f64::from(rate) / 1e6),
    };
    Sampler::ParentBased(Box::new(root))
}
