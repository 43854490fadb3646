//! API objects and files that an environment refers to, as far as they could be read. Plain data.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Secret;

use super::FileValues;
use super::GenerateError;
use super::env::SizeBudget;

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

/// Values that were read from files. A container can name thousands of files, all of them links to a large one: neither
/// are contents kept, nor more values than an environment can have.
#[derive(Clone, Debug, Default)]
pub struct EnvFiles {
    /// By volume and path.
    files: BTreeMap<(String, String), FileValues>,
    room: SizeBudget,
}

impl EnvFiles {
    /// Adds the values of a file. Empty ones count as missing.
    pub fn add(&mut self, volume: &str, path: &str, values: FileValues) {
        let mut kept = FileValues::new();
        for (key, value) in values {
            kept.insert(key, value.and_then(|value| self.keep(value)));
        }
        self.files.insert((volume.to_owned(), path.to_owned()), kept);
    }

    fn keep(&mut self, value: Option<Bytes>) -> Result<Option<Bytes>, GenerateError> {
        let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
        // Without the name of its variable: nothing is refused here that an environment has room for.
        self.room.take("", &value)?;
        Ok(Some(value))
    }

    /// The value of a key; `None` if the file has none.
    ///
    /// # Errors
    /// The file was not read or is malformed before the key; the values are more than a process can be given.
    pub fn value(&self, volume: &str, path: &str, key: &str) -> Result<Option<&[u8]>, GenerateError> {
        let file = self.files.get(&(volume.to_owned(), path.to_owned()));
        match file.and_then(|values| values.get(key)) {
            Some(Ok(value)) => Ok(value.as_deref()),
            Some(Err(error)) => Err(error.clone()),
            None => Err(GenerateError::EnvFile),
        }
    }
}

/// The objects and files of one container's environment, by name, and the variables of services.
#[derive(Clone, Debug, Default)]
pub struct EnvObjects {
    /// ConfigMaps that `env` and `envFrom` refer to.
    pub config_maps: BTreeMap<String, ObjectLookup<ConfigMap>>,
    /// Secrets that `env` and `envFrom` refer to.
    pub secrets: BTreeMap<String, ObjectLookup<Secret>>,
    /// Service variables.
    pub services: BTreeMap<String, String>,
    /// Values that `fileKeyRef` refers to; `None` while the feature gate EnvFiles is off.
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
