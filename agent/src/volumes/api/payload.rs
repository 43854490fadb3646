//! The content of a volume: files by path. Pure.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::volumes::VolumeError;

/// Most bytes of all files together: 64 objects of the size that the API server accepts. Each of them takes memory of the
/// agent's cgroup if the volume is in memory, and is read again at every refresh.
const MAX_BYTES: usize = 64 << 20;
/// Longest path, bytes.
const MAX_PATH: usize = 4096;
/// Longest part of a path, bytes.
const MAX_NAME: usize = 255;

/// One file.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct File {
    /// Shared with other files of the same value.
    pub(crate) data: Bytes,
    /// Permission bits.
    pub(crate) mode: u32,
    /// Its owner, if not root.
    pub(crate) owner: Option<u32>,
}

impl std::fmt::Debug for File {
    /// Content may be secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes, mode {:o}, owner {:?}", self.data.len(), self.mode, self.owner)
    }
}

/// Files by path; every path, and the size of all files, is checked when a file is put in.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Payload {
    files: BTreeMap<String, File>,
    /// Of all files, those with shared data each.
    bytes: usize,
}

/// A path that would lead elsewhere, or that no file system takes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what each case is")]
pub enum InvalidPath {
    #[error("invalid path: must not be empty: \"\"")]
    Empty,
    #[error("invalid path: must be relative path: {0}")]
    Absolute(String),
    #[error("invalid path: must be less than or equal to {MAX_PATH} characters")]
    TooLong,
    #[error("invalid path: must not contain '..': {0}")]
    Up(String),
    #[error("invalid path: filenames must be less than or equal to {MAX_NAME} characters")]
    NameTooLong,
    #[error("invalid path: must not start with '..': {0}")]
    Hidden(String),
    #[error("invalid path: must not contain NUL: {0:?}")]
    Nul(String),
    #[error("invalid path: {0} is both a file and a directory")]
    FileAndDirectory(String),
}

impl Payload {
    /// Puts a file at `path`, replacing one that is there.
    ///
    /// # Errors
    /// The path is invalid, or all files together exceed [`MAX_BYTES`].
    pub(crate) fn put(&mut self, path: &str, file: File) -> Result<(), VolumeError> {
        self.insert(normalized(path)?, file)
    }

    /// Puts in all files of another payload.
    ///
    /// # Errors
    /// All files together exceed [`MAX_BYTES`].
    pub(crate) fn merge(&mut self, other: Self) -> Result<(), VolumeError> {
        other.files.into_iter().try_for_each(|(path, file)| self.insert(path, file))
    }

    fn insert(&mut self, path: String, file: File) -> Result<(), VolumeError> {
        let replaced = self.files.get(&path).map_or(0, |file| file.data.len());
        let bytes = self.bytes - replaced + file.data.len();
        if bytes > MAX_BYTES {
            return Err(VolumeError::ContentTooLarge { limit: MAX_BYTES });
        }
        self.bytes = bytes;
        self.files.insert(path, file);
        Ok(())
    }

    /// Paths and files, in order of their paths.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, &File)> {
        self.files.iter().map(|(path, file)| (path.as_str(), file))
    }

    pub(crate) fn get(&self, path: &str) -> Option<&File> {
        self.files.get(path)
    }

    pub(crate) fn len(&self) -> usize {
        self.files.len()
    }

    /// First components of all paths: the names in the volume's own directory.
    pub(crate) fn top_names(&self) -> std::collections::BTreeSet<&str> {
        self.files.keys().map(|path| path.split('/').next().unwrap_or(path)).collect()
    }

    /// Checks that no file is where another one needs a directory.
    ///
    /// # Errors
    /// The path that is both.
    pub(crate) fn check(&self) -> Result<(), InvalidPath> {
        for path in self.files.keys() {
            let mut parents = path.match_indices('/').map(|(at, _)| &path[..at]);
            if let Some(parent) = parents.find(|parent| self.files.contains_key(*parent)) {
                return Err(InvalidPath::FileAndDirectory(parent.to_owned()));
            }
        }
        Ok(())
    }
}

/// The path without empty parts and `.`; refused if it leaves the volume or begins with `..`, as the names of versions do.
fn normalized(path: &str) -> Result<String, InvalidPath> {
    if path.is_empty() {
        return Err(InvalidPath::Empty);
    }
    if path.starts_with('/') {
        return Err(InvalidPath::Absolute(path.to_owned()));
    }
    if path.len() > MAX_PATH {
        return Err(InvalidPath::TooLong);
    }
    if path.contains('\0') {
        return Err(InvalidPath::Nul(path.to_owned()));
    }
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") {
        return Err(InvalidPath::Up(path.to_owned()));
    }
    if parts.iter().any(|part| part.len() > MAX_NAME) {
        return Err(InvalidPath::NameTooLong);
    }
    match parts.first() {
        None => Err(InvalidPath::Empty),
        Some(first) if first.starts_with("..") => Err(InvalidPath::Hidden(path.to_owned())),
        Some(_) => Ok(parts.join("/")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> File {
        file_of(0)
    }

    fn file_of(bytes: usize) -> File {
        File { data: vec![0_u8; bytes].into(), mode: 0o644, owner: None }
    }

    #[test]
    fn unsafe_paths_are_refused() {
        for (path, expected) in [
            ("a", Ok("a")),
            ("a/b/c.txt", Ok("a/b/c.txt")),
            ("./a//b/", Ok("a/b")),
            (".hidden", Ok(".hidden")),
            ("a/..b", Ok("a/..b")),
            ("a..", Ok("a..")),
            ("", Err("must not be empty")),
            (".", Err("must not be empty")),
            ("/etc/passwd", Err("must be relative path: /etc/passwd")),
            ("..", Err("must not contain '..': ..")),
            ("../x", Err("must not contain '..': ../x")),
            ("a/../../x", Err("must not contain '..'")),
            ("..data", Err("must not start with '..': ..data")),
            ("./..data", Err("must not start with '..'")),
            ("..2026_01_01", Err("must not start with '..'")),
            ("a\0b", Err("must not contain NUL")),
        ] {
            match (normalized(path), expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected),
                (Err(error), Err(text)) => assert!(error.to_string().contains(text), "{path:?}: {error}"),
                (result, _) => panic!("{path:?}: {result:?}"),
            }
        }
        assert_eq!(normalized(&"x".repeat(256)), Err(InvalidPath::NameTooLong));
        assert_eq!(normalized(&"x/".repeat(2049)), Err(InvalidPath::TooLong));
        assert!(normalized(&"x".repeat(255)).is_ok());
    }

    #[test]
    fn a_file_cannot_also_be_a_directory() {
        let mut payload = Payload::default();
        for path in ["a.b", "a/b/c", "ab"] {
            payload.put(path, file()).expect("valid");
        }
        assert_eq!(payload.check(), Ok(()));
        payload.put("a", file()).expect("valid by itself");
        assert_eq!(payload.check(), Err(InvalidPath::FileAndDirectory("a".into())));
        assert_eq!(payload.top_names().into_iter().collect::<Vec<_>>(), ["a", "a.b", "ab"]);
    }

    #[test]
    fn all_files_together_have_a_bound() {
        let (mut payload, full) = (Payload::default(), file_of(MAX_BYTES / 2));
        for path in ["a", "b", "./b"] {
            payload.put(path, full.clone()).expect("one that is replaced does not count");
        }
        let refused = "the files of a volume made from API objects must have at most 67108864 bytes together";
        assert_eq!(payload.put("c", file_of(1)).expect_err("one byte too many").to_string(), refused);
        payload.put("c", file()).expect("no more bytes");
        let mut other = Payload::default();
        other.put("b", file_of(1)).expect("valid");
        other.put("d", full).expect("valid");
        assert_eq!(payload.merge(other).expect_err("one byte too many").to_string(), refused);
    }
}
