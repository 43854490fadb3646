//! Behaviour of a simulated container: run until stopped, exit, crash, ignore signals.
//!
//! A program is plain data. It is selected per (pod, container, attempt) by [`Scripts`], and without a matching script
//! by the container's command line (see [`Program::from_command`]).

use std::time::Duration;

/// How a process exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It called exit with this code.
    Code(u8),
    /// A signal killed it.
    Signal(u8),
    /// The OOM killer killed it (SIGKILL, and the runtime reports `OOMKilled`).
    Oom,
}

impl Exit {
    /// Exit code as the runtime reports it: for a signal 128 + its number.
    pub fn code(self) -> i32 {
        match self {
            Exit::Code(code) => i32::from(code),
            Exit::Signal(signal) => 128 + i32::from(signal),
            Exit::Oom => 137,
        }
    }

    /// The kernel's wait status: exit code in the second byte, signal in the first.
    pub fn wait_status(self) -> i32 {
        match self {
            Exit::Code(code) => i32::from(code) << 8,
            Exit::Signal(signal) => i32::from(signal),
            Exit::Oom => 9,
        }
    }
}

/// Reaction to the stop signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnTerm {
    /// Exits this way, this long after the signal.
    Ends(Duration, Exit),
    /// Ignores it; only SIGKILL ends the process.
    Ignores,
}

/// Behaviour of one container instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// StartContainer fails with this message and no process ever exists.
    pub start_error: Option<String>,
    /// Exits by itself, this long after its start.
    pub ends: Option<(Duration, Exit)>,
    /// Reaction to the stop signal.
    pub on_term: OnTerm,
    /// The init process leaves child processes. Without its own PID namespace they run until the runtime reports the
    /// exit; with one the kernel kills them with their init.
    pub leaves_children: bool,
}

impl Program {
    /// Runs until stopped; exits 5 ms after the stop signal.
    pub fn runs() -> Self {
        Self {
            start_error: None,
            ends: None,
            on_term: OnTerm::Ends(Duration::from_millis(5), Exit::Signal(15)),
            leaves_children: false,
        }
    }

    /// Exits with `exit`, `after` its start.
    pub fn ends(exit: Exit, after: Duration) -> Self {
        Self { ends: Some((after, exit)), ..Self::runs() }
    }

    /// Exits with `code`, `after` its start.
    pub fn exits(code: u8, after: Duration) -> Self {
        Self::ends(Exit::Code(code), after)
    }

    /// Cannot be started: StartContainer returns `message`.
    pub fn cannot_start(message: &str) -> Self {
        Self { start_error: Some(message.to_owned()), ..Self::runs() }
    }

    /// The same program with another reaction to the stop signal.
    pub fn on_term(self, on_term: OnTerm) -> Self {
        Self { on_term, ..self }
    }

    /// Parses a program from a container's command line. Words, in any order:
    ///
    /// - `exit CODE [AFTER]`, `signal NUMBER [AFTER]`, `oom [AFTER]`: how and when it exits by itself,
    /// - `until ATTEMPT`: only attempts below this exit so, later ones run for ever,
    /// - `term AFTER` or `term ignore`: reaction to the stop signal,
    /// - `fork`: leaves children.
    ///
    /// AFTER is a number with `us`, `ms`, `s` or `m`. A command that starts with any other word runs for ever.
    ///
    /// # Errors
    /// A word is unknown, or a number or duration is malformed.
    pub fn from_command(words: &[String], attempt: u32) -> Result<Self, String> {
        let mut words = words.iter().map(String::as_str).peekable();
        let mut program = Self::runs();
        let first = words.peek().copied().unwrap_or_default();
        if !["exit", "signal", "oom", "until", "term", "fork"].contains(&first) {
            return Ok(program);
        }
        while let Some(word) = words.next() {
            match word {
                "exit" | "signal" | "oom" => {
                    let exit = match word {
                        "exit" => Exit::Code(number(word, words.next())?),
                        "signal" => Exit::Signal(number(word, words.next())?),
                        _ => Exit::Oom,
                    };
                    let after = words.next_if(|w| duration(w).is_some()).and_then(duration);
                    program.ends = Some((after.unwrap_or_default(), exit));
                }
                "until" => {
                    if attempt >= number::<u32>(word, words.next())? {
                        program.ends = None;
                    }
                }
                "term" => {
                    program.on_term = match words.next() {
                        Some("ignore") => OnTerm::Ignores,
                        Some(after) => OnTerm::Ends(
                            duration(after).ok_or_else(|| format!("term: {after:?} is not a duration"))?,
                            Exit::Code(0),
                        ),
                        None => return Err("term: a duration or `ignore` is missing".to_owned()),
                    };
                }
                "fork" => program.leaves_children = true,
                other => return Err(format!("{other:?} is not a word of simulated programs")),
            }
        }
        Ok(program)
    }
}

fn number<T: std::str::FromStr>(word: &str, value: Option<&str>) -> Result<T, String> {
    let value = value.ok_or_else(|| format!("{word}: a number is missing"))?;
    value.parse().map_err(|_| format!("{word}: {value:?} is not a number in range"))
}

fn duration(text: &str) -> Option<Duration> {
    let split = text.find(|c: char| !c.is_ascii_digit())?;
    let count: u64 = text[..split].parse().ok()?;
    match &text[split..] {
        "us" => Some(Duration::from_micros(count)),
        "ms" => Some(Duration::from_millis(count)),
        "s" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_secs(60 * count)),
        _ => None,
    }
}

/// Programs set by the test, newest rule first.
#[derive(Clone, Debug, Default)]
pub(super) struct Scripts {
    rules: Vec<Rule>,
}

#[derive(Clone, Debug)]
struct Rule {
    pod: String,
    container: String,
    attempt: Option<u32>,
    program: Program,
}

impl Scripts {
    /// From now on `container` of `pod` runs `program`: in this attempt, or in all.
    pub(super) fn set(&mut self, pod: &str, container: &str, attempt: Option<u32>, program: Program) {
        self.rules.push(Rule { pod: pod.to_owned(), container: container.to_owned(), attempt, program });
    }

    /// The program set for this instance, if any.
    pub(super) fn find(&self, pod: &str, container: &str, attempt: u32) -> Option<&Program> {
        let applies = |rule: &&Rule| {
            rule.pod == pod && rule.container == container && rule.attempt.is_none_or(|only| only == attempt)
        };
        self.rules.iter().rev().find(applies).map(|rule| &rule.program)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str, attempt: u32) -> Result<Program, String> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Program::from_command(&words, attempt)
    }

    #[test]
    fn command_lines_parse_to_programs() {
        let ms = Duration::from_millis;
        assert_eq!(parse("/bin/server --port 80", 0), Ok(Program::runs()));
        assert_eq!(parse("", 0), Ok(Program::runs()));
        assert_eq!(parse("exit 3 100ms", 0), Ok(Program::exits(3, ms(100))));
        assert_eq!(parse("exit 0", 7), Ok(Program::exits(0, ms(0))));
        assert_eq!(parse("signal 11 2s until 1", 0), Ok(Program::ends(Exit::Signal(11), ms(2000))));
        assert_eq!(parse("signal 11 2s until 1", 1), Ok(Program::runs()));
        assert_eq!(parse("oom 1m term ignore", 0), Ok(Program::ends(Exit::Oom, ms(60_000)).on_term(OnTerm::Ignores)));
        let forks = Program { leaves_children: true, ..Program::runs() };
        assert_eq!(parse("term 20ms fork", 0), Ok(forks.on_term(OnTerm::Ends(ms(20), Exit::Code(0)))));
    }

    #[test]
    fn malformed_command_lines_are_rejected() {
        for (line, reason) in [
            ("exit", "exit: a number is missing"),
            ("exit 300", "exit: \"300\" is not a number in range"),
            ("exit 1 100", "\"100\" is not a word of simulated programs"),
            ("term soon", "term: \"soon\" is not a duration"),
            ("oom 1s sometimes", "\"sometimes\" is not a word of simulated programs"),
        ] {
            assert_eq!(parse(line, 0), Err(reason.to_owned()), "{line}");
        }
    }

    #[test]
    fn the_newest_matching_script_wins() {
        let mut scripts = Scripts::default();
        scripts.set("web", "main", None, Program::runs());
        scripts.set("web", "main", Some(0), Program::exits(1, Duration::ZERO));
        assert_eq!(scripts.find("web", "main", 0), Some(&Program::exits(1, Duration::ZERO)));
        assert_eq!(scripts.find("web", "main", 1), Some(&Program::runs()));
        assert_eq!(scripts.find("web", "other", 0), None);
    }

    #[test]
    fn exit_codes_follow_the_runtime_and_the_kernel() {
        assert_eq!((Exit::Code(3).code(), Exit::Code(3).wait_status()), (3, 0x300));
        assert_eq!((Exit::Signal(11).code(), Exit::Signal(11).wait_status()), (139, 11));
        assert_eq!((Exit::Oom.code(), Exit::Oom.wait_status()), (137, 9));
    }
}
