//! `cargo xtask setup`: everything tests and demo need from outside the tree, in the cache.
//!
//! ```text
//! Debian packages ─▶ packages/   containerd 1.7, runc, CNI plugins, busybox: unpacked, not installed
//!                 ─▶ containerd-2/
//! tests/probe ─────▶ probe/      the test program, linked statically
//!         both ────▶ images/     one archive of all test images
//! ```
//! Each step looks whether its product is there and fits, so the second run takes no time. Refuses to install anything
//! on the system and to change its configuration.

pub mod apt;
mod images;
mod packages;
mod probe;
pub mod sources;

use std::fs::File;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;

/// What to set up.
#[derive(clap::Args)]
pub struct Arguments {
    /// Throw away what is in the cache first.
    #[arg(long)]
    fresh: bool,
}

/// Fills the cache and says what is in it.
pub fn setup(arguments: &Arguments) -> Result<()> {
    if arguments.fresh {
        let root = Cache::locate();
        for folder in ["packages", "containerd-2", "images", "probe"] {
            let folder = root.root().join(folder);
            if folder.exists() {
                std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
            }
        }
    }
    let cache = prepare()?;
    prepare_containerd_2(&cache)?;
    for line in packages::versions(&cache)? {
        println!("{line}");
    }
    println!("ready in {}", cache.root().display());
    Ok(())
}

/// Adds containerd 2 to the cache, which only a part of the runtime tests needs.
pub fn prepare_containerd_2(cache: &Cache) -> Result<()> {
    let _lock = lock(cache)?;
    packages::unpack_containerd_2(cache)
}

/// Commands that fill the same cache at the same time wait for each other.
fn lock(cache: &Cache) -> Result<File> {
    let path = cache.root().join("lock");
    let lock = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    lock.lock().context("cannot lock the cache")?;
    Ok(lock)
}

/// Fills the cache as far as it is not filled, for commands that need it.
pub fn prepare() -> Result<Cache> {
    let cache = Cache::locate();
    std::fs::create_dir_all(cache.root()).with_context(|| format!("cannot create {}", cache.root().display()))?;
    let _lock = lock(&cache)?;
    packages::unpack(&cache)?;
    let probe = probe::build(&cache)?;
    images::pack(&cache, &probe)?;
    cache.check()?;
    Ok(cache)
}
