//! Metric families: upstream's under their names, and keblet's own. Each file declares the families of one module with
//! [`register::Register`].
//!
//! One value holds every family; there is no global registry. Each module gets small typed methods, so that a wrong label
//! does not compile. Nothing is decided by these numbers, and nothing here waits.

mod access;
mod buckets;
mod certificates;
mod cgroups;
mod containers;
mod eviction;
mod http;
mod images;
mod machine;
mod node;
mod node_images;
mod observe;
mod oom;
mod pleg;
mod pods;
mod pressure;
mod probes;
mod process;
mod protobuf;
mod recorder;
mod register;
mod replaced;
mod resizes;
mod rest_client;
mod retries;
mod runtime;
mod sensors;
mod slis;
mod startup;
mod time_left;
mod values;
mod volumes;
mod workers;

use std::sync::Arc;

use prometheus::Encoder as _;
use prometheus::Registry;
use prometheus::TextEncoder;
use prometheus::proto::MetricFamily;

pub use access::Access;
pub use certificates::Certificates;
pub use cgroups::Cgroups;
pub use containers::Containers;
pub use containers::LogsOf;
pub use eviction::Eviction;
pub use http::Http;
pub use http::Request;
pub use http::Subresource;
pub use images::Images;
pub use images::MustPull;
pub use node::BuildInfo;
pub use node::Node;
pub use node_images::NodeImages;
pub use observe::Observe;
pub use observe::ObservedInfo;
pub use observe::PodLabels;
pub use oom::Oom;
pub use pleg::Pleg;
pub use pods::PodOrigin;
pub use pods::Pods;
pub use pods::Working;
pub use pressure::PodStalls;
pub use pressure::Pressure;
pub use pressure::ReadStalls;
pub use probes::ProbeOf;
pub use probes::Probes;
pub use protobuf::PROTOBUF_FORMAT;
pub use protobuf::encode as encode_protobuf;
pub use recorder::Recorder;
pub use resizes::Resizes;
pub use rest_client::AuthorityReload;
pub use rest_client::RestClient;
pub use retries::Retries;
pub use runtime::Runtime;
pub use sensors::SensorLevel;
pub use sensors::Sensors;
pub use slis::Slis;
pub use startup::Startup;
pub use volumes::ClaimStats;
pub use volumes::MetricSource;
pub use volumes::VolumeState;
pub use volumes::Volumes;
pub use workers::SyncKind;
pub use workers::Workers;

use register::Register;

/// Content type of [`Metrics::render`].
pub const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Every family. Shared by all modules.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// The node and this program.
    pub node: Node,
    /// Pods, counted and timed.
    pub pods: Pods,
    /// Containers, their starts, hooks, ends and logs.
    pub containers: Containers,
    /// Pod start latencies.
    pub startup: Startup,
    /// Pod workers, their plans and actions.
    pub workers: Workers,
    /// Relists, inspections and lifecycle events.
    pub pleg: Pleg,
    /// Calls to the container runtime.
    pub runtime: Runtime,
    /// Cgroups of pods and QoS classes.
    pub cgroups: Cgroups,
    /// Images of the node: pulls, number and size, garbage collection.
    pub node_images: NodeImages,
    /// Access to images, credential plugins and image volumes.
    pub images: Images,
    /// Pods' volumes.
    pub volumes: Volumes,
    /// State and losses of the sensors.
    pub sensors: Sensors,
    /// OOM kills.
    pub oom: Oom,
    /// Retries of failed operations on pods.
    pub retries: Retries,
    /// Evictions of pods.
    pub eviction: Eviction,
    /// In-place changes of pods' resources.
    pub resizes: Resizes,
    /// Pressure and policies.
    pub pressure: Pressure,
    /// Events that were not delivered.
    pub recorder: Recorder,
    /// Requests to our own servers.
    pub http: Http,
    /// Authentication and authorization of clients.
    pub access: Access,
    /// Certificates of this node and of its pods.
    pub certificates: Certificates,
    /// Requests to the API server.
    pub rest_client: RestClient,
    /// Outcomes of health checks; exposed separately.
    pub slis: Slis,
    /// Probes of containers; exposed separately.
    pub probes: Probes,
    /// Unix time at which the process started, in seconds.
    pub process_start: f64,
}

impl Metrics {
    /// All families, registered and at zero.
    pub fn new() -> Arc<Self> {
        let registry = Registry::new();
        let register = Register::new(&registry);
        let node = Node::new(&register);
        let pods = Pods::new(&register);
        let containers = Containers::new(&register);
        let startup = Startup::new(&register);
        let workers = Workers::new(&register);
        let pleg = Pleg::new(&register);
        let runtime = Runtime::new(&register);
        let cgroups = Cgroups::new(&register);
        let node_images = NodeImages::new(&register);
        let images = Images::new(&register);
        let volumes = Volumes::new(&register);
        let sensors = Sensors::new(&register);
        let oom = Oom::new(&register);
        let recorder = Recorder::new(&register);
        let retries = Retries::new(&register);
        let eviction = Eviction::new(&register);
        let resizes = Resizes::new(&register);
        let pressure = Pressure::new(&register);
        let http = Http::new(&register);
        let access = Access::new(&register);
        let certificates = Certificates::new(&register);
        let rest_client = RestClient::new(&register);
        let process_start = process::register(&register);
        register.count();
        Arc::new(Self {
            registry,
            node,
            pods,
            containers,
            startup,
            workers,
            pleg,
            runtime,
            cgroups,
            node_images,
            images,
            volumes,
            sensors,
            oom,
            recorder,
            retries,
            eviction,
            resizes,
            pressure,
            http,
            access,
            certificates,
            rest_client,
            slis: Slis::new(process_start),
            probes: Probes::new(process_start),
            process_start,
        })
    }

    /// All families but those that are exposed separately.
    pub fn gather(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }

    /// Of the machine. Blocks.
    pub fn gather_machine(&self) -> Vec<MetricFamily> {
        machine::gather()
    }

    /// Of probes.
    pub fn gather_probes(&self) -> Vec<MetricFamily> {
        self.probes.gather()
    }

    /// The text exposition, version 0.0.4.
    ///
    /// # Errors
    /// A family cannot be encoded.
    pub fn render(&self) -> Result<String, prometheus::Error> {
        String::from_utf8(encode_text(&self.gather())?).map_err(|error| prometheus::Error::Msg(error.to_string()))
    }
}

/// The text exposition, version 0.0.4, of some families.
///
/// # Errors
/// A family cannot be encoded.
pub fn encode_text(families: &[MetricFamily]) -> Result<Vec<u8>, prometheus::Error> {
    let mut text = Vec::new();
    append_text(&mut text, families)?;
    Ok(text)
}

/// Appends the text format to a buffer.
///
/// # Errors
/// A family cannot be encoded.
pub fn append_text(text: &mut Vec<u8>, families: &[MetricFamily]) -> Result<(), prometheus::Error> {
    TextEncoder::new().encode(families, text)
}

#[cfg(test)]
mod tests;
