//! Parses the command line.

use std::path::PathBuf;
use std::time::Duration;

/// Printed for `--help` and after an error.
pub(crate) const HELP: &str = "\
Test program of keblet's images.

Usage:
  probe run [--stamp PATH]                        run until SIGTERM, reap orphans as PID 1, exit 0
  probe exit [--code K] [--after-ms N | --at-ns N] [--stamp PATH] [--once-file PATH]
                                                  exit with K after N ms, or at N ns of the monotonic clock; with
                                                  --once-file only the first time
                                                  (the file is created then), later starts run until SIGTERM
  probe oom --mb N [--child] [--at-ns N] [--stamp PATH]
                                                  touch N MiB, or wait until N ns of the monotonic clock first; with
                                                  --child a child does, and the parent keeps running
  probe grow --mb-per-s N [--first-mb N]          touch N MiB more every second, until SIGTERM, and other N MiB at once
                                                  before
  probe thrash --file PATH --leave-mb N           touch memory until N MiB are available on the machine, then read pages
                                                  of a larger file in random order by several threads, until SIGTERM
  probe obey --commands PATH                      execute the lines of a FIFO: `main N` touches N MiB, `child N` forks
                                                  a child that does and waits for its end, `exit K` exits with K
  probe web [--port P] [--stamp PATH] [--fail-at-ns N] [--once-file PATH] [--content PATH]
                                                  answer every HTTP request with 200 (port 8080), from N ns of the
                                                  monotonic clock on with 500; with --once-file only the first process
                                                  fails; with --content after reading a random block of this file
  probe fork-exit                                 fork a child that keeps running, then exit 0

A stamp file gets one line `start NANOSECONDS` at the start and `exit NANOSECONDS` just before the exit, both of
CLOCK_MONOTONIC. `web` writes the first line when its port is open, and `fail NANOSECONDS` just before it answers with
500 for the first time.
";

/// What to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Action {
    /// Run until SIGTERM.
    Run {
        /// The stamp file.
        stamp: Option<PathBuf>,
    },
    /// Exit after a time.
    Exit(Exit),
    /// Allocate memory and touch it.
    Oom(Oom),
    /// Touch more and more memory.
    Grow {
        /// MiB per second.
        speed: usize,
        /// MiB that are touched before, as fast as possible.
        first: usize,
    },
    /// Read a file that does not fit in the memory that is left.
    Thrash {
        /// The file.
        file: PathBuf,
        /// How much memory to leave, in MiB.
        leave: u64,
    },
    /// Execute commands.
    Obey {
        /// The FIFO with the commands.
        commands: PathBuf,
    },
    /// Serve HTTP.
    Web(Web),
    /// Exit and leave an orphan.
    ForkExit,
}

/// How to touch memory.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Oom {
    /// How much, in MiB.
    pub megabytes: usize,
    /// Whether a forked child does it.
    pub child: bool,
    /// When to begin, in nanoseconds of CLOCK_MONOTONIC; at once if that has passed.
    pub at: Option<u64>,
    /// The stamp file.
    pub stamp: Option<PathBuf>,
}

/// How to serve HTTP.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Web {
    /// The TCP port on all addresses.
    pub port: u16,
    /// The stamp file.
    pub stamp: Option<PathBuf>,
    /// When to begin to fail, in nanoseconds of CLOCK_MONOTONIC.
    pub fail_at: Option<u64>,
    /// Fail only if this file does not exist, and create it.
    pub once_file: Option<PathBuf>,
    /// Read a block of this file for each answer.
    pub content: Option<PathBuf>,
}

/// How to exit.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Exit {
    /// Exit code.
    pub code: u8,
    /// How long to run before.
    pub after: Duration,
    /// When to exit instead, in nanoseconds of CLOCK_MONOTONIC; at once if that has passed.
    pub at: Option<u64>,
    /// The stamp file.
    pub stamp: Option<PathBuf>,
    /// Exit only if this file does not exist, and create it.
    pub once_file: Option<PathBuf>,
}

impl Action {
    /// Parses a command line without the program's name.
    ///
    /// # Errors
    /// An action or option is unknown, or a value is missing or malformed.
    pub(crate) fn parse(arguments: &[String]) -> Result<Self, String> {
        let (name, rest) = arguments.split_first().ok_or("no action given")?;
        let mut options = Options(rest.iter());
        match name.as_str() {
            "run" => {
                let mut stamp = None;
                while let Some(option) = options.next() {
                    match option {
                        "--stamp" => stamp = Some(options.path(option)?),
                        _ => return Err(unknown(name, option)),
                    }
                }
                Ok(Self::Run { stamp })
            }
            "exit" => Exit::parse(options).map(Self::Exit),
            "oom" => Oom::parse(options).map(Self::Oom),
            "grow" => {
                let (mut speed, mut first) = (None, 0);
                while let Some(option) = options.next() {
                    match option {
                        "--mb-per-s" => speed = Some(options.number(option)?),
                        "--first-mb" => first = options.number(option)?,
                        _ => return Err(unknown(name, option)),
                    }
                }
                Ok(Self::Grow { speed: speed.ok_or("grow: --mb-per-s is missing")?, first })
            }
            "thrash" => {
                let (mut file, mut leave) = (None, None);
                while let Some(option) = options.next() {
                    match option {
                        "--file" => file = Some(options.path(option)?),
                        "--leave-mb" => leave = Some(options.number(option)?),
                        _ => return Err(unknown(name, option)),
                    }
                }
                Ok(Self::Thrash {
                    file: file.ok_or("thrash: --file is missing")?,
                    leave: leave.ok_or("thrash: --leave-mb is missing")?,
                })
            }
            "obey" => {
                let mut commands = None;
                while let Some(option) = options.next() {
                    match option {
                        "--commands" => commands = Some(options.path(option)?),
                        _ => return Err(unknown(name, option)),
                    }
                }
                Ok(Self::Obey { commands: commands.ok_or("obey: --commands is missing")? })
            }
            "web" => Web::parse(options).map(Self::Web),
            "fork-exit" => options.next().map_or(Ok(Self::ForkExit), |option| Err(unknown(name, option))),
            _ => Err(format!("unknown action {name:?}")),
        }
    }
}

impl Oom {
    fn parse(mut options: Options<'_>) -> Result<Self, String> {
        let (mut oom, mut megabytes) = (Self::default(), None);
        while let Some(option) = options.next() {
            match option {
                "--mb" => megabytes = Some(options.number(option)?),
                "--child" => oom.child = true,
                "--at-ns" => oom.at = Some(options.number(option)?),
                "--stamp" => oom.stamp = Some(options.path(option)?),
                _ => return Err(unknown("oom", option)),
            }
        }
        Ok(Self { megabytes: megabytes.ok_or("oom: --mb is missing")?, ..oom })
    }
}

impl Web {
    fn parse(mut options: Options<'_>) -> Result<Self, String> {
        let mut web = Self { port: 8080, ..Self::default() };
        while let Some(option) = options.next() {
            match option {
                "--port" => web.port = options.number(option)?,
                "--stamp" => web.stamp = Some(options.path(option)?),
                "--fail-at-ns" => web.fail_at = Some(options.number(option)?),
                "--once-file" => web.once_file = Some(options.path(option)?),
                "--content" => web.content = Some(options.path(option)?),
                _ => return Err(unknown("web", option)),
            }
        }
        Ok(web)
    }
}

impl Exit {
    fn parse(mut options: Options<'_>) -> Result<Self, String> {
        let mut exit = Self::default();
        while let Some(option) = options.next() {
            match option {
                "--code" => exit.code = options.number(option)?,
                "--at-ns" => exit.at = Some(options.number(option)?),
                "--after-ms" => exit.after = Duration::from_millis(options.number(option)?),
                "--stamp" => exit.stamp = Some(options.path(option)?),
                "--once-file" => exit.once_file = Some(options.path(option)?),
                _ => return Err(unknown("exit", option)),
            }
        }
        Ok(exit)
    }
}

struct Options<'a>(std::slice::Iter<'a, String>);

impl<'a> Options<'a> {
    fn next(&mut self) -> Option<&'a str> {
        self.0.next().map(String::as_str)
    }

    fn value(&mut self, option: &str) -> Result<&'a str, String> {
        self.next().ok_or_else(|| format!("{option} needs a value"))
    }

    fn path(&mut self, option: &str) -> Result<PathBuf, String> {
        self.value(option).map(PathBuf::from)
    }

    fn number<T: std::str::FromStr>(&mut self, option: &str) -> Result<T, String> {
        let value = self.value(option)?;
        value.parse().map_err(|_| format!("{option}: {value:?} is not a number that fits"))
    }
}

fn unknown(action: &str, option: &str) -> String {
    format!("{action}: unknown option {option:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Action, String> {
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Action::parse(&arguments)
    }

    #[test]
    fn every_action_parses() {
        let after = Duration::from_millis(250);
        let exit = Exit { code: 3, after, at: None, stamp: Some("/s".into()), once_file: Some("/o".into()) };
        let web = Web {
            port: 80,
            stamp: Some("/s".into()),
            fail_at: Some(250),
            once_file: Some("/o".into()),
            content: Some("/c".into()),
        };
        let timed = Oom { megabytes: 64, child: false, at: Some(5), stamp: Some("/s".into()) };
        let cases = [
            ("run", Action::Run { stamp: None }),
            ("run --stamp /s", Action::Run { stamp: Some("/s".into()) }),
            ("exit", Action::Exit(Exit::default())),
            ("exit --code 3 --after-ms 250 --stamp /s --once-file /o", Action::Exit(exit)),
            ("exit --at-ns 5", Action::Exit(Exit { at: Some(5), ..Exit::default() })),
            ("oom --mb 64", Action::Oom(Oom { megabytes: 64, ..Oom::default() })),
            ("oom --child --mb 64", Action::Oom(Oom { megabytes: 64, child: true, ..Oom::default() })),
            ("oom --mb 64 --at-ns 5 --stamp /s", Action::Oom(timed)),
            ("grow --mb-per-s 50", Action::Grow { speed: 50, first: 0 }),
            ("grow --mb-per-s 50 --first-mb 900", Action::Grow { speed: 50, first: 900 }),
            ("thrash --file /f --leave-mb 200", Action::Thrash { file: "/f".into(), leave: 200 }),
            ("obey --commands /c", Action::Obey { commands: "/c".into() }),
            ("web", Action::Web(Web { port: 8080, ..Web::default() })),
            ("web --port 80 --stamp /s --fail-at-ns 250 --once-file /o --content /c", Action::Web(web)),
            ("fork-exit", Action::ForkExit),
        ];
        for (line, expected) in cases {
            assert_eq!(parse(line), Ok(expected), "{line}");
        }
    }

    #[test]
    fn invalid_arguments_are_reported() {
        let cases = [
            ("", "no action given"),
            ("sleep", "unknown action \"sleep\""),
            ("run --port 1", "run: unknown option \"--port\""),
            ("exit --code 256", "--code: \"256\" is not a number that fits"),
            ("exit --stamp", "--stamp needs a value"),
            ("oom --child", "oom: --mb is missing"),
            ("grow --first-mb 9", "grow: --mb-per-s is missing"),
            ("thrash --file /f", "thrash: --leave-mb is missing"),
            ("thrash --leave-mb 5", "thrash: --file is missing"),
            ("obey", "obey: --commands is missing"),
            ("web --code 1", "web: unknown option \"--code\""),
            ("fork-exit now", "fork-exit: unknown option \"now\""),
        ];
        for (line, expected) in cases {
            assert_eq!(parse(line), Err(expected.to_owned()), "{line}");
        }
    }
}
