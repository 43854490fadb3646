//! The container runtime and its helpers from Debian's archive, unpacked into the cache.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::Cache;

use super::apt::Apt;
use super::sources;
use crate::system;

/// The first suite whose containerd has CRI's event stream.
const CONTAINERD_SUITE: &str = "trixie";
/// The suite of containerd 2, whose programs run with the libraries of older suites.
const CONTAINERD_2_SUITE: &str = "sid";
/// Taken from the suite of the system, so that they match its libraries. The last four are for the test of iptables.
const OWN_SUITE: [&str; 8] = [
    "runc",
    "containernetworking-plugins",
    "busybox-static",
    "libseccomp2",
    "iptables",
    "libxtables12",
    "libmnl0",
    "libnftnl11",
];

/// Unpacks the packages unless they are unpacked already.
///
/// # Errors
/// A package cannot be downloaded or unpacked, or its programs do not run on this system.
pub(super) fn unpack(cache: &Cache) -> Result<()> {
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
    // The stamp is written last, so that an interrupted run is repeated.
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    apt.unpack(&packages, &folder)?;
    versions(cache).context("the unpacked programs do not run on this system")?;
    fs::write(&stamp, recipe).with_context(|| format!("cannot write {}", stamp.display()))
}

/// Unpacks containerd 2 beside the other packages unless it is unpacked already.
///
/// # Errors
/// The package cannot be downloaded or unpacked, or is not containerd 2.
pub(super) fn unpack_containerd_2(cache: &Cache) -> Result<()> {
    let folder = cache.containerd_2();
    let stamp = folder.join(".packages");
    let recipe = format!("containerd/{CONTAINERD_2_SUITE} {}\n", std::env::consts::ARCH);
    if fs::read_to_string(&stamp).is_ok_and(|there| there == recipe) {
        return Ok(());
    }
    let mirror = sources::mirror()?;
    let apt = Apt::update(&mirror, &[CONTAINERD_2_SUITE], cache.root())?;
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    apt.unpack(&["containerd".to_owned()], &folder)?;
    let version = version(&folder.join("usr/bin/containerd"), &cache.libraries())?;
    ensure!(version.contains(" 2."), "{CONTAINERD_2_SUITE} has {version} instead of containerd 2");
    fs::write(&stamp, recipe).with_context(|| format!("cannot write {}", stamp.display()))
}

/// The version output of each program, one line each.
///
/// # Errors
/// A program does not run.
pub(super) fn versions(cache: &Cache) -> Result<Vec<String>> {
    let programs = [cache.packages().join("usr/bin/containerd"), cache.runc()];
    programs.iter().map(|program| version(program, &cache.libraries())).collect()
}

fn version(program: &Path, libraries: &Path) -> Result<String> {
    let text = system::output(Command::new(program).arg("--version").env("LD_LIBRARY_PATH", libraries))?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}
