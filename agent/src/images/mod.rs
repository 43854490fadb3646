//! Container images: lookups in the runtime, and pulls within the configured limits, with `credentials` of pods, node and
//! plugins. The pull policy is decided by the pod worker. Which pods may use an image that is on the node is recorded by
//! `access`. `gc` removes unused images.
//!
//! Lookups are cached per pod, so that a container restart costs no ImageStatus call. An entry is removed when this agent
//! pulls the image again, when CreateContainer fails, and with its pod; a stale entry is used once more and refreshed
//! afterwards. An image that is retagged by others thus reaches a restarting container one restart later than a new pod;
//! an image that is deleted by others costs one failed CreateContainer. Images of volumes are looked up at every start.

mod access;
mod cache;
mod credentials;
mod gc;
mod prefetch;
mod pull;
mod reference;
#[cfg(test)]
mod tests;
mod usage;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use futures_util::future::join_all;
use keblet_proto::cri::v1 as cri;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use access::AccessRecords;
pub use access::AccountUse;
pub use access::CredentialSource;
pub use access::SecretUse;
pub use access::VerificationPolicy;
pub use cache::CachedImage;
pub use credentials::ConfigProblem;
pub use credentials::Credential;
pub use credentials::CredentialError;
pub use credentials::Credentials;
pub use credentials::ProviderConfigError;
pub use credentials::Providers;
pub use gc::GcError;
pub use gc::GcPolicy;
pub use gc::ImageGc;
pub use gc::RemovedImages;
pub use prefetch::PrefetchRequest;
pub use prefetch::PrefetchedPull;
pub use pull::PullError;
pub use pull::PullLimits;
pub use reference::ReferenceError;
pub use reference::is_latest;
pub use reference::with_default_tag;

use crate::runtime::Runtime;
use crate::runtime::RuntimeError;
use cache::ImageCache;
use gc::records::Records;
use prefetch::Prefetches;
use pull::PullLimiter;

/// How long the runtime may go on with a pull after the call for it was cancelled.
const LONGEST_PULL: Duration = Duration::from_secs(3600);

/// The image service of the runtime, with a lookup cache and pull limits.
#[derive(Debug)]
pub struct Images {
    runtime: Runtime,
    limiter: PullLimiter,
    cache: Mutex<ImageCache>,
    records: Mutex<Records>,
    changes: watch::Sender<u64>,
    credentials: Credentials,
    access: Option<AccessRecords>,
    prefetches: Option<Prefetches>,
}

/// An image as the runtime reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageInfo {
    /// Id or digest to create containers from.
    pub image_ref: String,
    /// Numeric user, if it names one.
    pub uid: Option<i64>,
    /// User by name, if it names one.
    pub username: String,
    /// Bytes.
    pub size: u64,
}

/// A pulled image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// Its id; the runtime's answer to PullImage if the id could not be determined.
    pub image_ref: String,
    /// When the limit on parallel pulls let it begin.
    pub began: Instant,
    /// Whose credential it was pulled with.
    pub source: CredentialSource,
}

impl Images {
    /// Images of `runtime`, pulled within `limits`, with credentials of pull secrets only. Every pod may use the images that
    /// are on the node.
    pub fn new(runtime: Runtime, limits: PullLimits) -> Self {
        let (cache, records, changes) = (Mutex::default(), Mutex::default(), watch::Sender::new(0));
        let (limiter, credentials) = (PullLimiter::new(limits), Credentials::none());
        Self { runtime, limiter, cache, records, changes, credentials, access: None, prefetches: None }
    }

    /// Looks credentials up here too.
    #[must_use]
    pub fn with_credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = credentials;
        self
    }

    /// Records pulls here, and verifies which pods may use images.
    #[must_use]
    pub fn with_access(mut self, access: AccessRecords) -> Self {
        self.access = Some(access);
        self
    }

    /// Pulls images of later containers while init containers run, if `on`.
    #[must_use]
    pub fn with_prefetch(mut self, on: bool) -> Self {
        self.prefetches = on.then(Prefetches::default);
        self
    }

    /// Where credentials are looked up.
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Records of pulls; `None` if there are none and every pod may use every image.
    pub fn access(&self) -> Option<&AccessRecords> {
        self.access.as_ref()
    }

    /// Determines the outcome of pulls that an earlier run of the agent has begun. To be called before the first pull.
    pub async fn recover(&self) {
        let Some(access) = &self.access else { return };
        let unsettled = access.unsettled().await;
        // Beside each other: a runtime that does not answer delays the start once.
        join_all(unsettled.iter().map(|image| self.settle(access, image))).await;
    }

    /// Writes the outcome of a pull that [`AccessRecords::begin`] was called for to the access records, if there are any.
    pub async fn record_pull(&self, image: &str, outcome: Result<&Pulled, &PullError>) {
        let Some(access) = &self.access else { return };
        match outcome {
            Ok(pulled) => access.pulled(image, &pulled.image_ref, &pulled.source).await,
            Err(PullError::Cancelled { asked: Some(asked) }) => access.cancelled(image, *asked).await,
            Err(_) => {
                if access.is_of_earlier_run(image).await {
                    self.settle(access, image).await;
                }
                access.not_pulled(image).await;
            }
        }
    }

    /// Determines the outcome of an earlier pull.
    async fn settle(&self, access: &AccessRecords, image: &str) {
        match self.find_intended(image).await {
            Ok(Some(image_ref)) => access.settle_present(image, &image_ref, self.seen(&image_ref)).await,
            Ok(None) => access.settle(image, None).await,
            Err(error) => tracing::warn!(image, %error, "cannot determine the result of an earlier image pull"),
        }
    }

    /// Determines the outcome of pulls that were cancelled so long ago that the runtime has ended them too.
    async fn settle_cancelled(&self) {
        let Some(access) = &self.access else { return };
        for image in access.cancelled_for(LONGEST_PULL).await {
            self.settle(access, &image).await;
            access.remove_settled(&image).await;
        }
    }

    /// When this agent has seen first that the image is on the node.
    fn seen(&self, image_ref: &str) -> Option<Instant> {
        self.records().first_detected(image_ref)
    }

    /// Whether a pod may use an image that is on the node, see [`AccessRecords::may_use`].
    ///
    /// # Errors
    /// Those of `presented`.
    pub async fn may_use<E>(
        &self,
        image: &str,
        image_ref: &str,
        presented: impl AsyncFnOnce() -> Result<Vec<CredentialSource>, E>,
    ) -> Result<bool, E> {
        let Some(access) = &self.access else { return Ok(true) };
        access.may_use(image, image_ref, self.seen(image_ref), presented).await
    }

    /// The id of an image by the name in a pod's spec, which may differ from the names that the runtime lists.
    async fn find_intended(&self, image: &str) -> Result<Option<String>, RuntimeError> {
        // A text that is not the name of an image has not been pulled.
        let Ok(name) = with_default_tag(image) else { return Ok(None) };
        Ok(self.inspect(&name, None).await?.map(|found| found.image_ref))
    }

    /// A counter of images pulled and removed by this agent.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// ImageStatus of the image with this name; `None` if it is not on the node. `annotations` are the pod's. May be
    /// cancelled.
    ///
    /// # Errors
    /// The runtime does not answer, or answers with an error.
    pub async fn inspect(
        &self,
        image: &str,
        annotations: Option<&BTreeMap<String, String>>,
    ) -> Result<Option<ImageInfo>, RuntimeError> {
        let found = self.runtime.image_status(spec(image, annotations)).await?;
        Ok(found.map(|image| ImageInfo {
            image_ref: image.id,
            uid: image.uid.map(|uid| uid.value),
            username: image.username,
            size: image.size,
        }))
    }

    /// PullImage for the pod of `sandbox`, once the limit on parallel pulls permits it: with one credential after the other
    /// until one works, and without only if there is none. Removes the image from the cache.
    ///
    /// # Errors
    /// `registryPullQPS` is exceeded; the runtime does not answer, or answers with an error to every credential.
    pub async fn pull(
        &self,
        image: &str,
        sandbox: &cri::PodSandboxConfig,
        credentials: &[Credential],
    ) -> Result<Pulled, PullError> {
        self.pull_unless(&CancellationToken::new(), image, sandbox, credentials).await
    }

    /// As [`Self::pull`], until it is cancelled: the runtime may then still complete a pull that it was asked for.
    ///
    /// # Errors
    /// As [`Self::pull`], and if it was cancelled.
    pub async fn pull_unless(
        &self,
        cancelled: &CancellationToken,
        image: &str,
        sandbox: &cri::PodSandboxConfig,
        credentials: &[Credential],
    ) -> Result<Pulled, PullError> {
        let permit = cancelled.run_until_cancelled(self.limiter.acquire_permit()).await;
        // It may come from a pull that was cancelled in the same moment.
        let permit = permit.filter(|_| !cancelled.is_cancelled());
        let _permit = permit.ok_or(PullError::Cancelled { asked: None })?;
        let began = Instant::now();
        self.limiter.take_token(began)?;
        let pull = self.pull_now(began, image, sandbox, credentials);
        cancelled.run_until_cancelled(pull).await.unwrap_or(Err(PullError::Cancelled { asked: Some(began) }))
    }

    async fn pull_now(
        &self,
        began: Instant,
        image: &str,
        sandbox: &cri::PodSandboxConfig,
        credentials: &[Credential],
    ) -> Result<Pulled, PullError> {
        let result = self.try_all(image, sandbox, credentials).await;
        self.cache().remove_image(image);
        let (answer, source) = result?;
        self.changes.send_modify(|count| *count += 1);
        let image_ref = self.id_of(answer, &sandbox.annotations).await;
        self.records().pulled(&image_ref, Instant::now());
        Ok(Pulled { image_ref, began, source })
    }

    async fn try_all(
        &self,
        image: &str,
        sandbox: &cri::PodSandboxConfig,
        credentials: &[Credential],
    ) -> Result<(String, CredentialSource), PullError> {
        let spec = spec(image, Some(&sandbox.annotations));
        let anonymous = credentials.is_empty().then_some((None, CredentialSource::Node));
        let known = credentials.iter().map(|credential| (Some(credential.auth()), credential.source().clone()));
        let mut errors = Vec::new();
        for (auth, source) in known.chain(anonymous) {
            match self.runtime.pull_image(spec.clone(), auth, Some(sandbox.clone())).await {
                Ok(image_ref) => return Ok((image_ref, source)),
                Err(error) => errors.push(error),
            }
        }
        Err(PullError::Runtime(errors))
    }

    /// The id of an image that was pulled. Earlier versions of CRI-O and cri-dockerd answer PullImage with
    /// `<repository>@<digest>`; access records and image garbage collection identify images by the id that ImageStatus has.
    /// Looked up by the answer: the name that was pulled may denote another image meanwhile.
    async fn id_of(&self, answer: String, annotations: &BTreeMap<String, String>) -> String {
        if reference::is_id(&answer) {
            return answer;
        }
        match self.inspect(&answer, Some(annotations)).await {
            Ok(Some(found)) if !found.image_ref.is_empty() => return found.image_ref,
            Ok(_) => tracing::warn!(image = answer, "the runtime reports no id of an image that it has pulled"),
            Err(error) => tracing::warn!(image = answer, %error, "cannot determine the id of a pulled image"),
        }
        answer
    }

    /// The cached lookup of this image for this pod.
    pub fn cached(&self, uid: &str, image: &str, now: Instant) -> Option<CachedImage> {
        let found = self.cache().get(uid, image, now);
        // A container is about to be created from it.
        found.iter().for_each(|found| self.records().used(&found.info.image_ref, now));
        found
    }

    /// Caches a lookup for this pod.
    pub fn set_cached(&self, uid: &str, image: &str, info: ImageInfo, now: Instant) {
        self.records().used(&info.image_ref, now);
        self.cache().insert(uid, image, info, now);
    }

    /// Removes one image of one pod from the cache.
    pub fn remove_cached(&self, uid: &str, image: &str) {
        self.cache().remove(uid, image);
    }

    /// Removes a pod from the cache, and its pulls ahead.
    pub fn remove_cached_pod(&self, uid: &str) {
        self.cache().remove_pod(uid);
        self.prefetches.iter().for_each(|prefetches| prefetches.forget_pod(uid));
    }

    /// An image was removed from the node.
    fn forget(&self, id: &str) {
        self.cache().remove_id(id);
        self.records().removed(id);
    }

    fn records(&self) -> MutexGuard<'_, Records> {
        // Replaced whole: a panic elsewhere leaves a usable map behind.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cache(&self) -> MutexGuard<'_, ImageCache> {
        // Entries are replaced whole: a panic elsewhere leaves a usable map behind.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn spec(image: &str, annotations: Option<&BTreeMap<String, String>>) -> cri::ImageSpec {
    let annotations = annotations.cloned().unwrap_or_default();
    cri::ImageSpec { image: image.to_owned(), annotations, ..Default::default() }
}
