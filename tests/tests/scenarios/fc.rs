//! Disks by the names of Fibre Channel: found, formatted and mounted for pods, removed from the kernel, and found again by a
//! scan. They change the kernel of the machine, so that they run in the emulated one only (`cargo xtask vm test storage`).
//!
//! The machine has no Fibre Channel. The disk is a SCSI disk of the kernel's `scsi_debug`: its identifier is its own, and
//! its name at a target that of a udev rule of the test.

use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet::volumes::Volumes;
use keblet_tests::standalone::StandaloneNode;
use serde_json::json;

use crate::storage::claimed;
use crate::storage::daemon;
use crate::storage::map_formatted;
use crate::storage::mounting;
use crate::storage::mounts_of;
use crate::storage::pod;
use crate::storage::run;
use crate::storage::tear_down_and_release;
use crate::storage::until;
use crate::storage::volumes_with;
use crate::storage::written;

/// The target whose unit 0 the disk is by the rule.
const WWN: &str = "50060e801049cfd1";
const BY_PATH: &str = "/dev/disk/by-path/fc-0x50060e801049cfd1-lun-0";
const RULES: &str = "/run/udev/rules.d";
const RULE: &str = r#"ACTION=="remove", GOTO="fc_end"
SUBSYSTEM!="block", GOTO="fc_end"
ENV{DEVTYPE}!="disk", GOTO="fc_end"
ATTRS{model}=="scsi_debug*", SYMLINK+="disk/by-path/fc-0x50060e801049cfd1-lun-0"
LABEL="fc_end"
"#;

/// A disk in memory of 64 MiB, and udev.
struct Disk {
    udevd: Child,
    /// Its World Wide Identifier.
    identifier: String,
}

impl Disk {
    fn start() -> Result<Self> {
        for module in ["sd_mod", "ext4", "loop"] {
            run("modprobe", &[module])?;
        }
        fs::create_dir_all(RULES)?;
        fs::write(Path::new(RULES).join("99-fc.rules"), RULE)?;
        let mut disk = Self { udevd: daemon("/usr/lib/systemd/systemd-udevd", &[])?, identifier: String::new() };
        until("udevd", || Ok(run("udevadm", &["control", "--ping"]).is_ok()))?;
        run("modprobe", &["scsi_debug", "dev_size_mb=64"])?;
        run("udevadm", &["trigger", "--subsystem-match=block"])?;
        until("the names of the disk", || Ok(identifier().is_some()))?;
        disk.identifier = identifier().context("a name of the disk")?;
        Ok(disk)
    }

    /// Whether the kernel has the disk.
    fn is_there(&self) -> bool {
        Path::new("/dev/disk/by-id").join(format!("scsi-{}", self.identifier)).exists()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = run("modprobe", &["-r", "scsi_debug"]);
        let _ = self.udevd.kill();
        let _ = self.udevd.wait();
        let _ = fs::remove_dir_all(RULES);
    }
}

/// The identifier of the disk that the rule names, once udev has named it by both.
fn identifier() -> Option<String> {
    let disk = fs::canonicalize(BY_PATH).ok()?;
    let is_same = |path: PathBuf| fs::canonicalize(path).is_ok_and(|found| found == disk);
    let links = fs::read_dir("/dev/disk/by-id").ok()?.flatten();
    let mut names = links.filter(|link| is_same(link.path())).filter_map(|link| link.file_name().into_string().ok());
    names.find_map(|name| name.strip_prefix("scsi-").map(str::to_owned))
}

#[test]
#[ignore = "real runtime"]
fn vm_a_disk_is_formatted_mounted_and_removed_and_keeps_its_files() -> Result<()> {
    let disk = Disk::start()?;
    let mut node = StandaloneNode::new()?;
    let write = "grep -c ' /data ext4 rw' /proc/mounts; stat -c '%g' /data; echo kept > /data/file && sync; echo end";
    let source = json!({ "wwids": ["none", disk.identifier], "fsType": "ext4" });
    node.layout.write_manifest("writer", &pod(&node, "writer", write, "fc", source))?;
    node.start()?;
    let seen = written(&mut node, "writer")?;
    ensure!(seen == "1\n77", "{seen}");
    let places = node.layout.root.join("plugins/kubernetes.io/fc");
    let place = places.join(format!("none-{}", disk.identifier));
    ensure!(place.join("file").exists(), "the disk is mounted for the node");

    // The next agent finds what this one has mounted.
    node.kill_agent()?;
    node.start()?;
    node.layout.remove_manifest("writer")?;
    node.until_true("the disk is removed", |_| Ok(!disk.is_there() && !place.exists()))?;
    ensure!(mounts_of(&disk.identifier) == 0, "something is still mounted");

    // A scan finds it again, by its other name.
    let source = json!({ "targetWWNs": ["50060e801049cfd0", WWN], "lun": 0, "readOnly": true });
    let read = "cat /data/file; touch /data/new 2>/dev/null || echo refused; echo end";
    node.layout.write_manifest("reader", &pod(&node, "reader", read, "fc", source))?;
    let seen = written(&mut node, "reader")?;
    ensure!(seen == "kept\nrefused", "{seen}");
    let place = places.join(format!("50060e801049cfd0-{WWN}-lun-0"));
    ensure!(place.join("file").exists(), "the disk is mounted for the node");
    node.layout.remove_manifest("reader")?;
    node.until_true("the disk is removed", |_| Ok(!disk.is_there() && !place.exists()))?;
    node.stop().context("the agent or the runtime left something")
}

#[tokio::test]
#[ignore = "real runtime"]
async fn vm_a_persistent_volume_is_mounted_or_mapped_as_a_device() -> Result<()> {
    let disk = Disk::start()?;
    let root = tempfile::tempdir()?;
    let volumes = |mode: &str| {
        let source = json!({ "targetWWNs": [WWN], "lun": 0 });
        volumes_with(root.path(), claimed(json!({ "fc": source, "volumeMode": mode })))
    };
    let release = async |volumes: &Volumes, uid: &str| -> Result<()> {
        tear_down_and_release(volumes, uid).await?;
        // udev removes its names after the kernel has removed the disk.
        until("the disk is removed", || Ok(!disk.is_there()))
    };

    let files = volumes("Filesystem");
    let done = files.set_up(&mounting("u-1")?, None).await;
    ensure!(done.is_ok(), "{done:?}");
    ensure!(root.path().join("pods/u-1/volumes/kubernetes.io~fc/pv/lost+found").exists(), "a file system is mounted");
    release(&files, "u-1").await?;

    // The same disk as a device: what the file system has written is there.
    let raw = volumes("Block");
    map_formatted(&raw, "u-2").await?;
    release(&raw, "u-2").await?;
    ensure!(raw.is_torn_down("u-2") && mounts_of(WWN) == 0, "something is left");
    Ok(())
}
