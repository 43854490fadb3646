//! A runtime that refuses what the Node's status loop needs of it.

use serde_json::json;
use tracing::Level;

use super::server::NODE;
use super::*;
use crate::model::testing::LogCount;

#[tokio::test(start_paused = true)]
async fn calls_that_are_refused_for_ever_are_repeated_with_growing_pauses_and_reported() {
    let bench = Bench::settled(|_| {}).await;
    let warned = LogCount::start("keblet::retry", Level::WARN);
    bench.events.lock().expect("not poisoned").take();
    let lists_before = bench.host.with(|script| {
        (script.cidr_failures, script.image_failures) = (1000, 1000);
        script.image_lists
    });
    let mut node = bench.server.get(NODE);
    node["spec"]["podCIDRs"] = json!(["10.1.0.0/24"]);
    bench.server.put(NODE, node);
    bench.cache.offer(serde_json::from_value(bench.server.get(NODE)).expect("a node"));
    bench.images.send_replace(1);
    let calls = || bench.host.with(|script| [script.image_lists - lists_before, 1000 - script.cidr_failures]);
    // A pass every 10 s.
    pass(Duration::from_secs(600)).await;
    let first = calls();
    pass(Duration::from_secs(600)).await;
    let second = calls();
    let [lists, cidrs] = [0, 1].map(|call| [first[call], second[call] - first[call]]);
    // The longest pause is 40 s to a minute: the Node shows old images meanwhile.
    assert!((10..=17).contains(&lists[0]) && (8..=15).contains(&lists[1]), "{lists:?}");
    // The longest pause is a minute to one and a half: without the CIDR no pod gets a network.
    assert!((9..=15).contains(&cidrs[0]) && (6..=11).contains(&cidrs[1]), "{cidrs:?}");
    assert_eq!(warned.lines(), 2);
    let mut stuck = bench.events.lock().expect("not poisoned").take();
    stuck.retain(|event| event.contains("OperationStuck"));
    stuck.sort();
    let expected = ["list_images of this node has failed for ", "set_pod_cidr of 10.1.0.0/24 has failed for "];
    assert_eq!(stuck.len(), 2, "{stuck:?}");
    assert!(stuck.iter().zip(expected).all(|(event, expected)| event.contains(expected)), "{stuck:?}");

    let image = cri::Image { id: "a".to_owned(), size: 1, repo_tags: vec!["a:1".to_owned()], ..Default::default() };
    bench.host.with(|script| {
        (script.cidr_failures, script.image_failures) = (0, 0);
        script.images = vec![image];
    });
    // The longest pause, and the pass after it.
    pass(Duration::from_secs(80)).await;
    assert_eq!(bench.server.get(NODE)["status"]["images"], json!([{ "names": ["a:1"], "sizeBytes": 1 }]));
    pass(Duration::from_secs(120)).await;
    assert_eq!(bench.host.with(|script| script.pod_cidrs.clone()), ["10.1.0.0/24"]);
}
