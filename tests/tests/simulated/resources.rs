//! Resources of pods on a whole simulated node: what the runtime is called with, and what the cgroups of pods get.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use keblet::cgroups::CgroupName;
use keblet::cgroups::Cgroups;
use keblet::cgroups::Driver;
use keblet::cgroups::Layout;
use keblet::model::Pod;
use keblet::workers::generate::MemoryQos;
use keblet::workers::generate::ResourceSettings;
use keblet::workers::generate::Swap;
use keblet_tests::cri::*;
use keblet_tests::node::{Agent, node, pod};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(60);
const GIB: i64 = 1 << 30;

/// Hierarchies of cgroup v1 in a folder, where writing a value creates its file; cgroup v2 needs files of the kernel.
fn cgroups(folder: &Path) -> Cgroups {
    let controllers = ["cpu", "memory", "pids", "hugetlb"].map(|name| (name.to_owned(), folder.join(name)));
    controllers.iter().for_each(|(_, mount)| std::fs::create_dir(mount).expect("a folder"));
    let layout = Layout::V1 { controllers: controllers.into(), unified: None };
    Cgroups::new(layout, Driver::Cgroupfs, CgroupName::default()).expect("cgroupfs")
}

fn settings() -> ResourceSettings {
    ResourceSettings {
        cfs_period: Some(100_000),
        memory_capacity: 16 * GIB,
        hugepage_sizes: vec![2 << 20],
        page_size: 4096,
        cgroup_v2: true,
        protects_memory: true,
        swap: Swap::Limited { node_swap: 4 * GIB },
        memory_qos: Some(MemoryQos { tiered: true, throttling_factor: Some(0.5) }),
        pod_pids_limit: Some(77),
        ..ResourceSettings::default()
    }
}

fn with_resources(name: &str, resources: Value) -> Pod {
    // Static pods are critical, and get no swap.
    let mut pod = pod(name).running("main", "run").from_api().build().as_ref().clone();
    let spec = pod.spec.as_mut().expect("a spec");
    spec.containers[0].resources = Some(serde_json::from_value(resources).expect("resources"));
    Arc::new(pod)
}

async fn until_running(sim: &SimRuntime, name: &'static str) {
    let running = sim.until("it runs", SOON, move |trace: &Trace| trace.live(name, "main").is_some()).await;
    running.unwrap_or_else(|timed_out| panic!("{timed_out}"));
}

fn unified(sim: &SimRuntime, name: &str) -> BTreeMap<String, String> {
    let status = sim.statuses(name).pop().expect("a container");
    let linux = status.resources.and_then(|resources| resources.linux).expect("resources");
    linux.unified.into_iter().collect()
}

fn map<const N: usize>(entries: [(&str, String); N]) -> BTreeMap<String, String> {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

#[tokio::test(start_paused = true)]
async fn the_runtime_gets_protection_swap_and_group_kill_by_qos_class() {
    let (sim, folder) = node();
    let tree = tempfile::tempdir().expect("a folder");
    let same = json!({ "cpu": "500m", "memory": "1Gi" });
    let pods = vec![
        with_resources("guaranteed", json!({ "requests": same, "limits": same })),
        with_resources("burstable", json!({ "requests": { "memory": "1Gi" }, "limits": { "memory": "2Gi" } })),
        with_resources("best-effort", json!({})),
    ];
    let _agent = Agent::start_with_cgroups(&sim, folder.path(), pods, cgroups(tree.path()), settings());
    for name in ["guaranteed", "burstable", "best-effort"] {
        until_running(&sim, name).await;
    }
    let group = ("memory.oom.group", "1".to_owned());
    let expected = map([
        group.clone(),
        ("memory.min", GIB.to_string()),
        ("memory.low", "0".to_owned()),
        ("memory.swap.max", "0".to_owned()),
    ]);
    assert_eq!(unified(&sim, "guaranteed"), expected);
    let expected = map([
        group.clone(),
        ("memory.min", "0".to_owned()),
        ("memory.low", GIB.to_string()),
        ("memory.high", (GIB * 3 / 2).to_string()),
        ("memory.swap.max", (GIB / 4).to_string()),
    ]);
    assert_eq!(unified(&sim, "burstable"), expected);
    let none = ["memory.min", "memory.low", "memory.swap.max"].map(|key| (key, "0".to_owned()));
    let expected: BTreeMap<String, String> = map(none).into_iter().chain(map([group])).collect();
    assert_eq!(unified(&sim, "best-effort"), expected);
}

#[tokio::test(start_paused = true)]
async fn pods_get_cgroups_with_their_limits_and_an_agent_restart_changes_none() {
    let (sim, folder) = node();
    let tree = tempfile::tempdir().expect("a folder");
    let own = cgroups(tree.path());
    let limits = json!({ "cpu": "250m", "memory": "64Mi", "hugepages-2Mi": "4Mi" });
    let pods = vec![with_resources("web", json!({ "requests": limits, "limits": limits }))];
    let agent = Agent::start_with_cgroups(&sim, folder.path(), pods.clone(), own.clone(), settings());
    until_running(&sim, "web").await;
    let linux = sim.sandbox_configs("web").pop().and_then(|config| config.linux).expect("linux");
    assert_eq!(linux.cgroup_parent, "/kubepods/podweb-uid");
    assert_eq!(linux.resources.expect("resources").unified["memory.oom.group"], "1");

    let values = [
        ("cpu/kubepods/podweb-uid/cpu.shares", "256"),
        ("cpu/kubepods/podweb-uid/cpu.cfs_quota_us", "25000"),
        ("memory/kubepods/podweb-uid/memory.limit_in_bytes", "67108864"),
        ("pids/kubepods/podweb-uid/pids.max", "77"),
        ("hugetlb/kubepods/podweb-uid/hugetlb.2MB.limit_in_bytes", "4194304"),
    ];
    for (file, value) in values {
        assert_eq!(std::fs::read_to_string(tree.path().join(file)).expect(file), value, "{file}");
    }

    // A start that the agent's end interrupts is another matter.
    tokio::time::sleep(Duration::from_secs(10)).await;
    // Values of an existing cgroup are those that were set last.
    let changed = tree.path().join(values[0].0);
    std::fs::write(&changed, "999").expect("written");
    let ran = sim.trace(|trace| trace.history("web", "main").count());
    drop(agent);
    let _next = Agent::start_with_cgroups(&sim, folder.path(), pods, own, settings());
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(std::fs::read_to_string(&changed).expect("text"), "999");
    assert_eq!(sim.trace(|trace| trace.history("web", "main").count()), ran, "nothing was started again");
}
