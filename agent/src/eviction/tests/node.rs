//! What the manager sees of a node whose runtime hangs, or moves its images.

use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::FutureExt as _;
use keblet_proto::cri::v1 as cri;

use super::super::DiskLayout;
use super::super::Observe as _;
use super::super::Sources;
use super::super::ThisNode;
use super::*;
use crate::cgroups::Layout;
use crate::config::keblet::MemoryAvailable;
use crate::model::PodSnapshot;
use crate::oom::OomCounts;
use crate::pressure::PressureReader;
use crate::runtime::Runtime;
use crate::runtime::RuntimeOptions;
use crate::runtime::tests::server::Socket;
use crate::runtime::tests::server::say;
use crate::stats::Folders;
use crate::stats::Snapshots;
use crate::stats::Stats;
use crate::stats::StatsSource;
use crate::volumes::Volumes;

struct NoPods;

impl Snapshots for NoPods {
    fn all(&self) -> Vec<Arc<PodSnapshot>> {
        Vec::new()
    }
}

/// A node whose files are below `root`, with the runtime that listens here.
fn this_node(root: &Path, socket: &Socket) -> ThisNode<()> {
    let (layout, socket) = (Layout::V2 { mount: root.to_owned() }, socket.clone());
    let runtime = Runtime::with_connector("unix:///t", move || socket.clone().connect(), RuntimeOptions::default());
    let stats = Stats::new(StatsSource {
        node_name: "node".to_owned(),
        layout: layout.clone(),
        proc: "/proc".into(),
        system: Vec::new(),
        folders: Folders { root: root.to_owned(), pod_logs: root.join("logs") },
        volume_period: None,
        runtime: runtime.clone(),
        snapshots: Arc::new(NoPods),
        ooms: OomCounts::default(),
    });
    ThisNode::new(Sources {
        pressure: PressureReader::new(layout.clone(), None, None),
        layout,
        kubepods: None,
        cgroups: None,
        root: root.to_owned(),
        runtime,
        stats,
        volumes: Volumes::new(root),
        garbage: (),
        min_image_age: Duration::ZERO,
        memory_available: MemoryAvailable::WorkingSet,
    })
}

#[tokio::test(start_paused = true)]
async fn signals_are_read_although_the_runtime_does_not_tell_where_its_images_are() {
    let (dir, socket) = (tempfile::tempdir().expect("a folder"), Socket::default());
    let mountpoint = dir.path().to_string_lossy().into_owned();
    socket.serve(Arc::new(move |_, _| {
        let fs_id = Some(cri::FilesystemIdentifier { mountpoint: mountpoint.clone() });
        let images = cri::FilesystemUsage { fs_id, ..Default::default() };
        async move {
            tokio::time::sleep(Duration::from_secs(60)).await;
            say(&cri::ImageFsInfoResponse { image_filesystems: vec![images], ..Default::default() })
        }
        .boxed()
    }));
    let mut node = this_node(dir.path(), &socket);
    // One of the node's own disk, and none of the runtime's.
    let is_partly_read = |readings: &Readings| {
        let shown = |signal| readings.signals.contains_key(&signal);
        shown(Signal::NodeFsAvailable) && !shown(Signal::ImageFsAvailable) && readings.disks.is_none()
    };
    for patience in [3, 1, 1] {
        let begin = Instant::now();
        assert!(is_partly_read(&node.readings().await));
        assert!(begin.elapsed() < Duration::from_secs(patience), "{:?}", begin.elapsed());
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    let readings = node.readings().await;
    assert_eq!(readings.disks, Some(DiskLayout::Shared));
    assert!(readings.signals.contains_key(&Signal::ImageFsAvailable));
}

#[tokio::test(start_paused = true)]
async fn the_disk_of_images_is_found_again_when_the_runtime_has_moved_them() {
    let (dir, socket) = (tempfile::tempdir().expect("a folder"), Socket::default());
    let (old, new) = (dir.path().join("old"), dir.path().join("new"));
    fs::create_dir(&old).expect("a folder");
    let place = Arc::new(Mutex::new(old.clone()));
    let answered = place.clone();
    socket.serve(Arc::new(move |_, _| {
        let mountpoint = answered.lock().expect("no panic").to_string_lossy().into_owned();
        let fs_id = Some(cri::FilesystemIdentifier { mountpoint });
        let images = cri::FilesystemUsage { fs_id, ..Default::default() };
        async move { say(&cri::ImageFsInfoResponse { image_filesystems: vec![images], ..Default::default() }) }.boxed()
    }));
    let mut node = this_node(dir.path(), &socket);
    assert!(sees_images(&mut node).await);
    fs::rename(&old, &new).expect("renamed");
    *place.lock().expect("no panic") = new;
    assert!(!sees_images(&mut node).await, "it is not asked all the time");
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert!(sees_images(&mut node).await);
}

/// The second of two passes has the answer to a call that the first one has begun.
async fn sees_images(node: &mut ThisNode<()>) -> bool {
    node.readings().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    node.readings().await.signals.contains_key(&Signal::ImageFsAvailable)
}
