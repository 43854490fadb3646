//! Measuring on demand, with a scripted runtime.

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;

use serde_json::Value;
use tonic::Status;

use super::*;
use crate::model::testing;
use crate::oom::OomCounts;
use crate::runtime::RuntimeOptions;
use crate::runtime::tests::server::Socket;
use crate::runtime::tests::server::say;
use crate::runtime::tests::server::script;

struct Node {
    stats: Stats,
    asked: Arc<AtomicUsize>,
    _dir: tempfile::TempDir,
}

struct OnePod;

impl Snapshots for OnePod {
    fn all(&self) -> Vec<Arc<PodSnapshot>> {
        vec![Arc::new(testing::snapshot(vec![testing::running("main", 0)]))]
    }
}

fn node(fails: bool) -> Node {
    let dir = tempfile::tempdir().unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let (socket, count, mount) = (Socket::default(), asked.clone(), dir.path().to_string_lossy().into_owned());
    socket.serve(script(move |method, _| {
        count.fetch_add(1, Ordering::Relaxed);
        if fails {
            return Err(Status::unknown("broken"));
        }
        let used = |bytes| Some(cri::UInt64Value { value: bytes });
        match method {
            "ListContainerStats" => say(&cri::ListContainerStatsResponse {
                stats: vec![cri::ContainerStats {
                    attributes: Some(cri::ContainerAttributes { id: "main-0".to_owned(), ..Default::default() }),
                    cpu: Some(cri::CpuUsage { usage_core_nano_seconds: used(5), ..Default::default() }),
                    writable_layer: Some(cri::FilesystemUsage { used_bytes: used(4096), ..Default::default() }),
                    ..Default::default()
                }],
            }),
            "ImageFsInfo" => say(&cri::ImageFsInfoResponse {
                image_filesystems: vec![cri::FilesystemUsage {
                    fs_id: Some(cri::FilesystemIdentifier { mountpoint: mount.clone() }),
                    used_bytes: used(77),
                    ..Default::default()
                }],
                ..Default::default()
            }),
            _ => Err(Status::unimplemented(method.to_owned())),
        }
    }));
    let runtime =
        Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
    let stats = Stats::new(StatsSource {
        node_name: "node".to_owned(),
        layout: crate::cgroups::Hierarchies::detect().unwrap().layout,
        proc: "/proc".into(),
        system: Vec::new(),
        folders: Folders { root: dir.path().to_owned(), pod_logs: dir.path().join("logs") },
        volume_period: Some(Duration::from_secs(60)),
        runtime,
        snapshots: Arc::new(OnePod),
        ooms: OomCounts::default(),
    });
    Node { stats, asked, _dir: dir }
}

#[tokio::test]
async fn the_first_answer_has_rates_and_disks() {
    let node = node(false);
    let json = String::from_utf8(node.stats.summary(false).await.unwrap()).unwrap();
    assert!(json.starts_with("{\n \"node\": {\n  \"nodeName\": \"node\","), "{json}");
    let summary: Value = serde_json::from_str(&json).unwrap();
    assert!(summary["node"]["cpu"]["usageNanoCores"].is_u64(), "{json}");
    assert_eq!(summary["node"]["runtime"]["imageFs"]["usedBytes"], 77);
    assert_eq!(summary["pods"][0]["containers"][0]["rootfs"]["usedBytes"], 4096);
    assert_eq!(summary["pods"][0]["containers"][0]["cpu"]["usageCoreNanoSeconds"], 5);
}

#[tokio::test]
async fn requests_within_the_period_share_a_sample() {
    let node = node(false);
    let first = node.stats.resource_metrics().await;
    assert_eq!(node.asked.load(Ordering::Relaxed), 1);
    assert_eq!(node.stats.resource_metrics().await, first);
    assert_eq!(node.asked.load(Ordering::Relaxed), 1, "measured once");
    let both = tokio::join!(node.stats.summary(false), node.stats.summary(false));
    assert!(both.0.is_ok() && both.0 == both.1, "concurrent requests share a sample");
}

#[tokio::test]
async fn errors_of_the_runtime_are_reported() {
    let node = node(true);
    let error = node.stats.summary(true).await.unwrap_err().to_string();
    assert_eq!(error, "failed to list pod stats: rpc error: code = Unknown desc = broken");
    let families = node.stats.resource_metrics().await;
    assert_eq!((families.len(), families[0].name()), (1, "resource_scrape_error"));
}
