//! Downloads packages with apt, without installing them and with a configuration of its own.

use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

use super::APT_PREFIX;
use super::sources::Mirror;
use crate::progress::step;
use crate::system;

/// apt with its own list of sources and its own state, in a temporary folder.
pub(crate) struct Apt {
    folder: tempfile::TempDir,
    suites: Vec<String>,
}

impl Apt {
    /// Reads the package lists of the suites from the mirror.
    ///
    /// # Errors
    /// apt cannot read the package lists.
    pub(crate) fn update(mirror: &Mirror, suites: &[&str], cache: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix(APT_PREFIX)
            .tempdir_in(cache)
            .with_context(|| format!("cannot create a folder in {}", cache.display()))?;
        for name in ["lists/partial", "archives/partial"] {
            let path = folder.path().join(name);
            fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        }
        let options = mirror.signed_by.as_ref().map_or_else(String::new, |key| format!("[signed-by={key}] "));
        let lines: String = suites.iter().map(|suite| format!("deb {options}{} {suite} main\n", mirror.uri)).collect();
        let list = folder.path().join("sources.list");
        fs::write(&list, lines).with_context(|| format!("cannot write {}", list.display()))?;
        let apt = Self { folder, suites: suites.iter().map(|&suite| suite.to_owned()).collect() };
        step(&format!("reading package lists of {}", suites.join(" and ")), || {
            system::quiet(apt.command("apt-get").arg("update").arg("--error-on=any"))
        })?;
        Ok(apt)
    }

    /// Downloads packages, each `NAME` or `NAME/SUITE`, and unpacks them into one folder.
    ///
    /// # Errors
    /// A package cannot be downloaded or unpacked.
    pub(crate) fn unpack(&self, packages: &[String], into: &Path) -> Result<()> {
        let archives = self.folder.path().join("packages");
        fs::create_dir_all(&archives).with_context(|| format!("cannot create {}", archives.display()))?;
        step(&format!("downloading {}", packages.join(", ")), || {
            system::quiet(self.command("apt-get").arg("download").args(packages).current_dir(&archives))
        })?;
        extract_all(&archives, into)
    }

    /// Downloads packages with all packages that they depend on, whatever this system has installed, and unpacks them
    /// into one folder.
    ///
    /// # Errors
    /// A package cannot be downloaded or unpacked, or a dependency cannot be satisfied.
    pub(crate) fn unpack_with_dependencies(&self, packages: &[&str], into: &Path) -> Result<()> {
        step(&format!("downloading {} and what they need", packages.join(", ")), || {
            let mut command = self.command("apt-get");
            command.args(["-o", "Dir::State::status=/dev/null"]);
            command.args(["install", "--download-only", "--yes", "--no-install-recommends"]).args(packages);
            system::quiet(&mut command)
        })?;
        extract_all(&self.folder.path().join("archives"), into)
    }

    /// The packages that a package depends on directly.
    ///
    /// # Errors
    /// apt-cache cannot be run.
    pub(crate) fn dependencies(&self, package: &str) -> Result<Vec<String>> {
        let text = system::output(self.command("apt-cache").args(["depends", package]))?;
        let names = text.lines().filter_map(|line| line.trim().strip_prefix("Depends:"));
        Ok(names.map(|name| name.trim().to_owned()).collect())
    }

    /// The version that would be downloaded; `None` if the package does not exist.
    ///
    /// # Errors
    /// apt-cache cannot be run.
    pub(crate) fn candidate(&self, package: &str) -> Result<Option<String>> {
        let text = system::output(self.command("apt-cache").args(["policy", package]))?;
        let version = text.lines().find_map(|line| line.trim().strip_prefix("Candidate:")).map(str::trim);
        Ok(version.filter(|version| *version != "(none)").map(str::to_owned))
    }

    fn command(&self, program: &str) -> Command {
        let folder = self.folder.path();
        let mut command = Command::new(program);
        command.env("LC_ALL", "C").arg("--quiet");
        let options = [
            format!("Dir::Etc::sourcelist={}", folder.join("sources.list").display()),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            "Dir::Etc::preferences=/dev/null".to_owned(),
            "Dir::Etc::preferencesparts=/dev/null".to_owned(),
            format!("Dir::State::lists={}", folder.join("lists").display()),
            format!("Dir::Cache={}", folder.display()),
            // Only names and versions of packages are needed.
            "Acquire::Languages=none".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false".to_owned(),
            // Mirrors drop connections.
            "Acquire::Retries=3".to_owned(),
            // apt's sandbox user may have no access to the cache.
            "APT::Sandbox::User=".to_owned(),
        ];
        for option in options {
            command.arg("-o").arg(option);
        }
        // Packages of another release are requested explicitly.
        if let Some(suite) = self.suites.first() {
            command.arg("-o").arg(format!("APT::Default-Release={suite}"));
        }
        command
    }
}

/// Unpacks the packages of a folder and removes them.
fn extract_all(archives: &Path, into: &Path) -> Result<()> {
    for archive in debs(archives)? {
        system::quiet(Command::new("dpkg-deb").arg("--extract").arg(&archive).arg(into))
            .with_context(|| format!("cannot unpack {}", archive.display()))?;
        fs::remove_file(&archive).with_context(|| format!("cannot remove {}", archive.display()))?;
    }
    Ok(())
}

fn debs(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut debs: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == "deb"))
        .collect();
    debs.sort();
    if debs.is_empty() {
        bail!("apt downloaded nothing into {}", folder.display());
    }
    Ok(debs)
}
