//! Names, folders and configuration of one private runtime. Creates only the folder.

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::Cache;
use keblet_peers::PAUSE_IMAGE;
use serde_json::json;

/// Names of bridges begin with this and end with the id of the runtime.
pub(crate) const BRIDGE_PREFIX: &str = "keb-";
/// How many networks are tried.
const ATTEMPTS: usize = 100;

/// The cgroup driver that containerd reports and that runc uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Driver {
    /// Both cgroupfs.
    Cgroupfs,
    /// containerd reports systemd; runc writes cgroup files, as no systemd runs beside it.
    ReportedSystemd,
    /// Both systemd.
    Systemd,
}

/// Names and paths of one private runtime.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The folder of all its files.
    pub dir: PathBuf,
    /// The bridge its pods are attached to.
    pub bridge: String,
    /// The cgroup for pods, as a path from the root of each hierarchy.
    pub cgroup_root: String,
    /// How containers' cgroups are made.
    pub driver: Driver,
    /// Containers are made by the runc that was built, instead of the distribution's.
    pub current_runc: bool,
    /// Containers get a negative `oom_score_adj` and AppArmor profiles.
    pub unrestricted: bool,
    /// Second and third number of the pods' network `10.a.b.0/24`.
    network: (u8, u8),
    /// Keeps other runtimes from choosing the network.
    _reservation: Option<UnixListener>,
}

impl Layout {
    /// Chooses unused names and creates the folder.
    ///
    /// # Errors
    /// The folder cannot be created, or no unused network was found.
    pub(crate) fn create(dir: Option<PathBuf>, driver: Driver, current_runc: bool) -> Result<Self> {
        // The default seed is the time: processes that begin at the same moment would choose the same names and addresses.
        fastrand::seed((u64::from(std::process::id()) << 32) ^ fastrand::u64(..));
        let id = format!("{:06x}", fastrand::u32(..1 << 24));
        let dir = match dir {
            Some(dir) => {
                std::path::absolute(&dir).with_context(|| format!("no absolute path for {}", dir.display()))?
            }
            None => std::env::temp_dir().join(format!("keblet-{id}")),
        };
        let (network, reservation) = own_network()?;
        let layout = Self {
            bridge: format!("{BRIDGE_PREFIX}{id}"),
            cgroup_root: format!("/keblet-{id}"),
            driver,
            current_runc,
            unrestricted: false,
            network,
            _reservation: Some(reservation),
            dir,
        };
        for folder in [&layout.dir, &layout.cni_conf(), &layout.temporary()] {
            fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        }
        Ok(layout)
    }

    /// The names of a runtime with this id and network in the temporary folder, whose supervisor was killed; `None` while
    /// the supervisor runs. Creates nothing.
    pub(crate) fn without_supervisor(id: &str, network: (u8, u8)) -> Option<Self> {
        let reservation = reserve(network).ok()?;
        Some(Self {
            dir: std::env::temp_dir().join(format!("keblet-{id}")),
            bridge: format!("{BRIDGE_PREFIX}{id}"),
            cgroup_root: format!("/keblet-{id}"),
            driver: Driver::Cgroupfs,
            current_runc: false,
            unrestricted: false,
            network,
            _reservation: Some(reservation),
        })
    }

    /// The CRI socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("containerd.sock")
    }

    /// containerd's configuration file.
    pub(crate) fn config(&self) -> PathBuf {
        self.dir.join("config.toml")
    }

    /// containerd's log.
    pub(crate) fn log(&self) -> PathBuf {
        self.dir.join("containerd.log")
    }

    /// The folder of CNI network configurations.
    pub(crate) fn cni_conf(&self) -> PathBuf {
        self.dir.join("net.d")
    }

    /// The CNI configuration of the pods' network.
    pub(crate) fn cni_list(&self) -> PathBuf {
        self.cni_conf().join("10-keblet.conflist")
    }

    /// containerd's folder for temporary mounts.
    pub(crate) fn temporary(&self) -> PathBuf {
        self.dir.join("tmp")
    }

    /// The OCI runtime that containerd executes if only it reports the systemd driver; see [`cgroupfs_runc`].
    pub(crate) fn runc_wrapper(&self) -> PathBuf {
        self.dir.join("runc-cgroupfs")
    }

    /// The OCI runtime.
    pub(crate) fn runc(&self, cache: &Cache) -> PathBuf {
        if self.current_runc { cache.current_runc() } else { cache.runc() }
    }

    /// The pods' network.
    pub(crate) fn subnet(&self) -> String {
        let (a, b) = self.network;
        format!("10.{a}.{b}.0/24")
    }

    /// The host's address on the bridge, with the length of the prefix.
    pub(crate) fn host_address(&self) -> String {
        let (a, b) = self.network;
        format!("10.{a}.{b}.1/24")
    }
}

/// A network for pods that no other runtime has, and its reservation. Two bridges with one network would have one address,
/// and packets to pods would go to either.
fn own_network() -> Result<((u8, u8), UnixListener)> {
    for _ in 0..ATTEMPTS {
        let network = (fastrand::u8(64..128), fastrand::u8(..));
        let reservation = match reserve(network) {
            Ok(reservation) => reservation,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => continue,
            Err(error) => return Err(error).context("cannot reserve a network"),
        };
        // A network may be in use by something else, such as the bridge of a runtime that was killed.
        let routes = fs::read_to_string("/proc/net/route").context("cannot read the routes of the host")?;
        if !is_routed(&routes, network) {
            return Ok((network, reservation));
        }
    }
    bail!("no unused network in 10.64.0.0/10 after {ATTEMPTS} attempts")
}

/// Reserves a network in the network namespace of this process, in which the bridges are, until the socket is closed, also by a
/// kill. The socket has a name without a file.
fn reserve((a, b): (u8, u8)) -> io::Result<UnixListener> {
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(format!("keblet/10.{a}.{b}.0"))?)
}

/// Whether the host has a route to a part of the network, by `/proc/net/route`. Less specific ones do not matter.
fn is_routed(routes: &str, (a, b): (u8, u8)) -> bool {
    let destination = |line: &str| {
        let word = line.split_whitespace().nth(1)?;
        // In the order of bytes in memory.
        Some(Ipv4Addr::from(u32::from_str_radix(word, 16).ok()?.to_ne_bytes()))
    };
    let is_inside = |address: Ipv4Addr| address.octets()[..3] == [10, a, b];
    routes.lines().filter_map(destination).any(is_inside)
}

/// containerd's configuration. All paths are in the layout's folder or the cache.
pub(crate) fn containerd(layout: &Layout, cache: &Cache) -> String {
    let path = |relative: &str| quoted(&layout.dir.join(relative));
    format!(
        r#"version = 2
root = {root}
state = {state}
temp = {temporary}
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.internal.v1.tracing",
  "io.containerd.nri.v1.nri",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
address = {socket}

[ttrpc]
address = {ttrpc}

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = {sandbox_image}
# Hosts without CAP_SYS_RESOURCE or AppArmor run the tests too.
restrict_oom_score_adj = {restricted}
disable_apparmor = {restricted}
enable_cdi = false
# Network namespaces in the layout's folder, not in the system's.
netns_mounts_under_state_dir = true
stream_server_address = "127.0.0.1"
stream_server_port = "0"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = {cni_bin}
conf_dir = {cni_conf}

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
BinaryName = {runc}
Root = {runc_root}
SystemdCgroup = {systemd_cgroup}
"#,
        root = path("root"),
        state = path("state"),
        temporary = quoted(&layout.temporary()),
        socket = quoted(&layout.socket()),
        ttrpc = path("containerd.sock.ttrpc"),
        sandbox_image = quoted(Path::new(PAUSE_IMAGE)),
        restricted = !layout.unrestricted,
        cni_bin = quoted(&cache.cni_bin()),
        cni_conf = quoted(&layout.cni_conf()),
        runc = quoted(&match layout.driver {
            Driver::ReportedSystemd => layout.runc_wrapper(),
            Driver::Cgroupfs | Driver::Systemd => layout.runc(cache),
        }),
        runc_root = path("runc"),
        systemd_cgroup = layout.driver != Driver::Cgroupfs,
    )
}

/// A script that executes runc without `--systemd-cgroup`: the runtime runs outside the systemd of the test, so runc
/// has no manager to ask for scopes and writes cgroup files.
pub(crate) fn cgroupfs_runc(layout: &Layout, cache: &Cache) -> String {
    let runc = layout.runc(cache).to_string_lossy().replace('\'', r"'\''");
    format!(
        "#!/bin/sh\nfor argument do\n  shift\n  [ \"$argument\" = --systemd-cgroup ] || set -- \"$@\" \"$argument\"\ndone\n\
         exec '{runc}' \"$@\"\n"
    )
}

/// The CNI configuration: pods are attached to the bridge, without a route out of the machine.
pub(crate) fn cni(layout: &Layout) -> String {
    let list = json!({
        "cniVersion": "1.0.0",
        "name": "keblet",
        "plugins": [
            {
                "type": "bridge",
                "bridge": layout.bridge,
                "ipam": {
                    "type": "host-local",
                    "dataDir": layout.dir.join("ipam"),
                    "ranges": [[{ "subnet": layout.subnet() }]],
                },
            },
            { "type": "portmap", "capabilities": { "portMappings": true } },
        ],
    });
    format!("{list:#}\n")
}

/// A TOML basic string.
fn quoted(path: &Path) -> String {
    let mut text = String::from('"');
    for character in path.to_string_lossy().chars() {
        match character {
            '"' | '\\' => text.extend(['\\', character]),
            other => text.push(other),
        }
    }
    text.push('"');
    text
}

#[cfg(test)]
mod tests {
    use std::time::Duration;
    use std::time::Instant;

    use super::*;

    fn layout() -> Layout {
        Layout {
            dir: "/nowhere/a \"b\"".into(),
            bridge: "keb-000001".into(),
            cgroup_root: "/keblet-000001".into(),
            driver: Driver::Cgroupfs,
            current_runc: false,
            unrestricted: false,
            network: (64, 7),
            _reservation: None,
        }
    }

    #[test]
    fn containerd_config_stays_inside_its_folder_and_the_cache() {
        let text = containerd(&layout(), &Cache::at("/cache"));
        let paths: Vec<&str> =
            text.lines().filter_map(|line| line.split_once(" = \"/")).map(|(_, path)| path).collect();
        assert_eq!(paths.len(), 9, "{text}");
        for path in paths {
            assert!(path.starts_with("nowhere/a \\\"b\\\"/") || path.starts_with("cache/"), "{path}");
        }
    }

    #[test]
    fn containers_are_restricted_unless_the_machine_has_all_privileges() {
        for unrestricted in [false, true] {
            let text = containerd(&Layout { unrestricted, ..layout() }, &Cache::at("/cache"));
            for setting in ["restrict_oom_score_adj", "disable_apparmor"] {
                let line = format!("\n{setting} = {}\n", !unrestricted);
                assert!(text.contains(&line), "{line} {text}");
            }
        }
    }

    #[test]
    fn two_runtimes_have_different_networks() {
        fastrand::seed(7);
        let (first, _reservation) = own_network().unwrap();
        fastrand::seed(7);
        let (second, _other) = own_network().unwrap();
        assert_ne!(first, second, "both begin with the same choice");
    }

    #[test]
    fn a_runtime_has_no_supervisor_once_its_network_is_not_reserved() {
        let (network, reservation) = own_network().unwrap();
        assert!(Layout::without_supervisor("000001", network).is_none());
        drop(reservation);
        // A process that another test forks has the socket until it executes its program.
        let deadline = Instant::now() + Duration::from_secs(10);
        let layout = loop {
            match Layout::without_supervisor("000001", network) {
                Some(layout) => break layout,
                None => assert!(Instant::now() < deadline, "the network is still reserved"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!((layout.bridge.as_str(), layout.cgroup_root.as_str()), ("keb-000001", "/keblet-000001"));
        assert!(Layout::without_supervisor("000001", network).is_none(), "the clean-up is under way");
    }

    #[test]
    fn a_network_with_a_route_is_in_use() {
        let routes = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n\
                      eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\n\
                      tun0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\n\
                      keb-000002\t0007400A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n";
        assert!(is_routed(routes, (64, 7)));
        assert!(!is_routed(routes, (64, 8)) && !is_routed("", (64, 7)));
    }

    #[test]
    fn runc_wrapper_drops_only_the_systemd_flag() {
        let script = cgroupfs_runc(&layout(), &Cache::at("/cache")).replace("exec '", "printf '<%s>' '");
        let run = std::process::Command::new("sh")
            .args(["-c", &script, "runc", "--root", "/a b", "--systemd-cgroup", "create", "$id"])
            .output()
            .unwrap();
        let printed = String::from_utf8(run.stdout).unwrap();
        assert!(printed.ends_with("/runc><--root></a b><create><$id>"), "{printed}");
    }

    #[test]
    fn pod_subnet_contains_the_host_address() {
        let list: serde_json::Value = serde_json::from_str(&cni(&layout())).unwrap();
        assert_eq!(list["plugins"][0]["ipam"]["ranges"][0][0]["subnet"], "10.64.7.0/24");
        assert_eq!(layout().host_address(), "10.64.7.1/24");
    }
}
