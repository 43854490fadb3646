//! Registration, updates and their times.

use http::Method;
use serde_json::json;
use tokio::time::Instant;

use super::server::NODE;
use super::*;

const PATCH: &str = "PATCH /api/v1/nodes/n/status";
const POST: &str = "POST /api/v1/nodes";
const GET: &str = "GET /api/v1/nodes/n";

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

#[tokio::test(start_paused = true)]
async fn a_new_node_is_ready_at_once() {
    let mut bench = Bench::new(|config| {
        config.labels.insert("mine".to_owned(), "yes".to_owned());
        config.provider_id = Some("cloud://1".to_owned());
    });
    bench.start();
    pass(seconds(60)).await;
    assert_eq!(bench.server.calls(), [""; 0], "nothing is known of the runtime");
    let began = Instant::now();
    bench.runtime.send_replace(ready());
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(bench.ready().0, "True");
    assert!(began.elapsed() < Duration::from_millis(10));
    let asked = bench.server.asked();
    assert_eq!(asked[0].what, POST);
    let node = &asked[0].body;
    assert_eq!(node["metadata"]["labels"]["mine"], "yes");
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/hostname"], "n");
    assert_eq!(node["spec"]["providerID"], "cloud://1");
    assert_eq!(node["status"]["nodeInfo"]["containerRuntimeVersion"], "containerd://1.7");
    assert_eq!(node["status"]["nodeInfo"]["kubeletVersion"], "v1.36.3");
    assert_eq!(node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"], 10250);
    assert_eq!(node["status"]["capacity"]["memory"], "4Gi");
    assert_eq!(node["status"]["addresses"][0], json!({ "type": "InternalIP", "address": "192.0.2.7" }));
    assert_eq!(bench.addresses.borrow().ips, ["192.0.2.7"]);
    let events = bench.events();
    assert!(
        events.contains(&"NodeReady".to_owned()) && events.contains(&"NodeHasSufficientMemory".to_owned()),
        "{events:?}"
    );
    let text = bench.metrics.render().expect("metrics");
    assert!(text.contains("kubelet_node_startup_registration_duration_seconds 0"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn an_idle_node_reports_every_five_minutes() {
    let bench = Bench::settled(|_| {}).await;
    pass(seconds(3600)).await;
    let calls = bench.server.calls();
    assert!(calls.iter().all(|call| call == PATCH), "{calls:?}");
    // The first of them is due between half and one and a half periods after the start.
    assert!((11..=13).contains(&calls.len()), "{}", calls.len());
    assert!(bench.host.with(|script| script.image_lists) <= 14);
}

#[tokio::test(start_paused = true)]
async fn a_field_that_the_api_server_does_not_keep_is_not_sent_all_the_time() {
    let mut bench = Bench::new(|config| config.declared_features = Some(vec!["NewFeature".to_owned()]));
    bench.server.drop_field("declaredFeatures");
    bench.runtime.send_replace(ready());
    bench.start();
    pass(seconds(60)).await;
    let asked = bench.server.asked();
    assert_eq!(asked[0].body["status"]["declaredFeatures"], json!(["NewFeature"]));
    pass(seconds(3600)).await;
    let calls = bench.server.calls();
    assert!(calls.iter().all(|call| call == PATCH), "{calls:?}");
    assert!((11..=13).contains(&calls.len()), "{}", calls.len());
    bench.health.send_replace(vec!["PLEG is not healthy: x".to_owned()]);
    pass(seconds(60)).await;
    assert_eq!(bench.ready().0, "False", "other changes are sent at once");
    let sent = bench.server.asked();
    assert!((1..=2).contains(&sent.len()), "{sent:?}");
    let mut node = bench.server.get(NODE);
    node["status"]["capacity"]["memory"] = json!("1Gi");
    bench.server.put(NODE, node);
    bench.cache.offer(serde_json::from_value(bench.server.get(NODE)).expect("a node"));
    pass(seconds(11)).await;
    assert_eq!(bench.server.get(NODE)["status"]["capacity"]["memory"], "4Gi", "what another client has changed too");
}

#[tokio::test(start_paused = true)]
async fn registration_is_retried_until_it_succeeds() {
    let mut bench = Bench::new(|_| {});
    for code in [Some(500), Some(429), None, Some(503)] {
        bench.server.fail(Method::POST, code);
    }
    bench.runtime.send_replace(ready());
    bench.start();
    pass(seconds(40)).await;
    let calls = bench.server.calls();
    assert_eq!(calls.iter().filter(|call| *call == POST).count(), 5, "{calls:?}");
    assert_eq!(bench.ready().0, "True");
}

#[tokio::test(start_paused = true)]
async fn an_existing_node_is_reconciled() {
    for seen in [true, false] {
        let mut bench = Bench::new(|config| {
            config.labels.insert("mine".to_owned(), "not added".to_owned());
        });
        let existing = json!({
            "metadata": { "name": "n", "labels": { "kubernetes.io/os": "plan9", "theirs": "kept" }, "resourceVersion": "0" },
            "spec": { "taints": [{ "key": "kept", "effect": "NoSchedule" }], "podCIDRs": ["10.1.0.0/24"] },
            "status": { "conditions": [{ "type": "Ready", "status": "False" }, { "type": "Theirs", "status": "True" }] },
        });
        bench.server.put(NODE, existing);
        if seen {
            let node = serde_json::from_value(bench.server.get(NODE)).expect("a node");
            bench.cache.offer(node);
        }
        bench.runtime.send_replace(ready());
        bench.start();
        pass(seconds(1)).await;
        let node = bench.server.get(NODE);
        assert_eq!(node["metadata"]["labels"]["kubernetes.io/os"], "linux");
        assert_eq!(node["metadata"]["labels"]["theirs"], "kept");
        assert_eq!(node["metadata"]["labels"]["mine"], json!(null));
        assert_eq!(node["spec"]["taints"][0]["key"], "kept");
        assert_eq!(node["status"]["conditions"][1]["type"], "Theirs", "places are kept");
        assert_eq!(bench.ready().0, "True");
        let calls = bench.server.calls();
        let tried = if seen { [PATCH; 2].to_vec() } else { [POST, GET, PATCH, PATCH].to_vec() };
        assert_eq!(calls[..tried.len()], tried);
        assert_eq!(bench.host.with(|script| script.pod_cidrs.clone()), ["10.1.0.0/24"]);
        assert!(bench.events().contains(&"NodeReady".to_owned()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_of_a_kubelet_offers_no_devices_any_more() {
    let mut bench = Bench::new(|config| config.resources.devices = ["example.com/gpu".to_owned()].into());
    let amounts = json!({ "example.com/gpu": "2", "example.com/theirs": "5" });
    let existing = json!({
        "metadata": { "name": "n" }, "spec": {}, "status": { "capacity": amounts, "allocatable": amounts },
    });
    bench.server.put(NODE, existing);
    bench.runtime.send_replace(ready());
    bench.start();
    pass(seconds(1)).await;
    let status = bench.server.get(NODE)["status"].clone();
    for map in ["capacity", "allocatable"] {
        assert_eq!(status[map]["example.com/gpu"], "0", "{map}");
        assert_eq!(status[map]["example.com/theirs"], "5", "{map}");
    }
}

#[tokio::test(start_paused = true)]
async fn swap_that_was_turned_off_is_not_reported_any_more() {
    let mut bench = Bench::new(|_| {});
    let info = json!({ "swap": { "capacity": 8192 } });
    bench.server.put(NODE, json!({ "metadata": { "name": "n" }, "status": { "nodeInfo": info } }));
    bench.runtime.send_replace(ready());
    bench.start();
    pass(seconds(1)).await;
    let info = bench.server.get(NODE)["status"]["nodeInfo"].clone();
    assert_eq!((&info["bootID"], &info["swap"]), (&json!("b00t"), &json!(null)));
}

#[tokio::test(start_paused = true)]
async fn a_restart_of_the_agent_does_not_change_readiness() {
    for (within, expected) in [(seconds(2), "True"), (seconds(60), "False")] {
        let mut bench = Bench::new(|_| {});
        let existing = json!({
            "metadata": { "name": "n" }, "spec": {}, "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
        });
        bench.server.put(NODE, existing);
        bench.cache.offer(serde_json::from_value(bench.server.get(NODE)).expect("a node"));
        bench.health.send_replace(vec!["PLEG is not healthy: pleg has yet to be successful".to_owned()]);
        bench.runtime.send_replace(ready());
        bench.start();
        pass(within).await;
        assert_eq!(bench.ready().0, expected);
        bench.health.send_replace(Vec::new());
        pass(seconds(1)).await;
        let recorded = bench.events().contains(&"NodeNotReady".to_owned());
        assert_eq!((bench.ready().0.as_str(), recorded), ("True", expected == "False"));
    }
}

#[tokio::test(start_paused = true)]
async fn readiness_is_updated_at_once() {
    let bench = Bench::settled(|_| {}).await;
    let moment = Duration::from_millis(100);
    let error = "container runtime not ready: x".to_owned();
    bench.runtime.send_replace(RuntimeState::NotReady { error, network_error: None });
    pass(moment).await;
    assert_eq!(bench.ready(), ("False".to_owned(), "container runtime not ready: x".to_owned()));
    assert_eq!(bench.events(), ["NodeNotReady"]);
    bench.runtime.send_replace(ready());
    pass(moment).await;
    assert_eq!(bench.ready().0, "True");
    bench.health.send_replace(vec!["PLEG is not healthy: x".to_owned()]);
    pass(moment).await;
    assert_eq!(bench.ready().1, "PLEG is not healthy: x");
    bench.health.send_replace(Vec::new());
    bench.shutting_down.send_replace(true);
    pass(moment).await;
    assert_eq!(bench.ready().1, "node is shutting down");
    assert!(bench.server.calls().iter().all(|call| call == PATCH));
}

/// The node controller sets every condition to Unknown if a node does not report for a while.
#[tokio::test(start_paused = true)]
async fn a_node_that_comes_back_records_its_conditions() {
    let bench = Bench::settled(|_| {}).await;
    let mut node = bench.server.get(NODE);
    for condition in node["status"]["conditions"].as_array_mut().expect("conditions") {
        condition["status"] = json!("Unknown");
    }
    bench.server.put(NODE, node);
    bench.cache.offer(serde_json::from_value(bench.server.get(NODE)).expect("a node"));
    pass(seconds(11)).await;
    assert_eq!(bench.ready().0, "True");
    let expected = ["NodeHasSufficientMemory", "NodeHasNoDiskPressure", "NodeHasSufficientPID", "NodeReady"];
    assert_eq!(bench.events(), expected);
    pass(seconds(60)).await;
    assert_eq!(bench.events(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn volumes_in_use_are_reported_at_once() {
    let bench = Bench::settled(|_| {}).await;
    let reported = || bench.server.get(NODE)["status"]["volumesInUse"].clone();
    let moment = Duration::from_millis(100);
    bench
        .volumes_in_use
        .send_replace(Some(["kubernetes.io/iscsi/192.0.2.1:iqn.2001-04.com.example:a:0".to_owned()].into()));
    pass(moment).await;
    assert_eq!(reported(), serde_json::json!(["kubernetes.io/iscsi/192.0.2.1:iqn.2001-04.com.example:a:0"]));
    let known = bench.cache.current().and_then(|node| node.status.clone()?.volumes_in_use);
    assert_eq!(known.map(|names| names.len()), Some(1), "what the API server has is known to pods");
    bench.volumes_in_use.send_replace(Some([].into()));
    pass(moment).await;
    assert!(reported().is_null(), "{}", reported());
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_runtime_counts_after_half_a_minute() {
    let bench = Bench::settled(|_| {}).await;
    bench.runtime.send_replace(RuntimeState::Unreachable("refused".to_owned()));
    pass(seconds(29)).await;
    assert_eq!(bench.ready().0, "True");
    pass(Duration::from_millis(1500)).await;
    assert_eq!(bench.ready(), ("False".to_owned(), "container runtime is down".to_owned()));
    bench.runtime.send_replace(ready());
    pass(Duration::from_millis(100)).await;
    assert_eq!(bench.ready().0, "True");
}

#[tokio::test(start_paused = true)]
async fn a_failed_update_is_retried_five_times_with_a_fresh_node() {
    let bench = Bench::settled(|_| {}).await;
    for _ in 0..3 {
        bench.server.fail(Method::PATCH, Some(500));
    }
    bench.shutting_down.send_replace(true);
    pass(Duration::from_millis(200)).await;
    assert_eq!(bench.server.calls(), [PATCH, GET, PATCH, GET, PATCH, GET, PATCH]);
    assert_eq!(bench.ready().0, "False");
    for _ in 0..5 {
        bench.server.fail(Method::PATCH, Some(500));
    }
    bench.shutting_down.send_replace(false);
    pass(Duration::from_millis(200)).await;
    assert_eq!(bench.ready().0, "False", "five failures end the round");
    pass(seconds(11)).await;
    assert_eq!(bench.ready().0, "True", "the next round reports it");
}

/// A settled node that then has a field in the API server that cannot be decoded.
async fn undecodable() -> Bench {
    let bench = Bench::settled(|_| {}).await;
    let mut node = bench.server.get(NODE);
    node["metadata"]["creationTimestamp"] = json!("9999-12-31T23:59:59Z");
    bench.server.put(NODE, node);
    bench
}

#[tokio::test(start_paused = true)]
async fn a_status_whose_answer_cannot_be_decoded_is_sent_once() {
    let bench = undecodable().await;
    for (is_leaving, expected) in [(true, "False"), (false, "True")] {
        bench.shutting_down.send_replace(is_leaving);
        pass(seconds(60)).await;
        assert_eq!(bench.ready().0, expected);
        assert_eq!(bench.server.calls(), [PATCH], "{expected}");
    }
    assert_eq!(bench.retired.load(SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_failed_update_is_retried_although_the_fresh_node_cannot_be_decoded() {
    let bench = undecodable().await;
    bench.server.fail(Method::PATCH, Some(500));
    bench.shutting_down.send_replace(true);
    pass(Duration::from_millis(200)).await;
    assert_eq!(bench.server.calls(), [PATCH, GET, PATCH]);
    assert_eq!(bench.ready().0, "False");
}

#[tokio::test(start_paused = true)]
async fn an_update_without_response_times_out() {
    let bench = Bench::settled(|_| {}).await;
    bench.server.fail(Method::PATCH, None);
    bench.server.fail(Method::PATCH, None);
    bench.shutting_down.send_replace(true);
    pass(seconds(11)).await;
    assert_eq!(bench.retired.load(SeqCst), 0, "once does not retire the connections");
    pass(seconds(11)).await;
    assert_eq!(bench.ready().1, "node is shutting down");
    assert_eq!(bench.retired.load(SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn the_pod_cidr_is_set_in_the_runtime() {
    let bench = Bench::settled(|_| {}).await;
    bench.host.with(|script| script.cidr_failures = 1);
    let mut node = bench.server.get(NODE);
    node["spec"]["podCIDRs"] = json!(["10.1.0.0/24", "fd00::/64"]);
    bench.server.put(NODE, node);
    bench.cache.offer(serde_json::from_value(bench.server.get(NODE)).expect("a node"));
    pass(Duration::from_millis(100)).await;
    assert_eq!(bench.server.calls(), [PATCH], "a failure counts as a change");
    assert!(bench.host.with(|script| script.pod_cidrs.is_empty()));
    pass(seconds(11)).await;
    assert_eq!(bench.host.with(|script| script.pod_cidrs.clone()), ["10.1.0.0/24,fd00::/64"]);
    pass(seconds(60)).await;
    assert_eq!(bench.host.with(|script| script.pod_cidrs.len()), 1);
}

#[tokio::test(start_paused = true)]
async fn images_are_listed_after_a_change() {
    let bench = Bench::settled(|config| config.max_images = 1).await;
    let image = |id: &str, size| cri::Image {
        id: id.to_owned(),
        size,
        repo_tags: vec![format!("{id}:1")],
        ..Default::default()
    };
    bench.host.with(|script| script.images = vec![image("a", 1), image("b", 9)]);
    pass(seconds(60)).await;
    assert_eq!(bench.server.get(NODE)["status"]["images"], json!(null), "no change was signalled");
    bench.images.send_replace(1);
    pass(seconds(11)).await;
    assert_eq!(bench.server.get(NODE)["status"]["images"], json!([{ "names": ["b:1"], "sizeBytes": 9 }]));
}

#[tokio::test(start_paused = true)]
async fn a_cordon_is_recorded_although_the_status_is_unchanged() {
    let bench = Bench::settled(|_| {}).await;
    let mut node = bench.server.get(NODE);
    node["spec"]["unschedulable"] = json!(true);
    bench.server.put(NODE, node);
    bench.cache.offer(serde_json::from_value(bench.server.get(NODE)).expect("a node"));
    pass(Duration::from_millis(100)).await;
    assert_eq!(bench.events(), ["NodeNotSchedulable"]);
    assert_eq!(bench.server.calls(), [""; 0], "there is nothing to send");
}

#[tokio::test(start_paused = true)]
async fn removed_labels_are_restored() {
    let bench = Bench::settled(|_| {}).await;
    let mut node = bench.server.get(NODE);
    node["metadata"]["labels"] = json!({ "theirs": "kept" });
    node["status"]["capacity"] = json!({ "example.com/gpu": "2" });
    bench.server.put(NODE, node);
    bench.cache.offer(serde_json::from_value(bench.server.get(NODE)).expect("a node"));
    pass(seconds(11)).await;
    let node = bench.server.get(NODE);
    assert_eq!(node["metadata"]["labels"]["kubernetes.io/arch"], super::super::machine::architecture());
    assert_eq!(node["metadata"]["labels"]["theirs"], "kept");
    assert_eq!(node["status"]["capacity"]["memory"], "4Gi");
    assert_eq!(node["status"]["capacity"]["example.com/gpu"], "2");
}

#[tokio::test(start_paused = true)]
async fn extended_resources_that_others_have_set_outlive_the_agent_but_not_the_machine() {
    for (has_new_root, expected) in [(false, "4"), (true, "0")] {
        let mut bench = Bench::new(|config| config.has_new_root = has_new_root);
        let capacity = json!({ "example.com/dongle": "4" });
        bench.server.put(NODE, json!({ "metadata": { "name": "n" }, "status": { "capacity": capacity } }));
        bench.runtime.send_replace(ready());
        bench.start();
        pass(seconds(1)).await;
        let status = bench.server.get(NODE)["status"].clone();
        assert_eq!(status["capacity"]["example.com/dongle"], expected, "{has_new_root}");
        assert_eq!(status["allocatable"]["example.com/dongle"], expected, "{has_new_root}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_deleted_node_is_not_created_again() {
    let bench = Bench::settled(|_| {}).await;
    bench.server.delete(NODE);
    pass(seconds(30)).await;
    assert_eq!(bench.server.get(NODE), json!(null));
    assert!(bench.server.calls().iter().all(|call| call != POST), "only a start registers");
}

#[tokio::test(start_paused = true)]
async fn without_registration_a_node_is_only_updated() {
    let mut bench = Bench::new(|config| config.register = false);
    bench.runtime.send_replace(ready());
    bench.start();
    pass(seconds(20)).await;
    assert!(bench.server.calls().iter().all(|call| call == GET));
    assert_eq!(bench.ready().0, "");
    bench.server.put(NODE, json!({ "metadata": { "name": "n" }, "spec": {}, "status": {} }));
    pass(seconds(11)).await;
    assert_eq!(bench.ready().0, "True");
}

#[tokio::test(start_paused = true)]
async fn a_missing_node_is_requested_as_often_as_the_status_is_computed() {
    let mut bench = Bench::new(|config| config.register = false);
    bench.runtime.send_replace(ready());
    bench.start();
    pass(seconds(1)).await;
    assert_eq!(bench.server.calls(), [GET]);
    bench.health.send_replace(vec!["PLEG is not healthy: x".to_owned()]);
    bench.volumes_in_use.send_replace(Some(BTreeSet::new()));
    bench.shutting_down.send_replace(true);
    pass(seconds(60)).await;
    let calls = bench.server.calls();
    // Once for the changes, then every ten seconds.
    assert!(calls.iter().all(|call| call == GET) && (5..=7).contains(&calls.len()), "{} calls", calls.len());
    // What changed meanwhile is reported as soon as there is one.
    bench.server.put(NODE, json!({ "metadata": { "name": "n" }, "spec": {}, "status": {} }));
    bench.cache.offer(serde_json::from_value(bench.server.get(NODE)).expect("a node"));
    pass(Duration::from_millis(100)).await;
    assert_eq!(bench.ready().0, "False");
}

#[tokio::test(start_paused = true)]
async fn an_address_that_the_machine_does_not_have_is_not_passed_to_the_cloud_controller_manager() {
    let mut bench = Bench::new(|config| config.addresses.external_cloud = true);
    bench.host.with(|script| script.is_offline = true);
    bench.runtime.send_replace(ready());
    bench.start();
    pass(seconds(1)).await;
    let provided = || bench.server.get(NODE)["metadata"]["annotations"]["alpha.kubernetes.io/provided-node-ip"].clone();
    assert_eq!((bench.ready().0.as_str(), provided()), ("True", json!(null)));
    bench.host.with(|script| script.is_offline = false);
    pass(seconds(11)).await;
    assert_eq!(provided(), "192.0.2.7");
    bench.host.with(|script| script.is_offline = true);
    pass(seconds(3600)).await;
    assert_eq!(provided(), "192.0.2.7", "as it was when it was valid");
}

#[tokio::test(start_paused = true)]
async fn a_standalone_node_waits_for_network_and_runtime() {
    let host = TestHost::default();
    host.with(|script| (script.is_offline, script.cidr_failures) = (true, 3));
    let (sender, addresses) = watch::channel(NodeAddresses::default());
    let config = config(|config| config.pod_cidr = "10.1.0.0/24".to_owned());
    let running = tokio::spawn(standalone(config, host.clone(), sender));
    pass(seconds(30)).await;
    assert_eq!(host.with(|script| script.pod_cidrs.clone()), ["10.1.0.0/24"]);
    assert_eq!(addresses.borrow().ips, [""; 0]);
    host.with(|script| script.is_offline = false);
    pass(seconds(10)).await;
    assert_eq!(addresses.borrow().ips, ["192.0.2.7"]);
    running.await.expect("it has ended");
    assert_eq!(host.with(|script| script.pod_cidrs.len()), 1);
}
