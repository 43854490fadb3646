//! Desired pods, as the sources hand them to the sync loop.

use std::sync::Arc;

use super::PodRef;
use super::PodUid;

/// A desired pod. Shared, never modified in place: a change is a new object.
pub type Pod = Arc<k8s_openapi::api::core::v1::Pod>;

/// Where a pod comes from; annotation `kubernetes.io/config.source`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum ConfigSource {
    /// Static pod folder or file.
    File,
    /// Static pod URL.
    Http,
    /// API server.
    Api,
}

impl ConfigSource {
    /// The annotation's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Http => "http",
            Self::Api => "api",
        }
    }
}

/// One change of the merged set of desired pods: pods of one source, all with the same operation.
#[derive(Clone, Debug)]
pub enum PodUpdate {
    /// New pods. May be empty: the source has delivered and has none.
    Add(ConfigSource, Vec<Pod>),
    /// Spec, labels, annotations or deletion fields changed.
    Update(ConfigSource, Vec<Pod>),
    /// A deletion timestamp appeared; handled as an update.
    Delete(ConfigSource, Vec<Pod>),
    /// The source no longer has these pods.
    Remove(ConfigSource, Vec<Pod>),
    /// Only the status differs from what was known.
    Reconcile(ConfigSource, Vec<Pod>),
    /// UIDs of all pods that the source has and that cannot be decoded, without those that are known in an earlier form.
    /// Their containers are left running.
    Undecodable(ConfigSource, Vec<PodUid>),
}

/// The pod's identity.
pub fn pod_ref(pod: &k8s_openapi::api::core::v1::Pod) -> PodRef {
    let meta = &pod.metadata;
    PodRef {
        uid: PodUid::from(meta.uid.as_deref().unwrap_or_default()),
        namespace: meta.namespace.as_deref().unwrap_or_default().into(),
        name: meta.name.as_deref().unwrap_or_default().into(),
    }
}
