//! Invalid input and a faulty environment on a real runtime: no runtime yet, invalid manifests, a folder that
//! disappears and returns, a full disk. Each problem is reported, everything else keeps working.

use std::fs;
use std::fs::File;
use std::io::Read as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::net::TcpListener;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;
use std::sync::Mutex;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::Cache;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::pulls;
use keblet_tests::registry::Image;
use keblet_tests::registry::Registry;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::kill;
use keblet_tests::standalone::processes_with;
use nix::mount::MntFlags;
use nix::mount::MsFlags;
use nix::mount::mount;
use nix::mount::umount2;
use serde_json::Value;
use serde_json::json;

fn is_ready(node: &StandaloneNode) -> bool {
    node.health("/readyz").is_some_and(|(code, _)| code == 200)
}

#[test]
#[ignore = "real runtime"]
fn agent_waits_for_a_missing_runtime() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let socket = node.containerd.ready().socket.clone();
    node.containerd.kill()?;
    if socket.exists() {
        fs::remove_file(&socket).with_context(|| format!("cannot remove {}", socket.display()))?;
    }
    node.write_running_pod("early")?;
    node.start()?;
    let message = format!("runtime at unix://{} does not answer", socket.display());
    node.until_true("a clear message", |node| Ok(node.log_contains(&[&message])))?;
    node.until_true("a response of /readyz", |node| Ok(node.health("/readyz").is_some()))?;
    let (code, body) = node.health("/readyz").context("/readyz responded")?;
    ensure!(code == 500 && body.contains("[-]runtime failed"), "{code} {body}");
    ensure!(node.health("/healthz").is_some_and(|(code, _)| code == 200), "a waiting agent is unhealthy");

    node.containerd.restart()?;
    node.until_running("early")?;
    node.until_true("readiness", |node| Ok(is_ready(node)))?;
    ensure!(node.starts("early") == 1, "{:?}", node.stamps_of("early"));
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn invalid_manifests_are_reported_and_valid_ones_run() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.write_running_pod("first")?;
    let folder = node.layout.manifests.clone();
    // An image that does not exist, beside a container that can run.
    let mut unknown = node.pod("unknown", &["run", "--stamp", &node.stamp("unknown")]);
    let mut absent = unknown["spec"]["containers"][0].clone();
    absent["name"] = "absent".into();
    absent["image"] = "keblet.local/absent:7".into();
    unknown["spec"]["containers"].as_array_mut().context("containers")?.push(absent);
    node.layout.write_manifest("unknown", &unknown)?;
    // Ten megabytes: a valid pod with a long comment.
    let mut big = node.pod("big", &["run", "--stamp", &node.stamp("big")]).to_string().into_bytes();
    big.resize(10 << 20, b' ');
    fs::write(folder.join("big.json"), big)?;
    // Invalid names, and a symlink loop.
    let mut names = node.pod("No_Name", &["run"]);
    names["spec"]["containers"][0]["name"] = "-x-".into();
    node.layout.write_manifest("names", &names)?;
    symlink(folder.join("loop-b.json"), folder.join("loop-a.json"))?;
    symlink(folder.join("loop-a.json"), folder.join("loop-b.json"))?;
    node.write_running_pod("last")?;
    node.start()?;

    let first = node.until_running("first")?;
    node.until_running("last")?;
    node.until_true("the valid container of the pod `unknown`", |node| Ok(node.starts("unknown") == 1))?;
    let reason = node.until("a reason in /pods", |node| {
        let status = node.status("unknown");
        let containers = status["containerStatuses"].as_array().cloned().unwrap_or_default();
        let absent = containers.into_iter().find(|container| container["name"] == "absent");
        Ok(absent.map(|container| container["state"]["waiting"].clone()).filter(|waiting| waiting.is_object()))
    })?;
    node.until_true("ErrImageNeverPull in /pods", |node| {
        let status = node.status("unknown").to_string();
        Ok(status.contains("ErrImageNeverPull"))
    })
    .with_context(|| format!("the first reason was {reason}"))?;
    let messages: [&[&str]; 5] = [
        &["big.json", "is too big: 10485760 bytes"],
        &["names.json", "metadata.name", "No_Name"],
        &["names.json", "spec.containers[0].name", "-x-"],
        &["loop-a.json", "Too many levels of symbolic links"],
        &["loop-b.json", "Too many levels of symbolic links"],
    ];
    for words in messages {
        node.until_true(&format!("a log line with {words:?}"), |node| Ok(node.log_contains(words)))?;
    }
    // A corrected file is applied; running pods are not affected.
    fs::remove_file(folder.join("loop-b.json"))?;
    fs::remove_file(folder.join("loop-a.json"))?;
    node.write_pod("big", &["run", "--stamp", &node.stamp("big")])?;
    node.until_running("big")?;
    ensure!(node.running("first")? == Some(first), "a valid pod was restarted");
    ensure!(is_ready(&node), "the agent is unhealthy because of invalid manifests");
    let pods = node.containerd.pods()?;
    ensure!(pods.len() == 4, "{pods:?}");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn removed_manifest_folder_stops_pods_until_it_returns() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.write_running_pod("web")?;
    node.start()?;
    let first = node.until_running("web")?;

    let moved = node.layout.manifests.with_extension("away");
    fs::rename(&node.layout.manifests, &moved)?;
    node.until_true("the pod removed", |node| Ok(node.sandboxes("web")?.is_empty()))?;
    let folder = node.layout.manifests.display().to_string();
    node.until_true("a log line about it", |node| Ok(node.log_contains(&["static pod path does not exist", &folder])))?;
    ensure!(processes_with(&node.stamp("web")).is_empty(), "its process still runs");

    fs::rename(&moved, &node.layout.manifests)?;
    let again = node.until_running("web")?;
    ensure!(again.id != first.id, "{again:?}");
    node.until_true("usable again", |node| Ok(node.log_contains(&["static pod path is usable", &folder])))?;
    // And it is watched again, long before the periodic read.
    node.write_running_pod("late")?;
    let at = std::time::Instant::now();
    node.until_true("the new file noticed", |node| Ok(!node.status("late").is_null()))?;
    ensure!(at.elapsed() < std::time::Duration::from_secs(15), "noticed only after {:?}", at.elapsed());
    node.until_running("late")?;
    node.stop()
}

/// Waits until the agent is healthy; prints failed checks.
fn until_healthy(node: &mut StandaloneNode) -> Result<()> {
    node.until_true("health", |node| {
        let health = node.health("/healthz?verbose");
        let healthy = health.as_ref().is_some_and(|(code, _)| *code == 200);
        if !healthy {
            eprintln!("the agent is unhealthy: {health:?}");
        }
        Ok(healthy)
    })
}

/// Fills a file system with a file of zeros.
fn fill(folder: &Path) -> Result<()> {
    let mut file = File::create(folder.join("filler"))?;
    for size in [4096, 1] {
        while file.write(&vec![0; size]).is_ok_and(|written| written > 0) {}
    }
    Ok(())
}

/// Mounts a small file system. Below the runtime's folder, so that it is unmounted with the rest.
fn small_disk(folder: &Path) -> Result<()> {
    mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), Some("size=256k,nr_inodes=200,mode=755"))
        .with_context(|| format!("cannot mount a tmpfs on {}", folder.display()))
}

fn full_disk(node: &mut StandaloneNode, folder: &Path) -> Result<()> {
    small_disk(folder)?;
    node.write_running_pod("before")?;
    node.start()?;
    let before = node.until_running("before")?;
    fill(folder)?;
    let mut inodes = 0;
    while File::create(folder.join(format!("inode-{inodes}"))).is_ok() {
        inodes += 1;
    }
    node.write_running_pod("during")?;
    node.until_true("a clear error", |node| Ok(node.log_contains(&["during-node", "No space left on device"])))?;
    ensure!(node.running("during")?.is_none(), "it runs although its files cannot be written");
    until_healthy(node)?;
    ensure!(node.running("before")? == Some(before.clone()), "a running pod was restarted");

    fs::remove_file(folder.join("filler"))?;
    (0..inodes).try_for_each(|n| fs::remove_file(folder.join(format!("inode-{n}"))))?;
    node.until_running("during")?;
    ensure!(node.running("before")? == Some(before), "a running pod was restarted");
    Ok(())
}

#[test]
#[ignore = "real runtime"]
fn full_root_dir_does_not_stop_running_pods() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let folder = node.layout.root.clone();
    full_disk(&mut node, &folder)?;
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn agent_starts_on_a_full_disk() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let folder = node.layout.root.clone();
    small_disk(&folder)?;
    fill(&folder)?;
    node.write_running_pod("web")?;
    node.start()?;
    node.until_true("a clear error", |node| Ok(node.log_contains(&["web-node", "No space left on device"])))?;
    let unkept = ["serving certificate that cannot be stored", "No space left on device"];
    node.until_true("a log line about the certificate", |node| Ok(node.log_contains(&unkept)))?;
    let address = node.until("the main port", |node| {
        let main = |line: &&Value| line["msg"] == "listening" && line["server"] == "main";
        Ok(node.log().iter().find(main).and_then(|line| line["address"].as_str().map(str::to_owned)))
    })?;
    let client = reqwest::Client::builder().no_proxy().tls_danger_accept_invalid_certs(true).build()?;
    let asked = client.get(format!("https://{address}/healthz")).send();
    tokio::runtime::Runtime::new()?.block_on(asked).context("no response on the main port")?;
    until_healthy(&mut node)?;

    fs::remove_file(folder.join("filler"))?;
    node.until_running("web")?;
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn full_pod_log_dir_does_not_stop_running_pods() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let folder = node.layout.pod_logs.clone();
    full_disk(&mut node, &folder)?;
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn a_disk_that_is_full_while_an_image_is_pulled_fails_the_pull_alone() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let Some(registry) = Registry::start(&mut node.containerd, &[])? else { return Ok(()) };
    let image = Image::new(&Cache::locate(), PROBE_IMAGE, 1 << 16)?;
    registry.push("during", &image)?;
    node.write_running_pod("before")?;
    node.start()?;
    let before = node.until_running("before")?;
    // Where the runtime writes what it downloads.
    let folder = node.containerd.ready().dir.join("root/io.containerd.content.v1.content/ingest");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    small_disk(&folder)?;
    fill(&folder)?;
    let name = registry.image("during");
    node.layout.write_manifest("during", &pulls::pod(&node, "during", &name, "IfNotPresent"))?;
    let error = pulls::until_backed_off(&mut node, "during", &name)?;
    ensure!(error.contains("no space left on device"), "{error}");
    pulls::never_ran(&mut node, "during")?;
    until_healthy(&mut node)?;

    umount2(&folder, MntFlags::MNT_DETACH).with_context(|| format!("cannot unmount {}", folder.display()))?;
    pulls::until_pulled(&mut node, "during", &name, image.digest())?;
    ensure!(node.running("before")? == Some(before), "a running pod was restarted");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn unwritable_agent_log_does_not_stop_the_agent() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    node.write_running_pod("victim")?;
    // Every line written there fails with ENOSPC.
    node.start_under(&["sh", "-c", "exec \"$@\" 2>/dev/full", "sh"])?;
    let first = node.until_running("victim")?;
    kill(&first)?;
    node.until("the next instance", |node| Ok(node.running("victim")?.filter(|container| container.id != first.id)))?;
    node.write_running_pod("late")?;
    node.until_running("late")?;
    until_healthy(&mut node)?;
    node.stop()
}

/// Answers every request on this socket with what the manifest is then, until the process ends.
fn serve(listener: TcpListener, manifest: Arc<Mutex<Value>>) {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            // The agent sends a request without a body in one piece.
            let _ = stream.read(&mut [0; 4096]).expect("a request");
            let body = manifest.lock().expect("no panic").to_string();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            // A request that the agent gave up has no reader.
            let _ = stream.write_all(format!("{head}{body}").as_bytes());
        }
    });
}

#[test]
#[ignore = "real runtime"]
fn static_pods_come_from_a_url_on_a_node_without_certificate_authorities() -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("a free port")?;
    let url = format!("http://{}/pods", listener.local_addr()?);
    let mut node = StandaloneNode::with(json!({ "staticPodURL": url, "httpCheckFrequency": "1s" }))?;
    let manifest = |node: &StandaloneNode, name: &str| node.pod(name, &["run", "--stamp", &node.stamp(name)]);
    let served = Arc::new(Mutex::new(manifest(&node, "first")));
    serve(listener, served.clone());
    node.start_under(&["env", "SSL_CERT_FILE=/nonexistent", "SSL_CERT_DIR=/nonexistent"])?;
    node.until_running("first")?;
    *served.lock().expect("no panic") = manifest(&node, "second");
    node.until_running("second")?;
    node.until_true("the first pod is gone", |node| Ok(node.sandboxes("first")?.is_empty()))?;
    node.stop()
}
