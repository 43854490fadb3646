//! Locks that serialise commands. The kernel releases the lock of a command that is killed.

use std::fs::File;
use std::fs::TryLockError;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;

use crate::interrupt;
use crate::progress::step;

/// How often it is tried again.
const POLL: Duration = Duration::from_millis(50);

/// Locks a file until the result is dropped. While another command has it locked, waits and says so.
///
/// # Errors
/// The file cannot be created or locked, or Ctrl-C was pressed.
pub(crate) fn hold(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    if !try_hold(&file, path)? {
        step("waiting for another cargo xtask", || {
            while !try_hold(&file, path)? {
                if interrupt::is_ending() {
                    bail!("interrupted");
                }
                thread::sleep(POLL);
            }
            Ok(())
        })?;
    }
    Ok(file)
}

/// Whether the file is locked by this command now.
fn try_hold(file: &File, path: &Path) -> Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn a_second_command_waits_for_the_first() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let first = hold(&path).unwrap();
        assert!(!try_hold(&File::open(&path).unwrap(), &path).unwrap());
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let second = scope.spawn(|| hold(&path).map(|_lock| done.load(Ordering::SeqCst)));
            done.store(true, Ordering::SeqCst);
            drop(first);
            assert!(second.join().unwrap().unwrap(), "locked before the first command was done");
        });
    }
}
