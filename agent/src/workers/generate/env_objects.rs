//! API objects and files that an environment refers to, as far as they could be read. Plain data.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Secret;

use super::GenerateError;

/// The result of reading one object.
#[derive(Clone, Debug)]
pub enum ObjectLookup<T> {
    /// It exists.
    Found(Arc<T>),
    /// It does not exist; enough for an optional reference.
    Absent(String),
    /// It could not be read.
    Failed(String),
}

/// Contents of files by volume and path; `None`: the file cannot be read.
pub type EnvFiles = BTreeMap<(String, String), Option<String>>;

/// The objects and files of one container's environment, by name, and the variables of services.
#[derive(Clone, Debug, Default)]
pub struct EnvObjects {
    /// ConfigMaps that `env` and `envFrom` refer to.
    pub config_maps: BTreeMap<String, ObjectLookup<ConfigMap>>,
    /// Secrets that `env` and `envFrom` refer to.
    pub secrets: BTreeMap<String, ObjectLookup<Secret>>,
    /// Service variables.
    pub services: BTreeMap<String, String>,
    /// Files that `fileKeyRef` refers to; `None` while the feature gate EnvFiles is off.
    pub files: Option<EnvFiles>,
}

impl EnvObjects {
    /// The ConfigMap of a reference; `None` if there is none and the reference is optional.
    ///
    /// # Errors
    /// It does not exist and is not optional, or could not be read.
    pub fn config_map(&self, name: &str, optional: Option<bool>) -> Result<Option<&ConfigMap>, GenerateError> {
        find(&self.config_maps, name, optional)
    }

    /// The Secret of a reference; as [`EnvObjects::config_map`].
    ///
    /// # Errors
    /// It does not exist and is not optional, or could not be read.
    pub fn secret(&self, name: &str, optional: Option<bool>) -> Result<Option<&Secret>, GenerateError> {
        find(&self.secrets, name, optional)
    }
}

fn find<'a, T>(
    all: &'a BTreeMap<String, ObjectLookup<T>>,
    name: &str,
    optional: Option<bool>,
) -> Result<Option<&'a T>, GenerateError> {
    match all.get(name) {
        Some(ObjectLookup::Found(object)) => Ok(Some(object)),
        Some(ObjectLookup::Absent(_)) if optional == Some(true) => Ok(None),
        Some(ObjectLookup::Absent(message) | ObjectLookup::Failed(message)) => {
            Err(GenerateError::Object { message: message.clone() })
        }
        None => Err(GenerateError::Object { message: format!("object {name:?} was not looked up") }),
    }
}
