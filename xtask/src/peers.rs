//! `cargo xtask peers`: upstream's own programs from published Go modules, as peers of benchmarks and tests.
//!
//! Owns building `tests/upstream` once into the cache: one binary, called by the name of each program. Refuses to be
//! needed by the build or the tests of the agent.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::Cache;
use sha2::Digest as _;
use sha2::Sha256;

use crate::paths;
use crate::progress::step;
use crate::system;
use crate::tiers::machine;

/// The names that the binary answers to; each has a Go file of its own.
const PROGRAMS: [&str; 1] = ["kubelet"];
const MODULE: &str = "k8s.io/kubernetes";
const BINARY: &str = "upstream";

/// Builds the programs unless they are there, and says where they are.
pub fn build() -> Result<()> {
    let folder = provide()?;
    for program in PROGRAMS {
        let path = folder.join(program);
        let version = system::output(Command::new(&path).arg("--version"))?;
        println!("{}: {}", path.display(), version.trim());
    }
    Ok(())
}

/// Upstream's kubelet, built if need be.
pub fn kubelet() -> Result<PathBuf> {
    Ok(provide()?.join("kubelet"))
}

fn provide() -> Result<PathBuf> {
    let source = paths::repository().join("tests/upstream");
    let folder = Cache::locate().root().join("peers");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let digest = digest(&source)?;
    let stamp = folder.join("stamp");
    if fs::read_to_string(&stamp).is_ok_and(|there| there == digest) && folder.join(BINARY).exists() {
        return Ok(folder);
    }
    if !machine::has_program("go") {
        bail!("upstream's programs are written in Go, and `go` is not on the path (Go 1.26 or newer)");
    }
    let version = version(&source)?;
    step(&format!("building upstream's {} {version} (minutes, the first time)", PROGRAMS.join(", ")), || {
        go_build(&source, &folder.join(BINARY), &version)
    })?;
    for program in PROGRAMS {
        let link = folder.join(program);
        if !link.exists() {
            symlink(BINARY, &link).with_context(|| format!("cannot create {}", link.display()))?;
        }
    }
    fs::write(&stamp, digest).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(folder)
}

fn go_build(source: &Path, binary: &Path, version: &str) -> Result<()> {
    let (major, minor) = major_minor(version).with_context(|| format!("{version} is no version"))?;
    // Unstamped, the programs take themselves for v0.0.0 and refuse what depends on their version.
    let stamp = |field: &str, value: &str| format!("-X k8s.io/component-base/version.{field}={value}");
    let flags = ["-s -w".to_owned(), stamp("gitVersion", version), stamp("gitMajor", major), stamp("gitMinor", minor)]
        .join(" ");
    system::quiet(
        // Nobody waits for it more than for what else runs on the machine.
        Command::new("nice")
            .args(["-n", "10", "go", "build", "-trimpath", "-ldflags", &flags, "-o"])
            .arg(binary)
            .arg(".")
            .current_dir(source)
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "-mod=readonly"),
    )
}

/// The version of the module that the build requires.
fn version(source: &Path) -> Result<String> {
    let file = source.join("go.mod");
    let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix(MODULE)?.strip_prefix(" v"));
    let version = line.and_then(|rest| rest.split_whitespace().next());
    Ok(format!("v{}", version.with_context(|| format!("{} does not require {MODULE}", file.display()))?))
}

fn major_minor(version: &str) -> Option<(&str, &str)> {
    let mut numbers = version.strip_prefix('v')?.split('.');
    Some((numbers.next()?, numbers.next()?))
}

fn digest(source: &Path) -> Result<String> {
    let entries = fs::read_dir(source).with_context(|| format!("cannot read {}", source.display()))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    let mut hash = Sha256::new();
    for file in files {
        hash.update(fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_the_required_one() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("go.mod"), "require (\n\tk8s.io/kubernetes v1.36.3 // why\n)\n").unwrap();
        assert_eq!(version(folder.path()).unwrap(), "v1.36.3");
        assert_eq!(major_minor("v1.36.3"), Some(("1", "36")));
    }
}
