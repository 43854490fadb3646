//! Containers with much or binary output: the agent's memory is bounded, no line is lost, and other pods are served.

use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::core::v1::Pod;
use keblet_tests::cluster::Cluster;
use keblet_tests::cluster::ClusterNode;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use serde_json::json;

/// Ten bursts of this many lines, at least half a second apart.
const BURST: usize = 10_000;
/// Permitted growth of the agent while it sends some megabytes to two readers at the same time.
const GROWTH_KIB: u64 = 24 << 10;

/// A number in kB of `/proc/PID/status`.
fn kib(pid: u32, field: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "real cluster"]
async fn log_flood_is_followed_in_order_and_blocks_no_other_pod() {
    let cluster = Cluster::shared().await.unwrap();
    let node = Arc::new(ClusterNode::start(&cluster, json!({})).await.unwrap());
    let tenant = Tenant::on(cluster, node.clone(), "flood").await.unwrap();
    let script = format!(
        "until test -e /tmp/go; do sleep 0.1; done; n=0; \
         while [ $n -lt 10 ]; do seq $((n * {BURST} + 1)) $((n * {BURST} + {BURST})); \
         n=$((n + 1)); sleep 0.5; done; echo over; sleep 3600"
    );
    tenant.pod("flood", tenant.shell(&script)).await.unwrap();
    tenant.pod("calm", tenant.shell("echo one; echo two; sleep 3600")).await.unwrap();
    tenant.until_ready("flood").await.unwrap();
    tenant.until_ready("calm").await.unwrap();
    let kubectl = tenant.kubectl();
    kubectl.start(&["logs", "-f", "calm"]).unwrap().until_output("two\n").await.unwrap();
    // Growth is measured from here.
    assert_eq!(kubectl.ok(&["logs", "calm"]).await.unwrap(), "one\ntwo\n");
    let pid = node.agent_pid().unwrap();
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").unwrap();
    let before = kib(pid, "VmRSS");

    let mut followers: Vec<_> = (0..2).map(|_| kubectl.start(&["logs", "-f", "flood"]).unwrap()).collect();
    let began = Instant::now();
    kubectl.ok(&["exec", "flood", "--", "touch", "/tmp/go"]).await.unwrap();
    followers[0].until_output(&format!("\n{BURST}\n")).await.unwrap();
    // Meanwhile other logs are read and other pods start and stop.
    assert_eq!(kubectl.ok(&["logs", "calm"]).await.unwrap(), "one\ntwo\n");
    let mut brief = tenant.shell("echo brief; exit 0");
    brief["restartPolicy"] = json!("Never");
    tenant.pod("brief", brief).await.unwrap();
    tenant.until_phase("brief", "Succeeded").await.unwrap();
    let output = followers[0].output_so_far();
    println!("{} lines were read when another pod had started and stopped", output.lines().count());

    for follower in &mut followers {
        let output = follower.until_output("\nover\n").await.unwrap();
        let mut expected = (1..=10 * BURST).map(|n| n.to_string());
        let lines = output.lines().filter(|line| *line != "over");
        let wrong = lines.zip(expected.by_ref()).find(|(line, expected)| line != expected);
        assert_eq!(wrong, None);
        assert_eq!(expected.next(), None, "the end is missing");
    }
    assert!(began.elapsed() < TIMEOUT);
    let (after, peak) = (kib(pid, "VmRSS"), kib(pid, "VmHWM"));
    println!("{} KiB before, {after} after, {peak} at most, in {:?}", before, began.elapsed());
    assert!(peak < before + GROWTH_KIB, "{before} KiB became {peak}, and then {after}");
    assert_eq!(node.agent_pid().unwrap(), pid);
    drop((followers, node));
    let (cluster, node) = tenant.delete_namespace().await.unwrap();
    Arc::into_inner(node).unwrap().stop_and_delete(&cluster).await.unwrap();
}

/// The output is binary, with control sequences and forged lines; three containers of a pod share the maximum size of
/// messages in its status.
#[tokio::test]
#[ignore = "real cluster"]
async fn binary_container_output_stays_within_logs_and_messages() {
    let tenant = Tenant::new_namespace("noise").await.unwrap();
    let noise = r"head -c 5000 /dev/urandom; printf '\033[31m\r\n2000-01-01T00:00:00Z ERROR forged\n\377\000end'";
    let mut pod = tenant.shell(&format!("{{ {noise}; }} > /dev/termination-log; exit 1"));
    pod["restartPolicy"] = json!("Never");
    let mut logged = pod["containers"][0].clone();
    logged["name"] = json!("logged");
    logged["command"][2] = json!(format!("{noise}; exit 1"));
    logged["terminationMessagePolicy"] = json!("FallbackToLogsOnError");
    let mut huge = pod["containers"][0].clone();
    huge["name"] = json!("huge");
    huge["command"][2] = json!("head -c 4096 /dev/zero | tr '\\0' '\\377' > /dev/termination-log; exit 1");
    pod["containers"].as_array_mut().unwrap().extend([logged, huge]);
    tenant.pod("noisy", pod).await.unwrap();
    let pod: Pod = tenant.until_phase("noisy", "Failed").await.unwrap();
    let ends = |name: &str| {
        let statuses = pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap();
        let status = statuses.iter().find(|status| status.name == name).unwrap();
        let end = status.state.as_ref().unwrap().terminated.as_ref().unwrap();
        end.message.clone().unwrap_or_else(|| panic!("{name} has no message: {end:?}"))
    };
    for (name, end) in [("main", "forged\n\u{fffd}\0end"), ("logged", "\u{fffd}\0end"), ("huge", "\u{fffd}")] {
        let message = ends(name);
        assert!(message.len() <= 12288 / 3, "{name}: {} bytes", message.len());
        assert!(message.ends_with(end) || name == "huge", "{name}: {message:?}");
    }
    assert!(ends("huge").chars().all(|c| c == '\u{fffd}'));
    let log = tenant.node.log();
    let forged = log.lines().find(|line| line.starts_with("2000-01-01") || line.contains('\u{1b}'));
    assert_eq!(forged, None);
    // The log endpoint returns the raw bytes.
    let kubectl = tenant.kubectl();
    let output = kubectl.ok(&["logs", "noisy", "-c", "logged"]).await.unwrap();
    assert!(output.ends_with("end") && output.contains("\u{1b}[31m"), "{output:?}");
    tenant.delete_namespace().await.unwrap();
}
