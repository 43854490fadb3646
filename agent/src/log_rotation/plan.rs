//! Which files a rotation of one log deletes and compresses, and what it renames the log to. Pure.
//!
//! ```text
//!  0.log                        the runtime writes it
//!  0.log.20260102-030405        the newest rotated one: a reader may still be in it
//!  0.log.20260102-030301.gz     older ones
//!  0.log.20260102-030301.tmp    a compression in progress, or one that was interrupted
//! ```
//!
//! Other names are not touched, since a container that mounts the folder can create them.

use k8s_openapi::jiff::SignedDuration;
use k8s_openapi::jiff::civil::DateTime;

/// The kubelet's format, local time.
const STAMP: &str = "%Y%m%d-%H%M%S";

/// Kinds of files beside a log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Rotated and not compressed.
    Plain,
    Compressed,
    /// A compression that is not finished.
    Unfinished,
}

/// A file that a rotation made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Rotated<'a> {
    name: &'a str,
    kind: Kind,
    at: DateTime,
}

impl<'a> Rotated<'a> {
    fn parse(log: &str, name: &'a str) -> Option<Self> {
        let rest = name.strip_prefix(log)?.strip_prefix('.')?;
        let (stamp, kind) = match rest.split_once('.') {
            None => (rest, Kind::Plain),
            Some((stamp, "gz")) => (stamp, Kind::Compressed),
            Some((stamp, "tmp")) => (stamp, Kind::Unfinished),
            Some(_) => return None,
        };
        // The parser accepts shorter numbers.
        let at = DateTime::strptime(STAMP, stamp).ok().filter(|at| at.strftime(STAMP).to_string() == stamp)?;
        Some(Self { name, kind, at })
    }
}

/// Rotated files of a log among the files of its folder, oldest first.
fn rotated<'a>(log: &str, files: &'a [String]) -> Vec<Rotated<'a>> {
    let mut found: Vec<_> = files.iter().filter_map(|name| Rotated::parse(log, name)).collect();
    found.sort_by_key(|file| (file.at, file.name));
    found
}

/// Rotated files of a log that are not compressed, oldest first.
pub fn plain<'a>(log: &str, files: &'a [String]) -> Vec<&'a str> {
    rotated(log, files).into_iter().filter(|file| file.kind == Kind::Plain).map(|file| file.name).collect()
}

/// What an interrupted rotation left behind: unfinished compressions, and files whose compressed form is complete.
pub(super) fn leftovers<'a>(log: &str, files: &'a [String]) -> Vec<&'a str> {
    let all = rotated(log, files);
    let is_compressed = |at| all.iter().any(|file| file.kind == Kind::Compressed && file.at == at);
    let is_left = |file: &&Rotated<'_>| match file.kind {
        Kind::Unfinished => true,
        Kind::Plain => is_compressed(file.at),
        Kind::Compressed => false,
    };
    all.iter().filter(is_left).map(|file| file.name).collect()
}

/// The steps of a rotation, in this order.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct Rotation<'a> {
    /// Files to delete: leftovers, then the oldest beyond the number to keep.
    pub(super) delete: Vec<&'a str>,
    /// Files to compress.
    pub(super) compress: Vec<&'a str>,
    /// New name of the log.
    pub(super) rename_to: String,
}

/// Plans the rotation of a log at this local time, so that `max_files` files of it are left when the runtime has opened a
/// new one.
///
/// Names are in the order of rotations and each is used once, also if the clock was set back: otherwise the newest file
/// would count as the oldest, or be overwritten.
pub(super) fn rotation<'a>(log: &str, files: &'a [String], max_files: usize, now: DateTime) -> Rotation<'a> {
    let mut delete = leftovers(log, files);
    let rest: Vec<_> = rotated(log, files).into_iter().filter(|file| !delete.contains(&file.name)).collect();
    // The log itself and the file it is renamed to are kept besides.
    let surplus = rest.len().saturating_sub(max_files.saturating_sub(2));
    let (old, kept) = rest.split_at(surplus);
    delete.extend(old.iter().map(|file| file.name));
    let compress = kept.iter().filter(|file| file.kind == Kind::Plain).map(|file| file.name).collect();
    let second = SignedDuration::from_secs(1);
    let after_newest = rest.last().map(|newest| newest.at.saturating_add(second));
    let at = after_newest.map_or(now, |after| after.max(now));
    Rotation { delete, compress, rename_to: format!("{log}.{}", at.strftime(STAMP)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(text: &str) -> DateTime {
        DateTime::strptime(STAMP, text).expect("a time")
    }

    fn files(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    const A: &str = "0.log.20260101-000000";
    const A_GZ: &str = "0.log.20260101-000000.gz";
    const B_GZ: &str = "0.log.20260101-000100.gz";
    const C_GZ: &str = "0.log.20260101-000200.gz";
    const D: &str = "0.log.20260101-000300";
    const NEXT: &str = "0.log.20260101-000400";

    /// Names in the folder and the number of files to keep; what is deleted, compressed, and the name of the rotated file.
    type Case = (&'static [&'static str], usize, &'static [&'static str], &'static [&'static str], &'static str);

    #[test]
    fn rotations() {
        let now = at("20260101-000400");
        let table: [Case; 7] = [
            (&["0.log"], 5, &[], &[], NEXT),
            (&["0.log", A_GZ, B_GZ, C_GZ, D], 5, &[A_GZ], &[D], NEXT),
            (&["0.log", A_GZ, B_GZ, C_GZ, D], 2, &[A_GZ, B_GZ, C_GZ, D], &[], NEXT),
            (&["0.log", A_GZ, B_GZ, C_GZ, D], 10, &[], &[D], NEXT),
            // An interrupted rotation.
            (&["0.log", A, A_GZ, "0.log.20260101-000100.tmp"], 5, &[A, "0.log.20260101-000100.tmp"], &[], NEXT),
            // The clock was set back, and two rotations within a second.
            (&["0.log", "0.log.20270101-235959"], 5, &[], &["0.log.20270101-235959"], "0.log.20270102-000000"),
            (&["0.log", NEXT], 5, &[], &[NEXT], "0.log.20260101-000401"),
        ];
        for (names, max_files, delete, compress, rename_to) in table {
            let names = files(names);
            let planned = rotation("0.log", &names, max_files, now);
            let expected =
                Rotation { delete: delete.to_vec(), compress: compress.to_vec(), rename_to: rename_to.to_owned() };
            assert_eq!(planned, expected, "{names:?} {max_files}");
        }
    }

    #[test]
    fn other_names_are_not_touched() {
        let names = files(&[
            "0.log",
            "10.log.20260101-000000",
            "0.log.20260101-000000.gz.tmp",
            "0.log.20260101-0000",
            "0.log.20260101-000000.bak",
            "0.log.2026011-0000000",
            "0.log.gz",
            "0.log.tmp",
            "0.log.",
            "0.logbook",
        ]);
        assert!(rotated("0.log", &names).is_empty(), "{names:?}");
        let planned = rotation("0.log", &names, 2, at("20260101-000000"));
        assert!(planned.delete.is_empty() && planned.compress.is_empty(), "{planned:?}");
    }

    proptest! {
        #[test]
        fn repeated_rotations_keep_the_newest_in_order(
            moments in proptest::collection::vec(0..200_i64, 1..30), max_files in 2..8_usize,
        ) {
            let start = at("20260101-000000");
            let (mut names, mut made) = (files(&["0.log"]), Vec::new());
            for moment in moments {
                let now = start.saturating_add(SignedDuration::from_secs(moment));
                let planned = rotation("0.log", &names, max_files, now);
                let is_taken = names.iter().any(|name| name.starts_with(&planned.rename_to));
                prop_assert!(!is_taken);
                made.push(planned.rename_to.clone());
                names = names.iter().filter(|name| !planned.delete.contains(&name.as_str())).map(|name| {
                    let is_compressed = planned.compress.contains(&name.as_str());
                    if is_compressed { format!("{name}.gz") } else { name.clone() }
                }).chain([planned.rename_to.clone()]).collect();
                prop_assert!(names.len() <= max_files);
                let kept = rotated("0.log", &names);
                let kept: Vec<_> = kept.iter().map(|file| file.name.trim_end_matches(".gz")).collect();
                prop_assert_eq!(&kept[..], &made[made.len() - kept.len()..]);
                prop_assert_eq!(plain("0.log", &names).len(), 1);
            }
        }
    }
}
