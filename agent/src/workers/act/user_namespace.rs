//! The user namespace that a pod's sandbox and containers are created with.

use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;

use super::ActContext;
use super::Cause;
use crate::model::spec;
use crate::user_namespaces::UserNamespaceError;
use crate::workers::generate::HandlerSupport;
use crate::workers::generate::names;
use crate::workers::generate::user_namespace;

/// The pod's user namespace: its own, with the range of ids that is recorded for it, or the host's. `handler`: that of its
/// sandbox, empty for the runtime's default.
///
/// # Errors
/// The handler cannot make one; the pod has no range and cannot get one.
pub(super) async fn of_pod(ctx: &ActContext, pod: &Pod, handler: &str) -> Result<cri::UserNamespace, Cause> {
    if !spec::has_user_namespace(pod) {
        return Ok(user_namespace::host());
    }
    let support = ctx.settings.security.handlers.user_namespaces(handler);
    if support != HandlerSupport::Yes {
        let is_known = support != HandlerSupport::UnknownHandler;
        return Err(UserNamespaceError::Unsupported { handler: handler.to_owned(), is_known }.into());
    }
    Ok(user_namespace::own(ctx.user_namespaces.of_pod(names::pod_uid(pod)).await?))
}
