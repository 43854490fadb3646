//! Settings that promise isolation or protection and that keblet does not honour yet. Pure.
//!
//! A written one keeps the agent from starting: running without the promised protection would be worse than not running.
//! A promise of a default is named at start and by `keblet doctor` instead.

use super::document::Problem;
use super::kubelet::KubeletConfiguration;

/// Values of `enforceNodeAllocatable` that protect nothing but pods from each other.
const UNPROTECTING: [&str; 2] = ["none", "pods"];

/// Everything written that promises what is not there.
pub(super) fn unhonoured(config: &KubeletConfiguration) -> Vec<Problem> {
    let credentials = config.image_pull_credentials_verification_policy.as_str();
    let enforced = config.enforce_node_allocatable.iter();
    let enforces_reserved = enforced.map(String::as_str).any(|class| !UNPROTECTING.contains(&class));
    let table = [
        (
            "imagePullCredentialsVerificationPolicy",
            matches!(credentials, "AlwaysVerify" | "NeverVerifyAllowlistedImages"),
            "pull credentials of images that are already present are not verified",
        ),
        ("cpuManagerPolicy", config.cpu_manager_policy == "static", "no exclusive CPUs are assigned"),
        ("memoryManagerPolicy", config.memory_manager_policy == "Static", "no NUMA memory is assigned"),
        ("topologyManagerPolicy", config.topology_manager_policy != "none", "no resources are aligned"),
        ("reservedMemory", !config.reserved_memory.is_empty(), "no NUMA memory is reserved"),
        ("qosReserved", !config.qos_reserved.is_empty(), "no memory is reserved for higher QoS classes"),
        (
            "memoryReservationPolicy",
            config.memory_reservation_policy == "TieredReservation",
            "memory requests are not protected",
        ),
        (
            "memorySwap.swapBehavior",
            config.memory_swap.swap_behavior == "LimitedSwap",
            "the swap of containers is not limited",
        ),
        ("enforceNodeAllocatable", enforces_reserved, "only the class pods can be enforced"),
    ];
    let written = table.into_iter().filter(|(_, written, _)| *written);
    written.map(|(field, _, lack)| problem(field, lack)).collect()
}

fn problem(field: &str, lack: &str) -> Problem {
    Problem { field: field.to_owned(), message: format!("this value is not supported yet: {lack}") }
}

/// What the effective configuration promises and keblet does not do yet: the field and what is missing.
pub fn missing_protections(config: &KubeletConfiguration) -> Vec<(&'static str, &'static str)> {
    let verifies = config.image_pull_credentials_verification_policy == "NeverVerifyPreloadedImages";
    let enforces_pods = config.enforce_node_allocatable.iter().any(|class| class == "pods");
    let collects = config.image_gc_high_threshold_percent < 100;
    let table = [
        (
            verifies,
            "imagePullCredentialsVerificationPolicy",
            "pull credentials of images that are already present are not verified",
        ),
        (enforces_pods, "enforceNodeAllocatable", "the kubepods cgroup has no memory limit"),
        (collects, "imageGCHighThresholdPercent", "unused images are not removed"),
        (!config.container_log_max_size.starts_with('-'), "containerLogMaxSize", "container logs are not rotated"),
        (config.oom_score_adj != 0, "oomScoreAdj", "the agent's own oom_score_adj is not changed"),
        (config.make_iptables_util_chains, "makeIPTablesUtilChains", "no iptables chains are created"),
    ];
    table.into_iter().filter(|(promised, _, _)| *promised).map(|(_, field, lack)| (field, lack)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::ConfigError;
    use super::super::FlagValues;
    use super::super::Origin;
    use super::super::load;
    use super::*;

    fn written(dir: &std::path::Path, lines: &str) -> Result<(), ConfigError> {
        let file = dir.join("config.yaml");
        let head = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
        std::fs::write(&file, format!("{head}{lines}\n")).expect("a file");
        let flags: FlagValues = [("config", file.to_str().expect("a path"))].into_iter().collect();
        load(&flags)?.check_supported()
    }

    #[test]
    fn a_written_protection_that_is_not_honoured_is_refused_with_its_field_and_file() {
        let dir = tempfile::tempdir().expect("a folder");
        let gate = "featureGates: {QOSReserved: true, MemoryQoS: true}\n";
        for (field, lines) in [
            ("imagePullCredentialsVerificationPolicy", "imagePullCredentialsVerificationPolicy: AlwaysVerify"),
            (
                "imagePullCredentialsVerificationPolicy",
                "imagePullCredentialsVerificationPolicy: NeverVerifyAllowlistedImages\n\
                 preloadedImagesVerificationAllowlist: [example.com/a]",
            ),
            ("cpuManagerPolicy", "cpuManagerPolicy: static\nreservedSystemCPUs: \"0\""),
            ("memoryManagerPolicy", "memoryManagerPolicy: Static"),
            ("topologyManagerPolicy", "topologyManagerPolicy: restricted"),
            ("topologyManagerPolicy", "topologyManagerPolicy: best-effort"),
            ("reservedMemory", "reservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]"),
            ("qosReserved", "qosReserved: {memory: 50%}"),
            ("memoryReservationPolicy", "memoryReservationPolicy: TieredReservation"),
            ("memorySwap.swapBehavior", "memorySwap: {swapBehavior: LimitedSwap}"),
            (
                "enforceNodeAllocatable",
                "enforceNodeAllocatable: [pods, system-reserved]\nsystemReservedCgroup: /system",
            ),
        ] {
            let Err(ConfigError::Invalid { violations }) = written(dir.path(), &format!("{gate}{lines}")) else {
                panic!("{lines} must be refused")
            };
            let named: Vec<&str> = violations.iter().map(|violation| violation.field.as_str()).collect();
            assert_eq!(named, [field], "{violations:?}");
            assert!(matches!(violations[0].origin, Origin::File(_)), "{:?}", violations[0]);
        }
    }

    #[test]
    fn written_defaults_are_accepted() {
        let dir = tempfile::tempdir().expect("a folder");
        let lines = "cpuManagerPolicy: none\nmemoryManagerPolicy: None\ntopologyManagerPolicy: none\n\
                     memorySwap: {swapBehavior: NoSwap}\nenforceNodeAllocatable: [pods]\nprotectKernelDefaults: true\n\
                     imagePullCredentialsVerificationPolicy: NeverVerifyPreloadedImages\n\
                     allowedUnsafeSysctls: [\"net.core.*\"]";
        written(dir.path(), lines).expect("acceptable");
    }

    #[test]
    fn promises_of_defaults_are_named() {
        let mut config = KubeletConfiguration::default();
        let named = |config: &KubeletConfiguration| -> Vec<&'static str> {
            missing_protections(config).into_iter().map(|(field, _)| field).collect()
        };
        for field in ["imagePullCredentialsVerificationPolicy", "enforceNodeAllocatable"] {
            assert!(named(&config).contains(&field), "{field} in {:?}", named(&config));
        }
        config.enforce_node_allocatable = vec!["none".to_owned()];
        let named = named(&config);
        assert!(!named.contains(&"enforceNodeAllocatable"), "{named:?}");
    }
}
