//! Resizes of `spec.resources` alone (KEP-5419).

use super::*;

/// A container with a limit of its own, in a pod with this limit.
fn limited(generation: i64, memory: &str) -> Pod {
    let mut pod = Arc::unwrap_or_clone(sized("web", generation, both("250m", "64Mi"), json!({})));
    let of_pod = serde_json::from_value(both("500m", memory)).expect("resources");
    pod.spec.as_mut().expect("a spec").resources = Some(of_pod);
    Arc::new(pod)
}

#[tokio::test(start_paused = true)]
async fn memory_of_a_pod_is_taken_away_only_if_it_is_not_in_use() {
    let site = ResizableNode::new(4000);
    let (agent, ..) = site.start(vec![limited(1, "128Mi")]);
    site.until_running("web").await;
    let limit = site.file("memory", "kubepods/podweb-uid", "memory.limit_in_bytes");
    until_true("it has its limit", || limit.exists() && text(&limit) == (128 << 20).to_string()).await;
    let usage = limit.with_file_name("memory.usage_in_bytes");
    std::fs::write(&usage, (100 << 20).to_string()).expect("written");
    std::fs::write(usage.with_file_name("memory.stat"), "total_inactive_file 0\n").expect("written");

    agent.update(limited(2, "96Mi")).await;
    let failed = || condition(&agent, "web", "PodResizeInProgress").filter(|failed| failed.reason.is_some());
    until_true("it fails", || failed().is_some()).await;
    let message =
        "cannot decrease memory limits: attempting to set pod memory limit (100663296) below current usage (104857600)";
    assert_eq!(failed().and_then(|failed| failed.message).as_deref(), Some(message));
    assert_eq!(text(&limit), (128 << 20).to_string());

    std::fs::write(&usage, (20 << 20).to_string()).expect("written");
    until_true("it has shrunk", || text(&limit) == (96 << 20).to_string() && is_settled(&agent, "web")).await;
    assert_eq!((site.instances("web"), site.applied("web")[2]), (1, 64 << 20), "the container keeps its own");
}
