//! Housekeeping beside mounts that another kubelet left: the whole agent, real mounts, a simulated runtime.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::EmptyDirVolumeSource;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use k8s_openapi::api::core::v1::Volume;
use k8s_openapi::api::core::v1::VolumeMount;
use keblet::cgroups::CgroupName;
use keblet::cgroups::Cgroups;
use keblet::cgroups::Driver;
use keblet::cgroups::Layout;
use keblet::model::ConfigSource;
use keblet::model::Pod;
use keblet::model::PodUpdate;
use keblet::sources::adoption::StaticSandbox;
use keblet::sources::static_pod::CONFIG_HASH;
use keblet::sources::static_pod::CONFIG_MIRROR;
use keblet::sources::static_pod::CONFIG_SOURCE;
use keblet::workers::generate::ResourceSettings;
use keblet_skip::mounts::bind;
use keblet_skip::mounts::detach;
use keblet_skip::mounts::in_private_mounts;
use keblet_tests::cri::CallFault;
use keblet_tests::cri::FaultKind;
use keblet_tests::cri::Faults;
use keblet_tests::cri::Method;
use keblet_tests::cri::Trace;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::SensorSet;
use keblet_tests::node::node;
use keblet_tests::node::pod;
use keblet_tests::node::until;
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

/// Hierarchies of cgroup v1 in this folder, with cgroups of so many pods that cannot be removed. Each costs a third of a second.
fn cgroups_that_stay(folder: &Path, count: usize) -> Cgroups {
    let mounts = ["cpu", "memory", "pids", "hugetlb"].map(|name| (name.to_owned(), folder.join(name)));
    mounts.iter().for_each(|(_, mount)| fs::create_dir(mount).expect("a folder"));
    for index in 0..count {
        let cgroup = folder.join(format!("cpu/kubepods/besteffort/podstays-{index}"));
        fs::create_dir_all(&cgroup).expect("a cgroup");
        // No process has such an id, so nothing ends it.
        fs::write(cgroup.join("cgroup.procs"), format!("{}\n", i32::MAX)).expect("a file");
    }
    let layout = Layout::V1 { controllers: mounts.into(), unified: None };
    Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs")
}

fn resources() -> ResourceSettings {
    ResourceSettings { cfs_period: Some(100_000), page_size: 4096, ..ResourceSettings::default() }
}

/// One after another they would take two minutes, and the logs would come last.
#[test]
fn orphans_that_cannot_be_removed_delay_nothing_else() {
    paused(async || {
        let ((sim, folder), tree) = (node(), tempfile::tempdir().expect("a folder"));
        let cgroups = cgroups_that_stay(tree.path(), 400);
        // Orphans are removed in the order of their UIDs.
        let [pod_left, logs_left] = ["pods/x-uid", "logs/default_dead_dead-uid"].map(|left| folder.path().join(left));
        fs::create_dir_all(pod_left.join("volumes/kubernetes.io~empty-dir/cache/deep")).expect("a directory");
        fs::create_dir_all(logs_left.join("main")).expect("a directory");

        let begin = tokio::time::Instant::now();
        let web = pod("web").running("main", "run").build();
        let _agent = Agent::start_with_cgroups(&sim, folder.path(), vec![web], cgroups, resources());
        while pod_left.exists() || logs_left.exists() {
            let left = (pod_left.exists(), logs_left.exists());
            assert!(begin.elapsed() < Duration::from_secs(60), "pod and logs that are left: {left:?}");
            sleep(Duration::from_millis(100)).await;
        }
    });
}

/// Has an emptyDir `data`.
fn with_data(name: &str) -> Pod {
    let mut pod = ApiPod::clone(&pod(name).running("main", "run").build());
    let spec = pod.spec.as_mut().expect("a spec");
    let empty_dir = Some(EmptyDirVolumeSource::default());
    spec.volumes = Some(vec![Volume { name: "data".to_owned(), empty_dir, ..Volume::default() }]);
    let mount = VolumeMount { name: "data".to_owned(), mount_path: "/data".to_owned(), ..VolumeMount::default() };
    spec.containers[0].volume_mounts = Some(vec![mount]);
    Arc::new(pod)
}

/// A naive pass would assume that what had no pod at its start has none when it is removed. A static pod has the same UID
/// whenever its manifest is there.
#[tokio::test(start_paused = true)]
async fn a_static_pod_that_comes_back_while_orphans_are_removed_keeps_its_files_and_its_cgroup() {
    let ((sim, folder), tree) = (node(), tempfile::tempdir().expect("a folder"));
    let cgroups = cgroups_that_stay(tree.path(), 100);
    let of = |uid: &str| folder.path().join(format!("pods/{uid}"));
    let data = of("web-uid").join("volumes/kubernetes.io~empty-dir/data");
    // In this order, with those that stay between them.
    for uid in ["gone-uid", "web-uid"] {
        fs::create_dir_all(of(uid).join("volumes/kubernetes.io~empty-dir/data")).expect("a directory");
    }

    let begin = tokio::time::Instant::now();
    let agent = Agent::start_with_cgroups(&sim, folder.path(), Vec::new(), cgroups, resources());
    while of("gone-uid").exists() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the first orphan stays");
        sleep(Duration::from_millis(1)).await;
    }
    assert!(data.exists(), "it is not its turn yet");
    agent.add(with_data("web")).await;
    let runs = |log: &Trace| log.live("web", "main").is_some();
    sim.until("it runs", Duration::from_secs(60), runs).await.unwrap_or_else(|timed_out| panic!("{timed_out}"));
    fs::write(data.join("file"), "x").expect("a file");
    // Files of a cgroup do not keep the kernel from removing it, as they would here.
    for controller in ["cpu", "memory", "pids", "hugetlb"] {
        let cgroup = tree.path().join(controller).join("kubepods/besteffort/podweb-uid");
        for file in fs::read_dir(cgroup).expect("a cgroup") {
            fs::remove_file(file.expect("a file").path()).expect("a file");
        }
    }
    sleep(Duration::from_secs(60)).await;
    assert!(data.join("file").exists() && sim.trace(runs), "{}", sim.trace(Trace::to_string));
    assert!(tree.path().join("cpu/kubepods/besteffort/podweb-uid").exists());
}

/// The runtime has no sandbox or container of the pod any more; the PLEG's cached state of it is ignored.
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

#[tokio::test(start_paused = true)]
async fn a_running_pod_that_cannot_be_decoded_outlives_a_restart_of_the_agent() {
    let (sim, folder) = node();
    let minute = Duration::from_secs(60);
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), vec![pod("web").running("main", "run").build()]);
    sim.until("web/main runs", minute, |l| l.live("web", "main").is_some()).await.expect("it runs");
    drop(agent);
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), Vec::new());
    agent.keep_undecodable(&["web-uid"]).await;
    sleep(minute).await;
    assert!(sim.trace(|l| l.live("web", "main").is_some()));
    agent.keep_undecodable(&[]).await;
    let ended = sim.until("web/main has ended", minute, |l| l.live("web", "main").is_none());
    ended.await.expect("the API server does not have it any more");
}

/// Naive: before it is known which pods are desired there is nothing to do. An administrator restarts a static pod by moving
/// its manifest away and back, and what does not answer may be that very pod.
#[tokio::test(start_paused = true)]
async fn a_static_pod_that_comes_back_is_started_again_while_the_api_server_does_not_answer() {
    let (sim, folder) = node();
    let agent = Agent::start_without_answers(&sim, folder.path());
    let web = pod("web").running("main", "run").build();
    let starts = |log: &Trace| log.history("web", "main").filter(|instance| instance.started.is_some()).count();
    agent.add(web.clone()).await;
    until(&sim, "it runs", |log| starts(log) == 1).await;
    // Back while it ends, and long after its end.
    for (before, pause) in [(1, 0), (2, 60)] {
        agent.remove(web.clone()).await;
        sleep(Duration::from_secs(pause)).await;
        agent.add(web.clone()).await;
        until(&sim, "it runs again", |log| starts(log) > before).await;
    }
    assert!(sim.trace(|log| log.duplicates().is_empty()), "{}", sim.trace(Trace::to_string));
}

/// A naive agent would terminate no pod before the API server has listed the desired ones. It may be down because of the
/// static pod that still has the ports of its successor.
#[tokio::test(start_paused = true)]
async fn a_static_pod_whose_manifest_was_changed_is_replaced_while_the_api_server_does_not_answer() {
    let (sim, folder) = node();
    let pods = [pod("web").uid("old"), pod("gone"), pod("app").from_api()];
    let pods = pods.map(|pod| pod.running("main", "run").build());
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), pods.into());
    until(&sim, "all run", |log| live(log).len() == 3).await;
    drop(agent);

    let agent = Agent::start_without_answers(&sim, folder.path());
    sleep(Duration::from_secs(60)).await;
    assert_eq!(sim.trace(live).len(), 3, "no source has delivered");
    for (name, uid) in [("web", "new"), ("app", "static-app")] {
        agent.add(pod(name).uid(uid).running("main", "run").build()).await;
    }
    sleep(Duration::from_secs(60)).await;
    let expected = ["app-uid", "gone-uid", "new", "static-app"].map(str::to_owned);
    assert_eq!(sim.trace(live), BTreeSet::from(expected), "no source is known not to have the others");
    agent.add(pod("gone").uid("back").running("main", "run").build()).await;
    sleep(Duration::from_secs(60)).await;
    let expected = ["app-uid", "back", "new", "static-app"].map(str::to_owned);
    assert_eq!(sim.trace(live), BTreeSet::from(expected), "a manifest that was added later");
}

/// Naive: while a manifest cannot be used no pod is known to be undesired. It may be unreadable for hours, and says nothing
/// of pods of the API server.
#[tokio::test(start_paused = true)]
async fn a_manifest_that_cannot_be_used_keeps_static_pods_only() {
    let (sim, folder) = node();
    fs::create_dir(folder.path().join("manifests")).expect("a folder");
    fs::write(folder.path().join("manifests/hidden.yaml"), "").expect("written");
    let app = pod("app").running("main", "run").from_api().build();
    let pods = [pod("hidden"), pod("gone").from_api()].map(|pod| pod.running("main", "run").build());
    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), [pods.to_vec(), vec![app.clone()]].concat());
    until(&sim, "all run", |log| live(log).len() == 3).await;
    drop(agent);

    let agent = Agent::start_beside_static_pods(&sim, folder.path(), vec![app], vec![hidden()]);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(sim.trace(live).len(), 3, "the loop has not seen the incomplete set yet");
    agent.add(pod("web").running("main", "run").build()).await;
    sleep(Duration::from_secs(15)).await;
    let expected = ["app-uid", "hidden-uid", "web-uid"].map(str::to_owned);
    assert_eq!(sim.trace(live), BTreeSet::from(expected), "it is no pod of the API server");
    sleep(Duration::from_secs(10)).await;
    agent.add(pod("db").running("main", "run").build()).await;
    sleep(Duration::from_secs(60)).await;
    let expected = ["app-uid", "db-uid", "web-uid"].map(str::to_owned);
    assert_eq!(sim.trace(live), BTreeSet::from(expected), "the manifest stays bad");
}

/// What concerns all pods does not wait for one manifest for ever.
#[tokio::test(start_paused = true)]
async fn the_sources_count_as_read_although_a_manifest_stays_unreadable() {
    let (sim, folder) = node();
    fs::create_dir(folder.path().join("manifests")).expect("a folder");
    // No memory is mapped at its beginning: reading it is an I/O error.
    symlink("/proc/self/mem", folder.path().join("manifests/hidden.yaml")).expect("a link");
    let app = pod("app").running("main", "run").from_api().build();
    let agent = Agent::start_beside_static_pods(&sim, folder.path(), vec![app], vec![hidden()]);
    sleep(Duration::from_secs(1)).await;
    agent.add(pod("web").running("main", "run").build()).await;
    sleep(Duration::from_secs(590)).await;
    assert!(!agent.desired.sources_ready());
    sleep(Duration::from_secs(20)).await;
    assert!(agent.desired.sources_ready());
}

/// The sandbox of a static pod that runs when the agent starts.
fn hidden() -> StaticSandbox {
    StaticSandbox {
        uid: "hidden-uid".to_owned(),
        namespace: "default".to_owned(),
        name: "hidden".to_owned(),
        ready: true,
        created_at: 1,
        marked: None,
        containers: Vec::new(),
    }
}

/// UIDs of pods that run.
fn live(log: &Trace) -> BTreeSet<String> {
    log.instances().iter().filter(|instance| instance.is_live()).map(|instance| instance.pod_uid.clone()).collect()
}

/// The mirror pod stays until the containers of the previous manifest have ended, and nothing else reconciles it then.
#[tokio::test(start_paused = true)]
async fn a_mirror_pod_is_replaced_with_its_static_pod_while_another_source_does_not_answer() {
    let (sim, folder) = node();
    let web = |uid: &str, annotations: &[(&str, &str)]| {
        let mut pod = ApiPod::clone(&pod("web").uid(uid).running("main", "run").build());
        let added = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        pod.metadata.annotations.get_or_insert_default().extend(added);
        Arc::new(pod)
    };
    let [old, new] = ["old", "new"].map(|uid| web(uid, &[(CONFIG_HASH, uid)]));
    let mirror = web("mirror", &[(CONFIG_SOURCE, "api"), (CONFIG_HASH, "old"), (CONFIG_MIRROR, "old")]);
    let api = Api::default();
    let agent = Agent::start_with_mirrors(&sim, folder.path(), vec![api.put(&mirror)], &api);
    agent.send(PodUpdate::Add(ConfigSource::Http, vec![old.clone()])).await;
    until(&sim, "it runs", |log| live(log).contains("old")).await;
    assert!(api.deleted().is_empty(), "it is of this manifest");
    agent.send(PodUpdate::Remove(ConfigSource::Http, vec![old])).await;
    agent.send(PodUpdate::Add(ConfigSource::Http, vec![new])).await;
    until(&sim, "its successor runs", |log| live(log).contains("new")).await;
    sleep(Duration::from_secs(10)).await;
    assert_eq!(api.deleted().len(), 1, "it is of the previous manifest");
}

/// A leftover that is made again whenever housekeeping has removed it.
struct Leftover {
    path: PathBuf,
    make: fn(&Path) -> io::Result<()>,
    removals: usize,
}

impl Leftover {
    fn new(path: PathBuf, make: fn(&Path) -> io::Result<()>) -> Self {
        make(&path).expect("it is made");
        Self { path, make, removals: 0 }
    }

    fn exists(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok()
    }

    fn make_again(&mut self) {
        if !self.exists() {
            self.removals += 1;
            (self.make)(&self.path).expect("it is made again");
        }
    }
}

fn log_folder(path: &Path) -> io::Result<()> {
    fs::create_dir(path)
}

fn dangling_link(path: &Path) -> io::Result<()> {
    symlink("/no/such/place.log", path)
}

/// A naive agent would make a housekeeping pass over the whole node whenever a pod ends.
#[tokio::test(start_paused = true)]
async fn under_churn_leftovers_are_looked_for_every_two_seconds_and_ended_pods_are_removed_at_once() {
    let (sim, folder) = node();
    let path = |relative: &str| folder.path().join(relative);
    ["logs", "links"].iter().for_each(|name| fs::create_dir(path(name)).expect("a directory"));
    let mut logs = Leftover::new(path("logs/default_gone_gone-uid"), log_folder);
    let mut link = Leftover::new(path("links/gone_default_main-0123.log"), dangling_link);
    let pods: Vec<Pod> = (0..300).map(|n| pod(&format!("p{n}")).running("main", "run").build()).collect();

    let agent = Agent::start(&sim, SensorSet::ALL, folder.path(), Vec::new());
    // Five pods a second for a minute, each of which is there for one second.
    for (n, added) in pods.iter().enumerate() {
        agent.add(added.clone()).await;
        if let Some(last) = n.checked_sub(5) {
            agent.remove(pods[last].clone()).await;
        }
        for _ in 0..20 {
            sleep(Duration::from_millis(10)).await;
            logs.make_again();
            link.make_again();
        }
        if let Some(gone) = n.checked_sub(10) {
            let left = (!sim.sandboxes(&format!("p{gone}")).is_empty(), path(&format!("pods/p{gone}-uid")).exists());
            assert_eq!(left, (false, false), "sandbox and directory of p{gone}, which was removed a second ago");
        }
    }
    assert!((25..=35).contains(&logs.removals), "{} passes", logs.removals);
    assert!((1..=2).contains(&link.removals), "dangling links were looked for {} times", link.removals);

    // What is due too early for a pass, or for a check of the links, is delayed.
    agent.remove(pods[299].clone()).await;
    sleep(Duration::from_secs(3)).await;
    assert!(!logs.exists(), "no pass has begun since");
    sleep(Duration::from_secs(62)).await;
    assert!(!link.exists(), "no search for dangling links has begun since");
}
