//! User namespaces of pods (`hostUsers: false`) on a real runtime: ids inside of containers and on the node, owners of files in
//! volumes, ranges over a restart of the agent and after the pod.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_peers::Cache;
use keblet_peers::ContainerView;
use keblet_peers::Options;
use keblet_tests::standalone::StandaloneNode;
use keblet_tests::standalone::kill;
use serde_json::Value;
use serde_json::json;

/// Ids of a pod: of all that the kernel has, three pods could get so many beside the node, of which the third would have the last
/// id, which is no user.
const IDS: u64 = 1 << 30;
/// A container's user, and its group by `fsGroup`.
const USER: u64 = 1000;
const GROUP: u64 = 2000;

/// Whether the tests run on containerd 2; before, the runtime does not report what its handlers can do.
fn is_containerd_2() -> bool {
    Cache::locate().containerd_bin() == Cache::locate().containerd_2().join("usr/bin")
}

fn output(node: &StandaloneNode, name: &str) -> PathBuf {
    node.stamps.join(format!("out-{name}"))
}

/// A pod with a user namespace and a network of its own. Root in container `main`, and a user in container `user`, write what
/// they see to files of the node.
fn pod(node: &StandaloneNode, name: &str) -> Value {
    let mut pod = node.pod(name, &["run", "--stamp", &node.stamp(name)]);
    let spec = &mut pod["spec"];
    spec["hostUsers"] = json!(false);
    spec["hostNetwork"] = json!(false);
    spec["securityContext"] = json!({ "fsGroup": GROUP });
    let mounts = [("cache", "/cache"), ("memory", "/memory"), ("info", "/info")];
    let mounts = mounts.map(|(volume, path)| json!({ "name": volume, "mountPath": path }));
    let main = &mut spec["containers"][0];
    main["image"] = BUSYBOX_IMAGE.into();
    let out = output(node, name).display().to_string();
    let seen = |file: &str| format!("stat -c '%n %u:%g %a' {file};");
    let script = format!(
        "{{ grep -q ' /proc/' /proc/mounts && echo masked; tr -s ' ' < /proc/self/uid_map; tr -s ' ' < /proc/self/gid_map; id -u; touch /cache/root /memory/root; {} {} {} {} {} \
         echo end; }} > {out}; echo start 1 >> {}; exec sleep 36000",
        seen("/cache"),
        seen("/memory/root"),
        seen("/info/..data/labels"),
        seen("/etc/hosts"),
        seen("/dev/termination-log"),
        node.stamp(name),
    );
    main["command"] = json!(["/bin/sh", "-c", script]);
    if let Some(all) = main["volumeMounts"].as_array_mut() {
        all.extend(mounts.clone());
    }
    let script = format!(
        "{{ id -u; grep -c ' /proc/' /proc/mounts; touch /cache/user && {} echo end; }} > /cache/out; exec sleep 36000",
        seen("/cache/user")
    );
    let user = json!({
        "name": "user", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["/bin/sh", "-c", script],
        "securityContext": { "runAsUser": USER, "procMount": "Unmasked" }, "volumeMounts": mounts,
    });
    if let Some(containers) = spec["containers"].as_array_mut() {
        containers.push(user);
    }
    let labels = json!({ "items": [{ "path": "labels", "fieldRef": { "fieldPath": "metadata.name" } }] });
    if let Some(volumes) = spec["volumes"].as_array_mut() {
        volumes.push(json!({ "name": "cache", "emptyDir": {} }));
        volumes.push(json!({ "name": "memory", "emptyDir": { "medium": "Memory" } }));
        volumes.push(json!({ "name": "info", "downwardAPI": labels }));
    }
    pod
}

/// The lines that root of the pod has written.
fn written(node: &mut StandaloneNode, name: &str) -> Result<Vec<String>> {
    let file = output(node, name);
    node.until("the output of the container", |_| {
        let text = fs::read_to_string(&file).unwrap_or_default();
        Ok(text.ends_with("end\n").then(|| text.lines().map(|line| line.trim().to_owned()).collect()))
    })
}

fn pod_dir(node: &mut StandaloneNode, name: &str) -> Result<PathBuf> {
    let uid = node.until("the pod in /pods", |node| Ok(node.uid(name)))?;
    Ok(node.layout.root.join("pods").join(uid))
}

/// First id on the node of a pod that runs, as its record says.
fn recorded(node: &mut StandaloneNode, name: &str) -> Result<u64> {
    let file = pod_dir(node, name)?.join("userns");
    let record: Value = serde_json::from_str(&fs::read_to_string(&file).with_context(|| file.display().to_string())?)?;
    ensure!(record["uidMappings"] == record["gidMappings"], "{record}");
    ensure!(record["uidMappings"][0]["length"] == IDS, "{record}");
    record["uidMappings"][0]["hostId"].as_u64().with_context(|| record.to_string())
}

/// The running instance of a container, other than the one with this id.
fn instance(node: &mut StandaloneNode, name: &str, container: &str, other_than: &str) -> Result<ContainerView> {
    node.until(&format!("container {container} of {name}"), |node| {
        let mut all = node.sandboxes(name)?.into_iter().flat_map(|pod| pod.containers);
        let is_wanted = |one: &ContainerView| one.name == container && one.state == "running" && one.id != other_than;
        Ok(all.find(is_wanted))
    })
}

/// Effective user of a process, as the node sees it.
fn user_of(pid: Option<i32>) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.context("no process")?))?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).context("no Uid line")?;
    Ok(line.split_whitespace().nth(1).context("no effective user")?.parse()?)
}

/// Ids that the containers see, those of their processes, and the owners of their files on disk.
fn check_ids(node: &mut StandaloneNode, name: &str) -> Result<()> {
    let main = instance(node, name, "main", "")?;
    let first = recorded(node, name)?;
    ensure!(first >= IDS && first % IDS == 0, "{first} is an id of the node");
    ensure!(user_of(main.pid)? == first, "root of the pod is {}, not {first}", user_of(main.pid)?);
    let seen = written(node, name)?;
    let map = format!("0 {first} {IDS}");
    let expected = [
        "masked",
        map.as_str(),
        &map,
        "0",
        "/cache 0:2000 2777",
        "/memory/root 0:2000 644",
        "/info/..data/labels 0:2000 644",
        "/etc/hosts 0:0 644",
        "/dev/termination-log 0:0 666",
        "end",
    ];
    ensure!(seen == expected, "{seen:?} is not {expected:?}");
    let cache = pod_dir(node, name)?.join("volumes/kubernetes.io~empty-dir/cache");
    let by_user = node.until("the output of the user", |_| {
        let text = fs::read_to_string(cache.join("out")).unwrap_or_default();
        Ok(text.ends_with("end\n").then_some(text))
    })?;
    ensure!(by_user == "1000\n0\n/cache/user 1000:2000 644\nend\n", "{by_user}");
    // The disk has the ids of the containers, so that volumes can go from pod to pod.
    for (file, user) in [("root", 0), ("user", USER)] {
        let found = fs::metadata(cache.join(file))?;
        ensure!((u64::from(found.uid()), u64::from(found.gid())) == (user, GROUP), "{file}: {found:?}");
    }
    let of_user = user_of(instance(node, name, "user", "")?.pid)?;
    ensure!(of_user == first + USER, "the user of the pod is {of_user}");
    Ok(())
}

#[test]
#[ignore = "real runtime"]
fn pods_have_ids_of_their_own_until_they_are_gone() -> Result<()> {
    let current_runc = Cache::locate().current_runc().exists();
    if !is_containerd_2() {
        // It reports nothing about its handlers, even if this runc is one of them.
        return check_refusal(StandaloneNode::on(Options { current_runc, ..Options::default() }, json!({}))?);
    }
    if !current_runc {
        keblet_skip::skip("no runc that can map ids of mounts: run `cargo xtask setup` with Go and a C compiler");
        return Ok(());
    }
    let options = Options { current_runc, ..Options::default() };
    let mut node = StandaloneNode::on(options, json!({ "maxPods": 3, "userNamespaces": { "idsPerPod": IDS } }))?;
    for name in ["first", "second"] {
        node.layout.write_manifest(name, &pod(&node, name))?;
    }
    node.start()?;
    for name in ["first", "second"] {
        check_ids(&mut node, name)?;
    }
    let before = [recorded(&mut node, "first")?, recorded(&mut node, "second")?];
    ensure!(before[0] != before[1], "both pods have {before:?}");

    node.kill_agent()?;
    node.start()?;
    let killed = instance(&mut node, "first", "main", "")?;
    kill(&killed)?;
    let again = instance(&mut node, "first", "main", &killed.id)?;
    ensure!(user_of(again.pid)? == before[0], "the next instance has other ids");
    ensure!([recorded(&mut node, "first")?, recorded(&mut node, "second")?] == before, "the ranges have changed");
    ensure!(node.sandboxes("first")?.len() == 1, "the sandbox was replaced");

    // Both ranges are taken; the third pod gets that of the first.
    node.layout.write_manifest("third", &pod(&node, "third"))?;
    node.until_true("the refusal", |node| Ok(node.log_contains(&["could not find an empty slot to allocate"])))?;
    ensure!(node.sandboxes("third")?.is_empty(), "the third pod has a sandbox");
    let dir = pod_dir(&mut node, "first")?;
    node.layout.remove_manifest("first")?;
    check_ids(&mut node, "third")?;
    ensure!(recorded(&mut node, "third")? == before[0], "there is no other range");
    ensure!(recorded(&mut node, "second")? == before[1], "the second pod has another range");
    node.until_true("the end of the first pod's directory", |_| Ok(!dir.exists()))?;
    let metrics = node.metrics().context("no metrics")?;
    ensure!(metrics.contains("\nkubelet_started_user_namespaced_pods_total "), "{metrics}");
    node.stop()
}

/// On a runtime that does not report user namespaces, a pod that needs one gets neither sandbox nor ids.
fn check_refusal(mut node: StandaloneNode) -> Result<()> {
    node.layout.write_manifest("refused", &pod(&node, "refused"))?;
    node.start()?;
    node.until_true("the refusal", |node| {
        Ok(node.log_contains(&["can't set `spec.hostUsers: false`, runtime does not support user namespaces"]))
    })?;
    ensure!(node.sandboxes("refused")?.is_empty(), "a sandbox was made");
    ensure!(!pod_dir(&mut node, "refused")?.join("userns").exists(), "a range was taken");
    node.stop()
}

#[test]
#[ignore = "real runtime"]
fn a_runtime_that_cannot_map_mounts_gets_no_user_namespace() -> Result<()> {
    check_refusal(StandaloneNode::new()?)
}

#[test]
#[ignore = "real runtime"]
fn a_record_of_another_range_prevents_the_start() -> Result<()> {
    let mut node = StandaloneNode::new()?;
    let dir = node.layout.root.join("pods/u");
    fs::create_dir_all(&dir)?;
    let ids = json!([{ "hostId": 131_072, "containerId": 0, "length": 131_072 }]);
    fs::write(dir.join("userns"), json!({ "uidMappings": ids, "gidMappings": ids }).to_string())?;
    node.start()?;
    let ended = node.until_ended();
    ensure!(ended.is_err(), "the agent has ended without an error");
    let log = fs::read_to_string(&node.layout.log)?;
    let expected =
        "create user namespace manager: record pod mappings for existing pod \"u\": wrong user namespace length 131072";
    ensure!(log.contains(expected), "{log}");
    Ok(())
}
