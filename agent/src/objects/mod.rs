//! API objects that pods refer to: ConfigMaps and Secrets, each with a watch of its own while a registered pod refers
//! to it; service account tokens; the services that become environment variables; RuntimeClasses; claims
//! with their persistent volumes; trust bundles, and certificates of pods.
//!
//! Reads only what pods name; what an object is used for is known to environment and volumes. Serves cached objects
//! while the API server is unavailable.
//!
//! ```text
//!  pod ─▶ references ─▶ Store: one watch (or GET with a time to live) per object ─▶ config_map · secret
//!                          └─▶ change counter: wakes the workers of the pods that use it
//!  watch of all services ─▶ service_variables          TokenRequest ─▶ Tokens ─▶ token
//!  watch of all bundles ─▶ trust_anchors               PodCertificateRequest ─▶ PodCertificates ─▶ pod_certificate
//! ```

mod cached_object;
mod claims;
mod error;
mod kind;
mod object_watch;
mod panics;
mod pem_blocks;
mod pod_certificates;
mod references;
mod registration;
mod retry;
mod runtime_classes;
mod served;
mod service_env;
mod services;
mod store;
#[cfg(test)]
pub(crate) mod tests;
mod token;
mod trust_bundles;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ClusterTrustBundleProjection;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::PodCertificateProjection;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Client;
use tokio::sync::watch;

pub use error::ObjectError;
pub use pod_certificates::CertificateKey;
pub use pod_certificates::PodCertificate;
pub use registration::Registration;
pub use token::Token;
pub use token::TokenKey;

use crate::apiserver::recovery::Recovered;
use crate::model::Clock;
use crate::model::PodUid;
use crate::model::spec;
use panics::Panics;
use pod_certificates::EventSink;
use pod_certificates::PodCertificates;
use references::References;
use registration::RegistrationId;
use runtime_classes::RuntimeClasses;
use services::Services;
use store::Store;
use token::Tokens;
use trust_bundles::TrustBundles;

/// `configMapAndSecretChangeDetectionStrategy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Strategy {
    /// One watch per object that a pod refers to.
    #[default]
    Watch,
    /// GET, cached for a time to live.
    Cache,
    /// GET at every use.
    Get,
}

/// How objects are read.
#[derive(Clone, Debug)]
pub struct ObjectsConfig {
    /// How each object is read.
    pub strategy: Strategy,
    /// Ends pauses of retries when the API server has recovered.
    pub recovered: Recovered,
    /// `syncFrequency`: how often volumes are updated whose objects are not watched.
    pub sync_frequency: Duration,
    /// The wall clock.
    pub clock: Clock,
    /// The Node, whose annotation `node.alpha.kubernetes.io/ttl` sets the time to live of strategy Cache.
    pub node: Option<watch::Receiver<Option<Arc<Node>>>>,
}

/// API objects that pods refer to. Cheap to clone; clones share one cache.
#[derive(Clone, Default)]
pub struct Objects {
    inner: Option<Arc<Inner>>,
}

struct Inner {
    client: Client,
    node: Option<watch::Receiver<Option<Arc<Node>>>>,
    config_maps: Store<ConfigMap>,
    secrets: Store<Secret>,
    services: Services,
    runtime_classes: RuntimeClasses,
    tokens: Tokens,
    trust_bundles: TrustBundles,
    pod_certificates: PodCertificates,
    panics: Panics,
}

impl std::fmt::Debug for Objects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Objects").field("standalone", &self.inner.is_none()).finish_non_exhaustive()
    }
}

impl Objects {
    /// Without an API server: every read fails.
    pub fn standalone() -> Self {
        Self::default()
    }

    /// Reads with `client`, and starts to watch services. Its tasks end with its last clone.
    pub fn new(client: &Client, config: ObjectsConfig) -> Self {
        let panics = Panics::default();
        let reading = store::Reading::new(client.clone(), &config, panics.clone());
        let ObjectsConfig { recovered, clock, node, .. } = config;
        Self {
            inner: Some(Arc::new(Inner {
                client: client.clone(),
                node: node.clone(),
                config_maps: Store::new(reading.clone()),
                secrets: Store::new(reading),
                services: Services::start(client.clone(), recovered.clone(), &panics),
                runtime_classes: RuntimeClasses::new(client.clone(), recovered.clone(), panics.clone()),
                tokens: Tokens::new(client.clone(), clock),
                trust_bundles: TrustBundles::new(client.clone(), recovered.clone(), panics.clone()),
                pod_certificates: PodCertificates::new(client.clone(), recovered, clock, node, panics.clone()),
                panics,
            })),
        }
    }

    /// Panics as soon as one of its watches has: what it reads would never change again. Ends with the last clone; at once
    /// if standalone.
    pub fn raise_panics(&self) -> impl Future<Output = ()> + Send + use<> {
        let panics = self.inner.as_ref().map(|inner| inner.panics.raise());
        async move {
            if let Some(panics) = panics {
                panics.await;
            }
        }
    }

    /// True without an API server.
    pub fn is_standalone(&self) -> bool {
        self.inner.is_none()
    }

    /// Starts to read the objects that the pod refers to. To be called again when the pod has changed, and not for another
    /// status alone: objects that it no longer refers to are released, and what GETs have returned of the others is read
    /// again. Dropping `registration` releases all.
    pub fn register(&self, pod: &Pod, registration: &mut Registration) {
        let Some(inner) = &self.inner else { return };
        let references = References::of(pod);
        inner.config_maps.register(registration.id, &references.config_maps, &registration.counter);
        inner.secrets.register(registration.id, &references.secrets, &registration.counter);
        if spec::runtime_class(pod).is_some() {
            inner.runtime_classes.ensure_watch();
        }
        if references.trust_bundles {
            inner.trust_bundles.ensure_watch();
        }
        inner.trust_bundles.listeners().set(registration, references.trust_bundles);
        inner.pod_certificates.listeners().set(registration, references.certificates);
        registration.objects = Arc::downgrade(inner);
    }

    /// The ConfigMap `name`, which a registered pod of `namespace` refers to.
    ///
    /// # Errors
    /// It does not exist; it was never read and is not read within a second; no registered pod refers to it.
    pub async fn config_map(&self, namespace: &str, name: &str) -> Result<Arc<ConfigMap>, ObjectError> {
        self.inner.as_ref().ok_or(ObjectError::Standalone)?.config_maps.get(namespace, name).await
    }

    /// The Secret `name`; as [`Objects::config_map`].
    ///
    /// # Errors
    /// As [`Objects::config_map`].
    pub async fn secret(&self, namespace: &str, name: &str) -> Result<Arc<Secret>, ObjectError> {
        self.inner.as_ref().ok_or(ObjectError::Standalone)?.secrets.get(namespace, name).await
    }

    /// The token for `key`: the cached one, or a new one if that is due for replacement.
    ///
    /// # Errors
    /// No token was issued, and no cached one is still valid.
    pub async fn token(&self, key: &TokenKey) -> Result<Token, ObjectError> {
        self.inner.as_ref().ok_or(ObjectError::StandaloneToken)?.tokens.get(key, None).await
    }

    /// As [`Objects::token`], but only of the service account with this UID: not of another one that has taken its name.
    ///
    /// # Errors
    /// As [`Objects::token`]; the service account has another UID.
    pub async fn token_of_account(&self, key: &TokenKey, account: &str) -> Result<Token, ObjectError> {
        self.inner.as_ref().ok_or(ObjectError::StandaloneToken)?.tokens.get(key, Some(account)).await
    }

    /// The trust anchors that a projected volume asks for, PEM; empty if there are none and they are optional.
    ///
    /// # Errors
    /// No bundle matches; the bundles cannot be read; the API server does not serve them.
    pub async fn trust_anchors(&self, wanted: &ClusterTrustBundleProjection) -> Result<String, ObjectError> {
        self.inner.as_ref().ok_or(ObjectError::Standalone)?.trust_bundles.anchors(wanted).await
    }

    /// A certificate of the pod for one source of a volume, and its key: the present one, or a new one. `notify`: events on
    /// the pod.
    ///
    /// # Errors
    /// The signer has refused, or not issued it yet; it cannot be requested.
    pub(crate) async fn pod_certificate(
        &self,
        pod: &Pod,
        key: &CertificateKey,
        wanted: &PodCertificateProjection,
        notify: EventSink<'_>,
    ) -> Result<PodCertificate, ObjectError> {
        let inner = self.inner.as_ref().ok_or(ObjectError::Standalone)?;
        inner.pod_certificates.get(&inner.tokens, pod, key, wanted, notify).await
    }

    /// How many sources of volumes request a certificate, by signer and upstream's `state` of it.
    pub fn certificate_states(&self) -> BTreeMap<(String, &'static str), usize> {
        self.inner.as_ref().map(|inner| inner.pod_certificates.states()).unwrap_or_default()
    }

    /// A service account as it is now: one GET.
    ///
    /// # Errors
    /// There is none; the API server does not answer within ten seconds, or denies the request.
    pub async fn service_account(&self, namespace: &str, name: &str) -> Result<ServiceAccount, ObjectError> {
        self.inner.as_ref().ok_or(ObjectError::Standalone)?.tokens.account(namespace, name).await
    }

    /// The runtime handler of the pod's RuntimeClass; empty, for the runtime's default, if the pod names none.
    ///
    /// # Errors
    /// There is no such class; the classes cannot be read; there is no API server.
    pub async fn runtime_handler(&self, pod: &Pod) -> Result<String, ObjectError> {
        let Some(class) = spec::runtime_class(pod) else { return Ok(String::new()) };
        self.inner.as_ref().ok_or(ObjectError::Standalone)?.runtime_classes.handler(class).await
    }

    /// The environment variables of services for containers in `namespace`: of all services of the namespace if `links`
    /// (`enableServiceLinks`), and of the API server's service in any case. Empty without an API server. With
    /// `must_know`, waits up to a second for the first list.
    ///
    /// # Errors
    /// With `must_know`: the services were never read.
    pub async fn service_variables(
        &self,
        namespace: &str,
        links: bool,
        must_know: bool,
    ) -> Result<BTreeMap<String, String>, ObjectError> {
        match &self.inner {
            Some(inner) => inner.services.variables(namespace, links, must_know).await,
            None => Ok(BTreeMap::new()),
        }
    }

    /// The period after which a pod's volumes have to be updated: `None` if changes of all their objects are announced.
    pub fn refresh_period(&self, pod: &Pod) -> Option<Duration> {
        let inner = self.inner.as_ref()?;
        let references = References::of(pod);
        let unwatched = inner.config_maps.has_unwatched(&references.config_maps)
            || inner.secrets.has_unwatched(&references.secrets);
        unwatched.then(|| inner.config_maps.refresh_period())
    }

    /// How often an object that is not watched is read again; `None` without an API server.
    pub fn reading_period(&self) -> Option<Duration> {
        self.inner.as_ref().map(|inner| inner.config_maps.refresh_period())
    }
}

impl Inner {
    fn unregister(&self, id: RegistrationId, uid: &PodUid) {
        self.config_maps.unregister(id);
        self.secrets.unregister(id);
        self.tokens.forget_pod(uid);
        self.trust_bundles.listeners().remove(id);
        self.pod_certificates.listeners().remove(id);
        self.pod_certificates.forget_pod(uid);
    }
}
