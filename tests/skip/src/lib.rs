//! Skips a test that this machine cannot run. The only permitted way to return early from a test, so that a missing
//! prerequisite is never counted as a pass in CI.

pub mod mounts;
pub mod ports;

/// Reports that the running test is skipped and why. The caller returns afterwards.
///
/// # Panics
/// `CI=true` is set: every test must run.
pub fn skip(reason: &str) {
    let ci = std::env::var("CI").is_ok_and(|value| value == "true");
    assert!(!ci, "cannot run here, and with CI=true no test is skipped: {reason}");
    eprintln!("skipped: {reason}");
}

/// Skips unless the process is root. Returns whether the test can run.
///
/// # Panics
/// As [`skip`].
pub fn is_root(purpose: &str) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let root = uids.and_then(|uids| uids.split_whitespace().nth(1)) == Some("0");
    if !root {
        skip(&format!("needs root to {purpose}"));
    }
    root
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::*;

    const CHILD: &str = "KEBLET_SKIP_CHILD";

    /// Skips in the child processes of the test below only.
    #[test]
    fn skips_in_a_child_process() {
        if std::env::var_os(CHILD).is_some() {
            skip("an example");
        }
    }

    #[test]
    fn skipping_fails_in_ci_only() {
        let child = |ci: &str| {
            let mut test = Command::new(std::env::current_exe().expect("own program"));
            test.args(["--exact", "tests::skips_in_a_child_process"]).env(CHILD, "1").env("CI", ci);
            test.output().expect("the child runs").status.success()
        };
        assert!(child("false") && !child("true"));
    }

    /// Any other early return would count as a pass.
    #[test]
    fn no_test_skips_in_another_way() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut found = Vec::new();
        for folder in ["agent", "proto", "tests", "xtask/src", "xtask/tests"] {
            search(&root.join(folder), &mut found);
        }
        assert!(found.is_empty(), "use keblet_skip::skip instead:\n{}", found.join("\n"));
    }

    fn search(folder: &Path, found: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).expect("a readable folder").flatten() {
            let path = entry.path();
            let own = path.ends_with("tests/skip")
                || path.ends_with("xtask/src/tiers")
                || path.ends_with("xtask/src/vm")
                || path.ends_with("target");
            if path.is_dir() && !own {
                search(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).expect("a readable file");
                let ad_hoc = |line: &&str| line.contains("println!(\"skip") || line.contains("(\"CI\")");
                found.extend(text.lines().filter(ad_hoc).map(|line| format!("{}: {}", path.display(), line.trim())));
            }
        }
    }
}
