//! Node registration, API client, sysctls, and the flags that name the node.

use std::net::IpAddr;

use super::Problems;
use crate::config::duration::GoDuration;
use crate::config::feature_gates::FeatureGates;
use crate::config::flags::FlagSettings;
use crate::config::kubelet::KubeletConfiguration;
use crate::config::kubelet_sections::Taint;
use crate::model::SysctlNamespace;
use crate::model::labels;
use crate::model::parse_reported_ip;
use crate::model::spec;

const CHANGE_STRATEGIES: [&str; 3] = ["Get", "Cache", "Watch"];
const TAINT_EFFECTS: [&str; 3] = ["NoSchedule", "PreferNoSchedule", "NoExecute"];

/// Labels under Kubernetes' own domains a node may give itself.
const OWN_LABELS: [&str; 11] = [
    "kubernetes.io/hostname",
    "kubernetes.io/os",
    "kubernetes.io/arch",
    "beta.kubernetes.io/os",
    "beta.kubernetes.io/arch",
    "beta.kubernetes.io/instance-type",
    "node.kubernetes.io/instance-type",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
    "failure-domain.beta.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/region",
];

pub(super) fn check(config: &KubeletConfiguration, _gates: &FeatureGates, problems: &mut Problems) {
    problems.require(!config.run_once, "runOnce", || "running once is no longer supported".to_owned());
    problems.require(config.sync_frequency > GoDuration::default(), "syncFrequency", || {
        format!("{} must be greater than zero", config.sync_frequency)
    });
    for (field, value) in [
        ("kubeAPIQPS", config.kube_api_qps),
        ("kubeAPIBurst", config.kube_api_burst),
        ("eventRecordQPS", config.event_record_qps),
        ("eventBurst", config.event_burst),
        ("maxPods", config.max_pods),
        ("podsPerCore", config.pods_per_core),
    ] {
        problems.at_least(field, value, 0);
    }
    problems.at_least("nodeStatusMaxImages", config.node_status_max_images, -1);
    problems.at_least("nodeLeaseDurationSeconds", config.node_lease_duration_seconds, 1);
    problems.one_of(
        "configMapAndSecretChangeDetectionStrategy",
        &config.config_map_and_secret_change_detection_strategy,
        &CHANGE_STRATEGIES,
    );
    problems.one_of("hairpinMode", &config.hairpin_mode, &["promiscuous-bridge", "hairpin-veth", "none"]);
    for (field, bit) in
        [("iptablesMasqueradeBit", config.iptables_masquerade_bit), ("iptablesDropBit", config.iptables_drop_bit)]
    {
        problems.range(field, bit, 0..=31);
    }
    for (index, entry) in config.register_with_taints.iter().enumerate() {
        taint(&format!("registerWithTaints[{index}]"), entry, problems);
    }
    for (index, pattern) in config.allowed_unsafe_sysctls.iter().enumerate() {
        sysctl(&format!("allowedUnsafeSysctls[{index}]"), pattern, problems);
    }
}

fn taint(field: &str, taint: &Taint, problems: &mut Problems) {
    problems.require(labels::is_key(&taint.key), field, || format!("key {:?} is not a valid taint key", taint.key));
    problems.require(labels::is_value(&taint.value), field, || format!("value {:?} is not valid", taint.value));
    problems.require(TAINT_EFFECTS.contains(&taint.effect.as_str()), field, || {
        format!("effect {:?} is not one of {}", taint.effect, TAINT_EFFECTS.join(", "))
    });
    problems.require(taint.time_added.is_none(), field, || "timeAdded must not be set".to_owned());
}

fn sysctl(field: &str, pattern: &str, problems: &mut Problems) {
    let dotted = pattern.replace('/', ".");
    let name = dotted.strip_suffix('*').unwrap_or(&dotted);
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '_' | '-');
    let valid = !name.is_empty()
        && name.len() <= 253
        && name.chars().all(plain)
        && !name.starts_with('.')
        && !name.contains("..")
        && (name.len() < dotted.len() || !name.ends_with('.'));
    problems.require(valid, field, || format!("{pattern:?} is neither a sysctl nor a prefix that ends in '*'"));
    let swapped = spec::dotted_sysctl(pattern);
    let namespace = SysctlNamespace::of(swapped.strip_suffix('*').unwrap_or(&swapped));
    problems.require(!valid || namespace.is_some(), field, || format!("{pattern:?} is not a sysctl of a namespace"));
}

pub(super) fn check_flags(flags: &FlagSettings, problems: &mut Problems) {
    problems.one_of("cloud-provider", &flags.cloud_provider, &["", "external"]);
    problems.require(!flags.exit_on_lock_contention || !flags.lock_file.is_empty(), "exit-on-lock-contention", || {
        "cannot be used without --lock-file".to_owned()
    });
    let (config, folder) = (&flags.image_credential_provider_config, &flags.image_credential_provider_bin_dir);
    problems.require(config.is_empty() == folder.is_empty(), "image-credential-provider-config", || {
        "must be set together with --image-credential-provider-bin-dir".to_owned()
    });
    let age = flags.minimum_container_ttl_duration;
    problems.require(!age.is_negative(), "minimum-container-ttl-duration", || {
        format!("invalid minimum garbage collection age: {age}")
    });
    for (key, value) in &flags.node_labels {
        node_label(key, value, problems);
    }
    node_ip(&flags.node_ip, problems);
}

fn node_label(key: &str, value: &str, problems: &mut Problems) {
    let field = "node-labels";
    problems.require(labels::is_key(key), field, || format!("{key:?} is not a valid label key"));
    problems.require(labels::is_value(value), field, || format!("{key}: {value:?} is not a valid label value"));
    let domain = key.split_once('/').map_or("", |(domain, _)| domain);
    let below = |parent: &str| domain == parent || domain.strip_suffix(parent).is_some_and(|rest| rest.ends_with('.'));
    let reserved = below("kubernetes.io") || below("k8s.io");
    let allowed = below("kubelet.kubernetes.io") || below("node.kubernetes.io") || OWN_LABELS.contains(&key);
    problems.require(!reserved || allowed, field, || {
        format!("{key} is in a domain of Kubernetes and not among the labels a node may give itself")
    });
}

fn node_ip(text: &str, problems: &mut Problems) {
    let field = "node-ip";
    // Entries that are no addresses are left out, as upstream does.
    let addresses: Vec<IpAddr> = text.split(',').filter_map(|entry| parse_reported_ip(entry.trim())).collect();
    problems.require(addresses.len() <= 2, field, || format!("{text:?} holds more than two addresses"));
    if let [first, second] = addresses[..] {
        problems.require(first.is_ipv4() != second.is_ipv4(), field, || {
            format!("{text:?} must hold one address of each family")
        });
        problems.require(!first.is_unspecified() && !second.is_unspecified(), field, || {
            format!("{text:?} must not hold an unspecified address")
        });
    }
}
