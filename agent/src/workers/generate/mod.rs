//! From a pod's spec to what the runtime is asked for: sandbox and container configurations, environment, hosts and
//! resolver files, names on disk. Pure functions; refuses to read files, ask the runtime, or look at the clock.

pub mod container;
pub mod dns;
pub mod env;
mod env_objects;
mod error;
pub mod expand;
pub mod hostname;
pub mod hosts;
pub mod mounts;
pub mod names;
pub mod qos;
pub mod resources;
pub mod sandbox;
pub mod security;
mod settings;
mod spec;
#[cfg(test)]
mod tests;

pub use container::ImageUser;
pub use container::ResolvedImage;
pub use env_objects::EnvObjects;
pub use env_objects::Lookup;
pub use error::GenerateError;
pub use hostname::Hostname;
pub use settings::DnsSettings;
pub use settings::NodeIps;
pub use settings::NodeSettings;
pub use settings::ResourceSettings;
pub use settings::SecuritySettings;
pub use settings::Swap;
pub use spec::ContainerSpec;
