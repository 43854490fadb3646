//! Mounts by mount(8), which knows the helpers of file systems (mount.nfs) and turns options into flags.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::VolumeError;

/// A mount that takes longer is given up: its server does not answer.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes of output that are quoted.
const MAX_QUOTED: usize = 1024;

/// What to mount, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MountCall<'a> {
    /// The file system's type; `None` for a bind mount, whose options say so.
    pub(super) kind: Option<&'a str>,
    pub(super) source: &'a str,
    pub(super) target: &'a Path,
    pub(super) options: Vec<String>,
}

impl MountCall<'_> {
    fn arguments(&self) -> Vec<String> {
        let mut arguments = Vec::new();
        if let Some(kind) = self.kind {
            arguments.extend(["-t".to_owned(), kind.to_owned()]);
        }
        if !self.options.is_empty() {
            arguments.extend(["-o".to_owned(), self.options.join(",")]);
        }
        // A source may begin with a dash.
        arguments.extend(["--".to_owned(), self.source.to_owned(), self.target.to_string_lossy().into_owned()]);
        arguments
    }

    /// Runs `program`, which is `mount` but for tests. A dropped future kills it.
    ///
    /// # Errors
    /// There is no such program, it fails, or it does not end within two minutes.
    pub(super) async fn run(&self, program: &str) -> Result<(), VolumeError> {
        let arguments = self.arguments();
        let failed = |status: String, output: &str| VolumeError::MountProgram {
            status,
            arguments: arguments.join(" "),
            output: output.chars().take(MAX_QUOTED).collect(),
        };
        let mut command = Command::new(program);
        command.args(&arguments).stdin(Stdio::null()).kill_on_drop(true);
        let output = match tokio::time::timeout(TIMEOUT, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(error)) => return Err(failed(error.to_string(), "")),
            Err(_) => return Err(failed(format!("timed out after {TIMEOUT:?}"), "")),
        };
        if output.status.success() {
            return Ok(());
        }
        let text = [output.stdout, output.stderr].concat();
        Err(failed(output.status.to_string(), String::from_utf8_lossy(&text).trim()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(source: &str) -> MountCall<'_> {
        let options = ["ro".to_owned(), "nfsvers=4".to_owned()].into();
        MountCall { kind: Some("nfs"), source, target: Path::new("/t"), options }
    }

    #[test]
    fn options_and_types_are_optional_and_a_source_is_no_option() {
        assert_eq!(call("-x:/e").arguments(), ["-t", "nfs", "-o", "ro,nfsvers=4", "--", "-x:/e", "/t"]);
        let bind = MountCall { kind: None, options: Vec::new(), ..call("/s") };
        assert_eq!(bind.arguments(), ["--", "/s", "/t"]);
    }

    #[tokio::test]
    async fn a_failure_says_what_was_tried() {
        call("s:/e").run("true").await.expect("it succeeds");
        let error = call("s:/e").run("false").await.expect_err("it fails").to_string();
        let expected = "mount failed: exit status: 1\nMounting command: mount\nMounting arguments: -t nfs -o ro,nfsvers=4 -- \
                        s:/e /t\nOutput: \n";
        assert_eq!(error, expected);
        let error = call("s:/e").run("/no/such/program").await.expect_err("there is none").to_string();
        assert!(error.starts_with("mount failed: No such file or directory"), "{error}");
    }
}
