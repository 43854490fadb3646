//! File systems of `local` volumes that are expanded. The kernel expands a mounted ext4 only for CAP_SYS_RESOURCE, so that this
//! runs in the emulated machine (`cargo xtask vm test storage`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use k8s_openapi::api::core::v1::Pod;
use keblet::volumes::Volumes;
use serde_json::json;

use crate::storage::Replies;
use crate::storage::objects;
use crate::storage::run;
use crate::storage::tear_down_and_release;

const CLAIM: &str = "/api/v1/namespaces/default/persistentvolumeclaims/data";

/// A disk that is a file.
struct Disk {
    file: PathBuf,
    device: String,
}

impl Disk {
    fn attach(file: PathBuf, bytes: u64) -> Result<Self> {
        fs::File::create(&file)?.set_len(bytes)?;
        let device = run("losetup", &["--find", "--show", &file.to_string_lossy()])?.trim().to_owned();
        Ok(Self { file, device })
    }

    /// Enlarges the disk, as an administrator does.
    fn grow(&self, bytes: u64) -> Result<()> {
        fs::File::options().write(true).open(&self.file)?.set_len(bytes)?;
        run("losetup", &["--set-capacity", &self.device]).map(drop)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The machine is thrown away afterwards.
        let _ = run("losetup", &["--detach", &self.device]);
    }
}

/// The claim is bound to a local volume on the disk; both have these sizes.
fn size(replies: &Replies, disk: &Disk, claim: &str, volume: &str) {
    let spec = json!({ "local": { "path": disk.device }, "capacity": { "storage": volume },
        "claimRef": { "uid": "c" } });
    let claim = json!({ "metadata": { "name": "data", "namespace": "default", "uid": "c", "resourceVersion": "7" },
        "spec": { "volumeName": "pv", "resources": { "requests": { "storage": volume } } },
        "status": { "phase": "Bound", "capacity": { "storage": claim } } });
    let mut replies = replies.lock().expect("no test panics while it holds the lock");
    replies.insert("/api/v1/namespaces/default/persistentvolumeclaims/data/status", claim.clone());
    replies.insert(CLAIM, claim);
    replies.insert("/api/v1/persistentvolumes/pv", json!({ "metadata": { "name": "pv" }, "spec": spec }));
}

fn using(uid: &str) -> Result<Pod> {
    Ok(serde_json::from_value(json!({
        "metadata": { "name": "p", "namespace": "default", "uid": uid },
        "spec": {
            "nodeName": "n",
            "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "data" } }],
            "containers": [{ "name": "c", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] }],
        },
    }))?)
}

async fn set_up(volumes: &Volumes, root: &Path, uid: &str) -> Result<PathBuf> {
    let done = volumes.set_up(&using(uid)?, None).await;
    ensure!(done.is_ok(), "{done:?}");
    Ok(root.join("pods").join(uid).join("volumes/kubernetes.io~local-volume/pv"))
}

fn bytes_of(mounted: &Path) -> Result<u64> {
    let found = nix::sys::statvfs::statvfs(mounted).with_context(|| mounted.display().to_string())?;
    Ok(found.blocks() * found.fragment_size())
}

#[tokio::test]
#[ignore = "real runtime"]
async fn vm_the_file_system_of_a_local_device_grows_in_use_and_when_it_is_mounted() -> Result<()> {
    for module in ["ext4", "loop"] {
        run("modprobe", &[module])?;
    }
    let root = tempfile::tempdir()?;
    let disk = Disk::attach(root.path().join("disk"), 32 << 20)?;
    let replies = Replies::default();
    let volumes = Volumes::new(root.path()).with_objects(objects(&replies), BTreeMap::new());
    size(&replies, &disk, "32Mi", "32Mi");
    let mounted = set_up(&volumes, root.path(), "u-1").await?;
    let first = bytes_of(&mounted)?;
    disk.grow(64 << 20)?;
    let refreshed = volumes.refresh(&using("u-1")?, None).await;
    ensure!(refreshed.is_ok() && bytes_of(&mounted)? == first, "the claim has all of the volume: {refreshed:?}");

    size(&replies, &disk, "32Mi", "64Mi");
    let refreshed = volumes.refresh(&using("u-1")?, None).await;
    let second = bytes_of(&mounted)?;
    ensure!(refreshed.is_ok() && second > first + (24 << 20), "in use: {first} {second} {refreshed:?}");
    tear_down_and_release(&volumes, "u-1").await?;

    disk.grow(96 << 20)?;
    size(&replies, &disk, "64Mi", "96Mi");
    let mounted = set_up(&volumes, root.path(), "u-2").await?;
    let third = bytes_of(&mounted)?;
    ensure!(third > second + (24 << 20), "when it is mounted: {second} {third}");
    tear_down_and_release(&volumes, "u-2").await
}
