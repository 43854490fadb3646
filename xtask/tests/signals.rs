//! Programs that a command has started end with it.

use std::fs;
use std::fs::File;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::process::Stdio;

use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::sys::stat::Mode;
use nix::unistd::Pid;
use nix::unistd::mkfifo;

/// Has a child, as `go build` has compilers. Both keep the pipe open as long as they run.
const CARGO: &str = "#!/bin/sh\nexec 3>\"$FIFO\"\n(sleep 60; echo late >&3) &\necho started >&3\nwait\n";

#[test]
fn a_build_ends_with_its_command_on_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let (cargo, fifo) = (folder.path().join("cargo"), folder.path().join("fifo"));
    fs::write(&cargo, CARGO).unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    mkfifo(&fifo, Mode::S_IRWXU).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.arg("licences").env("CARGO", &cargo).env("FIFO", &fifo).stdout(Stdio::null()).stderr(Stdio::null());
    let mut process = command.spawn().unwrap();
    let mut output = BufReader::new(File::open(&fifo).unwrap());
    let mut text = String::new();
    output.read_line(&mut text).unwrap();
    assert_eq!(text, "started\n");
    kill(Pid::from_raw(process.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(process.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
    output.read_to_string(&mut text).unwrap();
    assert_eq!(text, "started\n", "the build and its child have ended");
}
