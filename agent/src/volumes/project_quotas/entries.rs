//! The content of `/etc/projects` (`id:directory`) and `/etc/projid` (`name:id`, see projid(5)), of which the agent changes
//! lines of its own only: `<id>:<directory of a volume>` and `volume<id>:<id>`, as a kubelet writes them. Pure.
//!
//! Other lines, which may be written by hand, damaged or no text at all, are kept byte for byte.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::error::ProjectQuotaError;

/// The lowest id that is given to volumes, as by a kubelet.
pub(super) const FIRST: u32 = 1_048_577;
/// The highest one: a kubelet reads ids as signed numbers.
const LAST: u32 = i32::MAX as u32;
/// So many ids are tried that no file names and that are in use all the same.
const TRIES: usize = 4096;

/// Both files.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Entries {
    /// `/etc/projects`
    pub(super) projects: Vec<u8>,
    /// `/etc/projid`
    pub(super) names: Vec<u8>,
}

impl Entries {
    /// The id that is recorded for a volume's directory, and for no other one.
    ///
    /// # Errors
    /// The lines of the directory, or of its id, are not the agent's.
    pub(super) fn id_of(&self, directory: &Path) -> Result<Option<u32>, ProjectQuotaError> {
        // To the byte, as lines are added and removed.
        let is_same = |found: &Path| found.as_os_str() == directory.as_os_str();
        let of_directory: BTreeSet<u32> =
            self.directories().filter(|(_, found)| is_same(found)).map(|(id, _)| id).collect();
        let foreign = |id| ProjectQuotaError::Foreign { id, directory: directory.to_owned() };
        match of_directory.iter().copied().collect::<Vec<_>>()[..] {
            [] => Ok(None),
            [id] if self.is_own(id) => Ok(Some(id)),
            [id, ..] => Err(foreign(id)),
        }
    }

    /// Ids and directories of `/etc/projects`, as far as they can be read.
    pub(super) fn directories(&self) -> impl Iterator<Item = (u32, &Path)> {
        lines(&self.projects).filter_map(|line| {
            let (id, directory) = split(line)?;
            Some((number(id)?, Path::new(OsStr::from_bytes(directory))))
        })
    }

    /// True if the id is one of those for volumes, at most one directory has it, and its name, if it has one, is that of a
    /// volume.
    pub(super) fn is_own(&self, id: u32) -> bool {
        let has_id = |line: &&[u8]| numbers(line).any(|found| found == id);
        (FIRST..=LAST).contains(&id)
            && lines(&self.projects).filter(has_id).count() <= 1
            && lines(&self.names).filter(has_id).all(|line| line == name_line(id).as_bytes())
    }

    /// The lowest id for volumes that no line has and that is not in use.
    ///
    /// # Errors
    /// It is not known whether an id is in use; none was found.
    pub(super) fn free_id(
        &self,
        mut is_in_use: impl FnMut(u32) -> Result<bool, ProjectQuotaError>,
    ) -> Result<u32, ProjectQuotaError> {
        let taken: BTreeSet<u32> = lines(&self.projects).chain(lines(&self.names)).flat_map(numbers).collect();
        for id in (FIRST..=LAST).filter(|id| !taken.contains(id)).take(TRIES) {
            if !is_in_use(id)? {
                return Ok(id);
            }
        }
        Err(ProjectQuotaError::NoneFree { tries: TRIES })
    }

    /// With the lines of a volume. Those that are there stay where they are.
    pub(super) fn with(&self, id: u32, directory: &Path) -> Self {
        Self {
            projects: with_line(&self.projects, &directory_line(id, directory)),
            names: with_line(&self.names, name_line(id).as_bytes()),
        }
    }

    /// Without the lines of a volume. The name stays if another directory has the id.
    pub(super) fn without(&self, id: u32, directory: &Path) -> Self {
        let projects = without_line(&self.projects, &directory_line(id, directory));
        let is_named = lines(&projects).flat_map(numbers).any(|found| found == id);
        let names = if is_named { self.names.clone() } else { without_line(&self.names, name_line(id).as_bytes()) };
        Self { projects, names }
    }
}

/// Whether a directory can stand in a line.
///
/// # Errors
/// It has a line break, or is not absolute.
pub(super) fn check(directory: &Path) -> Result<(), ProjectQuotaError> {
    match directory.is_absolute() && !directory.as_os_str().as_bytes().contains(&b'\n') {
        true => Ok(()),
        false => Err(ProjectQuotaError::NoLine { directory: directory.to_owned() }),
    }
}

fn directory_line(id: u32, directory: &Path) -> Vec<u8> {
    [format!("{id}:").as_bytes(), directory.as_os_str().as_bytes()].concat()
}

fn name_line(id: u32) -> String {
    format!("volume{id}:{id}")
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| *byte == b'\n')
}

fn with_line(text: &[u8], line: &[u8]) -> Vec<u8> {
    if lines(text).any(|found| found == line) {
        return text.to_owned();
    }
    let end: &[u8] = if text.is_empty() || text.ends_with(b"\n") { b"" } else { b"\n" };
    [text, end, line, b"\n"].concat()
}

fn without_line(text: &[u8], line: &[u8]) -> Vec<u8> {
    let kept =
        text.split_inclusive(|byte| *byte == b'\n').filter(|found| found.strip_suffix(b"\n").unwrap_or(found) != line);
    kept.flatten().copied().collect()
}

/// A line at its first colon.
fn split(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let colon = line.iter().position(|byte| *byte == b':')?;
    Some((&line[..colon], &line[colon + 1..]))
}

/// A field that is a number and nothing else.
fn number(field: &[u8]) -> Option<u32> {
    let digits = field.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(field).ok().filter(|_| digits)?.parse().ok()
}

/// All numbers that a reader of the line could take for an id, however it treats blanks and what follows the digits.
fn numbers(line: &[u8]) -> impl Iterator<Item = u32> {
    line.split(|byte| *byte == b':').filter_map(|field| {
        let field = field.trim_ascii_start();
        let digits = field.iter().take_while(|byte| byte.is_ascii_digit()).count();
        number(&field[..digits])
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DIRECTORY: &str = "/root/pods/u/volumes/kubernetes.io~empty-dir/v";

    fn entries(projects: &str, names: &str) -> Entries {
        Entries { projects: projects.into(), names: names.into() }
    }

    fn id_of(entries: &Entries) -> Result<Option<u32>, String> {
        entries.id_of(Path::new(DIRECTORY)).map_err(|error| error.to_string())
    }

    #[test]
    fn only_ids_for_volumes_that_one_directory_has_are_the_agents() {
        let d = DIRECTORY;
        let foreign = |id: u32| Err(format!("project {id} of {d} was not assigned by a kubelet, or not to it alone"));
        for (projects, names, expected) in [
            (String::new(), "", Ok(None)),
            (format!("1048577:{d}\n"), "volume1048577:1048577\n", Ok(Some(1_048_577))),
            (format!("1048577:{d}"), "volume1048577:1048577", Ok(Some(1_048_577))),
            // An agent that was killed between the two files.
            (format!("1048580:{d}\n"), "", Ok(Some(1_048_580))),
            (format!("#1048577:{d}\n 1048577:{d}\n1048577:{d}x\n"), "", Ok(None)),
            (format!("1048577:/{d}\n"), "", Ok(None)),
            (format!("1048577:{d}\n1048577:/other\n"), "", foreign(1_048_577)),
            (format!("1048577:{d}\n1048577x:/other\n"), "", foreign(1_048_577)),
            (format!("1048577:{d}\n1048577:{d}\n"), "", foreign(1_048_577)),
            (format!("1048577:{d}\n1048578:{d}\n"), "", foreign(1_048_577)),
            (format!("1048577:{d}\n"), "mine:1048577\n", foreign(1_048_577)),
            (format!("1048577:{d}\n"), "volume1048577: 1048577\n", foreign(1_048_577)),
            (format!("0:{d}\n"), "", foreign(0)),
            (format!("1048576:{d}\n"), "volume1048576:1048576\n", foreign(1_048_576)),
            (format!("2147483648:{d}\n"), "", foreign(2_147_483_648)),
            (format!("4294967296:{d}\n"), "", Ok(None)),
        ] {
            assert_eq!(id_of(&entries(&projects, names)), expected, "{projects:?} {names:?}");
        }
    }

    #[test]
    fn a_new_id_is_in_no_line_and_not_in_use() {
        let free = |projects: &str, names: &str, used: &[u32]| {
            entries(projects, names).free_id(|id| Ok(used.contains(&id))).map_err(|error| error.to_string())
        };
        for (projects, names, used, expected) in [
            ("", "", &[][..], FIRST),
            ("1048577:/a\n", "", &[], FIRST + 1),
            ("1048577:/a\n", "volume1048578:1048578\n", &[1_048_579, 1_048_581], FIRST + 3),
            // Other readers may parse these lines in another way.
            (" 1048577 :/a\n\t1048578:/b\n1048579/c:1048580 # old\n", "by-hand: 1048581\nx:1048582y\n", &[], FIRST + 6),
            // Not ids.
            ("#1048577:/a\n/1048577:/b\n99999999999999999999:/c\n", "1048577a\n-1:x\n", &[], FIRST + 1),
            ("1048576:/a\n1048578:/b", "", &[], FIRST),
        ] {
            assert_eq!(free(projects, names, used), Ok(expected), "{projects:?} {names:?} {used:?}");
        }
        let mut tried = 0;
        let none = Entries::default().free_id(|_| {
            tried += 1;
            Ok(true)
        });
        assert_eq!(none.map_err(|error| error.to_string()), Err("no project id is free: 4096 are in use".to_owned()));
        assert_eq!(tried, TRIES);
    }

    #[test]
    fn lines_are_added_at_the_end_and_removed_alone() {
        let d = Path::new(DIRECTORY);
        let hand =
            entries("# by hand\r\n10:/srv: a\n\n1048577:/mine\nno line end", "srv:10\n\nvolume1048577:1048577\n");
        let with = hand.with(1_048_578, d);
        let expected = entries(
            &format!("# by hand\r\n10:/srv: a\n\n1048577:/mine\nno line end\n1048578:{DIRECTORY}\n"),
            "srv:10\n\nvolume1048577:1048577\nvolume1048578:1048578\n",
        );
        assert_eq!(with, expected);
        assert_eq!(with.with(1_048_578, d), with, "both lines are there");
        let without = with.without(1_048_578, d);
        assert_eq!(without, Entries { projects: [&hand.projects[..], b"\n"].concat(), ..hand.clone() });
        assert_eq!(without.without(1_048_578, d), without);
        assert_eq!(hand.without(1_048_577, d), hand, "another directory has the id");
        let shared = hand.with(1_048_577, d);
        assert_eq!(shared.without(1_048_577, d).names, hand.names, "and keeps its name");
        let named = entries(&format!("1048577:{DIRECTORY}\n"), "mine:1048577\n");
        assert_eq!(named.without(1_048_577, d), entries("", "mine:1048577\n"));
    }

    #[test]
    fn a_directory_that_would_be_two_lines_is_refused() {
        assert!(check(Path::new("/root/a:b c\u{e9}/#")).is_ok());
        for path in ["/root/pods/u\n1:/etc/volumes", "pods/u", ""] {
            let error = check(Path::new(path)).expect_err(path).to_string();
            assert_eq!(error, format!("{path:?} cannot be recorded as a project's directory"));
        }
    }

    proptest! {
        /// Adding and removing a volume leaves every byte of other lines, whatever they are.
        #[test]
        fn other_lines_are_kept(
            projects in proptest::collection::vec(any::<u8>(), 0..200),
            names in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b':'), Just(b'1'), any::<u8>()], 0..200),
        ) {
            let before = Entries { projects, names };
            let id = before.free_id(|_| Ok(false)).expect("an id");
            prop_assert_eq!(before.id_of(Path::new(DIRECTORY)).expect("no line of it"), None);
            let with = before.with(id, Path::new(DIRECTORY));
            prop_assert_eq!(with.id_of(Path::new(DIRECTORY)).expect("its line"), Some(id));
            prop_assert!(with.projects.starts_with(&before.projects) && with.names.starts_with(&before.names));
            let after = with.without(id, Path::new(DIRECTORY));
            let ended = |text: &[u8]| {
                let end: &[u8] = if text.is_empty() || text.ends_with(b"\n") { b"" } else { b"\n" };
                [text, end].concat()
            };
            prop_assert_eq!(after, Entries { projects: ended(&before.projects), names: ended(&before.names) });
        }
    }
}
