//! The agent's own `oom_score_adj` (`oomScoreAdj`): the kernel kills processes with a low one last (proc_pid_oom_score_adj(5)).

use std::fs;
use std::io;
use std::path::Path;

/// What was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Adjusted {
    /// It had this value already.
    Same,
    /// It was changed.
    Changed {
        /// The value before.
        from: i32,
    },
}

/// Sets `oom_score_adj` of the process whose folder in `/proc` this is, if it has another value. Lowering it needs
/// CAP_SYS_RESOURCE.
///
/// # Errors
/// The file cannot be read or written.
pub fn set(process: &Path, value: i32) -> io::Result<Adjusted> {
    let file = process.join("oom_score_adj");
    let text = fs::read_to_string(&file)?;
    let no_number = || io::Error::new(io::ErrorKind::InvalidData, format!("{:?} is no number", text.trim()));
    let from: i32 = text.trim().parse().map_err(|_| no_number())?;
    if from == value {
        return Ok(Adjusted::Same);
    }
    fs::write(&file, value.to_string())?;
    Ok(Adjusted::Changed { from })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_another_value_is_written() {
        let process = tempfile::tempdir().expect("a folder");
        let file = process.path().join("oom_score_adj");
        assert!(set(process.path(), 5).is_err());
        fs::write(&file, "0\n").expect("a file");
        assert_eq!(set(process.path(), -999).expect("written"), Adjusted::Changed { from: 0 });
        assert_eq!(fs::read_to_string(&file).expect("text"), "-999");
        assert_eq!(set(process.path(), -999).expect("read"), Adjusted::Same);
        fs::write(&file, "none").expect("a file");
        assert_eq!(set(process.path(), 0).expect_err("no number").to_string(), "\"none\" is no number");
    }

    #[test]
    fn a_higher_score_needs_no_capability() {
        // Of a child, since a raised score cannot always be lowered again.
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("a process");
        let process = Path::new("/proc").join(child.id().to_string());
        let set = set(&process, 900);
        let now = fs::read_to_string(process.join("oom_score_adj")).expect("text");
        child.kill().expect("killed");
        child.wait().expect("its end");
        assert!(matches!(set, Ok(Adjusted::Changed { .. })), "{set:?}");
        assert_eq!(now.trim(), "900");
    }
}
