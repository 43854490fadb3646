//! Settings that no document has a field for.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::config::duration::GoDuration;
use crate::config::schema::document;

document! {
    /// What only flags can set. Field names are flag names.
    pub struct FlagSettings {
        config "config": Option<PathBuf>, pointer, used, "Configuration file; may hold a KebletConfiguration as a further document.";
        config_dir "config-dir": Option<PathBuf>, pointer, used, "Directory of drop-in files (*.conf) merged over the configuration file.";
        keblet_config "keblet-config": Option<PathBuf>, pointer, used, "File with a KebletConfiguration.";
        kubeconfig "kubeconfig": String, value, used, "Access to the API server; empty runs the node standalone.";
        bootstrap_kubeconfig "bootstrap-kubeconfig": String, value, used, "Access used once, to request a client certificate.";
        hostname_override "hostname-override": String, value, used, "Name of the node instead of its hostname.";
        node_ip "node-ip": String, value, used, "Address of the node, or one of each family, separated by a comma.";
        cert_dir "cert-dir": PathBuf = "/var/lib/kubelet/pki", value, used, "Directory of certificates.";
        cloud_provider "cloud-provider": String, value, used, "Empty or external.";
        root_dir "root-dir": PathBuf = "/var/lib/kubelet", value, used, "Directory of the agent's state and the pods' volumes.";
        seccomp_default "seccomp-default": bool, value, used, "Use RuntimeDefault where a pod sets no seccomp profile.";
        node_labels "node-labels": BTreeMap<String, String>, value, used, "Labels of a newly created Node.";
        lock_file "lock-file": String, value, used, "File locked while the agent runs.";
        exit_on_lock_contention "exit-on-lock-contention": bool, value, used, "End when another process opens the lock file.";
        runtime_cgroups "runtime-cgroups": String, value, used, "Cgroup of the container runtime.";
        image_credential_provider_config "image-credential-provider-config": String, value, used, "File or directory that configures credential plugins.";
        image_credential_provider_bin_dir "image-credential-provider-bin-dir": String, value, used, "Directory of credential plugins.";
        minimum_container_ttl_duration "minimum-container-ttl-duration": GoDuration, value, used, "Age from which on a dead container is removed.";
        maximum_dead_containers_per_container "maximum-dead-containers-per-container": i32 = 1, value, used, "Dead instances kept of each container; negative means no limit.";
        maximum_dead_containers "maximum-dead-containers": i32 = -1, value, used, "Dead containers kept in all; negative means no limit.";
        experimental_mounter_path "experimental-mounter-path": String, value, later, "Program that mounts volumes.";
        experimental_allocatable_ignore_eviction "experimental-allocatable-ignore-eviction": bool, value, used, "Leave hard eviction thresholds out of allocatable.";
        housekeeping_interval "housekeeping-interval": GoDuration = GoDuration::secs(10), value, later, "Time between two readings of container statistics.";
    }
}
