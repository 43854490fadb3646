//! `cargo xtask setup`: puts everything that tests and demo need from outside of the repository into the cache.
//!
//! ```text
//! Debian packages ─▶ packages/   containerd 1.7, runc, CNI plugins, busybox: unpacked, not installed
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

use std::fs::File;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;

use crate::vm;

/// Options of the command.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Empty the cache first.
    #[arg(long)]
    fresh: bool,
}

/// Fills the cache and prints its content.
///
/// # Errors
/// A package cannot be downloaded, a program cannot be built, or the cache cannot be written.
pub(crate) fn setup(arguments: &Arguments) -> Result<()> {
    if arguments.fresh {
        let root = Cache::locate();
        for folder in ["packages", "containerd-2", "runc", "registry", "machine", "images", "probe"] {
            let folder = root.root().join(folder);
            if folder.exists() {
                std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
            }
        }
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

/// Tells commands that cache and programs are complete and cannot be changed, as in the virtual machine.
pub(crate) const PREBUILT_VARIABLE: &str = "KEBLET_PREBUILT";

/// Whether nothing is to be fetched or built.
pub(crate) fn is_prebuilt() -> bool {
    std::env::var_os(PREBUILT_VARIABLE).is_some()
}

/// Serialises commands that fill the same cache.
fn lock(cache: &Cache) -> Result<File> {
    let path = cache.root().join("lock");
    let lock = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    lock.lock().context("cannot lock the cache")?;
    Ok(lock)
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
    std::fs::create_dir_all(cache.root()).with_context(|| format!("cannot create {}", cache.root().display()))?;
    let _lock = lock(&cache)?;
    packages::unpack(&cache)?;
    let probe = probe::build(&cache)?;
    images::pack(&cache, &probe)?;
    cache.check()?;
    Ok(cache)
}
