//! Certificates that the cluster signs for this node: its client certificate and its serving certificate. Owns their
//! files, the CertificateSigningRequests and the rotation. Connections that use them belong to the API client and the
//! server.
//!
//! ```text
//!  template (subject, names) ─┐
//!  store: the pair on disk ───┼─▶ rotation manager: due? ─▶ CertificateSigningRequest ─▶ store ─▶ watch channel
//!  clock ─────────────────────┘              (pure)          approved and issued
//! ```

mod bootstrap;
mod kubeconfig;
mod missing;
mod pair;
mod request;
mod rotation;
mod rotation_manager;
mod store;
mod template;
#[cfg(test)]
mod testing;

pub use bootstrap::BootstrapError;
pub use bootstrap::FirstAccess;
pub use bootstrap::bootstrap;
pub use bootstrap::first_access;
pub use kubeconfig::write as write_kubeconfig;
pub use missing::wait_until_missing_too_long;
pub use pair::Pair;
pub use rotation_manager::RequestClients;
pub use rotation_manager::RotationManager;
pub use rotation_manager::ServerHealth;
pub use store::Store;
pub use store::StoreError;
pub use template::Purpose;
pub use template::Template;
