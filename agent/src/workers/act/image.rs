//! The image of a container about to start, or of a volume: finds or pulls it by its policy, unless the pod may not use what
//! is there; holds pulls back after failures.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use super::ActContext;
use super::PodError;
use super::pull_secrets;
use super::report;
use crate::images::Credential;
use crate::images::ImageInfo;
use crate::images::PullError;
use crate::images::is_latest;
use crate::images::with_default_tag;
use crate::model::Clock;
use crate::model::StartFailure;
use crate::recorder::EventType;
use crate::workers::backoff::BackoffHistory;
use crate::workers::backoff::image_pull_key;
use crate::workers::generate::ContainerSpec;
use crate::workers::generate::ImageUser;
use crate::workers::generate::ResolvedImage;
use crate::workers::generate::names;

/// The pod is synced again this long after a failed pull, and shows the back-off then, as with the kubelet's relists.
const BACK_OFF_SHOWN_AFTER: Duration = Duration::from_secs(1);

/// Failed pulls of all pods: back-off and last error.
#[derive(Debug)]
pub(super) struct PullHistory {
    backoff: BackoffHistory,
    /// Monotonic: a wall clock that is set neither holds a pull back longer nor lets it go early, as upstream.
    clock: Clock,
    last_errors: HashMap<String, String>,
}

impl Default for PullHistory {
    fn default() -> Self {
        let (backoff, clock) = (BackoffHistory::for_image_pulls(), Clock::derived(SystemTime::UNIX_EPOCH));
        Self { backoff, clock, last_errors: HashMap::new() }
    }
}

impl PullHistory {
    fn record(&mut self, key: &str, error: &PodError) {
        let now = self.clock.wall();
        self.backoff.record(key, now, now);
        self.last_errors.insert(key.to_owned(), StartFailure::from(error).to_string());
    }

    /// For how long the next pull is held back, if it is.
    fn held_back(&self, key: &str) -> Option<Duration> {
        let now = self.clock.wall();
        self.backoff.blocked(key, now).and_then(|blocked| blocked.until.duration_since(now).ok())
    }

    /// Removes a pod's errors, and every back-off that has expired.
    pub(super) fn forget_pod(&mut self, uid: &str) {
        let prefix = image_pull_key(uid, "");
        self.last_errors.retain(|key, _| !key.starts_with(&prefix));
        self.backoff.gc(self.clock.wall());
    }
}

/// An image to create from.
pub(super) struct FoundImage {
    pub(super) image: ResolvedImage,
    pub(super) origin: Origin,
    /// The image's name with its tag.
    pub(super) name: String,
}

/// How an image was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    /// Cached from an earlier start of this pod; the runtime was not called.
    Cached {
        /// To be inspected again after the start.
        stale: bool,
    },
    /// The runtime has it.
    Present,
    /// Just pulled.
    Pulled,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Policy {
    Always,
    IfNotPresent,
    Never,
}

impl Policy {
    /// The label value.
    const fn label(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::IfNotPresent => "ifnotpresent",
            Self::Never => "never",
        }
    }
}

/// Labels of the metric of image requests, as far as they are determined.
#[derive(Default)]
struct RequestLabels {
    /// The runtime has the image.
    present: Option<bool>,
    /// A pull is required.
    required: Option<bool>,
}

/// An image that a container or a volume is made of.
pub(super) struct ImageRequest<'a> {
    /// As the spec names it.
    pub(super) image: &'a str,
    /// `imagePullPolicy` or `pullPolicy`.
    pub(super) policy: Option<&'a str>,
    /// What events are about; empty for the pod.
    pub(super) field_path: String,
}

impl<'a> ImageRequest<'a> {
    fn by_container(spec: &'a ContainerSpec<'_>) -> Self {
        let container = &spec.container;
        Self {
            image: container.image.as_deref().unwrap_or_default(),
            policy: container.image_pull_policy.as_deref(),
            field_path: spec.field_path(),
        }
    }

    /// The policy, defaulted as the API does.
    fn policy(&self) -> Policy {
        match self.policy.unwrap_or_default() {
            "Always" => Policy::Always,
            "Never" => Policy::Never,
            "" if is_latest(self.image) => Policy::Always,
            _ => Policy::IfNotPresent,
        }
    }
}

/// True if an image with this policy is pulled only if it is not on the node.
pub(super) fn is_pulled_if_absent(image: &str, policy: Option<&str>) -> bool {
    ImageRequest { image, policy, field_path: String::new() }.policy() == Policy::IfNotPresent
}

/// What images are found or pulled for.
#[derive(Clone, Copy)]
pub(super) struct ImageLookup<'a> {
    pub(super) ctx: &'a ActContext,
    pub(super) pod: &'a Pod,
    pub(super) sandbox: &'a cri::PodSandboxConfig,
    /// Called before an image is pulled.
    pub(super) before_pull: &'a (dyn Fn() + Sync),
    /// The pod is terminated meanwhile: neither a pull nor credentials are waited for.
    pub(super) terminated: &'a CancellationToken,
}

impl ImageLookup<'_> {
    /// Finds or pulls the image of a container. A failure has its own event, and event `Failed` with its reason; an image
    /// that cannot be inspected after its pull has no reason of its own, so that the event has the message.
    ///
    /// # Errors
    /// There is no image to create from.
    pub(super) async fn container(self, spec: &ContainerSpec<'_>) -> Result<FoundImage, PodError> {
        let found = self.ensure(ImageRequest::by_container(spec)).await;
        if let Err(error) = &found {
            let rendered = error.render();
            let text = match error {
                PodError::InspectPulledImage { .. } => rendered.message.as_str(),
                _ => &rendered.reason,
            };
            self.ctx.container_event(self.pod, spec, EventType::Warning, "Failed", &format!("Error: {text}"));
        }
        found
    }

    /// Whether the runtime still has an image that was taken from the cache; if not, it is removed from the cache.
    pub(super) async fn still_has(self, found: &FoundImage) -> bool {
        let Self { ctx, pod, .. } = self;
        let info = ctx.images.inspect(&found.name, pod.metadata.annotations.as_ref()).await.ok().flatten();
        let still = info.is_some_and(|info| resolved(info) == found.image);
        if !still {
            ctx.images.remove_cached(names::pod_uid(pod), &found.name);
        }
        still
    }

    /// Finds or pulls an image. A failure has its own event.
    ///
    /// # Errors
    /// There is no image to use.
    pub(super) async fn ensure(self, wanted: ImageRequest<'_>) -> Result<FoundImage, PodError> {
        let mut labels = RequestLabels::default();
        let (credentials, announced) = (OnceCell::new(), AtomicBool::new(false));
        let request = Request { of: self, wanted: &wanted, credentials, announced };
        let found = request.find_or_pull(&mut labels).await;
        let policy = wanted.policy().label();
        self.ctx.count(|metrics| metrics.node_images.asked(policy, labels.present, labels.required));
        if let Err(error) = &found {
            self.ctx.report_at(self.pod, &wanted.field_path, error);
        }
        found
    }
}

/// One image that is found or pulled.
struct Request<'a> {
    of: ImageLookup<'a>,
    wanted: &'a ImageRequest<'a>,
    /// Looked up at most once.
    credentials: OnceCell<Vec<Credential>>,
    /// The event of the pull is sent.
    announced: AtomicBool,
}

impl Request<'_> {
    async fn find_or_pull(&self, labels: &mut RequestLabels) -> Result<FoundImage, PodError> {
        let stated = self.wanted.image;
        let image = || stated.to_owned();
        let name = with_default_tag(stated).map_err(|source| PodError::ParseImage { image: image(), source })?;
        let policy = self.wanted.policy();
        if policy == Policy::IfNotPresent {
            let ahead = self.of.terminated.run_until_cancelled(self.prefetched(&name, labels)).await;
            if let Some(found) = ahead.transpose()?.flatten() {
                return Ok(found);
            }
        }
        if policy != Policy::Always {
            let found = self.find(&name).await?;
            labels.present = Some(found.is_some());
            if let Some((info, origin)) = found {
                let may_use = self.may_use(&info).await?;
                labels.required = Some(!may_use);
                if may_use {
                    return Ok(self.use_present(name, info, origin));
                }
            }
        }
        if policy == Policy::Never {
            return Err(PodError::NeverPull { image: image() });
        }
        labels.required = Some(true);
        self.pull(name).await
    }

    /// The image of a pull that was begun ahead, with the events of a pull now. `None` if there was none, or it failed: the
    /// image is then looked for as if there had been none.
    async fn prefetched(&self, name: &str, labels: &mut RequestLabels) -> Result<Option<FoundImage>, PodError> {
        let ImageLookup { ctx, pod, .. } = self.of;
        let uid = names::pod_uid(pod);
        let Some(mut ahead) = ctx.images.take_prefetched(uid, name) else { return Ok(None) };
        if !ahead.is_pull().await {
            return Ok(None);
        }
        self.announce();
        let Some((took, total)) = ahead.ended().await else { return Ok(None) };
        // It may have been removed since.
        let info = ctx.images.inspect(name, pod.metadata.annotations.as_ref()).await;
        let Ok(Some(info)) = info else { return Ok(None) };
        // Its name may be that of another image since.
        if !self.may_use(&info).await? {
            return Ok(None);
        }
        (labels.present, labels.required) = (Some(false), Some(true));
        Ok(Some(self.pulled(name.to_owned(), info, took, total)))
    }

    /// The image from the cache or from the runtime.
    async fn find(&self, name: &str) -> Result<Option<(ImageInfo, Origin)>, PodError> {
        let ImageLookup { ctx, pod, .. } = self.of;
        if let Some(known) = ctx.images.cached(names::pod_uid(pod), name, ctx.clock.now()) {
            return Ok(Some((known.info, Origin::Cached { stale: known.stale })));
        }
        let info = ctx.images.inspect(name, pod.metadata.annotations.as_ref()).await;
        let info = info.map_err(|source| PodError::InspectImage { image: self.wanted.image.to_owned(), source })?;
        Ok(info.map(|info| (info, Origin::Present)))
    }

    /// Whether the pod may use an image that is on the node.
    async fn may_use(&self, info: &ImageInfo) -> Result<bool, PodError> {
        let presented = async || {
            let credentials = self.credentials().await?;
            Ok(credentials.iter().map(|credential| credential.source().clone()).collect())
        };
        self.of.ctx.images.may_use(self.wanted.image, &info.image_ref, presented).await
    }

    async fn credentials(&self) -> Result<&[Credential], PodError> {
        let ImageLookup { ctx, pod, terminated, .. } = self.of;
        let look_up = async || {
            let secrets = pull_secrets::look_up(ctx, pod).await.found;
            let matching = ctx.images.credentials().matching(self.wanted.image, pod, &secrets).await;
            matching.map_err(|source| PodError::ImageCredentials { source })
        };
        // A plugin may hang, and the API server may not answer.
        match terminated.run_until_cancelled(self.credentials.get_or_try_init(look_up)).await {
            Some(found) => Ok(found?),
            None => Err(self.pull_failed(PullError::Cancelled { asked: None })),
        }
    }

    fn pull_failed(&self, source: PullError) -> PodError {
        let recheck_at = self.of.ctx.clock.wall() + BACK_OFF_SHOWN_AFTER;
        PodError::PullImage { image: self.wanted.image.to_owned(), source, recheck_at }
    }

    fn use_present(&self, name: String, info: ImageInfo, origin: Origin) -> FoundImage {
        let ImageLookup { ctx, pod, .. } = self.of;
        let stated = self.wanted.image;
        let proven = if ctx.images.access().is_some() { " and can be accessed by the pod" } else { "" };
        self.event("Pulled", &format!("Container image {stated:?} already present on machine{proven}"));
        if origin == Origin::Present {
            ctx.images.set_cached(names::pod_uid(pod), &name, info.clone(), ctx.clock.now());
        }
        FoundImage { image: resolved(info), origin, name }
    }

    async fn pull(&self, name: String) -> Result<FoundImage, PodError> {
        let ImageLookup { ctx, pod, .. } = self.of;
        let (stated, uid) = (self.wanted.image, names::pod_uid(pod));
        let key = image_pull_key(uid, stated);
        // First: a pull that is held back runs no plugin and writes no file.
        check_backoff(ctx, stated, &key)?;
        let credentials = self.credentials().await?;
        if let Some(access) = ctx.images.access() {
            let begun = access.begin(stated).await;
            begun.map_err(|source| PodError::RecordPull { image: stated.to_owned(), source })?;
        }
        self.announce();
        let (since, began) = (ctx.clock.now(), ctx.clock.wall());
        let pulled = ctx.images.pull_unless(self.of.terminated, &name, self.of.sandbox, credentials).await;
        ctx.startups.pulled(uid, began, ctx.clock.wall());
        ctx.images.record_pull(stated, pulled.as_ref()).await;
        let pulled = pulled.map_err(|source| {
            // One that ended with its pod holds nothing back: a static pod may be back under its UID.
            let has_failed = !matches!(source, PullError::Cancelled { .. });
            let error = self.pull_failed(source);
            if has_failed {
                ctx.pulls().record(&key, &error);
            }
            error
        })?;
        let info = inspect_pulled(ctx, pod, &name, pulled.image_ref).await?;
        let since_moment = |moment| ctx.clock.now().saturating_duration_since(moment);
        Ok(self.pulled(name, info, since_moment(pulled.began), since_moment(since)))
    }

    /// Shows that the image is being pulled, once.
    fn announce(&self) {
        if !self.announced.swap(true, Relaxed) {
            self.event("Pulling", &format!("Pulling image {:?}", self.wanted.image));
            (self.of.before_pull)();
        }
    }

    /// An image that was pulled; `total` includes waiting for a permit, as upstream's metric does.
    fn pulled(&self, name: String, info: ImageInfo, took: Duration, total: Duration) -> FoundImage {
        let ImageLookup { ctx, pod, .. } = self.of;
        ctx.count(|metrics| metrics.node_images.pulled(info.size, total));
        let (took, all) = (report::duration(took), report::duration(total));
        let message = format!(
            "Successfully pulled image {:?} in {took} ({all} including waiting). Image size: {} bytes.",
            self.wanted.image, info.size
        );
        self.event("Pulled", &message);
        ctx.images.set_cached(names::pod_uid(pod), &name, info.clone(), ctx.clock.now());
        FoundImage { image: resolved(info), origin: Origin::Pulled, name }
    }

    fn event(&self, reason: &str, message: &str) {
        let ImageLookup { ctx, pod, .. } = self.of;
        ctx.recorder.pod_event(pod, &self.wanted.field_path, EventType::Normal, reason, message);
    }
}

/// A failed pull of this image by this pod holds the next one back.
fn check_backoff(ctx: &ActContext, stated: &str, key: &str) -> Result<(), PodError> {
    let pulls = ctx.pulls();
    match pulls.held_back(key) {
        None => Ok(()),
        Some(left) => {
            let (image, last) = (stated.to_owned(), pulls.last_errors.get(key).cloned());
            Err(PodError::PullBackOff { image, last, until: ctx.clock.wall() + left })
        }
    }
}

/// Inspects the image for its user and size, which the answer to a pull does not contain.
async fn inspect_pulled(ctx: &ActContext, pod: &Pod, name: &str, image_ref: String) -> Result<ImageInfo, PodError> {
    let info = ctx.images.inspect(name, pod.metadata.annotations.as_ref()).await;
    let info = info.map_err(|source| PodError::InspectPulledImage { image: name.to_owned(), source })?;
    let none = ImageInfo { image_ref: String::new(), uid: None, username: String::new(), size: 0 };
    Ok(ImageInfo { image_ref, ..info.unwrap_or(none) })
}

fn resolved(info: ImageInfo) -> ResolvedImage {
    let user = match (info.uid, info.username.is_empty()) {
        (Some(uid), _) => ImageUser::Id(uid),
        (None, false) => ImageUser::Name(info.username),
        (None, true) => ImageUser::Id(0),
    };
    ResolvedImage { image_ref: info.image_ref, user }
}
