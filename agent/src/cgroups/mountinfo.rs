//! Lines of `/proc/<pid>/mountinfo` that mount a cgroup hierarchy (proc_pid_mountinfo(5)). Pure.

/// One mounted cgroup hierarchy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CgroupMount<'a> {
    /// The cgroup that is mounted, escaped.
    pub root: &'a str,
    /// The mount point, escaped.
    pub point: &'a str,
    /// cgroup v2.
    pub is_v2: bool,
    /// Super block options, which contain the controllers of a v1 hierarchy.
    pub options: &'a str,
}

/// The cgroup mounts of a `mountinfo` table, in its order.
pub(super) fn cgroup_mounts(table: &str) -> impl Iterator<Item = CgroupMount<'_>> {
    table.lines().filter_map(parse)
}

fn parse(line: &str) -> Option<CgroupMount<'_>> {
    let (first, second) = line.trim_start().split_once(" - ")?;
    let mut first = first.split(' ').skip(3);
    let mut second = second.split(' ');
    let (root, point) = (first.next()?, first.next()?);
    let is_v2 = match second.next()? {
        "cgroup" => false,
        "cgroup2" => true,
        _ => return None,
    };
    Some(CgroupMount { root, point, is_v2, options: second.nth(1).unwrap_or_default() })
}

/// `mountinfo` writes blanks, tabs, newlines and backslashes as three octal digits.
pub(super) fn unescape(text: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .into_iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_cgroup_file_systems_are_listed() {
        let table = "24 20 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw\ngarbage\n - \n\
                     25 24 0:23 /part /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
                     29 24 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let found: Vec<_> = cgroup_mounts(table).map(|mount| (mount.root, mount.point, mount.is_v2)).collect();
        assert_eq!(found, [("/part", "/sys/fs/cgroup/memory", false), ("/", "/sys/fs/cgroup/unified", true)]);
    }

    #[test]
    fn mount_points_are_unescaped() {
        assert_eq!(unescape("/a\\040b\\134"), "/a b\\");
    }
}
