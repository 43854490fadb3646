//! The agent when a task of its own ends early.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use keblet::model::ContainerClass;
use keblet::model::Pod;
use keblet::workers::act::SyncOutcome;
use keblet::workers::worker::WorkerObserver;
use keblet_tests::cri::*;
use keblet_tests::node::Agent;
use keblet_tests::node::SensorSet;
use keblet_tests::node::pod;
use tokio::time::sleep;
use tokio::time::timeout;

use super::Node;
use super::ms;
use super::secs;

/// Makes the worker panic that plans next, once it is asked to.
#[derive(Default)]
struct PanicsOnce(AtomicBool);

impl WorkerObserver for PanicsOnce {
    fn planned(&self, _took: Duration) {
        assert!(!self.0.swap(false, Relaxed), "this test makes the worker panic");
    }

    fn acted(&self, _took: Duration, _outcome: &SyncOutcome) {}
    fn pass(&self, _operation: &'static str, _took: Duration) {}
    fn begun(&self, _pod: &Pod, _since_seen: Option<Duration>) {}
    fn container_exited(&self, _class: ContainerClass, _exit_code: i32, _reason: &str) {}
    fn restarted(&self, _fixed: bool) {}
    fn orphaned(&self) {}
    fn rejected(&self, _reason: &str) {}
    fn preempted(&self, _resource: &str) {}
}

/// What is left of the old pod ends first, although its worker knows nothing of it but its identity.
#[tokio::test(start_paused = true)]
async fn edited_static_pod_is_started_although_a_worker_panicked() {
    let node = Node::new();
    let (old, panics) = (pod("web").running("main", "term 1s").build(), Arc::new(PanicsOnce::default()));
    let agent = Agent::start_with_observer(&node.sim, SensorSet::ALL, node.root(), vec![old.clone()], panics.clone());
    node.running("web", "main").await;
    sleep(secs(5)).await;
    panics.0.store(true, Relaxed);
    agent.update(old.clone()).await;
    // Before another worker is started.
    sleep(ms(50)).await;
    assert!(!panics.0.load(Relaxed), "the worker has panicked");
    agent.remove(old).await;
    agent.add(pod("web").uid("web-uid-2").running("main", "run").build()).await;
    let new_runs = |l: &Trace| l.live("web", "main").is_some_and(|i| i.pod_uid == "web-uid-2");
    node.sim.until("the new one runs", secs(30), new_runs).await.unwrap_or_else(|u| panic!("{u}"));
    let overlap = node.sim.trace(|l| {
        let exited = l.history("web", "main").find(|i| i.pod_uid == "web-uid").and_then(|i| i.gone).expect("exited");
        l.live("web", "main").and_then(|i| i.started).expect("started") < exited
    });
    assert!(!overlap, "both ran at the same time");
}

/// The next agent has sources again. This one would look healthy and follow no change of a pod.
#[tokio::test(start_paused = true)]
async fn sync_loop_ends_with_the_stream_of_desired_pods() {
    let node = Node::new();
    let agent = node.start(SensorSet::ALL, [pod("web").running("main", "run")]);
    node.running("web", "main").await;
    timeout(secs(30), agent.lose_sources()).await.expect("the sync loop ends");
    assert_eq!(node.sim.trace(Trace::live_count), 1, "containers are left as they are");
}
