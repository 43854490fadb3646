//! Commands as a developer runs them: the demo until it exits, and Ctrl-C while it runs.
#![expect(clippy::unwrap_used, reason = "a failed assumption is what a test is for")]

use std::fs;
use std::io::BufRead as _;
use std::io::BufReader;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Child;
use std::process::ChildStdout;
use std::process::Command;
use std::process::Stdio;

use nix::sys::signal::Signal;
use nix::sys::signal::killpg;
use nix::unistd::Pid;

/// A command in a process group of its own, as a shell starts it in a terminal.
struct Job {
    process: Child,
    output: BufReader<ChildStdout>,
    output_so_far: String,
}

impl Job {
    fn start(arguments: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .args(arguments)
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, output, output_so_far: String::new() }
    }

    /// Reads until a line contains the text, and returns that line.
    fn wait_for(&mut self, text: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "no {text:?} in:\n{}", self.output_so_far);
            self.output_so_far.push_str(&line);
            if line.contains(text) {
                return line;
            }
        }
    }

    fn press_ctrl_c(&self) {
        let group = Pid::from_raw(i32::try_from(self.process.id()).unwrap());
        killpg(group, Signal::SIGINT).unwrap();
    }

    /// Reads until the end and returns the exit code.
    fn end(mut self) -> (Option<i32>, String) {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            self.output_so_far.push_str(&line);
            line.clear();
        }
        (self.process.wait().unwrap().code(), self.output_so_far)
    }
}

/// The runtime's folder, parsed from a line with the path of its socket.
fn folder(line: &str) -> String {
    let start = line.find("/tmp/keblet-").unwrap_or_else(|| panic!("no folder in {line:?}"));
    let rest = &line[start..];
    rest[.."/tmp/keblet-".len() + 6].to_owned()
}

fn assert_nothing_left(folder: &str) {
    assert!(!Path::new(folder).exists(), "{folder} is left");
    let name = folder.trim_start_matches("/tmp/");
    for hierarchy in fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
        assert!(!hierarchy.path().join(name).exists(), "a cgroup is left in {}", hierarchy.path().display());
    }
    let bridge = name.replace("keblet-", "keb-");
    assert!(!Path::new("/sys/class/net").join(&bridge).exists(), "{bridge} is left");
    assert!(!fs::read_to_string("/proc/self/mounts").unwrap().contains(folder), "a mount is left");
    for link in fs::read_dir("/var/log/containers").into_iter().flatten().flatten() {
        let target = fs::read_link(link.path()).unwrap_or_default();
        assert!(!target.starts_with(folder), "{} is left", link.path().display());
    }
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let command = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        assert!(!command.contains(folder), "process is left: {command}");
    }
}

#[test]
#[ignore = "real runtime"]
fn ctrl_c_ends_a_private_containerd() {
    let mut job = Job::start(&["containerd"]);
    let folder = folder(&job.wait_for("\"dir\""));
    assert!(Path::new(&folder).exists());
    job.press_ctrl_c();
    let (code, _) = job.end();
    assert_eq!(code, Some(0));
    assert_nothing_left(&folder);
}

#[test]
#[ignore = "real runtime"]
fn the_demo_shows_what_it_promises() {
    let mut job = Job::start(&["demo"]);
    let folder = folder(&job.wait_for("keblet runs"));
    let (code, output_so_far) = job.end();
    assert_eq!(code, Some(0), "{output_so_far}");
    for step in ["web ", "crash ", "oom ", "chain ", "gone "] {
        let summary = output_so_far.lines().skip_while(|line| !line.starts_with("step"));
        assert!(summary.clone().any(|line| line.starts_with(step)), "{step} is not in the summary:\n{output_so_far}");
    }
    assert!(!output_so_far.contains("FAILED"), "{output_so_far}");
    assert_nothing_left(&folder);
}

#[test]
#[ignore = "real runtime"]
fn ctrl_c_ends_the_demo() {
    let mut job = Job::start(&["demo"]);
    let folder = folder(&job.wait_for("keblet runs"));
    job.wait_for("ContainerStarted");
    job.press_ctrl_c();
    let (code, output_so_far) = job.end();
    assert_eq!(code, Some(130), "{output_so_far}");
    assert_nothing_left(&folder);
}
