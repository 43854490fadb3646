//! `cargo xtask ebpf`: builds the BPF programs and writes the object that the agent embeds.
//!
//! ```text
//! ebpf/common, ebpf/probes ─▶ nightly + bpf-linker ─▶ ebpf/prebuilt/probes.o
//!            └──────────────── digest ──────────────▶ ebpf/prebuilt/probes.sha256
//! ```
//! The object is part of the tree, so that building the agent needs no nightly; its digest identifies the sources it
//! was built from. Installs nothing outside of the cache except a link to the source of `core` in a toolchain that has
//! none.

mod digest;
mod object;
mod toolchain;

use std::fs;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::Cache;

use crate::paths;
use crate::progress::step;
use crate::system;
use toolchain::Toolchain;

/// Options of the command.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Build nothing: only check that the object in the tree was built from the sources in the tree.
    #[arg(long)]
    check: bool,
}

/// Builds the object, or checks the existing one.
///
/// # Errors
/// The object cannot be built or written, its records have another layout, or it does not match the sources.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let tree = Tree::of_this_repository();
    if arguments.check {
        return tree.check();
    }
    let toolchain = toolchain::prepare(&Cache::locate())?;
    let built = build(&toolchain, &Cache::locate())?;
    let contents = object::Contents::read(&built)?;
    if contents.layout != object::layout_of_this_build() {
        bail!("the object's records have another layout than the agent's on this machine");
    }
    tree.keep(&built)?;
    println!(
        "{}: {} programs, {} maps, {} bytes",
        tree.object().display(),
        contents.programs.len(),
        contents.maps.len(),
        built.len()
    );
    Ok(())
}

/// The folder of the BPF programs.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn of_this_repository() -> Self {
        Self { root: paths::repository().join("ebpf") }
    }

    fn object(&self) -> PathBuf {
        self.root.join("prebuilt/probes.o")
    }

    fn digest(&self) -> PathBuf {
        self.root.join("prebuilt/probes.sha256")
    }

    /// Writes an object and the digests of itself and of the sources.
    fn keep(&self, object: &[u8]) -> Result<()> {
        let text = digest::text(&self.root, object)?;
        write(&self.object(), object)?;
        write(&self.digest(), text.as_bytes())
    }

    /// Fails unless the object matches the current sources.
    fn check(&self) -> Result<()> {
        let object = read(&self.object())?;
        let kept = read(&self.digest())?;
        let now = digest::text(&self.root, &object)?;
        if kept != now.as_bytes() {
            bail!(
                "{} does not fit the sources in {}: run `cargo xtask ebpf`",
                self.object().display(),
                self.root.display()
            );
        }
        Ok(())
    }
}

/// Builds the probes and returns the object.
fn build(toolchain: &Toolchain, cache: &Cache) -> Result<Vec<u8>> {
    let target = cache.root().join("ebpf/target");
    step("building the probes", || {
        let mut cargo = Command::new("rustup");
        cargo.args(["run", &toolchain.name, "cargo", "build", "--release", "--locked"]);
        cargo.args(["--config", &format!("target.bpfel-unknown-none.linker={:?}", toolchain.linker)]);
        cargo.current_dir(Tree::of_this_repository().root.join("probes")).env("CARGO_TARGET_DIR", &target);
        // These describe the toolchain that runs this command and would select it instead of nightly.
        for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN", "RUSTFLAGS", "CARGO_ENCODED_RUSTFLAGS"] {
            cargo.env_remove(name);
        }
        system::quiet(cargo.env("LD_LIBRARY_PATH", toolchain.libraries()))
    })?;
    read(&target.join("bpfel-unknown-none/release/probes"))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The embedded object matches its sources.
    #[test]
    fn the_object_fits_its_sources() {
        Tree::of_this_repository().check().unwrap();
    }

    #[test]
    fn a_changed_source_fails_the_check() {
        let folder = tempfile::tempdir().unwrap();
        let tree = Tree { root: folder.path().to_owned() };
        let source = folder.path().join("probes/src/main.rs");
        write(&folder.path().join("common/Cargo.toml"), b"a").unwrap();
        write(&source, b"b").unwrap();
        tree.keep(b"object").unwrap();
        tree.check().unwrap();

        write(&source, b"c").unwrap();
        let error = tree.check().unwrap_err().to_string();
        assert!(error.ends_with("run `cargo xtask ebpf`"), "{error}");
        write(&source, b"b").unwrap();
        tree.check().unwrap();

        write(&folder.path().join("probes/src/new.rs"), b"").unwrap();
        tree.check().unwrap_err();
        fs::remove_file(folder.path().join("probes/src/new.rs")).unwrap();
        write(&tree.object(), b"another object").unwrap();
        tree.check().unwrap_err();
    }

    /// The records in the object have the layout that the agent reads.
    #[test]
    fn the_object_has_the_layout_of_this_build() {
        let contents = object::Contents::read(&read(&Tree::of_this_repository().object()).unwrap()).unwrap();
        assert_eq!(contents.layout, object::layout_of_this_build());
        for program in
            ["process_exit", "oom_victim", "cgroup_created", "cgroup_removed", "reclaim_begin", "reclaim_end"]
        {
            assert!(contents.programs.keys().any(|(_, name)| name == program), "no program {program}");
        }
    }

    /// A rebuild gives the same programs, maps and record layouts.
    #[test]
    #[ignore = "builds the probes: needs nightly, `cargo xtask setup`"]
    fn the_object_can_be_built_again() {
        let cache = Cache::locate();
        let toolchain = match toolchain::prepare(&cache) {
            Ok(toolchain) => toolchain,
            Err(toolchain::ToolchainError::Unavailable(why)) => {
                println!("not rebuilt, the object in the tree is kept: {why}");
                return;
            }
            Err(other) => panic!("{other:#}"),
        };
        let built = object::Contents::read(&build(&toolchain, &cache).unwrap()).unwrap();
        let kept = object::Contents::read(&read(&Tree::of_this_repository().object()).unwrap()).unwrap();
        assert_eq!(built.maps, kept.maps);
        assert_eq!(built.layout, kept.layout);
        // Another compiler version may order instructions differently, but gives the same set of programs.
        let names = |contents: &object::Contents| contents.programs.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&built), names(&kept));
    }
}
