//! Programs of published Go modules. For each the repository has a folder with a `go.mod` that requires it as a tool, so that
//! version and sums of all modules are fixed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;

use crate::paths;
use crate::tiers::machine;

/// A program that is built into a folder of its own in the cache.
pub(super) struct GoTool<'a> {
    /// Import path of the program.
    pub(super) package: &'a str,
    /// Folder of `go.mod` and `go.sum` in the repository.
    pub(super) source: &'a str,
    /// What the build needs on the path.
    pub(super) needs: &'a [&'a str],
    /// Path of the program in the cache.
    pub(super) product: PathBuf,
    /// The program and what it is for, for messages.
    pub(super) purpose: &'a str,
}

impl GoTool<'_> {
    /// Calls `build` unless the program was built from the same modules, or what that needs is missing: tests that use the
    /// program then report that.
    ///
    /// # Errors
    /// The build fails, or the cache cannot be written.
    pub(super) fn provide(&self, build: impl FnOnce() -> Result<()>) -> Result<()> {
        let folder = self.product.parent().with_context(|| format!("{} has no folder", self.product.display()))?;
        let stamp = folder.join(".built");
        let recipe = format!("{}{}{}\n", self.read("go.mod")?, self.read("go.sum")?, std::env::consts::ARCH);
        if self.product.exists() && fs::read_to_string(&stamp).is_ok_and(|there| there == recipe) {
            return Ok(());
        }
        if let Some(missing) = self.needs.iter().find(|program| !machine::has_program(program)) {
            println!("no {}: it is built from its Go module, but `{missing}` is not on the path", self.purpose);
            return Ok(());
        }
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let mark =
            |recipe: &str| fs::write(&stamp, recipe).with_context(|| format!("cannot write {}", stamp.display()));
        // A build that fails may have replaced the program already.
        mark("")?;
        build()?;
        // Written last, so that an interrupted run is repeated.
        mark(&recipe)
    }

    /// The build, with `flags` for `go build`. Low priority: it takes minutes.
    pub(super) fn go_build(&self, flags: &[&str]) -> Command {
        let mut command = Command::new("nice");
        command
            .args(["-n", "10", "go", "build", "-trimpath", "-ldflags", "-s -w"])
            .args(flags)
            .arg("-o")
            .arg(&self.product)
            .arg(self.package)
            .current_dir(paths::repository().join(self.source))
            .env("GOFLAGS", "-mod=readonly");
        command
    }

    fn read(&self, name: &str) -> Result<String> {
        let file = paths::repository().join(self.source).join(name);
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn a_program_is_built_again_after_a_build_of_other_modules_failed() {
        let folder = tempfile::tempdir().unwrap();
        let tool = GoTool {
            package: "example.org/tool",
            // Absolute, so that it is not looked for in the repository.
            source: folder.path().to_str().unwrap(),
            needs: &[],
            product: folder.path().join("built/tool"),
            purpose: "tool",
        };
        let require = |modules: &str| {
            fs::write(folder.path().join("go.mod"), modules).unwrap();
            fs::write(folder.path().join("go.sum"), "").unwrap();
        };
        let write = |text: &str| fs::write(&tool.product, text).context("cannot write");
        require("first");
        tool.provide(|| write("first")).unwrap();
        tool.provide(|| bail!("it is built already")).unwrap();
        require("second");
        tool.provide(|| write("second").and_then(|()| bail!("the disk is full"))).unwrap_err();
        require("first");
        tool.provide(|| write("first again")).unwrap();
        assert_eq!(fs::read_to_string(&tool.product).unwrap(), "first again");
    }
}
