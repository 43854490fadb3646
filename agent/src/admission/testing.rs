//! Inputs of checks in tests.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use k8s_openapi::api::core::v1::Pod;

use super::HeldResources;
use super::Input;
use super::Needs;
use super::NodeOffer;

static NO_REQUESTS: LazyLock<Needs> = LazyLock::new(|| Needs::new(&Pod::default(), &BTreeMap::new()));
static NOTHING_HELD: LazyLock<HeldResources> = LazyLock::new(HeldResources::default);

/// A new pod without requests on a node without other pods.
pub(super) fn input<'a>(pod: &'a Pod, node: &'a NodeOffer) -> Input<'a> {
    Input { pod, best_effort: false, is_resumed: false, needs: &NO_REQUESTS, held: &NOTHING_HELD, node }
}
