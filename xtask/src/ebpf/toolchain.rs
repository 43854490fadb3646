//! The toolchain that builds BPF programs: nightly, the core library's source, and bpf-linker.
//!
//! Nightly must be installed. If it lacks the source of `core`, Debian's package of the same release is unpacked in the
//! cache and linked into the toolchain. bpf-linker is built against the toolchain's own LLVM, since it must read the
//! bitcode of this compiler.

use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::anyhow;
use keblet_peers::Cache;

use crate::paths;
use crate::progress::step;
use crate::setup::apt::Apt;
use crate::setup::sources;
use crate::system;

/// The release of bpf-linker that was tested.
const LINKER_VERSION: &str = "0.13.0";
/// Debian's suite with the newest Rust.
const SUITE: &str = "sid";
const SOURCE_PACKAGE: &str = "rust-src";

/// A toolchain that can build the probes.
pub(super) struct Toolchain {
    /// Its name for rustup.
    pub name: String,
    /// Its sysroot.
    sysroot: PathBuf,
    /// The matching bpf-linker.
    pub linker: PathBuf,
}

/// The toolchain cannot be provided.
#[derive(Debug)]
pub(super) enum ToolchainError {
    /// A part of the toolchain is not available; the prebuilt object is kept.
    Unavailable(String),
    /// An unexpected failure.
    Failed(anyhow::Error),
}

impl std::fmt::Display for ToolchainError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unavailable(why) => f.write_str(why),
            Self::Failed(error) => write!(f, "{error:#}"),
        }
    }
}

impl std::error::Error for ToolchainError {}

impl From<anyhow::Error> for ToolchainError {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

impl Toolchain {
    /// Folder of its shared libraries.
    pub(super) fn libraries(&self) -> PathBuf {
        self.sysroot.join("lib")
    }
}

/// The compiler's version.
#[derive(Debug, PartialEq)]
struct Version {
    /// `1.97.0-nightly`.
    release: String,
    /// Major number of its LLVM.
    llvm: u32,
}

impl Version {
    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let llvm = field("LLVM version:")?.split('.').next()?.parse().ok()?;
        Some(Self { release: field("release:")?.to_owned(), llvm })
    }

    /// Whether the source of release `other` fits: a nightly is built from the source of the release it will become.
    fn fits(&self, other: &str) -> bool {
        let minor = |text: &str| text.split('.').take(2).map(str::to_owned).collect::<Vec<_>>();
        minor(&self.release) == minor(other)
    }
}

/// Finds or builds the toolchain; returns quickly if it is complete.
///
/// # Errors
/// [`ToolchainError::Unavailable`] if a part can only be provided by the user, otherwise an unexpected failure.
pub(super) fn prepare(cache: &Cache) -> Result<Toolchain, ToolchainError> {
    let name = std::env::var("KEBLET_EBPF_TOOLCHAIN").unwrap_or_else(|_| "nightly".to_owned());
    let rustc =
        |arguments: &[&str]| system::output(Command::new("rustup").args(["run", &name, "rustc"]).args(arguments));
    let text = rustc(&["-vV"]).map_err(|error| {
        let cure = format!("the probes need a nightly compiler: rustup toolchain install {name}");
        ToolchainError::Unavailable(format!("{cure} ({error:#})"))
    })?;
    let version = Version::parse(&text).ok_or_else(|| anyhow!("cannot parse the output of rustc -vV: {text}"))?;
    let sysroot = PathBuf::from(rustc(&["--print", "sysroot"])?.trim());
    let folder = cache.root().join("ebpf");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    provide_core(&sysroot, &version, &folder)?;
    let linker = provide_linker(&sysroot, &version, &folder)?;
    Ok(Toolchain { name, sysroot, linker })
}

/// Ensures that the source of `core` is where cargo looks for it.
fn provide_core(sysroot: &Path, version: &Version, folder: &Path) -> Result<(), ToolchainError> {
    let place = sysroot.join("lib/rustlib/src/rust/library");
    if place.join("core/Cargo.toml").exists() {
        return Ok(());
    }
    let source = folder.join(format!("core-{}", version.release));
    if !source.join("core/Cargo.toml").exists() {
        unpack_core(version, folder, &source)?;
    }
    // A dangling link points to a cache that was removed.
    if place.is_symlink() {
        fs::remove_file(&place).with_context(|| format!("cannot remove the stale link {}", place.display()))?;
    }
    if let Some(parent) = place.parent() {
        fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    }
    std::os::unix::fs::symlink(&source, &place)
        .with_context(|| format!("cannot link {} to {}", place.display(), source.display()))?;
    Ok(())
}

/// Unpacks the source from Debian's package of the same release.
fn unpack_core(version: &Version, folder: &Path, into: &Path) -> Result<(), ToolchainError> {
    let cure = "install it with: rustup component add rust-src --toolchain nightly";
    let unavailable = |why: String| ToolchainError::Unavailable(format!("{why}; {cure}"));
    let mirror = sources::mirror()
        .map_err(|error| unavailable(format!("no source of the core library for {}: {error:#}", version.release)))?;
    let apt = Apt::update(&mirror, &[SUITE], folder)
        .map_err(|error| unavailable(format!("no package lists of {SUITE}: {error:#}")))?;
    let found = apt.candidate(SOURCE_PACKAGE)?;
    match found {
        Some(found) if version.fits(&found) => {}
        other => {
            let other = other.unwrap_or_else(|| "none".to_owned());
            return Err(unavailable(format!("Debian's {SOURCE_PACKAGE} ({other}) does not fit {}", version.release)));
        }
    }
    let unpacked = tempfile::Builder::new().prefix("rust-src-").tempdir_in(folder).context("no temporary folder")?;
    apt.unpack(&[SOURCE_PACKAGE.to_owned()], unpacked.path())?;
    let library = library_in(&unpacked.path().join("usr/src"))?;
    fs::rename(&library, into).with_context(|| format!("cannot move {} to {}", library.display(), into.display()))?;
    Ok(())
}

/// `usr/src/rustc-<version>/library`.
fn library_in(folder: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let libraries = entries.flatten().map(|entry| entry.path().join("library"));
    libraries
        .into_iter()
        .find(|library| library.join("core/Cargo.toml").exists())
        .with_context(|| format!("no core library in {}", folder.display()))
}

/// Builds bpf-linker unless the one in the cache was built against the same LLVM.
fn provide_linker(sysroot: &Path, version: &Version, folder: &Path) -> Result<PathBuf> {
    let root = folder.join("bpf-linker");
    let program = root.join("bin/bpf-linker");
    let llvm = llvm_in(&sysroot.join("lib"))?;
    let stamp = root.join("built-for");
    let recipe = format!("{LINKER_VERSION} {}\n", llvm.display());
    if program.exists() && fs::read_to_string(&stamp).is_ok_and(|there| there == recipe) {
        return Ok(program);
    }
    let prefix = llvm_prefix(&llvm, version, folder)?;
    step("building bpf-linker", || {
        let feature = format!("llvm-{}", version.llvm);
        system::quiet(
            Command::new(paths::cargo())
                .args(["install", "bpf-linker", "--version", LINKER_VERSION, "--locked", "--force"])
                .args(["--no-default-features", "--features", &feature, "--root"])
                .arg(&root)
                .env("LLVM_PREFIX", &prefix)
                .env("LD_LIBRARY_PATH", sysroot.join("lib"))
                .env("CARGO_TARGET_DIR", folder.join("target-linker"))
                .current_dir(folder),
        )
    })?;
    let products = folder.join("target-linker");
    fs::remove_dir_all(&products).with_context(|| format!("cannot remove {}", products.display()))?;
    fs::write(&stamp, recipe).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(program)
}

/// The toolchain's shared LLVM: the large file, not the linker script with a similar name.
fn llvm_in(libraries: &Path) -> Result<PathBuf> {
    let entries = fs::read_dir(libraries).with_context(|| format!("cannot read {}", libraries.display()))?;
    let is_llvm = |path: &PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("libLLVM"))
    };
    let size = |path: &PathBuf| fs::metadata(path).map_or(0, |meta| meta.len());
    entries
        .flatten()
        .map(|entry| entry.path())
        .filter(is_llvm)
        .max_by_key(size)
        .with_context(|| format!("no libLLVM in {}", libraries.display()))
}

/// A folder with the structure of an LLVM installation that contains only its library.
fn llvm_prefix(llvm: &Path, version: &Version, folder: &Path) -> Result<PathBuf> {
    let prefix = folder.join("llvm");
    let libraries = prefix.join("lib");
    if prefix.exists() {
        fs::remove_dir_all(&prefix).with_context(|| format!("cannot remove {}", prefix.display()))?;
    }
    fs::create_dir_all(&libraries).with_context(|| format!("cannot create {}", libraries.display()))?;
    for name in ["libLLVM.so".to_owned(), format!("libLLVM-{}.so", version.llvm)] {
        let link = libraries.join(name);
        std::os::unix::fs::symlink(llvm, &link).with_context(|| format!("cannot create {}", link.display()))?;
    }
    Ok(prefix)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NIGHTLY: &str = "\
rustc 1.97.0-nightly (0123456789 2026-05-19)
binary: rustc
host: x86_64-unknown-linux-gnu
release: 1.97.0-nightly
LLVM version: 22.1.4
";

    #[test]
    fn release_and_llvm_are_parsed() {
        let version = Version::parse(NIGHTLY).unwrap();
        assert_eq!(version, Version { release: "1.97.0-nightly".to_owned(), llvm: 22 });
        assert_eq!(Version::parse("rustc 1.97.0"), None);
    }

    #[test]
    fn source_of_the_same_minor_release_fits() {
        let version = Version::parse(NIGHTLY).unwrap();
        for (other, fits) in [
            ("1.97.1+dfsg1-1", true),
            ("1.97.0~beta.2+dfsg1-1", true),
            ("1.98.0+dfsg1-1", false),
            ("2.97.0", false),
            ("", false),
        ] {
            assert_eq!(version.fits(other), fits, "{other}");
        }
    }

    #[test]
    fn the_library_is_found_by_its_size() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("libLLVM-22-nightly.so"), "INPUT(libLLVM.so.22)").unwrap();
        fs::write(folder.path().join("librustc_driver.so"), vec![0; 9999]).unwrap();
        assert!(llvm_in(folder.path()).unwrap().ends_with("libLLVM-22-nightly.so"));
        fs::write(folder.path().join("libLLVM.so.22"), vec![0; 999]).unwrap();
        assert!(llvm_in(folder.path()).unwrap().ends_with("libLLVM.so.22"));
    }
}
