//! The agent's own limit of open files (`maxOpenFiles`), setrlimit(2), and what fails for want of one.

use std::io;

use nix::errno::Errno;
use nix::sys::resource::Resource;
use nix::sys::resource::getrlimit;
use nix::sys::resource::setrlimit;

/// The soft limit of processes that do not raise it.
const USUAL: usize = 1024;

/// Sets the limit of open files to `wanted`; without CAP_SYS_RESOURCE at most to the hard limit of the process. Returns the
/// limit that holds now.
///
/// # Errors
/// The kernel refuses both.
pub fn limit(wanted: u64) -> Result<u64, Errno> {
    if setrlimit(Resource::RLIMIT_NOFILE, wanted, wanted).is_ok() {
        return Ok(wanted);
    }
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let reachable = wanted.min(most);
    setrlimit(Resource::RLIMIT_NOFILE, reachable, most)?;
    Ok(reachable)
}

/// How many files the process may have open now; the usual number if that cannot be read.
pub fn soft_limit() -> usize {
    getrlimit(Resource::RLIMIT_NOFILE).map_or(USUAL, |(soft, _)| usize::try_from(soft).unwrap_or(usize::MAX))
}

/// No file could be opened for want of descriptors or memory: a later attempt may succeed.
pub fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortages_pass_and_other_failures_do_not() {
        for errno in [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM] {
            assert!(is_shortage(&errno.into()), "{errno}");
        }
        for errno in [Errno::ENOENT, Errno::EPERM, Errno::EACCES] {
            assert!(!is_shortage(&errno.into()), "{errno}");
        }
    }

    #[test]
    fn the_limit_that_holds_is_returned() {
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).expect("limits");
        let holds = limit(most).expect("the hard limit is reachable");
        assert_eq!((holds, getrlimit(Resource::RLIMIT_NOFILE).expect("limits").0), (most, most));
        // More than the kernel allows any process (fs.nr_open).
        let holds = limit(1 << 40).expect("as much as is allowed");
        assert_eq!((holds, getrlimit(Resource::RLIMIT_NOFILE).expect("limits").0), (most, most));
    }
}
