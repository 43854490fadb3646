//! Volumes from API objects on a real file system.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::fs::symlink;
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;
use proptest::prelude::*;
use serde_json::json;

use super::atomic::WriteStep;
use super::atomic::current_version;
use super::atomic::write;
use super::atomic::write_stepwise;
use super::payload::File;
use super::resolve::Resolved;
use super::*;
use crate::objects::Registration;
use crate::objects::Strategy;
use crate::volumes::PodVolumes;
use crate::volumes::Volumes;
use crate::volumes::testing::Replies;
use crate::volumes::testing::objects_by;

fn payload(files: &[(&str, &str)]) -> Payload {
    let mut payload = Payload::default();
    for (path, text) in files {
        let file = File { data: (*text).to_owned().into(), mode: 0o640, owner: None };
        payload.put(path, file).expect("a valid path");
    }
    payload
}

/// Everything a container can open, by path.
fn seen(dir: &Path) -> BTreeMap<String, String> {
    fn walk(at: &Path, prefix: &str, found: &mut BTreeMap<String, String>) {
        for entry in fs::read_dir(at).expect("a folder").map(|entry| entry.expect("an entry")) {
            let name = entry.file_name().into_string().expect("text");
            if name.starts_with("..") && prefix.is_empty() {
                continue;
            }
            let path = format!("{prefix}{name}");
            match fs::metadata(entry.path()) {
                Ok(meta) if meta.is_dir() => walk(&entry.path(), &format!("{path}/"), found),
                Ok(_) => drop(found.insert(path, fs::read_to_string(entry.path()).expect("text"))),
                Err(_) => {}
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(dir, "", &mut found);
    found
}

fn expected(files: &[(&str, &str)]) -> BTreeMap<String, String> {
    files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect()
}

/// Names that containers do not see: versions and the link to the one in use.
fn hidden(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).expect("a folder").map(|entry| entry.expect("an entry").file_name().into_string());
    let mut names: Vec<String> = names.map(|name| name.expect("text")).filter(|name| name.starts_with("..")).collect();
    names.sort();
    names
}

const OLD: [(&str, &str); 3] = [("a", "1"), ("b", "1"), ("d/e", "1")];
const NEW: [(&str, &str); 4] = [("a", "2"), ("c", "2"), ("d/f/g", "2"), ("h/i", "2")];

#[test]
fn all_files_change_at_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let no_owners = Owners::default();
    assert_eq!(write(dir, &payload(&OLD), no_owners).expect("written"), Written::Changed);
    assert_eq!(seen(dir), expected(&OLD));
    let version = fs::read_link(dir.join("..data")).expect("a link");
    assert_eq!(fs::read_link(dir.join("d")).expect("a link"), Path::new("..data/d"));
    let file = fs::metadata(dir.join("d/e")).expect("it exists");
    assert_eq!((file.permissions().mode() & 0o7777, file.uid()), (0o640, 0));
    assert_eq!(fs::metadata(dir.join("d")).expect("it exists").permissions().mode() & 0o7777, 0o755);

    assert_eq!(write(dir, &payload(&OLD), no_owners).expect("nothing to do"), Written::Unchanged);
    assert_eq!(fs::read_link(dir.join("..data")).expect("a link"), version);
    assert_eq!(write(dir, &payload(&NEW), no_owners).expect("written"), Written::Changed);
    assert_eq!(seen(dir), expected(&NEW));
    assert_eq!(hidden(dir).len(), 2, "{:?}", hidden(dir));
    assert!(!dir.join(version).exists());

    fs::remove_file(dir.join("a")).expect("a link that is missing");
    assert_eq!(write(dir, &payload(&NEW), no_owners).expect("repaired"), Written::Unchanged);
    assert_eq!(seen(dir), expected(&NEW));
    assert_eq!(write(dir, &Payload::default(), no_owners).expect("emptied"), Written::Changed);
    assert_eq!(seen(dir), expected(&[]));
}

#[test]
fn a_reader_sees_the_old_or_the_new_content() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    write(dir, &payload(&[("a", "1"), ("b", "1")]), Owners::default()).expect("written");
    // A process with the version's directory or a file of it open keeps the old content.
    let held = fs::canonicalize(dir.join("..data")).expect("a folder");
    let open = fs::File::open(held.join("b")).expect("a file");
    write(dir, &payload(&[("a", "2"), ("b", "2")]), Owners::default()).expect("written");
    assert_eq!(io::read_to_string(open).expect("text"), "1");
    assert_eq!(seen(dir), expected(&[("a", "2"), ("b", "2")]));
}

#[test]
fn a_mount_point_takes_the_place_of_what_the_volume_no_longer_has() {
    let root = tempfile::tempdir().expect("a folder");
    let dir = root.path().join("volume");
    let nested = ["a", "d/mount"].map(str::to_owned).to_vec();
    let write = |files: &[(&str, &str)]| {
        let (marker, owners) = (root.path().join("plugin/ready"), Owners::default());
        let (payload, nested) = (payload(files), nested.clone());
        VolumeWrite { dir: dir.clone(), marker, memory: None, payload, nested, owners }.run()
    };
    let is_dir = |name: &str| fs::symlink_metadata(dir.join(name)).is_ok_and(|found| found.is_dir());
    write(&OLD).expect("written");
    assert!(!is_dir("a") && !is_dir("d"), "the volume has these names");
    assert_eq!(write(&[("b", "2")]).expect("written"), Written::Changed);
    assert_eq!(seen(&dir), expected(&[("b", "2")]));
    assert!(is_dir("a") && is_dir("d/mount") && is_dir("d"));
    assert_eq!(write(&[("b", "2")]).expect("nothing to do"), Written::Unchanged);
    assert!(is_dir("a") && is_dir("d/mount"));
}

/// A token's file and the link to it belong to the container's user, so that a process without privileges can read it.
#[test]
fn a_file_with_an_owner_belongs_to_it_with_its_link() {
    if !root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let mut files = payload(&[("plain", "x")]);
    files.put("token", File { data: "t".into(), mode: 0o600, owner: Some(7) }).expect("a valid path");
    write(dir.path(), &files, Owners::default()).expect("written");
    let held = |name: &str| {
        let (link, file) = (fs::symlink_metadata(dir.path().join(name)), fs::metadata(dir.path().join(name)));
        let (link, file) = (link.expect("a link"), file.expect("a file"));
        (link.uid(), file.uid(), file.mode() & 0o7777)
    };
    assert_eq!((held("token"), held("plain")), ((7, 7, 0o600), (0, 0, 0o640)));
}

/// As the group of root, for which it was made.
#[test]
fn a_directory_that_belongs_to_the_group_gets_its_bits() {
    let dir = tempfile::tempdir().expect("a folder");
    let held = || fs::metadata(dir.path()).expect("it exists");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).expect("set");
    let owners = Owners { user: None, group: Some(held().gid()) };
    write(dir.path(), &payload(&[("a", "1")]), owners).expect("written");
    assert_eq!(held().mode() & 0o7777, 0o2750);
}

/// Ends a write after `stop` steps; true if it came to its end before.
fn interrupted(dir: &Path, files: &[(&str, &str)], stop: usize) -> (bool, Vec<WriteStep>) {
    let mut steps = Vec::new();
    let result = write_stepwise(dir, &payload(files), Owners::default(), |step| {
        steps.push(step);
        if steps.len() > stop { Err(io::Error::other("killed")) } else { Ok(()) }
    });
    (result.is_ok(), steps)
}

#[test]
fn a_write_can_be_interrupted_after_any_step() {
    for stop in 0.. {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        write(dir, &payload(&OLD), Owners::default()).expect("written");
        let (ended, steps) = interrupted(dir, &NEW, stop);
        let switched = steps.contains(&WriteStep::Switched);
        let now = seen(dir);
        let (old, new) = (expected(&OLD), expected(&NEW));
        let from = if switched { &new } else { &old };
        assert!(now.iter().all(|(path, text)| from.get(path) == Some(text)), "after {steps:?}: {now:?}");
        let lasting = |path: &&String| old.contains_key(*path) && new.contains_key(*path);
        assert!(from.keys().filter(lasting).all(|path| now.contains_key(path)), "after {steps:?}: {now:?}");
        // A kubelet creates this link for each update, which fails for ever if it exists.
        assert!(dir.join("..data_tmp").symlink_metadata().is_err(), "after {steps:?}");

        // The next write succeeds from there, with the same content or other content.
        if stop % 2 == 0 {
            write(dir, &payload(&NEW), Owners::default()).expect("written");
            assert_eq!(seen(dir), new, "after {steps:?}");
        } else {
            write(dir, &payload(&OLD), Owners::default()).expect("written");
            assert_eq!(seen(dir), old, "after {steps:?}");
        }
        assert_eq!(hidden(dir).len(), 2, "after {steps:?}: {:?}", hidden(dir));
        if ended {
            assert!(steps.contains(&WriteStep::StaleRemoved) && stop > NEW.len());
            return;
        }
    }
}

#[test]
fn a_volume_that_a_killed_kubelet_was_switching_is_written() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    write(dir, &payload(&OLD), Owners::default()).expect("written");
    symlink("..2026_01_31_12_00_00.1", dir.join("..data_tmp")).expect("a link");
    write(dir, &payload(&NEW), Owners::default()).expect("written");
    assert_eq!((seen(dir), hidden(dir).len()), (expected(&NEW), 2), "{:?}", hidden(dir));
}

/// Else the version in use is removed as a stale one.
#[test]
fn a_link_that_cannot_be_read_is_not_a_missing_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let found = |path: &Path| current_version(&fs::File::open(path).expect("opened").into());
    assert_eq!(found(dir.path()), Ok(None));
    fs::write(dir.path().join("..data"), "no link").expect("a file");
    assert_eq!(found(dir.path()), Ok(None));
    found(&dir.path().join("..data")).expect_err("nothing can be read below a file");
    fs::remove_file(dir.path().join("..data")).expect("removed");
    write(dir.path(), &payload(&OLD), Owners::default()).expect("written");
    let version = fs::read_link(dir.path().join("..data")).expect("a link").into_os_string().into_string();
    assert_eq!(found(dir.path()), Ok(version.ok()));
}

#[test]
fn planted_links_are_not_followed() {
    let outside = tempfile::tempdir().expect("a folder");
    fs::write(outside.path().join("a"), "precious").expect("a file");
    let precious = || fs::read_to_string(outside.path().join("a")).expect("text");
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for target in [outside.path(), Path::new(".."), Path::new("a"), Path::new("../..")] {
        symlink(target, dir.join("..data")).expect("a link");
        symlink(outside.path().join("a"), dir.join("a")).expect("a link");
        symlink(outside.path(), dir.join("..planted")).expect("a link");
        write(dir, &payload(&OLD), Owners::default()).expect("written");
        assert_eq!((seen(dir), precious().as_str()), (expected(&OLD), "precious"), "{target:?}");
        fs::remove_file(dir.join("..data")).expect("removed");
        fs::remove_file(dir.join("a")).expect("removed");
    }
    // A version whose file is a link to something with the wanted content is not taken for it.
    write(dir, &payload(&[("a", "precious")]), Owners::default()).expect("written");
    let version = fs::canonicalize(dir.join("..data")).expect("a folder");
    fs::remove_file(version.join("a")).expect("removed");
    symlink(outside.path().join("a"), version.join("a")).expect("a link");
    assert_eq!(write(dir, &payload(&[("a", "precious")]), Owners::default()).expect("written"), Written::Changed);
    assert!(fs::canonicalize(dir.join("a")).expect("a file").starts_with(dir.canonicalize().expect("a folder")));
}

#[test]
fn files_share_their_directories() {
    let deep = "d/".repeat(100);
    let mut paths: Vec<String> = (0..200).map(|number| format!("{deep}{number}")).collect();
    paths.extend(["a/b", "a/bc/d", "a/bc/e/f", "a/bce/f", "ab/c", "abc"].map(str::to_owned));
    let files: Vec<_> = paths.iter().map(|path| (path.as_str(), "x")).collect();
    let dir = tempfile::tempdir().expect("a folder");
    write(dir.path(), &payload(&files), Owners::default()).expect("written");
    assert_eq!(seen(dir.path()), expected(&files));
}

#[test]
fn a_file_in_place_of_a_directory_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    write(dir.path(), &payload(&OLD), Owners::default()).expect("written");
    let error = write(dir.path(), &payload(&[("a", ""), ("a/b", "")]), Owners::default()).expect_err("refused");
    assert_eq!(error.to_string(), "invalid path: a is both a file and a directory");
    assert_eq!(seen(dir.path()), expected(&OLD), "the old content stays");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any keys and paths of an object: either all of them are refused, or the volume shows exactly them, and nothing
    /// outside of it is touched.
    #[test]
    fn any_names_stay_inside(
        first in prop::collection::btree_map("[a-c./\\-]{0,6}", "[a-z]{0,3}", 0..6),
        second in prop::collection::btree_map("[a-c./\\-]{0,6}", "[a-z]{0,3}", 0..6),
    ) {
        let around = tempfile::tempdir().expect("a folder");
        let dir = around.path().join("volume");
        fs::create_dir(&dir).expect("a folder");
        for files in [first, second] {
            let before = seen(&dir);
            let mut payload = Payload::default();
            let mut wanted = BTreeMap::new();
            for (path, text) in &files {
                let file = File { data: text.clone().into(), mode: 0o644, owner: None };
                if payload.put(path, file).is_ok() {
                    let parts: Vec<&str> = path.split('/').filter(|part| !matches!(*part, "" | ".")).collect();
                    wanted.insert(parts.join("/"), text.clone());
                }
            }
            match write(&dir, &payload, Owners::default()) {
                Ok(_) => prop_assert_eq!(seen(&dir), wanted),
                Err(_) => prop_assert_eq!(seen(&dir), before),
            }
            prop_assert_eq!(fs::read_dir(around.path()).expect("a folder").count(), 1);
        }
    }
}

fn root() -> bool {
    keblet_skip::is_root("mount and to change owners of files")
}

fn volume_pod(volumes: serde_json::Value, security: serde_json::Value) -> Pod {
    let names: Vec<_> = volumes.as_array().expect("volumes").iter().map(|volume| volume["name"].clone()).collect();
    let mounts: Vec<_> = names
        .iter()
        .map(|name| json!({"name": name, "mountPath": format!("/{}", name.as_str().expect("text"))}))
        .collect();
    serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u-1", "labels": {"a": "1"}},
        "spec": {"securityContext": security, "volumes": volumes, "containers": [{"name": "c", "volumeMounts": mounts}]}}))
    .expect("a pod")
}

#[tokio::test]
async fn a_tmpfs_volume_is_set_up_refreshed_and_torn_down() {
    if !root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let volumes = Volumes::new(dir.path());
    volumes.make_pod_dirs_here("u-1");
    let source =
        json!({"defaultMode": 0o400, "items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]});
    let mut pod = volume_pod(json!([{"name": "d", "downwardAPI": source}]), json!({"runAsUser": 7, "fsGroup": 77}));
    volumes.set_up(&pod, Some(1 << 20)).await.expect("set up");
    let due = volumes.refresh(&pod, Some(1 << 20)).await.expect("up to date");
    assert_eq!(due, crate::volumes::RefreshDue::default());
    let at = dir.path().join("pods/u-1/volumes/kubernetes.io~downward-api/d");
    assert_eq!(seen(&at), expected(&[("labels", "a=\"1\"")]));
    assert_eq!(nix::sys::statfs::statfs(&at).expect("mounted").filesystem_type(), nix::sys::statfs::TMPFS_MAGIC);
    let file = fs::metadata(at.join("labels")).expect("it exists");
    assert_eq!((file.mode() & 0o7777, file.uid(), file.gid()), (0o440, 0, 77));
    let folder = fs::metadata(&at).expect("it exists");
    assert_eq!((folder.mode() & 0o7777, folder.gid()), (0o3777, 77));
    let version = fs::metadata(at.join("..data")).expect("it exists");
    assert_eq!((version.mode() & 0o7777, version.gid()), (0o2755, 77));
    assert!(dir.path().join("pods/u-1/plugins/kubernetes.io~empty-dir/wrapped_d/ready").exists());
    let is_read_only = |name| volumes.is_read_only(&PodVolumes::of(&pod), name);
    assert!(is_read_only("d") && !is_read_only("none"));

    let held = fs::read_link(at.join("..data")).expect("a link");
    volumes.set_up(&pod, Some(1 << 20)).await.expect("again");
    assert_eq!(fs::read_link(at.join("..data")).expect("a link"), held, "nothing has changed");
    pod.metadata.labels = Some(BTreeMap::from([("a".to_owned(), "2".to_owned())]));
    volumes.refresh(&pod, None).await.expect("refreshed");
    assert_eq!(seen(&at), expected(&[("labels", "a=\"2\"")]));

    volumes.tear_down("u-1").await.expect("gone");
    assert!(volumes.is_torn_down("u-1") && !at.exists());
    volumes.remove_orphan("u-1").await.expect("gone");
}

#[tokio::test]
async fn a_volume_whose_object_is_gone_keeps_no_container_from_its_restart() {
    if !root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let replies = Replies::default();
    let map = json!({"metadata": {"name": "m", "namespace": "ns"}, "data": {"key": "held"}});
    let path = "/api/v1/namespaces/ns/configmaps/m".to_owned();
    replies.lock().expect("unpoisoned").insert(path.clone(), map);
    let pod = volume_pod(json!([{"name": "d", "configMap": {"name": "m", "defaultMode": 420}}]), json!({}));
    let agent = || {
        let (objects, _) = objects_by(&replies, Strategy::Get);
        let mut registration = Registration::new("u-1".into());
        objects.register(&pod, &mut registration);
        (Volumes::new(dir.path()).with_objects(objects, BTreeMap::new()), registration)
    };
    let (volumes, _registration) = agent();
    volumes.make_pod_dirs_here("u-1");
    volumes.set_up(&pod, None).await.expect("set up");
    replies.lock().expect("unpoisoned").remove(&path);
    volumes.refresh(&pod, None).await.expect_err("it is gone");
    volumes.set_up(&pod, None).await.expect("a container restarts");
    let at = dir.path().join("pods/u-1/volumes/kubernetes.io~configmap/d");
    assert_eq!(seen(&at), expected(&[("key", "held")]));
    let (another, _registration) = agent();
    another.set_up(&pod, None).await.expect_err("another agent does not know that the volume is complete");
    volumes.tear_down("u-1").await.expect("gone");
}

/// The content of a projected volume with these sources.
async fn projected(objects: &Objects, sources: &[serde_json::Value]) -> Result<Resolved, VolumeError> {
    let mut pod = volume_pod(json!([{"name": "v", "projected": {"defaultMode": 420, "sources": sources}}]), json!({}));
    pod.spec.as_mut().expect("a spec").service_account_name = Some("sa".to_owned());
    let mut registration = Registration::new("u-1".into());
    objects.register(&pod, &mut registration);
    let allocatable = BTreeMap::new();
    let (downward, owners) = (Downward::new(&pod, &allocatable), Owners::default());
    let resolver = Resolver { objects, downward, pod: &pod, owners, recorder: None };
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).expect("volumes");
    resolver.resolve(&volumes[0]).await
}

/// A source of a projected volume: a field of the pod.
fn downward_source(path: &str, field: &str) -> serde_json::Value {
    json!({"downwardAPI": {"items": [{"path": path, "fieldRef": {"fieldPath": field}}]}})
}

#[tokio::test]
async fn of_sources_with_one_path_the_last_counts_and_all_that_fail_are_named() {
    let (objects, _node) = objects_by(&Replies::default(), Strategy::Get);
    // More than are resolved at a time.
    let mut sources = vec![downward_source("x", "metadata.namespace"); 100];
    sources.push(downward_source("x", "metadata.name"));
    sources.push(downward_source("y", "metadata.namespace"));
    let payload = projected(&objects, &sources).await.expect("files").payload;
    let files: Vec<_> = payload.files().map(|(path, file)| (path, &file.data[..])).collect();
    assert_eq!(files, [("x", &b"p"[..]), ("y", &b"ns"[..])]);
    sources.insert(0, downward_source("a", "spec.one"));
    sources.push(downward_source("b", "spec.two"));
    let error = projected(&objects, &sources).await.expect_err("two are none").to_string();
    assert_eq!(error, "[unsupported fieldPath: spec.one, unsupported fieldPath: spec.two]");
}

#[tokio::test]
async fn a_token_is_replaced_in_time_whatever_else_its_volume_has() {
    let replies = Replies::default();
    let issued = json!({"spec": {"audiences": [], "expirationSeconds": 3600},
        "status": {"token": "t", "expirationTimestamp": "2100-01-01T00:00:00Z"}});
    let path = "/api/v1/namespaces/ns/serviceaccounts/sa/token".to_owned();
    replies.lock().expect("unpoisoned").insert(path, issued);
    let (objects, _node) = objects_by(&replies, Strategy::Get);
    let (token, name) = (json!({"serviceAccountToken": {"path": "t"}}), downward_source("name", "metadata.name"));
    for sources in [[token.clone(), name.clone()], [name, token]] {
        let resolved = projected(&objects, &sources).await.expect("issued");
        assert!(resolved.refresh_at.is_some(), "{sources:?}");
        assert_eq!(resolved.payload.get("t").expect("a file").data, "t");
    }
}

#[tokio::test]
async fn sources_of_a_projected_volume_share_an_object_and_are_counted_together() {
    let replies = Replies::default();
    let data = json!({"large": "x".repeat(1 << 20), "small": "x"});
    let map = json!({"metadata": {"name": "m", "namespace": "ns"}, "data": data});
    replies.lock().expect("unpoisoned").insert("/api/v1/namespaces/ns/configmaps/m".to_owned(), map);
    let (objects, _node) = objects_by(&replies, Strategy::Get);
    let source = |key: &str, paths: std::ops::Range<usize>| {
        let items: Vec<_> = paths.map(|number| json!({"key": key, "path": number.to_string()})).collect();
        json!({"configMap": {"name": "m", "items": items}})
    };
    let resolved = async |sources: &[serde_json::Value]| projected(&objects, sources).await;
    let sources = [source("large", 0..32), source("large", 32..64), source("small", 64..65)];
    let payload = resolved(&sources[..2]).await.expect("as much as there may be").payload;
    let first = payload.get("0").expect("a file").data.as_ptr();
    assert_eq!(payload.len(), 64);
    assert!(payload.files().all(|(_, file)| file.data.as_ptr() == first), "no copies are made");
    let error = resolved(&sources[..]).await.expect_err("one byte more").to_string();
    assert!(error.contains("must have at most 67108864 bytes together"), "{error}");
    let some = [json!({}), source("small", 0..1)];
    let payload = resolved(&some[..]).await.expect("a source without a type has no files").payload;
    assert_eq!(payload.files().map(|(path, _)| path).collect::<Vec<_>>(), ["0"]);
}

#[tokio::test]
async fn each_failed_volume_is_reported_and_the_others_are_set_up() {
    if !root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let volumes = Volumes::new(dir.path());
    volumes.make_pod_dirs_here("u-1");
    let pod = volume_pod(
        json!([
            {"name": "map", "configMap": {"name": "m", "defaultMode": 420}},
            {"name": "e", "emptyDir": {}},
            {"name": "tokens", "projected": {"defaultMode": 420, "sources": [{"serviceAccountToken": {"path": "t"}}]}},
            {"name": "bare", "secret": {"secretName": "s"}},
            {"name": "self", "downwardAPI": {"defaultMode": 420, "items": [{"path": "../x", "fieldRef": {"fieldPath": "metadata.name"}}]}},
        ]),
        json!({}),
    );
    let failed = volumes.set_up(&pod, None).await.expect_err("there is no API server");
    let texts: Vec<String> = failed.iter().map(ToString::to_string).collect();
    assert_eq!(
        texts,
        [
            "MountVolume.SetUp failed for volume \"map\" : not supported due to running kubelet in standalone mode",
            "MountVolume.SetUp failed for volume \"tokens\" : cannot setup projected volume tokens because kube client is not configured",
            "MountVolume.SetUp failed for volume \"bare\" : no defaultMode used, not even the default value for it",
            "MountVolume.SetUp failed for volume \"self\" : invalid path: must not contain '..': ../x",
        ]
    );
    assert!(dir.path().join("pods/u-1/volumes/kubernetes.io~empty-dir/e").is_dir());
    volumes.tear_down("u-1").await.expect("gone");
}
