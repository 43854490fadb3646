//! Mounts by mount(8), which runs the helpers of file systems (mount.nfs) and turns options into flags.

use std::path::Path;
use std::time::Duration;

use super::VolumeError;
use crate::host_program::Call;
use crate::host_program::Programs;

/// A mount that takes longer is given up: its server does not answer.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The program that mounts.
const MOUNT: &str = "mount";
/// The program that runs another one in a scope of systemd.
const SCOPED: &str = "systemd-run";

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
    fn call(&self) -> Call {
        let mut arguments = Vec::new();
        if let Some(kind) = self.kind {
            arguments.extend(["-t".to_owned(), kind.to_owned()]);
        }
        if !self.options.is_empty() {
            arguments.extend(["-o".to_owned(), self.options.join(",")]);
        }
        // A source may begin with a dash.
        arguments.extend(["--".to_owned(), self.source.to_owned(), self.target.to_string_lossy().into_owned()]);
        Call::new(MOUNT, arguments).within(TIMEOUT)
    }

    /// As [`Self::call`], in a scope of its own.
    fn scoped_call(&self) -> Call {
        let call = self.call();
        let description = format!("--description=Kubernetes transient mount for {}", self.target.display());
        let mut arguments = vec![description, "--scope".to_owned(), "--".to_owned(), MOUNT.to_owned()];
        arguments.extend_from_slice(call.arguments());
        Call::new(SCOPED, arguments).within(TIMEOUT)
    }

    /// Runs mount(8). A dropped future kills it.
    ///
    /// # Errors
    /// There is no such program, it fails, or it does not end within two minutes.
    pub(super) async fn run(&self, programs: &dyn Programs) -> Result<(), VolumeError> {
        run_to_end(MOUNT, &self.call(), programs).await
    }

    /// As [`Self::run`], in a scope of its own if systemd runs programs in scopes. A file system in user space is served by a
    /// process that mount(8) leaves behind: in the cgroup of the agent's service it could end with the service. As upstream,
    /// for what is mounted from a device: the kernel serves exports of NFS, and nothing serves a bind mount.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(super) async fn run_scoped(&self, programs: &dyn Programs) -> Result<(), VolumeError> {
        match programs.has_scopes().await {
            true => run_to_end(SCOPED, &self.scoped_call(), programs).await,
            false => self.run(programs).await,
        }
    }
}

async fn run_to_end(command: &'static str, call: &Call, programs: &dyn Programs) -> Result<(), VolumeError> {
    let ended = programs.run(call).await?;
    if ended.is_success() {
        return Ok(());
    }
    let (output, arguments) = (ended.quoted().into(), call.arguments().join(" ").into());
    Err(VolumeError::MountProgram { status: ended.status, command, arguments, output })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_program::testing::ScriptedPrograms;

    fn call(source: &str) -> MountCall<'_> {
        let options = ["ro".to_owned(), "nfsvers=4".to_owned()].into();
        MountCall { kind: Some("nfs"), source, target: Path::new("/t"), options }
    }

    #[test]
    fn options_and_types_are_optional_and_a_source_is_no_option() {
        assert_eq!(call("-x:/e").call().arguments(), ["-t", "nfs", "-o", "ro,nfsvers=4", "--", "-x:/e", "/t"]);
        let bind = MountCall { kind: None, options: Vec::new(), ..call("/s") };
        assert_eq!(bind.call().arguments(), ["--", "/s", "/t"]);
    }

    #[tokio::test]
    async fn a_failure_names_the_command() {
        call("s:/e").run(&ScriptedPrograms::new(|_| None)).await.expect("it succeeds");
        let refusing = ScriptedPrograms::new(|_| Some((32, "mount: refused\n".to_owned())));
        let error = call("s:/e").run(&refusing).await.expect_err("it fails").to_string();
        let expected = "mount failed: exit status: 32\nMounting command: mount\nMounting arguments: -t nfs -o \
                        ro,nfsvers=4 -- s:/e /t\nOutput: mount: refused\n";
        assert_eq!(error, expected);
    }

    #[tokio::test]
    async fn a_file_system_is_mounted_in_a_scope_of_its_own_if_there_are_scopes() {
        let programs = ScriptedPrograms::new(|_| Some((32, "mount: refused\n".to_owned()))).with_scopes();
        let of_device = MountCall { kind: Some("ext4"), options: vec!["ro".to_owned()], ..call("/dev/x") };
        let error = of_device.run_scoped(&programs).await.expect_err("it fails").to_string();
        let arguments = "--description=Kubernetes transient mount for /t --scope -- mount -t ext4 -o ro -- /dev/x /t";
        assert_eq!(programs.take(), [format!("systemd-run {arguments}")]);
        let shown = format!("Mounting command: systemd-run\nMounting arguments: {arguments}\n");
        assert!(error.contains(&shown), "{error}");
        call("s:/e").run(&programs).await.expect_err("it fails");
        assert_eq!(programs.take(), ["mount -t nfs -o ro,nfsvers=4 -- s:/e /t"], "the kernel serves an export");
        let without = ScriptedPrograms::new(|_| None);
        of_device.run_scoped(&without).await.expect("mounted");
        assert_eq!(without.take(), ["mount -t ext4 -o ro -- /dev/x /t"]);
    }
}
