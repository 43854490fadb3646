//! The kernel log, record by record (`Documentation/ABI/testing/dev-kmsg`).

use std::fs::File;
use std::fs::OpenOptions;
use std::io;
use std::io::Read as _;
use std::io::Seek as _;
use std::io::SeekFrom;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// The device.
pub const KMSG: &str = "/dev/kmsg";
/// The kernel writes no longer records.
const MAX_RECORD: usize = 8192;

/// Reads the kernel log from the moment it was opened.
#[derive(Debug)]
pub struct KernelLog {
    file: AsyncFd<File>,
}

impl KernelLog {
    /// Opens the log at its end. Needs `CAP_SYSLOG` where `kernel.dmesg_restrict` is set. Must be called inside a tokio
    /// runtime.
    ///
    /// # Errors
    /// The device is missing or may not be read.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        file.seek(SeekFrom::End(0))?;
        // SAFETY: a `File` owns its descriptor, keeps it open until it is dropped, and always names the same one.
        let file = unsafe { AsyncFd::register_with_interest(file, Interest::READABLE) };
        Ok(Self { file: file.map_err(io::Error::from)? })
    }

    /// The next record if there is one already. Records that were overwritten before they were read are skipped.
    ///
    /// # Errors
    /// The device cannot be read.
    pub fn try_next(&mut self) -> io::Result<Option<String>> {
        let mut buffer = [0; MAX_RECORD];
        loop {
            match self.file.get_mut().read(&mut buffer) {
                Ok(0) => return Ok(None),
                Ok(length) => return Ok(Some(String::from_utf8_lossy(&buffer[..length]).into_owned())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits for the next record. Cancel-safe.
    ///
    /// # Errors
    /// The device cannot be read.
    pub async fn next(&mut self) -> io::Result<String> {
        loop {
            if let Some(record) = self.try_next()? {
                return Ok(record);
            }
            self.file.readable_mut().await?.clear_ready();
            if let Some(record) = self.try_next()? {
                return Ok(record);
            }
        }
    }
}
