//! iSCSI disks of a real target, the kernel's on loopback: attached, formatted and mounted for pods, and detached. They change
//! the kernel of the machine, so that they run in the emulated one only (`cargo xtask vm test storage`).

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet::volumes::Volumes;
use keblet_tests::standalone::StandaloneNode;
use serde_json::Value;
use serde_json::json;

use crate::storage::claimed;
use crate::storage::daemon;
use crate::storage::map_formatted;
use crate::storage::mounting;
use crate::storage::mounts_of;
use crate::storage::pod;
use crate::storage::run;
use crate::storage::tear_down_and_release;
use crate::storage::until;
use crate::storage::volumes_with;
use crate::storage::written;

const CONFIG: &str = "/sys/kernel/config";
const PORTAL: &str = "127.0.0.1:3260";
/// Where the target of one test listens as well.
const SECOND_PORTAL: &str = "127.0.0.1:3261";
/// Name and password of initiators that discover targets, where sessions need one as well.
const DISCOVERY: (&str, &str) = ("finder", "a password to find");
/// Pages of the disk: 32 MiB.
const PAGES: u32 = 8192;

/// A target with one disk in memory, and what a node needs to use it: udev and iscsid.
struct Target {
    name: String,
    daemons: Vec<Child>,
}

impl Target {
    /// Starts a target, to which initiators log in with this name and password if there are any.
    fn start(name: &str, chap: Option<(&str, &str)>) -> Result<Self> {
        for module in ["configfs", "target_core_mod", "iscsi_target_mod", "iscsi_tcp", "sd_mod", "ext4", "loop"] {
            run("modprobe", &[module])?;
        }
        if !Path::new(CONFIG).join("target").exists() {
            run("mount", &["-t", "configfs", "configfs", CONFIG])?;
        }
        fs::create_dir_all("/run/lock")?;
        fs::write("/etc/iscsi/initiatorname.iscsi", "InitiatorName=iqn.2001-04.com.example:node\n")?;
        let mut target = Self { name: name.to_owned(), daemons: Vec::new() };
        target.daemons.push(daemon("/usr/lib/systemd/systemd-udevd", &[])?);
        target.daemons.push(daemon("/usr/sbin/iscsid", &["-f"])?);
        until("iscsid and udevd", || Ok(run("udevadm", &["control", "--ping"]).is_ok() && iscsid_answers()))?;
        target.configure(chap)?;
        Ok(target)
    }

    fn folder(&self) -> PathBuf {
        Path::new(CONFIG).join("target/iscsi").join(&self.name)
    }

    /// The disk, by the kernel's name for it.
    fn disk(&self) -> PathBuf {
        Path::new(CONFIG).join("target/core/rd_mcp_0").join(self.name.replace(':', "-"))
    }

    fn configure(&self, chap: Option<(&str, &str)>) -> Result<()> {
        let (disk, group) = (self.disk(), self.folder().join("tpgt_1"));
        let write = |path: PathBuf, text: &str| fs::write(&path, text).with_context(|| format!("{}", path.display()));
        fs::create_dir_all(&disk).with_context(|| format!("{}", disk.display()))?;
        write(disk.join("control"), &format!("rd_pages={PAGES}"))?;
        write(disk.join("enable"), "1")?;
        fs::create_dir_all(&group).with_context(|| format!("{}", group.display()))?;
        let lun = group.join("lun/lun_0");
        fs::create_dir_all(&lun)?;
        symlink(&disk, lun.join("disk"))?;
        // Any initiator may log in, and write.
        write(group.join("attrib/generate_node_acls"), "1")?;
        write(group.join("attrib/demo_mode_write_protect"), "0")?;
        write(group.join("attrib/authentication"), if chap.is_some() { "1" } else { "0" })?;
        if let Some((user, password)) = chap {
            write(group.join("auth/userid"), user)?;
            write(group.join("auth/password"), password)?;
        }
        // Of all targets of the machine.
        let discovery = Path::new(CONFIG).join("target/iscsi/discovery_auth");
        write(discovery.join("userid"), DISCOVERY.0)?;
        write(discovery.join("password"), DISCOVERY.1)?;
        write(discovery.join("enforce_discovery_auth"), if chap.is_some() { "1" } else { "0" })?;
        self.listen(PORTAL)?;
        write(group.join("enable"), "1")
    }

    fn listen(&self, portal: &str) -> Result<()> {
        let portal = self.folder().join("tpgt_1/np").join(portal);
        fs::create_dir_all(&portal).with_context(|| format!("{}", portal.display()))
    }

    /// The volume source of the disk.
    fn source(&self) -> Value {
        json!({ "targetPortal": "127.0.0.1", "iqn": self.name, "lun": 0 })
    }

    /// The interface of each session of the machine with the target.
    fn sessions(&self) -> Vec<String> {
        let sessions = fs::read_dir("/sys/class/iscsi_session").into_iter().flatten().flatten();
        let text = |path: PathBuf| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let of_target = sessions.filter(|session| text(session.path().join("targetname")) == self.name);
        of_target.map(|session| text(session.path().join("ifacename"))).collect()
    }

    fn has_session(&self) -> bool {
        !self.sessions().is_empty()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let group = self.folder().join("tpgt_1");
        // In the order in which they depend on each other. The machine is thrown away afterwards.
        let _ = fs::write(group.join("enable"), "0");
        let _ = fs::remove_file(group.join("lun/lun_0/disk"));
        for portal in [PORTAL, SECOND_PORTAL] {
            // The next test discovers its target there, and would use the record of this one.
            let _ = run("iscsiadm", &["-m", "discoverydb", "-t", "sendtargets", "-p", portal, "-o", "delete"]);
            let _ = fs::remove_dir(group.join("np").join(portal));
        }
        for folder in [group.join("lun/lun_0"), group.clone(), self.folder(), self.disk()] {
            let _ = fs::remove_dir(folder);
        }
        for daemon in &mut self.daemons {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// Asked for its sessions, it has none, or an error only if it is not there.
fn iscsid_answers() -> bool {
    let ended = Command::new("iscsiadm").args(["-m", "host"]).stdin(Stdio::null()).output();
    ended.is_ok_and(|output| matches!(output.status.code(), Some(0 | 21)))
}

#[test]
#[ignore = "real runtime"]
fn vm_a_disk_is_formatted_mounted_and_detached_and_keeps_its_files() -> Result<()> {
    let target = Target::start("iqn.2001-04.com.example:files", None)?;
    let mut node = StandaloneNode::new()?;
    let write = "grep -c ' /data ext4 rw' /proc/mounts; stat -c '%g' /data; echo kept > /data/file && sync; echo end";
    node.layout.write_manifest("writer", &pod(&node, "writer", write, "iscsi", target.source()))?;
    node.start()?;
    let seen = written(&mut node, "writer")?;
    ensure!(seen == "1\n77", "{seen}");
    let place = node.layout.root.join("plugins/kubernetes.io/iscsi/iface-default");
    let place = place.join(format!("{PORTAL}-{}-lun-0", target.name));
    ensure!(target.has_session() && place.join("file").exists(), "the disk is mounted for the node");
    let startup = run("iscsiadm", &["-m", "node", "-T", &target.name, "-p", PORTAL])?;
    ensure!(startup.contains("node.startup = manual"), "{startup}");

    // The next agent finds what this one has attached.
    node.kill_agent()?;
    node.start()?;
    node.layout.remove_manifest("writer")?;
    node.until_true("the session ends", |_| Ok(!target.has_session() && !place.exists()))?;
    ensure!(mounts_of(&target.name) == 0, "something is still mounted");
    let records = Command::new("iscsiadm").args(["-m", "node"]).output()?;
    ensure!(records.status.code() == Some(21), "a record is left: {}", String::from_utf8_lossy(&records.stdout));

    let mut source = target.source();
    source["readOnly"] = true.into();
    source["initiatorName"] = "iqn.2001-04.com.example:reader".into();
    // Two ways to one disk.
    target.listen(SECOND_PORTAL)?;
    source["portals"] = json!([SECOND_PORTAL]);
    let read = "cat /data/file; touch /data/new 2>/dev/null || echo refused; echo end";
    node.layout.write_manifest("reader", &pod(&node, "reader", read, "iscsi", source))?;
    let seen = written(&mut node, "reader")?;
    ensure!(seen == "kept\nrefused", "{seen}");
    let interfaces = run("iscsiadm", &["-m", "iface"])?;
    ensure!(interfaces.contains("127.0.0.1:3260:data") && interfaces.contains(":reader"), "{interfaces}");
    ensure!(target.sessions() == ["127.0.0.1:3260:data"; 2], "{:?} instead of one for each portal", target.sessions());
    node.layout.remove_manifest("reader")?;
    node.until_true("the session ends", |_| Ok(!target.has_session()))?;
    node.until_true("the interface is removed", |_| {
        Ok(!run("iscsiadm", &["-m", "iface"])?.contains("127.0.0.1:3260:data"))
    })?;
    node.stop().context("the agent or the runtime left something")
}

fn encoded(text: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(text)
}

#[tokio::test]
#[ignore = "real runtime"]
async fn vm_a_session_is_authenticated_by_the_secret_of_a_persistent_volume() -> Result<()> {
    let target = Target::start("iqn.2001-04.com.example:chap", Some(("user", "a long password")))?;
    let root = tempfile::tempdir()?;
    run("iscsiadm", &["-m", "iface", "-I", "chosen", "-o", "new"])?;
    run("iscsiadm", &["-m", "iface", "-I", "chosen", "-o", "update", "-n", "iface.transport_name", "-v", "tcp"])?;
    let mut source = target.source();
    source["iscsiInterface"] = "chosen".into();
    source["chapAuthSession"] = true.into();
    source["secretRef"] = json!({ "name": "chap", "namespace": "storage" });
    let secret = |password: &str| {
        let data = json!({ "discovery.sendtargets.auth.username": encoded(DISCOVERY.0),
            "discovery.sendtargets.auth.password": encoded(DISCOVERY.1),
            "node.session.auth.username": encoded("user"), "node.session.auth.password": encoded(password) });
        json!({ "metadata": { "name": "chap", "namespace": "storage" }, "type": "kubernetes.io/iscsi-chap", "data": data })
    };
    let volumes = |password: &str, mode: &str, finds: bool| {
        let mut source = source.clone();
        source["chapAuthDiscovery"] = finds.into();
        let mut replies = claimed(json!({ "iscsi": source, "volumeMode": mode }));
        replies.insert("/api/v1/namespaces/storage/secrets/chap", secret(password));
        volumes_with(root.path(), replies)
    };
    let release = async |volumes: &Volumes, uid: &str| -> Result<()> {
        tear_down_and_release(volumes, uid).await?;
        ensure!(!target.has_session(), "a session is left");
        Ok(())
    };

    let unknown = volumes("a long password", "Filesystem", false);
    let failed = unknown.set_up(&mounting("u-0")?, None).await.err().context("the target is not found")?;
    let error = failed.iter().map(ToString::to_string).collect::<String>();
    ensure!(error.contains("--discover failed"), "{error}");
    release(&unknown, "u-0").await?;

    let wrong = volumes("another password", "Filesystem", true);
    let failed = wrong.set_up(&mounting("u-1")?, None).await.err().context("the password is wrong")?;
    let error = failed.iter().map(ToString::to_string).collect::<String>();
    ensure!(error.contains("--login failed") && !error.contains("another"), "{error}");
    release(&wrong, "u-1").await?;

    let right = volumes("a long password", "Filesystem", true);
    let done = right.set_up(&mounting("u-2")?, None).await;
    ensure!(done.is_ok(), "{done:?}");
    let mounted = root.path().join("pods/u-2/volumes/kubernetes.io~iscsi/pv");
    ensure!(mounted.join("lost+found").exists(), "a file system is mounted");
    ensure!(target.sessions() == ["chosen"], "{:?}", target.sessions());
    release(&right, "u-2").await?;

    // The same disk as a device: what the file system has written is there.
    let raw = volumes("a long password", "Block", true);
    map_formatted(&raw, "u-3").await?;
    release(&raw, "u-3").await?;
    ensure!(raw.is_torn_down("u-3") && mounts_of(&target.name) == 0, "something is left");
    Ok(())
}
