//! Kernel tunables a kubelet relies on: which they are, whether they differ, and their files below `/proc/sys`.
//!
//! <https://github.com/kubernetes/kubernetes/blob/v1.36.0/staging/src/k8s.io/component-helpers/node/util/sysctl/sysctl.go>

use std::io;
use std::path::Path;

/// The tunables and their values: no failing allocation while memory is overcommitted, OOM kills instead of panics, a
/// restart after a panic, and keys for as many containers as a node runs.
const EXPECTED: [(&str, i64); 6] = [
    ("vm/overcommit_memory", 1),
    ("vm/panic_on_oom", 0),
    ("kernel/panic", 10),
    ("kernel/panic_on_oops", 1),
    ("kernel/keys/root_maxkeys", 1_000_000),
    ("kernel/keys/root_maxbytes", 25_000_000),
];

/// A tunable that does not have its expected value.
#[derive(Debug, thiserror::Error)]
pub enum TunableError {
    /// Its value differs.
    #[error("invalid kernel flag: {name}, expected value: {expected}, actual value: {actual}")]
    Differs {
        /// Path below `/proc/sys`.
        name: &'static str,
        /// The expected value.
        expected: i64,
        /// The value found.
        actual: i64,
    },
    /// Its file cannot be read or has no number in it.
    #[error("cannot read kernel flag {name}: {cause}")]
    Read {
        /// Path below `/proc/sys`.
        name: &'static str,
        /// The cause.
        cause: io::Error,
    },
    /// Its file cannot be written.
    #[error("cannot set kernel flag {name} from {actual} to {expected}: {cause}")]
    Write {
        /// Path below `/proc/sys`.
        name: &'static str,
        /// The expected value.
        expected: i64,
        /// The value found.
        actual: i64,
        /// The cause.
        cause: io::Error,
    },
}

/// Compares the tunables below `proc_sys`. With `protect` (`protectKernelDefaults`) none is written and each that
/// differs is an error; otherwise those that differ are written. Blocks for a few file accesses.
pub fn apply(proc_sys: &Path, protect: bool) -> Vec<TunableError> {
    let differing = EXPECTED.into_iter().filter_map(|(name, expected)| match read(&proc_sys.join(name)) {
        Ok(actual) if actual == expected => None,
        Ok(actual) => Some(Err(TunableError::Differs { name, expected, actual })),
        Err(cause) => Some(Err(TunableError::Read { name, cause })),
    });
    let settle = |found: Result<(), TunableError>| match found {
        Err(TunableError::Differs { name, expected, actual }) if !protect => {
            let written = std::fs::write(proc_sys.join(name), format!("{expected}\n"));
            match written {
                Ok(()) => {
                    tracing::info!(flag = name, from = actual, to = expected, "kernel flag set");
                    None
                }
                Err(cause) => Some(TunableError::Write { name, expected, actual, cause }),
            }
        }
        other => other.err(),
    };
    differing.filter_map(settle).collect()
}

fn read(file: &Path) -> io::Result<i64> {
    let text = std::fs::read_to_string(file)?;
    text.trim()
        .parse()
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, format!("{:?} is no number", text.trim())))
}

/// AppArmor is enabled in the kernel and its security file system is mounted.
pub fn app_armor_enabled(root: &Path) -> bool {
    let enabled = std::fs::read_to_string(root.join("sys/module/apparmor/parameters/enabled"));
    root.join("sys/kernel/security/apparmor").exists() && enabled.is_ok_and(|text| text.starts_with('Y'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(values: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a folder");
        for (name, value) in values {
            let file = dir.path().join(name);
            std::fs::create_dir_all(file.parent().expect("a parent")).expect("a folder");
            std::fs::write(file, value).expect("a file");
        }
        dir
    }

    const FOUND: [(&str, &str); 6] = [
        ("vm/overcommit_memory", "0\n"),
        ("vm/panic_on_oom", "0\n"),
        ("kernel/panic", "0\n"),
        ("kernel/panic_on_oops", "1\n"),
        ("kernel/keys/root_maxkeys", "1000000\n"),
        ("kernel/keys/root_maxbytes", "25000000\n"),
    ];

    #[test]
    fn protected_defaults_are_compared_and_not_written() {
        let dir = tree(&FOUND);
        let errors: Vec<String> = apply(dir.path(), true).iter().map(ToString::to_string).collect();
        assert_eq!(
            errors,
            [
                "invalid kernel flag: vm/overcommit_memory, expected value: 1, actual value: 0",
                "invalid kernel flag: kernel/panic, expected value: 10, actual value: 0",
            ]
        );
        assert_eq!(std::fs::read_to_string(dir.path().join("kernel/panic")).expect("a value"), "0\n");
    }

    #[test]
    fn tunables_that_differ_are_set() {
        let dir = tree(&FOUND);
        assert!(apply(dir.path(), false).is_empty());
        assert_eq!(std::fs::read_to_string(dir.path().join("kernel/panic")).expect("a value"), "10\n");
        assert_eq!(std::fs::read_to_string(dir.path().join("vm/overcommit_memory")).expect("a value"), "1\n");
        assert!(apply(dir.path(), true).is_empty(), "all have their values now");
    }

    #[test]
    fn unreadable_tunables_are_named() {
        let dir = tree(&FOUND[..5]);
        std::fs::write(dir.path().join("kernel/panic"), "none").expect("a file");
        let errors: Vec<String> = apply(dir.path(), false).iter().map(ToString::to_string).collect();
        assert_eq!(errors.len(), 2, "{errors:?}");
        assert!(errors[0].starts_with("cannot read kernel flag kernel/panic: "), "{errors:?}");
        assert!(errors[1].starts_with("cannot read kernel flag kernel/keys/root_maxbytes: "), "{errors:?}");
    }

    #[test]
    fn app_armor_needs_module_and_file_system() {
        let with = |value: &str, mounted: bool| {
            let dir = tree(&[("sys/module/apparmor/parameters/enabled", value)]);
            if mounted {
                std::fs::create_dir_all(dir.path().join("sys/kernel/security/apparmor")).expect("a folder");
            }
            app_armor_enabled(dir.path())
        };
        assert!(with("Y\n", true));
        assert!(!with("Y\n", false) && !with("N\n", true));
        assert!(!app_armor_enabled(Path::new("/nonexistent")));
    }
}
