//! Bad input and a hostile surrounding on a real runtime: no runtime yet, manifests that are no use, a folder that
//! comes and goes, a full disk. One thing that is wrong is named, everything else goes on.

use std::fs;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_tests::agent::Scene;
use keblet_tests::agent::kill;
use keblet_tests::agent::processes_with;
use nix::mount::MsFlags;
use nix::mount::mount;
use serde_json::Value;

fn is_ready(scene: &Scene) -> bool {
    scene.health("/readyz").is_some_and(|(code, _)| code == 200)
}

#[test]
#[ignore = "real runtime"]
fn agent_waits_for_a_missing_runtime() -> Result<()> {
    let mut scene = Scene::new()?;
    let socket = scene.containerd.ready().socket.clone();
    scene.containerd.kill()?;
    if socket.exists() {
        fs::remove_file(&socket).with_context(|| format!("cannot remove {}", socket.display()))?;
    }
    scene.put_runner("early")?;
    scene.start()?;
    let complaint = format!("runtime at unix://{} does not answer", socket.display());
    scene.until_true("a clear complaint", |scene| Ok(scene.said(&[&complaint])))?;
    scene.until_true("an answer of /readyz", |scene| Ok(scene.health("/readyz").is_some()))?;
    let (code, answer) = scene.health("/readyz").context("/readyz was there")?;
    ensure!(code == 500 && answer.contains("[-]runtime failed"), "{code} {answer}");
    ensure!(scene.health("/healthz").is_some_and(|(code, _)| code == 200), "waiting is no illness");

    scene.containerd.restart()?;
    scene.until_running("early")?;
    scene.until_true("readiness", |scene| Ok(is_ready(scene)))?;
    ensure!(scene.starts("early") == 1, "{:?}", scene.stamped("early"));
    scene.finish()
}

#[test]
#[ignore = "real runtime"]
fn invalid_manifests_are_reported_and_valid_ones_run() -> Result<()> {
    let mut scene = Scene::new()?;
    scene.put_runner("first")?;
    let folder = scene.node.manifests.clone();
    // An image nobody has, beside a container that can run.
    let mut unknown = scene.pod("unknown", &["run", "--stamp", &scene.stamp("unknown")]);
    let mut absent = unknown["spec"]["containers"][0].clone();
    absent["name"] = "absent".into();
    absent["image"] = "keblet.local/absent:7".into();
    unknown["spec"]["containers"].as_array_mut().context("containers")?.push(absent);
    scene.node.write_manifest("unknown", &unknown)?;
    // Ten megabytes: a good pod with a long tail.
    let mut big = scene.pod("big", &["run", "--stamp", &scene.stamp("big")]).to_string().into_bytes();
    big.resize(10 << 20, b' ');
    fs::write(folder.join("big.json"), big)?;
    // Names that are none, and a link that never ends.
    let mut names = scene.pod("No_Name", &["run"]);
    names["spec"]["containers"][0]["name"] = "-x-".into();
    scene.node.write_manifest("names", &names)?;
    symlink(folder.join("loop-b.json"), folder.join("loop-a.json"))?;
    symlink(folder.join("loop-a.json"), folder.join("loop-b.json"))?;
    scene.put_runner("last")?;
    scene.start()?;

    let first = scene.until_running("first")?;
    scene.until_running("last")?;
    scene.until_true("unknown's good container", |scene| Ok(scene.starts("unknown") == 1))?;
    let reason = scene.until("a reason in /pods", |scene| {
        let status = scene.status("unknown");
        let containers = status["containerStatuses"].as_array().cloned().unwrap_or_default();
        let absent = containers.into_iter().find(|container| container["name"] == "absent");
        Ok(absent.map(|container| container["state"]["waiting"].clone()).filter(|waiting| waiting.is_object()))
    })?;
    scene
        .until_true("ErrImageNeverPull in /pods", |scene| {
            let status = scene.status("unknown").to_string();
            Ok(status.contains("ErrImageNeverPull"))
        })
        .with_context(|| format!("first it was {reason}"))?;
    let complaints: [&[&str]; 5] = [
        &["big.json", "is too big: 10485760 bytes"],
        &["names.json", "metadata.name", "No_Name"],
        &["names.json", "spec.containers[0].name", "-x-"],
        &["loop-a.json", "Too many levels of symbolic links"],
        &["loop-b.json", "Too many levels of symbolic links"],
    ];
    for words in complaints {
        scene.until_true(&format!("a complaint with {words:?}"), |scene| Ok(scene.said(words)))?;
    }
    // A mended file is taken; what ran was not disturbed.
    fs::remove_file(folder.join("loop-b.json"))?;
    fs::remove_file(folder.join("loop-a.json"))?;
    scene.put("big", &["run", "--stamp", &scene.stamp("big")])?;
    scene.until_running("big")?;
    ensure!(scene.running("first")? == Some(first), "a good pod was touched");
    ensure!(is_ready(&scene), "bad manifests are no illness");
    let pods = scene.containerd.pods()?;
    ensure!(pods.len() == 4, "{pods:?}");
    scene.finish()
}

#[test]
#[ignore = "real runtime"]
fn removed_manifest_folder_stops_pods_until_it_returns() -> Result<()> {
    let mut scene = Scene::new()?;
    scene.put_runner("web")?;
    scene.start()?;
    let first = scene.until_running("web")?;

    let away = scene.node.manifests.with_extension("away");
    fs::rename(&scene.node.manifests, &away)?;
    scene.until_true("the pod gone", |scene| Ok(scene.sandboxes("web")?.is_empty()))?;
    let folder = scene.node.manifests.display().to_string();
    scene.until_true("a word about it", |scene| Ok(scene.said(&["static pod path does not exist", &folder])))?;
    ensure!(processes_with(&scene.stamp("web")).is_empty(), "its process lives");

    fs::rename(&away, &scene.node.manifests)?;
    let again = scene.until_running("web")?;
    ensure!(again.id != first.id, "{again:?}");
    scene.until_true("usable again", |scene| Ok(scene.said(&["static pod path is usable", &folder])))?;
    // And it is watched again, long before the periodic look.
    scene.put_runner("late")?;
    let at = std::time::Instant::now();
    scene.until_true("the new file noticed", |scene| Ok(!scene.status("late").is_null()))?;
    ensure!(at.elapsed() < std::time::Duration::from_secs(15), "noticed only after {:?}", at.elapsed());
    scene.until_running("late")?;
    scene.finish()
}

/// Waits for a good answer; a bad one is shown.
fn until_healthy(scene: &mut Scene) -> Result<()> {
    scene.until_true("health", |scene| {
        let health = scene.health("/healthz?verbose");
        let good = health.as_ref().is_some_and(|(code, _)| *code == 200);
        if !good {
            eprintln!("the agent is ill: {health:?}");
        }
        Ok(good)
    })
}

/// Fills a file system with a file of zeros until not a byte fits.
fn fill(folder: &Path) -> Result<()> {
    let mut file = File::create(folder.join("filler"))?;
    for size in [4096, 1] {
        while file.write(&vec![0; size]).is_ok_and(|written| written > 0) {}
    }
    Ok(())
}

/// Puts a small file system there. Below the runtime's folder, so that it is unmounted with the rest.
fn small_disk(folder: &Path) -> Result<()> {
    mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("size=256k,nr_inodes=200,mode=755"))
        .with_context(|| format!("cannot mount a tmpfs on {}", folder.display()))
}

fn full_disk(scene: &mut Scene, folder: &Path) -> Result<()> {
    small_disk(folder)?;
    scene.put_runner("before")?;
    scene.start()?;
    let before = scene.until_running("before")?;
    fill(folder)?;
    let mut inodes = 0;
    while File::create(folder.join(format!("inode-{inodes}"))).is_ok() {
        inodes += 1;
    }
    scene.put_runner("during")?;
    scene.until_true("a clear error", |scene| Ok(scene.said(&["during-scene", "No space left on device"])))?;
    ensure!(scene.running("during")?.is_none(), "it runs without its files");
    until_healthy(scene)?;
    ensure!(scene.running("before")? == Some(before.clone()), "a running pod was touched");

    fs::remove_file(folder.join("filler"))?;
    (0..inodes).try_for_each(|n| fs::remove_file(folder.join(format!("inode-{n}"))))?;
    scene.until_running("during")?;
    ensure!(scene.running("before")? == Some(before), "a running pod was touched");
    Ok(())
}

#[test]
#[ignore = "real runtime"]
fn full_root_dir_does_not_stop_running_pods() -> Result<()> {
    let mut scene = Scene::new()?;
    let folder = scene.node.root.clone();
    full_disk(&mut scene, &folder)?;
    scene.finish()
}

#[test]
#[ignore = "real runtime"]
fn agent_starts_on_a_full_disk() -> Result<()> {
    let mut scene = Scene::new()?;
    let folder = scene.node.root.clone();
    small_disk(&folder)?;
    fill(&folder)?;
    scene.put_runner("web")?;
    scene.start()?;
    scene.until_true("a clear error", |scene| Ok(scene.said(&["web-scene", "No space left on device"])))?;
    let unkept = ["serving certificate that cannot be kept", "No space left on device"];
    scene.until_true("a word about the certificate", |scene| Ok(scene.said(&unkept)))?;
    let address = scene.until("the main port", |scene| {
        let main = |line: &&Value| line["message"] == "listening" && line["server"] == "main";
        Ok(scene.log().iter().find(main).and_then(|line| line["address"].as_str().map(str::to_owned)))
    })?;
    let client = reqwest::Client::builder().no_proxy().tls_danger_accept_invalid_certs(true).build()?;
    let asked = client.get(format!("https://{address}/healthz")).send();
    tokio::runtime::Runtime::new()?.block_on(asked).context("nobody answers on the main port")?;
    until_healthy(&mut scene)?;

    fs::remove_file(folder.join("filler"))?;
    scene.until_running("web")?;
    scene.finish()
}

#[test]
#[ignore = "real runtime"]
fn full_pod_log_dir_does_not_stop_running_pods() -> Result<()> {
    let mut scene = Scene::new()?;
    let folder = scene.node.pod_logs.clone();
    full_disk(&mut scene, &folder)?;
    scene.finish()
}

#[test]
#[ignore = "real runtime"]
fn unwritable_agent_log_does_not_stop_the_agent() -> Result<()> {
    let mut scene = Scene::new()?;
    scene.put_runner("victim")?;
    // Every line written there fails for want of space.
    scene.start_under(&["sh", "-c", "exec \"$@\" 2>/dev/full", "sh"])?;
    let first = scene.until_running("victim")?;
    kill(&first)?;
    scene.until("the next instance", |scene| {
        Ok(scene.running("victim")?.filter(|container| container.id != first.id))
    })?;
    scene.put_runner("late")?;
    scene.until_running("late")?;
    until_healthy(&mut scene)?;
    scene.finish()
}
