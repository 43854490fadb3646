//! The pod spec as a whole: policies, names, DNS, host aliases, and its lists of volumes and containers.

use std::collections::HashSet;

use k8s_openapi::api::core::v1::PodDNSConfig;
use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::api::core::v1::Toleration;

use super::super::field::Findings;
use super::super::field::Path;
use super::container;
use super::formats;
use super::resources;
use super::security;
use super::text;
use super::volume;

const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH_CHARS: usize = 2048;
/// Of the kernel.
const MAX_HOSTNAME: usize = 64;

pub(super) fn check(spec: &PodSpec, path: &Path, findings: &mut Findings) {
    let volumes = volume::check_all(spec.volumes.as_deref().unwrap_or_default(), &path.child("volumes"), findings);
    container::check_all(spec, &volumes, path, findings);
    policies(spec, path, findings);
    names(spec, path, findings);
    dns(spec, path, findings);
    for (i, alias) in spec.host_aliases.iter().flatten().enumerate() {
        let path = path.child("hostAliases").index(i);
        findings.invalid_each(&path.child("ip"), &alias.ip, formats::ip(&alias.ip));
        for (j, name) in alias.hostnames.iter().flatten().enumerate() {
            findings.invalid_each(&path.child("hostnames").index(j), name, formats::dns_subdomain(name));
        }
    }
    security::check_pod(spec, path, findings);
    tokens_have_accounts(spec, path, findings);
    for (i, toleration) in spec.tolerations.iter().flatten().enumerate() {
        check_toleration(toleration, &path.child("tolerations").index(i), findings);
    }
    for (i, gate) in spec.readiness_gates.iter().flatten().enumerate() {
        let path = path.child("readinessGates").index(i).child("conditionType");
        findings.invalid_each(&path, &gate.condition_type, formats::qualified_name(&gate.condition_type));
    }
    if let Some(requirements) = &spec.resources {
        resources::check_pod(requirements, &path.child("resources"), findings);
    }
    if let Some(overhead) = &spec.overhead {
        resources::check_list(overhead, &path.child("overhead"), findings);
    }
}

/// A token is one of the pod's service account.
fn tokens_have_accounts(spec: &PodSpec, path: &Path, findings: &mut Findings) {
    if !text(&spec.service_account_name).is_empty() {
        return;
    }
    for (i, volume) in spec.volumes.iter().flatten().enumerate() {
        let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
        for (j, _) in sources.enumerate().filter(|(_, source)| source.service_account_token.is_some()) {
            let path = path.child("volumes").index(i).child("projected").child("sources").index(j);
            let message = "must not be specified when serviceAccountName is not set";
            findings.forbidden(&path.child("serviceAccountToken"), message);
        }
    }
}

fn policies(spec: &PodSpec, path: &Path, findings: &mut Findings) {
    findings.one_of(&path.child("restartPolicy"), text(&spec.restart_policy), &["Always", "OnFailure", "Never"]);
    findings.one_of(
        &path.child("dnsPolicy"),
        text(&spec.dns_policy),
        &["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"],
    );
    if let Some(deadline) = spec.active_deadline_seconds.filter(|d| !(1..=i64::from(i32::MAX)).contains(d)) {
        let message = "must be between 1 and 2147483647, inclusive";
        findings.invalid(&path.child("activeDeadlineSeconds"), &deadline, message);
    }
    if let Some(os) = &spec.os {
        findings.one_of(&path.child("os").child("name"), &os.name, &["linux", "windows"]);
    }
    if let Some(policy) = &spec.preemption_policy {
        let path = path.child("preemptionPolicy");
        match policy.is_empty() {
            true => findings.required(&path, ""),
            false => findings.one_of(&path, policy, &["PreemptLowerPriority", "Never"]),
        }
    }
    let gated = spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty());
    if gated && !text(&spec.node_name).is_empty() {
        findings.forbidden(&path.child("nodeName"), "cannot be set until all schedulingGates have been cleared");
    }
    if spec.ephemeral_containers.as_ref().is_some_and(|list| !list.is_empty()) {
        findings.forbidden(&path.child("ephemeralContainers"), "cannot be set on create");
    }
}

fn names(spec: &PodSpec, path: &Path, findings: &mut Findings) {
    let subdomains = [
        ("nodeName", &spec.node_name),
        ("serviceAccountName", &spec.service_account_name),
        ("priorityClassName", &spec.priority_class_name),
        ("runtimeClassName", &spec.runtime_class_name),
    ];
    for (field, value) in subdomains {
        let value = text(value);
        if !value.is_empty() {
            findings.invalid_each(&path.child(field), value, formats::dns_subdomain(value));
        }
    }
    for (field, value) in [("hostname", &spec.hostname), ("subdomain", &spec.subdomain)] {
        let value = text(value);
        if !value.is_empty() {
            findings.invalid_each(&path.child(field), value, formats::dns_label(value));
        }
    }
    if let Some(name) = &spec.hostname_override {
        hostname_override(name, spec, &path.child("hostnameOverride"), findings);
    }
    for (key, value) in spec.node_selector.iter().flatten() {
        findings.invalid_each(&path.child("nodeSelector"), key, formats::qualified_name(key));
        findings.invalid_each(&path.child("nodeSelector"), value, formats::label_value(value));
    }
}

fn hostname_override(name: &str, spec: &PodSpec, path: &Path, findings: &mut Findings) {
    if spec.set_hostname_as_fqdn == Some(true) {
        findings.forbidden(path, "may not be specified when setHostnameAsFQDN is true");
    }
    if spec.host_network == Some(true) {
        findings.forbidden(path, "may not be specified when hostNetwork is true");
    }
    if name.len() > MAX_HOSTNAME {
        findings.too_long(path, MAX_HOSTNAME);
    }
    findings.invalid_each(path, name, formats::dns_subdomain(name));
}

fn dns(spec: &PodSpec, path: &Path, findings: &mut Findings) {
    let config_path = path.child("dnsConfig");
    let needs_servers = text(&spec.dns_policy) == "None";
    match &spec.dns_config {
        Some(config) => {
            if needs_servers && config.nameservers.as_ref().is_none_or(Vec::is_empty) {
                let detail = "must provide at least one DNS nameserver when `dnsPolicy` is None";
                findings.required(&config_path.child("nameservers"), detail);
            }
            dns_config(config, &config_path, findings);
        }
        None if needs_servers => {
            findings.required(&config_path, "must provide `dnsConfig` when `dnsPolicy` is None");
        }
        None => {}
    }
}

fn dns_config(config: &PodDNSConfig, path: &Path, findings: &mut Findings) {
    let servers = config.nameservers.as_deref().unwrap_or_default();
    let servers_path = path.child("nameservers");
    if servers.len() > MAX_NAMESERVERS {
        findings.invalid(&servers_path, &servers.join(" "), "must not have more than 3 nameservers");
    }
    for (i, server) in servers.iter().enumerate() {
        findings.invalid_each(&servers_path.index(i), server, formats::ip(server));
    }
    let searches = config.searches.as_deref().unwrap_or_default();
    let searches_path = path.child("searches");
    if searches.len() > MAX_SEARCHES {
        findings.invalid(&searches_path, &searches.join(" "), "must not have more than 32 search paths");
    }
    if searches.join(" ").len() > MAX_SEARCH_CHARS {
        let message = "must not have more than 2048 characters (including spaces) in the search list";
        findings.invalid(&searches_path, &searches.join(" "), message);
    }
    for (i, search) in searches.iter().enumerate() {
        findings.invalid_each(&searches_path.index(i), search, formats::dns_search(search));
    }
    for (i, option) in config.options.iter().flatten().enumerate() {
        let path = path.child("options").index(i);
        if text(&option.name).is_empty() {
            findings.required(&path, "must not be empty");
        }
        // Options become words of one line in resolv.conf.
        for (field, word) in [("name", text(&option.name)), ("value", text(&option.value))] {
            if word.chars().any(|c| c.is_whitespace() || c.is_control()) {
                findings.invalid(&path.child(field), word, "must not contain white space or control characters");
            }
        }
    }
}

fn check_toleration(toleration: &Toleration, path: &Path, findings: &mut Findings) {
    let key = text(&toleration.key);
    let operator = text(&toleration.operator);
    if key.is_empty() {
        if operator != "Exists" {
            findings.invalid(
                &path.child("operator"),
                operator,
                "operator must be Exists when `key` is empty, which means \"match all values and all keys\"",
            );
        }
    } else {
        findings.invalid_each(&path.child("key"), key, formats::qualified_name(key));
    }
    match operator {
        "" | "Equal" => {
            findings.invalid_each(
                &path.child("operator"),
                text(&toleration.value),
                formats::label_value(text(&toleration.value)),
            );
        }
        "Exists" if text(&toleration.value).is_empty() => {}
        "Exists" => findings.invalid(
            &path.child("operator"),
            text(&toleration.value),
            "value must be empty when `operator` is 'Exists'",
        ),
        // Only with the gate TaintTolerationComparisonOperators, which this agent does not have.
        "Gt" | "Lt" => {
            findings.unsupported(&path.child("operator"), operator, &["Equal", "Exists", "Lt", "Gt"]);
        }
        other => findings.unsupported(&path.child("operator"), other, &["Equal", "Exists"]),
    }
    let effect = text(&toleration.effect);
    if !effect.is_empty() {
        findings.one_of(&path.child("effect"), effect, &["NoExecute", "NoSchedule", "PreferNoSchedule"]);
    }
    if toleration.toleration_seconds.is_some() && effect != "NoExecute" {
        findings.invalid(&path.child("effect"), effect, "effect must be 'NoExecute' when `tolerationSeconds` is set");
    }
}

/// Reports names that occur a second time; `false` for those.
pub(super) fn first_of_its_name<'a>(
    name: &'a str,
    seen: &mut HashSet<&'a str>,
    path: &Path,
    findings: &mut Findings,
) -> bool {
    let first = seen.insert(name);
    if !first {
        findings.duplicate(path, name);
    }
    first
}
