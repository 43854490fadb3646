//! A file system of its own that counts projects, in a file. The kernels of many machines cannot mount one, and an agent
//! records projects in `/etc`: for tests in the virtual machine (`cargo xtask vm test cgroupfs`) only.

use std::fs::File;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use nix::mount::MntFlags;
use nix::mount::umount2;

use crate::standalone::is_emulated;

/// mkfs.xfs makes no smaller one. Only what is written takes memory.
const SIZE: u64 = 320 << 20;

/// A kind of file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileSystem {
    /// ext4
    Ext4,
    /// XFS
    Xfs,
}

/// The mounted file system. Unmounted when dropped.
pub struct QuotaDisk(PathBuf);

impl QuotaDisk {
    /// Makes a file system in `image` and mounts it on the directory `on`; `None`, skipping the test, outside of the machine.
    ///
    /// # Errors
    /// It cannot be made or mounted.
    pub fn mount(kind: FileSystem, image: &Path, on: &Path) -> Result<Option<Self>> {
        if !is_emulated() {
            keblet_skip::skip("it changes /etc/projects: run it with `cargo xtask vm test cgroupfs`");
            return Ok(None);
        }
        let file = File::create(image).with_context(|| format!("cannot create {}", image.display()))?;
        file.set_len(SIZE).with_context(|| format!("cannot extend {}", image.display()))?;
        run(Command::new("modprobe").arg("loop"))?;
        match kind {
            FileSystem::Ext4 => {
                let features = ["-O", "quota,project", "-E", "quotatype=prjquota"];
                run(Command::new("mkfs.ext4").arg("-q").args(features).arg(image))?;
            }
            FileSystem::Xfs => run(Command::new("mkfs.xfs").arg("-q").arg(image))?,
        }
        let name = if kind == FileSystem::Ext4 { "ext4" } else { "xfs" };
        run(Command::new("mount").args(["-t", name, "-o", "loop,prjquota"]).args([image, on]))?;
        Ok(Some(Self(on.to_owned())))
    }
}

impl Drop for QuotaDisk {
    fn drop(&mut self) {
        // Fails if it was unmounted with the node; the loop device goes with the mount.
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {} {said}", output.status);
    Ok(())
}
