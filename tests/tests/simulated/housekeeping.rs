//! Housekeeping beside mounts that another kubelet left: the whole agent, real mounts, a simulated runtime.

use std::fs;
use std::time::Duration;

use keblet_skip::mounts::bind;
use keblet_skip::mounts::detach;
use keblet_skip::mounts::in_private_mounts;
use keblet_tests::cri::CallFault;
use keblet_tests::cri::FaultKind;
use keblet_tests::cri::Faults;
use keblet_tests::cri::Method;
use keblet_tests::node::Agent;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use tokio::time::sleep;

/// Runs a test with paused time in a mount namespace of its own.
pub(crate) fn paused(test: impl AsyncFnOnce() + Send) {
    in_private_mounts(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.expect("a runtime").block_on(test());
    });
}

#[test]
fn mounts_in_orphaned_pod_directories_keep_their_data() {
    paused(async || {
        let (sim, folder) = node();
        let pods = folder.path().join("pods");
        let left = [
            "volumes/kubernetes.io~nfs/share",
            "volumes/kubernetes.io~local-volume/pv1",
            "volumes/kubernetes.io~empty-dir/mem",
            "volumes/example.com~flex/x",
            "volumes/kubernetes.io~csi/claim/mount",
        ];
        let data = |index: usize| folder.path().join(format!("source-{index}/inner/data"));
        for (index, volume) in left.iter().enumerate() {
            fs::create_dir_all(data(index).parent().expect("a directory")).expect("a directory");
            fs::write(data(index), "x").expect("a file");
            bind(&folder.path().join(format!("source-{index}")), &pods.join(format!("uid-{index}")).join(volume));
        }
        fs::create_dir_all(pods.join("uid-gone/volumes/kubernetes.io~empty-dir/cache/deep")).expect("a directory");

        let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![pod("web").running("main", "run").build()]);
        let begin = tokio::time::Instant::now();
        while pods.join("uid-gone").exists() {
            assert!(begin.elapsed() < Duration::from_secs(600), "an orphan without mounts stays");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        tokio::time::sleep(Duration::from_secs(600)).await;
        let lost: Vec<&str> = (0..left.len()).filter(|index| !data(*index).exists()).map(|index| left[index]).collect();
        assert_eq!(lost, Vec::<&str>::new(), "data behind these mounts is gone");
        for (index, gone) in [(0, true), (1, true), (3, false), (4, false)] {
            assert_eq!(!pods.join(format!("uid-{index}")).exists(), gone, "{}", left[index]);
        }
    });
}

/// Pauses grow, and no other reason for housekeeping is waited for.
#[test]
fn leftovers_that_cannot_be_removed_at_first_are_removed_later() {
    paused(async || {
        let (sim, folder) = node();
        let (source, left) = (folder.path().join("source"), ["pods/left-uid", "logs/default_left_left-uid"]);
        fs::create_dir(&source).expect("a directory");
        let mounts = left.map(|directory| folder.path().join(directory).join("files/mount"));
        mounts.iter().for_each(|mount| bind(&source, mount));
        let exist = || left.map(|directory| folder.path().join(directory).exists());

        let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![pod("web").running("main", "run").build()]);
        sleep(Duration::from_secs(30)).await;
        assert_eq!(exist(), [true, true], "something is mounted there");
        mounts.iter().for_each(|mount| detach(mount));
        sleep(Duration::from_secs(120)).await;
        assert_eq!(exist(), [false, false]);
    });
}

/// The runtime has nothing of the pod any more; what the PLEG remembers of it counts for nothing.
#[test]
fn the_directory_of_a_removed_pod_is_removed_once_it_can_be() {
    paused(async || {
        let (sim, folder) = node();
        let (source, directory) = (folder.path().join("source"), folder.path().join("pods/web-uid"));
        fs::create_dir(&source).expect("a directory");
        let web = pod("web").running("main", "run").build();
        let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![web.clone()]);
        sleep(Duration::from_secs(10)).await;
        let mount = directory.join("files/mount");
        bind(&source, &mount);
        agent.remove(web).await;
        sleep(Duration::from_secs(30)).await;
        assert!(sim.sandboxes("web").is_empty() && directory.exists(), "something is mounted there");
        detach(&mount);
        sleep(Duration::from_secs(120)).await;
        assert!(!directory.exists());
    });
}

/// Naive: what the cache does not have is gone. The agent has just started, and the runtime is slow.
#[test]
fn a_pod_that_is_not_inspected_yet_keeps_its_directory_while_it_runs() {
    paused(async || {
        let (sim, folder) = node();
        let gone = pod("gone").running("main", "run").build();
        let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![gone]);
        sleep(Duration::from_secs(10)).await;
        drop(agent);
        let directory = folder.path().join("pods/gone-uid");
        let cache = directory.join("volumes/kubernetes.io~empty-dir/cache");
        fs::create_dir_all(&cache).expect("a directory");
        fs::write(cache.join("data"), "x").expect("a file");
        let runs = || sim.trace(|log| log.live("gone", "main").is_some());
        let hangs = CallFault::on(Method::ContainerStatus, FaultKind::Hang).about("_gone_").times(1);
        sim.faults(|faults| faults.add(hangs));

        let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![pod("web").running("main", "run").build()]);
        sleep(Duration::from_secs(10)).await;
        assert!(runs() && cache.join("data").exists(), "its inspection hangs");
        sleep(Duration::from_secs(120)).await;
        assert!(!runs() && !directory.exists(), "no source desires it");
    });
}

#[test]
fn nothing_is_removed_while_the_runtime_does_not_tell_which_pods_it_has() {
    paused(async || {
        let (sim, folder) = node();
        let directory = folder.path().join("pods/left-uid");
        fs::create_dir_all(&directory).expect("a directory");
        for list in [Method::ListPodSandbox, Method::StreamPodSandboxes] {
            let fails = FaultKind::Fail(tonic::Code::Unknown, "simulated".to_owned());
            sim.faults(|faults| faults.add(CallFault::on(list, fails)));
        }
        let _agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![pod("web").running("main", "run").build()]);
        sleep(Duration::from_secs(30)).await;
        assert!(directory.exists());
        sim.faults(Faults::clear);
        sleep(Duration::from_secs(30)).await;
        assert!(!directory.exists());
    });
}
