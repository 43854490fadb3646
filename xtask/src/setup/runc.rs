//! An OCI runtime with idmapped mounts, which containers with a user namespace need: runc, built from its published Go module
//! (`tests/runc`), since the distribution's is older. The headers of libseccomp come from the distribution.

use std::path::Path;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::Cache;

use super::HEADERS_PREFIX;
use super::apt::Apt;
use super::go_tool::GoTool;
use super::sources;
use crate::progress::step;
use crate::system;

const HEADERS: [&str; 2] = ["libseccomp-dev", "libseccomp2"];

/// Builds runc unless it is there.
///
/// # Errors
/// A package cannot be downloaded, or the build fails.
pub(super) fn build(cache: &Cache) -> Result<()> {
    let runc = GoTool {
        package: "github.com/opencontainers/runc",
        source: "tests/runc",
        needs: &["go", "gcc", "pkg-config"],
        product: cache.current_runc(),
        purpose: "runc for user namespaces",
    };
    runc.provide(|| {
        let headers = tempfile::Builder::new().prefix(HEADERS_PREFIX).tempdir_in(cache.root());
        let headers = headers.with_context(|| format!("cannot create a folder in {}", cache.root().display()))?;
        let mirror = sources::mirror()?;
        let apt = Apt::update(&mirror, &[&mirror.suite], cache.root())?;
        apt.unpack(&HEADERS.map(str::to_owned), headers.path())?;
        step("building runc", || go_build(&runc, &headers.path().join("usr")))?;
        system::quiet(Command::new(&runc.product).arg("--version").env("LD_LIBRARY_PATH", cache.libraries()))
    })
}

/// Builds with the headers and libraries below `system`.
fn go_build(runc: &GoTool<'_>, system: &Path) -> Result<()> {
    let libraries = system.join("lib").join(format!("{}-linux-gnu", std::env::consts::ARCH));
    system::quiet_twice(
        runc.go_build(&["-tags", "seccomp"])
            .env("CGO_ENABLED", "1")
            .env("CGO_CFLAGS", format!("-I{}", system.join("include").display()))
            .env("CGO_LDFLAGS", format!("-L{}", libraries.display()))
            .env("PKG_CONFIG_PATH", libraries.join("pkgconfig")),
    )
}
