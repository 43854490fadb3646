//! A FlexVolume driver of the node, which is a shell script: it mounts a tmpfs with a file and unmounts it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use k8s_openapi::api::core::v1::Pod;
use keblet::volumes::Volumes;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::kill;
use serde_json::Value;
use serde_json::json;

use crate::storage::mounts_of;
use crate::storage::objects;
use crate::storage::pod;
use crate::storage::written;

const DRIVER: &str = "example.com/memory";

/// Notes its calls. `SOURCE` is what the table of mounts has.
const SCRIPT: &str = r#"#!/bin/sh
printf '%s\n' "$*" >> "$(dirname "$0")/calls"
case "$1" in
init) echo '{"status": "Success", "capabilities": {"attach": false}}' ;;
mount)
    mount -t tmpfs SOURCE "$2" || exit 1
    printf '%s' "$3" | sed 's/.*"content":"\([^"]*\)".*/\1\n/' > "$2/there"
    echo '{"status": "Success"}' ;;
unmount) umount "$2" && echo '{"status": "Success"}' ;;
*) echo '{"status": "Not supported"}'; exit 1 ;;
esac
"#;

/// Puts the driver into the directory of drivers. Where it notes its calls.
fn install(drivers: &Path, source: &str) -> Result<PathBuf> {
    let folder = drivers.join("example.com~memory");
    fs::create_dir_all(&folder)?;
    let program = folder.join("memory");
    fs::write(&program, SCRIPT.replace("SOURCE", source))?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
    Ok(folder.join("calls"))
}

/// The calls with this command.
fn calls(noted: &Path, command: &str) -> Vec<String> {
    let text = fs::read_to_string(noted).unwrap_or_default();
    text.lines().filter(|line| line.split(' ').next() == Some(command)).map(str::to_owned).collect()
}

fn source() -> Value {
    json!({ "driver": DRIVER, "fsType": "ext4", "options": { "content": "served" } })
}

#[test]
#[ignore = "real runtime"]
fn a_driver_mounts_a_volume_and_unmounts_it_with_its_pod() -> Result<()> {
    const MOUNTED: &str = " - tmpfs flex-of-pods ";
    let mut node = StandaloneNode::new()?;
    let write = "cat /data/there; stat -c '%g' /data; cat /data/file 2>/dev/null; echo kept > /data/file; echo end";
    node.layout.write_manifest("writer", &pod(&node, "writer", write, "flexVolume", source()))?;
    node.start()?;
    node.until_true("the reason why the volume is not mounted", |node| {
        Ok(node.log_contains(&["FailedMount", "there is no FlexVolume driver"]))
    })?;
    // The running agent finds it.
    let noted = install(&node.layout.root.join("plugins"), "flex-of-pods")?;
    let first = node.until_running("writer")?;
    let seen = written(&mut node, "writer")?;
    ensure!(seen == "served\n77" && mounts_of(MOUNTED) == 1, "{seen}");
    let mounts = calls(&noted, "mount");
    for option in [r#""kubernetes.io/fsType":"ext4""#, r#""kubernetes.io/mounterArgs.FsGroup":"77""#] {
        ensure!(mounts.len() == 1 && mounts[0].contains(option), "{option}: {mounts:?}");
    }

    // The next agent finds what this one has mounted.
    node.kill_agent()?;
    node.start()?;
    kill(&first)?;
    let out = node.stamps.join("out-writer");
    node.until_true("the second instance sees what the first wrote", |_| {
        Ok(fs::read_to_string(&out).unwrap_or_default() == "served\n77\nkept\nend\n")
    })?;
    ensure!(calls(&noted, "mount").len() == 1 && mounts_of(MOUNTED) == 1, "{:?}", calls(&noted, "mount"));
    node.layout.remove_manifest("writer")?;
    node.until_true("the volume is unmounted", |_| Ok(mounts_of(MOUNTED) == 0))?;
    ensure!(calls(&noted, "unmount").len() == 1, "{:?}", calls(&noted, "unmount"));

    let mut read_only = source();
    read_only["readOnly"] = true.into();
    let read = "cat /data/there; stat -c '%g' /data; touch /data/new 2>/dev/null || echo refused; echo end";
    node.layout.write_manifest("reader", &pod(&node, "reader", read, "flexVolume", read_only))?;
    let seen = written(&mut node, "reader")?;
    ensure!(seen == "served\n0\nrefused", "{seen}");
    ensure!(calls(&noted, "mount")[1].contains(r#""kubernetes.io/readwrite":"ro""#), "{:?}", calls(&noted, "mount"));
    node.layout.remove_manifest("reader")?;
    node.until_true("the volume is unmounted", |_| Ok(mounts_of(MOUNTED) == 0))?;
    node.stop().context("the agent or the runtime left something")
}

#[tokio::test]
#[ignore = "real runtime"]
async fn a_driver_gets_the_secret_of_a_persistent_volume() -> Result<()> {
    const MOUNTED: &str = " - tmpfs flex-of-claims ";
    let root = tempfile::tempdir()?;
    let noted = install(&root.path().join("drivers"), "flex-of-claims")?;
    let claim = json!({ "metadata": { "uid": "c" }, "spec": { "volumeName": "pv" }, "status": { "phase": "Bound" } });
    let mut of_volume = source();
    of_volume["secretRef"] = json!({ "name": "s", "namespace": "storage" });
    let volume =
        json!({ "metadata": { "name": "pv" }, "spec": { "claimRef": { "uid": "c" }, "flexVolume": of_volume } });
    let secret = |value: &str| json!({ "type": DRIVER, "data": { "user": value } });
    let replies = [
        ("/api/v1/namespaces/default/persistentvolumeclaims/data", claim),
        ("/api/v1/persistentvolumes/pv", volume),
        ("/api/v1/namespaces/storage/secrets/s", secret("YWRtaW4=")),
        ("/api/v1/namespaces/default/secrets/s", secret("cG9k")),
    ];
    let volumes = Volumes::new(root.path()).with_flex_volumes(&root.path().join("drivers"), "n");
    let volumes = volumes.with_objects(objects(&Arc::new(Mutex::new(replies.into()))), BTreeMap::new());
    let mut of_pod = source();
    of_pod["secretRef"] = json!({ "name": "s" });
    for (uid, named, name, value) in [
        ("u-1", json!({ "persistentVolumeClaim": { "claimName": "data" } }), "pv", "YWRtaW4="),
        ("u-2", json!({ "flexVolume": of_pod }), "v", "cG9k"),
    ] {
        let mut named = named;
        named["name"] = "v".into();
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": "p", "namespace": "default", "uid": uid },
            "spec": {
                "volumes": [named],
                "containers": [{ "name": "c", "volumeMounts": [{ "name": "v", "mountPath": "/v" }] }],
            },
        }))?;
        let done = volumes.set_up(&pod, None).await;
        ensure!(done.is_ok() && mounts_of(MOUNTED) == 1, "{done:?}");
        let place = root.path().join("pods").join(uid).join("volumes/example.com~memory").join(name);
        ensure!(fs::read_to_string(place.join("there"))? == "served\n", "{uid}");
        let given = calls(&noted, "mount").pop().context("it was called")?;
        ensure!(given.contains(&format!(r#""kubernetes.io/secret/user":"{value}""#)), "{given}");
        volumes.tear_down(uid).await?;
        ensure!(volumes.is_torn_down(uid) && mounts_of(MOUNTED) == 0, "something is left");
    }
    Ok(())
}
