//! Volumes on a real runtime, as containers see them and as the host has them.

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::kill;
use serde_json::Value;
use serde_json::json;

/// Where the script of a pod writes, `$out` to the script. Not its stamp file, which would have to hold timestamps.
fn output(node: &StandaloneNode, name: &str) -> PathBuf {
    node.stamps.join(format!("out-{name}"))
}

/// A pod whose container runs a script that writes to `$out`, with a volume `cache` at `/cache`.
fn pod(node: &StandaloneNode, name: &str, script: &str, volume: Value) -> Value {
    let mut pod = node.pod(name, &[]);
    let main = &mut pod["spec"]["containers"][0];
    main["image"] = BUSYBOX_IMAGE.into();
    main["command"] = json!(["/bin/sh", "-c", format!("out={}; {script}", output(node, name).display())]);
    if let Some(mounts) = main["volumeMounts"].as_array_mut() {
        mounts.push(json!({ "name": "cache", "mountPath": "/cache" }));
    }
    let mut named = volume;
    named["name"] = "cache".into();
    if let Some(volumes) = pod["spec"]["volumes"].as_array_mut() {
        volumes.push(named);
    }
    pod
}

/// Waits until the pod's script has written so many lines.
fn lines(node: &mut StandaloneNode, name: &str, count: usize) -> Result<Vec<String>> {
    let file = output(node, name);
    node.until("the output of the script", |_| {
        let text = fs::read_to_string(&file).unwrap_or_default();
        let complete = text.ends_with('\n') && text.lines().count() >= count;
        Ok(complete.then(|| text.lines().map(str::to_owned).collect()))
    })
}

/// What is mounted at or below the node's directory of this pod.
fn mounts(node: &StandaloneNode, uid: &str) -> Vec<PathBuf> {
    let dir = node.layout.root.join("pods").join(uid);
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let targets = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    targets.filter(|target| target.starts_with(&dir)).collect()
}

#[test]
#[ignore = "real runtime"]
fn memory_volume_survives_the_agent_and_is_unmounted_with_its_pod() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let script = "{ grep -c ' /cache tmpfs .*size=64k' /proc/mounts; stat -c '%a %g' /cache; ls /cache; \
                  dd if=/dev/zero of=/cache/large bs=1k count=65 2>/dev/null && echo fits; rm /cache/large; \
                  touch /cache/kept; echo end; } >> $out; exec sleep 36000";
    let volume = json!({ "emptyDir": { "medium": "Memory", "sizeLimit": "64Ki" } });
    let mut pod = pod(&node, "memory", script, volume);
    pod["spec"]["securityContext"] = json!({ "fsGroup": 77 });
    node.layout.write_manifest("memory", &pod)?;
    node.start()?;
    let first = node.until_running("memory")?;
    let seen = lines(&mut node, "memory", 3)?;
    ensure!(seen == ["1", "3777 77", "end"], "{seen:?}");
    let uid = node.until("the pod in /pods", |node| Ok(node.uid("memory")))?;
    let volume = node.layout.root.join("pods").join(&uid).join("volumes/kubernetes.io~empty-dir/cache");
    ensure!(mounts(&node, &uid).contains(&volume), "{:?}", mounts(&node, &uid));

    node.kill_agent()?;
    node.start()?;
    kill(&first)?;
    let seen = lines(&mut node, "memory", 7)?;
    ensure!(seen[3..] == ["1", "3777 77", "kept", "end"], "the second instance sees what the first wrote: {seen:?}");

    node.layout.remove_manifest("memory")?;
    node.until_true("no mount and no directory", |node| Ok(mounts(node, &uid).is_empty() && !volume.exists()))?;
    node.stop().context("the agent or the runtime left something")
}

#[test]
#[ignore = "real runtime"]
fn variables_come_from_a_file_that_an_init_container_wrote() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let volume = json!({ "emptyDir": {} });
    let mut pod = pod(&node, "env", "echo \"$GREETING, $ABSENT.\" > $out; exec sleep 36000", volume);
    let main = &mut pod["spec"]["containers"][0];
    let of_key = |key: &str, optional: bool| {
        let source = json!({ "volumeName": "cache", "path": "env", "key": key, "optional": optional });
        json!({ "fileKeyRef": source })
    };
    main["env"] = json!([
        { "name": "GREETING", "valueFrom": of_key("HELLO", false) },
        { "name": "ABSENT", "valueFrom": of_key("NONE", true) },
    ]);
    let mut init = main.clone();
    init["name"] = "init".into();
    init["env"] = json!([]);
    init["command"] = json!(["/bin/sh", "-c", "echo \"HELLO='from a file'\" > /cache/env"]);
    pod["spec"]["initContainers"] = json!([init]);
    node.layout.write_manifest("env", &pod)?;
    node.start()?;
    let seen = lines(&mut node, "env", 1)?;
    ensure!(seen == ["from a file, ."], "{seen:?}");
    node.stop()
}
