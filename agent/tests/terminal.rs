//! `keblet observe` in a terminal, which util-linux's `script` provides: keys work, and the terminal is as before at the end.

use std::io::Read as _;
use std::io::Write as _;
use std::process::Child;
use std::process::ChildStdout;
use std::process::Command;
use std::process::Stdio;

use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;

/// Enters and leaves the alternate screen (xterm control sequences).
const ENTER: &str = "\u{1b}[?1049h";
const LEAVE: &str = "\u{1b}[?1049l";
/// Shows the cursor.
const SHOW: &str = "\u{1b}[?25h";

/// The recorded node in a terminal of its own.
struct Terminal {
    script: Child,
    output: ChildStdout,
    seen: String,
}

impl Terminal {
    /// `None` if there is no `script`.
    fn start() -> Option<Self> {
        let recording = concat!(env!("CARGO_MANIFEST_DIR"), "/src/observe/testdata/recording.jsonl");
        let keblet = env!("CARGO_BIN_EXE_keblet");
        let line = format!("stty rows 30 cols 120; exec '{keblet}' observe --replay '{recording}'");
        let mut command = Command::new("script");
        command.args(["--quiet", "--flush", "--return", "--command", &line, "/dev/null"]).env("TERM", "xterm");
        let mut script = match command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() {
            Ok(script) => script,
            Err(error) => {
                keblet_skip::skip(&format!("cannot run script of util-linux: {error}"));
                return None;
            }
        };
        let output = script.stdout.take().expect("it is piped");
        Some(Self { script, output, seen: String::new() })
    }

    /// Reads until the terminal has received this text.
    fn until(&mut self, text: &str) {
        while !self.seen.contains(text) {
            let mut bytes = [0; 4096];
            let count = self.output.read(&mut bytes).expect("the output is readable");
            assert_ne!(count, 0, "no {text:?} in {:?}", self.seen);
            self.seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    }

    fn press(&mut self, keys: &str) {
        let input = self.script.stdin.as_mut().expect("it is piped");
        input.write_all(keys.as_bytes()).and_then(|()| input.flush()).expect("the terminal takes keys");
    }

    /// The process in the terminal.
    fn keblet(&self) -> Pid {
        let pid = self.script.id();
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("it has children");
        Pid::from_raw(children.split_whitespace().next().and_then(|child| child.parse().ok()).expect("it has a child"))
    }

    /// Waits for the end; the terminal must be as before.
    fn assert_restored(mut self) {
        self.until(LEAVE);
        let mut rest = Vec::new();
        self.output.read_to_end(&mut rest).expect("the output ends");
        let status = self.script.wait().expect("it ends");
        assert!(status.success(), "{status}");
        let end = self.seen.split(LEAVE).last().unwrap_or_default().to_owned() + &String::from_utf8_lossy(&rest);
        assert!(self.seen.contains(SHOW) || end.contains(SHOW), "the cursor stays hidden");
        assert!(!end.contains(ENTER), "{end:?}");
    }
}

#[test]
fn keys_work_and_q_restores_the_terminal() {
    let Some(mut terminal) = Terminal::start() else { return };
    terminal.until(ENTER);
    terminal.until("cart-7d9f");
    terminal.press("?");
    terminal.until("freeze");
    terminal.press("q");
    terminal.assert_restored();
}

#[test]
fn a_signal_restores_the_terminal() {
    let Some(mut terminal) = Terminal::start() else { return };
    terminal.until("cart-7d9f");
    kill(terminal.keblet(), Signal::SIGTERM).expect("it runs");
    terminal.assert_restored();
}

#[test]
fn without_a_terminal_it_says_what_to_use() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_keblet"));
    let output = command.arg("observe").output().expect("it runs");
    assert_eq!(output.status.code(), Some(2));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("--json"), "{message}");
}
