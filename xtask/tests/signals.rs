//! Programs that a command has started end with it.
#![expect(clippy::unwrap_used, reason = "a failed assumption is what a test is for")]

use std::fs;
use std::fs::File;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::ExitStatus;
use std::process::Stdio;

use nix::fcntl::FcntlArg;
use nix::fcntl::OFlag;
use nix::fcntl::fcntl;
use nix::poll::PollFd;
use nix::poll::PollFlags;
use nix::poll::poll;
use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::sys::stat::Mode;
use nix::unistd::Pid;
use nix::unistd::mkfifo;

/// Has a child, as `go build` has compilers. Both keep the pipe open as long as they run.
const CARGO: &str = "#!/bin/sh\nexec 3>\"$FIFO\"\n(sleep 60; echo late >&3) &\necho started >&3\nwait\n";
/// Milliseconds after which it is looked whether a command still runs.
const PERIOD: u8 = 100;

/// Starts a command that builds by this `cargo`, and opens what the build writes to. Opening waits for no writer.
fn start(folder: &Path, cargo: &Path) -> (Child, File) {
    let fifo = folder.join("fifo");
    mkfifo(&fifo, Mode::S_IRWXU).unwrap();
    let written = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(&fifo).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("licences").env("CARGO", cargo).env("FIFO", &fifo).stdout(Stdio::null()).stderr(Stdio::null());
    (command.spawn().unwrap(), written)
}

/// Waits until the build has written something.
///
/// # Errors
/// The command has ended, and no build has written.
fn until_written(process: &mut Child, written: &File) -> Result<(), ExitStatus> {
    loop {
        let ended = process.try_wait().unwrap();
        let mut polled = [PollFd::new(written.as_fd(), PollFlags::POLLIN)];
        poll(&mut polled, PERIOD).unwrap();
        if polled[0].any() == Some(true) {
            return Ok(());
        }
        if let Some(status) = ended {
            return Err(status);
        }
    }
}

#[test]
fn a_build_ends_with_its_command_on_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let cargo = folder.path().join("cargo");
    fs::write(&cargo, CARGO).unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let (mut process, written) = start(folder.path(), &cargo);
    until_written(&mut process, &written).expect("the command ended before its build began");
    fcntl(&written, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
    let mut output = BufReader::new(written);
    let mut text = String::new();
    output.read_line(&mut text).unwrap();
    assert_eq!(text, "started\n");
    kill(Pid::from_raw(process.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(process.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
    output.read_to_string(&mut text).unwrap();
    assert_eq!(text, "started\n", "the build and its child have ended");
}

#[test]
fn a_command_that_fails_before_its_build_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let (mut process, written) = start(folder.path(), &folder.path().join("no-cargo"));
    let status = until_written(&mut process, &written).unwrap_err();
    assert_eq!((status.code(), status.signal()), (Some(1), None));
}
