//! Expands a mounted file system to the size of its device (upstream: `ResizeFs`).

use std::path::Path;

use super::VolumeError;
use super::format;
use super::format::DiskFormat;
use crate::host_program::Call;
use crate::host_program::Programs;

/// Expands the file system on the device, which is mounted at `mounted`. One that fills its device stays as it is.
///
/// # Errors
/// It is not known what the device holds, it is no file system that can be expanded, or the program fails.
pub(super) async fn run(device: &Path, mounted: &Path, programs: &dyn Programs) -> Result<(), VolumeError> {
    let call = match format::disk_format(device, programs).await? {
        // mkfs(8) uses all of it.
        DiskFormat::Nothing => return Ok(()),
        DiskFormat::FileSystem(kind) => call(&kind, device, mounted).ok_or(kind),
        DiskFormat::Partitions => Err("unknown data, probably partitions".to_owned()),
    };
    let call = call.map_err(|kind| VolumeError::NotExpandable {
        kind,
        device: device.to_owned(),
        mounted: mounted.to_owned(),
    })?;
    let ended = programs.run(&call).await?;
    match ended.is_success() {
        true => Ok(()),
        false => Err(VolumeError::NotExpanded {
            path: call.arguments().last().cloned().unwrap_or_default(),
            ending: format!("{}. {} output: {}", ended.status, call.program(), ended.quoted()),
        }),
    }
}

/// The program for this type of file system; `None` if it cannot be expanded.
fn call(kind: &str, device: &Path, mounted: &Path) -> Option<Call> {
    let (device, mounted) = (device.to_string_lossy(), mounted.to_string_lossy());
    let call = match kind {
        "ext3" | "ext4" => Call::new("resize2fs", [&*device]),
        "xfs" => Call::new("xfs_growfs", ["-d", &*mounted]),
        "btrfs" => Call::new("btrfs", ["filesystem", "resize", "max", &*mounted]),
        _ => return None,
    };
    Some(call.finished())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_program::testing::ScriptedPrograms;

    /// The programs that are run for a device that holds this, and how it ends. The device appears as `DEV`.
    async fn expand(held: &'static str, code: i32) -> (Vec<String>, Result<(), String>) {
        let device = tempfile::NamedTempFile::new().expect("a file");
        device.as_file().set_len(1 << 20).expect("a size");
        let programs = ScriptedPrograms::new(move |call| match call.starts_with("blkid") {
            true if held.is_empty() => Some((2, String::new())),
            true => Some((0, held.to_owned())),
            false => Some((code, "no\n".to_owned())),
        });
        let path = device.path().to_string_lossy().into_owned();
        let shown = |text: String| text.replace(&path, "DEV");
        let done = run(device.path(), Path::new("/m"), &programs).await.map_err(|error| shown(error.to_string()));
        (programs.take().into_iter().skip(1).map(shown).collect(), done)
    }

    #[tokio::test]
    async fn each_type_has_its_program() {
        for (held, expected) in [
            ("TYPE=ext3\n", &["resize2fs DEV"][..]),
            ("TYPE=ext4\n", &["resize2fs DEV"][..]),
            ("TYPE=xfs\n", &["xfs_growfs -d /m"][..]),
            ("TYPE=btrfs\n", &["btrfs filesystem resize max /m"][..]),
            ("", &[][..]),
        ] {
            let (calls, done) = expand(held, 0).await;
            assert_eq!(calls, expected, "{held}");
            assert_eq!(done, Ok(()));
        }
    }

    #[tokio::test]
    async fn failures_have_the_texts_of_upstream() {
        for (held, expected) in [
            ("TYPE=ext4\n", "resize of device DEV failed: exit status: 1. resize2fs output: no"),
            ("TYPE=xfs\n", "resize of device /m failed: exit status: 1. xfs_growfs output: no"),
            ("TYPE=vfat\n", "ResizeFS.Resize - resize of format vfat is not supported for device DEV mounted at /m"),
            (
                "PTTYPE=gpt\n",
                "ResizeFS.Resize - resize of format unknown data, probably partitions is not supported for device DEV \
                 mounted at /m",
            ),
        ] {
            assert_eq!(expand(held, 1).await.1, Err(expected.to_owned()));
        }
    }
}
