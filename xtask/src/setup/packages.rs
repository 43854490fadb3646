//! The container runtime and its helpers from Debian's archive, unpacked into the cache.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;

use super::apt::Apt;
use super::sources;
use crate::system;

/// The first suite whose containerd has the event stream of CRI.
const CONTAINERD_SUITE: &str = "trixie";
/// These come from the suite of the system, so that they fit its libraries.
const OWN_SUITE: [&str; 4] = ["runc", "containernetworking-plugins", "busybox-static", "libseccomp2"];

/// Unpacks the packages unless they are there.
pub fn unpack(cache: &Cache) -> Result<()> {
    let folder = cache.packages();
    let stamp = folder.join(".packages");
    let recipe = format!("containerd/{CONTAINERD_SUITE} {} {}\n", OWN_SUITE.join(" "), std::env::consts::ARCH);
    if fs::read_to_string(&stamp).is_ok_and(|there| there == recipe) {
        return Ok(());
    }
    let mirror = sources::mirror()?;
    let mut suites = vec![mirror.suite.as_str()];
    if mirror.suite != CONTAINERD_SUITE {
        suites.push(CONTAINERD_SUITE);
    }
    let apt = Apt::update(&mirror, &suites, cache.root())?;
    let mut packages = vec![format!("containerd/{CONTAINERD_SUITE}")];
    packages.extend(OWN_SUITE.iter().map(|name| format!("{name}/{}", mirror.suite)));
    // Stamped last, so that an interrupted run leaves nothing that looks finished.
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    apt.unpack(&packages, &folder)?;
    versions(cache).context("the unpacked programs do not run on this system")?;
    fs::write(&stamp, recipe).with_context(|| format!("cannot write {}", stamp.display()))
}

/// One line for each program: what it says of its version.
pub fn versions(cache: &Cache) -> Result<Vec<String>> {
    let programs = [cache.containerd_bin().join("containerd"), cache.runc()];
    programs.iter().map(|program| version(program, &cache.libraries())).collect()
}

fn version(program: &Path, libraries: &Path) -> Result<String> {
    let text = system::output(Command::new(program).arg("--version").env("LD_LIBRARY_PATH", libraries))?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}
