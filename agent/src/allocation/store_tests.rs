use std::fs;
use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use super::containers::LONGEST_WAIT;
use super::*;
use crate::allocation::records::COLLECTED;
use crate::model::testing;

fn pod(cpu: &str, generation: i64) -> Pod {
    let mut pod = testing::pod("Always", &[], &["c"]);
    pod.metadata.generation = Some(generation);
    let container = &mut pod.spec.as_mut().expect("a spec").containers[0];
    container.resources = serde_json::from_value(json!({ "requests": { "cpu": cpu } })).expect("resources");
    Arc::new(pod)
}

fn cpu(pod: &Pod) -> String {
    let resources = pod.spec.as_ref().expect("a spec").containers[0].resources.clone();
    resources.expect("resources").requests.expect("requests")["cpu"].0.clone()
}

/// A container of this pod is started.
fn start(allocations: &Allocations, uid: &str) {
    allocations.container_actuated(&uid.into(), "c", ResourceRequirements::default());
}

/// Of how many pods the file has what was applied.
fn recorded(folder: &Path) -> usize {
    let allocations = Allocations::open(folder, ResizeGates::default()).expect("opened");
    let state = allocations.state();
    state.actuated.entries.len()
}

#[test]
fn records_survive_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    let allocations = open();
    allocations.allocate(&pod("1", 1));
    allocations.container_actuated(&"uid".into(), "c", ResourceRequirements::default());
    allocations.pod_actuated(&"other".into(), None);
    let again = open();
    assert_eq!(cpu(&again.allocated_form(pod("2", 2))), "1");
    assert!(again.actuated(&"uid".into()).expect("a record").containers.contains_key("c"));
    assert_eq!(again.actuated(&"other".into()), None);
    // Removals reach the file with the next other change.
    again.free(&"uid".into());
    assert!(open().is_allocated(&"uid".into()));
    again.retain_actuated(&HashSet::new());
    again.pod_actuated(&"new".into(), Some(ResourceRequirements::default()));
    assert!(open().actuated(&"uid".into()).is_none() && open().is_allocated(&"uid".into()));
}

#[test]
fn init_containers_get_what_they_desire_without_their_gate() {
    for init_containers in [true, false] {
        let folder = tempfile::tempdir().expect("a folder");
        let gates = ResizeGates { init_containers, ..ResizeGates::default() };
        let allocations = Allocations::open(folder.path(), gates).expect("opened");
        let desiring = |cpu: &str| {
            let mut pod = testing::pod("Always", &["init", "side"], &["c"]);
            for init in pod.spec.as_mut().expect("a spec").init_containers.iter_mut().flatten() {
                init.resources = serde_json::from_value(json!({ "requests": { "cpu": cpu } })).expect("resources");
            }
            Arc::new(pod)
        };
        allocations.allocate(&desiring("1"));
        let form = allocations.allocated_form(desiring("2"));
        let cpus: Vec<String> = spec::init_containers(&form)
            .iter()
            .map(|init| init.resources.clone().expect("resources").requests.expect("requests")["cpu"].0.clone())
            .collect();
        assert_eq!(cpus, [if init_containers { "1" } else { "2" }, "1"]);
    }
}

#[test]
fn an_unchanged_record_is_not_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join(ALLOCATED);
    let allocations = Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    allocations.allocate(&pod("1", 1));
    fs::remove_file(&path).expect("it was written");
    allocations.allocate(&pod("1", 1));
    assert!(!path.exists());
    allocations.allocate(&pod("2", 1));
    assert!(path.exists());
    let path = folder.path().join(ACTUATED);
    start(&allocations, "uid");
    fs::remove_file(&path).expect("it was written");
    start(&allocations, "uid");
    assert!(!path.exists());
}

#[tokio::test(start_paused = true)]
async fn starts_of_containers_share_a_write() {
    let folder = tempfile::tempdir().expect("a folder");
    let allocations = Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    let began = Instant::now();
    start(&allocations, "first");
    until("the first is written", || recorded(folder.path()) == 1).await;
    for uid in ["a", "b", "c"] {
        start(&allocations, uid);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    until("the others are written", || {
        let count = recorded(folder.path());
        assert!([1, 4].contains(&count), "{count} are written after {:?}", began.elapsed());
        count == 4
    })
    .await;
    let took = began.elapsed();
    assert!((COLLECTED..COLLECTED + Duration::from_millis(50)).contains(&took), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn what_another_agent_would_miss_is_written_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    let allocations = open();
    let other: ResourceRequirements = serde_json::from_value(json!({ "requests": { "cpu": "2" } })).expect("resources");
    let began = Instant::now();
    start(&allocations, "first");
    until("the first is written", || recorded(folder.path()) == 1).await;
    allocations.container_actuated(&"first".into(), "c", other.clone());
    let is_changed = || open().actuated(&"first".into()).is_some_and(|first| first.containers["c"] == other);
    until("it has other resources", is_changed).await;
    allocations.pod_actuated(&"second".into(), Some(other.clone()));
    until("what the pod has as a whole is written", || recorded(folder.path()) == 2).await;
    allocations.allocate(&pod("1", 1));
    until("it is allocated", || open().is_allocated(&"uid".into())).await;
    start(&allocations, "third");
    allocations.accept(&pod("2", 2), SystemTime::UNIX_EPOCH);
    until("the resize is allocated", || cpu(&open().allocated_form(pod("3", 3))) == "2").await;
    // Of the pod that is resized, too.
    until("what was applied before is written", || recorded(folder.path()) == 4).await;
    let took = began.elapsed();
    assert!(took < COLLECTED, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn the_end_of_the_agent_leaves_nothing_unwritten() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    let allocations = open();
    start(&allocations, "first");
    until("the first is written", || recorded(folder.path()) == 1).await;
    let began = Instant::now();
    start(&allocations, "second");
    allocations.allocate(&pod("1", 1));
    allocations.flush().await;
    assert_eq!((recorded(folder.path()), open().is_allocated(&"uid".into())), (2, true));
    assert!(began.elapsed() < COLLECTED, "it does not wait for other changes");
}

#[tokio::test(start_paused = true)]
async fn what_was_collected_is_written_after_a_failure() {
    let folder = tempfile::tempdir().expect("a folder");
    let allocations = Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    start(&allocations, "first");
    until("the first is written", || recorded(folder.path()) == 1).await;
    let in_the_way = folder.path().join(format!(".{ACTUATED}"));
    fs::create_dir(&in_the_way).expect("made");
    start(&allocations, "second");
    until("the write fails", || allocations.state().actuated.retrying).await;
    fs::remove_dir(&in_the_way).expect("removed");
    until("it is written", || recorded(folder.path()) == 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_write_that_failed_is_tried_again_without_another_change() {
    let folder = tempfile::tempdir().expect("a folder");
    let in_the_way = folder.path().join(format!(".{ALLOCATED}"));
    fs::create_dir(&in_the_way).expect("made");
    let open = || Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    let allocations = open();
    allocations.accept(&pod("2", 2), SystemTime::UNIX_EPOCH);
    until("the write fails", || {
        let state = allocations.state();
        state.allocated.changed.is_some() && !state.allocated.writing
    })
    .await;
    fs::remove_dir(&in_the_way).expect("removed");
    until("it is written", || open().is_allocated(&"uid".into())).await;
    assert_eq!(cpu(&open().allocated_form(pod("1", 1))), "2");
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(120), "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[test]
fn a_damaged_file_is_named() {
    let table = [
        (ALLOCATED, "failed to initialize allocation checkpoint: could not restore state"),
        (ACTUATED, "failed to initialize actuated state checkpoint: could not restore state"),
    ];
    for (name, text) in table {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join(name), "{}").expect("written");
        let error = Allocations::open(folder.path(), ResizeGates::default()).expect_err("damaged").to_string();
        assert!(error.starts_with(text) && error.contains(name), "{error}");
    }
}

#[tokio::test]
async fn a_resize_is_completed_by_the_newest_allocation() {
    let (allocations, now) = (Allocations::default(), SystemTime::UNIX_EPOCH);
    let (first, second) = (pod("1", 1), pod("2", 2));
    allocations.allocate(&first);
    allocations.container_actuated(&"uid".into(), "c", PodResources::of(&first).containers["c"].clone());
    let running = testing::snapshot(vec![testing::running("c", 0)]);
    assert_eq!(allocations.track(&first, &running, false, now), Progress::None);
    allocations.accept(&second, now);
    assert_eq!(allocations.track(&first, &running, false, now), Progress::InProgress, "the pass is an older one");
    assert!(allocations.failed(&second, "refused", now));
    assert_eq!(allocations.counts(), ([("Deferred", 0), ("Infeasible", 0)].into(), 1));
    allocations.container_actuated(&"uid".into(), "c", PodResources::of(&second).containers["c"].clone());
    assert_eq!(allocations.track(&second, &running, true, now), Progress::InProgress, "the pod's cgroup is behind");
    assert_eq!(allocations.track(&second, &running, false, now), Progress::Completed(Some(2)));
    assert_eq!(allocations.applied().await, [PodUid::from("uid")]);
    assert_eq!(allocations.conditions(&"uid".into()), []);
}

#[tokio::test(start_paused = true)]
async fn a_resize_of_a_container_whose_record_was_lost_is_applied() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    let (first, second, now) = (pod("1", 1), pod("2", 2), SystemTime::UNIX_EPOCH);
    let allocations = open();
    allocations.allocate(&first);
    allocations.flush().await;
    // The container is started, and the agent killed before that is written. The runtime reports no resources.
    let (allocations, running) = (open(), testing::snapshot(vec![testing::running("c", 0)]));
    assert_eq!(allocations.track(&first, &running, false, now), Progress::None);
    allocations.accept(&second, now);
    assert_eq!(allocations.track(&second, &running, false, now), Progress::InProgress);
    allocations.flush().await;
    assert_eq!(open().track(&second, &running, false, now), Progress::InProgress, "the next agent knows it");
}

#[tokio::test(start_paused = true)]
async fn what_was_applied_is_written_before_what_a_resize_allocates() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    let allocations = open();
    allocations.allocate(&pod("1", 1));
    allocations.flush().await;
    // The test is the task that writes it.
    assert!(allocations.state().actuated.begin_writing());
    start(&allocations, "uid");
    allocations.accept(&pod("2", 2), SystemTime::UNIX_EPOCH);
    until("no task writes what is allocated", || !allocations.state().allocated.writing).await;
    assert_eq!(cpu(&open().allocated_form(pod("3", 3))), "1");
    allocations.write(Which::Actuated);
    assert_eq!(recorded(folder.path()), 1);
    until("the resize is allocated", || cpu(&open().allocated_form(pod("3", 3))) == "2").await;
}

/// As on a full disk.
#[test]
fn what_a_resize_allocates_waits_for_what_was_applied_also_if_that_cannot_be_written() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    let recorded_cpu = || cpu(&open().allocated_form(pod("3", 3)));
    // Without a runtime each write has ended when the call returns.
    let allocations = open();
    allocations.allocate(&pod("1", 1));
    let in_the_way = folder.path().join(format!(".{ACTUATED}"));
    fs::create_dir(&in_the_way).expect("made");
    start(&allocations, "uid");
    allocations.accept(&pod("2", 2), SystemTime::UNIX_EPOCH);
    assert_eq!((recorded(folder.path()), recorded_cpu().as_str()), (0, "1"), "the next agent finds the resize pending");
    // Another pod changes nothing about that.
    start(&allocations, "other");
    assert_eq!(recorded_cpu(), "1");
    fs::remove_dir(&in_the_way).expect("removed");
    start(&allocations, "third");
    assert_eq!((recorded(folder.path()), recorded_cpu().as_str()), (3, "2"));
}

/// Else the next agent would restart it once more.
#[tokio::test(start_paused = true)]
async fn a_container_that_is_restarted_for_its_resize_waits_for_the_record() {
    let folder = tempfile::tempdir().expect("a folder");
    let open = || Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    let (allocations, uid) = (open(), PodUid::from("uid"));
    start(&allocations, "uid");
    allocations.flush().await;
    // The test is the task that writes it.
    assert!(allocations.state().actuated.begin_writing());
    let other: ResourceRequirements = serde_json::from_value(json!({ "requests": { "cpu": "2" } })).expect("resources");
    let starts = async {
        allocations.container_starts(&uid, "c", other.clone()).await;
        open().actuated(&uid).expect("a record").containers["c"].clone()
    };
    let began = Instant::now();
    let (recorded, ()) = tokio::join!(starts, async { allocations.write(Which::Actuated) });
    assert_eq!((recorded, began.elapsed()), (other, Duration::ZERO));
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_hangs_delays_only_such_a_start_and_only_for_a_moment() {
    let folder = tempfile::tempdir().expect("a folder");
    let allocations = Allocations::open(folder.path(), ResizeGates::default()).expect("opened");
    let uid = PodUid::from("uid");
    start(&allocations, "uid");
    allocations.flush().await;
    // A write that does not end.
    assert!(allocations.state().actuated.begin_writing());
    let other: ResourceRequirements = serde_json::from_value(json!({ "requests": { "cpu": "2" } })).expect("resources");
    let began = Instant::now();
    allocations.container_starts(&uid, "another", other.clone()).await;
    allocations.container_starts(&uid, "c", ResourceRequirements::default()).await;
    assert_eq!(began.elapsed(), Duration::ZERO, "a first start, and one with the same resources");
    allocations.container_starts(&uid, "c", other).await;
    let took = began.elapsed();
    assert!((LONGEST_WAIT..LONGEST_WAIT + Duration::from_millis(50)).contains(&took), "{took:?}");
}

#[test]
fn a_resize_is_not_completed_while_it_is_accepted() {
    let (first, second, now) = (pod("1", 1), pod("2", 2), SystemTime::UNIX_EPOCH);
    let running = testing::snapshot(vec![testing::running("c", 0)]);
    for _ in 0..500 {
        let allocations = Allocations::default();
        allocations.allocate(&first);
        allocations.container_actuated(&"uid".into(), "c", PodResources::of(&first).containers["c"].clone());
        let barrier = std::sync::Barrier::new(2);
        let track = || {
            barrier.wait();
            let mut progress = std::iter::repeat_with(|| allocations.track(&first, &running, false, now));
            progress.find(|progress| *progress != Progress::None)
        };
        std::thread::scope(|scope| {
            let worker = scope.spawn(track);
            barrier.wait();
            allocations.accept(&second, now);
            assert_eq!(worker.join().expect("no panic"), Some(Progress::InProgress));
        });
    }
}

#[tokio::test]
async fn a_pod_that_was_counted_unseen_is_counted_again() {
    let (allocations, now) = (Allocations::default(), SystemTime::UNIX_EPOCH);
    let pod = pod("1", 1);
    allocations.allocate(&pod);
    allocations.count_again(&"uid".into());
    let exited = testing::snapshot(vec![testing::exited("c", 0, 1)]);
    assert_eq!(allocations.track(&pod, &exited, false, now), Progress::None);
    assert_eq!(allocations.applied().await, [PodUid::from("uid")]);
    allocations.count_again(&"uid".into());
    allocations.free(&"uid".into());
    assert_eq!(allocations.track(&pod, &exited, false, now), Progress::None);
    assert!(allocations.state().applied.is_empty());
}
