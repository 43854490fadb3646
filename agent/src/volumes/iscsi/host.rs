//! iSCSI as the kernel shows it: sessions with their portals and disks, and the devices of disks.
//!
//! ```text
//!  /sys/class/iscsi_host/host<n>/device/session<n>/iscsi_session/session<n>/targetname
//!                                                 /connection<n>:0/iscsi_connection/connection<n>:0/{address,port,...}
//!                                                 /target<n>:0:0/<n>:0:0:<unit>/block/<disk>
//!  /dev/disk/by-path/ip-<portal>-iscsi-<target>-lun-<unit>   made by udev
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::path::PathBuf;

use crate::volumes::VolumeError;
use crate::volumes::disks::Host;
use crate::volumes::disks::names;
use crate::volumes::disks::text;
use crate::volumes::error::OnPath as _;

/// The transport whose devices have paths without a PCI device.
const TCP: &str = "tcp";

/// A session with a target.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Session {
    /// Number of its SCSI host.
    pub(super) host: u32,
    /// Its portals, present and permanent addresses.
    pub(super) portals: BTreeSet<String>,
    /// Its disks: number of the unit, and name.
    pub(super) disks: Vec<(u64, String)>,
}

impl Session {
    /// True if it leads through this portal.
    pub(super) fn has(&self, portal: &str) -> bool {
        self.portals.iter().any(|own| is_same(own, portal))
    }
}

/// Whether two texts are the same portal: IPv6 addresses can be written in several ways.
fn is_same(one: &str, other: &str) -> bool {
    let address = |text: &str| text.parse::<SocketAddr>().ok();
    one == other || address(one).is_some_and(|one| address(other) == Some(one))
}

impl Host {
    /// Sessions with a target. What vanishes meanwhile is left out. Blocking.
    pub(super) fn sessions(&self, target: &str) -> Vec<Session> {
        let hosts = self.sys.join("class/iscsi_host");
        let mut found = Vec::new();
        for name in names(&hosts) {
            let Some(host) = name.strip_prefix("host").and_then(|number| number.parse().ok()) else { continue };
            let device = hosts.join(&name).join("device");
            for session in names(&device).into_iter().filter(|name| name.starts_with("session")) {
                let dir = device.join(&session);
                if text(&dir.join("iscsi_session").join(&session).join("targetname")).as_deref() == Some(target) {
                    found.push(Session { host, portals: portals(&dir), disks: disks(&dir) });
                }
            }
        }
        found
    }

    /// Makes the kernel look for a unit. Blocking.
    ///
    /// # Errors
    /// The host does not exist, or cannot be written to.
    pub(super) fn scan(&self, host: u32, lun: u8) -> Result<(), VolumeError> {
        let path = self.sys.join(format!("class/scsi_host/host{host}/scan"));
        // iSCSI has one channel and one target for each host.
        fs::write(&path, format!("0 0 {lun}")).on("write", &path)
    }

    /// The device of a unit at a portal, once udev has made its path. Blocking.
    pub(super) fn device(&self, transport: &str, portal: &str, target: &str, lun: u8) -> Option<PathBuf> {
        self.named("by-path", |name| is_path(name, transport, portal, target, lun)).into_iter().next()
    }
}

/// Whether a name in `/dev/disk/by-path` is that of a unit. udev writes IPv6 addresses without brackets.
fn is_path(name: &str, transport: &str, portal: &str, target: &str, lun: u8) -> bool {
    let tail = format!("-iscsi-{target}-lun-{lun}");
    let bracketed = |own: &str| own.rsplit_once(':').map(|(address, port)| format!("[{address}]:{port}"));
    let is_ours = |name: &str| {
        let own = name.strip_prefix("ip-").and_then(|rest| rest.strip_suffix(&tail));
        own.is_some_and(|own| is_same(own, portal) || bracketed(own).is_some_and(|own| is_same(&own, portal)))
    };
    match name.strip_prefix("pci-") {
        Some(rest) => transport != TCP && rest.match_indices("-ip-").any(|(at, _)| is_ours(&rest[at + 1..])),
        None => transport == TCP && is_ours(name),
    }
}

fn portals(session: &Path) -> BTreeSet<String> {
    let connections = names(session).into_iter().filter(|name| name.starts_with("connection"));
    let mut found = BTreeSet::new();
    for connection in connections {
        let dir = session.join(&connection).join("iscsi_connection").join(&connection);
        for (address, port) in [("address", "port"), ("persistent_address", "persistent_port")] {
            if let Some((address, port)) = text(&dir.join(address)).zip(text(&dir.join(port))) {
                found.insert(if address.contains(':') {
                    format!("[{address}]:{port}")
                } else {
                    format!("{address}:{port}")
                });
            }
        }
    }
    found
}

fn disks(session: &Path) -> Vec<(u64, String)> {
    let mut found = Vec::new();
    for target in names(session).into_iter().filter(|name| name.starts_with("target")) {
        let target = session.join(target);
        for unit in names(&target) {
            let Some(lun) = unit.rsplit(':').next().and_then(|lun| lun.parse().ok()) else { continue };
            found.extend(names(&target.join(&unit).join("block")).into_iter().map(|disk| (lun, disk)));
        }
    }
    found
}

#[cfg(test)]
pub(super) mod testing {
    //! Sessions on a machine of files.

    use super::*;
    use crate::volumes::disks::testing::TestHost;

    pub(in crate::volumes::iscsi) const TARGET: &str = "iqn.2001-04.com.example:a";

    impl TestHost {
        /// Adds a session on a host of this number, with these units and disks.
        pub(in crate::volumes::iscsi) fn session(
            &self,
            host: u32,
            target: &str,
            (address, port): (&str, &str),
            disks: &[(u64, &str)],
        ) {
            let dir = format!("sys/class/iscsi_host/host{host}/device/session{host}");
            self.write(&format!("{dir}/iscsi_session/session{host}/targetname"), &format!("{target}\n"));
            let connection = format!("{dir}/connection{host}:0/iscsi_connection/connection{host}:0");
            for (name, value) in
                [("address", "(null)"), ("port", "0"), ("persistent_address", address), ("persistent_port", port)]
            {
                self.write(&format!("{connection}/{name}"), &format!("{value}\n"));
            }
            self.write(&format!("sys/class/scsi_host/host{host}/scan"), "");
            for (lun, disk) in disks {
                self.write(&format!("{dir}/target{host}:0:0/{host}:0:0:{lun}/block/{disk}/size"), "1");
                self.disk(disk, &format!("240:{lun}"));
            }
        }

        /// Removes a session.
        pub(in crate::volumes::iscsi) fn end_session(&self, host: u32) {
            let path = self.root.path().join(format!("sys/class/iscsi_host/host{host}"));
            fs::remove_dir_all(path).expect("removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::TARGET;
    use super::*;
    use crate::volumes::disks::testing::TestHost;

    #[test]
    fn sessions_with_their_portals_and_disks() {
        let test = TestHost::new();
        assert!(test.host().sessions(TARGET).is_empty());
        test.session(2, TARGET, ("192.0.2.1", "3260"), &[(0, "sda"), (1, "sdb")]);
        test.session(3, TARGET, ("fd00::1", "861"), &[]);
        test.session(4, "iqn.2001-04.com.example:b", ("192.0.2.1", "3260"), &[(0, "sdc")]);
        test.write(
            "sys/class/iscsi_host/host2/device/session2/connection2:0/iscsi_connection/connection2:0/address",
            "192.0.2.9",
        );
        let found = test.host().sessions(TARGET);
        assert_eq!(found[0].portals, ["192.0.2.1:3260".to_owned(), "192.0.2.9:0".to_owned()].into());
        assert_eq!(found[0].disks, [(0, "sda".to_owned()), (1, "sdb".to_owned())]);
        assert_eq!((found[1].host, &found[1].portals, found.len()), (3, &["[fd00::1]:861".to_owned()].into(), 2));
        assert!(found[1].has("[fd00:0::0:1]:861") && !found[1].has("192.0.2.1:3260"));
        assert!(found[0].has("192.0.2.1:3260") && !found[0].has("192.0.2.1:3261"));

        test.host().scan(2, 7).expect("written");
        assert_eq!(test.read("sys/class/scsi_host/host2/scan").as_deref(), Some("0 0 7"));
        test.host().scan(5, 7).expect_err("no such host");
    }

    #[test]
    fn paths_of_devices() {
        let iscsi = "iscsi-iqn.2001-04.com.example:a-lun-1";
        for (name, transport, portal, expected) in [
            (format!("ip-192.0.2.1:3260-{iscsi}"), "tcp", "192.0.2.1:3260", true),
            (format!("ip-192.0.2.1:3260-{iscsi}"), "tcp", "192.0.2.1:326", false),
            (format!("ip-192.0.2.1:3260-{iscsi}0"), "tcp", "192.0.2.1:3260", false),
            (format!("ip-192.0.2.1:3260-{iscsi}-part1"), "tcp", "192.0.2.1:3260", false),
            (format!("ip-192.0.2.1:3260-{iscsi}"), "iser", "192.0.2.1:3260", false),
            (format!("pci-0000:04:00.0-ip-192.0.2.1:3260-{iscsi}"), "iser", "192.0.2.1:3260", true),
            (format!("pci-0000:04:00.0-ip-192.0.2.1:3260-{iscsi}"), "tcp", "192.0.2.1:3260", false),
            (format!("pci-0000:04:00.0-ip-192.0.2.12:3260-{iscsi}"), "iser", "192.0.2.1:3260", false),
            (format!("ip-fd00::1:3260-{iscsi}"), "tcp", "[fd00::1]:3260", true),
            (format!("ip-[fd00::1]:3260-{iscsi}"), "tcp", "[fd00::1]:3260", true),
            (format!("ip-fd00::1:3260-{iscsi}"), "tcp", "[FD00:0::0:1]:3260", true),
            (format!("ip-fd00::1:3260-{iscsi}"), "tcp", "[fd00::1]:326", false),
        ] {
            assert_eq!(is_path(&name, transport, portal, TARGET, 1), expected, "{name} {transport} {portal}");
        }
        let test = TestHost::new();
        let name = format!("dev/disk/by-path/ip-192.0.2.1:3260-{iscsi}");
        let host = test.host();
        assert_eq!(host.device("tcp", "192.0.2.1:3260", TARGET, 1), None);
        test.write(&name, "");
        assert_eq!(host.device("tcp", "192.0.2.1:3260", TARGET, 1), Some(test.root.path().join(&name)));
    }
}
