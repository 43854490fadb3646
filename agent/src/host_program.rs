//! Programs of the node: a name is found on the path. They are given a list of arguments and never a shell, bounded in what
//! is kept of their output and, unless they must not be interrupted, in time.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::process::Stdio;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::future::try_join3;
use secrecy::ExposeSecret;
use secrecy::SecretString;
use tokio::io::AsyncRead;
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::sync::OnceCell;
use tokio_util::task::AbortOnDropHandle;

/// How long a program may take unless a call says otherwise.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes that are kept of the standard output, and as many of the standard error.
const MAX_KEPT: usize = 64 * 1024;
/// Characters of output that are quoted.
const MAX_QUOTED: usize = 1024;
/// Follows output of which the rest is left out.
const CUT: &str = " [cut]";

/// A program and its arguments. Shown without its secrets.
#[derive(Clone, Debug)]
pub struct Call {
    program: Cow<'static, str>,
    /// What is appended to the program's name: `ext4` of `mkfs.ext4`.
    suffix: String,
    arguments: Vec<String>,
    /// The last arguments, if no message may show them.
    secrets: Vec<SecretString>,
    timeout: Duration,
    /// The process is not killed when the future of the call is dropped.
    runs_to_end: bool,
}

impl Call {
    /// A call of `program`, a name or a path, that may take a minute.
    pub fn new(program: impl Into<Cow<'static, str>>, arguments: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let (program, arguments) = (program.into(), arguments.into_iter().map(Into::into).collect());
        Self { program, suffix: String::new(), arguments, secrets: Vec::new(), timeout: TIMEOUT, runs_to_end: false }
    }

    /// Runs a variant of the program, as `mkfs.ext4`. The suffix is known to have no slash.
    pub fn variant(mut self, suffix: &str) -> Self {
        self.suffix = format!(".{suffix}");
        self
    }

    /// Appends an argument that appears in no message; only others like it may follow. On the node it is visible in the list
    /// of processes.
    pub fn with_secret(mut self, secret: SecretString) -> Self {
        self.secrets.push(secret);
        self
    }

    /// Sets the time after which the program is killed.
    pub fn within(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The program must not be interrupted: it has no timeout, since nothing else may be done with a device that it works on.
    /// It runs on, and its output is read to the end, if the future of the call is dropped. When the agent ends, it runs on as
    /// long as it writes nothing.
    pub fn finished(mut self) -> Self {
        self.runs_to_end = true;
        self
    }

    /// Name of the program.
    pub fn program(&self) -> String {
        format!("{}{}", self.program, self.suffix)
    }

    /// The arguments that may be shown.
    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }

    /// The error of this call.
    pub fn failed(&self, problem: impl fmt::Display) -> ProgramError {
        ProgramError { call: self.to_string(), problem: problem.to_string() }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{} {}", self.program, self.suffix, self.arguments.join(" "))?;
        self.secrets.iter().try_for_each(|_| f.write_str(" ***"))
    }
}

/// A program of the node failed.
#[derive(Debug, thiserror::Error)]
#[error("{call} failed: {problem}")]
pub struct ProgramError {
    /// Its name and arguments, without secrets.
    call: String,
    /// How it ended.
    problem: String,
}

/// How a program ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// Its exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// The status in words.
    pub status: String,
    /// Its standard output, at most the first 64 KiB of it.
    pub output: String,
    /// Its standard error, likewise.
    pub errors: String,
}

impl Ended {
    /// True if it reports success.
    pub fn is_success(&self) -> bool {
        self.code == Some(0)
    }

    /// The beginning of its output, trimmed.
    pub fn quoted(&self) -> String {
        let text = format!("{}{}", self.output, self.errors);
        let text = text.trim();
        match text.char_indices().nth(MAX_QUOTED) {
            Some((end, _)) => format!("{}{CUT}", &text[..end]),
            None => text.to_owned(),
        }
    }

    /// Status and output, without the output if the call has a secret: the program may repeat it.
    pub fn describe(&self, call: &Call) -> String {
        match self.quoted() {
            text if text.is_empty() || !call.secrets.is_empty() => self.status.clone(),
            text => format!("{}: {text}", self.status),
        }
    }
}

/// Runs programs: those of the node, or scripted ones.
pub trait Programs: fmt::Debug + Send + Sync {
    /// Runs a program to its end, whatever it reports. A dropped future kills it, unless the call is to be finished.
    ///
    /// # Errors
    /// There is no such program, it cannot be started, or one that may be interrupted does not end in time.
    fn run<'a>(&'a self, call: &'a Call) -> BoxFuture<'a, Result<Ended, ProgramError>>;

    /// Whether a program can be run in a scope of its own by systemd-run(1).
    fn has_scopes(&self) -> BoxFuture<'_, bool> {
        Box::pin(std::future::ready(false))
    }
}

/// Runs a program that has to succeed, and returns its standard output.
///
/// # Errors
/// As [`Programs::run`]; it reports a failure.
pub async fn succeed(programs: &dyn Programs, call: &Call) -> Result<String, ProgramError> {
    let ended = programs.run(call).await?;
    match ended.is_success() {
        true => Ok(ended.output),
        false => Err(call.failed(ended.describe(call))),
    }
}

/// Runs a program that does nothing in a scope: systemd-run(1) may be installed without a systemd that answers.
async fn detect_scopes(programs: &dyn Programs) -> bool {
    let probe = Call::new("systemd-run", ["--description=Kubernetes systemd probe", "--scope", "true"]);
    match succeed(programs, &probe).await {
        Ok(_) => true,
        Err(error) => {
            tracing::debug!(%error, "no program is run in a scope of its own");
            false
        }
    }
}

/// The programs of the node.
#[derive(Clone, Copy, Debug)]
pub struct HostPrograms;

/// What [`detect_scopes`] has found on this node, once it was needed.
static HAS_SCOPES: OnceCell<bool> = OnceCell::const_new();

impl Programs for HostPrograms {
    fn run<'a>(&'a self, call: &'a Call) -> BoxFuture<'a, Result<Ended, ProgramError>> {
        Box::pin(async move {
            let mut command = Command::new(call.program());
            command.args(&call.arguments).args(call.secrets.iter().map(ExposeSecret::expose_secret));
            // Output is read.
            command.env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.kill_on_drop(!call.runs_to_end);
            let running = run_to_end(command);
            let ended = match call.runs_to_end {
                // In a task that outlives the caller: SIGPIPE kills a program that writes to a closed pipe.
                true => Ok(tokio::spawn(running).await.unwrap_or_else(|error| Err(io::Error::other(error)))),
                false => tokio::time::timeout(call.timeout, running).await,
            };
            match ended {
                Ok(Ok(ended)) => Ok(ended),
                Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => {
                    Err(call.failed("the program is not installed on this node"))
                }
                Ok(Err(error)) => Err(call.failed(error)),
                Err(_) => Err(call.failed(format!("timed out after {:?}", call.timeout))),
            }
        })
    }

    fn has_scopes(&self) -> BoxFuture<'_, bool> {
        Box::pin(async { *HAS_SCOPES.get_or_init(|| detect_scopes(&HostPrograms)).await })
    }
}

/// Runs a program whose output is piped.
///
/// # Errors
/// It cannot be started, or its output cannot be read.
async fn run_to_end(mut command: Command) -> io::Result<Ended> {
    // Waits until the program is read from its disk. If the call is dropped meanwhile, the program is killed at once then; if
    // that was waiting for a thread, it is not started.
    let started = AbortOnDropHandle::new(tokio::task::spawn_blocking(move || command.spawn())).await;
    let mut child = started.map_err(io::Error::other)??;
    let (output, errors) = (beginning(child.stdout.take()), beginning(child.stderr.take()));
    let (status, output, errors) = try_join3(child.wait(), output, errors).await?;
    Ok(Ended { code: status.code(), status: status.to_string(), output, errors })
}

/// The beginning of what a program writes. The rest is read, too: otherwise the program would wait.
///
/// # Errors
/// It cannot be read.
async fn beginning(stream: Option<impl AsyncRead + Unpin>) -> io::Result<String> {
    let Some(mut stream) = stream else { return Ok(String::new()) };
    let mut kept = Vec::new();
    (&mut stream).take(MAX_KEPT as u64).read_to_end(&mut kept).await?;
    let rest = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await?;
    let text = String::from_utf8_lossy(&kept);
    Ok(if rest > 0 { format!("{text}{CUT}") } else { text.into_owned() })
}

#[cfg(test)]
pub(crate) mod testing {
    //! Programs that a test scripts.

    use std::sync::Mutex;

    use super::*;

    /// What a call ends with, by its text; `None`: success without output.
    type Script = Box<dyn Fn(&str) -> Option<(i32, String)> + Send + Sync>;

    /// Records calls, with their secrets, and ends them as its script says.
    pub(crate) struct ScriptedPrograms {
        script: Script,
        calls: Mutex<Vec<String>>,
        has_scopes: bool,
    }

    impl ScriptedPrograms {
        pub(crate) fn new(script: impl Fn(&str) -> Option<(i32, String)> + Send + Sync + 'static) -> Self {
            Self { script: Box::new(script), calls: Mutex::default(), has_scopes: false }
        }

        /// On a node whose systemd runs programs in scopes.
        pub(crate) fn with_scopes(mut self) -> Self {
            self.has_scopes = true;
            self
        }

        /// The calls since the last time.
        pub(crate) fn take(&self) -> Vec<String> {
            std::mem::take(&mut *self.calls.lock().expect("unpoisoned"))
        }
    }

    impl fmt::Debug for ScriptedPrograms {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("ScriptedPrograms")
        }
    }

    impl Programs for ScriptedPrograms {
        fn run<'a>(&'a self, call: &'a Call) -> BoxFuture<'a, Result<Ended, ProgramError>> {
            let secret = call.secrets.iter().map(|secret| format!(" {}", secret.expose_secret()));
            let text = format!("{} {}{}", call.program(), call.arguments.join(" "), secret.collect::<String>());
            let (code, output) = (self.script)(&text).unwrap_or_default();
            self.calls.lock().expect("unpoisoned").push(text);
            let ended =
                Ended { code: Some(code), status: format!("exit status: {code}"), output, errors: String::new() };
            Box::pin(async move { Ok(ended) })
        }

        fn has_scopes(&self) -> BoxFuture<'_, bool> {
            Box::pin(std::future::ready(self.has_scopes))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Call {
        Call::new("sh", ["-c", script])
    }

    #[tokio::test]
    async fn a_program_ends_with_its_code_and_output() {
        let ended = HostPrograms.run(&shell("echo out; echo err >&2; exit 3")).await.expect("it runs");
        assert_eq!((ended.code, ended.output.as_str(), ended.errors.as_str()), (Some(3), "out\n", "err\n"));
        assert_eq!(succeed(&HostPrograms, &shell("echo $LC_ALL")).await.expect("success"), "C\n");
        let error = succeed(&HostPrograms, &shell("echo no >&2; exit 3")).await.expect_err("a failure").to_string();
        assert_eq!(error, "sh -c echo no >&2; exit 3 failed: exit status: 3: no");
        let text = succeed(&HostPrograms, &Call::new("printf", ["%s|", "-n", "a b"])).await.expect("success");
        assert_eq!(text, "-n|a b|", "each argument is one, whatever is in it");
    }

    #[test]
    fn the_agent_goes_on_while_a_program_is_read_from_its_disk() {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        // One thread for work that may block, which is busy.
        let runtime = builder.enable_all().max_blocking_threads(1).build().expect("a runtime");
        runtime.block_on(async {
            let dir = tempfile::tempdir().expect("a folder");
            let made = dir.path().join("made");
            let (release, released) = std::sync::mpsc::channel::<()>();
            let busy = tokio::task::spawn_blocking(move || released.recv());
            let call = Call::new("touch", [made.to_string_lossy()]);
            let mut running = HostPrograms.run(&call);
            let early = tokio::time::timeout(Duration::from_millis(100), &mut running).await;
            assert!(early.is_err() && !made.exists(), "it is started on such a thread");
            drop(release);
            busy.await.expect("ended").expect_err("nothing was sent");
            assert!(running.await.expect("it runs").is_success() && made.exists());
        });
    }

    #[tokio::test]
    async fn of_much_output_the_beginning_is_kept() {
        let writes = |bytes: usize| {
            shell(&format!(
                "head -c {bytes} /dev/zero | tr '\\0' x; head -c {bytes} /dev/zero | tr '\\0' y >&2; exit 3"
            ))
        };
        // More than a pipe holds.
        let ended = HostPrograms.run(&writes(16 * MAX_KEPT)).await.expect("it is not held up");
        let kept = |letter: &str| letter.repeat(MAX_KEPT);
        assert!(ended.output == kept("x") + CUT && ended.errors == kept("y") + CUT, "{}", ended.output.len());
        assert_eq!((ended.code, ended.quoted()), (Some(3), "x".repeat(MAX_QUOTED) + CUT));
        let ended = HostPrograms.run(&writes(MAX_KEPT)).await.expect("it runs");
        assert!(ended.output == kept("x") && ended.errors == kept("y"), "nothing is cut");
        let ended = HostPrograms.run(&writes(MAX_QUOTED / 2)).await.expect("it runs");
        assert_eq!(ended.quoted(), "x".repeat(MAX_QUOTED / 2) + &"y".repeat(MAX_QUOTED / 2));
    }

    #[tokio::test]
    async fn a_program_that_must_not_be_interrupted_writes_on_after_its_caller_has_given_up() {
        let dir = tempfile::tempdir().expect("a folder");
        let [end, begin] = ["end", "begin"].map(|name| dir.path().join(name));
        for pipe in [&end, &begin] {
            nix::unistd::mkfifo(pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
        }
        let script = "exec 3>\"$0\"; read line <\"$1\"; echo progress; echo done >&3";
        let paths = [&end, &begin].map(|path| path.to_string_lossy().into_owned());
        let call = Call::new("sh", ["-c".to_owned(), script.to_owned()].into_iter().chain(paths));
        let call = call.within(Duration::from_millis(20)).finished();
        let given_up = tokio::time::timeout(Duration::from_millis(200), HostPrograms.run(&call)).await;
        given_up.expect_err("it waits for the pipes, and is waited for beyond its own limit");
        let output = tokio::task::spawn_blocking(move || {
            let end = std::fs::File::open(end)?;
            std::fs::write(begin, "go\n")?;
            // The pipe ends with the program.
            io::read_to_string(end)
        });
        assert_eq!(output.await.expect("no panic").expect("text"), "done\n");
    }

    #[tokio::test]
    async fn a_missing_program_and_one_that_hangs_are_errors() {
        let missing = Call::new("mkfs", ["/dev/null"]).variant("no-such-type");
        let error = HostPrograms.run(&missing).await.expect_err("there is none").to_string();
        assert_eq!(error, "mkfs.no-such-type /dev/null failed: the program is not installed on this node");
        let hangs = Call::new("sleep", ["3600"]).within(Duration::from_millis(20));
        let error = HostPrograms.run(&hangs).await.expect_err("it hangs").to_string();
        assert_eq!(error, "sleep 3600 failed: timed out after 20ms");
    }

    #[tokio::test]
    async fn scopes_exist_if_systemd_runs_a_program_in_one() {
        for (code, expected) in [(0, true), (1, false)] {
            let programs = testing::ScriptedPrograms::new(move |_| Some((code, String::new())));
            assert_eq!(detect_scopes(&programs).await, expected);
            assert_eq!(programs.take(), ["systemd-run --description=Kubernetes systemd probe --scope true"]);
        }
    }

    #[tokio::test]
    async fn a_secret_is_passed_and_never_shown() {
        let call = shell("echo \"$0 $1\"; exit 1").with_secret("hunter2".into()).with_secret("again".into());
        let ended = HostPrograms.run(&call).await.expect("it runs");
        assert_eq!(ended.output, "hunter2 again\n");
        let error = succeed(&HostPrograms, &call).await.expect_err("a failure").to_string();
        assert_eq!(error, "sh -c echo \"$0 $1\"; exit 1 *** *** failed: exit status: 1");
        assert!(!format!("{call:?}").contains("hunter2"), "{call:?}");
    }
}
