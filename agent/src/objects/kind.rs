//! The two kinds of objects that pods refer to, and which of their fields are cached.

use std::fmt::Debug;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;

/// A kind of object that pods refer to by name.
pub(super) trait Kind:
    k8s_openapi::Resource<Scope = NamespaceResourceScope>
    + DeserializeOwned
    + Clone
    + PartialEq
    + Debug
    + Send
    + Sync
    + 'static
{
    /// Its name in messages.
    const WORD: &'static str;
    /// Its name in paths.
    const PLURAL: &'static str;

    fn meta(&mut self) -> &mut ObjectMeta;

    /// `immutable: true`: does not have to be read again.
    fn is_immutable(&self) -> bool;

    /// Whether both have the same content for pods.
    fn same_content(&self, other: &Self) -> bool;

    /// Drops unused metadata; the annotation of `kubectl apply` alone doubles the size.
    fn trim(&mut self) {
        let meta = self.meta();
        meta.managed_fields = None;
        meta.annotations = None;
        meta.labels = None;
        meta.owner_references = None;
    }
}

impl Kind for ConfigMap {
    const WORD: &'static str = "configmap";
    const PLURAL: &'static str = "configmaps";

    fn meta(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }

    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }

    fn same_content(&self, other: &Self) -> bool {
        (&self.data, &self.binary_data, self.immutable) == (&other.data, &other.binary_data, other.immutable)
    }
}

impl Kind for Secret {
    const WORD: &'static str = "secret";
    const PLURAL: &'static str = "secrets";

    fn meta(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }

    fn is_immutable(&self) -> bool {
        self.immutable == Some(true)
    }

    fn same_content(&self, other: &Self) -> bool {
        (&self.data, &self.type_, self.immutable) == (&other.data, &other.type_, other.immutable)
    }
}
