//! Is SELinux enabled on this node?

use std::fs;
use std::path::Path;

/// True if a SELinux file system is mounted and this process has a label of a loaded policy: before a policy is loaded all
/// processes are labelled `kernel`. `root` is `/` in production. Reads two files of procfs.
pub fn is_enabled(root: &Path) -> bool {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let mounted = read("proc/self/mounts").lines().any(|line| line.split(' ').nth(2) == Some("selinuxfs"));
    mounted && read("proc/self/attr/current").trim_end_matches(['\0', '\n']) != "kernel"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_the_file_system_and_a_policy() {
        let mounted = "selinuxfs /sys/fs/selinux selinuxfs rw 0 0\n";
        let table = [
            ("proc /proc proc rw 0 0\n", "unconfined\n", false),
            (mounted, "kernel\0", false),
            (mounted, "system_u:system_r:kubelet_t:s0\0", true),
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
