//! A step is shown only if agent and other sources agree.

use std::fs;

use keblet_peers::ContainerView;
use keblet_peers::PodView;

use super::super::event::Event;
use super::*;

fn observed(folder: &Path) -> ObservedState {
    ObservedState::new(folder.to_owned(), folder.join("logs"))
}

fn container(name: &str, attempt: u32, state: &str) -> ContainerView {
    ContainerView {
        id: format!("{name}-{attempt}"),
        name: name.to_owned(),
        attempt,
        state: state.to_owned(),
        exit_code: 0,
        reason: String::new(),
        pid: None,
        started_at: 0,
        finished_at: 0,
    }
}

fn pod(name: &str, containers: Vec<ContainerView>) -> PodView {
    PodView {
        id: name.to_owned(),
        namespace: "default".to_owned(),
        name: format!("{name}-demo"),
        attempt: 0,
        ready: true,
        ip: String::new(),
        containers,
    }
}

fn event(pod: &str, container: &str, kind: &str) -> Event {
    Event {
        pod: format!("default/{pod}-demo"),
        container: container.to_owned(),
        kind: kind.to_owned(),
        ..Event::default()
    }
}

fn shown(update: &Update) -> bool {
    matches!(update, Update::Shown(_))
}

fn failure(update: Update) -> String {
    match update {
        Update::Failed(why) => why,
        _ => String::new(),
    }
}

#[test]
fn a_crash_needs_event_runtime_and_stamps() {
    let folder = tempfile::tempdir().unwrap();
    let mut observed = observed(folder.path());
    let died = Event { exit_code: Some(3), ..event("crash", "main", "ContainerDied") };
    observed.pods = vec![pod("crash", vec![container("main", 0, "exited"), container("main", 1, "running")])];
    fs::write(folder.path().join("crash"), "start 0\nexit 1000000000\nstart 1080000000\n").unwrap();
    assert!(!shown(&crash(&observed)), "without the agent's event");
    observed.events = vec![died];
    assert!(shown(&crash(&observed)));

    fs::write(folder.path().join("crash"), "start 0\nexit 1000000000\n").unwrap();
    assert!(!shown(&crash(&observed)), "without the second start");
    fs::write(folder.path().join("crash"), "start 0\nexit 1000000000\nstart 2001000000\n").unwrap();
    assert_eq!(failure(crash(&observed)), "the next process started 1001 ms after the exit");
    observed.pods = vec![pod("crash", vec![container("main", 2, "running")])];
    assert_eq!(failure(crash(&observed)), "it was restarted 2 times for one crash");
}

#[test]
fn a_crash_that_only_polling_found_does_not_count() {
    let folder = tempfile::tempdir().unwrap();
    let mut observed = observed(folder.path());
    observed.pods = vec![pod("crash", vec![container("main", 1, "running")])];
    let died = Event { exit_code: Some(3), ..event("crash", "main", "ContainerDied") };
    observed.events = vec![Event { source: "relist".to_owned(), ..died }];
    assert_eq!(failure(crash(&observed)), "the crash was found by a relist, not by an event");
}

#[test]
fn a_wrong_exit_code_fails_the_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut observed = observed(folder.path());
    observed.pods = vec![pod("crash", vec![container("main", 1, "running")])];
    observed.events = vec![Event { exit_code: Some(1), ..event("crash", "main", "ContainerDied") }];
    assert_eq!(failure(crash(&observed)), "the agent reported exit code Some(1), not 3");
}

#[test]
fn a_victim_must_be_named_and_killed() {
    let folder = tempfile::tempdir().unwrap();
    let mut observed = observed(folder.path());
    let victim = |name: Option<&str>| Event { victim: name.map(str::to_owned), ..event("oom", "main", "OomKilled") };
    observed.pods = vec![pod("oom", vec![container("main", 0, "running")])];
    observed.events = vec![victim(None)];
    assert_eq!(failure(oom(&observed)), "the agent named no victim");
    observed.events = vec![victim(Some("sleep[7]"))];
    assert_eq!(failure(oom(&observed)), "the agent named sleep[7], but the child is called probe");
    observed.events = vec![victim(Some("probe[7]"))];
    assert!(!shown(&oom(&observed)), "without the parent's output");
    let logs = folder.path().join("logs/default_oom-demo_uid/main");
    fs::create_dir_all(&logs).unwrap();
    fs::write(logs.join("0.log"), "… child 7 was killed by SIGKILL\n").unwrap();
    assert!(shown(&oom(&observed)));
    observed.pods = vec![pod("oom", vec![container("main", 1, "running")])];
    assert_eq!(failure(oom(&observed)), "the container did not keep running: running at attempt 1");
}

#[test]
fn a_chain_is_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut observed = observed(folder.path());
    let write = |name: &str, text: &str| fs::write(folder.path().join(format!("chain-{name}")), text).unwrap();
    observed.pods = vec![pod("chain", vec![container("main", 0, "running")])];
    observed.events = vec![event("chain", "main", "ContainerStarted")];
    write("first", "start 1\nexit 2\n");
    write("second", "start 3\nexit 4\n");
    write("main", "start 7\n");
    assert_eq!(failure(chain(&observed)), "init container third ran 0 times");
    write("third", "start 5\nexit 6\n");
    assert!(shown(&chain(&observed)));
    write("third", "start 3\nexit 6\n");
    assert_eq!(failure(chain(&observed)), "the containers' stamps are out of order");
    write("third", "start 5\nexit 6\nstart 7\nexit 8\n");
    assert_eq!(failure(chain(&observed)), "init container third ran 2 times");
}

#[test]
fn what_was_shown_must_still_hold_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let mut observed = observed(folder.path());
    let mut steps = all(Some("no probes here".to_owned()));
    for step in &mut steps {
        if !step.over() {
            step.state = State::Shown("seen".to_owned());
        }
    }
    let running = |name: &str, attempt| pod(name, vec![container("main", attempt, "running")]);
    observed.pods = vec![running("web", 1), running("crash", 1), running("chain", 0)];
    steps.iter_mut().for_each(|step| step.confirm(&observed));
    let results: Vec<_> = steps.iter().map(|step| (step.name, step.result(&observed).0)).collect();
    let expected = [("web", "FAILED"), ("crash", "ok"), ("oom", "not shown"), ("chain", "ok"), ("gone", "ok")];
    assert_eq!(results, expected);
}
