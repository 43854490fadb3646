//! Every flag of a 1.36 kubelet, and keblet's own few: name, form of the value, and what it sets.

use super::own::FlagSettings;
use crate::config::kubelet::KubeletConfiguration;
use crate::config::schema;
use crate::config::schema::Described;

/// How the text of a flag is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `true` or `false`; the bare flag means `true`.
    Bool,
    /// A whole number.
    Int,
    /// A level of verbosity: a decimal number.
    Verbosity,
    /// Any text.
    Text,
    /// An IP address.
    Ip,
    /// A Go duration.
    Duration,
    /// A resource quantity.
    Quantity,
    /// `a,b,c`
    List,
    /// `key=value,key=value`
    Map,
    /// `key=value,key`; a key alone has an empty value.
    Labels,
    /// `key=value`, one per use of the flag; commas belong to the value.
    Options,
    /// `key=true,key=false`
    Switches,
    /// `signal<value,signal<value`
    Thresholds,
    /// `name:value,name:value`; names may repeat.
    Headers,
    /// `node:type=amount,type=amount;node:…`
    ReservedMemory,
    /// `key=value:Effect,key:Effect`; the last use of the flag counts.
    Taints,
    /// `pattern=N,pattern=N`
    VModule,
}

impl Kind {
    /// The form as help texts show it.
    pub const fn placeholder(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::Int | Self::Verbosity => "N",
            Self::Text => "TEXT",
            Self::Ip => "IP",
            Self::Duration => "DURATION",
            Self::Quantity => "QUANTITY",
            Self::List => "A,B,…",
            Self::Map | Self::Labels | Self::Options => "KEY=VALUE,…",
            Self::Switches => "KEY=BOOL,…",
            Self::Thresholds => "SIGNAL<VALUE,…",
            Self::Headers => "NAME:VALUE,…",
            Self::ReservedMemory => "NODE:TYPE=AMOUNT,…",
            Self::Taints => "KEY=VALUE:EFFECT,…",
            Self::VModule => "PATTERN=N,…",
        }
    }
}

/// What a flag sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A field of `KubeletConfiguration`, by path.
    Field(&'static str),
    /// A field of [`FlagSettings`] of the same name.
    Own,
    /// Nothing: kept so that old command lines work.
    Nothing,
}

/// One flag.
#[derive(Debug)]
pub struct Flag {
    /// Name without hyphens in front.
    pub name: &'static str,
    /// How its text is read.
    pub kind: Kind,
    /// What it sets.
    pub target: Target,
    /// Its use is discouraged, in favour of the configuration file.
    pub deprecated: bool,
}

impl Flag {
    /// The field that holds the value, if anything does.
    fn field(&self) -> Option<&'static schema::Field> {
        match self.target {
            Target::Field(path) => schema::find(KubeletConfiguration::FIELDS, path),
            Target::Own => FlagSettings::FIELDS.iter().find(|field| field.name == self.name),
            Target::Nothing => None,
        }
    }

    /// Whether keblet acts on the value.
    pub fn honoured(&self) -> bool {
        self.field().is_some_and(|field| field.honoured)
    }

    /// One line for help texts.
    pub fn help(&self) -> String {
        let doc = self.field().map_or("Accepted and ignored.", |field| field.doc);
        match self.target {
            Target::Field(path) => format!("{doc} [{path}]"),
            Target::Own | Target::Nothing => doc.to_owned(),
        }
    }
}

/// The flag of that name.
pub fn find(name: &str) -> Option<&'static Flag> {
    FLAGS.iter().find(|flag| flag.name == name)
}

const DEPRECATED: bool = true;
const CURRENT: bool = false;

const fn field(name: &'static str, kind: Kind, path: &'static str, deprecated: bool) -> Flag {
    Flag { name, kind, target: Target::Field(path), deprecated }
}

const fn own(name: &'static str, kind: Kind, deprecated: bool) -> Flag {
    Flag { name, kind, target: Target::Own, deprecated }
}

const fn ignored(name: &'static str, kind: Kind) -> Flag {
    Flag { name, kind, target: Target::Nothing, deprecated: true }
}

use Kind::Bool;
use Kind::Duration;
use Kind::Headers;
use Kind::Int;
use Kind::Ip;
use Kind::Labels;
use Kind::List;
use Kind::Map;
use Kind::Options;
use Kind::Quantity;
use Kind::ReservedMemory;
use Kind::Switches;
use Kind::Taints;
use Kind::Text;
use Kind::Thresholds;
use Kind::VModule;
use Kind::Verbosity;

/// All flags.
pub const FLAGS: &[Flag] = &[
    own("config", Text, CURRENT),
    own("config-dir", Text, CURRENT),
    own("keblet-config", Text, CURRENT),
    own("kubeconfig", Text, CURRENT),
    own("bootstrap-kubeconfig", Text, CURRENT),
    own("hostname-override", Text, CURRENT),
    own("node-ip", Text, CURRENT),
    own("cert-dir", Text, CURRENT),
    own("cloud-provider", Text, CURRENT),
    own("root-dir", Text, CURRENT),
    own("seccomp-default", Bool, CURRENT),
    own("node-labels", Labels, CURRENT),
    own("lock-file", Text, CURRENT),
    own("exit-on-lock-contention", Bool, CURRENT),
    own("runtime-cgroups", Text, CURRENT),
    own("image-credential-provider-config", Text, CURRENT),
    own("image-credential-provider-bin-dir", Text, CURRENT),
    own("minimum-container-ttl-duration", Duration, DEPRECATED),
    own("maximum-dead-containers-per-container", Int, DEPRECATED),
    own("maximum-dead-containers", Int, DEPRECATED),
    own("experimental-mounter-path", Text, DEPRECATED),
    own("experimental-allocatable-ignore-eviction", Bool, DEPRECATED),
    own("housekeeping-interval", Duration, CURRENT),
    field("enable-server", Bool, "enableServer", DEPRECATED),
    field("fail-swap-on", Bool, "failSwapOn", DEPRECATED),
    field("pod-manifest-path", Text, "staticPodPath", DEPRECATED),
    field("sync-frequency", Duration, "syncFrequency", DEPRECATED),
    field("file-check-frequency", Duration, "fileCheckFrequency", DEPRECATED),
    field("http-check-frequency", Duration, "httpCheckFrequency", DEPRECATED),
    field("manifest-url", Text, "staticPodURL", DEPRECATED),
    field("manifest-url-header", Headers, "staticPodURLHeader", DEPRECATED),
    field("address", Ip, "address", DEPRECATED),
    field("port", Int, "port", DEPRECATED),
    field("read-only-port", Int, "readOnlyPort", DEPRECATED),
    field("fail-cgroupv1", Bool, "failCgroupV1", CURRENT),
    field("container-runtime-endpoint", Text, "containerRuntimeEndpoint", DEPRECATED),
    field("image-service-endpoint", Text, "imageServiceEndpoint", DEPRECATED),
    field("anonymous-auth", Bool, "authentication.anonymous.enabled", DEPRECATED),
    field("authentication-token-webhook", Bool, "authentication.webhook.enabled", DEPRECATED),
    field("authentication-token-webhook-cache-ttl", Duration, "authentication.webhook.cacheTTL", DEPRECATED),
    field("client-ca-file", Text, "authentication.x509.clientCAFile", DEPRECATED),
    field("authorization-mode", Text, "authorization.mode", DEPRECATED),
    field(
        "authorization-webhook-cache-authorized-ttl",
        Duration,
        "authorization.webhook.cacheAuthorizedTTL",
        DEPRECATED,
    ),
    field(
        "authorization-webhook-cache-unauthorized-ttl",
        Duration,
        "authorization.webhook.cacheUnauthorizedTTL",
        DEPRECATED,
    ),
    field("tls-cert-file", Text, "tlsCertFile", DEPRECATED),
    field("tls-private-key-file", Text, "tlsPrivateKeyFile", DEPRECATED),
    field("rotate-server-certificates", Bool, "serverTLSBootstrap", DEPRECATED),
    field("tls-cipher-suites", List, "tlsCipherSuites", DEPRECATED),
    field("tls-min-version", Text, "tlsMinVersion", DEPRECATED),
    field("rotate-certificates", Bool, "rotateCertificates", DEPRECATED),
    field("registry-qps", Int, "registryPullQPS", DEPRECATED),
    field("registry-burst", Int, "registryBurst", DEPRECATED),
    field("event-qps", Int, "eventRecordQPS", DEPRECATED),
    field("event-burst", Int, "eventBurst", DEPRECATED),
    field("enable-debugging-handlers", Bool, "enableDebuggingHandlers", DEPRECATED),
    field("contention-profiling", Bool, "enableContentionProfiling", DEPRECATED),
    field("healthz-port", Int, "healthzPort", DEPRECATED),
    field("healthz-bind-address", Ip, "healthzBindAddress", DEPRECATED),
    field("oom-score-adj", Int, "oomScoreAdj", DEPRECATED),
    field("cluster-domain", Text, "clusterDomain", DEPRECATED),
    field("volume-plugin-dir", Text, "volumePluginDir", DEPRECATED),
    field("cluster-dns", List, "clusterDNS", DEPRECATED),
    field("streaming-connection-idle-timeout", Duration, "streamingConnectionIdleTimeout", DEPRECATED),
    field("node-status-update-frequency", Duration, "nodeStatusUpdateFrequency", DEPRECATED),
    field("minimum-image-ttl-duration", Duration, "imageMinimumGCAge", DEPRECATED),
    field("image-gc-high-threshold", Int, "imageGCHighThresholdPercent", DEPRECATED),
    field("image-gc-low-threshold", Int, "imageGCLowThresholdPercent", DEPRECATED),
    field("volume-stats-agg-period", Duration, "volumeStatsAggPeriod", DEPRECATED),
    field("feature-gates", Switches, "featureGates", DEPRECATED),
    field("kubelet-cgroups", Text, "kubeletCgroups", DEPRECATED),
    field("system-cgroups", Text, "systemCgroups", DEPRECATED),
    field("provider-id", Text, "providerID", CURRENT),
    field("cgroups-per-qos", Bool, "cgroupsPerQOS", DEPRECATED),
    field("cgroup-driver", Text, "cgroupDriver", DEPRECATED),
    field("cgroup-root", Text, "cgroupRoot", DEPRECATED),
    field("cpu-manager-policy", Text, "cpuManagerPolicy", DEPRECATED),
    field("cpu-manager-policy-options", Options, "cpuManagerPolicyOptions", DEPRECATED),
    field("cpu-manager-reconcile-period", Duration, "cpuManagerReconcilePeriod", DEPRECATED),
    field("qos-reserved", Map, "qosReserved", DEPRECATED),
    field("topology-manager-policy", Text, "topologyManagerPolicy", DEPRECATED),
    field("topology-manager-scope", Text, "topologyManagerScope", DEPRECATED),
    field("topology-manager-policy-options", Map, "topologyManagerPolicyOptions", DEPRECATED),
    field("runtime-request-timeout", Duration, "runtimeRequestTimeout", DEPRECATED),
    field("hairpin-mode", Text, "hairpinMode", DEPRECATED),
    field("max-pods", Int, "maxPods", DEPRECATED),
    field("pod-cidr", Text, "podCIDR", DEPRECATED),
    field("pod-max-pids", Int, "podPidsLimit", DEPRECATED),
    field("resolv-conf", Text, "resolvConf", DEPRECATED),
    field("runonce", Bool, "runOnce", DEPRECATED),
    field("cpu-cfs-quota", Bool, "cpuCFSQuota", DEPRECATED),
    field("cpu-cfs-quota-period", Duration, "cpuCFSQuotaPeriod", DEPRECATED),
    field("enable-controller-attach-detach", Bool, "enableControllerAttachDetach", DEPRECATED),
    field("make-iptables-util-chains", Bool, "makeIPTablesUtilChains", DEPRECATED),
    field("container-log-max-size", Text, "containerLogMaxSize", DEPRECATED),
    field("container-log-max-files", Int, "containerLogMaxFiles", DEPRECATED),
    field("allowed-unsafe-sysctls", List, "allowedUnsafeSysctls", DEPRECATED),
    field("node-status-max-images", Int, "nodeStatusMaxImages", DEPRECATED),
    field("kernel-memcg-notification", Bool, "kernelMemcgNotification", DEPRECATED),
    field("local-storage-capacity-isolation", Bool, "localStorageCapacityIsolation", DEPRECATED),
    field("max-open-files", Int, "maxOpenFiles", DEPRECATED),
    field("kube-api-content-type", Text, "contentType", DEPRECATED),
    field("kube-api-qps", Int, "kubeAPIQPS", DEPRECATED),
    field("kube-api-burst", Int, "kubeAPIBurst", DEPRECATED),
    field("serialize-image-pulls", Bool, "serializeImagePulls", DEPRECATED),
    field("eviction-hard", Thresholds, "evictionHard", DEPRECATED),
    field("eviction-soft", Thresholds, "evictionSoft", DEPRECATED),
    field("eviction-soft-grace-period", Map, "evictionSoftGracePeriod", DEPRECATED),
    field("eviction-pressure-transition-period", Duration, "evictionPressureTransitionPeriod", DEPRECATED),
    field("eviction-max-pod-grace-period", Int, "evictionMaxPodGracePeriod", DEPRECATED),
    field("eviction-minimum-reclaim", Map, "evictionMinimumReclaim", DEPRECATED),
    field("pods-per-core", Int, "podsPerCore", DEPRECATED),
    field("protect-kernel-defaults", Bool, "protectKernelDefaults", DEPRECATED),
    field("reserved-cpus", Text, "reservedSystemCPUs", DEPRECATED),
    field("system-reserved", Map, "systemReserved", DEPRECATED),
    field("kube-reserved", Map, "kubeReserved", DEPRECATED),
    field("enforce-node-allocatable", List, "enforceNodeAllocatable", DEPRECATED),
    field("system-reserved-cgroup", Text, "systemReservedCgroup", DEPRECATED),
    field("kube-reserved-cgroup", Text, "kubeReservedCgroup", DEPRECATED),
    field("memory-manager-policy", Text, "memoryManagerPolicy", DEPRECATED),
    field("reserved-memory", ReservedMemory, "reservedMemory", DEPRECATED),
    field("register-node", Bool, "registerNode", DEPRECATED),
    field("register-with-taints", Taints, "registerWithTaints", DEPRECATED),
    field("logging-format", Text, "logging.format", DEPRECATED),
    field("log-flush-frequency", Duration, "logging.flushFrequency", CURRENT),
    field("v", Verbosity, "logging.verbosity", CURRENT),
    field("vmodule", VModule, "logging.vmodule", CURRENT),
    field("log-text-split-stream", Bool, "logging.options.text.splitStream", DEPRECATED),
    field("log-text-info-buffer-size", Quantity, "logging.options.text.infoBufferSize", DEPRECATED),
    field("log-json-split-stream", Bool, "logging.options.json.splitStream", DEPRECATED),
    field("log-json-info-buffer-size", Quantity, "logging.options.json.infoBufferSize", DEPRECATED),
    ignored("application-metrics-count-limit", Int),
    ignored("boot-id-file", Text),
    ignored("container-hints", Text),
    ignored("containerd", Text),
    ignored("containerd-namespace", Text),
    ignored("enable-load-reader", Bool),
    ignored("event-storage-age-limit", Text),
    ignored("event-storage-event-limit", Text),
    ignored("global-housekeeping-interval", Duration),
    ignored("log-cadvisor-usage", Bool),
    ignored("machine-id-file", Text),
    // Gone from kubelet, but still in the flag files of nodes that older kubeadms set up.
    ignored("pod-infra-container-image", Text),
    ignored("storage-driver-user", Text),
    ignored("storage-driver-password", Text),
    ignored("storage-driver-host", Text),
    ignored("storage-driver-db", Text),
    ignored("storage-driver-table", Text),
    ignored("storage-driver-secure", Bool),
    ignored("storage-driver-buffer-duration", Duration),
];
