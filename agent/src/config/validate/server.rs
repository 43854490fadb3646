//! Servers, TLS, authentication, logging, tracing.

use std::net::IpAddr;

use super::Problems;
use crate::config::duration::GoDuration;
use crate::config::feature_gates::Feature;
use crate::config::feature_gates::FeatureGates;
use crate::config::kubelet::KubeletConfiguration;
use crate::config::kubelet_sections::FormatOptions;
use crate::config::kubelet_sections::Logging;
use crate::config::kubelet_sections::Tracing;

const TLS_VERSIONS: [&str; 5] = ["", "VersionTLS10", "VersionTLS11", "VersionTLS12", "VersionTLS13"];

/// Names a cipher suite may have, those that are accepted and then left out included.
pub const CIPHER_SUITES: [&str; 27] = [
    "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_ECDSA_WITH_RC4_128_SHA",
    "TLS_ECDHE_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    "TLS_ECDHE_RSA_WITH_RC4_128_SHA",
    "TLS_RSA_WITH_3DES_EDE_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256",
    "TLS_RSA_WITH_AES_256_CBC_SHA",
    "TLS_RSA_WITH_AES_256_GCM_SHA384",
    "TLS_RSA_WITH_RC4_128_SHA",
];

const CURVES: [i32; 7] = [23, 24, 25, 29, 4587, 4588, 4589];

pub(super) fn check(config: &KubeletConfiguration, gates: &FeatureGates, problems: &mut Problems) {
    problems.range("port", config.port, 1..=65_535);
    problems.range("readOnlyPort", config.read_only_port, 0..=65_535);
    problems.range("healthzPort", config.healthz_port, 0..=65_535);
    let is_ip = |address: &str| address.parse::<IpAddr>().is_ok();
    problems.require(is_ip(&config.address), "address", || format!("{:?} is not an IP address", config.address));
    let host = &config.healthz_bind_address;
    // A resolver takes what ends in a number for an address: `0` would be all addresses.
    let ends_in_name =
        host.rsplit('.').next().is_some_and(|label| label.starts_with(|c: char| c.is_ascii_alphabetic()));
    let is_name = ends_in_name && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
    problems.require(is_ip(host) || is_name, "healthzBindAddress", || {
        format!("{host:?} is neither an IP address nor the name of a host")
    });
    tls(config, gates, problems);
    problems.one_of("authorization.mode", &config.authorization.mode, &["AlwaysAllow", "Webhook"]);
    let query = config.enable_system_log_query;
    problems.gated(query, "enableSystemLogQuery", gates, Feature::NodeLogQuery);
    problems.require(!query || config.enable_system_log_handler, "enableSystemLogQuery", || {
        "needs enableSystemLogHandler".to_owned()
    });
    let hidden = &config.show_hidden_metrics_for_version;
    problems.require(hidden.is_empty() || hidden == "1.35", "showHiddenMetricsForVersion", || {
        format!("{hidden:?} is not the previous minor version, 1.35")
    });
    logging(&config.logging, gates, problems);
    if let Some(config) = &config.tracing {
        tracing(config, problems);
    }
}

fn tls(config: &KubeletConfiguration, gates: &FeatureGates, problems: &mut Problems) {
    for (index, suite) in config.tls_cipher_suites.iter().enumerate() {
        problems.require(CIPHER_SUITES.contains(&suite.as_str()), &format!("tlsCipherSuites[{index}]"), || {
            format!("{suite:?} is not a known cipher suite")
        });
    }
    for (index, curve) in config.tls_curve_preferences.iter().enumerate() {
        let field = format!("tlsCurvePreferences[{index}]");
        problems.require(CURVES.contains(curve), &field, || format!("{curve} is not a known key exchange group"));
        problems.require(!config.tls_curve_preferences[..index].contains(curve), &field, || {
            format!("{curve} is listed twice")
        });
    }
    problems.one_of("tlsMinVersion", &config.tls_min_version, &TLS_VERSIONS);
    problems.gated(config.server_tls_bootstrap, "serverTLSBootstrap", gates, Feature::RotateKubeletServerCertificate);
}

fn logging(logging: &Logging, gates: &FeatureGates, problems: &mut Problems) {
    problems.one_of("logging.format", &logging.format, &["text", "json"]);
    problems.gated(logging.format == "json", "logging.format", gates, Feature::LoggingBetaOptions);
    problems.require(logging.flush_frequency > GoDuration::default(), "logging.flushFrequency", || {
        format!("{} must be greater than zero", logging.flush_frequency)
    });
    let most = i32::MAX as u32;
    problems.range("logging.verbosity", logging.verbosity, 0..=most);
    problems.require(logging.vmodule.is_empty() || logging.format == "text", "logging.vmodule", || {
        "only the text format supports it".to_owned()
    });
    for (index, entry) in logging.vmodule.iter().enumerate() {
        let field = format!("logging.vmodule[{index}]");
        let pattern = &entry.file_pattern;
        problems.require(!pattern.is_empty() && !pattern.contains(['=', ',']), &field, || {
            format!("filePattern {pattern:?} must not be empty nor contain '=' or ','")
        });
        problems.range(&field, entry.verbosity, 0..=most);
    }
    for (name, options) in [("text", &logging.options.text), ("json", &logging.options.json)] {
        let used = *options != FormatOptions::default();
        problems.gated(used, &format!("logging.options.{name}"), gates, Feature::LoggingAlphaOptions);
    }
}

fn tracing(tracing: &Tracing, problems: &mut Problems) {
    if let Some(rate) = tracing.sampling_rate_per_million {
        problems.range("tracing.samplingRatePerMillion", rate, 0..=1_000_000);
    }
    if let Some(endpoint) = &tracing.endpoint {
        let scheme = endpoint.split_once("://").map(|(scheme, _)| scheme);
        // Without a port gRPC uses 443; the last colon may be one of an IPv6 address in brackets.
        let plain = || match endpoint.rsplit_once(':').filter(|_| !endpoint.ends_with(']')) {
            Some((_, port)) => port.parse::<u16>().is_ok(),
            None => !endpoint.is_empty() && !endpoint.contains(['/', ' ']),
        };
        let known = match scheme {
            Some(scheme) => ["", "dns", "unix", "unix-abstract"].contains(&scheme),
            None => ["dns:", "unix:", "unix-abstract:"].iter().any(|start| endpoint.starts_with(start)) || plain(),
        };
        problems.require(known, "tracing.endpoint", || {
            format!("{endpoint:?} is neither host, host:port nor a dns, unix or unix-abstract address")
        });
    }
}
