//! Builds the test program of the images, linked statically so that the images need no libraries.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;

use crate::paths;
use crate::progress::step;
use crate::system;

/// Builds the program unless it is current; returns its path.
///
/// # Errors
/// The build fails.
pub(super) fn build(cache: &Cache) -> Result<PathBuf> {
    let target = host_target()?;
    // In a target folder of its own: the other compiler flags would invalidate the build of the workspace.
    let folder = cache.root().join("probe");
    let mut command = Command::new(paths::cargo());
    command
        .args(["build", "--quiet", "--package", "keblet-probe", "--profile", "probe", "--target", &target])
        .arg("--target-dir")
        .arg(&folder)
        .current_dir(paths::repository())
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    let product = folder.join(&target).join("probe/probe");
    if product.exists() {
        // If the program is current, cargo returns quickly and no step is printed.
        system::quiet(&mut command)?;
    } else {
        step("building the test program", || system::quiet(&mut command))?;
    }
    Ok(product)
}

fn host_target() -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = system::output(Command::new(rustc).arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc prints no host triple")?.to_owned())
}
