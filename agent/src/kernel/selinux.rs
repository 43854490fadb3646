//! Detects whether SELinux is enabled on this node.

use std::fs;
use std::path::Path;

/// True if a SELinux file system is mounted for writing and this process has a label of a loaded policy: before a policy is
/// loaded all processes are labelled `kernel`. A container whose node has SELinux has it read-only. `root` is `/` in
/// production. Reads two files of procfs.
pub fn is_enabled(root: &Path) -> bool {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let is_usable = |line: &str| {
        let mut fields = line.split(' ').skip(2);
        let is_of_it = fields.next() == Some("selinuxfs");
        is_of_it && fields.next().is_some_and(|options| options.split(',').all(|option| option != "ro"))
    };
    let is_mounted = read("proc/self/mounts").lines().any(is_usable);
    is_mounted && read("proc/self/attr/current").trim_end_matches(['\0', '\n']) != "kernel"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_the_file_system_and_a_policy() {
        let mounted = "selinuxfs /sys/fs/selinux selinuxfs rw 0 0\n";
        let label = "system_u:system_r:kubelet_t:s0\0";
        let table = [
            ("proc /proc proc rw 0 0\n", "unconfined\n", false),
            (mounted, "kernel\0", false),
            (mounted, label, true),
            ("selinuxfs /sys/fs/selinux selinuxfs ro,relatime 0 0\n", label, false),
        ];
        for (mounts, label, expected) in table {
            let root = tempfile::tempdir().expect("a directory");
            let dir = root.path().join("proc/self");
            fs::create_dir_all(dir.join("attr")).expect("made");
            fs::write(dir.join("mounts"), mounts).expect("written");
            fs::write(dir.join("attr/current"), label).expect("written");
            assert_eq!(is_enabled(root.path()), expected, "{mounts} {label}");
        }
        assert!(!is_enabled(Path::new("/no/such/directory")));
    }
}
