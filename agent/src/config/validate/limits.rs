//! Runtime, images, logs, eviction thresholds, back-off and node shutdown.

use super::Problems;
use crate::config::duration::GoDuration;
use crate::config::eviction;
use crate::config::eviction::Signal;
use crate::config::feature_gates::Feature;
use crate::config::feature_gates::FeatureGates;
use crate::config::kubelet::KubeletConfiguration;
use crate::model::Amount;

const CREDENTIAL_POLICIES: [&str; 4] =
    ["NeverVerify", "NeverVerifyPreloadedImages", "NeverVerifyAllowlistedImages", "AlwaysVerify"];

pub(super) fn check(config: &KubeletConfiguration, gates: &FeatureGates, problems: &mut Problems) {
    images(config, problems);
    credentials(config, gates, problems);
    logs(config, problems);
    eviction_thresholds(config, problems);
    back_off(config, gates, problems);
    shutdown(config, gates, problems);
}

fn images(config: &KubeletConfiguration, problems: &mut Problems) {
    problems.require(!config.container_runtime_endpoint.is_empty(), "containerRuntimeEndpoint", || {
        "must not be empty".to_owned()
    });
    if let Some(pulls) = config.max_parallel_image_pulls {
        problems.at_least("maxParallelImagePulls", pulls, 1);
        problems.require(pulls <= 1 || !config.serialize_image_pulls, "maxParallelImagePulls", || {
            format!("{pulls} needs serializeImagePulls: false")
        });
    }
    problems.at_least("registryPullQPS", config.registry_pull_qps, 0);
    problems.at_least("registryBurst", config.registry_burst, 0);
    let (minimum, maximum) = (config.image_minimum_gc_age, config.image_maximum_gc_age);
    problems.at_least("imageMinimumGCAge", minimum, GoDuration::default());
    problems.at_least("imageMaximumGCAge", maximum, GoDuration::default());
    problems.require(maximum <= GoDuration::default() || maximum > minimum, "imageMaximumGCAge", || {
        format!("{maximum} must be longer than imageMinimumGCAge ({minimum})")
    });
    let (high, low) = (config.image_gc_high_threshold_percent, config.image_gc_low_threshold_percent);
    problems.range("imageGCHighThresholdPercent", high, 0..=100);
    problems.range("imageGCLowThresholdPercent", low, 0..=100);
    problems.require(low < high, "imageGCLowThresholdPercent", || {
        format!("{low} must be below imageGCHighThresholdPercent ({high})")
    });
}

fn credentials(config: &KubeletConfiguration, gates: &FeatureGates, problems: &mut Problems) {
    let policy = &config.image_pull_credentials_verification_policy;
    let list = &config.preloaded_images_verification_allowlist;
    let (policy_field, list_field) = ("imagePullCredentialsVerificationPolicy", "preloadedImagesVerificationAllowlist");
    if !gates.enabled(Feature::KubeletEnsureSecretPulledImages) {
        problems.gated(!policy.is_empty(), policy_field, gates, Feature::KubeletEnsureSecretPulledImages);
        problems.gated(!list.is_empty(), list_field, gates, Feature::KubeletEnsureSecretPulledImages);
        return;
    }
    problems.one_of(policy_field, policy, &CREDENTIAL_POLICIES);
    problems.require(list.is_empty() || policy == "NeverVerifyAllowlistedImages", list_field, || {
        "only used with the policy NeverVerifyAllowlistedImages".to_owned()
    });
    for (index, pattern) in list.iter().enumerate() {
        problems.require(is_image_pattern(pattern), &format!("{list_field}[{index}]"), || {
            format!("{pattern:?} is not an image name without tag and digest, optionally ending in \"/*\"")
        });
    }
}

/// An image's name without tag and digest, or `p/*` for all names below `p`, of which upstream checks little: `p` may be a
/// registry with its port.
fn is_image_pattern(pattern: &str) -> bool {
    if let Some(prefix) = pattern.strip_suffix("/*") {
        return !prefix.is_empty() && !prefix.contains('*') && prefix.trim_start() == prefix;
    }
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_component = |part: &str| {
        let bytes = part.as_bytes();
        let edges = [bytes.first(), bytes.last()];
        edges.into_iter().all(|edge| edge.copied().is_some_and(is_plain))
            && bytes.iter().all(|byte| is_plain(*byte) || b".-_".contains(byte))
    };
    let is_host = |part: &str| {
        !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte))
    };
    match pattern.split_once('/') {
        Some((first, rest)) => (is_host(first) || is_component(first)) && rest.split('/').all(is_component),
        None => is_component(pattern),
    }
}

fn logs(config: &KubeletConfiguration, problems: &mut Problems) {
    let size = &config.container_log_max_size;
    match size.parse::<Amount>() {
        Err(error) => problems.add("containerLogMaxSize", error.to_string()),
        Ok(bytes) => problems
            .require(bytes.is_whole(), "containerLogMaxSize", || format!("{size:?} is not a whole number of bytes")),
    }
    problems.at_least("containerLogMaxFiles", config.container_log_max_files, 2);
    problems.at_least("containerLogMaxWorkers", config.container_log_max_workers, 1);
    problems.at_least("containerLogMonitorInterval", config.container_log_monitor_interval, GoDuration::secs(3));
    let folder = &config.pod_logs_dir;
    let clean = folder == "/"
        || folder.strip_prefix('/').is_some_and(|rest| rest.split('/').all(|part| !matches!(part, "" | "." | "..")));
    problems.require(folder.is_ascii() && clean, "podLogsDir", || {
        format!("{folder:?} is not an absolute path in ASCII without empty, \".\" and \"..\" parts")
    });
}

fn eviction_thresholds(config: &KubeletConfiguration, problems: &mut Problems) {
    for (field, thresholds) in [("evictionHard", &config.eviction_hard), ("evictionSoft", &config.eviction_soft)] {
        for (signal, value) in thresholds {
            threshold(field, signal, value, problems);
        }
    }
    for (signal, value) in &config.eviction_soft {
        let path = format!("evictionSoft.{signal}");
        // A disabled one needs no grace period; a malformed one is reported above.
        let needs_period = matches!(eviction::threshold_value(signal, value), Ok(Some(_)));
        let has_period = config.eviction_soft_grace_period.contains_key(signal);
        problems.require(has_period || !needs_period, &path, || {
            format!("grace period must be specified for the soft eviction threshold {signal}")
        });
    }
    for (signal, period) in &config.eviction_soft_grace_period {
        let path = format!("evictionSoftGracePeriod.{signal}");
        known_signal(&path, signal, problems);
        match period.parse::<GoDuration>() {
            Err(error) => problems.add(path, error.to_string()),
            Ok(duration) => problems.require(!duration.is_negative(), &path, || {
                format!("invalid eviction grace period specified: {period}, must be a positive value")
            }),
        }
    }
    for (signal, value) in &config.eviction_minimum_reclaim {
        minimum_reclaim(signal, value, problems);
    }
    for signal in eviction::contradictions(config) {
        let (soft, hard) = (&config.eviction_soft[signal], &config.eviction_hard[signal]);
        let message =
            format!("{soft} is below evictionHard.{signal} ({hard}), which evicts before any grace period begins");
        problems.add(format!("evictionSoft.{signal}"), message);
    }
}

fn known_signal(path: &str, signal: &str, problems: &mut Problems) {
    problems.require(Signal::named(signal).is_some(), path, || format!("unsupported eviction signal {signal}"));
}

fn threshold(field: &str, signal: &str, value: &str, problems: &mut Problems) {
    let path = format!("{field}.{signal}");
    known_signal(&path, signal, problems);
    if let Err(error) = eviction::threshold_value(signal, value) {
        problems.add(path, error.to_string());
    }
}

fn minimum_reclaim(signal: &str, value: &str, problems: &mut Problems) {
    let path = format!("evictionMinimumReclaim.{signal}");
    known_signal(&path, signal, problems);
    if let Err(error) = eviction::minimum_reclaim(signal, value) {
        problems.add(path, error.to_string());
    }
}

fn back_off(config: &KubeletConfiguration, gates: &FeatureGates, problems: &mut Problems) {
    let field = "crashLoopBackOff.maxContainerRestartPeriod";
    if let Some(period) = config.crash_loop_back_off.max_container_restart_period {
        problems.gated(true, field, gates, Feature::KubeletCrashLoopBackOffMax);
        problems.range(field, period, GoDuration::secs(1)..=GoDuration::secs(300));
    }
}

fn shutdown(config: &KubeletConfiguration, gates: &FeatureGates, problems: &mut Problems) {
    let (total, critical) = (config.shutdown_grace_period, config.shutdown_grace_period_critical_pods);
    let fields = [("shutdownGracePeriod", total), ("shutdownGracePeriodCriticalPods", critical)];
    for (field, period) in fields {
        problems.require(period.is_zero() || period >= GoDuration::secs(1), field, || {
            format!("{period} must be 0s or at least 1s")
        });
        problems.gated(!period.is_zero(), field, gates, Feature::GracefulNodeShutdown);
    }
    problems.require(critical <= total, "shutdownGracePeriodCriticalPods", || {
        format!("{critical} is longer than shutdownGracePeriod ({total})")
    });
    let by_priority = "shutdownGracePeriodByPodPriority";
    let used = !config.shutdown_grace_period_by_pod_priority.is_empty();
    problems.gated(used, by_priority, gates, Feature::GracefulNodeShutdownBasedOnPodPriority);
    problems.require(!used || (total.is_zero() && critical.is_zero()), by_priority, || {
        "cannot be used with shutdownGracePeriod or shutdownGracePeriodCriticalPods".to_owned()
    });
}
