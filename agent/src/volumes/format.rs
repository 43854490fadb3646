//! Makes a file system on a device that has none, repairs one that it has, and mounts it (upstream: `SafeFormatAndMount`).

use std::fs;
use std::fs::File;
use std::io;
use std::io::Read as _;
use std::path::Path;

use super::VolumeError;
use super::error::OnPath as _;
use super::mount_program::MountCall;
use super::plugin::blocking;
use crate::host_program;
use crate::host_program::Call;
use crate::host_program::Ended;
use crate::host_program::Programs;

/// The type of a volume that states none.
const DEFAULT_TYPE: &str = "ext4";
/// blkid(8) has found nothing that it was asked for.
const NOT_FOUND: i32 = 2;
/// fsck(8) has repaired the file system.
const REPAIRED: i32 = 1;
/// fsck(8) has left errors.
const UNREPAIRED: i32 = 4;
/// How much of a device has to be readable before the report of blkid(8) that it holds nothing is used.
const HEAD: usize = 64 * 1024;
/// The kernel's list of types, with `nodev` in front of those that are not on a device.
const TYPES: &str = "/proc/filesystems";
/// Types of devices, which the kernel may list only once they are used. With `auto`, mount(8) takes what the device holds.
const OF_DEVICES: [&str; 11] =
    ["auto", "btrfs", "exfat", "ext2", "ext3", "ext4", "ntfs", "ntfs-3g", "ntfs3", "vfat", "xfs"];

/// A file system to be mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DeviceMount<'a> {
    pub(super) device: &'a Path,
    pub(super) target: &'a Path,
    /// `fsType`; empty for the default.
    pub(super) kind: &'a str,
    pub(super) read_only: bool,
    pub(super) options: &'a [String],
}

/// What a device holds, as blkid(8) reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DiskFormat {
    Nothing,
    FileSystem(String),
    /// Partitions, which are never overwritten.
    Partitions,
}

/// What comes before the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Preparation {
    Format,
    Repair,
    Nothing,
}

impl DeviceMount<'_> {
    fn kind(&self) -> &str {
        if self.kind.is_empty() { DEFAULT_TYPE } else { self.kind }
    }

    /// Formats the device if it holds nothing, checks it if it holds a file system that may be written, and mounts it.
    ///
    /// # Errors
    /// It is not known what the device holds, it holds nothing and is read-only, or a program fails.
    pub(super) async fn run(&self, programs: &dyn Programs) -> Result<(), VolumeError> {
        check_type(self.kind())?;
        let held = disk_format(self.device, programs).await?;
        self.check_is_of_device(&held).await?;
        match preparation(&held, self.is_read_only()) {
            Some(Preparation::Format) => self.format(programs).await?,
            Some(Preparation::Repair) => self.repair(programs).await?,
            Some(Preparation::Nothing) => {}
            None => return Err(VolumeError::Unformatted { device: self.device.to_owned() }),
        }
        let mounted = self.mount(programs).await;
        match held {
            DiskFormat::FileSystem(found) if found == self.kind() => mounted,
            DiskFormat::Nothing => mounted,
            DiskFormat::FileSystem(_) | DiskFormat::Partitions => {
                mounted.map_err(|error| VolumeError::OtherFormat { source: Box::new(error) })
            }
        }
    }

    fn is_read_only(&self) -> bool {
        self.read_only || self.options.iter().any(|option| option == "ro")
    }

    /// Pods name the types of their own iSCSI volumes, and the kernel ignores the device for some of them: with `proc` a pod
    /// would get the processes and settings of the node. A device that held nothing is formatted, which such a type cannot be.
    async fn check_is_of_device(&self, held: &DiskFormat) -> Result<(), VolumeError> {
        let kind = self.kind();
        let is_held = match held {
            DiskFormat::Nothing => true,
            DiskFormat::FileSystem(found) => found == kind,
            DiskFormat::Partitions => false,
        };
        if is_held || OF_DEVICES.contains(&kind) {
            return Ok(());
        }
        let types = blocking(|| fs::read_to_string(TYPES).on("read", Path::new(TYPES))).await?;
        match is_of_devices(kind, &types) {
            true => Ok(()),
            false => Err(VolumeError::OtherFormat { source: Box::new(VolumeError::NotOfDevices(kind.to_owned())) }),
        }
    }

    async fn format(&self, programs: &dyn Programs) -> Result<(), VolumeError> {
        let (device, kind) = (self.device.to_string_lossy(), self.kind());
        tracing::info!(%device, kind, "making a file system on a device that has none");
        let options: &[&str] = match kind {
            "ext3" | "ext4" => &["-F", "-m0"],
            "xfs" => &["-f"],
            _ => &[],
        };
        let arguments = options.iter().copied().chain([&*device]);
        let call = Call::new("mkfs", arguments).variant(kind).finished();
        host_program::succeed(programs, &call).await?;
        Ok(())
    }

    /// A file system is mounted all the same where fsck(8) cannot be run, or has nothing to check.
    async fn repair(&self, programs: &dyn Programs) -> Result<(), VolumeError> {
        let device = self.device.to_string_lossy();
        let call = Call::new("fsck", ["-a", &*device]).finished();
        let ended = match programs.run(&call).await {
            Ok(ended) => ended,
            Err(error) => {
                tracing::warn!(%device, %error, "the file system is mounted unchecked");
                return Ok(());
            }
        };
        match ended.code {
            Some(0) => Ok(()),
            Some(REPAIRED) => {
                tracing::info!(%device, "repaired the file system");
                Ok(())
            }
            Some(UNREPAIRED) => Err(VolumeError::Damaged { device: self.device.to_owned(), output: ended.quoted() }),
            _ => {
                tracing::warn!(%device, status = ended.describe(&call), "the file system is mounted unchecked");
                Ok(())
            }
        }
    }

    async fn mount(&self, programs: &dyn Programs) -> Result<(), VolumeError> {
        let mut options = self.options.to_vec();
        if self.read_only && !options.iter().any(|option| option == "ro") {
            options.push("ro".to_owned());
        }
        options.push("defaults".to_owned());
        let source = self.device.to_string_lossy();
        MountCall { kind: Some(self.kind()), source: &source, target: self.target, options }.run_scoped(programs).await
    }
}

/// What the device holds.
///
/// # Errors
/// blkid(8) fails, or the device cannot be read.
pub(super) async fn disk_format(device: &Path, programs: &dyn Programs) -> Result<DiskFormat, VolumeError> {
    let unknown = |problem: String| VolumeError::UnknownFormat { device: device.to_owned(), problem };
    let path = device.to_string_lossy();
    let call = Call::new("blkid", ["-p", "-s", "TYPE", "-s", "PTTYPE", "-o", "export", &*path]);
    let held = found(&programs.run(&call).await?).map_err(unknown)?;
    if held == DiskFormat::Nothing {
        // blkid(8) reports a device that it cannot read in the same way.
        let device = device.to_owned();
        let read = blocking(move || Ok(read_head(&device))).await?;
        read.map_err(|error| unknown(error.to_string()))?;
    }
    Ok(held)
}

/// Checks a type that is about to be a part of a program's name: helpers of mount(8) interpret what follows a dot.
fn check_type(kind: &str) -> Result<(), VolumeError> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_');
    let begins = kind.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit());
    match begins && kind.len() <= 32 && kind.chars().all(fits) {
        true => Ok(()),
        false => Err(VolumeError::FileSystemType(kind.to_owned())),
    }
}

/// Whether the kernel's list has the type as one of devices.
fn is_of_devices(kind: &str, types: &str) -> bool {
    types.lines().any(|line| line.strip_prefix('\t') == Some(kind))
}

/// What blkid(8) has found.
///
/// # Errors
/// It has failed, or found several things.
fn found(ended: &Ended) -> Result<DiskFormat, String> {
    match ended.code {
        Some(0) => {}
        Some(NOT_FOUND) => return Ok(DiskFormat::Nothing),
        _ => return Err(format!("blkid: {}: {}", ended.status, ended.quoted())),
    }
    let value = |key: &str| {
        let lines = ended.output.lines();
        lines.filter_map(|line| line.split_once('=')).find(|(name, _)| *name == key).map(|(_, value)| value)
    };
    match (value("PTTYPE"), value("TYPE")) {
        (Some(_), _) => Ok(DiskFormat::Partitions),
        (None, Some(kind)) => Ok(DiskFormat::FileSystem(kind.to_owned())),
        // It succeeds only with a value.
        (None, None) => Err(format!("blkid reports neither TYPE nor PTTYPE: {}", ended.quoted())),
    }
}

/// `None`: the volume cannot be mounted.
fn preparation(held: &DiskFormat, read_only: bool) -> Option<Preparation> {
    match held {
        DiskFormat::Nothing if read_only => None,
        DiskFormat::Nothing => Some(Preparation::Format),
        DiskFormat::FileSystem(_) | DiskFormat::Partitions if read_only => Some(Preparation::Nothing),
        DiskFormat::FileSystem(_) | DiskFormat::Partitions => Some(Preparation::Repair),
    }
}

/// Reads the beginning of a device.
fn read_head(device: &Path) -> io::Result<()> {
    File::open(device)?.read_exact(&mut vec![0; HEAD])
}

#[cfg(test)]
mod tests {
    use futures_util::future::BoxFuture;

    use super::*;
    use crate::host_program::ProgramError;
    use crate::host_program::testing::ScriptedPrograms;

    /// A device that can be read.
    fn device() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(1 << 20).expect("a size");
        file
    }

    /// The programs that are run for a device, which appears as `DEV`, and how it ends; the device.
    async fn run(
        kind: &str,
        read_only: bool,
        options: &[&str],
        script: &'static [(&str, i32, &str)],
    ) -> (Vec<String>, Result<(), VolumeError>, String) {
        let device = device();
        let answer = move |call: &str| {
            let found = script.iter().find(|(program, ..)| call.starts_with(program));
            found.map(|(_, code, output)| (*code, (*output).to_owned()))
        };
        let programs = ScriptedPrograms::new(answer);
        let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
        let mount = DeviceMount { device: device.path(), target: Path::new("/t"), kind, read_only, options: &options };
        let done = mount.run(&programs).await;
        let path = device.path().to_string_lossy().into_owned();
        (programs.take().iter().map(|call| call.replace(&path, "DEV")).collect(), done, path)
    }

    const BLKID: &str = "blkid -p -s TYPE -s PTTYPE -o export DEV";

    #[tokio::test]
    async fn only_a_device_that_holds_nothing_is_formatted() {
        let blank: &[(&str, i32, &str)] = &[("blkid", 2, "")];
        let ext4: &[(&str, i32, &str)] = &[("blkid", 0, "DEVNAME=/dev/x\nTYPE=ext4\n")];
        let xfs: &[(&str, i32, &str)] = &[("blkid", 0, "TYPE=xfs\n")];
        let mount = "mount -t ext4 -o defaults -- DEV /t";
        for (kind, script, expected) in [
            ("", blank, vec!["mkfs.ext4 -F -m0 DEV", mount]),
            ("ext4", blank, vec!["mkfs.ext4 -F -m0 DEV", mount]),
            ("ext3", blank, vec!["mkfs.ext3 -F -m0 DEV", "mount -t ext3 -o defaults -- DEV /t"]),
            ("xfs", blank, vec!["mkfs.xfs -f DEV", "mount -t xfs -o defaults -- DEV /t"]),
            ("btrfs", blank, vec!["mkfs.btrfs DEV", "mount -t btrfs -o defaults -- DEV /t"]),
            ("", ext4, vec!["fsck -a DEV", mount]),
            ("", xfs, vec!["fsck -a DEV", mount]),
            ("", &[("blkid", 0, "PTTYPE=gpt\n")], vec!["fsck -a DEV", mount]),
            ("", &[("blkid", 0, "TYPE=ext4\n"), ("fsck", 1, "")], vec!["fsck -a DEV", mount]),
            ("", &[("blkid", 0, "TYPE=ext4\n"), ("fsck", 8, "")], vec!["fsck -a DEV", mount]),
        ] {
            let (calls, done, _) = run(kind, false, &[], script).await;
            done.expect("mounted");
            assert_eq!(calls, [vec![BLKID], expected].concat(), "{kind} {script:?}");
        }
    }

    #[tokio::test]
    async fn what_is_read_only_is_neither_formatted_nor_repaired() {
        let ext4: &[(&str, i32, &str)] = &[("blkid", 0, "TYPE=ext4\n")];
        let (calls, done, _) = run("", true, &["noatime"], ext4).await;
        done.expect("mounted");
        assert_eq!(calls, [BLKID, "mount -t ext4 -o noatime,ro,defaults -- DEV /t"]);
        let (calls, done, _) = run("", false, &["ro"], ext4).await;
        done.expect("mounted");
        assert_eq!(calls, [BLKID, "mount -t ext4 -o ro,defaults -- DEV /t"]);
        for (read_only, options) in [(true, &[][..]), (false, &["ro"][..])] {
            let (calls, done, _) = run("", read_only, options, &[("blkid", 2, "")]).await;
            let error = done.expect_err("nothing to mount").to_string();
            assert!(
                error.ends_with("has no file system, and is not formatted since the volume is read-only"),
                "{error}"
            );
            assert_eq!(calls, [BLKID]);
        }
    }

    /// The programs of a node without fsck(8).
    #[derive(Debug)]
    struct WithoutFsck(ScriptedPrograms);

    impl Programs for WithoutFsck {
        fn run<'a>(&'a self, call: &'a Call) -> BoxFuture<'a, Result<Ended, ProgramError>> {
            match call.program() == "fsck" {
                true => Box::pin(std::future::ready(Err(call.failed("not installed")))),
                false => self.0.run(call),
            }
        }
    }

    #[tokio::test]
    async fn a_file_system_that_cannot_be_checked_is_mounted() {
        let held = |call: &str| call.starts_with("blkid").then(|| (0, "TYPE=ext4\n".to_owned()));
        let (device, programs) = (device(), WithoutFsck(ScriptedPrograms::new(held)));
        let (device, target) = (device.path(), Path::new("/t"));
        let mount = DeviceMount { device, target, kind: "", read_only: false, options: &[] };
        mount.run(&programs).await.expect("mounted");
        let mounted = format!("mount -t ext4 -o defaults -- {} /t", device.display());
        assert_eq!(programs.0.take().last(), Some(&mounted));
    }

    #[tokio::test]
    async fn a_failure_ends_it_before_the_next_step() {
        for (script, calls, expected) in [
            (&[("blkid", 8, "ambivalent")][..], vec![BLKID], "what disk DEV holds: blkid: exit status: 8: ambivalent"),
            (
                &[("blkid", 0, "odd")][..],
                vec![BLKID],
                "what disk DEV holds: blkid reports neither TYPE nor PTTYPE: odd",
            ),
            (
                &[("blkid", 2, ""), ("mkfs", 1, "too small")][..],
                vec![BLKID, "mkfs.ext4 -F -m0 DEV"],
                "mkfs.ext4 -F -m0 DEV failed: exit status: 1: too small",
            ),
            (
                &[("blkid", 0, "TYPE=ext4\n"), ("fsck", 4, "bad")][..],
                vec![BLKID, "fsck -a DEV"],
                "fsck cannot repair the file system on DEV: bad",
            ),
        ] {
            let (called, done, device) = run("", false, &[], script).await;
            assert_eq!(called, calls);
            let error = done.expect_err("it fails").to_string().replace(&device, "DEV");
            assert!(error.ends_with(expected), "{error}");
        }
    }

    #[tokio::test]
    async fn a_mount_that_fails_tells_another_format() {
        for (held, is_other) in [("TYPE=xfs\n", true), ("PTTYPE=dos\n", true), ("TYPE=ext4\n", false)] {
            let script: &'static [(&str, i32, &str)] = vec![("blkid", 0, held), ("mount", 32, "wrong fs type")].leak();
            let (_, done, _) = run("", false, &[], script).await;
            let error = done.expect_err("not mounted");
            assert!(error.to_string().contains("wrong fs type"), "{error}");
            assert_eq!(matches!(error, VolumeError::OtherFormat { .. }), is_other, "{held}");
        }
    }

    #[tokio::test]
    async fn what_is_on_no_device_is_not_mounted_in_its_place() {
        for held in ["TYPE=ext4\n", "PTTYPE=gpt\n"] {
            let script: &'static [(&str, i32, &str)] = vec![("blkid", 0, held)].leak();
            for kind in ["proc", "sysfs", "no-such-type"] {
                let (calls, done, _) = run(kind, true, &[], script).await;
                let error = done.expect_err("not of devices").to_string();
                assert!(error.starts_with(&format!("fsType {kind:?} is not the file system on the disk")), "{error}");
                assert_eq!(calls, [BLKID], "{kind} {held}");
            }
        }
        let (calls, done, _) = run("squashfs", true, &[], &[("blkid", 0, "TYPE=squashfs\n")]).await;
        done.expect("mounted");
        assert_eq!(calls.last().map(String::as_str), Some("mount -t squashfs -o ro,defaults -- DEV /t"));
        let types = "nodev\tproc\n\tf2fs\n";
        assert!(is_of_devices("f2fs", types));
        assert!(!is_of_devices("proc", types) && !is_of_devices("2fs", types));
    }

    #[tokio::test]
    async fn a_device_that_cannot_be_read_is_not_formatted() {
        let programs = ScriptedPrograms::new(|call| call.starts_with("blkid").then(|| (2, String::new())));
        let small = tempfile::NamedTempFile::new().expect("a file");
        for device in [small.path(), Path::new("/no/such/device")] {
            let mount = DeviceMount { device, target: Path::new("/t"), kind: "", read_only: false, options: &[] };
            let error = mount.run(&programs).await.expect_err("unreadable").to_string();
            assert!(error.starts_with("cannot determine what disk "), "{error}");
            assert_eq!(programs.take().len(), 1);
        }
    }

    #[tokio::test]
    async fn a_type_is_a_plain_name() {
        for kind in ["-x", "../../bin/sh", "fuse.sh", "ext4 -n", "EXT4", "ext4\n", &"a".repeat(33)] {
            let (calls, done, _) = run(kind, false, &[], &[]).await;
            let error = done.expect_err("no type").to_string();
            assert!(error.contains("must be a name of at most 32"), "{error}");
            assert!(calls.is_empty(), "{calls:?}");
        }
    }
}
