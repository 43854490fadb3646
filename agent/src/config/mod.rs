//! What keblet is told to do: the kubelet's flags and documents, and keblet's own, as one checked, immutable value.
//!
//! ```text
//! defaults ─▶ --config file ─▶ --config-dir drop-ins ─▶ flags ─▶ checks ─▶ Settings
//! ```
//!
//! Reads the named files and nothing else: no clock, no host facts (those come in through [`Settings::check_host`]), no
//! reloading. Stricter than upstream in one point: an unknown field is an error everywhere, never a warning.

pub mod document;
mod draft;
pub mod duration;
pub mod explain;
pub mod feature_gates;
mod feature_table;
pub mod flags;
mod flagz;
pub mod keblet;
pub mod kubelet;
pub mod kubelet_sections;
mod load;
mod protections;
pub mod quantity;
pub mod schema;
mod settings;
mod validate;

pub use feature_gates::{Feature, FeatureGates};
pub use flags::{FlagSettings, FlagValues};
pub use keblet::KebletConfiguration;
pub use kubelet::KubeletConfiguration;
pub use load::load;
pub use protections::missing_protections;
pub use settings::{ConfigError, HostFacts, Origin, Settings, Violation};
pub use validate::{CIPHER_SUITES, parse_cpus};
