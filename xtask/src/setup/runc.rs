//! An OCI runtime with idmapped mounts, which containers with a user namespace need: runc, built from its published Go module
//! (`tests/runc`), since the distribution's is older. The headers of libseccomp come from the distribution.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;

use super::apt::Apt;
use super::sources;
use crate::paths;
use crate::progress::step;
use crate::system;
use crate::tiers::machine;

const MODULE: &str = "github.com/opencontainers/runc";
const SOURCE: &str = "tests/runc";
/// What the build needs besides Go.
const PROGRAMS: [&str; 3] = ["go", "gcc", "pkg-config"];
const HEADERS: [&str; 2] = ["libseccomp-dev", "libseccomp2"];

/// Builds runc unless it was built from the same module, or a program for that is missing: tests that need it then say so.
///
/// # Errors
/// A package cannot be downloaded, or the build fails.
pub(super) fn build(cache: &Cache) -> Result<()> {
    let product = cache.current_runc();
    let folder = product.parent().context("runc has no folder")?;
    let stamp = folder.join(".built");
    let source = paths::repository().join(SOURCE);
    let read = |name: &str| {
        let file = source.join(name);
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))
    };
    let recipe = format!("{}{}{}\n", read("go.mod")?, read("go.sum")?, std::env::consts::ARCH);
    if product.exists() && fs::read_to_string(&stamp).is_ok_and(|there| there == recipe) {
        return Ok(());
    }
    if let Some(missing) = PROGRAMS.into_iter().find(|program| !machine::has_program(program)) {
        println!("no runc for user namespaces: it is built from its Go module, but `{missing}` is not on the path");
        return Ok(());
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let headers = tempfile::Builder::new().prefix("headers-").tempdir_in(cache.root());
    let headers = headers.with_context(|| format!("cannot create a folder in {}", cache.root().display()))?;
    let mirror = sources::mirror()?;
    let apt = Apt::update(&mirror, &[&mirror.suite], cache.root())?;
    apt.unpack(&HEADERS.map(str::to_owned), headers.path())?;
    step("building runc", || go_build(&source, &product, &headers.path().join("usr")))?;
    system::quiet(Command::new(&product).arg("--version").env("LD_LIBRARY_PATH", cache.libraries()))?;
    fs::write(&stamp, recipe).with_context(|| format!("cannot write {}", stamp.display()))
}

/// Builds with the headers and libraries below `system`.
fn go_build(source: &Path, product: &Path, system: &Path) -> Result<()> {
    let libraries = system.join("lib").join(format!("{}-linux-gnu", std::env::consts::ARCH));
    system::quiet(
        Command::new("nice")
            .args(["-n", "10", "go", "build", "-trimpath", "-tags", "seccomp", "-ldflags", "-s -w", "-o"])
            .arg(product)
            .arg(MODULE)
            .current_dir(source)
            .env("CGO_ENABLED", "1")
            .env("CGO_CFLAGS", format!("-I{}", system.join("include").display()))
            .env("CGO_LDFLAGS", format!("-L{}", libraries.display()))
            .env("PKG_CONFIG_PATH", libraries.join("pkgconfig"))
            .env("GOFLAGS", "-mod=readonly"),
    )
}
