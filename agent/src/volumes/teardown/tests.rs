//! Directories as another kubelet leaves them, with real mounts.

use std::fs;
use std::path::Path;
use std::path::PathBuf;

use keblet_skip::mounts::bind;
use keblet_skip::mounts::disconnected;
use keblet_skip::mounts::in_private_mounts;
use keblet_skip::mounts::tmpfs;
use nix::mount::MsFlags;

use super::Directory;
use super::begin;
use super::name;
use crate::filesystem::is_mount_point;
use crate::volumes::VolumeError;
use crate::volumes::Volumes;

/// A node with a pod's directory, and a directory of the host whose content must survive.
struct Node {
    root: tempfile::TempDir,
    volumes: Volumes,
    source: PathBuf,
}

impl Node {
    fn new() -> Self {
        let root = tempfile::tempdir().expect("a directory");
        let source = root.path().join("source");
        fs::create_dir_all(source.join("inner/deeper")).expect("a directory");
        for name in ["data", "inner/data", "inner/deeper/data"] {
            fs::write(source.join(name), "x").expect("a file");
        }
        let volumes = Volumes::new(root.path());
        volumes.make_pod_dirs_here("u");
        Self { volumes, source, root }
    }

    fn pod(&self, below: &str) -> PathBuf {
        self.root.path().join("pods/u").join(below)
    }

    /// What housekeeping does with an orphan.
    fn remove(&self) -> Result<(), VolumeError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            self.volumes.tear_down("u").await?;
            self.volumes.remove_orphan("u").await
        })
    }

    fn source_is_whole(&self) -> bool {
        ["data", "inner/data", "inner/deeper/data"].iter().all(|name| self.source.join(name).exists())
    }
}

/// Mounts the source at `below` in the pod's directory and removes the pod.
fn remove_with_mount(below: &str) -> (Node, Result<(), VolumeError>) {
    let node = Node::new();
    bind(&node.source, &node.pod(below));
    let removed = node.remove();
    assert!(node.source_is_whole(), "{below}: {removed:?}");
    (node, removed)
}

#[test]
fn mounts_of_unknown_plugins_stay_and_keep_the_pods_directory() {
    in_private_mounts(|| {
        for below in [
            "volumes/example.com~flex/x",
            "volumes/kubernetes.io~rbd/disk",
            "volumes/kubernetes.io~csi/claim/mount",
            "volumes/kubernetes.io~csi",
            "volumes/kubernetes.io~empty-dir",
            "volumes/kubernetes.io~empty-dir/mem/inner/deep",
            "volumes/kubernetes.io~secret/s/a/b/c",
            "volumes",
            "volume-subpaths",
            "volume-subpaths/v",
            "volume-subpaths/v/c",
            "volumeDevices/kubernetes.io~csi",
            "plugins",
            "plugins/kubernetes.io~empty-dir/wrapped_s",
            "containers/c",
            "",
        ] {
            let (node, removed) = remove_with_mount(below);
            let error = removed.expect_err(below).to_string();
            assert!(error.contains("is a mount point") || error.contains("is not empty"), "{below}: {error}");
            assert!(is_mount_point(&node.pod(below)).expect("it is there"), "{below}");
        }
    });
}

/// Not memory, so not what this agent or another kubelet mounts for an emptyDir.
#[test]
fn a_foreign_mount_on_a_served_plugins_volume_stays() {
    in_private_mounts(|| {
        for below in ["volumes/kubernetes.io~empty-dir/mem", "volumes/kubernetes.io~configmap/m"] {
            let (node, none) = (Node::new(), None::<&str>);
            fs::create_dir_all(node.pod(below)).expect("a directory");
            nix::mount::mount(none, &node.pod(below), Some("ramfs"), MsFlags::empty(), none).expect("a ramfs");
            fs::write(node.pod(below).join("data"), "x").expect("a file");
            let error = node.remove().expect_err(below).to_string();
            assert!(error.contains("is a mount point"), "{below}: {error}");
            assert!(node.pod(below).join("data").exists(), "{below}");
        }
    });
}

#[test]
fn volumes_whose_plugin_only_mounts_are_unmounted() {
    in_private_mounts(|| {
        for below in [
            "volumes/kubernetes.io~nfs/share",
            "volumes/kubernetes.io~local-volume/pv1",
            "volumes/kubernetes.io~iscsi/disk",
            "volumes/kubernetes.io~fc/disk",
        ] {
            let (node, removed) = remove_with_mount(below);
            removed.expect(below);
            assert!(!node.pod("").exists(), "{below}");
        }
        // Mounted twice, and with content under the mounts that no plugin owns.
        let node = Node::new();
        let share = node.pod("volumes/kubernetes.io~nfs/share");
        fs::create_dir_all(&share).expect("a directory");
        fs::write(share.join("written-while-not-mounted"), "x").expect("a file");
        bind(&node.source, &share);
        bind(&node.source, &share);
        let error = node.remove().expect_err("content").to_string();
        assert!(error.ends_with("share is not empty"), "{error}");
        assert!(node.source_is_whole() && share.join("written-while-not-mounted").exists());
    });
}

#[test]
fn a_volume_is_unmounted_by_force() {
    in_private_mounts(|| {
        let node = Node::new();
        let share = node.pod("volumes/kubernetes.io~nfs/share");
        bind(&node.source, &share);
        bind(&node.source, &share);
        let found = begin(node.volumes.dirs(), "u").expect("a list").expect("the pod's directory");
        found.volumes[0].force_unmount().expect("unmounted");
        assert!(!share.exists() && node.source_is_whole());
    });
}

#[test]
fn memory_of_another_kubelet_is_unmounted() {
    in_private_mounts(|| {
        for plugin in ["empty-dir", "secret", "projected", "downward-api"] {
            let node = Node::new();
            let volume = node.pod(&format!("volumes/kubernetes.io~{plugin}/v"));
            tmpfs(&volume);
            fs::write(volume.join("content"), "x").expect("a file");
            // What is mounted inside goes with it, unread.
            bind(&node.source, &volume.join("inside"));
            node.remove().expect(plugin);
            assert!(!node.pod("").exists() && node.source_is_whole(), "{plugin}");
        }
    });
}

#[test]
fn sub_paths_are_unmounted() {
    in_private_mounts(|| {
        let (node, removed) = remove_with_mount("volume-subpaths/v/c/0");
        removed.expect("removed");
        assert!(!node.pod("").exists());
    });
}

#[test]
fn mount_points_of_sub_paths_are_removed_whatever_type_the_listing_reports() {
    let node = Node::new();
    let at = |name: &str| node.pod("volume-subpaths").join(name);
    fs::create_dir_all(at("0")).expect("a directory");
    fs::write(at("1"), "").expect("a file");
    std::os::unix::fs::symlink(&node.source, at("2")).expect("a link");
    fs::create_dir_all(at("3/content")).expect("directories");
    let pod = Directory::of_pod(node.volumes.dirs(), "u").expect("opened").expect("the pod's directory");
    let dir = pod.open(&name("volume-subpaths")).expect("opened").expect("a directory");
    for index in ["0", "1", "2", "none"] {
        dir.remove_empty_or_file(&name(index)).expect(index);
        assert!(fs::symlink_metadata(at(index)).is_err(), "{index}");
    }
    let error = dir.remove_empty_or_file(&name("3")).expect_err("content");
    assert!(matches!(error, VolumeError::NotEmpty { .. }) && at("3/content").exists(), "{error}");
    assert!(node.source_is_whole());
}

#[test]
fn files_that_sub_paths_were_mounted_on_are_removed() {
    in_private_mounts(|| {
        let node = Node::new();
        let target = node.pod("volume-subpaths/v/c/0");
        fs::create_dir_all(target.parent().expect("a directory")).expect("directories");
        fs::write(&target, "").expect("a file");
        let source = node.source.join("data");
        nix::mount::mount(Some(&source), &target, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a bind mount");
        node.remove().expect("removed");
        assert!(!node.pod("").exists() && node.source_is_whole());
    });
}

#[test]
fn mounts_whose_server_is_gone_are_unmounted() {
    in_private_mounts(|| {
        for below in
            ["volumes/kubernetes.io~nfs/share", "volumes/kubernetes.io~local-volume/v", "volume-subpaths/v/c/0"]
        {
            let node = Node::new();
            disconnected(&node.pod(below));
            fs::metadata(node.pod(below)).expect_err("the server is gone");
            node.remove().expect(below);
            assert!(!node.pod("").exists(), "{below}");
        }
    });
}

#[test]
fn content_of_unknown_plugins_stays_and_that_of_the_others_goes() {
    let node = Node::new();
    let write = |path: &str| {
        let path = node.pod(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        fs::write(path, "x").expect("a file");
    };
    let unknown = [
        "volumes/example.com~flex/x/data",
        "volumes/kubernetes.io~csi/claim/vol_data.json",
        "volumeDevices/kubernetes.io~csi/claim",
    ];
    let served = ["volumes/kubernetes.io~empty-dir/cache/a/b", "volumes/kubernetes.io~configmap/m/..data/k"];
    unknown.iter().chain(&served).for_each(|path| write(path));
    fs::create_dir_all(node.pod("volumes/example.com~other/empty")).expect("a directory");
    let error = node.remove().expect_err("content stays");
    assert!(matches!(error, VolumeError::NotEmpty { .. }), "{error}");
    assert!(unknown.iter().all(|path| node.pod(path).exists()), "{error}");
    assert!(
        !node.pod("volumes/kubernetes.io~empty-dir").exists() && !node.pod("volumes/kubernetes.io~configmap").exists()
    );
    assert!(!node.pod("volumes/example.com~other").exists(), "an empty directory goes");

    for path in ["volumes/example.com~flex", "volumes/kubernetes.io~csi", "volumeDevices/kubernetes.io~csi"] {
        fs::remove_dir_all(node.pod(path)).expect("removed");
    }
    write("containers/c/1234abcd");
    write("plugins/kubernetes.io~empty-dir/cache/ready");
    node.remove().expect("removed");
    assert!(!node.pod("").exists());
    node.remove().expect("nothing to remove");
}

#[test]
fn directories_that_an_unknown_plugin_has_left_go() {
    let node = Node::new();
    for below in ["volumes/plugin/name/subdir", "volumes/kubernetes.io~csi/claim/mount"] {
        fs::create_dir_all(node.pod(below)).expect("directories");
    }
    node.remove().expect("removed");
    assert!(!node.pod("").exists());
}

#[test]
fn a_pods_directory_that_is_a_link_is_not_entered() {
    let node = Node::new();
    fs::remove_dir_all(node.pod("")).expect("removed");
    std::os::unix::fs::symlink(&node.source, Path::new(&node.pod("").to_str().expect("text").trim_end_matches('/')))
        .expect("a link");
    node.remove().expect_err("a link");
    assert!(node.source_is_whole());
}
