//! Devices of the machine: raw ones, and what has one in use.

use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::OpenOptionsExt as _;

use super::*;
use crate::filesystem;
use crate::volumes::testing::LoopDevice;

#[test]
fn a_raw_device_is_mapped_and_removed_after_its_pod() {
    if !Path::new("/dev/loop-control").exists() {
        return keblet_skip::skip("needs loop devices");
    }
    in_private_mounts(|| {
        // losetup(8) is the real one.
        let fixture = fc_node_with(false, false);
        let disk = LoopDevice::on(&fixture.root.path().join("disk"), 1 << 20);
        let name = disk.0.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        fixture.test.disk(&name, "240:0");
        fixture.test.link("dev/disk/by-id/scsi-3600a", &disk.0.to_string_lossy());
        let pod = fixture.raw_pod(json!({"wwids": ["3600a"]}));
        let link = fixture.map(&pod, &disk.0);
        let place = fixture.place("volumeDevices/3600a");
        assert!(filesystem::is_mount_point(&place.join("u-1")).expect("it is there"));
        fixture.set_up(&pod).expect("it is there");
        assert_eq!((fixture.programs.take(), fixture.release(&fixture.volumes)), (Vec::new(), 0));

        // Another agent, for which the mapped device is a file.
        let next = fixture.next();
        next.reconstruct().expect("read");
        assert_eq!(fixture.release(&next), 0);
        fixture.tear_down(&next, "u-1");
        assert!(next.is_torn_down("u-1") && !link.exists() && !place.join("u-1").exists());
        assert!(place.exists(), "by it the disk is found");
        assert_eq!(fixture.release(&next), 1);
        assert_eq!(fixture.programs.take(), [format!("blockdev --flushbufs {}", fixture.device(&name))]);
        assert_eq!((fixture.deleted(&name), place.exists()), ("1".to_owned(), false));
    });
}

#[test]
fn a_disk_that_the_kernel_or_a_raw_device_has_in_use_stays() {
    if !Path::new("/dev/loop-control").exists() {
        return keblet_skip::skip("needs loop devices");
    }
    in_private_mounts(|| {
        let fixture = fc_node();
        let disk = LoopDevice::on(&fixture.root.path().join("disk"), 1 << 20);
        let name = disk.0.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        let number = fs::metadata(&disk.0).expect("a device").rdev();
        let number = format!("{}:{}", nix::sys::stat::major(number), nix::sys::stat::minor(number));
        fixture.disk(&name, &number, "disk/by-id/scsi-3600a");
        fixture.test.link(&format!("dev/{name}"), &disk.0.to_string_lossy());
        let identified = |read_only: bool| {
            pod("u-1", json!({"targetWWNs": null, "lun": null, "wwids": ["3600a"], "readOnly": read_only}))
        };
        let reserve = || fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&disk.0).expect("reserved");

        // It is not formatted: the place is left, and was never mounted.
        fixture.set_up(&identified(true)).expect_err("it holds nothing");
        fixture.tear_down(&fixture.volumes, "u-1");
        fixture.programs.take();
        let (place, reserved) = (fixture.place("3600a"), reserve());
        let error = fixture.runtime.block_on(fixture.volumes.release_unused(&place)).expect_err("in use").to_string();
        assert_eq!(error, format!("fc: {name} is in use by the kernel, and is not removed"));
        assert_eq!((fixture.programs.take(), fixture.deleted(&name)), (Vec::new(), String::new()));
        assert_eq!((place.exists(), fixture.in_use().len()), (true, 1), "no other node gets it");
        drop(reserved);

        // Another pod has it as a raw device, by the name of another plugin.
        let map = fixture.root.path().join("volumeDevices/u-9");
        fs::create_dir_all(map.parent().expect("a folder")).expect("a folder");
        std::os::unix::fs::symlink(&disk.0, &map).expect("a link");
        fixture.test.write("sys/block/loop-x/loop/backing_file", &map.to_string_lossy());
        assert_eq!((fixture.release(&fixture.volumes), fixture.deleted(&name)), (1, String::new()));
        fs::remove_file(&map).expect("removed");

        // A container has a copy of the mount.
        fixture.set_up(&identified(false)).expect("mounted");
        fixture.tear_down(&fixture.volumes, "u-1");
        let _reserved = reserve();
        assert_eq!((fixture.release(&fixture.volumes), fixture.deleted(&name)), (1, "1".to_owned()));
    });
}
