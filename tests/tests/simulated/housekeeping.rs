//! Housekeeping beside mounts that another kubelet left: the whole agent, real mounts, a simulated runtime.

use std::fs;
use std::time::Duration;

use keblet_skip::mounts::bind;
use keblet_skip::mounts::in_private_mounts;
use keblet_tests::node::Agent;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;

/// Runs a test with paused time in a mount namespace of its own.
fn paused(test: impl AsyncFnOnce() + Send) {
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
