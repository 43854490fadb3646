//! A pod's resolver configuration by `dnsPolicy` and `dnsConfig`. Pure: the node's file is passed as text.

use std::net::Ipv6Addr;

use indexmap::IndexMap;
use indexmap::IndexSet;
use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1::DnsConfig;

use super::DnsSettings;
use super::GenerateError;
use super::names;
use crate::model::spec;

/// Limits of common resolvers.
const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCH_PATHS: usize = 32;
const MAX_SEARCH_CHARS: usize = 2048;
const MAX_SEARCH_PATH_CHARS: usize = 253;
/// What names relative to the cluster need.
const CLUSTER_OPTIONS: &str = "ndots:5";

/// A resolver configuration and its warnings.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct PodDns {
    /// For `PodSandboxConfig.dns_config`.
    pub config: DnsConfig,
    /// Warning events due on the pod: reason and message.
    pub warnings: Vec<(&'static str, String)>,
}

/// What a pod's resolver configuration starts from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Base {
    Nothing,
    Cluster,
    Host,
}

/// The resolver configuration of `pod`. `node_file` is the content of the node's resolver file, `None` if the node is
/// configured to have none.
///
/// # Errors
/// The node's file is not valid.
pub fn pod_dns(pod: &Pod, settings: &DnsSettings, node_file: Option<&str>) -> Result<PodDns, GenerateError> {
    let mut host = match node_file {
        Some(text) => parse_resolv_conf(text)?,
        None => own_loopback(&settings.node_ips.now()),
    };
    if !spec::host_network(pod) {
        host.servers.retain(|server| !is_scoped(server));
    }
    let mut dns = PodDns::default();
    dns.config = match base(pod) {
        Base::Nothing => DnsConfig::default(),
        Base::Cluster if !settings.cluster_dns.is_empty() => cluster(pod, settings, node_file.map(|_| &host)),
        Base::Cluster => {
            let message = "kubelet does not have ClusterDNS IP configured and cannot create Pod using \
                \"ClusterFirst\" policy. Falling back to \"Default\" policy.";
            dns.warnings.push(("MissingClusterDNS", format!("pod: {:?}. {message}", names::describe(pod))));
            host
        }
        Base::Host => host,
    };
    append_own(pod, &mut dns.config);
    fit_limits(&mut dns);
    Ok(dns)
}

fn base(pod: &Pod) -> Base {
    let Some(pod_spec) = &pod.spec else { return Base::Host };
    match pod_spec.dns_policy.as_deref() {
        Some("None") => Base::Nothing,
        Some("Default") => Base::Host,
        Some("ClusterFirst") if spec::host_network(pod) => Base::Host,
        _ => Base::Cluster,
    }
}

/// A link-local IPv6 address with an interface of the node (`fe80::1%eth0`), which a network namespace of its own does not
/// have. A resolver that selects this server fails. Upstream 1.36 and 1.37 pass it on.
fn is_scoped(server: &str) -> bool {
    let address = server.split_once('%').and_then(|(address, _)| address.parse::<Ipv6Addr>().ok());
    address.is_some_and(|address| address.is_unicast_link_local())
}

fn cluster(pod: &Pod, settings: &DnsSettings, host: Option<&DnsConfig>) -> DnsConfig {
    let mut searches = Vec::new();
    let domain = &settings.cluster_domain;
    if !domain.is_empty() {
        searches.push(format!("{}.svc.{domain}", names::pod_namespace(pod)));
        searches.push(format!("svc.{domain}"));
        searches.push(domain.clone());
    }
    searches.extend(host.into_iter().flat_map(|host| host.searches.iter().cloned()));
    DnsConfig {
        servers: settings.cluster_dns.clone(),
        searches: deduplicated(searches),
        options: vec![CLUSTER_OPTIONS.to_owned()],
    }
}

/// A node without resolver file uses its loopback addresses.
fn own_loopback(node_ips: &[String]) -> DnsConfig {
    let mut servers: Vec<String> =
        node_ips.iter().map(|ip| if ip.contains(':') { "::1" } else { "127.0.0.1" }.to_owned()).collect();
    if servers.is_empty() {
        servers.push("127.0.0.1".to_owned());
    }
    DnsConfig { servers: deduplicated(servers), searches: vec![".".to_owned()], options: Vec::new() }
}

/// Nameservers accumulate, the last `search` line applies, options merge by name.
fn parse_resolv_conf(text: &str) -> Result<DnsConfig, GenerateError> {
    let mut config = DnsConfig::default();
    for (number, line) in text.lines().enumerate() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("nameserver") => match words.next() {
                Some(server) => config.servers.push(server.to_owned()),
                None => return Err(GenerateError::ResolvConf { line: number + 1 }),
            },
            Some("search") => {
                let paths = words.map(|path| path.strip_suffix('.').unwrap_or(path)).filter(|path| !path.is_empty());
                config.searches = paths.map(str::to_owned).collect();
            }
            Some("options") => merge_options(&mut config.options, words.map(str::to_owned)),
            _ => {}
        }
    }
    Ok(config)
}

fn append_own(pod: &Pod, config: &mut DnsConfig) {
    let Some(own) = pod.spec.as_ref().and_then(|spec| spec.dns_config.as_ref()) else { return };
    config.servers.extend(own.nameservers.iter().flatten().cloned());
    config.servers = deduplicated(std::mem::take(&mut config.servers));
    config.searches.extend(own.searches.iter().flatten().cloned());
    config.searches = deduplicated(std::mem::take(&mut config.searches));
    let options = own.options.iter().flatten().filter_map(|option| {
        let name = option.name.as_deref()?;
        Some(match option.value.as_deref() {
            Some(value) if !value.is_empty() => format!("{name}:{value}"),
            _ => name.to_owned(),
        })
    });
    merge_options(&mut config.options, options);
}

/// A later option replaces an earlier one of the same name, in its place.
fn merge_options(options: &mut Vec<String>, more: impl Iterator<Item = String>) {
    let named = |option: String| {
        let name = option.split_once(':').map_or(option.as_str(), |(name, _)| name);
        (name.to_owned(), option)
    };
    let merged: IndexMap<String, String> = std::mem::take(options).into_iter().chain(more).map(named).collect();
    options.extend(merged.into_values());
}

fn deduplicated(list: Vec<String>) -> Vec<String> {
    list.into_iter().collect::<IndexSet<String>>().into_iter().collect()
}

fn fit_limits(dns: &mut PodDns) {
    let config = &mut dns.config;
    if config.servers.len() > MAX_NAMESERVERS {
        config.servers.truncate(MAX_NAMESERVERS);
        let message = format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
            config.servers.join(" ")
        );
        dns.warnings.push(("DNSConfigForming", message));
    }
    let given = config.searches.len();
    config.searches.truncate(MAX_SEARCH_PATHS);
    config.searches.retain(|path| path.len() <= MAX_SEARCH_PATH_CHARS);
    let mut length = 0;
    let fitting = config.searches.iter().take_while(|path| {
        length += path.len() + usize::from(length > 0);
        length <= MAX_SEARCH_CHARS
    });
    let fitting = fitting.count();
    config.searches.truncate(fitting);
    if config.searches.len() < given {
        let message = format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            config.searches.join(" ")
        );
        dns.warnings.push(("DNSConfigForming", message));
    }
}

/// The first limit of pods' resolver files that the node's own file exceeds, as upstream's message. `path` is the file's.
/// With a cluster domain, pods get three search paths of the cluster in front.
pub fn exceeded_limit(text: &str, path: &str, has_cluster_domain: bool) -> Option<String> {
    let searches = match parse_resolv_conf(text) {
        Ok(config) => config.searches,
        Err(error) => return Some(error.to_string()),
    };
    let most = if has_cluster_domain { MAX_SEARCH_PATHS - 3 } else { MAX_SEARCH_PATHS };
    if searches.len() > most {
        return Some(format!("Resolv.conf file '{path}' contains search line consisting of more than {most} domains!"));
    }
    if searches.iter().any(|search| search.len() > MAX_SEARCH_PATH_CHARS) {
        return Some(format!(
            "Resolv.conf file {path:?} contains a search path which length is more than allowed {MAX_SEARCH_PATH_CHARS} chars!"
        ));
    }
    let length = searches.join(" ").len();
    (length > MAX_SEARCH_CHARS).then(|| {
        format!(
            "Resolv.conf file '{path}' contains search line which length is more than allowed {MAX_SEARCH_CHARS} chars!"
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const NODE_FILE: &str = "# comment\nnameserver 192.0.2.1\nnameserver 192.0.2.2\nsearch old.example\n\
        search corp.example. . lab.example\noptions ndots:1 rotate\noptions ndots:2\n";

    fn pod(spec: serde_json::Value) -> Pod {
        let mut full = json!({"containers": []});
        full.as_object_mut().expect("an object").extend(spec.as_object().expect("an object").clone());
        serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"}, "spec": full}))
            .expect("a pod")
    }

    fn settings() -> DnsSettings {
        DnsSettings {
            cluster_dns: vec!["10.96.0.10".into()],
            cluster_domain: "cluster.local".into(),
            ignores_override: false,
            node_ips: vec!["192.0.2.77".into()].into(),
        }
    }

    fn joined(config: &DnsConfig) -> String {
        format!("{} | {} | {}", config.servers.join(" "), config.searches.join(" "), config.options.join(" "))
    }

    #[test]
    fn many_options_are_merged_in_time() {
        let many = || (0..400_000).map(|number| format!("o{number}:x"));
        let mut options = vec!["o7".to_owned(), "ndots:5".to_owned()];
        merge_options(&mut options, many());
        assert_eq!((options.len(), options[0].as_str(), options[1].as_str()), (400_001, "o7:x", "ndots:5"));
        let (once, twice) = (many().collect::<Vec<_>>(), many().chain(many()).collect());
        assert!(deduplicated(twice) == once, "in pairs: 160 billion comparisons");
    }

    #[test]
    fn policies() {
        let host = "192.0.2.1 192.0.2.2 | corp.example lab.example | ndots:2 rotate";
        let cluster = "10.96.0.10 | ns.svc.cluster.local svc.cluster.local cluster.local corp.example lab.example | \
            ndots:5";
        let own = json!({"nameservers": ["192.0.2.2", "9.9.9.9"], "searches": ["corp.example", "x"],
            "options": [{"name": "ndots", "value": "3"}, {"name": "edns0"}]});
        let table = [
            (json!({"dnsPolicy": "Default"}), host),
            (json!({"dnsPolicy": "ClusterFirst"}), cluster),
            (json!({}), cluster),
            (json!({"dnsPolicy": "ClusterFirst", "hostNetwork": true}), host),
            (json!({"dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": true}), cluster),
            (json!({"dnsPolicy": "None"}), " |  | "),
            (json!({"dnsPolicy": "None", "dnsConfig": own}), "192.0.2.2 9.9.9.9 | corp.example x | ndots:3 edns0"),
            (
                json!({"dnsPolicy": "Default", "dnsConfig": own}),
                "192.0.2.1 192.0.2.2 9.9.9.9 | corp.example lab.example x | ndots:3 rotate edns0",
            ),
        ];
        for (spec, expected) in table {
            let dns = pod_dns(&pod(spec.clone()), &settings(), Some(NODE_FILE)).expect("valid");
            assert_eq!(joined(&dns.config), expected, "{spec}");
            assert_eq!(dns.warnings, [], "{spec}");
        }
    }

    #[test]
    fn without_cluster_dns_the_hosts_servers_are_used_with_a_warning() {
        let bare = DnsSettings { cluster_dns: Vec::new(), ..settings() };
        let dns = pod_dns(&pod(json!({})), &bare, Some("nameserver 192.0.2.1\n")).expect("valid");
        assert_eq!(joined(&dns.config), "192.0.2.1 |  | ");
        assert_eq!(dns.warnings[0].0, "MissingClusterDNS");
        assert!(dns.warnings[0].1.starts_with("pod: \"p_ns(u)\". kubelet does not have ClusterDNS IP configured"));
    }

    #[test]
    fn servers_behind_an_interface_of_the_node_are_for_its_own_network() {
        let file = "nameserver fe80::1%3\nnameserver 192.0.2.1\nnameserver fe80::2%eth0\nnameserver fe80::3\n\
            nameserver 2001:db8::1%3\n";
        let servers = |spec: serde_json::Value, settings: &DnsSettings| {
            pod_dns(&pod(spec), settings, Some(file)).expect("valid").config.servers.join(" ")
        };
        let without_cluster_dns = DnsSettings { cluster_dns: Vec::new(), ..settings() };
        let own = json!({"dnsPolicy": "Default", "dnsConfig": {"nameservers": ["fe80::9%eth0"]}});
        for (spec, settings, expected) in [
            (json!({"dnsPolicy": "Default"}), settings(), "192.0.2.1 fe80::3 2001:db8::1%3"),
            (json!({}), without_cluster_dns, "192.0.2.1 fe80::3 2001:db8::1%3"),
            (json!({"dnsPolicy": "Default", "hostNetwork": true}), settings(), "fe80::1%3 192.0.2.1 fe80::2%eth0"),
            (json!({"dnsPolicy": "ClusterFirst", "hostNetwork": true}), settings(), "fe80::1%3 192.0.2.1 fe80::2%eth0"),
        ] {
            assert_eq!(servers(spec.clone(), &settings), expected, "{spec}");
        }
        let few = pod_dns(&pod(own), &settings(), Some("nameserver fe80::1%3\nnameserver 192.0.2.1\n")).expect("valid");
        assert_eq!(few.config.servers, ["192.0.2.1", "fe80::9%eth0"], "the pod's own are its author's");
    }

    #[test]
    fn the_nodes_own_file_may_exceed_limits() {
        let file = |count: usize, length: usize| {
            let path = |number: usize| format!("{number:0>length$}");
            format!("search {}\n", (0..count).map(path).collect::<Vec<_>>().join(" "))
        };
        let message = |text: &str, cluster: bool| exceeded_limit(text, "/etc/resolv.conf", cluster);
        assert_eq!(message(&file(32, 5), false), None);
        let expected = "Resolv.conf file '/etc/resolv.conf' contains search line consisting of more than 32 domains!";
        assert_eq!(message(&file(33, 5), false).as_deref(), Some(expected));
        assert_eq!(message(&file(29, 5), true), None);
        let expected = "Resolv.conf file '/etc/resolv.conf' contains search line consisting of more than 29 domains!";
        assert_eq!(message(&file(30, 5), true).as_deref(), Some(expected));
        let expected = "Resolv.conf file \"/etc/resolv.conf\" contains a search path which length is more than allowed \
                        253 chars!";
        assert_eq!(message(&file(1, 254), false).as_deref(), Some(expected));
        let expected = "Resolv.conf file '/etc/resolv.conf' contains search line which length is more than allowed 2048 \
                        chars!";
        assert_eq!(message(&file(20, 103), false).as_deref(), Some(expected));
        assert_eq!(message(&file(8, 253), false), None);
    }

    #[test]
    fn a_node_without_resolver_file_answers_itself() {
        let dns = pod_dns(&pod(json!({"dnsPolicy": "Default"})), &settings(), None).expect("valid");
        assert_eq!(joined(&dns.config), "127.0.0.1 | . | ");
        let dns = pod_dns(&pod(json!({})), &settings(), None).expect("valid");
        assert_eq!(dns.config.searches.last().map(String::as_str), Some("cluster.local"));
    }

    #[test]
    fn an_empty_nameserver_is_an_error_with_its_line() {
        let error = pod_dns(&pod(json!({})), &settings(), Some("search a\nnameserver\n")).expect_err("invalid");
        assert!(error.to_string().contains("line 2"), "{error}");
    }

    #[test]
    fn limits_truncate_and_warn() {
        let many: Vec<String> = (0..40).map(|n| format!("d{n}.example")).collect();
        let own = json!({"nameservers": ["192.0.2.3", "192.0.2.4", "192.0.2.5", "192.0.2.6"], "searches": many});
        let dns = pod_dns(&pod(json!({"dnsPolicy": "None", "dnsConfig": own})), &settings(), None).expect("valid");
        assert_eq!(dns.config.servers, ["192.0.2.3", "192.0.2.4", "192.0.2.5"]);
        assert_eq!(dns.config.searches, many[..32]);
        let reasons: Vec<&str> = dns.warnings.iter().map(|(reason, _)| *reason).collect();
        assert_eq!(reasons, ["DNSConfigForming"; 2]);
        assert!(dns.warnings[0].1.ends_with("nameserver line is: 192.0.2.3 192.0.2.4 192.0.2.5"), "{:?}", dns.warnings);
        let long: Vec<String> = (0..20).map(|n| format!("{n}{}", "x".repeat(199))).collect();
        let own = json!({"searches": long});
        let dns = pod_dns(&pod(json!({"dnsPolicy": "None", "dnsConfig": own})), &settings(), None).expect("valid");
        assert_eq!(dns.config.searches, long[..10], "2009 characters; another path makes 2211");
        let own = json!({"searches": ["y".repeat(254), "ok"]});
        let dns = pod_dns(&pod(json!({"dnsPolicy": "None", "dnsConfig": own})), &settings(), None).expect("valid");
        assert_eq!(dns.config.searches, ["ok"]);
    }
}
