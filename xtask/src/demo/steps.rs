//! The five steps of the demo: what each shows, and the two sources that must confirm it, the agent and another one.

use std::io::Read as _;
use std::io::Write as _;
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;
use std::time::Instant;

use anyhow::Result;
use keblet_peers::Node;

use super::observed::ObservedState;
use super::pods::CHAIN;
use super::pods::CRASH_CODE;
use super::pods::WEB_PORT;
use super::stamps;

/// A web pod counts as up after so many answers.
const ANSWERS: usize = 10;
/// A later restart does not count as immediate. An idle machine needs a tenth of it.
const AT_ONCE_MS: f64 = 1000.0;
const HTTP_TIMEOUT: Duration = Duration::from_secs(2);

/// State of a step.
#[derive(Debug, PartialEq)]
enum State {
    Waiting,
    Shown(String),
    Failed(String),
    /// The machine cannot show it.
    Skipped(String),
}

/// One behaviour that the demo shows.
pub(super) struct DemoStep {
    /// The pod's name.
    pub name: &'static str,
    /// What is shown.
    pub title: &'static str,
    state: State,
    check: Check,
}

/// What a step checks, and its state between two checks.
enum Check {
    Web { answers: usize, first: Option<Instant> },
    Crash,
    Oom,
    Chain,
    Gone { pid: Option<i32>, removed: Option<Instant> },
}

/// All steps; the OOM step is skipped if kernel probes cannot be loaded.
pub(super) fn all(lacks_kernel: Option<String>) -> Vec<DemoStep> {
    let step = |name, title, check| DemoStep { name, title, state: State::Waiting, check };
    let mut oom = step("oom", "a child killed for memory is named", Check::Oom);
    if let Some(lack) = lacks_kernel {
        oom.state = State::Skipped(lack);
    }
    vec![
        step("web", "a pod stays up", Check::Web { answers: 0, first: None }),
        step("crash", "a crash is restarted at once", Check::Crash),
        oom,
        step("chain", "init containers run one after the other", Check::Chain),
        step("gone", "a pod ends when its file is removed", Check::Gone { pid: None, removed: None }),
    ]
}

impl DemoStep {
    /// Whether the step has a result.
    pub(super) fn over(&self) -> bool {
        self.state != State::Waiting
    }

    /// Whether it was shown or skipped.
    pub(super) fn shown(&self) -> bool {
        matches!(self.state, State::Shown(_) | State::Skipped(_))
    }

    /// The result, with the proof or with what is missing.
    pub(super) fn result(&self, observed: &ObservedState) -> (&'static str, String) {
        match &self.state {
            State::Shown(proof) => ("ok", proof.clone()),
            State::Failed(why) => ("FAILED", why.clone()),
            State::Skipped(lack) => ("not shown", lack.clone()),
            State::Waiting => ("FAILED", self.missing(observed)),
        }
    }

    /// Checks at the end of the demo that the containers are still in the state that was shown.
    pub(super) fn confirm(&mut self, observed: &ObservedState) {
        let attempt = match self.check {
            Check::Gone { .. } => return,
            Check::Crash => 1,
            Check::Web { .. } | Check::Oom | Check::Chain => 0,
        };
        let main = observed.container(self.name, "main");
        let holds = main.is_some_and(|main| main.state == "running" && main.attempt == attempt);
        if matches!(self.state, State::Shown(_)) && !holds {
            let now =
                main.map_or_else(|| "gone".to_owned(), |main| format!("{} at attempt {}", main.state, main.attempt));
            self.state = State::Failed(format!("main changed after the step: it is {now}"));
        }
    }

    /// Checks the observed state; returns a line for the screen if there is something new.
    ///
    /// # Errors
    /// The manifest of the pod that is to be removed cannot be removed.
    pub(super) fn advance(&mut self, observed: &ObservedState, node: &Node) -> Result<Option<String>> {
        if self.over() {
            return Ok(None);
        }
        let update = match &mut self.check {
            Check::Web { answers, first } => web(observed, answers, first),
            Check::Crash => crash(observed),
            Check::Oom => oom(observed),
            Check::Chain => chain(observed),
            Check::Gone { pid, removed } => gone(observed, node, pid, removed)?,
        };
        Ok(match update {
            Update::Nothing => None,
            Update::Note(note) => Some(note),
            Update::Shown(proof) => {
                self.state = State::Shown(proof.clone());
                Some(format!("shown: {proof}"))
            }
            Update::Failed(why) => {
                self.state = State::Failed(why.clone());
                Some(format!("FAILED: {why}"))
            }
        })
    }

    fn missing(&self, observed: &ObservedState) -> String {
        let kinds: Vec<&str> = observed.events_of(self.name).map(|event| event.kind.as_str()).collect();
        let runtime = observed.container(self.name, "main").map_or_else(
            || "no container main".to_owned(),
            |main| format!("main is {} at attempt {}", main.state, main.attempt),
        );
        format!("not seen in time; the runtime: {runtime}; the agent's events: {}", kinds.join(", "))
    }
}

enum Update {
    Nothing,
    Note(String),
    Shown(String),
    Failed(String),
}

/// Answers over HTTP several times, never restarted.
fn web(observed: &ObservedState, answers: &mut usize, first: &mut Option<Instant>) -> Update {
    let (Some(pod), Some(main)) = (observed.pod("web"), observed.container("web", "main")) else {
        return Update::Nothing;
    };
    if main.attempt > 0 {
        return Update::Failed(format!("it was restarted {} times", main.attempt));
    }
    if main.state != "running" || !reported(observed, "web", "ContainerStarted") {
        return Update::Nothing;
    }
    let address = format!("{}:{WEB_PORT}", pod.ip);
    match (answers_ok(&address), *first) {
        (false, None) => Update::Nothing,
        (false, Some(_)) => Update::Failed(format!("{address} no longer answers")),
        (true, _) => {
            *answers += 1;
            let begun = *first.get_or_insert_with(Instant::now);
            match *answers {
                1 => Update::Note(format!("answers 200 at http://{address}/")),
                ANSWERS => {
                    let seconds = begun.elapsed().as_secs_f32();
                    Update::Shown(format!("{ANSWERS} answers over HTTP within {seconds:.1} s, never restarted"))
                }
                _ => Update::Nothing,
            }
        }
    }
}

/// Exited once with its exit code, and was restarted within [`AT_ONCE_MS`] by its own timestamps.
fn crash(observed: &ObservedState) -> Update {
    let Some(main) = observed.container("crash", "main") else { return Update::Nothing };
    if main.attempt > 1 {
        return Update::Failed(format!("it was restarted {} times for one crash", main.attempt));
    }
    let died = observed.events_of("crash").find(|event| event.kind == "ContainerDied" && event.container == "main");
    let Some(died) = died else { return Update::Nothing };
    if died.exit_code.is_some_and(|code| code != CRASH_CODE) {
        return Update::Failed(format!("the agent reported exit code {:?}, not {CRASH_CODE}", died.exit_code));
    }
    if died.source == "relist" {
        return Update::Failed("the crash was found by a relist, not by an event".to_owned());
    }
    let stamps = stamps::read(&observed.stamps, "crash");
    let words: Vec<&str> = stamps.iter().map(|stamp| stamp.word.as_str()).collect();
    if (main.attempt, main.state.as_str()) != (1, "running") || words != ["start", "exit", "start"] {
        return Update::Nothing;
    }
    let gap = stamps::milliseconds(stamps[1].at, stamps[2].at);
    if gap > AT_ONCE_MS {
        return Update::Failed(format!("the next process started {gap:.0} ms after the exit"));
    }
    Update::Shown(format!("exit {CRASH_CODE}, the next process {gap:.0} ms later, attempt 1"))
}

/// The agent names the victim, the parent reports that its child was killed, and the container keeps running.
fn oom(observed: &ObservedState) -> Update {
    let Some(main) = observed.container("oom", "main") else { return Update::Nothing };
    if main.attempt > 0 || main.state == "exited" {
        return Update::Failed(format!(
            "the container did not keep running: {} at attempt {}",
            main.state, main.attempt
        ));
    }
    let Some(event) = observed.events_of("oom").find(|event| event.kind == "OomKilled") else { return Update::Nothing };
    let Some(victim) = &event.victim else { return Update::Failed("the agent named no victim".to_owned()) };
    if !victim.contains("probe") {
        return Update::Failed(format!("the agent named {victim}, but the child is called probe"));
    }
    if !observed.output("oom", "main").contains("was killed by SIGKILL") {
        return Update::Nothing;
    }
    Update::Shown(format!("victim {victim}; the container keeps running"))
}

/// Each init container exited before the next started, and main started last.
fn chain(observed: &ObservedState) -> Update {
    let Some(main) = observed.container("chain", "main") else { return Update::Nothing };
    if main.state != "running" || !reported(observed, "chain", "ContainerStarted") {
        return Update::Nothing;
    }
    let mut order = Vec::new();
    for name in CHAIN {
        let stamps = stamps::read(&observed.stamps, &format!("chain-{name}"));
        let [start, exit] = stamps.as_slice() else {
            return Update::Failed(format!("init container {name} ran {} times", stamps.len().div_ceil(2)));
        };
        order.extend([start.at, exit.at]);
        if observed.container("chain", name).is_some_and(|init| init.exit_code != 0 || init.attempt > 0) {
            return Update::Failed(format!("init container {name} did not succeed at its first attempt"));
        }
    }
    let stamps = stamps::read(&observed.stamps, "chain-main");
    let Some(start) = stamps.first() else { return Update::Nothing };
    order.push(start.at);
    if !order.is_sorted() {
        return Update::Failed("the containers' stamps are out of order".to_owned());
    }
    let took = stamps::milliseconds(order[0], start.at);
    Update::Shown(format!("{} init containers and main in order, within {took:.0} ms", CHAIN.len()))
}

/// Runs; then its manifest is removed; then its process and its sandbox no longer exist.
fn gone(observed: &ObservedState, node: &Node, pid: &mut Option<i32>, removed: &mut Option<Instant>) -> Result<Update> {
    let main = observed.container("gone", "main");
    let Some(since) = *removed else {
        let Some(running) = main.filter(|main| main.state == "running").and_then(|main| main.pid) else {
            return Ok(Update::Nothing);
        };
        if !reported(observed, "gone", "ContainerStarted") {
            return Ok(Update::Nothing);
        }
        *pid = Some(running);
        *removed = Some(Instant::now());
        node.remove_manifest("gone")?;
        return Ok(Update::Note("its file is removed".to_owned()));
    };
    let alive = pid.is_some_and(|pid| Path::new("/proc").join(pid.to_string()).exists());
    let up = main.is_some_and(|main| main.state == "running") || observed.pod("gone").is_some_and(|pod| pod.ready);
    if alive || up || !reported(observed, "gone", "ContainerDied") {
        return Ok(Update::Nothing);
    }
    Ok(Update::Shown(format!("process and sandbox removed {:.1} s after its file", since.elapsed().as_secs_f32())))
}

fn reported(observed: &ObservedState, pod: &str, kind: &str) -> bool {
    observed.events_of(pod).any(|event| event.kind == kind && event.container == "main")
}

fn answers_ok(address: &str) -> bool {
    let Ok(address) = address.parse() else { return false };
    let answer = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, HTTP_TIMEOUT)?;
        stream.set_read_timeout(Some(HTTP_TIMEOUT))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    answer().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200 "))
}

#[cfg(test)]
#[path = "steps_tests.rs"]
mod tests;
