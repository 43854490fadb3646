//! The pod's host name and DNS domain. Pure.

use k8s_openapi::api::core::v1::Pod;

use super::DnsSettings;
use super::GenerateError;
use super::names;

/// Longest host name of the Linux kernel.
const MAX_KERNEL_HOSTNAME: usize = 64;
/// Longest DNS label.
const MAX_LABEL: usize = 63;

/// Host name and domain of a pod; either may be empty.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Hostname {
    /// The short name.
    pub host: String,
    /// `<subdomain>.<namespace>.svc.<cluster domain>` if the pod has a subdomain.
    pub domain: String,
}

impl Hostname {
    /// Host name and domain joined, or `None` without a domain.
    pub fn fqdn(&self) -> Option<String> {
        (!self.domain.is_empty()).then(|| format!("{}.{}", self.host, self.domain))
    }
}

/// Host name and domain by `hostnameOverride` (KEP-4762), `hostname`, `subdomain` and the pod's name.
///
/// # Errors
/// A `hostname` or `subdomain` that is not a DNS label, a `hostnameOverride` that is not a DNS subdomain.
pub fn hostname(pod: &Pod, dns: &DnsSettings) -> Result<Hostname, GenerateError> {
    let Some(spec) = &pod.spec else { return Ok(Hostname::default()) };
    let replacement = spec.hostname_override.as_deref().filter(|_| !dns.ignores_override);
    if let Some(name) = replacement.filter(|name| !name.is_empty()) {
        if !name.split('.').all(has_label_form) {
            return Err(GenerateError::Hostname { field: "spec.hostnameOverride", value: name.to_owned() });
        }
        // The API allows one character more.
        return Ok(Hostname { host: truncated(name), domain: String::new() });
    }
    let host = match spec.hostname.as_deref().filter(|name| !name.is_empty()) {
        Some(name) if is_label(name) => name.to_owned(),
        Some(name) => return Err(GenerateError::Hostname { field: "spec.hostname", value: name.to_owned() }),
        None => truncated(names::pod_name(pod)),
    };
    let domain = match spec.subdomain.as_deref().filter(|name| !name.is_empty()) {
        Some(name) if is_label(name) => {
            format!("{name}.{}.svc.{}", names::pod_namespace(pod), dns.cluster_domain)
        }
        Some(name) => return Err(GenerateError::Hostname { field: "spec.subdomain", value: name.to_owned() }),
        None => String::new(),
    };
    Ok(Hostname { host, domain })
}

/// The kernel's host name in the pod: the short one, or the full one with `setHostnameAsFQDN`.
///
/// # Errors
/// The full name does not fit the kernel.
pub fn kernel_hostname(pod: &Pod, name: &Hostname) -> Result<String, GenerateError> {
    let as_fqdn = pod.spec.as_ref().and_then(|spec| spec.set_hostname_as_fqdn).unwrap_or(false);
    match name.fqdn().filter(|_| as_fqdn) {
        None => Ok(name.host.clone()),
        Some(fqdn) if fqdn.len() > MAX_KERNEL_HOSTNAME => Err(GenerateError::FqdnTooLong { fqdn }),
        Some(fqdn) => Ok(fqdn),
    }
}

fn truncated(name: &str) -> String {
    name[..name.floor_char_boundary(MAX_LABEL)].trim_end_matches(['-', '.']).to_owned()
}

/// RFC 1123 label.
fn is_label(text: &str) -> bool {
    text.len() <= MAX_LABEL && has_label_form(text)
}

/// The characters of a label, however many: of a subdomain upstream limits only the whole.
fn has_label_form(text: &str) -> bool {
    let inner = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.iter().all(|b| inner(b) || *b == b'-') && bytes.first().is_some_and(inner) && bytes.last().is_some_and(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dns() -> DnsSettings {
        DnsSettings { cluster_domain: "cluster.local".to_owned(), ..DnsSettings::default() }
    }

    fn pod(spec: serde_json::Value) -> Pod {
        let mut pod: Pod = serde_json::from_value(serde_json::json!({
            "metadata": {"name": "web", "namespace": "ns"}, "spec": {"containers": []}}))
        .expect("a pod");
        let mut full = serde_json::json!({"containers": []});
        full.as_object_mut().expect("an object").extend(spec.as_object().expect("an object").clone());
        pod.spec = serde_json::from_value(full).expect("a spec");
        pod
    }

    #[test]
    fn names_by_spec() {
        let table = [
            (serde_json::json!({}), "web", "", "web"),
            (serde_json::json!({"hostname": "h"}), "h", "", "h"),
            (serde_json::json!({"hostname": "h", "subdomain": "s"}), "h", "s.ns.svc.cluster.local", "h"),
            (
                serde_json::json!({"subdomain": "s", "setHostnameAsFQDN": true}),
                "web",
                "s.ns.svc.cluster.local",
                "web.s.ns.svc.cluster.local",
            ),
            (serde_json::json!({"setHostnameAsFQDN": true}), "web", "", "web"),
            (serde_json::json!({"hostnameOverride": "a.b", "subdomain": "s"}), "a.b", "", "a.b"),
        ];
        for (spec, host, domain, kernel) in table {
            let pod = pod(spec.clone());
            let name = hostname(&pod, &dns()).expect("valid");
            assert_eq!((name.host.as_str(), name.domain.as_str()), (host, domain), "{spec}");
            assert_eq!(kernel_hostname(&pod, &name).expect("fits"), kernel, "{spec}");
        }
    }

    #[test]
    fn long_pod_names_are_cut_to_a_label() {
        let mut pod = pod(serde_json::json!({}));
        pod.metadata.name = Some(format!("{}-.x", "a".repeat(61)));
        assert_eq!(hostname(&pod, &dns()).expect("valid").host, "a".repeat(61));
    }

    #[test]
    fn long_overrides_are_cut_to_a_label() {
        for (name, expected) in [("a".repeat(64), "a".repeat(63)), (format!("{}.b", "a".repeat(62)), "a".repeat(62))] {
            let pod = pod(serde_json::json!({"hostnameOverride": name}));
            let name = hostname(&pod, &dns()).expect("valid");
            assert_eq!((kernel_hostname(&pod, &name).expect("fits"), name.host), (expected.clone(), expected));
        }
    }

    #[test]
    fn without_the_gate_an_override_is_ignored() {
        let dns = DnsSettings { ignores_override: true, ..dns() };
        for name in ["a.b", "a..b"] {
            let pod = pod(serde_json::json!({"hostname": "h", "subdomain": "s", "hostnameOverride": name}));
            let name = hostname(&pod, &dns).expect("valid");
            assert_eq!((name.host.as_str(), name.domain.as_str()), ("h", "s.ns.svc.cluster.local"));
        }
    }

    #[test]
    fn bad_names_are_refused() {
        for (spec, field) in [
            (serde_json::json!({"hostname": "UPPER"}), "spec.hostname"),
            (serde_json::json!({"subdomain": "a.b"}), "spec.subdomain"),
            (serde_json::json!({"hostnameOverride": "a..b"}), "spec.hostnameOverride"),
        ] {
            let error = hostname(&pod(spec), &dns()).expect_err("invalid").to_string();
            assert!(error.contains(field), "{error}");
        }
        let pod = pod(serde_json::json!({"subdomain": "s".repeat(60), "setHostnameAsFQDN": true}));
        let name = hostname(&pod, &dns()).expect("valid");
        let error = kernel_hostname(&pod, &name).expect_err("too long").to_string();
        assert!(error.starts_with("failed to construct FQDN from pod hostname and cluster domain, "), "{error}");
    }
}
