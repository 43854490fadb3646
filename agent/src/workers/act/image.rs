//! The image of a container about to start: look, or pull, by its policy; back off after failures.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;
use tonic::Code;

use super::ActContext;
use super::report;
use crate::images::ImageInfo;
use crate::images::PullError;
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

/// Failed pulls of all pods: when to try again, and what went wrong last.
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
    fn record(&mut self, key: &str, error: &StartFailure, now: std::time::SystemTime) {
        self.backoff.record(key, now, now);
        self.last_errors.insert(key.to_owned(), format!("{}: {}", error.token, error.message));
    }

    /// Forgets a pod's errors, and every pause that has expired.
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
    /// The name asked for, tag included.
    pub(super) name: String,
}

/// How an image was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    /// Remembered from a former start of this pod; not asked for again.
    Remembered {
        /// To be looked up again after the start.
        stale: bool,
    },
    /// The runtime has it.
    Present,
    /// Just pulled.
    Pulled,
}

const CONFIG_ERROR: &str = "CreateContainerConfigError";

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

/// What became clear before the image was there, or was not.
#[derive(Default)]
struct Seen {
    /// The runtime has it.
    present: Option<bool>,
    /// It was to be pulled.
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

/// Finds or pulls the image of a container. A failure is told as event by its token; where there is none of the image
/// step, by its text.
pub(super) async fn ensure(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    sandbox: &cri::PodSandboxConfig,
    before_pull: &(dyn Fn() + Sync),
) -> Result<FoundImage, StartFailure> {
    let mut seen = Seen::default();
    let found = find_or_pull(ctx, pod, spec, sandbox, before_pull, &mut seen).await;
    ctx.count(|metrics| metrics.runtime.image_asked(policy(spec).label(), seen.present, seen.required));
    if let Err(failure) = &found {
        let config = failure.token == CONFIG_ERROR;
        let told = if config { &failure.message } else { &failure.token };
        ctx.container_event(pod, spec, EventType::Warning, "Failed", &format!("Error: {told}"));
    }
    found
}

async fn find_or_pull(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    sandbox: &cri::PodSandboxConfig,
    before_pull: &(dyn Fn() + Sync),
    seen: &mut Seen,
) -> Result<FoundImage, StartFailure> {
    let stated = spec.container.image.as_deref().unwrap_or_default();
    let name = with_default_tag(stated).map_err(|error| {
        let message = format!("Failed to apply default image tag {stated:?}: {error}");
        ctx.container_event(pod, spec, EventType::Warning, "InspectFailed", &message);
        report::failure("InvalidImageName", message)
    })?;
    let policy = policy(spec);
    if policy != Policy::Always {
        let found = look(ctx, pod, spec, stated, &name).await?;
        seen.present = Some(found.is_some());
        if let Some(found) = found {
            seen.required = Some(false);
            return Ok(found);
        }
    }
    if policy == Policy::Never {
        let message = format!("Container image {stated:?} is not present with pull policy of Never");
        ctx.container_event(pod, spec, EventType::Warning, "ErrImageNeverPull", &message);
        return Err(report::failure("ErrImageNeverPull", message));
    }
    seen.required = Some(true);
    pull(ctx, pod, spec, name, sandbox, before_pull).await
}

/// What is here: remembered, or asked for.
async fn look(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    stated: &str,
    name: &str,
) -> Result<Option<FoundImage>, StartFailure> {
    let uid = names::pod_uid(pod);
    let present = || {
        let message = format!("Container image {stated:?} already present on machine and can be accessed by the pod");
        ctx.container_event(pod, spec, EventType::Normal, "Pulled", &message);
    };
    if let Some(known) = ctx.images.cached(uid, name, ctx.clock.now()) {
        present();
        let image = resolved(known.info);
        let origin = Origin::Remembered { stale: known.stale };
        return Ok(Some(FoundImage { image, origin, name: name.to_owned() }));
    }
    let facts = ctx.images.inspect(name, pod.metadata.annotations.as_ref()).await.map_err(|error| {
        let message = format!("Failed to inspect image \"\": {}", error.rpc_text());
        ctx.container_event(pod, spec, EventType::Warning, "InspectFailed", &message);
        report::failure("ImageInspectError", message)
    })?;
    let Some(facts) = facts else { return Ok(None) };
    present();
    ctx.images.set_cached(uid, name, facts.clone(), ctx.clock.now());
    Ok(Some(FoundImage { image: resolved(facts), origin: Origin::Present, name: name.to_owned() }))
}

async fn pull(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    name: String,
    sandbox: &cri::PodSandboxConfig,
    before_pull: &(dyn Fn() + Sync),
) -> Result<FoundImage, StartFailure> {
    let stated = spec.container.image.as_deref().unwrap_or_default();
    let key = image_pull_key(names::pod_uid(pod), stated);
    check_backoff(ctx, pod, spec, stated, &key)?;
    ctx.container_event(pod, spec, EventType::Normal, "Pulling", &format!("Pulling image {stated:?}"));
    before_pull();
    let (since, began) = (ctx.clock.now(), ctx.clock.wall());
    let pulled = ctx.images.pull(&name, sandbox.clone()).await;
    ctx.startups.pulled(names::pod_uid(pod), began, ctx.clock.wall());
    let all_in_all = ctx.clock.now().saturating_duration_since(since);
    let all = report::duration(all_in_all);
    let pulled = pulled.map_err(|error| {
        let failure = pull_failure(&name, &error);
        ctx.pulls().record(&key, &failure, ctx.clock.wall());
        let text = match &error {
            PullError::Runtime(error) => error.rpc_text(),
            PullError::RateExceeded => error.to_string(),
        };
        ctx.container_event(
            pod,
            spec,
            EventType::Warning,
            "Failed",
            &format!("Failed to pull image {stated:?}: {text}"),
        );
        failure
    })?;
    let facts = inspect_pulled(ctx, pod, &name, pulled.image_ref).await?;
    // Waiting for a turn is part of it, as it is in upstream's numbers.
    ctx.count(|metrics| metrics.runtime.pulled(facts.size, all_in_all));
    let took = report::duration(pulled.took);
    let message = format!(
        "Successfully pulled image {stated:?} in {took} ({all} including waiting). Image size: {} bytes.",
        facts.size
    );
    ctx.container_event(pod, spec, EventType::Normal, "Pulled", &message);
    ctx.images.set_cached(names::pod_uid(pod), &name, facts.clone(), ctx.clock.now());
    Ok(FoundImage { image: resolved(facts), origin: Origin::Pulled, name })
}

/// A failed pull of this image by this pod holds the next one back.
fn check_backoff(
    ctx: &ActContext,
    pod: &Pod,
    spec: &ContainerSpec<'_>,
    stated: &str,
    key: &str,
) -> Result<(), StartFailure> {
    let pulls = ctx.pulls();
    if pulls.backoff.blocked(key, ctx.clock.wall()).is_none() {
        return Ok(());
    }
    let message = format!("Back-off pulling image {stated:?}");
    let last = pulls.last_errors.get(key).map(|last| format!(": {last}")).unwrap_or_default();
    drop(pulls);
    ctx.container_event(pod, spec, EventType::Normal, "BackOff", &message);
    Err(report::failure("ImagePullBackOff", message + &last))
}

/// The user and the size are the image's; the pull tells neither.
async fn inspect_pulled(ctx: &ActContext, pod: &Pod, name: &str, image_ref: String) -> Result<ImageInfo, StartFailure> {
    let facts = ctx.images.inspect(name, pod.metadata.annotations.as_ref()).await;
    let facts = facts.map_err(|error| report::failure(CONFIG_ERROR, error.message()))?;
    let none = ImageInfo { image_ref: String::new(), uid: None, username: String::new(), size: 0 };
    Ok(ImageInfo { image_ref, ..facts.unwrap_or(none) })
}

/// Runtimes put a token in front of errors whose kind they know.
fn pull_failure(name: &str, error: &PullError) -> StartFailure {
    let text = match error {
        PullError::Runtime(error) if error.code() == Code::Unknown => error.message(),
        PullError::Runtime(error) => error.rpc_text(),
        PullError::RateExceeded => error.to_string(),
    };
    let known = [
        ("RegistryUnavailable", "the registry is unavailable"),
        ("SignatureValidationFailed", "the signature validation failed"),
    ];
    for (token, meaning) in known {
        if let Some(rest) = text.strip_prefix(token) {
            return report::failure(token, format!("image pull failed for {name} because {meaning}{rest}"));
        }
    }
    report::failure("ErrImagePull", text)
}

fn resolved(facts: ImageInfo) -> ResolvedImage {
    let user = match (facts.uid, facts.username.is_empty()) {
        (Some(uid), _) => ImageUser::Id(uid),
        (None, false) => ImageUser::Name(facts.username),
        (None, true) => ImageUser::Id(0),
    };
    ResolvedImage { image_ref: facts.image_ref, user }
}
