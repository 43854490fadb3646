//! cgroups, reserved resources, CPU, memory and topology managers.

use std::collections::BTreeSet;

use super::Problems;
use crate::config::duration::GoDuration;
use crate::config::feature_gates::Feature;
use crate::config::feature_gates::FeatureGates;
use crate::config::kubelet::KubeletConfiguration;
use crate::config::kubelet::StringMap;
use crate::model::Amount;

const ENFORCEABLE: [&str; 6] =
    ["none", "pods", "system-reserved", "system-reserved-compressible", "kube-reserved", "kube-reserved-compressible"];
const RESERVABLE: [&str; 4] = ["cpu", "memory", "ephemeral-storage", "pid"];
/// Default of `memoryThrottlingFactor` up to 1.36.
const FORMER_FACTOR: f64 = 0.9;
const TOPOLOGY_POLICIES: [&str; 4] = ["none", "best-effort", "restricted", "single-numa-node"];

pub(super) fn check(config: &KubeletConfiguration, gates: &FeatureGates, problems: &mut Problems) {
    cgroups(config, problems);
    enforcement(config, problems);
    reserved(config, gates, problems);
    cpu_manager(config, gates, problems);
    memory_manager(config, problems);
    topology_manager(config, problems);
    cpu_quota(config, gates, problems);
    memory(config, gates, problems);
}

fn cgroups(config: &KubeletConfiguration, problems: &mut Problems) {
    problems.one_of("cgroupDriver", &config.cgroup_driver, &["cgroupfs", "systemd"]);
    problems.require(config.system_cgroups.is_empty() || !config.cgroup_root.is_empty(), "systemCgroups", || {
        "needs cgroupRoot".to_owned()
    });
    problems.require(config.system_cgroups != "/", "systemCgroups", || {
        "system container cannot be root (\"/\")".to_owned()
    });
    for (field, path) in [("kubeletCgroups", &config.kubelet_cgroups), ("systemCgroups", &config.system_cgroups)] {
        let is_path = path.is_empty() || (path.starts_with('/') && path.split('/').all(|part| part != ".."));
        problems.require(is_path, field, || format!("{path:?} is not a full path of a cgroup"));
    }
}

fn enforcement(config: &KubeletConfiguration, problems: &mut Problems) {
    let field = "enforceNodeAllocatable";
    let enforced: Vec<&str> = config.enforce_node_allocatable.iter().map(String::as_str).collect();
    let has = |word: &str| enforced.contains(&word);
    for (index, word) in enforced.iter().enumerate() {
        problems.one_of(&format!("{field}[{index}]"), word, &ENFORCEABLE);
    }
    problems.require(enforced.iter().collect::<BTreeSet<_>>().len() == enforced.len(), field, || {
        "lists an entry twice".to_owned()
    });
    problems.require(!has("none") || enforced.len() == 1, field, || "none must stand alone".to_owned());
    for (class, cgroup, name) in [
        ("system-reserved", &config.system_reserved_cgroup, "systemReservedCgroup"),
        ("kube-reserved", &config.kube_reserved_cgroup, "kubeReservedCgroup"),
    ] {
        let compressible = format!("{class}-compressible");
        problems.require(!(has(class) && has(&compressible)), field, || {
            format!("{class} and {compressible} exclude each other")
        });
        problems.require(!(has(class) || has(&compressible)) || !cgroup.is_empty(), field, || {
            format!("{class} needs {name}")
        });
    }
    problems.require(config.cgroups_per_qos || enforced.iter().all(|word| *word == "none"), "cgroupsPerQOS", || {
        "must be true while enforceNodeAllocatable has anything but none".to_owned()
    });
}

fn reserved(config: &KubeletConfiguration, gates: &FeatureGates, problems: &mut Problems) {
    for (field, map) in [("systemReserved", &config.system_reserved), ("kubeReserved", &config.kube_reserved)] {
        for (resource, amount) in map {
            let path = format!("{field}.{resource}");
            problems.require(RESERVABLE.contains(&resource.as_str()), &path, || {
                format!("cannot reserve {resource:?} resource")
            });
            match amount.parse::<Amount>() {
                Err(error) => problems.add(path, error.to_string()),
                Ok(parsed) => problems.require(parsed >= Amount::ZERO, &path, || format!("{amount:?} is negative")),
            }
        }
    }
    if !config.reserved_system_cpus.is_empty() {
        let field = "reservedSystemCPUs";
        problems.require(parse_cpus(&config.reserved_system_cpus).is_some(), field, || {
            format!("{:?} is not a list of CPUs, such as \"0-3,8\"", config.reserved_system_cpus)
        });
        let cgroups = config.system_reserved_cgroup.is_empty() && config.kube_reserved_cgroup.is_empty();
        problems
            .require(cgroups, field, || "cannot be used with systemReservedCgroup or kubeReservedCgroup".to_owned());
    }
    problems.gated(!config.qos_reserved.is_empty(), "qosReserved", gates, Feature::QOSReserved);
    for (resource, amount) in &config.qos_reserved {
        let path = format!("qosReserved.{resource}");
        problems.require(resource == "memory", &path, || "only memory can be reserved".to_owned());
        let percent = amount.strip_suffix('%').and_then(|percent| percent.parse::<u8>().ok());
        problems.require(percent.is_some_and(|percent| percent <= 100), &path, || {
            format!("{amount:?} is not a whole percentage, such as \"50%\"")
        });
    }
}

/// `0-3,8` as CPU numbers; `None` for a text that is not such a list.
pub fn parse_cpus(text: &str) -> Option<BTreeSet<u32>> {
    let mut cpus = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
        if first > last || last > 65_535 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// How settled an option of a policy is.
#[derive(Clone, Copy, PartialEq)]
enum OptionStage {
    Stable,
    Beta,
    Alpha,
}

const CPU_OPTIONS: [(&str, OptionStage); 6] = [
    ("full-pcpus-only", OptionStage::Stable),
    ("strict-cpu-reservation", OptionStage::Stable),
    ("prefer-align-cpus-by-uncorecache", OptionStage::Stable),
    ("distribute-cpus-across-numa", OptionStage::Beta),
    ("align-by-socket", OptionStage::Alpha),
    ("distribute-cpus-across-cores", OptionStage::Alpha),
];

const CPU_OPTION_CONFLICTS: [(&str, &str); 4] = [
    ("full-pcpus-only", "distribute-cpus-across-cores"),
    ("distribute-cpus-across-numa", "distribute-cpus-across-cores"),
    ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-cores"),
    ("prefer-align-cpus-by-uncorecache", "distribute-cpus-across-numa"),
];

fn cpu_manager(config: &KubeletConfiguration, gates: &FeatureGates, problems: &mut Problems) {
    problems.one_of("cpuManagerPolicy", &config.cpu_manager_policy, &["none", "static"]);
    let options = &config.cpu_manager_policy_options;
    let field = "cpuManagerPolicyOptions";
    problems.require(options.is_empty() || config.cpu_manager_policy == "static", field, || {
        "only the static CPU manager policy has options".to_owned()
    });
    for (name, value) in options {
        let path = format!("{field}.{name}");
        match CPU_OPTIONS.iter().find(|(known, _)| known == name) {
            None => problems.add(path.as_str(), "unknown option"),
            Some((_, OptionStage::Stable)) => {}
            Some((_, OptionStage::Beta)) => problems.gated(true, &path, gates, Feature::CPUManagerPolicyBetaOptions),
            Some((_, OptionStage::Alpha)) => problems.gated(true, &path, gates, Feature::CPUManagerPolicyAlphaOptions),
        }
        boolean_option(&path, value, problems);
    }
    let on = |name: &str| options.get(name).is_some_and(|value| value == "true");
    for (one, other) in CPU_OPTION_CONFLICTS {
        problems.require(!(on(one) && on(other)), field, || format!("{one} and {other} exclude each other"));
    }
    let topology = &config.topology_manager_policy;
    problems.require(!on("align-by-socket") || topology != "single-numa-node", field, || {
        "align-by-socket cannot be used with the topology manager policy single-numa-node".to_owned()
    });
}

fn boolean_option(path: &str, value: &str, problems: &mut Problems) {
    problems.require(["true", "false"].contains(&value), path, || format!("{value:?} is neither true nor false"));
}

fn memory_manager(config: &KubeletConfiguration, problems: &mut Problems) {
    problems.one_of("memoryManagerPolicy", &config.memory_manager_policy, &["None", "Static"]);
    let mut seen = BTreeSet::new();
    for (index, reservation) in config.reserved_memory.iter().enumerate() {
        let field = format!("reservedMemory[{index}]");
        for (kind, amount) in &reservation.limits {
            let path = format!("{field}.limits.{kind}");
            problems.require(kind == "memory" || kind.starts_with("hugepages-"), &path, || {
                "only memory and hugepages can be reserved".to_owned()
            });
            problems.require(amount.parse::<Amount>().is_ok_and(Amount::is_positive), &path, || {
                format!("{amount:?} is not a quantity above zero")
            });
            problems.require(seen.insert((reservation.numa_node, kind)), &path, || {
                format!("reserved twice for NUMA node {}", reservation.numa_node)
            });
        }
    }
}

fn topology_manager(config: &KubeletConfiguration, problems: &mut Problems) {
    problems.one_of("topologyManagerPolicy", &config.topology_manager_policy, &TOPOLOGY_POLICIES);
    problems.one_of("topologyManagerScope", &config.topology_manager_scope, &["container", "pod"]);
    if config.topology_manager_policy != "none" {
        topology_options(&config.topology_manager_policy_options, problems);
    }
}

fn topology_options(options: &StringMap, problems: &mut Problems) {
    for (name, value) in options {
        let path = format!("topologyManagerPolicyOptions.{name}");
        match name.as_str() {
            "prefer-closest-numa-nodes" => boolean_option(&path, value, problems),
            "max-allowable-numa-nodes" => {
                problems.require(value.parse::<u32>().is_ok_and(|nodes| nodes >= 8), &path, || {
                    format!("{value:?} is not a number of at least 8")
                });
            }
            _ => problems.add(path, "unknown option"),
        }
    }
}

fn cpu_quota(config: &KubeletConfiguration, gates: &FeatureGates, problems: &mut Problems) {
    let period = config.cpu_cfs_quota_period;
    problems.range("cpuCFSQuotaPeriod", period, GoDuration::millis(1)..=GoDuration::secs(1));
    problems.gated(period != GoDuration::millis(100), "cpuCFSQuotaPeriod", gates, Feature::CustomCPUCFSQuotaPeriod);
}

fn memory(config: &KubeletConfiguration, gates: &FeatureGates, problems: &mut Problems) {
    if let Some(factor) = config.memory_throttling_factor {
        let field = "memoryThrottlingFactor";
        problems.require(factor > 0.0 && factor <= 1.0, field, || {
            format!("{factor} is out of range; expected more than 0 and at most 1")
        });
        // The default of 1.36, which an existing configuration may name.
        let is_former_default = (factor - FORMER_FACTOR).abs() < f64::EPSILON;
        problems.gated(!is_former_default, field, gates, Feature::MemoryQoS);
    }
    problems.one_of("memoryReservationPolicy", &config.memory_reservation_policy, &["None", "TieredReservation"]);
    let tiered = config.memory_reservation_policy == "TieredReservation";
    problems.gated(tiered, "memoryReservationPolicy", gates, Feature::MemoryQoS);
    problems.one_of("memorySwap.swapBehavior", &config.memory_swap.swap_behavior, &["", "NoSwap", "LimitedSwap"]);
    problems.range("oomScoreAdj", config.oom_score_adj, -1000..=1000);
    problems.at_least("maxOpenFiles", config.max_open_files, 0);
    let ids = config.user_namespaces.ids_per_pod;
    problems.require((65_536..=4_294_967_295).contains(&ids) && ids % 65_536 == 0, "userNamespaces.idsPerPod", || {
        format!("{ids} is not a multiple of 65536 between 65536 and 4294967295")
    });
}
