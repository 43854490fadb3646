//! `keblet bench`: executes the program `keblet-bench`, which the agent itself does not contain.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

const PROGRAM: &str = "keblet-bench";

/// Arguments of `keblet-bench`, passed on as they are.
#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments of keblet-bench, which must lie beside this program or on the PATH; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
    pub arguments: Vec<OsString>,
}

/// Replaces this process by `keblet-bench`.
///
/// # Errors
/// `keblet-bench` is found nowhere, or cannot be executed. Does not return otherwise.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let own = std::env::current_exe().context("cannot determine the path of the running program")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = find(&own, std::env::split_paths(&path)).with_context(|| {
        format!(
            "{PROGRAM} is neither beside {} nor on the PATH; build it from keblet's source with \
             `cargo build --release --package {PROGRAM}`",
            own.display()
        )
    })?;
    let error = Command::new(&program).args(&args.arguments).exec();
    Err(error).with_context(|| format!("cannot execute {}", program.display()))
}

/// The program in the folder of `own`, else in the first of `folders` that has it.
fn find(own: &Path, folders: impl IntoIterator<Item = PathBuf>) -> Option<PathBuf> {
    let beside = own.parent().map(Path::to_path_buf);
    beside.into_iter().chain(folders).map(|folder| folder.join(PROGRAM)).find(|program| program.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_beside_the_own_one_comes_first() {
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [beside, on_path] = folders.each_ref().map(|folder| folder.path().to_path_buf());
        let own = beside.join("keblet");
        assert_eq!(find(&own, [on_path.clone()]), None);
        std::fs::write(on_path.join(PROGRAM), "").unwrap();
        assert_eq!(find(&own, [on_path.clone()]), Some(on_path.join(PROGRAM)));
        std::fs::write(beside.join(PROGRAM), "").unwrap();
        assert_eq!(find(&own, [on_path]), Some(beside.join(PROGRAM)));
    }
}
