//! The package format: an `ar` archive of two compressed tarballs. The same content gives the same bytes.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

/// A tarball under construction; all files belong to root.
pub(super) struct Tarball {
    tar: tar::Builder<GzEncoder<Vec<u8>>>,
    folders: BTreeSet<String>,
    bytes: u64,
}

impl Tarball {
    pub(super) fn new() -> Self {
        let tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
        Self { tar, folders: BTreeSet::new(), bytes: 0 }
    }

    /// Adds a file and its parent folders.
    pub(super) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.folders_of(path)?;
        let mut header = header(tar::EntryType::Regular, mode);
        header.set_size(content.len() as u64);
        self.bytes += content.len() as u64;
        self.tar.append_data(&mut header, path, content)
    }

    /// Adds a symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.folders_of(path)?;
        self.tar.append_link(&mut header(tar::EntryType::Symlink, 0o777), path, target)
    }

    /// Size of the files on disk, in KiB.
    pub(super) fn kibibytes(&self) -> u64 {
        self.bytes.div_ceil(1024)
    }

    /// The compressed tarball.
    pub(super) fn finish(self) -> io::Result<Vec<u8>> {
        self.tar.into_inner()?.finish()
    }

    fn folders_of(&mut self, path: &str) -> io::Result<()> {
        for (end, _) in path.match_indices('/') {
            let folder = format!("{}/", &path[..end]);
            if self.folders.insert(folder.clone()) {
                self.tar.append_data(&mut header(tar::EntryType::Directory, 0o755), folder, io::empty())?;
            }
        }
        Ok(())
    }
}

/// Owner root and no time: dpkg needs none, and packages with the same content are identical.
fn header(kind: tar::EntryType, mode: u32) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    for set in [tar::Header::set_username, tar::Header::set_groupname] {
        set(&mut header, "root").expect("the name is short and plain");
    }
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    header
}

/// Writes the package.
pub(super) fn write(path: &Path, control: &[u8], data: &[u8]) -> io::Result<()> {
    let mut members = ar::Builder::new(File::create(path)?);
    for (name, content) in [("debian-binary", &b"2.0\n"[..]), ("control.tar.gz", control), ("data.tar.gz", data)] {
        let mut header = ar::Header::new(name.as_bytes().to_vec(), content.len() as u64);
        header.set_mode(0o100_644);
        members.append(&header, content)?;
    }
    members.into_inner()?.sync_all()
}
