//! `cargo xtask vm run` as a developer runs it: output, exit code, shared folder, and what remains after each end.
#![expect(clippy::unwrap_used, reason = "a failed assumption is what a test is for")]

use std::fs;
use std::io::BufRead as _;
use std::io::BufReader;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;
use std::time::Instant;

use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::sys::signal::killpg;
use nix::unistd::Pid;
use tempfile::TempDir;

/// The command in a process group of its own, as a shell starts it in a terminal, with a temporary folder of its own.
fn vm_run(arguments: &[&str]) -> (Command, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(["vm", "run"]).args(arguments).env("TMPDIR", folder.path()).process_group(0);
    (command, folder)
}

/// The command lines of processes that mention a folder.
fn processes(folder: &Path) -> Vec<String> {
    let lines = fs::read_dir("/proc").unwrap().flatten().map(|process| {
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).replace('\0', " ")
    });
    lines.filter(|line| line.contains(folder.to_str().unwrap())).collect()
}

#[test]
#[ignore = "virtual machine"]
fn vm_passes_output_exit_code_and_files_on() {
    let share = tempfile::tempdir().unwrap();
    fs::write(share.path().join("in"), "from the host\n").unwrap();
    let script = "cat in; echo problem >&2; cut -d ' ' -f 3 /proc/mounts | grep ^cgroup | sort -u; cat /proc/pressure/memory > /dev/null || exit 9; \
                  test -z \"$1\" -a \"$2\" = \"it's\" || exit 8; echo from the machine > out; exit 7";
    let share_path = share.path().to_str().unwrap();
    let (mut command, folder) =
        vm_run(&["--memory", "512M", "--share", share_path, "--", "sh", "-c", script, "sh", "", "it's"]);
    let output = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(7), "{stdout}{stderr}");
    assert_eq!(stdout, "from the host\ncgroup2\n", "{stderr}");
    assert!(stderr.lines().any(|line| line == "problem"), "{stderr}");
    assert_eq!(fs::read_to_string(share.path().join("out")).unwrap(), "from the machine\n");
    assert_eq!(processes(folder.path()), Vec::<String>::new());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "a file is left");
}

#[test]
#[ignore = "virtual machine"]
fn vm_runs_systemd_as_its_first_process() {
    let script = "busctl get-property org.freedesktop.systemd1 /org/freedesktop/systemd1 \
                  org.freedesktop.systemd1.Manager ControlGroup; cat /proc/1/comm /proc/self/cgroup";
    let (mut command, _folder) = vm_run(&["--systemd", "--", "sh", "-c", script]);
    let output = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(stdout, "s \"\"\nsystemd\n0::/system.slice/job.service\n", "{stderr}");
    assert_eq!(output.status.code(), Some(0), "{stderr}");
}

/// Starts a machine, ends `cargo xtask` while a command runs in it, and checks that no process remains.
fn ended_by(end: impl FnOnce(Pid)) -> Option<i32> {
    let (mut command, folder) = vm_run(&["--", "sh", "-c", "echo started; sleep 1000"]);
    let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "started\n");
    assert!(!processes(folder.path()).is_empty());
    end(Pid::from_raw(i32::try_from(process.id()).unwrap()));
    let code = process.wait().unwrap().code();
    let deadline = Instant::now() + Duration::from_secs(10);
    while !processes(folder.path()).is_empty() {
        assert!(Instant::now() < deadline, "{:?}", processes(folder.path()));
        std::thread::sleep(Duration::from_millis(20));
    }
    code
}

#[test]
#[ignore = "virtual machine"]
fn vm_ends_with_ctrl_c() {
    assert_eq!(ended_by(|pid| killpg(pid, Signal::SIGINT).unwrap()), Some(130));
}

#[test]
#[ignore = "virtual machine"]
fn vm_ends_with_a_killed_command() {
    assert_eq!(ended_by(|pid| kill(pid, Signal::SIGKILL).unwrap()), None);
}

#[test]
#[ignore = "virtual machine"]
fn vm_that_panics_is_an_error_with_the_end_of_the_kernel_log() {
    let (mut command, folder) = vm_run(&["--", "sh", "-c", "echo c > /proc/sysrq-trigger; sleep 1000"]);
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("the machine ended without an exit code") && stderr.contains("Kernel panic"), "{stderr}");
    assert_eq!(processes(folder.path()), Vec::<String>::new());
}
