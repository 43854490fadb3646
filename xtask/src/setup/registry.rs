//! The image registry that tests pull from: `distribution`, built from its published Go module (`tests/registry`).

use std::process::Command;

use anyhow::Result;
use keblet_peers::Cache;

use super::go_tool::GoTool;
use crate::progress::step;
use crate::system;

/// Builds the registry unless it is there.
///
/// # Errors
/// The build fails, or the registry does not run.
pub(super) fn build(cache: &Cache) -> Result<()> {
    let registry = GoTool {
        package: "github.com/distribution/distribution/v3/cmd/registry",
        source: "tests/registry",
        needs: &["go"],
        product: cache.registry(),
        purpose: "image registry for tests of pulls",
    };
    registry.provide(|| {
        let mut build = registry.go_build(&[]);
        step("building the image registry (minutes, the first time)", || {
            system::quiet_twice(build.env("CGO_ENABLED", "0"))
        })?;
        system::quiet(Command::new(&registry.product).arg("--version"))
    })
}
