//! The required contents of a certificate, and the request for it. Pure but for the signature.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::NodeAddress;
use rcgen::CertificateParams;
use rcgen::DistinguishedName;
use rcgen::DnType;
use rcgen::KeyPair;
use rcgen::PKCS_RSA_SHA256;
use rcgen::SanType;
use rcgen::string::Ia5String;

use super::pair::Leaf;

/// The group of all nodes.
const NODES: &str = "system:nodes";

/// What a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The client certificate.
    Client,
    /// The serving certificate.
    Serving,
}

impl Purpose {
    /// The signer's name.
    pub fn signer(self) -> &'static str {
        match self {
            Self::Client => "kubernetes.io/kube-apiserver-client-kubelet",
            Self::Serving => "kubernetes.io/kubelet-serving",
        }
    }

    /// Usages of a certificate with this key. One of RSA, which only an existing client certificate may have, also enciphers
    /// keys.
    pub fn usages(self, key: &KeyPair) -> Vec<String> {
        let usage = match self {
            Self::Client => "client auth",
            Self::Serving => "server auth",
        };
        let encipherment = key.is_compatible(&PKCS_RSA_SHA256).then_some("key encipherment");
        ["digital signature", usage].into_iter().chain(encipherment).map(str::to_owned).collect()
    }

    /// The prefix of its files.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Client => "kubelet-client",
            Self::Serving => "kubelet-server",
        }
    }
}

/// The required contents of a certificate of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// What it is for.
    pub purpose: Purpose,
    /// CN.
    pub common_name: String,
    /// Alternative names, serving only.
    pub dns_names: BTreeSet<String>,
    /// Alternative addresses, serving only.
    pub ips: BTreeSet<IpAddr>,
}

impl Template {
    /// The client certificate of a node.
    pub fn client(node_name: &str) -> Self {
        Self {
            purpose: Purpose::Client,
            common_name: format!("system:node:{node_name}"),
            dns_names: BTreeSet::new(),
            ips: BTreeSet::new(),
        }
    }

    /// The serving certificate of a node with these addresses. `None` without any IP address: it would not be signed.
    pub fn serving(node_name: &str, addresses: &[NodeAddress]) -> Option<Self> {
        let mut template = Self { purpose: Purpose::Serving, ..Self::client(node_name) };
        for address in addresses.iter().filter(|address| !address.address.is_empty()) {
            let ip = address.address.parse::<IpAddr>().ok();
            match (address.type_.as_str(), ip) {
                ("Hostname" | "InternalIP" | "ExternalIP", Some(ip)) => {
                    template.ips.insert(ip);
                }
                ("Hostname" | "InternalDNS" | "ExternalDNS", _) => {
                    template.dns_names.insert(address.address.clone());
                }
                _ => {}
            }
        }
        (!template.ips.is_empty()).then_some(template)
    }

    /// What `leaf` lacks; `None` if it matches. Additional names are allowed.
    pub fn mismatch(&self, leaf: &Leaf) -> Option<String> {
        if leaf.common_name != self.common_name {
            return Some(format!("it is for {:?} instead of {:?}", leaf.common_name, self.common_name));
        }
        if !leaf.organizations.contains(NODES) {
            return Some(format!("it lacks the organization {NODES:?}"));
        }
        let dns: Vec<String> = self.dns_names.difference(&leaf.dns_names).cloned().collect();
        let ips: Vec<String> = self.ips.difference(&leaf.ips).map(ToString::to_string).collect();
        let missing = [dns, ips].concat();
        (!missing.is_empty()).then(|| format!("it lacks {}", missing.join(", ")))
    }

    /// The request for it, PEM.
    ///
    /// # Errors
    /// A name that is not valid in a certificate.
    pub fn request(&self, key: &KeyPair) -> Result<String, rcgen::Error> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, NODES);
        params.distinguished_name.push(DnType::CommonName, self.common_name.clone());
        // In the order of their texts, as upstream sorts them.
        let ips: std::collections::BTreeMap<String, IpAddr> = self.ips.iter().map(|ip| (ip.to_string(), *ip)).collect();
        for name in &self.dns_names {
            params.subject_alt_names.push(SanType::DnsName(Ia5String::try_from(name.as_str())?));
        }
        params.subject_alt_names.extend(ips.into_values().map(SanType::IpAddress));
        params.serialize_request(key)?.pem()
    }
}

#[cfg(test)]
mod tests {
    use x509_parser::prelude::FromDer as _;
    use x509_parser::prelude::X509CertificationRequest;

    use super::super::testing::pair;
    use super::*;

    fn address(kind: &str, value: &str) -> NodeAddress {
        NodeAddress { type_: kind.to_owned(), address: value.to_owned() }
    }

    #[test]
    fn serving_names_come_from_the_addresses_of_the_node() {
        let names = |addresses: &[(&str, &str)]| {
            let addresses: Vec<NodeAddress> = addresses.iter().map(|(kind, value)| address(kind, value)).collect();
            Template::serving("n", &addresses).map(|t| {
                let ips = t.ips.iter().map(ToString::to_string);
                t.dns_names.iter().cloned().chain(ips).collect::<Vec<_>>().join(" ")
            })
        };
        type Addresses = [(&'static str, &'static str)];
        let table: [(&Addresses, Option<&str>); 8] = [
            (&[], None),
            (&[("InternalIP", "10.0.0.1"), ("Hostname", ""), ("ExternalDNS", "")], Some("10.0.0.1")),
            (&[("Hostname", "n")], None),
            (&[("InternalIP", "10.0.0.1"), ("Hostname", "n")], Some("n 10.0.0.1")),
            (&[("Hostname", "10.0.0.2")], Some("10.0.0.2")),
            (&[("InternalIP", "10.0.0.1"), ("ExternalIP", "10.0.0.1")], Some("10.0.0.1")),
            (&[("InternalIP", "nonsense"), ("ExternalIP", "fd00::1")], Some("fd00::1")),
            (
                &[("InternalIP", "10.0.0.1"), ("InternalDNS", "b"), ("ExternalDNS", "a"), ("Hostname", "a")],
                Some("a b 10.0.0.1"),
            ),
        ];
        for (addresses, expected) in table {
            assert_eq!(names(addresses).as_deref(), expected, "{addresses:?}");
        }
    }

    #[test]
    fn mismatches_with_the_template() {
        let mut leaf = pair("system:node:n", 0, 100).leaf;
        assert_eq!(Template::client("n").mismatch(&leaf), None);
        assert!(Template::client("m").mismatch(&leaf).is_some_and(|why| why.contains("system:node:m")));
        let wanted = Template::serving("n", &[address("InternalIP", "10.0.0.1"), address("Hostname", "n")]);
        let wanted = wanted.expect("a template");
        assert_eq!(wanted.mismatch(&leaf).as_deref(), Some("it lacks n, 10.0.0.1"));
        leaf.dns_names = ["n".to_owned(), "more".to_owned()].into();
        leaf.ips = ["10.0.0.1".parse().expect("an address")].into();
        assert_eq!(wanted.mismatch(&leaf), None, "more than asked for does not matter");
        leaf.organizations.clear();
        assert!(wanted.mismatch(&leaf).is_some_and(|why| why.contains("system:nodes")));
    }

    #[test]
    fn requests_hold_subject_and_names() {
        let wanted = Template::serving("n", &[address("InternalIP", "10.0.0.1"), address("Hostname", "n")]);
        let key = KeyPair::generate().expect("a key");
        let pem = wanted.expect("a template").request(&key).expect("a request");
        let (_, pem) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).expect("PEM");
        let (_, request) = X509CertificationRequest::from_der(&pem.contents).expect("a request");
        request.verify_signature().expect("signed with its own key");
        assert_eq!(request.certification_request_info.subject.to_string(), "O=system:nodes, CN=system:node:n");
        let names = format!("{:?}", request.requested_extensions().expect("extensions").collect::<Vec<_>>());
        assert!(names.contains("DNSName(\"n\")") && names.contains("IPAddress([10, 0, 0, 1])"), "{names}");
    }
}
