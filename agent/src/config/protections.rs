//! Settings of isolation or protection that keblet does not honour yet. Pure.
//!
//! One that the configuration sets keeps the agent from starting: running without the requested protection would be worse
//! than not running. None of them is a default.

use super::document::Problem;
use super::kubelet::KubeletConfiguration;

/// Settings of the configuration that request a missing protection.
pub(super) fn unhonoured(config: &KubeletConfiguration) -> Vec<Problem> {
    let table = [
        ("cpuManagerPolicy", config.cpu_manager_policy == "static", "no exclusive CPUs are assigned"),
        ("memoryManagerPolicy", config.memory_manager_policy == "Static", "no NUMA memory is assigned"),
        ("topologyManagerPolicy", config.topology_manager_policy != "none", "no resources are aligned"),
        ("reservedMemory", !config.reserved_memory.is_empty(), "no NUMA memory is reserved"),
    ];
    let written = table.into_iter().filter(|(_, written, _)| *written);
    written.map(|(field, _, lack)| problem(field, lack)).collect()
}

fn problem(field: &str, lack: &str) -> Problem {
    Problem { field: field.to_owned(), message: format!("this value is not supported yet: {lack}") }
}

#[cfg(test)]
mod tests {
    use super::super::ConfigError;
    use super::super::FlagValues;
    use super::super::Origin;
    use super::super::load;

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
        for (field, lines) in [
            ("cpuManagerPolicy", "cpuManagerPolicy: static\nreservedSystemCPUs: \"0\""),
            ("memoryManagerPolicy", "memoryManagerPolicy: Static"),
            ("topologyManagerPolicy", "topologyManagerPolicy: restricted"),
            ("topologyManagerPolicy", "topologyManagerPolicy: best-effort"),
            ("reservedMemory", "reservedMemory: [{numaNode: 0, limits: {memory: 1Gi}}]"),
        ] {
            let Err(ConfigError::Invalid { violations }) = written(dir.path(), lines) else {
                panic!("{lines} must be refused")
            };
            let named: Vec<&str> = violations.iter().map(|violation| violation.field.as_str()).collect();
            assert_eq!(named, [field], "{violations:?}");
            assert!(matches!(violations[0].origin, Origin::File(_)), "{:?}", violations[0]);
        }
    }

    #[test]
    fn protections_are_honoured() {
        let dir = tempfile::tempdir().expect("a folder");
        for lines in [
            "featureGates: {QOSReserved: true}\nqosReserved: {memory: 50%}",
            "memoryReservationPolicy: TieredReservation\nmemoryThrottlingFactor: 0.8",
            "memorySwap: {swapBehavior: LimitedSwap}",
            "imagePullCredentialsVerificationPolicy: AlwaysVerify",
            "imagePullCredentialsVerificationPolicy: NeverVerifyAllowlistedImages\n\
             preloadedImagesVerificationAllowlist: [example.com/a]",
            "enforceNodeAllocatable: [pods, system-reserved, kube-reserved-compressible]\n\
             systemReservedCgroup: /system\nkubeReservedCgroup: /daemons\noomScoreAdj: -500",
        ] {
            written(dir.path(), lines).unwrap_or_else(|error| panic!("{lines}: {error}"));
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
}
