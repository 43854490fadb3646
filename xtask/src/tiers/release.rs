//! The release build of the agent: begun beside a tier that mostly waits, and complete when a tier needs it.

use std::path::PathBuf;
use std::thread;
use std::thread::JoinHandle;

use anyhow::Result;

use crate::paths;
use crate::progress::step;
use crate::run;

const SELECTION: [&str; 5] = ["--release", "--package", "keblet", "--bin", "keblet"];

/// The build, if it was begun and its end was not waited for.
#[derive(Default)]
pub(super) struct ReleaseBuild(Option<JoinHandle<Result<()>>>);

impl ReleaseBuild {
    /// Begins the build, unless it was begun.
    pub(super) fn begin(&mut self) {
        self.0.get_or_insert_with(start);
    }

    /// The path of the agent, once it is built. Later calls build what has changed since, as a rule nothing.
    ///
    /// # Errors
    /// The build fails.
    pub(super) fn agent(&mut self) -> Result<PathBuf> {
        let build = self.0.take().unwrap_or_else(start);
        let end = || build.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        step("building keblet for release (minutes, after a change)", end)?;
        Ok(paths::target().join("release/keblet"))
    }
}

fn start() -> JoinHandle<Result<()>> {
    thread::spawn(|| run::build_beside(&SELECTION))
}
