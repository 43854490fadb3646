//! Digests of the probe object and of the sources it was built from.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use sha2::Digest as _;
use sha2::Sha256;

/// Folders below `ebpf/` whose files make the object.
const SOURCES: [&str; 2] = ["common", "probes"];

/// The digests of sources and object, in the format of the file beside the object.
///
/// # Errors
/// A source file cannot be read.
pub(super) fn text(root: &Path, object: &[u8]) -> Result<String> {
    let mut files = Vec::new();
    for folder in SOURCES {
        collect(&root.join(folder), &mut files)?;
    }
    files.sort();
    let mut sources = Sha256::new();
    for file in &files {
        let name = file.strip_prefix(root).unwrap_or(file);
        let content = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        // Path and length go first, so that moving text from one file to another changes the digest.
        sources.update(name.to_string_lossy().as_bytes());
        sources.update([0]);
        sources.update((content.len() as u64).to_le_bytes());
        sources.update(content);
    }
    Ok(format!("sources {}\nobject {}\n", hex(&sources.finalize()), hex(&Sha256::digest(object))))
}

fn collect(folder: &Path, into: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("cannot read {}", folder.display()))?.path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "target") {
                collect(&path, into)?;
            }
        } else if path.extension().is_some_and(|extension| ["rs", "toml", "lock"].iter().any(|kind| extension == *kind))
        {
            into.push(path);
        }
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
