//! Drivers of FlexVolumes: programs in the operator's directory, `<vendor>~<driver>/<driver>`. Each is initialised once
//! (`init`), which reports its capabilities, and again when its program has changed. The directory is read when a driver is
//! needed, so that one that is installed later is found.

use std::collections::BTreeSet;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use secrecy::SecretString;

use super::FlexError;
use super::MOUNTS;
use super::reply;
use super::reply::Answer;
use super::reply::Capabilities;
use crate::host_program::Call;
use crate::host_program::HostPrograms;
use crate::host_program::Programs;
use crate::volumes::VolumeError;
use crate::volumes::error::OnPath as _;
use crate::volumes::layout;
use crate::volumes::plugin::blocking;

/// Calls that change nothing. One that takes longer than [`TIMEOUT`] is killed. The others go on, as upstream: a driver may
/// format a device, and what it has started would go on without it, beside the next attempt.
const INTERRUPTIBLE: [&str; 2] = ["init", "waitforattach"];
const TIMEOUT: Duration = Duration::from_secs(120);
/// Longest name of a directory.
const MAX_NAME: usize = 255;
/// What the names of other plugins begin with.
const RESERVED: &str = "kubernetes.io/";

/// True if a driver may have this name: with `~` for each slash it is the name of a directory, and its last part that of a
/// program in it. Neither leads elsewhere, and no other name leads to the same directory.
pub(super) fn is_name(name: &str) -> bool {
    let is_part = |part: &str| !part.is_empty() && part != "." && part != ".." && part != MOUNTS;
    let is_own = !name.starts_with('.') && !name.starts_with(RESERVED);
    is_own && name.len() <= MAX_NAME && !name.contains(['~', '\0']) && name.split('/').all(is_part)
}

/// The driver of a directory in a pod's `volumes`, or in the operator's directory: of one that no other plugin has.
pub(super) fn of_directory(directory: &str) -> Option<String> {
    Some(directory.replace('~', "/")).filter(|name| is_name(name))
}

/// The name for as long as the agent runs, as plugins have theirs. To be called with names of drivers that are or were
/// installed, and of persistent volumes, which are few: pods do not make them.
pub(super) fn interned(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    // Changed one entry at a time: a panic elsewhere leaves it usable.
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name).copied() {
        return known;
    }
    let name: &'static str = name.to_owned().leak();
    names.insert(name);
    name
}

/// Differs between two contents of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stamp {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Stamp {
    /// `None` if there is no such file. Blocking.
    fn of(path: &Path) -> Result<Option<Self>, VolumeError> {
        match fs::metadata(path) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(None),
            found => {
                let found = found.on("inspect", path)?;
                let changed = (found.ctime(), found.ctime_nsec());
                Ok(Some(Self { device: found.dev(), inode: found.ino(), changed }))
            }
        }
    }
}

/// A driver that has been initialised.
#[derive(Debug)]
pub(super) struct Driver {
    /// `vendor/driver`.
    pub(super) name: &'static str,
    pub(super) capabilities: Capabilities,
    path: PathBuf,
    stamp: Stamp,
    programs: Arc<dyn Programs>,
    /// Calls that it leaves to the agent.
    unsupported: Mutex<BTreeSet<&'static str>>,
}

impl Driver {
    fn unsupported(&self) -> MutexGuard<'_, BTreeSet<&'static str>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.unsupported.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the driver. No message shows `hidden`, its last arguments. A dropped future kills a driver that changes
    /// nothing; any other call goes on, however long it takes.
    ///
    /// # Errors
    /// It cannot be run, is killed after two minutes, reports a failure or no status.
    pub(super) async fn call(
        &self,
        command: &'static str,
        arguments: &[&str],
        hidden: &[&str],
    ) -> Result<Answer, VolumeError> {
        if self.unsupported().contains(command) {
            return Ok(Answer::NotSupported);
        }
        let all = std::iter::once(command).chain(arguments.iter().copied());
        let call = Call::new(self.path.to_string_lossy().into_owned(), all);
        let call = hidden.iter().fold(call, |call, text| call.with_secret(SecretString::from(*text)));
        let call = if INTERRUPTIBLE.contains(&command) { call.within(TIMEOUT) } else { call.finished() };
        let ended = self.programs.run(&call).await?;
        let answer = reply::answer(command, &call, &ended)?;
        if answer == Answer::NotSupported {
            self.unsupported().insert(command);
        }
        Ok(answer)
    }
}

/// The drivers of the node. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Drivers {
    /// `volumePluginDir`; `None`: the agent runs none.
    dir: Option<PathBuf>,
    pub(super) programs: Arc<dyn Programs>,
    known: Arc<Mutex<HashMap<&'static str, Arc<Driver>>>>,
}

impl Drivers {
    pub(super) fn new(dir: Option<&Path>) -> Self {
        Self { dir: dir.map(Path::to_owned), programs: Arc::new(HostPrograms), known: Arc::default() }
    }

    fn all_known(&self) -> MutexGuard<'_, HashMap<&'static str, Arc<Driver>>> {
        // Changed one entry at a time: a panic elsewhere leaves it usable.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the agent runs drivers.
    pub(super) fn has_directory(&self) -> bool {
        self.dir.is_some()
    }

    /// The driver as it was found the last time.
    pub(super) fn known(&self, name: &str) -> Option<Arc<Driver>> {
        self.all_known().get(name).cloned()
    }

    /// Where the program of a driver is.
    fn path(&self, name: &str) -> Result<PathBuf, FlexError> {
        if !is_name(name) {
            return Err(FlexError::Name(name.chars().take(MAX_NAME).collect::<String>().into()));
        }
        let dir = self.dir.as_ref().ok_or(FlexError::NoDirectory)?;
        let program = name.rsplit('/').next().unwrap_or_default();
        Ok(dir.join(layout::escaped(name)).join(program))
    }

    /// True if there is not even the directory of a driver: one that is being replaced has it.
    ///
    /// # Errors
    /// The agent has no directory of drivers, or this one cannot be inspected.
    pub(super) async fn is_removed(&self, name: &str) -> Result<bool, VolumeError> {
        let program = self.path(name)?;
        blocking(move || Ok(Stamp::of(program.parent().unwrap_or(&program))?.is_none())).await
    }

    /// The driver of this name, which is initialised unless it was.
    ///
    /// # Errors
    /// There is none, or it cannot be initialised.
    pub(super) async fn find(&self, name: &str) -> Result<Arc<Driver>, VolumeError> {
        let path = self.path(name)?;
        let at = path.clone();
        let Some(stamp) = blocking(move || Stamp::of(&at)).await? else {
            return Err(FlexError::NoDriver { path }.into());
        };
        if let Some(driver) = self.known(name).filter(|driver| driver.stamp == stamp) {
            return Ok(driver);
        }
        let (name, programs) = (interned(name), self.programs.clone());
        let capabilities = Capabilities::default();
        let mut driver = Driver { name, capabilities, path, stamp, programs, unsupported: Mutex::default() };
        let answer = driver.call("init", &[], &[]).await?;
        match answer {
            Answer::Done(reply) => driver.capabilities = reply.capabilities,
            Answer::NotSupported => {
                let (status, reason) = (reply::NOT_SUPPORTED.into(), Box::default());
                return Err(FlexError::Failed { command: "init", status, reason }.into());
            }
        }
        tracing::info!(driver = name, capabilities = ?driver.capabilities, "initialised a FlexVolume driver");
        let driver = Arc::new(driver);
        self.all_known().insert(name, driver.clone());
        Ok(driver)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_leads_out_of_the_directory() {
        let drivers = Drivers::new(Some(Path::new("/flex")));
        for (name, expected) in
            [("example.com/d", "/flex/example.com~d/d"), ("plain", "/flex/plain/plain"), ("a/b/c", "/flex/a~b~c/c")]
        {
            assert_eq!(drivers.path(name).expect(name), Path::new(expected));
            assert_eq!(of_directory(&layout::escaped(name)).as_deref(), Some(name));
        }
        let long = "x".repeat(256);
        for name in [
            "",
            "/",
            "/etc",
            "a/",
            "a//b",
            "..",
            ".",
            "../x",
            "a/..",
            "a/.",
            "a/../b",
            ".hidden",
            "a~b",
            "~",
            "a\0b",
            "kubernetes.io/nfs",
            "a/mounts",
            "mounts",
            &long,
        ] {
            assert!(matches!(drivers.path(name), Err(FlexError::Name(_))), "{name:?}");
        }
        assert_eq!(of_directory("kubernetes.io~csi"), None);
        assert_eq!(of_directory(".."), None);
        assert!(matches!(Drivers::new(None).path("a/b"), Err(FlexError::NoDirectory)));
    }

    #[test]
    fn a_name_is_kept_once() {
        let name = String::from("example.com/kept-once");
        assert!(std::ptr::eq(interned(&name), interned("example.com/kept-once")));
    }
}
