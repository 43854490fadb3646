//! Which pod is evicted first, with which message, and what is reclaimed before.

use serde_json::json;

use super::super::decision::Reclaim;
use super::super::decision::victim;
use super::super::message::notice;
use super::super::pace;
use super::super::ranking::order;
use super::super::readings::DiskLayout;
use super::super::readings::Resource;
use super::super::readings::for_layout;
use super::*;

fn names(pods: &[Pod]) -> Vec<String> {
    pods.iter().map(|pod| pod_ref(pod).name.to_string()).collect()
}

fn ranked(signal: Signal, layout: DiskLayout, usage_of: &[(&Pod, Option<PodUsage>)]) -> Vec<String> {
    let usage = usage_of.iter().filter_map(|(pod, usage)| Some((pod_ref(pod).uid, usage.clone()?))).collect();
    let pods = usage_of.iter().map(|(pod, _)| (*pod).clone()).collect();
    names(&order(signal, layout, pods, &usage))
}

fn prior(name: &str, priority: i32, request: &str) -> Pod {
    let containers = json!([{"name": "main", "resources": {"requests": {"memory": request}}}]);
    pod(name, json!({"priority": priority, "containers": containers}))
}

#[test]
fn memory_ranks_by_request_then_priority_then_excess() {
    let within_low = prior("within-low", -10, "1Gi");
    let within = prior("within", 0, "1Gi");
    let above_high = prior("above-high", 100, "100Mi");
    let above_much = prior("above-much", 0, "100Mi");
    let above_little = prior("above-little", 0, "400Mi");
    let unmeasured = prior("unmeasured", 1000, "1Gi");
    let table = [
        (&within, Some(memory("900Mi"))),
        (&within_low, Some(memory("10Mi"))),
        (&above_high, Some(memory("800Mi"))),
        (&above_little, Some(memory("500Mi"))),
        (&above_much, Some(memory("450Mi"))),
        (&unmeasured, None),
    ];
    for signal in [Signal::MemoryAvailable, Signal::AllocatableMemoryAvailable] {
        let expected = ["unmeasured", "above-much", "above-little", "above-high", "within-low", "within"];
        assert_eq!(ranked(signal, DiskLayout::Shared, &table), expected);
    }
}

#[test]
fn overhead_counts_only_beside_a_request() {
    let with_overhead = |name: &str, requests: Value| {
        let containers = json!([{"name": "main", "resources": {"requests": requests}}]);
        pod(name, json!({"overhead": {"memory": "500Mi"}, "containers": containers}))
    };
    let (none, some) = (with_overhead("none", json!({})), with_overhead("some", json!({"memory": "10Mi"})));
    let plain = prior("plain", 0, "10Mi");
    let table = [(&some, Some(memory("400Mi"))), (&plain, Some(memory("50Mi"))), (&none, Some(memory("100Mi")))];
    assert_eq!(ranked(Signal::MemoryAvailable, DiskLayout::Shared, &table), ["none", "plain", "some"]);
}

#[test]
fn memory_that_was_not_measured_counts_as_none() {
    let (above, within) = (prior("above", 100, "100Mi"), prior("within", 0, "1Gi"));
    let (without, unmeasured) = (prior("without", -10, "1Mi"), prior("unmeasured", 1000, "1Gi"));
    let table = [
        (&without, Some(PodUsage::default())),
        (&within, Some(memory("10Mi"))),
        (&above, Some(memory("800Mi"))),
        (&unmeasured, None),
    ];
    let expected = ["unmeasured", "above", "without", "within"];
    assert_eq!(ranked(Signal::MemoryAvailable, DiskLayout::Shared, &table), expected);
}

#[test]
fn process_ids_rank_by_priority_then_number() {
    let count = |count| Some(PodUsage { processes: Some(count), ..memory("1Gi") });
    let (few, many, low) = (prior("few", 0, "1Mi"), prior("many", 0, "1Gi"), prior("low", -1, "1Gi"));
    let (unmeasured, without) = (prior("unmeasured", 0, "1Gi"), prior("without", 0, "1Gi"));
    let table =
        [(&few, count(3)), (&many, count(300)), (&low, count(1)), (&unmeasured, None), (&without, Some(memory("1Gi")))];
    let expected = ["low", "unmeasured", "many", "few", "without"];
    assert_eq!(ranked(Signal::PidAvailable, DiskLayout::Shared, &table), expected);
}

#[test]
fn disks_rank_by_what_is_on_them() {
    let [rootfs, logs, data] = ["rootfs", "logs", "data"].map(|name| pod(name, json!({})));
    let table = [
        (&rootfs, Some(disks("90Mi", "1Mi", "1Mi"))),
        (&logs, Some(disks("2Mi", "50Mi", "2Mi"))),
        (&data, Some(disks("3Mi", "3Mi", "80Mi"))),
    ];
    for (signal, layout, expected) in [
        (Signal::NodeFsAvailable, DiskLayout::Shared, ["rootfs", "data", "logs"]),
        (Signal::ImageFsAvailable, DiskLayout::Shared, ["rootfs", "data", "logs"]),
        (Signal::NodeFsAvailable, DiskLayout::Dedicated, ["data", "logs", "rootfs"]),
        (Signal::ImageFsAvailable, DiskLayout::Dedicated, ["rootfs", "data", "logs"]),
        (Signal::ContainerFsAvailable, DiskLayout::Dedicated, ["rootfs", "data", "logs"]),
        (Signal::NodeFsAvailable, DiskLayout::Split, ["rootfs", "data", "logs"]),
        // Images belong to no pod, so that all pods have the same usage of them.
        (Signal::ImageFsAvailable, DiskLayout::Split, ["data", "logs", "rootfs"]),
    ] {
        assert_eq!(ranked(signal, layout, &table), expected, "{signal} {layout:?}");
    }
    let modest = requesting("modest", "ephemeral-storage", "1Gi");
    let greedy = requesting("greedy", "ephemeral-storage", "10Mi");
    let table = [(&modest, Some(disks("500Mi", "0", "0"))), (&greedy, Some(disks("20Mi", "0", "0")))];
    assert_eq!(ranked(Signal::NodeFsAvailable, DiskLayout::Shared, &table), ["greedy", "modest"]);
}

#[test]
fn inodes_have_no_request() {
    let inodes = |count| {
        let mut usage = disks("1Mi", "0", "0");
        usage.volumes.insert("data".to_owned(), FsUsage { bytes: 0, inodes: count });
        Some(usage)
    };
    let [few, many] = ["few", "many"].map(|name| pod(name, json!({})));
    let table = [(&few, inodes(10)), (&many, inodes(1000))];
    assert_eq!(ranked(Signal::NodeFsInodesFree, DiskLayout::Shared, &table), ["many", "few"]);
    let resources = json!({"requests": {"ephemeral-storage": "1Gi"}});
    let asking = pod("asking", json!({"priority": -1, "containers": [{"name": "main", "resources": resources}]}));
    let table = [(&few, inodes(10)), (&many, inodes(1000)), (&asking, inodes(5))];
    let expected = ["asking", "many", "few"];
    assert_eq!(ranked(Signal::NodeFsInodesFree, DiskLayout::Shared, &table), expected, "bytes permit no inodes");
    let asking = requesting("asking", "ephemeral-storage", "500");
    let table = [(&asking, inodes(1000)), (&few, inodes(600))];
    let expected = ["few", "asking"];
    assert_eq!(ranked(Signal::NodeFsInodesFree, DiskLayout::Shared, &table), expected, "as upstream counts the rest");
}

#[test]
fn critical_pods_are_spared() {
    let critical = prior("critical", 2_000_000_000, "1Mi");
    let (mut fixed, small) = (Pod::unwrap_or_clone(prior("fixed", -100, "1Mi")), prior("small", 0, "1Gi"));
    let source = ("kubernetes.io/config.source".to_owned(), "file".to_owned());
    fixed.metadata.annotations = Some([source].into());
    let fixed = Pod::new(fixed);
    let due = configured(json!({"evictionHard": {"memory.available": "100Mi"}}));
    let low = readings(Instant::now(), &[(Signal::MemoryAvailable, "1Mi")]);
    let usage = usage([(&critical, memory("1Gi")), (&fixed, memory("1Gi")), (&small, memory("1Mi"))]);
    let choose = |pods: &[&Pod]| victim(&due, &low, pods.iter().map(|pod| (*pod).clone()).collect(), &usage, 0);
    let (chosen, spared) = choose(&[&small, &critical, &fixed]);
    assert_eq!(chosen.map(|victim| names(&[victim.pod])), Some(vec!["small".to_owned()]));
    assert_eq!(names(&spared), ["fixed", "critical"]);
    let (none, spared) = choose(&[&critical, &fixed]);
    assert_eq!((none, spared.len()), (None, 2));
}

#[test]
fn soft_thresholds_give_pods_time() {
    let soft =
        json!({"evictionSoft": {"memory.available": "30%"}, "evictionSoftGracePeriod": {"memory.available": "1m"}});
    let hard = json!({"evictionHard": {"memory.available": "30%"}});
    let low = readings(Instant::now(), &[(Signal::MemoryAvailable, "1Mi")]);
    let grace = |fields: &Value, own: Option<i64>, max: i64| {
        let pod = pod("p", json!({"terminationGracePeriodSeconds": own}));
        victim(&configured(fields.clone()), &low, vec![pod], &HashMap::new(), max).0.expect("a victim").grace
    };
    for (own, max, expected) in
        [(Some(30), 0, 1), (Some(30), 10, 10), (Some(5), 10, 5), (Some(0), 10, 1), (None, 10, 10)]
    {
        assert_eq!(grace(&soft, own, max), expected, "{own:?} {max}");
        assert_eq!(grace(&hard, own, max), 1);
    }
}

#[test]
fn pods_evicted_at_once_for_memory_are_suspended_unless_they_have_hooks() {
    let soft =
        json!({"evictionSoft": {"memory.available": "30%"}, "evictionSoftGracePeriod": {"memory.available": "1m"}});
    let (memory, disk) = (json!({"memory.available": "30%"}), json!({"nodefs.available": "30%"}));
    let (memory, disk) = (json!({ "evictionHard": memory }), json!({ "evictionHard": disk }));
    let hook = json!({"exec": {"command": ["drain"]}});
    let hooked = json!({"containers": [{"name": "main", "lifecycle": {"preStop": hook}}]});
    let sidecar = json!([{"name": "side", "restartPolicy": "Always", "lifecycle": {"preStop": hook}}]);
    let started = json!({"containers": [{"name": "main", "lifecycle": {"postStart": hook}}]});
    let low = readings(Instant::now(), &[(Signal::MemoryAvailable, "1Mi"), (Signal::NodeFsAvailable, "1Mi")]);
    for (fields, spec, suspended) in [
        (&memory, json!({}), true),
        (&memory, hooked, false),
        (&memory, json!({ "initContainers": sidecar }), false),
        (&memory, started, true),
        (&memory, json!({"runtimeClassName": "kata"}), false),
        (&memory, json!({"runtimeClassName": ""}), true),
        (&disk, json!({}), false),
        (&soft, json!({}), false),
    ] {
        let (due, pods) = (configured(fields.clone()), vec![pod("p", spec)]);
        let victim = victim(&due, &low, pods, &HashMap::new(), 10).0.expect("a victim");
        assert_eq!(victim.suspend, suspended, "{fields}");
    }
}

#[test]
fn messages_are_those_of_the_kubelet() {
    let due = configured(json!({"evictionHard": {"memory.available": "100Mi", "nodefs.available": "200Mi"}}));
    let low = readings(Instant::now(), &[(Signal::MemoryAvailable, "90Mi"), (Signal::NodeFsAvailable, "150Mi")]);
    let plain = requesting("web", "memory", "100Mi");
    let of = |resource, pod: &Pod, usage: Option<&PodUsage>| notice(resource, pod, usage, &due, &low);
    let low_memory = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi. ";
    assert_eq!(of(Resource::Memory, &plain, None).message, low_memory);
    assert!(of(Resource::Memory, &plain, None).annotations.is_empty());
    let above = of(Resource::Memory, &plain, Some(&memory("300Mi")));
    let line = "Container main was using 300Mi, request is 100Mi, has larger consumption of memory. ";
    assert_eq!(above.message, format!("{low_memory}{line}"));
    let annotations: Vec<(&str, &str)> = above.annotations.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    let expected =
        [("offending_containers", "main"), ("offending_containers_usage", "300Mi"), ("starved_resource", "memory")];
    assert_eq!(annotations, expected);
    let within = of(Resource::Memory, &plain, Some(&memory("50Mi")));
    assert_eq!((within.message.as_str(), within.annotations["offending_containers"].as_str()), (low_memory, ""));
    let with_pod_level = pod("web", json!({"resources": {"requests": {"memory": "1Gi"}}}));
    let message = of(Resource::Memory, &with_pod_level, Some(&memory("300Mi"))).message;
    let of_pod = "Pod web was using 300Mi, request is 1Gi, has larger consumption of memory. ";
    let of_container = "Container main was using 300Mi, request is 0, has larger consumption of memory. ";
    assert_eq!(message, format!("{low_memory}{of_pod}{of_container}"));
    let disk = of(Resource::EphemeralStorage, &plain, Some(&disks("30Mi", "12Mi", "1Gi"))).message;
    assert_eq!(
        disk,
        "The node was low on resource: ephemeral-storage. Threshold quantity: 200Mi, available: 150Mi. Container main was \
         using 42Mi, request is 0, has larger consumption of ephemeral-storage. "
    );
    let pids = of(Resource::Pids, &plain, Some(&memory("300Mi"))).message;
    assert_eq!(pids, "The node was low on resource: pids. ");
}

#[test]
fn reclaim_depends_on_the_file_systems() {
    let all = Reclaim { containers: true, images: true };
    let (containers, images, none) =
        (Reclaim { images: false, ..all }, Reclaim { containers: false, ..all }, Reclaim::default());
    use DiskLayout::Dedicated;
    use DiskLayout::Shared;
    use DiskLayout::Split;
    for (signal, layout, expected) in [
        (Signal::MemoryAvailable, Shared, none),
        (Signal::PidAvailable, Shared, none),
        (Signal::NodeFsAvailable, Shared, all),
        (Signal::ImageFsInodesFree, Shared, all),
        (Signal::NodeFsAvailable, Dedicated, none),
        (Signal::ImageFsAvailable, Dedicated, all),
        (Signal::ContainerFsAvailable, Dedicated, all),
        (Signal::NodeFsInodesFree, Split, containers),
        (Signal::ContainerFsAvailable, Split, containers),
        (Signal::ImageFsAvailable, Split, images),
    ] {
        assert_eq!(Reclaim::of(signal, layout), expected, "{signal} {layout:?}");
    }
}

#[test]
fn thresholds_of_containerfs_follow_from_others() {
    let hard = json!({"evictionHard": {
        "nodefs.available": "10%", "imagefs.available": "20%", "containerfs.available": "90%",
    }});
    let values = |layout| {
        let all = for_layout(&configured(hard.clone()), layout);
        let of = all.iter().filter(|threshold| threshold.signal == Signal::ContainerFsAvailable);
        of.map(|threshold| threshold.value.of(Amount::bytes(1000)).value()).collect::<Vec<_>>()
    };
    assert_eq!(values(DiskLayout::Shared), [100]);
    assert_eq!(values(DiskLayout::Split), [100]);
    assert_eq!(values(DiskLayout::Dedicated), [200]);
}

#[test]
fn the_signals_are_read_more_often_the_less_memory_is_left() {
    let thresholds = configured(json!({"evictionHard": {"memory.available": "100Mi", "nodefs.available": "10%"}}));
    let pause = |signal, available, is_met| {
        pace::pause(&thresholds, &readings(Instant::now(), &[(signal, available)]), is_met).as_millis()
    };
    let memory = Signal::MemoryAvailable;
    assert_eq!(pause(memory, "20Gi", false), 10_000);
    assert_eq!(pause(memory, "2148Mi", false), 2_000);
    assert_eq!(pause(memory, "110Mi", false), 100);
    assert_eq!(pause(memory, "99Mi", false), 100, "within a grace period");
    assert_eq!(pause(memory, "99Mi", true), 10_000, "no pod could be evicted");
    assert_eq!(pause(Signal::NodeFsAvailable, "110Mi", false), 10_000);
}
