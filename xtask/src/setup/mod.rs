//! `cargo xtask setup`: puts everything that tests and demo need from outside of the repository into the cache.
//!
//! ```text
//! Debian packages ─▶ packages/   containerd 1.7, runc, CNI plugins, busybox, iptables: unpacked, not installed
//!                 ─▶ containerd-2/
//! tests/runc ──────▶ runc/       runc of a version that can map ids of mounts, from its Go module
//! tests/registry ──▶ registry/   an image registry, from its Go module
//!                 ─▶ machine/    qemu, a kernel and a root file system for `cargo xtask vm`
//! tests/probe ─────▶ probe/      the test program, linked statically
//!         both ────▶ images/     one archive of all test images
//! ```
//! Each step checks whether its product exists and is current, so a second run is quick. Installs nothing on the system
//! and does not change its configuration.

pub(crate) mod apt;
mod go_tool;
pub(crate) mod images;
mod machine;
mod packages;
mod probe;
mod registry;
mod runc;
pub(crate) mod sources;

use std::fs;
use std::fs::File;
use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;

use crate::lock;
use crate::vm;

/// Prefixes of folders in the cache that a step removes at its end.
const APT_PREFIX: &str = "apt-";
const HEADERS_PREFIX: &str = "headers-";

/// Options of the command.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Empty the cache first, except of upstream's programs and of the toolchain for BPF programs.
    #[arg(long)]
    fresh: bool,
}

/// Fills the cache and prints its content.
///
/// # Errors
/// A package cannot be downloaded, a program cannot be built, or the cache cannot be written.
pub(crate) fn setup(arguments: &Arguments) -> Result<()> {
    if arguments.fresh {
        empty(&Cache::locate())?;
    }
    let cache = prepare()?;
    prepare_containerd_2(&cache)?;
    prepare_registry(&cache)?;
    match vm::lacks() {
        None => prepare_machine(&cache)?,
        Some(lack) => println!("no virtual machine: {lack}"),
    }
    for line in packages::versions(&cache)? {
        println!("{line}");
    }
    println!("ready in {}", cache.root().display());
    Ok(())
}

fn empty(cache: &Cache) -> Result<()> {
    let _lock = lock(cache)?;
    for folder in ["packages", "containerd-2", "runc", "registry", "machine", "images", "probe"] {
        let folder = cache.root().join(folder);
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
        }
    }
    Ok(())
}

/// Adds containerd 2 and a runc that can map ids of mounts to the cache, which only some runtime tests need.
///
/// # Errors
/// The package cannot be downloaded or unpacked; runc cannot be built.
pub(crate) fn prepare_containerd_2(cache: &Cache) -> Result<()> {
    let _lock = lock(cache)?;
    packages::unpack_containerd_2(cache)?;
    runc::build(cache)
}

/// Adds the image registry to the cache, which only runtime tests of pulls need.
///
/// # Errors
/// It cannot be built.
pub(crate) fn prepare_registry(cache: &Cache) -> Result<()> {
    let _lock = lock(cache)?;
    registry::build(cache)
}

/// Adds the virtual machine to the cache, which `cargo xtask vm` and its tests need.
///
/// # Errors
/// A package cannot be downloaded or unpacked.
pub(crate) fn prepare_machine(cache: &Cache) -> Result<()> {
    let _lock = lock(cache)?;
    machine::unpack(cache)
}

/// Set where cache and programs are complete and cannot be changed, as in the virtual machine.
pub(crate) const PREBUILT_VARIABLE: &str = "KEBLET_PREBUILT";

/// Whether nothing is to be fetched or built.
pub(crate) fn is_prebuilt() -> bool {
    std::env::var_os(PREBUILT_VARIABLE).is_some()
}

/// Serialises commands that fill the same cache, and removes what one that was interrupted has left: packages of hundreds of
/// megabytes.
fn lock(cache: &Cache) -> Result<File> {
    let root = cache.root();
    fs::create_dir_all(root).with_context(|| format!("cannot create {}", root.display()))?;
    let lock = lock::hold(&root.join("lock"))?;
    remove_leftovers(root);
    Ok(lock)
}

/// Only the command that holds the lock makes such folders.
fn remove_leftovers(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with(APT_PREFIX) || name.starts_with(HEADERS_PREFIX) {
            // What a command of root left, another user cannot remove, and does not need to.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Adds what is missing in the cache.
///
/// # Errors
/// As [`setup`].
pub(crate) fn prepare() -> Result<Cache> {
    let cache = Cache::locate();
    if is_prebuilt() {
        cache.check()?;
        return Ok(cache);
    }
    let _lock = lock(&cache)?;
    packages::unpack(&cache)?;
    let probe = probe::build(&cache)?;
    images::pack(&cache, &probe)?;
    cache.check()?;
    Ok(cache)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_interrupted_command_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("cache"));
        for name in ["apt-x1/archives", "headers-x2/usr", "packages/usr"] {
            fs::create_dir_all(cache.root().join(name)).unwrap();
        }
        let lock = lock(&cache).unwrap();
        let mut left: Vec<_> = fs::read_dir(cache.root()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["lock", "packages"]);
        drop(lock);
        empty(&cache).unwrap();
        assert!(!cache.packages().exists());
    }
}
