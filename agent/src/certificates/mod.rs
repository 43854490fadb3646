//! Certificates that the cluster signs for this node: its client certificate, by which the API server knows it, and its
//! serving certificate, by which the API server trusts it. Owns their files, the requests for them and the moments at
//! which they are renewed. Refuses to use them: connections are the business of the API client and the server.
//!
//! ```text
//!  template (who we are, which names) ─┐
//!  store: the pair on disk ────────────┼─▶ manager: due? ─▶ CertificateSigningRequest ─▶ store ─▶ watch channel
//!  clock ──────────────────────────────┘     (pure)          approved and signed
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
pub use rotation_manager::RotationManager;
pub use rotation_manager::ServerHealth;
pub use store::Store;
pub use store::StoreError;
pub use template::Purpose;
pub use template::Template;
