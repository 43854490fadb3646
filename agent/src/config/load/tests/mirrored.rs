//! Flags that set a field of the configuration file.

use std::collections::BTreeMap;

use serde_json::Value;

use super::Case;
use crate::config::FlagValues;
use crate::config::flags::FLAGS;
use crate::config::flags::Target;
use crate::config::load;
use crate::config::settings::to_json;

/// For each such flag the value that `every-field.yaml` has.
const VALUES: &[(&str, &str)] = &[
    ("enable-server", "false"),
    ("fail-swap-on", "false"),
    ("pod-manifest-path", "/etc/manifests"),
    ("sync-frequency", "2m"),
    ("file-check-frequency", "5s"),
    ("http-check-frequency", "6s"),
    ("manifest-url", "http://127.0.0.1:8080/pods"),
    ("manifest-url-header", "Authorization:Bearer token"),
    ("address", "127.0.0.1"),
    ("port", "10251"),
    ("read-only-port", "10255"),
    ("fail-cgroupv1", "false"),
    ("container-runtime-endpoint", "unix:///run/crio/crio.sock"),
    ("image-service-endpoint", "unix:///run/images.sock"),
    ("anonymous-auth", "true"),
    ("authentication-token-webhook", "false"),
    ("authentication-token-webhook-cache-ttl", "3m"),
    ("client-ca-file", "/srv/ca.crt"),
    ("authorization-mode", "AlwaysAllow"),
    ("authorization-webhook-cache-authorized-ttl", "6m"),
    ("authorization-webhook-cache-unauthorized-ttl", "31s"),
    ("tls-cert-file", "/srv/tls.crt"),
    ("tls-private-key-file", "/srv/tls.key"),
    ("rotate-server-certificates", "true"),
    ("tls-cipher-suites", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"),
    ("tls-min-version", "VersionTLS13"),
    ("rotate-certificates", "true"),
    ("registry-qps", "6"),
    ("registry-burst", "11"),
    ("event-qps", "51"),
    ("event-burst", "101"),
    ("enable-debugging-handlers", "false"),
    ("contention-profiling", "true"),
    ("healthz-port", "0"),
    ("healthz-bind-address", "::1"),
    ("oom-score-adj", "-998"),
    ("cluster-domain", "cluster.local"),
    ("volume-plugin-dir", "/srv/plugins"),
    ("cluster-dns", "10.96.0.10"),
    ("streaming-connection-idle-timeout", "5h"),
    ("node-status-update-frequency", "11s"),
    ("minimum-image-ttl-duration", "3m"),
    ("image-gc-high-threshold", "86"),
    ("image-gc-low-threshold", "81"),
    ("volume-stats-agg-period", "-1s"),
    ("feature-gates", "QOSReserved=true,MemoryQoS=true,LoggingAlphaOptions=true"),
    ("kubelet-cgroups", "/kubelet"),
    ("system-cgroups", "/system"),
    ("provider-id", "example://node-1"),
    ("cgroups-per-qos", "true"),
    ("cgroup-driver", "systemd"),
    ("cgroup-root", "/root"),
    ("cpu-manager-policy", "static"),
    ("cpu-manager-policy-options", "full-pcpus-only=true"),
    ("cpu-manager-reconcile-period", "11s"),
    ("qos-reserved", "memory=50%"),
    ("topology-manager-policy", "best-effort"),
    ("topology-manager-scope", "pod"),
    ("topology-manager-policy-options", "max-allowable-numa-nodes=9"),
    ("runtime-request-timeout", "3m"),
    ("hairpin-mode", "none"),
    ("max-pods", "111"),
    ("pod-cidr", "10.1.0.0/24"),
    ("pod-max-pids", "1024"),
    ("resolv-conf", ""),
    ("runonce", "false"),
    ("cpu-cfs-quota", "false"),
    ("cpu-cfs-quota-period", "50ms"),
    ("enable-controller-attach-detach", "false"),
    ("make-iptables-util-chains", "false"),
    ("container-log-max-size", "20Mi"),
    ("container-log-max-files", "6"),
    ("allowed-unsafe-sysctls", "kernel.msg*,net.core.somaxconn"),
    ("node-status-max-images", "-1"),
    ("kernel-memcg-notification", "true"),
    ("local-storage-capacity-isolation", "false"),
    ("max-open-files", "1000001"),
    ("kube-api-content-type", "application/json"),
    ("kube-api-qps", "0"),
    ("kube-api-burst", "101"),
    ("serialize-image-pulls", "false"),
    // The file asks for the defaults too.
    (
        "eviction-hard",
        "memory.available<200Mi,nodefs.available<10%,nodefs.inodesFree<5%,imagefs.available<15%,imagefs.inodesFree<5%",
    ),
    ("eviction-soft", "memory.available<300Mi"),
    ("eviction-soft-grace-period", "memory.available=30s"),
    ("eviction-pressure-transition-period", "6m"),
    ("eviction-max-pod-grace-period", "10"),
    ("eviction-minimum-reclaim", "memory.available=10%"),
    ("pods-per-core", "10"),
    ("protect-kernel-defaults", "true"),
    // Not set: it excludes the cgroups for what is reserved.
    ("reserved-cpus", ""),
    ("system-reserved", "cpu=200m"),
    ("kube-reserved", "memory=100Mi"),
    ("enforce-node-allocatable", "pods,system-reserved"),
    ("system-reserved-cgroup", "/system.slice"),
    ("kube-reserved-cgroup", "/kube.slice"),
    ("memory-manager-policy", "Static"),
    ("reserved-memory", "0:memory=1Gi,hugepages-2Mi=64Mi"),
    ("register-node", "false"),
    ("register-with-taints", "example.com/a=b:NoSchedule"),
    ("logging-format", "text"),
    ("log-flush-frequency", "6s"),
    ("v", "3"),
    ("vmodule", "pleg*=5"),
    ("log-text-split-stream", "true"),
    ("log-text-info-buffer-size", "64Ki"),
    ("log-json-split-stream", "true"),
    ("log-json-info-buffer-size", "128"),
];

#[test]
fn a_flag_means_what_its_field_means() {
    let every_field = include_str!("../../testdata/every-field.yaml");
    let file = Case::new().file("all.yaml", every_field).path_flag("config", "all.yaml").load();
    let flags: FlagValues = VALUES.iter().copied().collect();
    let line = load(&flags).unwrap_or_else(|error| panic!("must load: {error}"));
    let fields = |settings: &crate::config::Settings| -> BTreeMap<&'static str, Value> {
        let document = Value::Object(to_json(&settings.kubelet));
        let at = |path: &str| path.split('.').try_fold(&document, |value, name| value.get(name)).cloned();
        let mirrored = FLAGS.iter().filter_map(|flag| match flag.target {
            Target::Field(path) => Some((flag.name, at(path).unwrap_or_default())),
            Target::Own | Target::Nothing => None,
        });
        mirrored.collect()
    };
    let (by_file, by_flags) = (fields(&file), fields(&line));
    for (flag, value) in &by_file {
        assert!(VALUES.iter().any(|(name, _)| name == flag), "--{flag} is not set here");
        assert_eq!(by_flags.get(flag), Some(value), "--{flag}");
    }
    assert_eq!(by_file.len(), VALUES.len(), "a flag is missing");
}

/// A kubelet recommends the file for all others.
#[test]
fn flags_that_are_not_deprecated() {
    let fields = FLAGS.iter().filter(|flag| matches!(flag.target, Target::Field(_)) && !flag.deprecated);
    let names: Vec<&str> = fields.map(|flag| flag.name).collect();
    assert_eq!(names, ["fail-cgroupv1", "provider-id", "log-flush-frequency", "v", "vmodule"]);
}
