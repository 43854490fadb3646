//! The sections and list entries of `KubeletConfiguration`.

use std::collections::BTreeMap;

use super::duration::GoDuration;
use super::duration::duration_or_nanos;
use super::quantity::quantity_map;
use super::quantity::quantity_text;
use super::schema::document;

document! {
    /// `authentication`
    pub struct Authentication {
        x509 "x509": X509Authentication, nested, used, "Client certificates.";
        webhook "webhook": WebhookAuthentication, nested, used, "Bearer tokens, asked of the API server.";
        anonymous "anonymous": AnonymousAuthentication, nested, used, "Requests without credentials.";
    }
}

document! {
    /// `authentication.x509`
    pub struct X509Authentication {
        client_ca_file "clientCAFile": String, value, used, "Authorities whose client certificates are trusted.";
    }
}

document! {
    /// `authentication.webhook`
    pub struct WebhookAuthentication {
        enabled "enabled": bool = true, pointer, used, "Accept bearer tokens.";
        cache_ttl "cacheTTL": GoDuration = GoDuration::mins(2), value, used, "How long an answer is kept.";
    }
}

document! {
    /// `authentication.anonymous`
    pub struct AnonymousAuthentication {
        enabled "enabled": bool, pointer, used, "Accept requests without credentials.";
    }
}

document! {
    /// `authorization`
    pub struct Authorization {
        mode "mode": String = "Webhook", value, used, "AlwaysAllow or Webhook.";
        webhook "webhook": WebhookAuthorization, nested, used, "Access reviews by the API server.";
    }
}

document! {
    /// `authorization.webhook`
    pub struct WebhookAuthorization {
        cache_authorized_ttl "cacheAuthorizedTTL": GoDuration = GoDuration::mins(5), value, used, "How long a yes is kept.";
        cache_unauthorized_ttl "cacheUnauthorizedTTL": GoDuration = GoDuration::secs(30), value, used, "How long a no is kept.";
    }
}

document! {
    /// `memorySwap`
    pub struct MemorySwap {
        swap_behavior "swapBehavior": String, value, used, "NoSwap (also when empty) or LimitedSwap.";
    }
}

document! {
    /// `crashLoopBackOff`
    pub struct CrashLoopBackOff {
        max_container_restart_period "maxContainerRestartPeriod": Option<GoDuration>, pointer, used, "Longest back-off between two restarts; 300s unless its gate is off.";
    }
}

document! {
    /// `userNamespaces`
    pub struct UserNamespaces {
        ids_per_pod "idsPerPod": i64 = 65_536, pointer, used, "User and group ids of a pod with `hostUsers: false`.";
    }
}

document! {
    /// `tracing`
    pub struct Tracing {
        endpoint "endpoint": Option<String>, pointer, used, "OTLP collector.";
        sampling_rate_per_million "samplingRatePerMillion": Option<i32>, pointer, used, "Spans kept out of a million.";
    }
}

document! {
    /// `logging`
    pub struct Logging {
        format "format": String = "text", value, used, "text or json.";
        #[serde(deserialize_with = "duration_or_nanos")]
        flush_frequency "flushFrequency": GoDuration = GoDuration::secs(5), value, later, "Time between two flushes; every line is flushed at once here.";
        verbosity "verbosity": u32, pointer, used, "Detail: 0 is quiet, 2 informs, 4 explains, 6 and more trace.";
        vmodule "vmodule": Vec<VModule>, value, later, "Verbosity by source file pattern.";
        options "options": LoggingOptions, nested, later, "Options of each format.";
    }
}

document! {
    /// An entry of `logging.vmodule`
    pub struct VModule {
        file_pattern "filePattern": String, value, later, "Source files meant.";
        verbosity "verbosity": u32, value, later, "Their verbosity.";
    }
}

document! {
    /// `logging.options`
    pub struct LoggingOptions {
        text "text": FormatOptions, nested, later, "Options of the text format.";
        json "json": FormatOptions, nested, later, "Options of the JSON format.";
    }
}

document! {
    /// `logging.options.text` and `logging.options.json`
    pub struct FormatOptions {
        split_stream "splitStream": bool, value, later, "Errors to stderr, the rest to stdout.";
        #[serde(deserialize_with = "quantity_text")]
        info_buffer_size "infoBufferSize": String = "0", value, later, "Buffer for stdout, as a quantity.";
    }
}

document! {
    /// An entry of `shutdownGracePeriodByPodPriority`
    pub struct ShutdownGracePeriod {
        priority "priority": i32, value, used, "Lowest pod priority meant.";
        shutdown_grace_period_seconds "shutdownGracePeriodSeconds": i64, value, used, "Seconds for these pods to end.";
    }
}

document! {
    /// An entry of `reservedMemory`
    pub struct MemoryReservation {
        numa_node "numaNode": i32, value, later, "NUMA node.";
        #[serde(deserialize_with = "quantity_map")]
        limits "limits": BTreeMap<String, String>, value, later, "Amount by kind of memory.";
    }
}

document! {
    /// An entry of `registerWithTaints`
    pub struct Taint {
        key "key": String, value, used, "Taint key.";
        value "value": String, value, used, "Taint value.";
        effect "effect": String, value, used, "NoSchedule, PreferNoSchedule or NoExecute.";
        time_added "timeAdded": Option<String>, pointer, later, "Must not be set.";
    }
}
