use serde_json::Value;
use serde_json::json;

use super::*;
use crate::config::document;
use crate::config::duration::GoDuration;
use crate::config::schema;
use crate::config::schema::Described;
use crate::config::settings::to_json;

/// The messages for the defaults with these fields changed.
fn messages(fields: Value) -> Vec<String> {
    let mut config = to_json(&KubeletConfiguration::default());
    config.extend(fields.as_object().expect("an object").clone());
    let config: KubeletConfiguration = document::decode(Value::Object(config)).expect("well-formed");
    let gates = FeatureGates::new(&config.feature_gates).expect("good gates");
    kubelet(&config, &gates).into_iter().map(|problem| format!("{}: {}", problem.field, problem.message)).collect()
}

#[test]
fn the_defaults_are_acceptable() {
    assert_eq!(messages(json!({})), [] as [String; 0]);
    assert_eq!(keblet(&KebletConfiguration::default()), []);
    assert_eq!(flags(&FlagSettings::default()), []);
}

/// Each row breaks one rule of the field it names first, and only that.
#[test]
fn each_rule() {
    let rows = [
        ("port", json!({"port": 65_536})),
        ("readOnlyPort", json!({"readOnlyPort": -1})),
        ("healthzPort", json!({"healthzPort": 70_000})),
        ("address", json!({"address": "here"})),
        ("healthzBindAddress", json!({"healthzBindAddress": "::1::"})),
        ("healthzBindAddress", json!({"healthzBindAddress": "a host"})),
        ("healthzBindAddress", json!({"healthzBindAddress": "0"})),
        ("healthzBindAddress", json!({"healthzBindAddress": "127.0x1"})),
        ("tlsCipherSuites[0]", json!({"tlsCipherSuites": ["TLS_NULL"]})),
        ("tlsCurvePreferences[1]", json!({"tlsCurvePreferences": [29, 29]})),
        ("tlsCurvePreferences[0]", json!({"tlsCurvePreferences": [1]})),
        ("tlsMinVersion", json!({"tlsMinVersion": "1.2"})),
        (
            "serverTLSBootstrap",
            json!({"serverTLSBootstrap": true, "featureGates": {"RotateKubeletServerCertificate": false}}),
        ),
        ("authorization.mode", json!({"authorization": {"mode": "RBAC"}})),
        ("enableSystemLogQuery", json!({"enableSystemLogQuery": true, "enableSystemLogHandler": false})),
        ("showHiddenMetricsForVersion", json!({"showHiddenMetricsForVersion": "1.34"})),
        ("tracing.samplingRatePerMillion", json!({"tracing": {"samplingRatePerMillion": 1_000_001}})),
        ("tracing.endpoint", json!({"tracing": {"endpoint": "http://collector"}})),
        ("tracing.endpoint", json!({"tracing": {"endpoint": "collector:port"}})),
        ("tracing.endpoint", json!({"tracing": {"endpoint": "a collector"}})),
        ("logging.format", json!({"logging": {"format": "xml"}})),
        ("logging.format", json!({"logging": {"format": "json"}, "featureGates": {"LoggingBetaOptions": false}})),
        ("logging.flushFrequency", json!({"logging": {"flushFrequency": "0s"}})),
        ("logging.verbosity", json!({"logging": {"verbosity": 2_147_483_648_u32}})),
        ("logging.vmodule[0]", json!({"logging": {"vmodule": [{"filePattern": "a=b", "verbosity": 1}]}})),
        ("logging.vmodule", json!({"logging": {"format": "json", "vmodule": [{"filePattern": "a", "verbosity": 1}]}})),
        ("logging.options.text", json!({"logging": {"options": {"text": {"splitStream": true}}}})),
        ("runOnce", json!({"runOnce": true})),
        ("syncFrequency", json!({"syncFrequency": "0s"})),
        ("kubeAPIQPS", json!({"kubeAPIQPS": -1})),
        ("kubeAPIBurst", json!({"kubeAPIBurst": -1})),
        ("eventRecordQPS", json!({"eventRecordQPS": -1})),
        ("eventBurst", json!({"eventBurst": -1})),
        ("maxPods", json!({"maxPods": -1})),
        ("podsPerCore", json!({"podsPerCore": -1})),
        ("nodeStatusMaxImages", json!({"nodeStatusMaxImages": -2})),
        ("nodeLeaseDurationSeconds", json!({"nodeLeaseDurationSeconds": 0})),
        ("configMapAndSecretChangeDetectionStrategy", json!({"configMapAndSecretChangeDetectionStrategy": "Poll"})),
        ("hairpinMode", json!({"hairpinMode": "veth"})),
        ("iptablesMasqueradeBit", json!({"iptablesMasqueradeBit": 32})),
        ("iptablesDropBit", json!({"iptablesDropBit": -1})),
        ("registerWithTaints[0]", json!({"registerWithTaints": [{"key": "-", "effect": "NoSchedule"}]})),
        ("registerWithTaints[0]", json!({"registerWithTaints": [{"key": "a", "effect": "Never"}]})),
        (
            "registerWithTaints[0]",
            json!({"registerWithTaints": [{"key": "a", "effect": "NoSchedule", "timeAdded": "2026-01-01T00:00:00Z"}]}),
        ),
        ("allowedUnsafeSysctls[0]", json!({"allowedUnsafeSysctls": ["vm.swappiness"]})),
        ("allowedUnsafeSysctls[0]", json!({"allowedUnsafeSysctls": ["net..ipv4"]})),
        // Admission would refuse these at the start.
        ("allowedUnsafeSysctls[0]", json!({"allowedUnsafeSysctls": ["kernel.semx"]})),
        ("allowedUnsafeSysctls[0]", json!({"allowedUnsafeSysctls": ["kernel.domainname.x"]})),
        ("allowedUnsafeSysctls[0]", json!({"allowedUnsafeSysctls": ["fs/mqueue.msg_max"]})),
        ("containerRuntimeEndpoint", json!({"containerRuntimeEndpoint": ""})),
        ("maxParallelImagePulls", json!({"maxParallelImagePulls": 0})),
        ("maxParallelImagePulls", json!({"maxParallelImagePulls": 2, "serializeImagePulls": true})),
        ("registryPullQPS", json!({"registryPullQPS": -1})),
        ("registryBurst", json!({"registryBurst": -1})),
        ("imagePullCredentialsVerificationPolicy", json!({"imagePullCredentialsVerificationPolicy": "Always"})),
        ("imagePullCredentialsVerificationPolicy", json!({"featureGates": {"KubeletEnsureSecretPulledImages": false}})),
        ("preloadedImagesVerificationAllowlist", json!({"preloadedImagesVerificationAllowlist": ["a"]})),
        (
            "preloadedImagesVerificationAllowlist[0]",
            json!({"imagePullCredentialsVerificationPolicy": "NeverVerifyAllowlistedImages", "preloadedImagesVerificationAllowlist": ["a/b:tag"]}),
        ),
        ("imageMinimumGCAge", json!({"imageMinimumGCAge": "-1s"})),
        ("imageMaximumGCAge", json!({"imageMaximumGCAge": "1m"})),
        ("imageGCHighThresholdPercent", json!({"imageGCHighThresholdPercent": 101})),
        ("imageGCLowThresholdPercent", json!({"imageGCLowThresholdPercent": 85})),
        ("containerLogMaxSize", json!({"containerLogMaxSize": "10MB"})),
        ("containerLogMaxSize", json!({"containerLogMaxSize": "1500m"})),
        ("containerLogMaxFiles", json!({"containerLogMaxFiles": 1})),
        ("containerLogMaxWorkers", json!({"containerLogMaxWorkers": 0})),
        ("containerLogMonitorInterval", json!({"containerLogMonitorInterval": "2s"})),
        ("podLogsDir", json!({"podLogsDir": "logs"})),
        ("podLogsDir", json!({"podLogsDir": "/var/../logs"})),
        ("podLogsDir", json!({"podLogsDir": "/lögs"})),
        (
            "crashLoopBackOff.maxContainerRestartPeriod",
            json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "301s"}}),
        ),
        (
            "crashLoopBackOff.maxContainerRestartPeriod",
            json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "60s"}, "featureGates": {"KubeletCrashLoopBackOffMax": false}}),
        ),
        ("userNamespaces.idsPerPod", json!({"userNamespaces": {"idsPerPod": 65_537}})),
        ("cgroupDriver", json!({"cgroupDriver": "openrc"})),
        ("systemCgroups", json!({"systemCgroups": "/system"})),
        ("systemCgroups", json!({"systemCgroups": "/", "cgroupRoot": "/"})),
        ("systemCgroups", json!({"systemCgroups": "/a/../..", "cgroupRoot": "/"})),
        ("kubeletCgroups", json!({"kubeletCgroups": "kubelet"})),
        ("cgroupsPerQOS", json!({"cgroupsPerQOS": false})),
        ("enforceNodeAllocatable[1]", json!({"enforceNodeAllocatable": ["pods", "all"]})),
        ("enforceNodeAllocatable", json!({"enforceNodeAllocatable": ["pods", "pods"]})),
        ("enforceNodeAllocatable", json!({"enforceNodeAllocatable": ["pods", "none"]})),
        ("enforceNodeAllocatable", json!({"enforceNodeAllocatable": ["kube-reserved"]})),
        (
            "enforceNodeAllocatable",
            json!({"enforceNodeAllocatable": ["kube-reserved", "kube-reserved-compressible"], "kubeReservedCgroup": "/k"}),
        ),
        ("systemReserved.gpu", json!({"systemReserved": {"gpu": "1"}})),
        ("kubeReserved.cpu", json!({"kubeReserved": {"cpu": "-1"}})),
        ("kubeReserved.memory", json!({"kubeReserved": {"memory": "lots"}})),
        ("reservedSystemCPUs", json!({"reservedSystemCPUs": "3-1"})),
        ("reservedSystemCPUs", json!({"reservedSystemCPUs": "0", "systemReservedCgroup": "/s"})),
        ("qosReserved", json!({"qosReserved": {"memory": "50%"}})),
        ("qosReserved.memory", json!({"qosReserved": {"memory": "1Gi"}, "featureGates": {"QOSReserved": true}})),
        ("qosReserved.memory", json!({"qosReserved": {"memory": "12.5%"}, "featureGates": {"QOSReserved": true}})),
        ("cpuManagerPolicy", json!({"cpuManagerPolicy": "dynamic"})),
        ("cpuManagerPolicyOptions", json!({"cpuManagerPolicyOptions": {"full-pcpus-only": "true"}})),
        (
            "cpuManagerPolicyOptions.magic",
            json!({"cpuManagerPolicy": "static", "cpuManagerPolicyOptions": {"magic": "true"}}),
        ),
        (
            "cpuManagerPolicyOptions.align-by-socket",
            json!({"cpuManagerPolicy": "static", "cpuManagerPolicyOptions": {"align-by-socket": "true"}}),
        ),
        (
            "cpuManagerPolicyOptions.full-pcpus-only",
            json!({"cpuManagerPolicy": "static", "cpuManagerPolicyOptions": {"full-pcpus-only": "yes"}}),
        ),
        (
            "cpuManagerPolicyOptions",
            json!({"cpuManagerPolicy": "static", "cpuManagerPolicyOptions": {"prefer-align-cpus-by-uncorecache": "true", "distribute-cpus-across-numa": "true"}}),
        ),
        ("memoryManagerPolicy", json!({"memoryManagerPolicy": "BestEffort"})),
        ("reservedMemory[0].limits.cpu", json!({"reservedMemory": [{"numaNode": 0, "limits": {"cpu": "1"}}]})),
        ("reservedMemory[0].limits.memory", json!({"reservedMemory": [{"numaNode": 0, "limits": {"memory": "0"}}]})),
        (
            "reservedMemory[1].limits.memory",
            json!({"reservedMemory": [{"numaNode": 0, "limits": {"memory": "1"}}, {"numaNode": 0, "limits": {"memory": "1"}}]}),
        ),
        ("topologyManagerPolicy", json!({"topologyManagerPolicy": "strict"})),
        ("topologyManagerScope", json!({"topologyManagerScope": "node"})),
        (
            "topologyManagerPolicyOptions.max-allowable-numa-nodes",
            json!({"topologyManagerPolicy": "restricted", "topologyManagerPolicyOptions": {"max-allowable-numa-nodes": "7"}}),
        ),
        ("cpuCFSQuotaPeriod", json!({"cpuCFSQuotaPeriod": "2s"})),
        ("cpuCFSQuotaPeriod", json!({"cpuCFSQuotaPeriod": "50ms", "featureGates": {"CustomCPUCFSQuotaPeriod": false}})),
        ("memoryThrottlingFactor", json!({"memoryThrottlingFactor": 0.0})),
        ("memoryThrottlingFactor", json!({"memoryThrottlingFactor": 0.8, "featureGates": {"MemoryQoS": false}})),
        (
            "memoryReservationPolicy",
            json!({"memoryReservationPolicy": "TieredReservation", "featureGates": {"MemoryQoS": false}}),
        ),
        ("memorySwap.swapBehavior", json!({"memorySwap": {"swapBehavior": "UnlimitedSwap"}})),
        ("oomScoreAdj", json!({"oomScoreAdj": 1001})),
        ("maxOpenFiles", json!({"maxOpenFiles": -1})),
        ("evictionHard.cpu", json!({"evictionHard": {"cpu": "1"}})),
        ("evictionHard.memory.available", json!({"evictionHard": {"memory.available": "0"}})),
        ("evictionHard.memory.available", json!({"evictionHard": {"memory.available": "101%"}})),
        ("evictionHard.memory.available", json!({"evictionHard": {"memory.available": "-1%"}})),
        ("evictionSoft.memory.available", json!({"evictionSoft": {"memory.available": "5%"}})),
        (
            "evictionSoft.memory.available",
            json!({
                "evictionHard": {"memory.available": "100Mi"}, "evictionSoft": {"memory.available": "50Mi"},
                "evictionSoftGracePeriod": {"memory.available": "1m"},
            }),
        ),
        ("evictionSoftGracePeriod.cpu", json!({"evictionSoftGracePeriod": {"cpu": "1m"}})),
        ("evictionMinimumReclaim.cpu", json!({"evictionMinimumReclaim": {"cpu": "1"}})),
        ("evictionSoftGracePeriod.memory.available", json!({"evictionSoftGracePeriod": {"memory.available": "-1s"}})),
        ("evictionMinimumReclaim.memory.available", json!({"evictionMinimumReclaim": {"memory.available": "0%"}})),
        ("evictionMinimumReclaim.memory.available", json!({"evictionMinimumReclaim": {"memory.available": "-1"}})),
        (
            "registerWithTaints[0]",
            json!({"registerWithTaints": [{"key": "a", "value": "b c", "effect": "NoSchedule"}]}),
        ),
        ("imageMaximumGCAge", json!({"imageMaximumGCAge": "-1s"})),
        ("podLogsDir", json!({"podLogsDir": "/var//logs"})),
        (
            "crashLoopBackOff.maxContainerRestartPeriod",
            json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "500ms"}}),
        ),
        ("enforceNodeAllocatable", json!({"enforceNodeAllocatable": ["system-reserved"]})),
        (
            "enforceNodeAllocatable",
            json!({"enforceNodeAllocatable": ["system-reserved", "system-reserved-compressible"], "systemReservedCgroup": "/s"}),
        ),
        ("reservedSystemCPUs", json!({"reservedSystemCPUs": "0", "kubeReservedCgroup": "/k"})),
        ("qosReserved.cpu", json!({"qosReserved": {"cpu": "50%"}, "featureGates": {"QOSReserved": true}})),
        ("qosReserved.memory", json!({"qosReserved": {"memory": "101%"}, "featureGates": {"QOSReserved": true}})),
        (
            "cpuManagerPolicyOptions.distribute-cpus-across-numa",
            json!({"cpuManagerPolicy": "static", "cpuManagerPolicyOptions": {"distribute-cpus-across-numa": "true"}, "featureGates": {"CPUManagerPolicyBetaOptions": false}}),
        ),
        (
            "cpuManagerPolicyOptions",
            json!({"cpuManagerPolicy": "static", "cpuManagerPolicyOptions": {"align-by-socket": "true"}, "topologyManagerPolicy": "single-numa-node", "featureGates": {"CPUManagerPolicyAlphaOptions": true}}),
        ),
        (
            "topologyManagerPolicyOptions.magic",
            json!({"topologyManagerPolicy": "restricted", "topologyManagerPolicyOptions": {"magic": "true"}}),
        ),
        (
            "topologyManagerPolicyOptions.prefer-closest-numa-nodes",
            json!({"topologyManagerPolicy": "restricted", "topologyManagerPolicyOptions": {"prefer-closest-numa-nodes": "yes"}}),
        ),
        ("cpuCFSQuotaPeriod", json!({"cpuCFSQuotaPeriod": "500us"})),
        ("memoryThrottlingFactor", json!({"memoryThrottlingFactor": 1.1})),
        ("oomScoreAdj", json!({"oomScoreAdj": -1001})),
        ("shutdownGracePeriod", json!({"shutdownGracePeriod": "500ms"})),
        ("shutdownGracePeriodCriticalPods", json!({"shutdownGracePeriodCriticalPods": "10s"})),
        (
            "shutdownGracePeriodByPodPriority",
            json!({"shutdownGracePeriod": "10s", "shutdownGracePeriodByPodPriority": [{"priority": 1, "shutdownGracePeriodSeconds": 1}]}),
        ),
        ("port", json!({"port": 0})),
        ("readOnlyPort", json!({"readOnlyPort": 65_536})),
        ("healthzPort", json!({"healthzPort": -1})),
        ("iptablesMasqueradeBit", json!({"iptablesMasqueradeBit": -1})),
        ("iptablesDropBit", json!({"iptablesDropBit": 32})),
        ("containerLogMonitorInterval", json!({"containerLogMonitorInterval": "2999ms"})),
        ("imageMaximumGCAge", json!({"imageMaximumGCAge": "2m"})),
        ("imageGCLowThresholdPercent", json!({"imageGCLowThresholdPercent": -1})),
        ("userNamespaces.idsPerPod", json!({"userNamespaces": {"idsPerPod": 0}})),
        ("userNamespaces.idsPerPod", json!({"userNamespaces": {"idsPerPod": 4_294_967_296_i64}})),
        ("reservedSystemCPUs", json!({"reservedSystemCPUs": "65536"})),
        ("logging.options.json", json!({"logging": {"options": {"json": {"splitStream": true}}}})),
        (
            "preloadedImagesVerificationAllowlist",
            json!({
                "imagePullCredentialsVerificationPolicy": "", "preloadedImagesVerificationAllowlist": ["a"],
                "featureGates": {"KubeletEnsureSecretPulledImages": false},
            }),
        ),
        (
            "shutdownGracePeriod",
            json!({
                "shutdownGracePeriod": "10s",
                "featureGates": {
                    "GracefulNodeShutdown": false, "GracefulNodeShutdownBasedOnPodPriority": false,
                    "WindowsGracefulNodeShutdown": false,
                },
            }),
        ),
        (
            "shutdownGracePeriodByPodPriority",
            json!({
                "shutdownGracePeriodByPodPriority": [{"priority": 1, "shutdownGracePeriodSeconds": 1}],
                "featureGates": {"GracefulNodeShutdownBasedOnPodPriority": false},
            }),
        ),
    ];
    for (field, fields) in rows {
        let messages = messages(fields.clone());
        assert_eq!(messages.len(), 1, "{fields} must break one rule, not {messages:?}");
        assert!(messages[0].starts_with(&format!("{field}: ")), "{fields}: {messages:?}");
        let root = field.split('[').next().expect("never empty");
        assert!(schema::find(KubeletConfiguration::FIELDS, root).is_some(), "{field} is no field");
    }
}

#[test]
fn what_the_rules_allow() {
    for fields in [
        json!({"healthzBindAddress": "localhost"}),
        json!({"evictionHard": {"memory.available": "0%", "nodefs.available": "100%", "pid.available": "1000"}}),
        json!({"evictionSoft": {"memory.available": "5%"}, "evictionSoftGracePeriod": {"memory.available": "0s"}}),
        json!({"evictionSoft": {"memory.available": "0%", "nodefs.available": "100%"}}),
        json!({"imageGCHighThresholdPercent": 100, "imageGCLowThresholdPercent": 0}),
        json!({"containerLogMaxSize": "-1"}),
        json!({"cgroupsPerQOS": false, "enforceNodeAllocatable": ["none"]}),
        json!({"cgroupsPerQOS": false, "enforceNodeAllocatable": []}),
        json!({"reservedSystemCPUs": "0-3,8"}),
        json!({"topologyManagerPolicyOptions": {"unknown": "validated only with a policy"}}),
        json!({"tracing": {"endpoint": "unix:///run/otel.sock"}}),
        json!({"tracing": {"endpoint": "collector"}}),
        json!({"tracing": {"endpoint": "[2001:db8::1]"}}),
        json!({"allowedUnsafeSysctls": ["kernel.msg*", "net/core/somaxconn", "kernel.domainname", "user.*"]}),
        json!({"allowedUnsafeSysctls": ["kernel.sem", "kernel.sem*", "fs/mqueue/*", "net/ipv4/conf/eth0.1/*"]}),
        json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "1s"}}),
        json!({"podLogsDir": "/"}),
    ] {
        assert_eq!(messages(fields.clone()), [] as [String; 0], "{fields}");
    }
}

#[test]
fn bounds_are_allowed_themselves() {
    for fields in [
        json!({"port": 1, "readOnlyPort": 65_535, "healthzPort": 65_535}),
        json!({"port": 65_535, "readOnlyPort": 0, "healthzPort": 0}),
        json!({"iptablesMasqueradeBit": 0, "iptablesDropBit": 31, "oomScoreAdj": 1000}),
        json!({"iptablesMasqueradeBit": 31, "iptablesDropBit": 0, "oomScoreAdj": -1000}),
        json!({
            "kubeAPIQPS": 0, "kubeAPIBurst": 0, "eventRecordQPS": 0, "eventBurst": 0, "registryPullQPS": 0,
            "registryBurst": 0, "maxPods": 0, "podsPerCore": 0, "maxOpenFiles": 0,
        }),
        json!({"nodeStatusMaxImages": -1, "nodeLeaseDurationSeconds": 1, "maxParallelImagePulls": 1}),
        json!({"containerLogMaxFiles": 2, "containerLogMaxWorkers": 1, "containerLogMonitorInterval": "3s"}),
        json!({"cpuCFSQuotaPeriod": "1ms"}),
        json!({"cpuCFSQuotaPeriod": "1s", "memoryThrottlingFactor": 1.0}),
        json!({"userNamespaces": {"idsPerPod": 4_294_901_760_i64}}),
        json!({"logging": {"verbosity": i32::MAX}, "tracing": {"samplingRatePerMillion": 1_000_000}}),
        json!({"tracing": {"samplingRatePerMillion": 0}}),
        json!({"crashLoopBackOff": {"maxContainerRestartPeriod": "300s"}}),
        json!({"shutdownGracePeriod": "1s", "shutdownGracePeriodCriticalPods": "1s"}),
        json!({"imageMaximumGCAge": "2m1ns", "imageGCHighThresholdPercent": 1, "imageGCLowThresholdPercent": 0}),
        json!({"qosReserved": {"memory": "100%"}, "featureGates": {"QOSReserved": true}}),
        json!({"kubeReserved": {"cpu": "0", "memory": "0", "ephemeral-storage": "0", "pid": "0"}}),
        json!({"reservedSystemCPUs": "65535"}),
        json!({
            "topologyManagerPolicy": "restricted", "topologyManagerPolicyOptions": {"max-allowable-numa-nodes": "8"},
        }),
    ] {
        assert_eq!(messages(fields.clone()), [] as [String; 0], "{fields}");
    }
}

#[test]
fn options_of_the_cpu_manager_that_exclude_each_other() {
    let (pcpus, cores) = ("full-pcpus-only", "distribute-cpus-across-cores");
    let (numa, caches) = ("distribute-cpus-across-numa", "prefer-align-cpus-by-uncorecache");
    let found = |options: [(&str, &str); 2]| {
        messages(json!({
            "cpuManagerPolicy": "static", "featureGates": {"CPUManagerPolicyAlphaOptions": true},
            "cpuManagerPolicyOptions": options.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        }))
    };
    for (one, other) in [(pcpus, cores), (numa, cores), (caches, cores), (caches, numa)] {
        let expected = format!("cpuManagerPolicyOptions: {one} and {other} exclude each other");
        assert_eq!(found([(one, "true"), (other, "true")]), [expected]);
        assert_eq!(found([(one, "true"), (other, "false")]), [] as [String; 0], "{other} is off");
    }
    for (one, other) in [(pcpus, numa), (pcpus, caches)] {
        assert_eq!(found([(one, "true"), (other, "true")]), [] as [String; 0], "{one} and {other}");
    }
}

#[test]
fn relists_are_not_too_frequent_and_no_rarer_without_events() {
    let fields = |relist: Value| {
        let config: KebletConfiguration = document::decode(json!({ "relist": relist })).expect("well-formed");
        keblet(&config).into_iter().map(|problem| problem.field).collect::<Vec<_>>()
    };
    assert_eq!(fields(json!({"period": "100ms", "degradedPeriod": "100ms", "fixedPeriod": "100ms"})), [""; 0]);
    assert_eq!(fields(json!({"degradedPeriod": "99ms"})), ["relist.degradedPeriod"]);
    assert_eq!(fields(json!({"fixedPeriod": "99ms"})), ["relist.fixedPeriod"]);
    assert_eq!(fields(json!({"period": "2s", "degradedPeriod": "3s"})), ["relist.degradedPeriod"]);
}

#[test]
fn images_exempt_from_verification_are_names_or_prefixes() {
    let problems_of = |pattern: &str| {
        messages(json!({
            "imagePullCredentialsVerificationPolicy": "NeverVerifyAllowlistedImages",
            "preloadedImagesVerificationAllowlist": [pattern],
        }))
    };
    for good in ["ubuntu", "r.io/a/b-c", "localhost:5000/a", "my_org/a", "r.io/a/*", "registry:5000/*", "[::1]:5000/*"]
    {
        assert_eq!(problems_of(good), [] as [String; 0], "{good}");
    }
    for bad in [
        "",
        "*",
        "/*",
        "r.io/",
        "r.io//a",
        "r.io/a ",
        " r.io/*",
        "r.io/a*",
        "r.io/a*/b",
        "r.io/*/b",
        "r.io/a:1",
        "a:1",
        "r.io/a@sha256:38a8906435c4dd5f4258899d46621bfd8eea3ad6ff494ee3c2f17ef0321625bd",
        "r.io/App",
    ] {
        let messages = problems_of(bad);
        assert_eq!(messages.len(), 1, "{bad}: {messages:?}");
        assert!(messages[0].starts_with("preloadedImagesVerificationAllowlist[0]: "), "{bad}: {messages:?}");
    }
}

#[test]
fn flag_rules() {
    let check = |change: fn(&mut FlagSettings)| {
        let mut settings = FlagSettings::default();
        change(&mut settings);
        flags(&settings).into_iter().map(|problem| problem.field).collect::<Vec<_>>()
    };
    fn label(settings: &mut FlagSettings, key: &str) {
        settings.node_labels.insert(key.to_owned(), "x".to_owned());
    }
    assert_eq!(check(|s| s.cloud_provider = "aws".into()), ["cloud-provider"]);
    assert_eq!(check(|s| s.exit_on_lock_contention = true), ["exit-on-lock-contention"]);
    assert_eq!(check(|s| s.image_credential_provider_config = "/c".into()), ["image-credential-provider-config"]);
    assert_eq!(check(|s| s.minimum_container_ttl_duration = GoDuration::nanos(-1)), ["minimum-container-ttl-duration"]);
    let unlimited = |s: &mut FlagSettings| {
        (s.maximum_dead_containers, s.maximum_dead_containers_per_container) = (i32::MIN, i32::MIN);
    };
    assert_eq!(check(unlimited), [""; 0]);
    assert_eq!(check(|s| label(s, "kubernetes.io/role")), ["node-labels"]);
    assert_eq!(check(|s| label(s, "sub.k8s.io/role")), ["node-labels"]);
    assert_eq!(check(|s| label(s, "no good")), ["node-labels"]);
    for good in [
        "kubernetes.io/os",
        "a.node.kubernetes.io/x",
        "kubelet.kubernetes.io/x",
        "example.com/a",
        "plain",
        "notk8s.io/a",
    ] {
        let mut settings = FlagSettings::default();
        label(&mut settings, good);
        assert_eq!(flags(&settings), [], "{good}");
    }
    assert_eq!(check(|s| s.node_ip = "10.0.0.1,fd00::1".into()), [] as [String; 0]);
    assert_eq!(check(|s| s.node_ip = "10.0.0.1,nonsense".into()), [] as [String; 0]);
    assert_eq!(check(|s| s.node_ip = "10.0.0.1,10.0.0.2".into()), ["node-ip"]);
    assert_eq!(check(|s| s.node_ip = "0.0.0.0,fd00::1".into()), ["node-ip"]);
    assert_eq!(check(|s| s.node_ip = "10.0.0.1,::ffff:10.0.0.2".into()), ["node-ip"], "both are of IPv4");
}
