//! Pressure stall notifications (<https://docs.kernel.org/accounting/psi.html>): the kernel reports when tasks have waited
//! for longer than a threshold within a time window.

use std::fs::File;
use std::fs::OpenOptions;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A registered trigger; it ends when it is dropped.
#[derive(Debug)]
pub struct PsiTrigger {
    file: AsyncFd<File>,
}

impl PsiTrigger {
    /// Asks for a notification when tasks have waited for `stall` within `window`; `kind`: `some` or `full`. Without
    /// `CAP_SYS_RESOURCE` the window must be a multiple of two seconds, and before Linux 6.4 there are no triggers. Must be
    /// called inside a tokio runtime.
    ///
    /// # Errors
    /// The kernel has no pressure stall information, or refuses the trigger.
    pub fn open(pressure_file: &Path, kind: &str, stall: Duration, window: Duration) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open(pressure_file)?;
        // The terminating zero is part of what the kernel reads.
        let trigger = format!("{kind} {} {}\0", stall.as_micros(), window.as_micros());
        file.write_all(trigger.as_bytes())?;
        // SAFETY: a `File` owns its descriptor, keeps it open until it is dropped, and always names the same one.
        let file = unsafe { AsyncFd::register_with_interest(file, Interest::PRIORITY) };
        Ok(Self { file: file.map_err(io::Error::from)? })
    }

    /// Resolves when the threshold was exceeded: at most once a window. Cancel-safe.
    ///
    /// # Errors
    /// The cgroup was removed, or the runtime is shutting down.
    pub async fn exceeded(&self) -> io::Result<()> {
        let mut guard = self.file.ready(Interest::PRIORITY | Interest::ERROR).await?;
        let is_gone = guard.ready().is_error();
        guard.clear_ready();
        if is_gone { Err(io::Error::new(io::ErrorKind::NotFound, "the cgroup was removed")) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_that_is_no_pressure_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("memory");
        let open = || PsiTrigger::open(&file, "some", Duration::from_millis(100), Duration::from_secs(2));
        assert_eq!(open().unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(&file, "").unwrap();
        assert!(open().is_err(), "a regular file cannot be waited for");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "some 100000 2000000\0");
    }
}
