//! Generates CRI sandbox and container configurations from a pod's spec: environment, mounts, security contexts, resources,
//! hosts and resolver files, names on disk. Pure functions: no files, no runtime, no clock.

pub mod container;
pub mod dns;
pub mod env;
mod env_file;
mod env_objects;
mod error;
pub mod expand;
pub mod hostname;
pub mod hosts;
mod memory_qos;
pub mod mounts;
pub mod names;
mod oom_score;
pub mod resources;
pub mod sandbox;
pub mod security;
mod settings;
mod spec;
#[cfg(test)]
mod tests;
pub mod user_namespace;

pub use container::ImageUser;
pub use container::ResolvedImage;
pub use env_file::FileValues;
pub use env_file::file_values;
pub use env_objects::EnvFiles;
pub use env_objects::EnvObjects;
pub use env_objects::ObjectLookup;
pub use error::GenerateError;
pub use hostname::Hostname;
pub use memory_qos::MemoryQos;
pub use settings::DnsSettings;
pub use settings::HandlerFeatures;
pub use settings::HandlerSupport;
pub use settings::NodeIps;
pub use settings::NodeSettings;
pub use settings::ResourceSettings;
pub use settings::SecuritySettings;
pub use settings::Swap;
pub use spec::ContainerSpec;
pub use spec::ContainerSpecs;
