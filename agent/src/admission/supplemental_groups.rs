//! `supplementalGroupsPolicy: Strict` (KEP-3619) on a runtime that ignores the field: its containers would run with the
//! groups of the image. Pure.

use super::Decision;
use super::Input;

pub(super) fn check(input: Input<'_>) -> Decision {
    let context = input.pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let policy = context.and_then(|context| context.supplemental_groups_policy.as_deref());
    if policy == Some("Strict") && !input.node.supplemental_groups_policy {
        let message = "SupplementalGroupsPolicy=Strict is not supported in this node";
        return Decision::reject("SupplementalGroupsPolicyNotSupported", message);
    }
    Decision::Admit
}
