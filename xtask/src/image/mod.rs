//! `cargo xtask image`: a container image with keblet and the libraries that it needs, as an archive of the OCI layout.
//! No registry and no builder is needed; `ctr --namespace k8s.io images import FILE` loads it.
//!
//! The image has no shell and no other program. Libraries are those of the machine that packs it, so it runs on any
//! kernel that this C library supports.

mod libraries;

use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use keblet_peers::AGENT_IMAGE;

use crate::paths;
use crate::progress::step;
use crate::run;
use crate::setup::images::Image;
use crate::setup::images::Layer;
use crate::setup::images::write_archive;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The image's name without the tag, as the manifests in `deploy` have it.
const NAME: &str = "keblet.dev/keblet";
const PROGRAM: &str = "usr/bin/keblet";
/// Root, and the user of files whose owner has no name.
const PASSWD: &str = "root:x:0:0:root:/:/usr/bin/keblet\nnobody:x:65534:65534:nobody:/:/usr/bin/keblet\n";
const GROUP: &str = "root:x:0:\nnogroup:x:65534:\n";

/// What to pack, and where to put it.
#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Pack this binary instead of building one for release.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Name and tag of the image [default: keblet.dev/keblet and the version].
    #[arg(long, value_name = "NAME:TAG", value_parser = name_and_tag)]
    name: Option<String>,
    /// Write this archive [default: image/keblet.tar in cargo's target folder].
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

fn name_and_tag(text: &str) -> Result<String, String> {
    let last = text.rsplit('/').next().unwrap_or_default();
    let good = last.split_once(':').is_some_and(|(name, tag)| !name.is_empty() && !tag.is_empty());
    let plain = text.chars().all(|c| c.is_ascii_alphanumeric() || "./:-_".contains(c));
    (good && plain).then(|| text.to_owned()).ok_or_else(|| "expected NAME:TAG".to_owned())
}

/// Packs the image and prints the path of the archive.
///
/// # Errors
/// The agent cannot be built or read, a library is not found, or the archive cannot be written.
pub(crate) fn image(arguments: &Arguments) -> Result<()> {
    let binary = match &arguments.binary {
        Some(binary) => binary.clone(),
        None => run::build_release()?,
    };
    let default = || paths::target().join("image/keblet.tar");
    let archive = arguments.output.clone().unwrap_or_else(default);
    let name = arguments.name.clone().unwrap_or_else(|| format!("{NAME}:{VERSION}"));
    pack(&binary, &name, &archive)?;
    println!("{}", archive.display());
    Ok(())
}

/// Packs the agent that the tests run, unless that was done since it was built; returns the archive.
///
/// # Errors
/// The agent was not built, or the archive cannot be written.
pub(crate) fn of_tests() -> Result<PathBuf> {
    let binary = run::agent();
    let archive = binary.with_file_name(AGENT_IMAGE);
    if !is_newer(&archive, &binary)? {
        step("packing the agent's image", || pack(&binary, &format!("{NAME}:{VERSION}"), &archive))?;
    }
    Ok(archive)
}

/// Whether a file exists and was written after another one, which must exist.
fn is_newer(file: &Path, than: &Path) -> Result<bool> {
    let written = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified());
    let other = written(than).with_context(|| format!("cannot inspect {}", than.display()))?;
    Ok(written(file).is_ok_and(|written| written > other))
}

/// Packs `binary` and its libraries into an archive.
fn pack(binary: &Path, name: &str, archive: &Path) -> Result<()> {
    let layer = layer(binary)?;
    let folder = archive.parent().context("the archive has no folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let entrypoint = format!("/{PROGRAM}");
    let image = Image { name, layer: layer.into(), entrypoint: &[&entrypoint], command: &["observe", "--json"] };
    write_archive(archive, &[image])
}

fn layer(binary: &Path) -> Result<Vec<u8>> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let program = read(binary)?;
    let mut layer = Layer::new();
    layer.folder("etc", 0o755)?;
    layer.file("etc/passwd", 0o644, PASSWD.as_bytes())?;
    layer.file("etc/group", 0o644, GROUP.as_bytes())?;
    // Mount points, since the root is read-only.
    for folder in ["run", "sys", "proc", "dev", "tmp"] {
        layer.folder(folder, if folder == "tmp" { 0o1777 } else { 0o755 })?;
    }
    let mut folders = vec!["usr".to_owned(), "usr/bin".to_owned(), "usr/share".to_owned()];
    for folder in &folders {
        layer.folder(folder, 0o755)?;
    }
    layer.file(PROGRAM, 0o755, &program)?;
    layer.file("usr/share/LICENSE", 0o644, &read(&paths::repository().join("LICENSE"))?)?;
    for library in libraries::needed(binary)? {
        for folder in parents(&library) {
            if !folders.contains(&folder) {
                layer.folder(&folder, 0o755)?;
                folders.push(folder);
            }
        }
        // The content behind links, under the path at which the loader looks.
        layer.file(library.trim_start_matches('/'), 0o755, &read(Path::new(&library))?)?;
    }
    layer.finish()
}

/// The folders of an absolute path, outermost first, without a leading slash.
fn parents(path: &str) -> Vec<String> {
    let path = path.trim_start_matches('/');
    path.match_indices('/').map(|(end, _)| path[..end].to_owned()).collect()
}

#[cfg(test)]
mod tests;
