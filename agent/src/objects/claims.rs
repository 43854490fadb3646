//! Claims and persistent volumes with their secrets, read when a pod is to use them, and the Node. Nothing is cached: what a
//! pod needs of a claim is needed once, and its size rarely.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::PersistentVolume;
use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use kube::api::Patch;
use kube::api::PatchParams;
use serde_json::Value;
use tokio::sync::watch;

use super::Objects;
use super::error::ObjectError;
use super::error::code;
use super::error::describe;
use super::store::is_name;

/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(10);

impl Objects {
    /// The claim, as it is now.
    ///
    /// # Errors
    /// It does not exist, or is not read within ten seconds; there is no API server.
    pub async fn persistent_volume_claim(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<PersistentVolumeClaim, ObjectError> {
        let inner = self.inner.as_ref().ok_or(ObjectError::Standalone)?;
        read(Api::namespaced(inner.client.clone(), namespace), "persistentvolumeclaims", name).await
    }

    /// Changes the status of a claim by a strategic merge patch. Returns the claim.
    ///
    /// # Errors
    /// The patch is refused, or not answered within ten seconds; there is no API server.
    pub async fn patch_claim_status(
        &self,
        namespace: &str,
        name: &str,
        patch: &Value,
    ) -> Result<PersistentVolumeClaim, ObjectError> {
        let inner = self.inner.as_ref().ok_or(ObjectError::Standalone)?;
        let api: Api<PersistentVolumeClaim> = Api::namespaced(inner.client.clone(), namespace);
        let (params, patch) = (PatchParams::default(), Patch::Strategic(patch));
        match tokio::time::timeout(TIMEOUT, api.patch_status(name, &params, &patch)).await {
            Ok(patched) => patched.map_err(|error| ObjectError::Api(describe(&error))),
            Err(_) => Err(ObjectError::Api(format!("patching claim {namespace}/{name} took longer than {TIMEOUT:?}"))),
        }
    }

    /// The persistent volume, as it is now.
    ///
    /// # Errors
    /// As [`Self::persistent_volume_claim`].
    pub async fn persistent_volume(&self, name: &str) -> Result<PersistentVolume, ObjectError> {
        let inner = self.inner.as_ref().ok_or(ObjectError::Standalone)?;
        read(Api::all(inner.client.clone()), "persistentvolumes", name).await
    }

    /// A Secret as it is now, which a volume names: it may be in another namespace than the pod's.
    ///
    /// # Errors
    /// As [`Self::persistent_volume_claim`].
    pub async fn secret_now(&self, namespace: &str, name: &str) -> Result<Secret, ObjectError> {
        let inner = self.inner.as_ref().ok_or(ObjectError::Standalone)?;
        if !is_name(namespace) {
            return Err(ObjectError::BadName { kind: "namespaces", name: namespace.to_owned() });
        }
        read(Api::namespaced(inner.client.clone(), namespace), "secrets", name).await
    }

    /// The Node object as it changes; `None` without an API server.
    pub fn node_changes(&self) -> Option<watch::Receiver<Option<Arc<Node>>>> {
        self.inner.as_ref()?.node.clone()
    }

    /// The Node object, if it was received.
    pub fn node(&self) -> Option<Arc<Node>> {
        self.inner.as_ref()?.node.as_ref()?.borrow().clone()
    }
}

async fn read<K>(api: Api<K>, kind: &'static str, name: &str) -> Result<K, ObjectError>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    if !is_name(name) {
        return Err(ObjectError::BadName { kind, name: name.to_owned() });
    }
    match tokio::time::timeout(TIMEOUT, api.get(name)).await {
        Ok(Ok(object)) => Ok(object),
        Ok(Err(error)) if code(&error) == Some(404) => Err(ObjectError::NotFound { kind, name: name.to_owned() }),
        Ok(Err(error)) => Err(ObjectError::Api(describe(&error))),
        Err(_) => Err(ObjectError::Api(format!("reading {kind} {name} took longer than {TIMEOUT:?}"))),
    }
}
