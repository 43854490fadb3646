//! Exports of a real NFS server, the kernel's on loopback: mounted for pods, and unmounted. It changes the kernel of the
//! machine, so that the tests run in the emulated one only (`cargo xtask vm test storage`).

use std::fs;
use std::path::Path;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_tests::standalone::StandaloneNode;
use serde_json::Value;
use serde_json::json;

use crate::storage::claimed;
use crate::storage::mounting;
use crate::storage::mounts_of;
use crate::storage::pod;
use crate::storage::run;
use crate::storage::volumes_with;
use crate::storage::written;

const CONTROL: &str = "/proc/fs/nfsd";
const EXPORT: &str = "/run/export";
/// As the table of mounts has it.
const MOUNTED: &str = " - nfs4 127.0.0.1:/";

/// A server of NFS 4 with one export, whose path is `/`.
struct Server {
    mountd: Child,
}

impl Server {
    fn start() -> Result<Self> {
        for module in ["nfsd", "nfsv4"] {
            run("modprobe", &[module])?;
        }
        if !Path::new(CONTROL).join("threads").exists() {
            run("mount", &["-t", "nfsd", "nfsd", CONTROL])?;
        }
        fs::create_dir_all(Path::new(EXPORT).join("below"))?;
        // A file system in memory has no identity of its own.
        run("exportfs", &["-i", "-o", "rw,insecure,no_root_squash,fsid=0", &format!("127.0.0.1:{EXPORT}")])?;
        let mut mountd = Command::new("rpc.mountd");
        mountd.args(["--foreground", "--no-nfs-version", "3"]);
        mountd.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let server = Self { mountd: mountd.spawn().context("cannot start rpc.mountd")? };
        server.answer()?;
        Ok(server)
    }

    fn answer(&self) -> Result<()> {
        let only_4 = ["--no-nfs-version", "3", "--no-udp", "--host", "127.0.0.1"];
        // No client of an earlier server is waited for.
        let times = ["--grace-time", "10", "--lease-time", "10"];
        run("rpc.nfsd", &[&only_4[..], &times, &["2"]].concat())?;
        Ok(())
    }

    /// From now on, requests get no answer.
    fn fall_silent(&self) -> Result<()> {
        run("rpc.nfsd", &["0"]).map(drop)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The machine is thrown away afterwards.
        let _ = self.fall_silent();
        let _ = run("exportfs", &["-ua"]);
        let _ = self.mountd.kill();
        let _ = self.mountd.wait();
        let _ = fs::remove_dir_all(EXPORT);
    }
}

/// The volume source of the export.
fn source() -> Value {
    json!({ "server": "127.0.0.1", "path": "/" })
}

#[test]
#[ignore = "real runtime"]
fn vm_an_export_is_mounted_and_unmounted_and_keeps_its_files() -> Result<()> {
    let _server = Server::start()?;
    fs::write(Path::new(EXPORT).join("there"), "served\n")?;
    let mut node = StandaloneNode::new()?;
    let write =
        "cat /data/there; grep -c ' /data nfs4 rw' /proc/mounts; stat -c '%g' /data; echo kept > /data/file; echo end";
    node.layout.write_manifest("writer", &pod(&node, "writer", write, "nfs", source()))?;
    node.start()?;
    let seen = written(&mut node, "writer")?;
    ensure!(seen == "served\n1\n0", "fsGroup does not change what a server owns: {seen}");

    // The next agent finds what this one has mounted.
    node.kill_agent()?;
    node.start()?;
    node.layout.remove_manifest("writer")?;
    node.until_true("the export is unmounted", |_| Ok(mounts_of(MOUNTED) == 0))?;
    let kept = fs::read_to_string(Path::new(EXPORT).join("file"))?;
    ensure!(kept == "kept\n", "{kept}");

    let mut read_only = source();
    read_only["readOnly"] = true.into();
    let read = "cat /data/file; touch /data/new 2>/dev/null || echo refused; echo end";
    node.layout.write_manifest("reader", &pod(&node, "reader", read, "nfs", read_only))?;
    let seen = written(&mut node, "reader")?;
    ensure!(seen == "kept\nrefused", "{seen}");
    node.layout.remove_manifest("reader")?;
    node.until_true("the export is unmounted", |_| Ok(mounts_of(MOUNTED) == 0))?;
    ensure!(Path::new(EXPORT).join("there").exists(), "a file of the export was removed");
    node.stop().context("the agent or the runtime left something")
}

#[test]
#[ignore = "real runtime"]
fn vm_a_pod_ends_although_its_server_does_not_answer() -> Result<()> {
    let server = Server::start()?;
    let mut node = StandaloneNode::new()?;
    // What is not written back yet keeps a process from ending until the server answers again, under every agent.
    let write = "cd /data; date > log; cat log; echo end";
    node.layout.write_manifest("writer", &pod(&node, "writer", write, "nfs", source()))?;
    node.start()?;
    written(&mut node, "writer")?;
    server.fall_silent()?;
    node.layout.remove_manifest("writer")?;
    node.until_true("the export is unmounted", |_| Ok(mounts_of(MOUNTED) == 0))?;
    ensure!(Path::new(EXPORT).join("log").exists(), "a file of the export was removed");
    node.stop().context("the agent or the runtime left something")
}

#[tokio::test]
#[ignore = "real runtime"]
async fn vm_an_export_is_mounted_with_the_options_of_its_persistent_volume() -> Result<()> {
    let _server = Server::start()?;
    let root = tempfile::tempdir()?;
    let volumes = |path: &str| {
        let export = json!({ "server": "127.0.0.1", "path": path });
        volumes_with(root.path(), claimed(json!({ "mountOptions": ["nfsvers=4.1", "noatime"], "nfs": export })))
    };

    let failed =
        volumes("/missing").set_up(&mounting("u-1")?, None).await.err().context("the export does not exist")?;
    let error = failed.iter().map(ToString::to_string).collect::<String>();
    ensure!(error.contains("127.0.0.1:/missing") && error.contains("No such file"), "{error}");
    ensure!(mounts_of(MOUNTED) == 0 && !root.path().join("pods/u-1/volumes/kubernetes.io~nfs/pv").exists());

    let volumes = volumes("/below");
    let done = volumes.set_up(&mounting("u-2")?, None).await;
    ensure!(done.is_ok(), "{done:?}");
    let place = root.path().join("pods/u-2/volumes/kubernetes.io~nfs/pv");
    let table = fs::read_to_string("/proc/mounts")?;
    let line = table.lines().find(|line| line.contains(&*place.to_string_lossy())).context("it is not mounted")?;
    ensure!(line.starts_with("127.0.0.1:/below ") && line.contains("vers=4.1") && line.contains("noatime"), "{line}");
    fs::write(place.join("file"), "kept")?;
    volumes.tear_down("u-2").await?;
    ensure!(volumes.is_torn_down("u-2") && mounts_of(MOUNTED) == 0, "something is left");
    ensure!(Path::new(EXPORT).join("below/file").exists(), "a file of the export was removed");
    Ok(())
}
