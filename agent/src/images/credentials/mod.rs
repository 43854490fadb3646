//! Credentials for pulling images, in upstream's order: of the pod's pull secrets, of files on the node, of plugins.
//!
//! ```text
//!  pull secrets ─▶ secrets ────┐
//!  config.json  ─▶ node_files ─┼─▶ keyring: entries that match the repository ─▶ Credential, one after the other
//!  plugins      ─▶ providers ──┘
//! ```

mod docker_config;
mod keyring;
mod node_files;
mod providers;
mod secrets;
#[cfg(test)]
pub(crate) mod testing;

use std::path::Path;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Secret;
use keblet_proto::cri::v1 as cri;
use secrecy::ExposeSecret as _;

pub use docker_config::ConfigProblem;
pub use providers::ProviderConfigError;
pub use providers::Providers;

use super::access::CredentialSource;
use super::reference;
use super::reference::ReferenceError;
use docker_config::Login;
use node_files::NodeFiles;

/// A user and a password for a registry.
#[derive(Clone, Debug)]
pub struct Credential {
    login: Login,
    source: CredentialSource,
}

/// Why the credentials of a pod are not known.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CredentialError {
    /// The image's name cannot be parsed.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// A pull secret holds no docker configuration.
    #[error("pull secret {namespace}/{name}: {problem}")]
    Secret {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// What is wrong with it.
        problem: ConfigProblem,
    },
}

impl Credential {
    /// The credential in the form of the CRI.
    pub(super) fn auth(&self) -> cri::AuthConfig {
        let (username, password) = (self.login.username.clone(), self.login.password.expose_secret().to_owned());
        cri::AuthConfig { username, password, ..cri::AuthConfig::default() }
    }

    /// Where it comes from.
    pub fn source(&self) -> &CredentialSource {
        &self.source
    }
}

/// Where credentials are looked up beside the pods' secrets.
#[derive(Debug, Default)]
pub struct Credentials {
    files: Option<NodeFiles>,
    providers: Option<Providers>,
}

impl Credentials {
    /// Only in the pods' secrets.
    pub fn none() -> Self {
        Self::default()
    }

    /// In docker's configuration files, first below the agent's root directory.
    #[must_use]
    pub fn with_node_files(mut self, root: &Path) -> Self {
        self.files = Some(NodeFiles::new(root));
        self
    }

    /// Of these plugins.
    #[must_use]
    pub fn with_providers(mut self, providers: Providers) -> Self {
        self.providers = Some(providers);
        self
    }

    /// Credentials for an image of a pod, in the order in which they are to be tried. None: it is pulled without.
    /// `secrets`: the pod's pull secrets that there are. May run plugins, each for up to a minute.
    ///
    /// # Errors
    /// A secret has invalid content; the image's name cannot be parsed.
    pub async fn matching(
        &self,
        image: &str,
        pod: &Pod,
        secrets: &[Arc<Secret>],
    ) -> Result<Vec<Credential>, CredentialError> {
        let repository = reference::repository(image)?;
        let mut found = secrets::matching(secrets, &repository)?;
        if let Some(files) = &self.files {
            found.extend(files.matching(&repository).await);
        }
        if let Some(providers) = &self.providers {
            found.extend(providers.matching(&repository, pod).await);
        }
        Ok(found)
    }
}
