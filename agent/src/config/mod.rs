//! Configuration: the kubelet's flags and documents, and keblet's own, as one validated, immutable value.
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
pub mod eviction;
pub mod explain;
pub mod feature_gates;
mod feature_table;
pub mod flags;
mod flagz;
pub mod keblet;
pub mod kubelet;
pub mod kubelet_sections;
mod load;
pub mod pressure;
mod protections;
pub mod quantity;
pub mod schema;
mod settings;
mod validate;

pub use feature_gates::Feature;
pub use feature_gates::FeatureGates;
pub use flags::FlagSettings;
pub use flags::FlagValues;
pub use keblet::KebletConfiguration;
pub use kubelet::KubeletConfiguration;
pub use load::load;
pub use settings::ConfigError;
pub use settings::HostFacts;
pub use settings::Origin;
pub use settings::Settings;
pub use settings::Violation;
pub use validate::CIPHER_SUITES;
pub use validate::parse_cpus;
