//! The pod's pull secrets (`spec.imagePullSecrets`; those of its service account were added by the API server).

use std::sync::Arc;

use futures_util::future::join_all;
use indexmap::IndexSet;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Secret;

use super::ActContext;
use crate::recorder::EventType;
use crate::workers::generate::names;

/// Secrets in the order of the spec.
pub(super) struct PullSecrets {
    pub(super) found: Vec<Arc<Secret>>,
    /// Names of those that cannot be read.
    missing: Vec<String>,
}

/// Reads the pod's pull secrets, each once however often it is named. One that cannot be read is left out, since another may
/// be sufficient.
pub(super) async fn look_up(ctx: &ActContext, pod: &Pod) -> PullSecrets {
    let names = pod.spec.iter().flat_map(|spec| spec.image_pull_secrets.iter().flatten());
    let names = names.map(|reference| reference.name.as_str()).filter(|name| !name.is_empty());
    let names: IndexSet<&str> = names.collect();
    let reads = names.into_iter().map(async |name| (name, ctx.objects.secret(names::pod_namespace(pod), name).await));
    let mut secrets = PullSecrets { found: Vec::new(), missing: Vec::new() };
    for (name, read) in join_all(reads).await {
        match read {
            Ok(secret) => secrets.found.push(secret),
            Err(error) => {
                tracing::debug!(pod = names::describe(pod), secret = name, %error, "cannot read a pull secret");
                secrets.missing.push(name.to_owned());
            }
        }
    }
    secrets
}

/// After a failed pull: the event that names pull secrets that cannot be read.
pub(super) async fn report_missing(ctx: &ActContext, pod: &Pod) {
    let missing = look_up(ctx, pod).await.missing;
    if !missing.is_empty() {
        let message = format!(
            "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
            missing.join(", ")
        );
        ctx.pod_event(pod, EventType::Warning, "FailedToRetrieveImagePullSecret", &message);
    }
}
