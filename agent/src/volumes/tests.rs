//! Volumes in a temporary directory.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use keblet_skip::mounts::disconnected;
use keblet_skip::mounts::in_private_mounts;
use serde_json::json;

use super::*;
use crate::kernel::usage::MeasuredBy;

fn pod(volumes: serde_json::Value, mounts: serde_json::Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "ns", "uid": "u-1"},
        "spec": {"volumes": volumes, "containers": [{"name": "c", "image": "i", "volumeMounts": mounts}]},
    }))
    .expect("a pod")
}

pub(super) fn with_empty_dir() -> Pod {
    pod(
        json!([{"name": "v", "emptyDir": {}}, {"name": "unused", "emptyDir": {}}]),
        json!([{"name": "v", "mountPath": "/v"}]),
    )
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).expect("it exists").permissions().mode() & 0o7777
}

pub(super) fn make() -> (tempfile::TempDir, Volumes) {
    let root = tempfile::tempdir().expect("a folder");
    let volumes = Volumes::new(root.path());
    volumes.make_pod_dirs_here("u-1");
    (root, volumes)
}

#[tokio::test]
async fn an_empty_dir_is_removed_with_its_pod() {
    let (root, volumes) = make();
    let pod = with_empty_dir();
    assert_eq!(mode(&root.path().join("pods/u-1")), 0o750);
    volumes.set_up(&pod, None).await.expect("set up");
    let dir = root.path().join("pods/u-1/volumes/kubernetes.io~empty-dir/v");
    assert_eq!(mode(&dir), 0o777);
    assert!(!dir.with_file_name("unused").exists(), "no container mounts it");
    let mount = &pod.spec.as_ref().expect("a spec").containers[0].volume_mounts.as_ref().expect("mounts")[0];
    assert_eq!(volumes.mount_source(&PodVolumes::of(&pod), "c", 0, mount, None).await.expect("a path"), dir);

    std::fs::remove_dir(&dir).expect("removed by others");
    volumes.set_up(&pod, None).await.expect("made anew");
    assert_eq!(mode(&dir), 0o777);
    std::fs::write(dir.join("data"), "kept").expect("a file");
    volumes.set_up(&pod, None).await.expect("set up again");
    assert_eq!(std::fs::read_to_string(dir.join("data")).expect("the file"), "kept");
    let error = volumes.remove_orphan("u-1").await.expect_err("content is never deleted with the directory");
    assert!(matches!(error, VolumeError::NotEmpty { .. }), "{error}");

    assert!(!volumes.is_torn_down("u-1"));
    volumes.tear_down("u-1").await.expect("gone");
    assert!(volumes.is_torn_down("u-1"));
    assert_eq!(volumes.pods_on_disk().expect("a list"), ["u-1"]);
    volumes.make_termination_file("u-1", "c").await.expect("a file");
    volumes.remove_orphan("u-1").await.expect("gone");
    assert_eq!(volumes.pods_on_disk().expect("a list"), Vec::<String>::new());
    volumes.tear_down("u-1").await.expect("twice is fine");
}

/// Type, size, mode and group of a mounted directory.
fn mounted(dir: &Path) -> (i64, u64, u32, u32) {
    use std::os::unix::fs::MetadataExt as _;
    let found = nix::sys::statfs::statfs(dir).expect("a file system");
    let bytes = found.blocks() * u64::try_from(found.block_size()).expect("a size");
    (found.filesystem_type().0, bytes, mode(dir), std::fs::metadata(dir).expect("it exists").gid())
}

#[test]
fn an_empty_dir_in_memory_has_its_size_and_survives_the_agent() {
    in_private_mounts(|| {
        let (root, volumes) = make();
        let mut pod = pod(
            json!([{"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "64Ki"}}]),
            json!([{"name": "v", "mountPath": "/v"}]),
        );
        block_on(volumes.set_up(&pod, Some(1 << 20))).expect("set up");
        let dir = root.path().join("pods/u-1/volumes/kubernetes.io~empty-dir/v");
        let tmpfs = nix::sys::statfs::TMPFS_MAGIC.0;
        assert_eq!(mounted(&dir), (tmpfs, 64 << 10, 0o1777, 0));
        let error = std::fs::write(dir.join("large"), vec![1; 65 << 10]).expect_err("it does not fit");
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        std::fs::remove_file(dir.join("large")).expect("removed");
        std::fs::write(dir.join("data"), "kept").expect("a file");

        let next = Volumes::new(root.path());
        block_on(next.set_up(&pod, None)).expect("set up again");
        assert_eq!(std::fs::read_to_string(dir.join("data")).expect("the file"), "kept");
        // A machine that restarts keeps directory and marker, not the mount.
        crate::filesystem::unmount(&dir).expect("unmounted");
        pod.spec.as_mut().expect("a spec").security_context =
            Some(serde_json::from_value(json!({"fsGroup": 7})).expect("a context"));
        block_on(next.set_up(&pod, Some(32 << 10))).expect("mounted again");
        assert_eq!(mounted(&dir), (tmpfs, 32 << 10, 0o3777, 7));

        block_on(next.tear_down("u-1")).expect("unmounted and gone");
        assert!(next.is_torn_down("u-1") && !dir.exists());
    });
}

#[test]
fn an_empty_dir_of_huge_pages_has_the_pages_that_the_pod_requests() {
    in_private_mounts(|| {
        if !Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").exists() {
            return keblet_skip::skip("the machine has no huge pages of 2 MiB");
        }
        let (root, volumes) = make();
        let mut pod = pod(
            json!([{"name": "v", "emptyDir": {"medium": "HugePages", "sizeLimit": "5Mi"}}]),
            json!([{"name": "v", "mountPath": "/v"}]),
        );
        let failed = block_on(volumes.set_up(&pod, None)).expect_err("no request").remove(0).to_string();
        let expected = "MountVolume.SetUp failed for volume \"v\" : medium HugePages: hugePages storage requested, but there \
                        is no resource request for huge pages";
        assert_eq!(failed, expected);
        let dir = root.path().join("pods/u-1/volumes/kubernetes.io~empty-dir/v");
        assert!(!dir.exists(), "nothing is left of a volume that cannot be");

        let request = |pod: &mut Pod, size: &str| {
            let resources = json!({"requests": {format!("hugepages-{size}"): "4Mi"}});
            pod.spec.as_mut().expect("a spec").containers[0].resources =
                Some(serde_json::from_value(resources).expect("resources"));
        };
        request(&mut pod, "2Mi");
        for _ in 0..2 {
            block_on(volumes.set_up(&pod, None)).expect("set up");
        }
        let (kind, bytes, _, _) = mounted(&dir);
        assert_eq!((kind, bytes), (nix::sys::statfs::HUGETLBFS_MAGIC.0, 4 << 20), "whole pages only");
        request(&mut pod, "1Gi");
        let failed = block_on(volumes.set_up(&pod, None)).expect_err("other pages").remove(0);
        assert!(matches!(failed.error, VolumeError::PageSize { .. }), "{failed}");
        block_on(volumes.tear_down("u-1")).expect("unmounted and gone");
        assert!(!dir.exists());
    });
}

#[tokio::test]
async fn teardown_follows_no_link_and_removes_deep_trees() {
    let (root, volumes) = make();
    volumes.set_up(&with_empty_dir(), None).await.expect("set up");
    let outside = tempfile::tempdir().expect("a folder");
    std::fs::write(outside.path().join("precious"), "x").expect("a file");
    let dir = root.path().join("pods/u-1/volumes/kubernetes.io~empty-dir/v");
    symlink(outside.path(), dir.join("link")).expect("a link");
    let mut deep = dir.clone();
    for _ in 0..150 {
        deep.push("d");
        std::fs::create_dir(&deep).expect("a folder");
        std::fs::write(deep.join("f"), "").expect("a file");
    }
    for n in 0..1100 {
        std::fs::write(dir.join(n.to_string()), "").expect("a file");
    }
    volumes.tear_down("u-1").await.expect("gone");
    assert!(volumes.is_torn_down("u-1"));
    assert!(outside.path().join("precious").exists());
}

#[tokio::test]
async fn names_cannot_leave_their_directory() {
    let (_root, volumes) = make();
    for uid in ["", "..", ".", "../u", "a/b"] {
        assert!(matches!(volumes.make_pod_dirs(uid).await, Err(VolumeError::NotAFileName { .. })), "{uid:?}");
    }
}

#[test]
fn host_path_types() {
    let dir = tempfile::tempdir().expect("a folder");
    let at = |name: &str| dir.path().join(name).to_str().expect("text").to_owned();
    std::fs::write(at("file"), "").expect("a file");
    let _listener = UnixListener::bind(at("socket")).expect("a socket");
    nix::unistd::mkfifo(at("fifo").as_str(), nix::sys::stat::Mode::S_IRWXU).expect("a fifo");
    let table = [
        ("dir/new", "DirectoryOrCreate", None),
        ("dir/new", "Directory", None),
        ("dir/new", "File", Some("is not a file, it's a Directory")),
        ("made", "FileOrCreate", None),
        ("made", "File", None),
        ("made", "Directory", Some("is not a directory, it's a File")),
        ("file", "DirectoryOrCreate", Some("is not a directory")),
        ("dir/new", "FileOrCreate", Some("is not a file")),
        ("no/parent", "FileOrCreate", Some("cannot create")),
        ("socket", "Socket", None),
        ("file", "Socket", Some("is not a socket file, it's a File")),
        ("file", "CharDevice", Some("is not a character device")),
        ("file", "BlockDevice", Some("is not a block device")),
        ("absent", "", None),
        ("absent", "Directory", Some("is not a directory, unable to determine its type: path")),
        ("fifo", "File", Some("unable to determine its type: only recognise file, directory, socket")),
        ("a/../b", "", Some("'..'")),
        ("file", "Sock", Some("unknown type")),
    ];
    for (name, kind, expected) in table {
        match (host_path::check(&at(name), kind), expected) {
            (Ok(()), None) => {}
            (Err(error), Some(text)) => assert!(error.to_string().contains(text), "{name} {kind}: {error}"),
            (result, _) => panic!("{name} {kind}: {result:?}"),
        }
    }
    assert!(!dir.path().join("absent").exists());
    assert!(host_path::check("/dev/null", "CharDevice").is_ok());
    let error = host_path::check("/dev/null", "BlockDevice").expect_err("a character device").to_string();
    assert_eq!(error, "hostPath type check failed: /dev/null is not a block device, it's a CharDevice");
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime").block_on(future)
}

fn host_path_pod(path: &Path) -> Pod {
    pod(json!([{"name": "h", "hostPath": {"path": path}}]), json!([{"name": "h", "mountPath": "/h", "subPath": "a/b"}]))
}

fn bind_sub_path(volumes: &Volumes, pod: &Pod, index: usize, sub_path: &str) -> Result<PathBuf, VolumeError> {
    let mount = &pod.spec.as_ref().expect("a spec").containers[0].volume_mounts.as_ref().expect("mounts")[0];
    block_on(volumes.mount_source(&PodVolumes::of(pod), "c", index, mount, Some(sub_path)))
}

#[test]
fn a_sub_path_is_pinned_inside_its_volume() {
    in_private_mounts(|| {
        let (_root, volumes) = make();
        let source = tempfile::tempdir().expect("a folder");
        let pod = host_path_pod(source.path());
        let bind = |index, sub_path: &str| bind_sub_path(&volumes, &pod, index, sub_path);
        let target = bind(0, "a/b").expect("made and mounted");
        std::fs::write(source.path().join("a/b/f"), "1").expect("a file");
        assert_eq!(std::fs::read_to_string(target.join("f")).expect("seen through the mount"), "1");
        assert_eq!(bind(0, "a/b").expect("still the same"), target);

        symlink("a", source.path().join("in")).expect("a link");
        symlink(source.path().join("a"), source.path().join("in-absolute")).expect("a link");
        for (index, path) in [(1, "in/b/f"), (2, "in-absolute/b/f")] {
            let file = bind(index, path).expect("links inside are fine");
            assert_eq!(std::fs::read_to_string(file).expect("a file"), "1");
        }
        block_on(volumes.tear_down("u-1")).expect("unmounted and gone");
        assert_eq!(std::fs::read_to_string(source.path().join("a/b/f")).expect("the host's file stays"), "1");
    });
}

#[test]
fn sub_path_mounts_that_are_broken_or_of_another_file_are_made_anew() {
    in_private_mounts(|| {
        let (_root, volumes) = make();
        let source = tempfile::tempdir().expect("a folder");
        let pod = host_path_pod(source.path());
        let target = volumes.dirs().sub_path("u-1", "h", "c", 0).expect("a path");
        disconnected(&target);
        assert_eq!(bind_sub_path(&volumes, &pod, 0, "a/b").expect("made anew"), target);

        std::fs::rename(source.path().join("a/b"), source.path().join("a/old")).expect("moved");
        std::fs::create_dir(source.path().join("a/b")).expect("a folder");
        std::fs::write(source.path().join("a/b/f"), "new").expect("a file");
        bind_sub_path(&volumes, &pod, 0, "a/b").expect("made anew");
        assert_eq!(std::fs::read_to_string(target.join("f")).expect("seen through the mount"), "new");
    });
}

#[test]
fn sub_path_errors_are_upstreams_and_tell_nothing_of_the_host() {
    let (_root, volumes) = make();
    let source = tempfile::tempdir().expect("a folder");
    symlink("/etc", source.path().join("out")).expect("a link");
    symlink("nowhere", source.path().join("dangling")).expect("a link");
    let pod = host_path_pod(source.path());
    let of_volume = "for volumeMount \"h\" of container \"c\"";
    for (path, expected) in [
        ("out", format!("failed to prepare subPath {of_volume}")),
        ("out/new", format!("failed to create subPath directory {of_volume}")),
        ("dangling/x", format!("failed to create subPath directory {of_volume}")),
        ("../x", "unable to provision SubPath `../x`: must not contain '..'".to_owned()),
        ("a/../../x", "unable to provision SubPath `a/../../x`: must not contain '..'".to_owned()),
        ("/etc", "error SubPath `/etc` must not be an absolute path".to_owned()),
    ] {
        let error = bind_sub_path(&volumes, &pod, 9, path).expect_err("refused");
        assert_eq!(error.to_string(), expected);
    }
    assert!(!Path::new("/etc/new").exists());
    let gone = host_path_pod(&source.path().join("gone"));
    let error = bind_sub_path(&volumes, &gone, 0, "x").expect_err("no such volume");
    assert_eq!(error.to_string(), format!("failed to prepare subPath {of_volume}"));
}

#[test]
fn sub_path_directories_have_the_volumes_mode_whatever_the_umask() {
    in_private_mounts(|| {
        // The thread has a umask of its own.
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o077));
        let (_root, volumes) = make();
        let source = tempfile::tempdir().expect("a folder");
        for wanted in [0o777, 0o2775, 0o750, 0o3777] {
            let volume = source.path().join(format!("{wanted:o}"));
            std::fs::create_dir(&volume).expect("a folder");
            std::fs::set_permissions(&volume, std::fs::Permissions::from_mode(wanted)).expect("a mode");
            let target = bind_sub_path(&volumes, &host_path_pod(&volume), 0, "a/b").expect("made and mounted");
            let modes = [mode(&volume.join("a")), mode(&volume.join("a/b"))];
            assert_eq!(modes, [wanted, wanted], "{wanted:o}");
            crate::filesystem::unmount(&target).expect("unmounted");
        }
    });
}

#[tokio::test]
async fn the_hosts_file_changes_in_place() {
    use std::os::unix::fs::MetadataExt as _;
    let (_root, volumes) = make();
    let file = volumes.write_hosts_file("u-1", "one\n".to_owned()).await.expect("written");
    let inode = std::fs::metadata(&file).expect("it exists").ino();
    volumes.write_hosts_file("u-1", "two\n".to_owned()).await.expect("written");
    assert_eq!(std::fs::read_to_string(&file).expect("text"), "two\n");
    assert_eq!(std::fs::metadata(&file).expect("it exists").ino(), inode);
    assert_eq!(mode(&file), 0o644);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    volumes.write_hosts_file("u-1", "two\n".to_owned()).await.expect("written");
    assert_eq!(mode(&file), 0o644, "a container has changed the mode alone");
}

#[tokio::test]
async fn a_hosts_file_that_a_container_has_made_huge_is_not_read() {
    let (_root, volumes) = make();
    let file = volumes.write_hosts_file("u-1", "one\n".to_owned()).await.expect("written");
    // A sparse file that is larger than any memory: reading all of it would fail.
    let grown = std::fs::File::options().write(true).open(&file).expect("a file");
    grown.set_len(1 << 43).expect("a length");
    let began = Instant::now();
    volumes.write_hosts_file("u-1", "one\n".to_owned()).await.expect("written");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(std::fs::read_to_string(&file).expect("text"), "one\n");
}

#[tokio::test]
async fn every_attempt_has_its_own_termination_file() {
    let (_root, volumes) = make();
    let one = volumes.make_termination_file("u-1", "c").await.expect("a file");
    let two = volumes.make_termination_file("u-1", "c").await.expect("a file");
    assert_ne!(one, two);
    assert_eq!(mode(&one), 0o666);
}

/// Lines of a family, without its buckets.
pub(super) fn samples(metrics: &Metrics, family: &str) -> Vec<String> {
    let text = metrics.render().expect("metrics");
    let lines =
        text.lines().filter(|line| line.starts_with(family) && !line.contains("_bucket") && !line.contains("_sum"));
    lines.map(str::to_owned).collect()
}

pub(super) fn operation(name: &str, plugin: &str, status: &str, count: u32) -> String {
    let labels =
        format!(r#"migrated="false",operation_name="{name}",status="{status}",volume_plugin="kubernetes.io/{plugin}""#);
    format!("storage_operation_duration_seconds_count{{{labels}}} {count}")
}

#[tokio::test]
async fn volume_operations_are_counted() {
    let (root, volumes) = make();
    let metrics = Metrics::new();
    let volumes = volumes.with_metrics(metrics.clone());
    let pod = pod(
        json!([
            {"name": "v", "emptyDir": {}},
            {"name": "h", "hostPath": {"path": root.path()}},
            {"name": "n", "hostPath": {"path": "/no/such/folder", "type": "Directory"}},
        ]),
        json!([{"name": "v", "mountPath": "/v"}, {"name": "h", "mountPath": "/h"}, {"name": "n", "mountPath": "/n"}]),
    );
    let mut wanted: Vec<_> = volumes.plugins_wanted(&pod).collect();
    wanted.sort_unstable();
    assert_eq!(wanted, ["kubernetes.io/empty-dir", "kubernetes.io/host-path", "kubernetes.io/host-path"]);
    for _ in 0..2 {
        volumes.set_up(&pod, None).await.expect_err("one is not there");
    }
    assert_eq!(
        samples(&metrics, "storage_operation"),
        [
            operation("volume_mount", "host-path", "fail-unknown", 2),
            operation("volume_mount", "empty-dir", "success", 1),
            operation("volume_mount", "host-path", "success", 1),
        ],
        "what stays as it is, is set up once; what fails is tried again"
    );
    let set_up = [("kubernetes.io/empty-dir", 1), ("kubernetes.io/host-path", 1)];
    assert_eq!(volumes.set_up_by_plugin(), set_up.into());

    volumes.tear_down("u-1").await.expect("gone");
    volumes.tear_down("u-1").await.expect("still gone");
    let unmounted = ["empty-dir", "host-path"].map(|plugin| operation("volume_unmount", plugin, "success", 1));
    assert_eq!(samples(&metrics, "storage_operation")[3..], unmounted);
    assert!(volumes.set_up_by_plugin().is_empty());
}

#[tokio::test]
async fn a_host_path_is_checked_before_the_first_start_of_a_container_only() {
    let (root, volumes) = make();
    let file = root.path().join("file");
    std::fs::write(&file, "").expect("a file");
    let source = json!({"path": file, "type": "File"});
    let pod = pod(json!([{"name": "h", "hostPath": source}]), json!([{"name": "h", "mountPath": "/h"}]));
    volumes.set_up(&pod, None).await.expect("set up");
    std::fs::remove_file(&file).expect("removed");
    volumes.set_up(&pod, None).await.expect("a container restarts");
    Volumes::new(root.path()).set_up(&pod, None).await.expect_err("another agent has not checked it");
}

#[tokio::test]
async fn volumes_on_disk_are_reconstructed() {
    let (root, old) = make();
    old.set_up(&with_empty_dir(), None).await.expect("set up");
    let strange = root.path().join("pods/u-1/volumes/example.com~strange/s");
    std::fs::create_dir_all(&strange).expect("a folder");
    symlink(root.path(), strange.with_file_name("link")).expect("a link");

    let metrics = Metrics::new();
    let volumes = Volumes::new(root.path()).with_metrics(metrics.clone());
    volumes.reconstruct().expect("a list");
    assert_eq!(volumes.set_up_by_plugin(), [("kubernetes.io/empty-dir", 1)].into());
    volumes.set_up(&with_empty_dir(), None).await.expect("set up");
    assert!(samples(&metrics, "storage_operation").is_empty(), "it is set up already");
    volumes.tear_down("u-1").await.expect_err("a link of an unknown plugin stays");
    assert_eq!(samples(&metrics, "storage_operation"), [operation("volume_unmount", "empty-dir", "success", 1)]);
    let counts =
        ["reconstruct_volume_operations", "force_cleaned_failed_volume"].map(|family| samples(&metrics, family));
    assert_eq!(
        counts.concat(),
        [
            "reconstruct_volume_operations_errors_total 1",
            "reconstruct_volume_operations_total 2",
            "force_cleaned_failed_volume_operation_errors_total 1",
            "force_cleaned_failed_volume_operations_total 2",
        ]
    );
    assert!(root.path().is_dir() && !strange.exists() && strange.with_file_name("link").is_symlink());
}

#[test]
fn volumes_on_disk_are_those_that_count_as_ephemeral_storage() {
    let (root, volumes) = make();
    let all = json!([
        {"name": "disk", "emptyDir": {}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        {"name": "config", "configMap": {"name": "c"}},
        {"name": "secret", "secret": {"secretName": "s"}},
        {"name": "host", "hostPath": {"path": "/"}},
        {"name": "unused", "emptyDir": {}},
    ]);
    let mounted = ["disk", "memory", "config", "secret", "host"];
    let mounts: Vec<_> = mounted.map(|name| json!({"name": name, "mountPath": format!("/{name}")})).into();
    let pod = pod(all, json!(mounts));
    let found = volumes.on_disk(&pod).into_iter().map(|volume| (volume.name, volume.path)).collect::<Vec<_>>();
    let folder = |plugin: &str, name: &str| root.path().join(format!("pods/u-1/volumes/kubernetes.io~{plugin}/{name}"));
    let expected = [("disk", folder("empty-dir", "disk")), ("config", folder("configmap", "config"))];
    assert_eq!(found, expected.map(|(name, path)| (name.to_owned(), path)));
    let measured = volumes.measurable(&pod);
    let measured: Vec<_> = measured.iter().map(|volume| (volume.name.as_str(), volume.is_local)).collect();
    assert_eq!(measured, [("disk", true), ("memory", false), ("config", true), ("secret", false)]);
}

#[test]
fn volumes_of_servers_are_measured_by_their_file_system_once_they_are_mounted() {
    let (root, volumes) = make();
    let all = json!([
        {"name": "export", "nfs": {"server": "192.0.2.1", "path": "/"}},
        {"name": "disk", "iscsi": {"targetPortal": "192.0.2.1", "iqn": "iqn.2001-04.com.example:storage", "lun": 0}},
    ]);
    let mounts = json!([{"name": "export", "mountPath": "/export"}, {"name": "disk", "mountPath": "/disk"}]);
    let pod = pod(all, mounts);
    assert!(volumes.measurable(&pod).is_empty());
    for (name, plugin) in [("export", "kubernetes.io/nfs"), ("disk", "kubernetes.io/iscsi")] {
        volumes.actual.mounted("u-1", name, (plugin, false), "volume_mount", Duration::ZERO, true);
    }
    let found = volumes.measurable(&pod).into_iter().map(|volume| (volume.path, volume.by)).collect::<Vec<_>>();
    let folder = |plugin: &str, name: &str| root.path().join(format!("pods/u-1/volumes/kubernetes.io~{plugin}/{name}"));
    let expected = [folder("nfs", "export"), folder("iscsi", "disk")];
    assert_eq!(found, expected.map(|path| (path, MeasuredBy::FileSystem)));
    assert!(volumes.on_disk(&pod).is_empty());
}
