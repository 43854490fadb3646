//! Policies of the pipeline, from the configuration.

use std::time::Duration;

use super::node;
use super::resizes;
use crate::config::Feature;
use crate::config::Settings;
use crate::config::duration::GoDuration;
use crate::events::sensors::RelistPeriods;
use crate::model::restart::RestartGates;
use crate::pacing::PacingPolicy;
use crate::pipeline::Policies;
use crate::workers::backoff;
use crate::workers::generate::NodeSettings;

/// Limits and periods of pods on a node with these settings for containers.
pub(super) fn pipeline(settings: &Settings, node: &NodeSettings) -> Policies {
    Policies {
        image_gc: node::image_gc(settings),
        dead_containers: node::dead_containers(settings),
        resizes: resizes::policy(settings, node.resources.swap, node.resources.cgroup_v2),
        restarts: restart_gates(settings),
        max_backoff: max_backoff(settings),
        sync_frequency: settings.kubelet.sync_frequency.std(),
    }
}

/// How often all pods are listed.
pub(super) fn relist_periods(settings: &Settings) -> RelistPeriods {
    let relist = &settings.keblet.relist;
    RelistPeriods {
        event_driven: relist.period.std(),
        polling: relist.degraded_period.std(),
        fixed: relist.fixed_period.map(GoDuration::std),
    }
}

/// What waits while pods are started.
pub(super) fn pacing(settings: &Settings) -> PacingPolicy {
    let pacing = &settings.keblet.pacing;
    PacingPolicy {
        stop_limiter: pacing.stop_limiter,
        held_back_statuses: pacing.held_back_statuses,
        deferred_events: pacing.deferred_events,
    }
}

/// Feature gates of restarts.
fn restart_gates(settings: &Settings) -> RestartGates {
    RestartGates {
        container_rules: settings.gates.enabled(Feature::ContainerRestartRules),
        all_containers: settings.gates.enabled(Feature::RestartAllContainersOnContainerExits),
    }
}

/// Longest crash-loop back-off.
fn max_backoff(settings: &Settings) -> Duration {
    let configured = settings.kubelet.crash_loop_back_off.max_container_restart_period;
    configured.map_or(backoff::DEFAULT_MAX, GoDuration::std)
}
