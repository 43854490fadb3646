//! The image of a container about to start: finds or pulls it by its policy; holds pulls back after failures.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;

use super::ActContext;
use super::PodError;
use super::report;
use crate::images::ImageInfo;
use crate::images::is_latest;
use crate::images::with_default_tag;
use crate::model::StartFailure;
use crate::recorder::EventType;
use crate::workers::backoff::BackoffHistory;
use crate::workers::backoff::image_pull_key;
use crate::workers::generate::ContainerSpec;
use crate::workers::generate::ImageUser;
use crate::workers::generate::ResolvedImage;
use crate::workers::generate::names;

/// Failed pulls of all pods: back-off and last error.
#[derive(Debug)]
pub(super) struct PullHistory {
    backoff: BackoffHistory,
    last_errors: HashMap<String, String>,
}

impl Default for PullHistory {
    fn default() -> Self {
        Self { backoff: BackoffHistory::for_image_pulls(), last_errors: HashMap::new() }
    }
}

impl PullHistory {
    fn record(&mut self, key: &str, error: &PodError, now: std::time::SystemTime) {
        self.backoff.record(key, now, now);
        self.last_errors.insert(key.to_owned(), StartFailure::from(error).to_string());
    }

    /// Removes a pod's errors, and every back-off that has expired.
    pub(super) fn forget_pod(&mut self, uid: &str, now: std::time::SystemTime) {
        let prefix = image_pull_key(uid, "");
        self.last_errors.retain(|key, _| !key.starts_with(&prefix));
        self.backoff.gc(now);
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

/// The policy, defaulted as the API does.
fn policy(spec: &ContainerSpec<'_>) -> Policy {
    let image = spec.container.image.as_deref().unwrap_or_default();
    match spec.container.image_pull_policy.as_deref().unwrap_or_default() {
        "Always" => Policy::Always,
        "Never" => Policy::Never,
        "" if is_latest(image) => Policy::Always,
        _ => Policy::IfNotPresent,
    }
}

/// Finds or pulls the image of a container. A failure has its own event, and event `Failed` with its reason; an image that
/// cannot be inspected after its pull has no reason of its own, so that the event has the message.
///
/// # Errors
/// There is no image to create from.
pub(super) async fn ensure(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    sandbox: &cri::PodSandboxConfig,
    before_pull: &(dyn Fn() + Sync),
) -> Result<FoundImage, PodError> {
    let mut labels = RequestLabels::default();
    let found = find_or_pull(ctx, pod, spec, sandbox, before_pull, &mut labels).await;
    ctx.count(|metrics| metrics.runtime.image_asked(policy(spec).label(), labels.present, labels.required));
    if let Err(error) = &found {
        ctx.report_start(pod, spec, error);
        let rendered = error.render();
        let text = match error {
            PodError::InspectPulledImage { .. } => rendered.message.as_str(),
            _ => rendered.reason,
        };
        ctx.container_event(pod, spec, EventType::Warning, "Failed", &format!("Error: {text}"));
    }
    found
}

async fn find_or_pull(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    sandbox: &cri::PodSandboxConfig,
    before_pull: &(dyn Fn() + Sync),
    labels: &mut RequestLabels,
) -> Result<FoundImage, PodError> {
    let stated = spec.container.image.as_deref().unwrap_or_default();
    let image = || stated.to_owned();
    let name = with_default_tag(stated).map_err(|source| PodError::ParseImage { image: image(), source })?;
    let policy = policy(spec);
    if policy != Policy::Always {
        let found = find(ctx, pod, spec, stated, &name).await?;
        labels.present = Some(found.is_some());
        if let Some(found) = found {
            labels.required = Some(false);
            return Ok(found);
        }
    }
    if policy == Policy::Never {
        return Err(PodError::NeverPull { image: image() });
    }
    labels.required = Some(true);
    pull(ctx, pod, spec, name, sandbox, before_pull).await
}

/// The image from the cache or from the runtime.
async fn find(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    stated: &str,
    name: &str,
) -> Result<Option<FoundImage>, PodError> {
    let uid = names::pod_uid(pod);
    let present = || {
        let message = format!("Container image {stated:?} already present on machine and can be accessed by the pod");
        ctx.container_event(pod, spec, EventType::Normal, "Pulled", &message);
    };
    if let Some(known) = ctx.images.cached(uid, name, ctx.clock.now()) {
        present();
        let image = resolved(known.info);
        let origin = Origin::Cached { stale: known.stale };
        return Ok(Some(FoundImage { image, origin, name: name.to_owned() }));
    }
    let info = ctx.images.inspect(name, pod.metadata.annotations.as_ref()).await;
    let info = info.map_err(|source| PodError::InspectImage { image: stated.to_owned(), source })?;
    let Some(info) = info else { return Ok(None) };
    present();
    ctx.images.set_cached(uid, name, info.clone(), ctx.clock.now());
    Ok(Some(FoundImage { image: resolved(info), origin: Origin::Present, name: name.to_owned() }))
}

async fn pull(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    name: String,
    sandbox: &cri::PodSandboxConfig,
    before_pull: &(dyn Fn() + Sync),
) -> Result<FoundImage, PodError> {
    let stated = spec.container.image.as_deref().unwrap_or_default();
    let key = image_pull_key(names::pod_uid(pod), stated);
    check_backoff(ctx, stated, &key)?;
    ctx.container_event(pod, spec, EventType::Normal, "Pulling", &format!("Pulling image {stated:?}"));
    before_pull();
    let (since, began) = (ctx.clock.now(), ctx.clock.wall());
    let pulled = ctx.images.pull(&name, sandbox.clone()).await;
    ctx.startups.pulled(names::pod_uid(pod), began, ctx.clock.wall());
    let total = ctx.clock.now().saturating_duration_since(since);
    let all = report::duration(total);
    let pulled = pulled.map_err(|source| {
        let error = PodError::PullImage { image: stated.to_owned(), name: name.clone(), source };
        ctx.pulls().record(&key, &error, ctx.clock.wall());
        error
    })?;
    let info = inspect_pulled(ctx, pod, &name, pulled.image_ref).await?;
    // As in upstream's metric, waiting for a permit is included.
    ctx.count(|metrics| metrics.runtime.pulled(info.size, total));
    let took = report::duration(pulled.took);
    let message = format!(
        "Successfully pulled image {stated:?} in {took} ({all} including waiting). Image size: {} bytes.",
        info.size
    );
    ctx.container_event(pod, spec, EventType::Normal, "Pulled", &message);
    ctx.images.set_cached(names::pod_uid(pod), &name, info.clone(), ctx.clock.now());
    Ok(FoundImage { image: resolved(info), origin: Origin::Pulled, name })
}

/// A failed pull of this image by this pod holds the next one back.
fn check_backoff(ctx: &ActContext, stated: &str, key: &str) -> Result<(), PodError> {
    let pulls = ctx.pulls();
    match pulls.backoff.blocked(key, ctx.clock.wall()) {
        None => Ok(()),
        Some(_) => Err(PodError::PullBackOff { image: stated.to_owned(), last: pulls.last_errors.get(key).cloned() }),
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
