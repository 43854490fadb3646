//! Sysctls of pods (KEP-34): safe ones, and unsafe ones that `allowedUnsafeSysctls` allows. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;

use super::Decision;
use super::Input;
use crate::model::SysctlNamespace;
use crate::model::spec;

/// Safe sysctls and the first kernel that has each of them in a namespace.
/// <https://kubernetes.io/docs/tasks/administer-cluster/sysctl-cluster/#safe-and-unsafe-sysctls>
const SAFE: [(&str, (u32, u32)); 14] = [
    ("kernel.shm_rmid_forced", (0, 0)),
    ("net.ipv4.ip_local_port_range", (0, 0)),
    ("net.ipv4.tcp_syncookies", (0, 0)),
    ("net.ipv4.ping_group_range", (0, 0)),
    ("net.ipv4.ip_unprivileged_port_start", (0, 0)),
    ("net.ipv4.ip_local_reserved_ports", (3, 16)),
    ("net.ipv4.tcp_keepalive_time", (4, 5)),
    ("net.ipv4.tcp_keepalive_intvl", (4, 5)),
    ("net.ipv4.tcp_keepalive_probes", (4, 5)),
    ("net.ipv4.tcp_fin_timeout", (4, 6)),
    ("net.ipv4.tcp_rmem", (4, 15)),
    ("net.ipv4.tcp_wmem", (4, 15)),
    ("net.ipv4.tcp_slow_start_after_idle", (4, 15)),
    ("net.ipv4.tcp_notsent_lowat", (4, 6)),
];

/// Which namespaces a pod shares with the host.
#[derive(Clone, Copy, Debug, Default)]
struct HostNamespaces {
    network: bool,
    ipc: bool,
    users: bool,
}

impl HostNamespaces {
    fn of(spec: &PodSpec) -> Self {
        Self {
            network: spec.host_network == Some(true),
            ipc: spec.host_ipc == Some(true),
            users: spec.host_users != Some(false),
        }
    }
}

/// A pattern of `allowedUnsafeSysctls` that no kernel namespace is known for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the sysctls {0:?} are not known to be namespaced")]
pub struct UnknownSysctlNamespace(String);

/// The sysctls that pods may set on this node.
#[derive(Clone, Debug, Default)]
pub struct SysctlAllowlist {
    names: BTreeMap<String, SysctlNamespace>,
    prefixes: BTreeMap<String, SysctlNamespace>,
}

impl SysctlAllowlist {
    /// The safe sysctls of a kernel, by its version, and the administrator's patterns: names, or prefixes that end in
    /// `*`. With an unknown kernel only those count as safe that every kernel has.
    ///
    /// # Errors
    /// A pattern of sysctls that are not namespaced.
    pub fn new(kernel: Option<(u32, u32)>, patterns: &[String]) -> Result<Self, UnknownSysctlNamespace> {
        let mut list = Self::default();
        let kernel = kernel.unwrap_or_default();
        for (name, _) in SAFE.into_iter().filter(|(_, since)| kernel >= *since) {
            list.allow(name.to_owned())?;
        }
        for pattern in patterns {
            list.allow(spec::dotted_sysctl(pattern))?;
        }
        Ok(list)
    }

    fn allow(&mut self, pattern: String) -> Result<(), UnknownSysctlNamespace> {
        let (name, list) = match pattern.strip_suffix('*') {
            Some(prefix) => (prefix, &mut self.prefixes),
            None => (pattern.as_str(), &mut self.names),
        };
        let Some(namespace) = SysctlNamespace::of(name) else { return Err(UnknownSysctlNamespace(pattern)) };
        list.insert(name.to_owned(), namespace);
        Ok(())
    }

    /// Names before prefixes.
    fn namespace(&self, name: &str) -> Option<SysctlNamespace> {
        let by_prefix = || self.prefixes.iter().find(|(prefix, _)| name.starts_with(prefix.as_str()));
        self.names.get(name).or_else(|| by_prefix().map(|(_, namespace)| namespace)).copied()
    }

    /// Why a pod with these namespaces of the host may not set this sysctl.
    fn problem(&self, name: &str, host: HostNamespaces) -> Option<String> {
        let Some(namespace) = self.namespace(name).filter(|_| is_plain(name)) else {
            return Some(format!("{name:?} not allowlisted"));
        };
        let shared = match namespace {
            SysctlNamespace::Net => host.network,
            SysctlNamespace::Ipc => host.ipc,
            SysctlNamespace::User => host.users,
            // The pods that share it are those that share the network, and the runtime refuses to set it for them.
            SysctlNamespace::Uts => false,
        };
        shared.then(|| format!("{name:?} not allowed with host {namespace} enabled"))
    }
}

/// A name that cannot leave `/proc/sys`: no empty component, and so neither `..` nor a leading separator.
fn is_plain(name: &str) -> bool {
    let printable = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '/' | '-' | '_'));
    printable && name.split(['.', '/']).all(|part| !part.is_empty())
}

pub(super) fn check(input: Input<'_>) -> Decision {
    let Some(spec) = input.pod.spec.as_ref() else { return Decision::Admit };
    let host = HostNamespaces::of(spec);
    let mut sysctls = spec.security_context.iter().flat_map(|context| context.sysctls.iter().flatten());
    let problem = sysctls.find_map(|sysctl| input.node.sysctls.problem(&spec::dotted_sysctl(&sysctl.name), host));
    problem
        .map_or(Decision::Admit, |problem| Decision::reject("SysctlForbidden", format!("forbidden sysctl: {problem}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::NodeOffer;
    use super::super::testing;
    use super::*;

    const OWN: HostNamespaces = HostNamespaces { network: false, ipc: false, users: false };

    fn list(kernel: Option<(u32, u32)>, patterns: &[&str]) -> Result<SysctlAllowlist, UnknownSysctlNamespace> {
        SysctlAllowlist::new(kernel, &patterns.iter().map(|pattern| (*pattern).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn safe_sysctls_depend_on_the_kernel() {
        let old = list(Some((4, 4)), &[]).expect("a list");
        let new = list(Some((6, 1)), &[]).expect("a list");
        let unknown = list(None, &[]).expect("a list");
        for name in ["kernel.shm_rmid_forced", "net.ipv4.ping_group_range", "net.ipv4.ip_unprivileged_port_start"] {
            for kernel in [&old, &new, &unknown] {
                assert_eq!(kernel.problem(name, OWN), None, "{name}");
            }
        }
        assert_eq!(old.problem("net.ipv4.ip_local_reserved_ports", OWN), None);
        for name in [
            "net.ipv4.tcp_keepalive_time",
            "net.ipv4.tcp_keepalive_intvl",
            "net.ipv4.tcp_keepalive_probes",
            "net.ipv4.tcp_fin_timeout",
            "net.ipv4.tcp_rmem",
            "net.ipv4.tcp_wmem",
            "net.ipv4.tcp_slow_start_after_idle",
            "net.ipv4.tcp_notsent_lowat",
        ] {
            assert_eq!(new.problem(name, OWN), None, "{name}");
            for kernel in [&old, &unknown] {
                assert_eq!(kernel.problem(name, OWN), Some(format!("{name:?} not allowlisted")));
            }
        }
    }

    #[test]
    fn unsafe_sysctls_are_allowed_by_name_or_prefix() {
        let list = list(Some((6, 1)), &["kernel.msg*", "net/core/somaxconn", "net.ipv4.conf.*"]).expect("a list");
        for name in ["kernel.msgmax", "net.core.somaxconn", "net.ipv4.conf.all.rp_filter"] {
            assert_eq!(list.problem(name, OWN), None, "{name}");
        }
        for name in ["kernel.sem", "net.core.somaxconn2", "net.ipv4.ip_forward", "kernel.panic", ""] {
            assert_eq!(list.problem(name, OWN), Some(format!("{name:?} not allowlisted")));
        }
        for name in ["net.ipv4.conf...kernel.panic", "net.ipv4.conf.", "net.ipv4.conf.a\nb"] {
            assert!(list.problem(name, OWN).is_some(), "{name}");
        }
    }

    #[test]
    fn host_namespaces_forbid_safe_sysctls_too() {
        let list = list(Some((6, 1)), &["net.core.*"]).expect("a list");
        let host_network = HostNamespaces { network: true, ..OWN };
        let net = |name: &str| Some(format!("{name:?} not allowed with host Net enabled"));
        assert_eq!(list.problem("net.ipv4.tcp_syncookies", host_network), net("net.ipv4.tcp_syncookies"));
        assert_eq!(
            list.problem("net.core.somaxconn", HostNamespaces { ipc: true, ..host_network }),
            net("net.core.somaxconn")
        );
        assert_eq!(list.problem("kernel.shm_rmid_forced", host_network), None);
        let ipc = "\"kernel.shm_rmid_forced\" not allowed with host IPC enabled".to_owned();
        assert_eq!(list.problem("kernel.shm_rmid_forced", HostNamespaces { ipc: true, ..OWN }), Some(ipc));
    }

    #[test]
    fn sysctls_of_user_namespaces_need_one_of_the_pod() {
        let list = list(Some((6, 1)), &["user.*", "kernel.domainname"]).expect("a list");
        let shared = HostNamespaces { users: true, ..OWN };
        let problem = "\"user.max_user_namespaces\" not allowed with host User enabled".to_owned();
        assert_eq!(list.problem("user.max_user_namespaces", shared), Some(problem));
        assert_eq!(list.problem("user.max_user_namespaces", OWN), None);
        assert_eq!(list.problem("kernel.domainname", shared), None);
        assert!(HostNamespaces::of(&PodSpec::default()).users, "by default");
    }

    #[test]
    fn what_the_pod_shares_with_the_host_decides() {
        let sysctls = list(Some((6, 1)), &["user.*"]).expect("a list").into();
        let node = NodeOffer { sysctls, ..NodeOffer::default() };
        let (net, ipc, user) = ("net.ipv4.tcp_syncookies", "kernel.shm_rmid_forced", "user.max_user_namespaces");
        for (mut spec, name, shared) in [
            (json!({"hostNetwork": true}), net, Some("Net")),
            (json!({"hostNetwork": true}), ipc, None),
            (json!({"hostIPC": true}), ipc, Some("IPC")),
            (json!({"hostIPC": true, "hostPID": true}), net, None),
            (json!({}), user, Some("User")),
            (json!({"hostUsers": true}), user, Some("User")),
            (json!({"hostUsers": false}), user, None),
        ] {
            spec["containers"] = json!([]);
            spec["securityContext"] = json!({"sysctls": [{"name": name, "value": "1"}]});
            let pod = serde_json::from_value(json!({"spec": spec})).expect("a pod");
            let expected = shared.map_or(Decision::Admit, |shared| {
                let problem = format!("forbidden sysctl: {name:?} not allowed with host {shared} enabled");
                Decision::reject("SysctlForbidden", problem)
            });
            assert_eq!(check(testing::input(&pod, &node)), expected, "{spec}");
        }
    }

    #[test]
    fn patterns_must_be_namespaced() {
        for pattern in ["kernel.panic", "vm.*", "kernel.*", "users.x", "kernel.shm_next_id", "kernel.msg_*", "fs.mq*"] {
            let error = list(None, &[pattern]).expect_err(pattern);
            assert_eq!(error.to_string(), format!("the sysctls {pattern:?} are not known to be namespaced"));
        }
    }

    #[test]
    fn sysctls_of_the_ipc_namespace_have_names_and_two_prefixes() {
        let names = "sem shmall shmmax shmmni shm_rmid_forced msgmax msgmnb msgmni shm* msg* sem*";
        let names = names.split(' ').map(|name| format!("kernel.{name}"));
        for pattern in names.chain(["fs.mqueue.msg_max".to_owned(), "fs.mqueue.*".to_owned()]) {
            let list = list(None, &[&pattern]).expect("a list");
            let name = pattern.replace('*', "_x");
            let host = HostNamespaces { ipc: true, ..OWN };
            assert_eq!(list.problem(&name, host), Some(format!("{name:?} not allowed with host IPC enabled")));
        }
    }

    #[test]
    fn slashes_and_dots() {
        for (name, expected) in [
            ("net.ipv4.tcp_syncookies", "net.ipv4.tcp_syncookies"),
            ("net/ipv4/tcp_syncookies", "net.ipv4.tcp_syncookies"),
            ("net/ipv4/conf/eth0.1/forwarding", "net.ipv4.conf.eth0/1.forwarding"),
            ("net.ipv4.conf.eth0/1.forwarding", "net.ipv4.conf.eth0/1.forwarding"),
        ] {
            assert_eq!(spec::dotted_sysctl(name), expected);
        }
    }

    #[test]
    fn the_first_forbidden_sysctl_is_named() {
        let sysctls = json!([
            {"name": "net/ipv4/tcp_syncookies", "value": "1"},
            {"name": "kernel/msgmax", "value": "1"},
            {"name": "vm.swappiness", "value": "1"},
        ]);
        let pod = json!({"spec": {"containers": [], "securityContext": {"sysctls": sysctls}}});
        let pod = serde_json::from_value(pod).expect("a pod");
        let node = |patterns: &[&str]| {
            let sysctls = list(Some((6, 1)), patterns).expect("a list").into();
            NodeOffer { sysctls, ..NodeOffer::default() }
        };
        let message = |name: &str| format!("forbidden sysctl: {name:?} not allowlisted");
        let rejected = |name: &str| Decision::reject("SysctlForbidden", message(name));
        assert_eq!(check(testing::input(&pod, &node(&[]))), rejected("kernel.msgmax"));
        assert_eq!(check(testing::input(&pod, &node(&["kernel.msg*"]))), rejected("vm.swappiness"));
    }
}
