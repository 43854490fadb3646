//! The five scenes: what each shows and what proves it. Each looks at the world and moves on; none believes the agent
//! alone.

use std::io::Read as _;
use std::io::Write as _;
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;
use std::time::Instant;

use anyhow::Result;
use keblet_peers::Node;

use super::pods::CHAIN;
use super::pods::CRASH_CODE;
use super::pods::WEB_PORT;
use super::stamps;
use super::world::World;

/// A web pod has stayed up when it answered this often.
const ANSWERS: usize = 10;
/// A restart later than this is not at once, however busy the machine; an idle one needs a tenth.
const AT_ONCE_MS: f64 = 1000.0;
const HTTP_PATIENCE: Duration = Duration::from_secs(2);

/// Where a scene stands.
#[derive(Debug, PartialEq)]
enum State {
    Waiting,
    Shown(String),
    Failed(String),
    /// The machine cannot show it, so the demo does not claim to.
    Left(String),
}

/// One thing that the demo shows.
pub struct Scene {
    /// The pod's name.
    pub name: &'static str,
    /// What is shown.
    pub title: &'static str,
    state: State,
    plot: Plot,
}

/// What a scene remembers between two looks.
enum Plot {
    Web { answers: usize, first: Option<Instant> },
    Crash,
    Oom,
    Chain,
    Gone { pid: Option<i32>, removed: Option<Instant> },
}

/// All scenes; the memory scene is left out where the kernel cannot be watched.
pub fn all(lacks_kernel: Option<String>) -> Vec<Scene> {
    let scene = |name, title, plot| Scene { name, title, state: State::Waiting, plot };
    let mut oom = scene("oom", "a child killed for memory is named", Plot::Oom);
    if let Some(lack) = lacks_kernel {
        oom.state = State::Left(lack);
    }
    vec![
        scene("web", "a pod stays up", Plot::Web { answers: 0, first: None }),
        scene("crash", "a crash is restarted at once", Plot::Crash),
        oom,
        scene("chain", "init containers run one after the other", Plot::Chain),
        scene("gone", "a pod ends when its file is removed", Plot::Gone { pid: None, removed: None }),
    ]
}

impl Scene {
    /// Whether nothing more will come.
    pub fn over(&self) -> bool {
        self.state != State::Waiting
    }

    /// Whether it was shown, or never promised.
    pub fn shown(&self) -> bool {
        matches!(self.state, State::Shown(_) | State::Left(_))
    }

    /// Its result in a word, and the proof or what is missing.
    pub fn result(&self, world: &World) -> (&'static str, String) {
        match &self.state {
            State::Shown(proof) => ("ok", proof.clone()),
            State::Failed(why) => ("FAILED", why.clone()),
            State::Left(lack) => ("not shown", lack.clone()),
            State::Waiting => ("FAILED", self.missing(world)),
        }
    }

    /// Looks a last time: what was shown must still hold when the curtain falls.
    pub fn confirm(&mut self, world: &World) {
        let attempt = match self.plot {
            Plot::Gone { .. } => return,
            Plot::Crash => 1,
            Plot::Web { .. } | Plot::Oom | Plot::Chain => 0,
        };
        let main = world.container(self.name, "main");
        let holds = main.is_some_and(|main| main.state == "running" && main.attempt == attempt);
        if matches!(self.state, State::Shown(_)) && !holds {
            let now =
                main.map_or_else(|| "gone".to_owned(), |main| format!("{} at attempt {}", main.state, main.attempt));
            self.state = State::Failed(format!("it did not last: main is {now}"));
        }
    }

    /// Looks at the world; returns what is new to tell.
    pub fn advance(&mut self, world: &World, node: &Node) -> Result<Option<String>> {
        if self.over() {
            return Ok(None);
        }
        let news = match &mut self.plot {
            Plot::Web { answers, first } => web(world, answers, first),
            Plot::Crash => crash(world),
            Plot::Oom => oom(world),
            Plot::Chain => chain(world),
            Plot::Gone { pid, removed } => gone(world, node, pid, removed)?,
        };
        Ok(match news {
            News::None => None,
            News::Note(note) => Some(note),
            News::Shown(proof) => {
                self.state = State::Shown(proof.clone());
                Some(format!("shown: {proof}"))
            }
            News::Failed(why) => {
                self.state = State::Failed(why.clone());
                Some(format!("FAILED: {why}"))
            }
        })
    }

    fn missing(&self, world: &World) -> String {
        let kinds: Vec<&str> = world.events_of(self.name).map(|event| event.kind.as_str()).collect();
        let runtime = world.container(self.name, "main").map_or_else(
            || "no container main".to_owned(),
            |main| format!("main is {} at attempt {}", main.state, main.attempt),
        );
        format!("not seen in time; the runtime: {runtime}; the agent's events: {}", kinds.join(", "))
    }
}

enum News {
    None,
    Note(String),
    Shown(String),
    Failed(String),
}

/// Answers over HTTP several times, never restarted.
fn web(world: &World, answers: &mut usize, first: &mut Option<Instant>) -> News {
    let (Some(pod), Some(main)) = (world.pod("web"), world.container("web", "main")) else { return News::None };
    if main.attempt > 0 {
        return News::Failed(format!("it was restarted {} times", main.attempt));
    }
    if main.state != "running" || !reported(world, "web", "ContainerStarted") {
        return News::None;
    }
    let address = format!("{}:{WEB_PORT}", pod.ip);
    match (answers_ok(&address), *first) {
        (false, None) => News::None,
        (false, Some(_)) => News::Failed(format!("{address} no longer answers")),
        (true, _) => {
            *answers += 1;
            let begun = *first.get_or_insert_with(Instant::now);
            match *answers {
                1 => News::Note(format!("answers 200 at http://{address}/")),
                ANSWERS => {
                    let seconds = begun.elapsed().as_secs_f32();
                    News::Shown(format!("{ANSWERS} answers over HTTP within {seconds:.1} s, never restarted"))
                }
                _ => News::None,
            }
        }
    }
}

/// Died once with its code, and runs again soon after, by its own clock.
fn crash(world: &World) -> News {
    let Some(main) = world.container("crash", "main") else { return News::None };
    if main.attempt > 1 {
        return News::Failed(format!("it was restarted {} times for one crash", main.attempt));
    }
    let died = world.events_of("crash").find(|event| event.kind == "ContainerDied" && event.container == "main");
    let Some(died) = died else { return News::None };
    if died.exit_code.is_some_and(|code| code != CRASH_CODE) {
        return News::Failed(format!("the agent saw exit code {:?}, not {CRASH_CODE}", died.exit_code));
    }
    if died.source == "relist" {
        return News::Failed("a relist found the crash, no event told of it".to_owned());
    }
    let stamps = stamps::read(&world.stamps, "crash");
    let words: Vec<&str> = stamps.iter().map(|stamp| stamp.word.as_str()).collect();
    if (main.attempt, main.state.as_str()) != (1, "running") || words != ["start", "exit", "start"] {
        return News::None;
    }
    let gap = stamps::milliseconds(stamps[1].at, stamps[2].at);
    if gap > AT_ONCE_MS {
        return News::Failed(format!("the next process came {gap:.0} ms after the exit"));
    }
    News::Shown(format!("exit {CRASH_CODE}, the next process {gap:.0} ms later, attempt 1"))
}

/// The agent names the victim, the parent says its child was killed, and the container lives on.
fn oom(world: &World) -> News {
    let Some(main) = world.container("oom", "main") else { return News::None };
    if main.attempt > 0 || main.state == "exited" {
        return News::Failed(format!("the container did not live on: {} at attempt {}", main.state, main.attempt));
    }
    let Some(event) = world.events_of("oom").find(|event| event.kind == "OomKilled") else { return News::None };
    let Some(victim) = &event.victim else { return News::Failed("the agent named no victim".to_owned()) };
    if !victim.contains("probe") {
        return News::Failed(format!("the agent named {victim}, but the child is called probe"));
    }
    if !world.output("oom", "main").contains("was killed by SIGKILL") {
        return News::None;
    }
    News::Shown(format!("victim {victim}; the container lives on"))
}

/// Each init container ended before the next began, and then came main.
fn chain(world: &World) -> News {
    let Some(main) = world.container("chain", "main") else { return News::None };
    if main.state != "running" || !reported(world, "chain", "ContainerStarted") {
        return News::None;
    }
    let mut order = Vec::new();
    for name in CHAIN {
        let stamps = stamps::read(&world.stamps, &format!("chain-{name}"));
        let [start, exit] = stamps.as_slice() else {
            return News::Failed(format!("init container {name} ran {} times", stamps.len().div_ceil(2)));
        };
        order.extend([start.at, exit.at]);
        if world.container("chain", name).is_some_and(|init| init.exit_code != 0 || init.attempt > 0) {
            return News::Failed(format!("init container {name} did not end well the first time"));
        }
    }
    let stamps = stamps::read(&world.stamps, "chain-main");
    let Some(start) = stamps.first() else { return News::None };
    order.push(start.at);
    if !order.is_sorted() {
        return News::Failed("the containers' stamps are out of order".to_owned());
    }
    let took = stamps::milliseconds(order[0], start.at);
    News::Shown(format!("{} init containers and main in order, within {took:.0} ms", CHAIN.len()))
}

/// Runs; then its file is removed; then its process and its pod are gone.
fn gone(world: &World, node: &Node, pid: &mut Option<i32>, removed: &mut Option<Instant>) -> Result<News> {
    let main = world.container("gone", "main");
    let Some(since) = *removed else {
        let Some(running) = main.filter(|main| main.state == "running").and_then(|main| main.pid) else {
            return Ok(News::None);
        };
        if !reported(world, "gone", "ContainerStarted") {
            return Ok(News::None);
        }
        *pid = Some(running);
        *removed = Some(Instant::now());
        node.remove_manifest("gone")?;
        return Ok(News::Note("its file is removed".to_owned()));
    };
    let alive = pid.is_some_and(|pid| Path::new("/proc").join(pid.to_string()).exists());
    let up = main.is_some_and(|main| main.state == "running") || world.pod("gone").is_some_and(|pod| pod.ready);
    if alive || up || !reported(world, "gone", "ContainerDied") {
        return Ok(News::None);
    }
    Ok(News::Shown(format!("process and sandbox gone {:.1} s after its file", since.elapsed().as_secs_f32())))
}

fn reported(world: &World, pod: &str, kind: &str) -> bool {
    world.events_of(pod).any(|event| event.kind == kind && event.container == "main")
}

fn answers_ok(address: &str) -> bool {
    let Ok(address) = address.parse() else { return false };
    let answer = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, HTTP_PATIENCE)?;
        stream.set_read_timeout(Some(HTTP_PATIENCE))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    answer().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200 "))
}

#[cfg(test)]
#[path = "scenes_tests.rs"]
mod tests;
