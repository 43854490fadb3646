//! Volumes that their file system counts by project: what is counted, which pods are evicted, and
//! what is left in `/etc/projects`.

use std::fs;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use k8s_openapi::api::core::v1::Pod as ApiPod;
use keblet::cgroups::Hierarchies;
use keblet::config::keblet::MemoryAvailable;
use keblet::eviction::Policy;
use keblet::eviction::Sources;
use keblet::eviction::ThisNode;
use keblet::kernel::project_quota;
use keblet::kernel::project_quota::ProjectUsage;
use keblet::model::PodSnapshot;
use keblet::oom::OomCounts;
use keblet::pressure::PressureReader;
use keblet::runtime::RuntimeOptions;
use keblet::stats::Folders;
use keblet::stats::Snapshots;
use keblet::stats::Stats;
use keblet::stats::StatsSource;
use keblet::volumes::ProjectQuotas;
use keblet::volumes::Volumes;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_peers::Cache;
use keblet_peers::Options;
use keblet_tests::cri;
use keblet_tests::cri::SimRuntime;
use keblet_tests::node::Agent;
use keblet_tests::node::Api;
use keblet_tests::node::pod;
use keblet_tests::node::runtime;
use keblet_tests::quota_disk::FileSystem;
use keblet_tests::quota_disk::QuotaDisk;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::program;
use keblet_tests::standalone::timeout;
use serde_json::Value;
use serde_json::json;

const GATE: &str = "LocalStorageCapacityIsolationFSQuotaMonitoring";
/// The first id that a kubelet gives to volumes.
const FIRST: u32 = 1_048_577;
const MIB: u64 = 1 << 20;
/// What an administrator has written, and an id that is taken by it.
const HAND: [(&str, &str); 2] = [("projects", "# by hand\n10:/srv\n1048578:/srv/b"), ("projid", "srv:10\nb:1048578\n")];

/// A temporary folder with a file system on `disk`, and files of projects in `etc`.
struct Fixture {
    // Unmounted before the folder is removed.
    _disk: QuotaDisk,
    folder: tempfile::TempDir,
}

impl Fixture {
    /// `None` where the test is skipped.
    fn open(kind: FileSystem) -> Result<Option<Self>> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("disk"))?;
        fs::create_dir(path("etc"))?;
        for (name, text) in HAND {
            fs::write(path("etc").join(name), text)?;
        }
        let disk = QuotaDisk::mount(kind, &path("image"), &path("disk"))?;
        Ok(disk.map(|disk| Self { _disk: disk, folder }))
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("disk/root")
    }

    /// Volumes as an agent has them that was just started.
    fn volumes(&self) -> Result<Volumes> {
        let quotas = ProjectQuotas::new(&self.folder.path().join("etc"));
        let volumes = Volumes::new(&self.root()).with_project_quotas(quotas);
        volumes.reconstruct()?;
        Ok(volumes)
    }

    fn files(&self) -> Result<[String; 2]> {
        let read = |name: &str| fs::read_to_string(self.folder.path().join("etc").join(name));
        Ok([read("projects")?, read("projid")?])
    }
}

/// A pod with these emptyDirs.
fn with_volumes(uid: &str, host_users: bool, volumes: &[(&str, Value)]) -> ApiPod {
    let mounts: Vec<_> =
        volumes.iter().map(|(name, _)| json!({ "name": name, "mountPath": format!("/{name}") })).collect();
    let volumes: Vec<_> = volumes.iter().map(|(name, source)| json!({ "name": name, "emptyDir": source })).collect();
    let pod = json!({
        "metadata": { "name": uid, "namespace": "ns", "uid": uid },
        "spec": {
            "hostUsers": host_users, "volumes": volumes,
            "containers": [{ "name": "main", "image": "i", "volumeMounts": mounts }],
        },
    });
    serde_json::from_value(pod).expect("a pod")
}

async fn set_up(volumes: &Volumes, pod: &ApiPod) -> Result<()> {
    volumes.make_pod_dirs(pod.metadata.uid.as_deref().unwrap_or_default()).await?;
    let done = volumes.set_up(pod, None).await;
    done.map(|_| ()).map_err(|failed| anyhow::anyhow!("{}", failed[0]))
}

/// Directories and projects of a pod's volumes, by their names.
fn projects(volumes: &Volumes, pod: &ApiPod) -> Vec<(String, PathBuf, Option<u32>)> {
    volumes.measurable(pod).into_iter().map(|volume| (volume.name, volume.path, volume.project)).collect()
}

/// Waits until the file system reports such usage of a project: XFS subtracts a removed file later.
async fn until_used(on: &Path, id: u32, is: impl Fn(ProjectUsage) -> bool) -> Result<ProjectUsage> {
    let deadline = Instant::now() + timeout();
    loop {
        let used = project_quota::usage(on, id)?;
        if is(used) {
            return Ok(used);
        }
        ensure!(Instant::now() < deadline, "project {id} uses {used:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Writes a file, removes it, and returns it open.
fn unlinked(path: &Path, bytes: u64) -> Result<File> {
    let mut file = File::create_new(path)?;
    file.write_all(&vec![1; usize::try_from(bytes)?])?;
    file.sync_all()?;
    fs::remove_file(path)?;
    Ok(file)
}

async fn each_volume_has_a_project(kind: FileSystem) -> Result<()> {
    let Some(fixture) = Fixture::open(kind)? else { return Ok(()) };
    let volumes = fixture.volumes()?;
    let of_users =
        with_volumes("own", false, &[("a", json!({})), ("b", json!({})), ("m", json!({ "medium": "Memory" }))]);
    let of_host = with_volumes("host", true, &[("a", json!({}))]);
    set_up(&volumes, &of_users).await?;
    set_up(&volumes, &of_host).await?;
    let found = projects(&volumes, &of_users);
    let [(_, a, Some(first)), (_, b, Some(second)), (_, _, None)] = &found[..] else { panic!("{found:?}") };
    let mut ids = [*first, *second];
    ids.sort_unstable();
    ensure!(ids == [FIRST, FIRST + 2], "{ids:?}: one is written by hand");
    let on_host = projects(&volumes, &of_host);
    ensure!(matches!(&on_host[..], [(_, _, None)]), "{on_host:?}");
    let written = fixture.files()?;
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<std::collections::BTreeSet<_>>();
    let hand = HAND.map(|(_, text)| text);
    let own = [(first, a), (second, b)].map(|(id, path)| format!("{id}:{}", path.display()));
    ensure!(written[0].starts_with(hand[0]) && written[1].starts_with(hand[1]), "{written:?}");
    ensure!(own.iter().all(|line| lines(&written[0]).contains(line)), "{written:?}");
    ensure!(lines(&written[1]).contains(&format!("volume{first}:{first}")), "{written:?}");

    // Each counts its own files, the unlinked one and those in new directories included.
    let before = project_quota::usage(a, *second)?;
    fs::create_dir(a.join("below"))?;
    fs::write(a.join("below/file"), vec![1; 1 << 20])?;
    let open = unlinked(&a.join("open"), 2 * MIB)?;
    File::open(a)?.sync_all()?;
    let used = until_used(a, *first, |used| used.bytes >= 3 * MIB).await?;
    // XFS reserves space behind the end of an open file.
    ensure!(used.bytes < 8 * MIB && used.inodes == 4, "{used:?}");
    ensure!(project_quota::usage(a, *second)? == before && before.inodes == 1, "{before:?}");

    // The next agent knows them and writes nothing.
    let volumes = fixture.volumes()?;
    ensure!(projects(&volumes, &of_users) == found, "{:?}", projects(&volumes, &of_users));
    ensure!(fixture.files()? == written);
    set_up(&volumes, &of_users).await?;
    ensure!(fixture.files()? == written && projects(&volumes, &of_users) == found);

    // The ids of a pod that is gone are free, except the one of the file that is still open.
    volumes.tear_down("own").await?;
    ensure!(projects(&volumes, &of_users).iter().all(|(_, _, project)| project.is_none()));
    let ended = [format!("{}\n", hand[0]), hand[1].to_owned()];
    ensure!(fixture.files()? == ended, "{:?}", fixture.files()?);
    until_used(&fixture.root(), *second, |used| used == ProjectUsage::default()).await?;
    let next = with_volumes("next", false, &[("a", json!({})), ("b", json!({}))]);
    set_up(&volumes, &next).await?;
    let mut ids: Vec<u32> = projects(&volumes, &next).into_iter().filter_map(|(_, _, project)| project).collect();
    ids.sort_unstable();
    ensure!(ids == [*second, FIRST + 3], "{ids:?}: the file of {first} is open");
    drop(open);
    until_used(&fixture.root(), *first, |used| used == ProjectUsage::default()).await?;

    // An agent that was killed when the directory was removed; the next one removes the entries.
    fs::remove_dir_all(fixture.root().join("pods/next"))?;
    fixture.volumes()?;
    ensure!(fixture.files()? == ended, "{:?}", fixture.files()?);

    // A directory that belongs to a project of its administrator stays there.
    let third = with_volumes("third", false, &[("a", json!({}))]);
    volumes.make_pod_dirs("third").await?;
    project_quota::assign(&fixture.root().join("pods/third/volumes"), 10)?;
    set_up(&volumes, &third).await?;
    let kept = projects(&volumes, &third);
    let [(_, a, None)] = &kept[..] else { panic!("{kept:?}") };
    ensure!(project_quota::project_of(a)?.id == 10 && fixture.files()? == ended);
    volumes.tear_down("host").await?;
    volumes.tear_down("third").await?;
    Ok(())
}

#[tokio::test]
#[ignore = "real runtime"]
async fn vm_each_volume_has_a_project_on_ext4() -> Result<()> {
    each_volume_has_a_project(FileSystem::Ext4).await
}

#[tokio::test]
#[ignore = "real runtime"]
async fn vm_each_volume_has_a_project_on_xfs() -> Result<()> {
    each_volume_has_a_project(FileSystem::Xfs).await
}

struct NoPods;

impl Snapshots for NoPods {
    fn all(&self) -> Vec<Arc<PodSnapshot>> {
        Vec::new()
    }
}

/// This machine, with the pods of a simulated runtime, as the eviction manager of an agent observes it.
fn this_node(sim: &SimRuntime, root: &Path, volumes: Volumes) -> Result<ThisNode<()>> {
    let (layout, runtime) = (Hierarchies::detect()?.layout, runtime(sim, RuntimeOptions::default()));
    let stats = Stats::new(StatsSource {
        node_name: "sim".to_owned(),
        layout: layout.clone(),
        proc: "/proc".into(),
        system: Vec::new(),
        folders: Folders { root: root.to_owned(), pod_logs: root.join("logs") },
        volume_period: Some(Duration::from_secs(60)),
        runtime: runtime.clone(),
        snapshots: Arc::new(NoPods),
        ooms: OomCounts::default(),
    });
    Ok(ThisNode::new(Sources {
        pressure: PressureReader::new(layout.clone(), None, None),
        layout,
        kubepods: None,
        cgroups: None,
        root: root.to_owned(),
        runtime,
        stats,
        volumes,
        garbage: (),
        min_image_age: Duration::ZERO,
        memory_available: MemoryAvailable::WorkingSet,
    }))
}

/// Pods of the API server alone are evicted for a limit on files: the whole agent on a simulated runtime, with real volumes.
#[tokio::test(start_paused = true)]
#[ignore = "real runtime"]
async fn vm_a_pod_is_evicted_for_an_unlinked_file_in_a_limited_volume() -> Result<()> {
    let Some(fixture) = Fixture::open(FileSystem::Ext4)? else { return Ok(()) };
    let features = cri::Features { user_namespaces: true, ..cri::Features::containerd_1_7() };
    let sim = SimRuntime::new(cri::Options { features, ..cri::Options::default() });
    sim.images(|images| images.store("busybox", 1 << 20));
    fs::create_dir(fixture.root())?;
    fs::write(fixture.root().join("hosts"), "127.0.0.1 localhost\n")?;
    let limited = with_volumes("web", false, &[("data", json!({ "sizeLimit": "1Mi" }))]).spec.context("a spec")?;
    let mut web = pod("web").own_network().running("main", "run").from_api().build().as_ref().clone();
    let spec = web.spec.as_mut().context("a spec")?;
    (spec.host_users, spec.volumes) = (limited.host_users, limited.volumes);
    spec.containers[0].volume_mounts = limited.containers[0].volume_mounts.clone();
    let (api, volumes) = (Api::default(), fixture.volumes()?);
    let web = api.put(&web.into());
    let mut agent = Agent::start_with_volumes(&sim, &fixture.root(), vec![web.clone()], &api, volumes.clone());
    let soon = Duration::from_secs(60);
    sim.until("it runs", soon, |l| l.live("web", "main").is_some()).await.map_err(|late| anyhow::anyhow!("{late}"))?;
    let found = projects(&volumes, &web);
    let [(_, data, Some(FIRST))] = &found[..] else { panic!("{found:?}") };
    let policy = Policy { local_storage: true, ..Policy::default() };
    let (_wake, metrics) = agent.evict_by(policy, this_node(&sim, &fixture.root(), volumes.clone())?);

    fs::write(data.join("small"), vec![1; 1 << 19])?;
    tokio::time::sleep(soon).await;
    ensure!(sim.trace(|l| l.live("web", "main").is_some()), "half of the limit is used");
    let _open = unlinked(&data.join("large"), 2 * MIB)?;
    sim.until("it has ended", soon, |l| l.live("web", "main").is_none())
        .await
        .map_err(|late| anyhow::anyhow!("{late}"))?;
    tokio::time::sleep(soon).await;
    let status = api.pod("web").and_then(|pod| pod.status.clone()).context("no status")?;
    let expected = "Usage of EmptyDir volume \"data\" exceeds the limit \"1Mi\". ";
    ensure!(status.reason.as_deref() == Some("Evicted") && status.message.as_deref() == Some(expected), "{status:?}");
    let text = metrics.render()?;
    ensure!(text.contains("kubelet_evictions{eviction_signal=\"emptydirfs.limit\"} 1\n"), "{text}");
    ensure!(!data.exists() && fixture.files()?[0] == format!("{}\n", HAND[0].1), "{:?}", fixture.files()?);
    Ok(())
}

/// Bytes and inodes of the pod's volume `cache` in the summary.
fn shown(node: &StandaloneNode) -> Option<(u64, u64)> {
    let summary = node.summary();
    let volumes = summary["pods"].as_array()?.iter().find_map(|pod| pod["volume"].as_array().cloned())?;
    let cache = volumes.into_iter().find(|volume| volume["name"] == "cache")?;
    Some((cache["usedBytes"].as_u64()?, cache["inodesUsed"].as_u64()?))
}

/// The report of `keblet doctor` on the node's root directory.
fn diagnosis(node: &StandaloneNode) -> Result<Value> {
    let mut doctor = Command::new(program()?);
    doctor.args(["doctor", "--output", "json", "--feature-gates", &format!("{GATE}=true"), "--root-dir"]);
    let output = doctor.arg(&node.layout.root).output().context("cannot run keblet doctor")?;
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let findings = report["findings"].as_array().context("no findings")?;
    findings.iter().find(|finding| finding["topic"] == "project quotas").cloned().context("no finding")
}

#[test]
#[ignore = "real runtime"]
fn vm_the_summary_follows_what_a_pod_with_user_ids_of_its_own_writes() -> Result<()> {
    if !Cache::locate().current_runc().exists() {
        keblet_skip::skip("no runc that can map ids of mounts: run `cargo xtask setup` with Go and a C compiler");
        return Ok(());
    }
    let options = Options { current_runc: true, ..Options::default() };
    // A volume that is walked would be measured once.
    let changes = json!({ "featureGates": { GATE: true }, "volumeStatsAggPeriod": "24h" });
    let mut node = StandaloneNode::on(options, changes)?;
    let image = node.layout.root.with_file_name("disk.image");
    let Some(_disk) = QuotaDisk::mount(FileSystem::Ext4, &image, &node.layout.root)? else { return Ok(()) };
    for (name, text) in HAND {
        fs::write(Path::new("/etc").join(name), text)?;
    }
    let files =
        || -> Result<[String; 2]> { Ok([fs::read_to_string("/etc/projects")?, fs::read_to_string("/etc/projid")?]) };
    ensure!(diagnosis(&node)?["cost"].is_null(), "{}", diagnosis(&node)?);

    let (go, out) = (node.stamps.join("go"), node.stamps.join("out"));
    let script = format!(
        "echo start 1 >> {}; until [ -e {} ]; do sleep 1; done; exec 3> /cache/open; rm /cache/open; \
         dd if=/dev/zero bs=1024 count=3072 >&3; sync; echo written > {}; exec sleep 36000",
        node.stamp("writer"),
        go.display(),
        out.display(),
    );
    let mut pod = node.pod("writer", &["run", "--stamp", &node.stamp("writer")]);
    pod["spec"]["hostUsers"] = json!(false);
    pod["spec"]["hostNetwork"] = json!(false);
    let main = &mut pod["spec"]["containers"][0];
    main["image"] = BUSYBOX_IMAGE.into();
    main["command"] = json!(["/bin/sh", "-c", script]);
    if let Some(mounts) = main["volumeMounts"].as_array_mut() {
        mounts.push(json!({ "name": "cache", "mountPath": "/cache" }));
    }
    if let Some(volumes) = pod["spec"]["volumes"].as_array_mut() {
        volumes.push(json!({ "name": "cache", "emptyDir": { "sizeLimit": "1Mi" } }));
    }
    node.layout.write_manifest("writer", &pod)?;
    node.start()?;
    let first = node.until_running("writer")?;
    let empty = node.until("the empty volume in the summary", |node| Ok(shown(node)))?;
    ensure!(empty.0 < MIB && empty.1 == 1, "{empty:?}");
    let written = files()?;
    let uid = node.until("the pod in /pods", |node| Ok(node.uid("writer")))?;
    let volume = node.layout.root.join("pods").join(uid).join("volumes/kubernetes.io~empty-dir/cache");
    let expected =
        [format!("{}\n{FIRST}:{}\n", HAND[0].1, volume.display()), format!("{}volume{FIRST}:{FIRST}\n", HAND[1].1)];
    ensure!(written == expected, "{written:?} is not {expected:?}");

    fs::write(&go, "")?;
    node.until_true("the script has written", |_| Ok(out.exists()))?;
    ensure!(fs::read_dir(&volume)?.next().is_none(), "a walk would find the file");
    let is_full = |(bytes, inodes): &(u64, u64)| (3 * MIB..4 * MIB).contains(bytes) && *inodes == 2;
    node.until_true("the open file is counted", |node| Ok(shown(node).is_some_and(|shown| is_full(&shown))))?;

    node.kill_agent()?;
    node.start()?;
    node.until_true("the next agent counts it", |node| Ok(shown(node).is_some_and(|shown| is_full(&shown))))?;
    ensure!(files()? == written, "the next agent has written {:?}", files()?);
    ensure!(node.until_running("writer")?.id == first.id, "the container was replaced");

    node.layout.remove_manifest("writer")?;
    node.until_true("the end of the volume", |_| Ok(!volume.exists()))?;
    let ended = [format!("{}\n", HAND[0].1), HAND[1].1.to_owned()];
    node.until_true("the end of its project", |_| Ok(files()? == ended))?;
    for (name, _) in HAND {
        fs::remove_file(Path::new("/etc").join(name))?;
    }
    node.stop()
}
