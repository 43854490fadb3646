//! `KubeletConfiguration` (`kubelet.config.k8s.io/v1beta1`), field by field, as of Kubernetes 1.36.
//!
//! Each row names the field, its default and whether keblet acts on it yet. Rules on values are in `validate`, defaults
//! that depend on other fields in `load`.

use std::collections::BTreeMap;

use super::duration::GoDuration;
use super::kubelet_sections::*;
use super::schema::document;

/// A map of strings to strings, in key order.
pub type StringMap = BTreeMap<String, String>;

/// `apiVersion` of the document.
pub const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// `kind` of the document.
pub const KIND: &str = "KubeletConfiguration";

/// The thresholds a loaded file gets for hard eviction signals it does not name.
pub const DEFAULT_EVICTION_HARD: [(&str, &str); 5] = [
    ("imagefs.available", "15%"),
    ("imagefs.inodesFree", "5%"),
    ("memory.available", "100Mi"),
    ("nodefs.available", "10%"),
    ("nodefs.inodesFree", "5%"),
];

fn default_eviction_hard() -> StringMap {
    DEFAULT_EVICTION_HARD.map(|(signal, value)| (signal.to_owned(), value.to_owned())).into()
}

document! {
    /// The kubelet's configuration, with every default filled in.
    ///
    /// Optional fields are `Option` only where nothing stands in for absence; the type cannot say whether a value was
    /// written or is a default, [`super::Settings::origin`] can.
    pub struct KubeletConfiguration {
        enable_server "enableServer": bool = true, pointer, used, "Run the HTTP servers.";
        static_pod_path "staticPodPath": String, value, used, "File or directory with static pods.";
        pod_logs_dir "podLogsDir": String = "/var/log/pods", value, used, "Root of the container log files.";
        sync_frequency "syncFrequency": GoDuration = GoDuration::mins(1), value, part("how often objects that are not watched are read and events about crash-looping pods are repeated, and when the sync loop counts as stuck; other pods are synced when something happens"), "Longest time between two syncs of one pod.";
        file_check_frequency "fileCheckFrequency": GoDuration = GoDuration::secs(20), value, used, "Time between two reads of the static pod path.";
        http_check_frequency "httpCheckFrequency": GoDuration = GoDuration::secs(20), value, used, "Time between two reads of the static pod URL.";
        static_pod_url "staticPodURL": String, value, used, "URL with static pods.";
        static_pod_url_header "staticPodURLHeader": BTreeMap<String, Vec<String>>, value, used, "Request headers for the static pod URL.";
        address "address": String = "0.0.0.0", value, used, "Address of the main and the read-only server.";
        port "port": i32 = 10250, value, used, "Port of the authenticated HTTPS server.";
        read_only_port "readOnlyPort": i32, value, used, "Port of the unauthenticated HTTP server; 0 turns it off.";
        volume_plugin_dir "volumePluginDir": String = "/usr/libexec/kubernetes/kubelet-plugins/volume/exec/", value, used, "Directory of FlexVolume plugins.";
        provider_id "providerID": String, value, used, "spec.providerID of a newly created Node.";
        tls_cert_file "tlsCertFile": String, value, used, "Serving certificate.";
        tls_private_key_file "tlsPrivateKeyFile": String, value, used, "Key of the serving certificate.";
        tls_cipher_suites "tlsCipherSuites": Vec<String>, value, used, "Cipher suites below TLS 1.3, by IANA name.";
        tls_curve_preferences "tlsCurvePreferences": Vec<i32>, value, used, "Key exchange groups by number; their order has no effect.";
        tls_min_version "tlsMinVersion": String, value, used, "Lowest TLS version; empty means VersionTLS12.";
        rotate_certificates "rotateCertificates": bool, value, used, "Renew the client certificate before it expires.";
        server_tls_bootstrap "serverTLSBootstrap": bool, value, used, "Request the serving certificate from the cluster.";
        authentication "authentication": Authentication, nested, used, "How requests to the server are authenticated.";
        authorization "authorization": Authorization, nested, used, "How requests to the server are authorized.";
        registry_pull_qps "registryPullQPS": i32 = 5, pointer, used, "Image pulls per second; 0 means no limit.";
        registry_burst "registryBurst": i32 = 10, value, used, "Image pulls in a burst.";
        image_pull_credentials_verification_policy "imagePullCredentialsVerificationPolicy": String = "NeverVerifyPreloadedImages", value, used, "When credentials are checked again for images already present.";
        preloaded_images_verification_allowlist "preloadedImagesVerificationAllowlist": Vec<String>, value, used, "Images exempt from that check.";
        event_record_qps "eventRecordQPS": i32 = 50, pointer, used, "Events sent per second; 0 for no limit.";
        event_burst "eventBurst": i32 = 100, value, used, "Events sent in a burst.";
        enable_debugging_handlers "enableDebuggingHandlers": bool = true, pointer, used, "Serve exec, attach, logs and the debug endpoints.";
        enable_contention_profiling "enableContentionProfiling": bool, value, later, "Profile lock contention.";
        healthz_port "healthzPort": i32 = 10248, pointer, used, "Port of the health server; 0 turns it off.";
        healthz_bind_address "healthzBindAddress": String = "127.0.0.1", value, used, "Address or host name of the health server.";
        oom_score_adj "oomScoreAdj": i32 = -999, pointer, used, "oom_score_adj of the agent itself.";
        cluster_domain "clusterDomain": String, value, used, "DNS domain of the cluster.";
        cluster_dns "clusterDNS": Vec<String>, value, used, "DNS servers for pods.";
        streaming_connection_idle_timeout "streamingConnectionIdleTimeout": GoDuration = GoDuration::mins(240), value, never, "No effect with a CRI runtime.";
        node_status_update_frequency "nodeStatusUpdateFrequency": GoDuration = GoDuration::secs(10), value, used, "Time between two computations of the node status.";
        node_status_report_frequency "nodeStatusReportFrequency": GoDuration = GoDuration::mins(5), value, used, "Time between two reports of an unchanged node status.";
        node_lease_duration_seconds "nodeLeaseDurationSeconds": i32 = 40, value, used, "Duration of the node Lease, in seconds.";
        image_minimum_gc_age "imageMinimumGCAge": GoDuration = GoDuration::mins(2), value, used, "Youngest unused image that may be collected.";
        image_maximum_gc_age "imageMaximumGCAge": GoDuration, value, used, "Oldest unused image that is kept; 0s means no limit.";
        image_gc_high_threshold_percent "imageGCHighThresholdPercent": i32 = 85, pointer, used, "Disk use that starts image collection; 100 turns it off.";
        image_gc_low_threshold_percent "imageGCLowThresholdPercent": i32 = 80, pointer, used, "Disk use at which image collection stops.";
        volume_stats_agg_period "volumeStatsAggPeriod": GoDuration = GoDuration::mins(1), value, part("volumes are measured when they are asked for, at most this often"), "Time between two measurements of volumes; negative turns them off.";
        kubelet_cgroups "kubeletCgroups": String, value, used, "Cgroup the agent moves itself to.";
        system_cgroups "systemCgroups": String, value, used, "Cgroup for processes outside any other.";
        cgroup_root "cgroupRoot": String, value, used, "Parent of the pods' cgroups, in cgroupfs form.";
        cgroups_per_qos "cgroupsPerQOS": bool = true, pointer, used, "Keep a cgroup tree by QoS class and pod.";
        cgroup_driver "cgroupDriver": String = "cgroupfs", value, used, "The cgroup driver, if the runtime does not report its own.";
        cpu_manager_policy "cpuManagerPolicy": String = "none", value, later, "Assignment of exclusive CPUs.";
        single_process_oom_kill "singleProcessOOMKill": Option<bool>, pointer, used, "Let the kernel kill one process instead of the container.";
        cpu_manager_policy_options "cpuManagerPolicyOptions": StringMap, value, later, "Options of the static CPU policy.";
        cpu_manager_reconcile_period "cpuManagerReconcilePeriod": GoDuration = GoDuration::secs(10), value, later, "Time between two corrections of CPU sets.";
        memory_manager_policy "memoryManagerPolicy": String = "None", value, later, "Assignment of NUMA memory.";
        topology_manager_policy "topologyManagerPolicy": String = "none", value, later, "How strictly resources are aligned.";
        topology_manager_scope "topologyManagerScope": String = "container", value, later, "What is aligned: container or pod.";
        topology_manager_policy_options "topologyManagerPolicyOptions": StringMap, value, later, "Options of the topology policy.";
        qos_reserved "qosReserved": StringMap, value, used, "Memory kept from lower QoS classes, in percent.";
        runtime_request_timeout "runtimeRequestTimeout": GoDuration = GoDuration::mins(2), value, used, "Deadline of a runtime call, except pulls and streams.";
        hairpin_mode "hairpinMode": String = "promiscuous-bridge", value, never, "No effect with a CRI runtime.";
        max_pods "maxPods": i32 = 110, value, used, "Pods this node runs at most.";
        pod_cidr "podCIDR": String, value, used, "Address range of pods on a standalone node.";
        pod_pids_limit "podPidsLimit": i64 = -1, pointer, used, "Processes per pod; negative means the node's allocatable.";
        resolv_conf "resolvConf": String = "/etc/resolv.conf", pointer, used, "Resolver file pods inherit; empty means none.";
        run_once "runOnce": bool, value, never, "Refused: running once is no longer supported.";
        cpu_cfs_quota "cpuCFSQuota": bool = true, pointer, used, "Enforce CPU limits by quota.";
        cpu_cfs_quota_period "cpuCFSQuotaPeriod": GoDuration = GoDuration::millis(100), pointer, used, "Period of the CPU quota.";
        node_status_max_images "nodeStatusMaxImages": i32 = 50, pointer, used, "Images reported in the node status; -1 means all.";
        max_open_files "maxOpenFiles": i64 = 1_000_000, value, used, "Open file limit of the agent.";
        content_type "contentType": String = "application/vnd.kubernetes.protobuf", value, later, "Encoding of API requests.";
        kube_api_qps "kubeAPIQPS": i32 = 50, pointer, used, "API requests per second.";
        kube_api_burst "kubeAPIBurst": i32 = 100, value, used, "API requests in a burst.";
        serialize_image_pulls "serializeImagePulls": bool = true, pointer, used, "Pull one image at a time.";
        max_parallel_image_pulls "maxParallelImagePulls": Option<i32>, pointer, used, "Pulls at the same time when not one at a time.";
        eviction_hard "evictionHard": StringMap = default_eviction_hard(), value, used, "Thresholds that evict at once.";
        eviction_soft "evictionSoft": StringMap, value, used, "Thresholds that evict after a grace period.";
        eviction_soft_grace_period "evictionSoftGracePeriod": StringMap, value, used, "Grace period of each soft threshold.";
        eviction_pressure_transition_period "evictionPressureTransitionPeriod": GoDuration = GoDuration::mins(5), value, used, "Time a pressure condition outlives its cause.";
        eviction_max_pod_grace_period "evictionMaxPodGracePeriod": i32, value, used, "Longest grace period at soft eviction, in seconds.";
        eviction_minimum_reclaim "evictionMinimumReclaim": StringMap, value, used, "How much to reclaim at least, by signal.";
        merge_default_eviction_settings "mergeDefaultEvictionSettings": bool, pointer, used, "Fill in defaults for hard signals not named.";
        pods_per_core "podsPerCore": i32, value, used, "Pods per CPU at most; 0 means no such limit.";
        enable_controller_attach_detach "enableControllerAttachDetach": bool = true, pointer, used, "Let the control plane attach volumes.";
        protect_kernel_defaults "protectKernelDefaults": bool, value, used, "Fail on unexpected kernel settings instead of changing them.";
        make_iptables_util_chains "makeIPTablesUtilChains": bool = true, pointer, used, "Create the iptables chains others rely on.";
        iptables_masquerade_bit "iptablesMasqueradeBit": i32 = 14, pointer, never, "Ignored.";
        iptables_drop_bit "iptablesDropBit": i32 = 15, pointer, never, "Ignored.";
        feature_gates "featureGates": BTreeMap<String, bool>, value, used, "Features switched on or off by name.";
        fail_swap_on "failSwapOn": bool = true, pointer, used, "Refuse to start while swap is active.";
        memory_swap "memorySwap": MemorySwap, nested, used, "How containers may use swap.";
        container_log_max_size "containerLogMaxSize": String = "10Mi", value, used, "Size at which a container log is rotated; negative means never.";
        container_log_max_files "containerLogMaxFiles": i32 = 5, pointer, used, "Log files kept per container.";
        container_log_max_workers "containerLogMaxWorkers": i32 = 1, pointer, used, "Log rotations at the same time.";
        container_log_monitor_interval "containerLogMonitorInterval": GoDuration = GoDuration::secs(10), pointer, used, "Time between two checks of log sizes.";
        config_map_and_secret_change_detection_strategy "configMapAndSecretChangeDetectionStrategy": String = "Watch", value, used, "How changes of referenced objects are noticed.";
        system_reserved "systemReserved": StringMap, value, used, "Resources kept for the system.";
        kube_reserved "kubeReserved": StringMap, value, used, "Resources kept for Kubernetes daemons.";
        reserved_system_cpus "reservedSystemCPUs": String, value, used, "CPUs kept for the system, as a list.";
        show_hidden_metrics_for_version "showHiddenMetricsForVersion": String, value, later, "Show metrics hidden since this version.";
        system_reserved_cgroup "systemReservedCgroup": String, value, used, "Cgroup that gets the system's limits.";
        kube_reserved_cgroup "kubeReservedCgroup": String, value, used, "Cgroup that gets the daemons' limits.";
        enforce_node_allocatable "enforceNodeAllocatable": Vec<String> = vec!["pods".to_owned()], value, used, "Where node allocatable is enforced.";
        allowed_unsafe_sysctls "allowedUnsafeSysctls": Vec<String>, value, used, "Unsafe sysctls pods may set.";
        kernel_memcg_notification "kernelMemcgNotification": bool, value, later, "Evict on kernel memory notifications.";
        logging "logging": Logging, nested, used, "What is logged, and how.";
        enable_system_log_handler "enableSystemLogHandler": bool = true, pointer, used, "Serve /logs/.";
        enable_system_log_query "enableSystemLogQuery": bool, pointer, used, "Let /logs/ be queried.";
        shutdown_grace_period "shutdownGracePeriod": GoDuration, value, used, "Time for pods to end at node shutdown.";
        shutdown_grace_period_critical_pods "shutdownGracePeriodCriticalPods": GoDuration, value, used, "Part of it kept for critical pods.";
        shutdown_grace_period_by_pod_priority "shutdownGracePeriodByPodPriority": Vec<ShutdownGracePeriod>, value, used, "Time to end by pod priority.";
        crash_loop_back_off "crashLoopBackOff": CrashLoopBackOff, nested, used, "How fast crashing containers are restarted.";
        reserved_memory "reservedMemory": Vec<MemoryReservation>, value, later, "Memory kept from pods, by NUMA node.";
        enable_profiling_handler "enableProfilingHandler": bool = true, pointer, used, "Serve /debug/pprof.";
        enable_debug_flags_handler "enableDebugFlagsHandler": bool = true, pointer, used, "Serve /debug/flags/v.";
        seccomp_default "seccompDefault": bool, pointer, used, "Use RuntimeDefault where a pod sets no seccomp profile.";
        memory_throttling_factor "memoryThrottlingFactor": Option<f64>, pointer, used, "Where between request and limit containers are throttled (memory.high); not set means nowhere.";
        memory_reservation_policy "memoryReservationPolicy": String = "None", value, used, "How memory requests are protected.";
        register_with_taints "registerWithTaints": Vec<Taint>, value, used, "Taints of a newly created Node.";
        register_node "registerNode": bool = true, pointer, used, "Create the Node object.";
        tracing "tracing": Option<Tracing>, pointer, used, "Where spans are sent.";
        local_storage_capacity_isolation "localStorageCapacityIsolation": bool = true, pointer, used, "Account for ephemeral storage.";
        container_runtime_endpoint "containerRuntimeEndpoint": String = "unix:///run/containerd/containerd.sock", value, used, "Socket of the CRI runtime.";
        image_service_endpoint "imageServiceEndpoint": String, value, used, "Socket of the CRI image service; empty means the runtime's.";
        fail_cgroup_v1 "failCgroupV1": bool = true, pointer, used, "Refuse to start on a cgroup v1 host.";
        user_namespaces "userNamespaces": UserNamespaces, nested, used, "User namespaces of pods.";
    }
}

/// The configuration of a start without a configuration file, which upstream keeps for old installations: anonymous
/// requests allowed, read-only port open, no hard eviction.
pub fn legacy_defaults() -> KubeletConfiguration {
    let mut config = KubeletConfiguration::default();
    config.authentication.anonymous.enabled = true;
    config.authentication.webhook.enabled = false;
    config.authorization.mode = "AlwaysAllow".to_owned();
    config.read_only_port = 10255;
    config.eviction_hard.clear();
    config
}
