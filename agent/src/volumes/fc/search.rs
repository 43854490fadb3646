//! Devices that lead to a disk, by the names of udev.

use std::path::PathBuf;

use super::disk::FcDisk;
use crate::volumes::disks::Host;

/// The devices of a disk. Several are paths to the same unit.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Found {
    /// In the order of the disk's names, each once.
    pub(super) devices: Vec<PathBuf>,
    /// The multipath device of one of them.
    pub(super) multipath: Option<PathBuf>,
}

impl Found {
    /// The device to use: one path alone would be lost with that path.
    pub(super) fn device(&self) -> Option<&PathBuf> {
        self.multipath.as_ref().or_else(|| self.devices.first())
    }
}

/// Looks for the devices of a disk. A link whose device has vanished leads to none. Blocking.
pub(super) fn search(host: &Host, disk: &FcDisk) -> Found {
    let links = disk.ids.iter().flat_map(|id| match disk.lun {
        Some(lun) => host.named("by-path", |name| is_path(name, id, lun)),
        None => host.named("by-id", |name| name.strip_prefix("scsi-") == Some(id.as_str())),
    });
    let mut devices: Vec<PathBuf> = Vec::new();
    for device in links.filter_map(|link| link.canonicalize().ok()) {
        if !devices.contains(&device) {
            devices.push(device);
        }
    }
    let multipath = devices.iter().find_map(|device| host.multipath(device));
    Found { devices, multipath }
}

/// Whether a name in `/dev/disk/by-path` is that of a unit. Only FCoE has no PCI device in front.
fn is_path(name: &str, wwn: &str, lun: u8) -> bool {
    let transport = name.strip_suffix(&format!("-0x{wwn}-lun-{lun}"));
    transport.is_some_and(|transport| {
        transport == "fc" || transport.strip_prefix("pci-").is_some_and(|rest| rest.ends_with("-fc"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volumes::disks::testing::TestHost;

    #[test]
    fn names_of_paths() {
        let wwn = "50060e801049cfd1";
        for (name, expected) in [
            ("fc-0x50060e801049cfd1-lun-1", true),
            ("pci-0000:41:00.0-fc-0x50060e801049cfd1-lun-1", true),
            ("fc-0x50060e801049cfd1-lun-10", false),
            ("fc-0x50060e801049cfd1-lun-0", false),
            ("fc-0x50060e801049cfd1-lun-1-part1", false),
            ("fc-0x50060e801049cfd2-lun-1", false),
            ("xfc-0x50060e801049cfd1-lun-1", false),
            ("pci-0000:41:00.0-xfc-0x50060e801049cfd1-lun-1", false),
            ("pci-fc-0x50060e801049cfd1-lun-1", false),
            ("ccw-0.0.3c00-fc-0x50060e801049cfd1-lun-1", false),
        ] {
            assert_eq!(is_path(name, wwn, 1), expected, "{name}");
        }
    }

    #[test]
    fn devices_are_those_that_the_links_lead_to() {
        let test = TestHost::new();
        let (host, dev) = (test.host(), test.root.path().canonicalize().expect("a folder").join("dev"));
        let disk = |ids: &[&str], lun| FcDisk { ids: ids.iter().map(|id| (*id).to_owned()).collect(), lun };
        let unit = disk(&["b", "a"], Some(1));
        assert_eq!(search(&host, &unit), Found::default());
        for name in ["sda", "sdb", "sdc"] {
            test.write(&format!("dev/{name}"), "");
        }
        test.link("dev/disk/by-path/fc-0xa-lun-1", "../../sda");
        test.link("dev/disk/by-path/pci-0000:41:00.0-fc-0xa-lun-1", "../../sdb");
        test.link("dev/disk/by-path/pci-0000:42:00.0-fc-0xb-lun-1", "../../sdb");
        test.link("dev/disk/by-path/fc-0xa-lun-2", "../../sdc");
        let found = search(&host, &unit);
        assert_eq!(found.devices, ["sdb", "sda"].map(|name| dev.join(name)), "not the other unit");
        assert_eq!((found.device(), &found.multipath), (Some(&dev.join("sdb")), &None));
        std::fs::remove_file(test.root.path().join("dev/sdb")).expect("removed");
        assert_eq!(search(&host, &unit).devices, [dev.join("sda")], "the other has vanished");

        test.link("dev/disk/by-id/scsi-3600a", "../../sdc");
        test.link("dev/disk/by-id/scsi-3600a-part1", "../../sda");
        test.link("dev/disk/by-id/ata-3600a", "../../sda");
        let identified = disk(&["3600b", "3600a"], None);
        assert_eq!(search(&host, &identified).devices, [dev.join("sdc")]);
        test.write("sys/block/sdc/holders/dm-3", "");
        let multipath = test.root.path().join("dev/dm-3");
        assert_eq!(search(&host, &identified).device(), Some(&multipath));
        // Where udev prefers the multipath device for the name of the disk.
        test.write("dev/dm-3", "");
        test.link("dev/disk/by-id/scsi-3600a", "../../dm-3");
        assert_eq!(search(&host, &identified).multipath, Some(multipath));
    }
}
