//! Content of the hosts file that the agent manages for a pod. Pure.

use k8s_openapi::api::core::v1::HostAlias;

use super::Hostname;

const MANAGED: &str = "# Kubernetes-managed hosts file.\n";
const MANAGED_HOST_NETWORK: &str = "# Kubernetes-managed hosts file (host network).\n";
const LOCAL: &str = "127.0.0.1\tlocalhost\n\
    ::1\tlocalhost ip6-localhost ip6-loopback\n\
    fe00::0\tip6-localnet\n\
    fe00::0\tip6-mcastprefix\n\
    fe00::1\tip6-allnodes\n\
    fe00::2\tip6-allrouters\n";

/// The file for a pod with its own network: local names, the pod's own ones, `hostAliases`.
pub fn pod_hosts(ips: &[String], name: &Hostname, aliases: &[HostAlias]) -> String {
    let mut text = format!("{MANAGED}{LOCAL}");
    for ip in ips {
        match name.fqdn() {
            Some(fqdn) => text.push_str(&format!("{ip}\t{fqdn}\t{}\n", name.host)),
            None => text.push_str(&format!("{ip}\t{}\n", name.host)),
        }
    }
    push_aliases(&mut text, aliases);
    text
}

/// The file for a pod on the host's network: the node's own file and `hostAliases`.
pub fn host_network_hosts(node_file: &str, aliases: &[HostAlias]) -> String {
    let mut text = format!("{MANAGED_HOST_NETWORK}{node_file}");
    push_aliases(&mut text, aliases);
    text
}

fn push_aliases(text: &mut String, aliases: &[HostAlias]) {
    if aliases.is_empty() {
        return;
    }
    text.push_str("\n# Entries added by HostAliases.\n");
    for alias in aliases {
        let names = alias.hostnames.as_deref().unwrap_or_default().join("\t");
        text.push_str(&format!("{}\t{names}\n", alias.ip));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alias() -> HostAlias {
        HostAlias { ip: "192.0.2.9".into(), hostnames: Some(vec!["a".into(), "b".into()]) }
    }

    #[test]
    fn own_network() {
        let name = Hostname { host: "web".into(), domain: "s.ns.svc.local".into() };
        let text = pod_hosts(&["10.0.0.1".into()], &name, &[alias()]);
        assert!(text.starts_with("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-"));
        assert!(
            text.ends_with("10.0.0.1\tweb.s.ns.svc.local\tweb\n\n# Entries added by HostAliases.\n192.0.2.9\ta\tb\n")
        );
    }

    #[test]
    fn every_address_of_a_pod_has_its_names() {
        for (domain, names) in [("s.ns.svc.local", "web.s.ns.svc.local\tweb"), ("", "web")] {
            let name = Hostname { host: "web".into(), domain: domain.into() };
            let text = pod_hosts(&["10.0.0.1".into(), "fd00::1".into()], &name, &[]);
            assert_eq!(text, format!("{MANAGED}{LOCAL}10.0.0.1\t{names}\nfd00::1\t{names}\n"));
        }
    }

    #[test]
    fn an_alias_without_names_has_a_separator() {
        let text = host_network_hosts("", &[alias(), HostAlias { ip: "192.0.2.10".into(), hostnames: None }]);
        assert!(text.ends_with("\n192.0.2.9\ta\tb\n192.0.2.10\t\n"), "{text:?}");
    }

    #[test]
    fn host_network() {
        let text = host_network_hosts("127.0.0.1 node\n", &[]);
        assert_eq!(text, "# Kubernetes-managed hosts file (host network).\n127.0.0.1 node\n");
    }
}
