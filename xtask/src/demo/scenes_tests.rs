//! A scene is shown only when the agent's word and the other witnesses agree.

use std::fs;

use keblet_peers::ContainerView;
use keblet_peers::PodView;

use super::super::event::Event;
use super::*;

fn world(folder: &Path) -> World {
    World::new(folder.to_owned(), folder.join("logs"))
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

fn shown(news: &News) -> bool {
    matches!(news, News::Shown(_))
}

fn failure(news: News) -> String {
    match news {
        News::Failed(why) => why,
        _ => String::new(),
    }
}

#[test]
fn a_crash_needs_event_runtime_and_stamps() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = world(folder.path());
    let died = Event { exit_code: Some(3), ..event("crash", "main", "ContainerDied") };
    world.pods = vec![pod("crash", vec![container("main", 0, "exited"), container("main", 1, "running")])];
    fs::write(folder.path().join("crash"), "start 0\nexit 1000000000\nstart 1080000000\n").unwrap();
    assert!(!shown(&crash(&world)), "without the agent's word");
    world.events = vec![died];
    assert!(shown(&crash(&world)));

    fs::write(folder.path().join("crash"), "start 0\nexit 1000000000\n").unwrap();
    assert!(!shown(&crash(&world)), "without the second start");
    fs::write(folder.path().join("crash"), "start 0\nexit 1000000000\nstart 2001000000\n").unwrap();
    assert_eq!(failure(crash(&world)), "the next process came 1001 ms after the exit");
    world.pods = vec![pod("crash", vec![container("main", 2, "running")])];
    assert_eq!(failure(crash(&world)), "it was restarted 2 times for one crash");
}

#[test]
fn a_crash_that_only_polling_found_does_not_count() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = world(folder.path());
    world.pods = vec![pod("crash", vec![container("main", 1, "running")])];
    let died = Event { exit_code: Some(3), ..event("crash", "main", "ContainerDied") };
    world.events = vec![Event { source: "relist".to_owned(), ..died }];
    assert_eq!(failure(crash(&world)), "a relist found the crash, no event told of it");
}

#[test]
fn a_wrong_exit_code_is_a_lie() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = world(folder.path());
    world.pods = vec![pod("crash", vec![container("main", 1, "running")])];
    world.events = vec![Event { exit_code: Some(1), ..event("crash", "main", "ContainerDied") }];
    assert_eq!(failure(crash(&world)), "the agent saw exit code Some(1), not 3");
}

#[test]
fn a_victim_must_be_named_and_dead() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = world(folder.path());
    let victim = |name: Option<&str>| Event { victim: name.map(str::to_owned), ..event("oom", "main", "OomKilled") };
    world.pods = vec![pod("oom", vec![container("main", 0, "running")])];
    world.events = vec![victim(None)];
    assert_eq!(failure(oom(&world)), "the agent named no victim");
    world.events = vec![victim(Some("sleep[7]"))];
    assert_eq!(failure(oom(&world)), "the agent named sleep[7], but the child is called probe");
    world.events = vec![victim(Some("probe[7]"))];
    assert!(!shown(&oom(&world)), "without the parent's word");
    let logs = folder.path().join("logs/default_oom-demo_uid/main");
    fs::create_dir_all(&logs).unwrap();
    fs::write(logs.join("0.log"), "… child 7 was killed by SIGKILL\n").unwrap();
    assert!(shown(&oom(&world)));
    world.pods = vec![pod("oom", vec![container("main", 1, "running")])];
    assert_eq!(failure(oom(&world)), "the container did not live on: running at attempt 1");
}

#[test]
fn a_chain_is_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = world(folder.path());
    let write = |name: &str, text: &str| fs::write(folder.path().join(format!("chain-{name}")), text).unwrap();
    world.pods = vec![pod("chain", vec![container("main", 0, "running")])];
    world.events = vec![event("chain", "main", "ContainerStarted")];
    write("first", "start 1\nexit 2\n");
    write("second", "start 3\nexit 4\n");
    write("main", "start 7\n");
    assert_eq!(failure(chain(&world)), "init container third ran 0 times");
    write("third", "start 5\nexit 6\n");
    assert!(shown(&chain(&world)));
    write("third", "start 3\nexit 6\n");
    assert_eq!(failure(chain(&world)), "the containers' stamps are out of order");
    write("third", "start 5\nexit 6\nstart 7\nexit 8\n");
    assert_eq!(failure(chain(&world)), "init container third ran 2 times");
}

#[test]
fn what_was_shown_must_last() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = world(folder.path());
    let mut scenes = all(Some("no probes here".to_owned()));
    for scene in &mut scenes {
        if !scene.over() {
            scene.state = State::Shown("seen".to_owned());
        }
    }
    let running = |name: &str, attempt| pod(name, vec![container("main", attempt, "running")]);
    world.pods = vec![running("web", 1), running("crash", 1), running("chain", 0)];
    scenes.iter_mut().for_each(|scene| scene.confirm(&world));
    let results: Vec<_> = scenes.iter().map(|scene| (scene.name, scene.result(&world).0)).collect();
    let expected = [("web", "FAILED"), ("crash", "ok"), ("oom", "not shown"), ("chain", "ok"), ("gone", "ok")];
    assert_eq!(results, expected);
}
