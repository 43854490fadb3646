//! Container statuses: states, counts, waiting reasons.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::api::core::v1::VolumeMount;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use super::Situation;
use super::container;
use super::story;
use crate::model::ContainerResources;
use crate::model::ContainerState;
use crate::model::ContainerStatus;
use crate::model::ContainerUser;
use crate::model::ProvenExit;
use crate::model::testing::*;
use crate::status::final_status::final_status;

fn one(policy: &str, containers: Vec<ContainerStatus>) -> Situation {
    Situation::new(pod(policy, &[], &["a"]), containers)
}

#[test]
fn containers_without_instance_are_waiting() {
    assert_eq!(story(&one("Always", vec![]).generate(), "a"), "waiting ContainerCreating after none, 0");
    let chain = Situation::new(with_ephemeral(pod("Always", &["one"], &["a"]), "debug"), vec![]).generate();
    for name in ["one", "a", "debug"] {
        assert_eq!(story(&chain, name), "waiting PodInitializing after none, 0");
    }
    let status = one("Always", vec![]).generate();
    let a = container(&status, "a");
    assert_eq!((a.image.as_str(), a.image_id.as_str(), &a.container_id), ("image", "", &None));
}

#[test]
fn instances_become_states() {
    let rows = [
        (vec![running("a", 0)], "running after none, 0"),
        (vec![status("a", 0, ContainerState::Created)], "waiting after none, 0"),
        (vec![status("a", 0, ContainerState::Unknown)], "waiting after none, 0"),
        (vec![cancelled("a", 0)], "waiting after none, 0"),
        (vec![running("a", 2), cancelled("a", 1), exited("a", 0, 3)], "running after terminated 3 Error, 2"),
        (vec![exited("a", 0, 3)], "terminated 3 Error after none, 0"),
        (vec![running("a", 1), exited("a", 0, 3)], "running after terminated 3 Error, 1"),
        (
            vec![exited("a", 2, 0), exited("a", 1, 3), exited("a", 0, 4)],
            "terminated 0 Completed after terminated 3 Error, 2",
        ),
    ];
    for (containers, expected) in rows {
        assert_eq!(story(&one("Always", containers.clone()).generate(), "a"), expected, "{containers:?}");
    }
}

#[test]
fn details_come_from_the_runtime() {
    let mut end = exited("a", 4, 3);
    end.message = "it broke".into();
    end.finished_at += 999_999_999;
    let status = one("Always", vec![end]).generate();
    let a = container(&status, "a");
    assert_eq!(a.container_id.as_deref(), Some("containerd://a-4"));
    assert_eq!((a.image.as_str(), a.image_id.as_str()), ("image", "image@sha256:1"));
    let terminated = a.state.as_ref().and_then(|state| state.terminated.as_ref()).expect("terminated");
    assert_eq!(terminated.container_id.as_deref(), Some("containerd://a-4"));
    assert_eq!(terminated.message.as_deref(), Some("it broke"));
    assert_eq!(terminated.started_at, Some(time(std::time::Duration::from_secs(400))));
    assert_eq!(terminated.finished_at, Some(time(std::time::Duration::from_secs(410))), "whole seconds");
}

#[test]
fn restart_counts_never_fall() {
    let counted = one("Always", vec![running("a", 5)]).then(vec![running("a", 2)]);
    assert_eq!(story(&counted.generate(), "a"), "running after none, 5");
    let off = counted.with(|s| s.gates.all_containers = false);
    assert_eq!(story(&off.generate(), "a"), "running after none, 2");
    let mut anew = running("a", 0);
    anew.id = "another".into();
    let recounted = one("Always", vec![exited("a", 0, 1)]).then(vec![anew]);
    assert_eq!(story(&recounted.generate(), "a"), "running after terminated 1 Error, 1");
}

#[test]
fn a_contradicted_proven_exit_counts_no_restart() {
    let contradicted = one("Always", vec![proven("a", 0, Some(1))]).then(vec![running("a", 0)]);
    assert_eq!(story(&contradicted.generate(), "a"), "running after none, 0");
}

#[test]
fn proven_exits_are_reported_as_far_as_known() {
    let oom = |mut status: ContainerStatus| {
        status.proven = status.proven.map(|proven| ProvenExit { oom_killed: true, ..proven });
        status
    };
    let rows = [
        (proven("a", 0, Some(0)), "terminated 0 Completed after none, 0"),
        (proven("a", 0, Some(2)), "terminated 2 Error after none, 0"),
        (oom(proven("a", 0, Some(137))), "terminated 137 OOMKilled after none, 0"),
        (proven("a", 0, None), "running after none, 0"),
    ];
    for (newest, expected) in rows {
        assert_eq!(story(&one("Always", vec![newest.clone()]).generate(), "a"), expected, "{newest:?}");
    }
    let awaited = one("Always", vec![proven("a", 0, None)]).generate();
    let a = container(&awaited, "a");
    assert_eq!((a.ready, a.started), (false, Some(false)), "its exit is known");
    let restarted = one("Always", vec![running("a", 1), proven("a", 0, None)]).generate();
    assert_eq!(story(&restarted, "a"), "running after none, 1");
}

/// After a restart of the agent the evidence is gone, but not the reason that followed from it.
#[test]
fn a_reason_that_an_earlier_process_decided_is_kept() {
    let with = |reason: &str, exit_observed: bool| {
        let exited = exited("a", 0, 137);
        ContainerStatus { reason: reason.into(), exit_observed, ..exited }
    };
    for (old, new, observed, expected) in [
        ("OOMKilled", "Error", false, "OOMKilled"),
        ("Error", "OOMKilled", false, "Error"),
        ("Error", "OOMKilled", true, "OOMKilled"),
        ("Error", "ContainerCannotRun", false, "ContainerCannotRun"),
    ] {
        let again = one("Never", vec![with(old, true)]).then(vec![with(new, observed)]);
        assert_eq!(story(&again.generate(), "a"), format!("terminated 137 {expected} after none, 0"));
        let restarted = one("Always", vec![with(old, true)]).then(vec![running("a", 1), with(new, observed)]);
        assert_eq!(story(&restarted.generate(), "a"), format!("running after terminated 137 {expected}, 1"));
    }
    let mut another = with("OOMKilled", false);
    another.id = "another".into();
    let other = one("Always", vec![with("Error", true)]).then(vec![another]);
    assert_eq!(story(&other.generate(), "a"), "terminated 137 OOMKilled after terminated 137 Error, 0");
}

#[test]
fn the_previous_status_is_kept_without_instance() {
    let forgotten = |containers| one("Always", containers).then(vec![]);
    let running = forgotten(vec![running("a", 3)]);
    assert_eq!(
        story(&running.generate(), "a"),
        "waiting ContainerCreating after terminated 137 ContainerStatusUnknown, 4"
    );
    let deleting = running.with(|s| s.pod.metadata.deletion_timestamp = Some(time(std::time::Duration::ZERO)));
    assert_eq!(
        story(&deleting.generate(), "a"),
        "waiting ContainerCreating after terminated 137 ContainerStatusUnknown, 3"
    );
    let at_limit = forgotten(vec![ContainerStatus { restart_count: u32::MAX, ..self::running("a", 0) }]);
    assert_eq!(
        story(&at_limit.generate(), "a"),
        format!("waiting ContainerCreating after terminated 137 ContainerStatusUnknown, {}", i32::MAX)
    );
    let ended = forgotten(vec![exited("a", 3, 2)]);
    assert_eq!(story(&ended.generate(), "a"), "terminated 2 Error after none, 3");
    let with_past = one("Always", vec![self::running("a", 1), exited("a", 0, 2)]).then(vec![]);
    assert_eq!(story(&with_past.generate(), "a"), "waiting ContainerCreating after terminated 2 Error, 1");
    let counted_once = running_twice_without_instance();
    assert_eq!(
        story(&counted_once.generate(), "a"),
        "waiting ContainerCreating after terminated 137 ContainerStatusUnknown, 4"
    );
}

fn running_twice_without_instance() -> Situation {
    one("Always", vec![running("a", 3)]).then(vec![]).then(vec![])
}

#[test]
fn an_unknown_state_after_running_is_terminated() {
    let lost = one("Always", vec![running("a", 0)]).then(vec![status("a", 0, ContainerState::Unknown)]);
    assert_eq!(story(&lost.generate(), "a"), "terminated 137 ContainerStatusUnknown after none, 1");
}

/// The container in a status that is published after the final one.
fn after_the_final_status(policy: &str, at_end: Vec<ContainerStatus>, later: Vec<ContainerStatus>) -> String {
    let ended = one(policy, at_end).failed("a", "ImagePullBackOff").with(|s| s.is_terminal = true);
    let last = final_status(&ended.pod, ended.generate());
    let published_again = ended.with(|s| {
        s.old = last;
        s.snapshot.containers = later;
    });
    story(&published_again.generate(), "a")
}

#[test]
fn the_end_that_the_final_status_assumes_is_kept_until_the_runtime_reports_one() {
    let created = || status("a", 0, ContainerState::Created);
    let unknown = "terminated 137 ContainerStatusUnknown after none, 0";
    let crashed = "terminated 137 ContainerStatusUnknown after terminated 3 Error, 1";
    let rows = [
        ("Always", vec![], vec![], unknown),
        ("OnFailure", vec![], vec![], unknown),
        ("Never", vec![], vec![], unknown),
        ("Always", vec![created()], vec![created()], unknown),
        ("Always", vec![exited("a", 1, 3)], vec![exited("a", 1, 3)], crashed),
        ("Always", vec![exited("a", 1, 3)], vec![], crashed),
        ("Never", vec![exited("a", 1, 3)], vec![exited("a", 1, 3)], "terminated 3 Error after none, 1"),
        ("Never", vec![proven("a", 0, None)], vec![exited("a", 0, 3)], "terminated 3 Error after none, 0"),
    ];
    for (policy, at_end, later, expected) in rows {
        let case = format!("{policy}: {at_end:?}, {later:?}");
        assert_eq!(after_the_final_status(policy, at_end, later), expected, "{case}");
    }
}

#[test]
fn last_state_is_kept_when_its_instance_is_gone() {
    let renewed = one("Always", vec![exited("a", 0, 2)]).then(vec![running("a", 1)]);
    assert_eq!(story(&renewed.generate(), "a"), "running after terminated 2 Error, 1");
    let later = renewed.then(vec![running("a", 1)]);
    assert_eq!(story(&later.generate(), "a"), "running after terminated 2 Error, 1");
    let renewed = one("Always", vec![running("a", 1), status("a", 0, ContainerState::Created)]);
    assert_eq!(story(&renewed.generate(), "a"), "running after waiting, 1");
    let later = renewed.then(vec![running("a", 1)]);
    assert_eq!(story(&later.generate(), "a"), "running after none, 1", "it has not ended");
}

#[test]
fn failed_starts_are_shown_as_waiting() {
    let crashing = one("Always", vec![exited("a", 0, 1)]).failed("a", "CrashLoopBackOff").generate();
    assert_eq!(story(&crashing, "a"), "waiting CrashLoopBackOff after terminated 1 Error, 0");
    let state = container(&crashing, "a").state.clone().expect("a state");
    assert_eq!(state.waiting.and_then(|w| w.message).as_deref(), Some("CrashLoopBackOff detail"));
    let rows = [
        ("Always", vec![], "waiting ErrImagePull after none, 0"),
        ("Never", vec![exited("a", 0, 1)], "terminated 1 Error after none, 0"),
        ("Always", vec![running("a", 0)], "running after none, 0"),
        ("Always", vec![status("a", 0, ContainerState::Created)], "waiting ErrImagePull after none, 0"),
        ("OnFailure", vec![proven("a", 0, None)], "running after none, 0"),
    ];
    for (policy, containers, expected) in rows {
        let status = one(policy, containers.clone()).failed("a", "ErrImagePull").generate();
        assert_eq!(story(&status, "a"), expected, "{policy} {containers:?}");
    }
    let deleting = one("Always", vec![exited("a", 0, 1)]).failed("a", "CrashLoopBackOff");
    let deleting = deleting.with(|s| s.pod.metadata.deletion_timestamp = Some(time(std::time::Duration::ZERO)));
    assert_eq!(story(&deleting.generate(), "a"), "terminated 1 Error after none, 0");
}

#[test]
fn succeeded_init_containers_keep_their_state() {
    let both = Situation::new(pod("Always", &["one", "side"], &["a"]), vec![exited("side", 0, 0), exited("one", 0, 0)]);
    let status = both.failed("one", "X").failed("side", "CrashLoopBackOff").generate();
    assert_eq!(story(&status, "one"), "terminated 0 Completed after none, 0");
    assert_eq!(story(&status, "side"), "terminated 0 Completed after none, 0");
    let failing =
        Situation::new(pod("Always", &["one"], &["a"]), vec![exited("one", 0, 1)]).failed("one", "CrashLoopBackOff");
    assert_eq!(story(&failing.generate(), "one"), "waiting CrashLoopBackOff after terminated 1 Error, 0");
}

#[test]
fn removed_init_containers_count_as_completed() {
    for regular in [running("a", 0), exited("a", 0, 1), status("a", 0, ContainerState::Created)] {
        let status = Situation::new(pod("Always", &["one", "side"], &["a"]), vec![regular]).generate();
        assert_eq!(story(&status, "one"), "terminated 0 Completed after none, 0");
        assert_eq!(story(&status, "side"), "waiting PodInitializing after none, 0");
    }
    let overlaid = Situation::new(pod("Always", &["one"], &["a"]), vec![running("a", 0)]).failed("one", "X");
    assert_eq!(story(&overlaid.generate(), "one"), "terminated 0 Completed after none, 0");
}

#[test]
fn restart_all_containers_is_reported_until_done() {
    let ruled = |mut pod: Pod| {
        set_rule(&mut pod.spec.as_mut().expect("a spec").containers[0], "Never", "RestartAllContainers");
        pod
    };
    let both = vec![exited("a", 0, 42), running("b", 0)];
    let before = Situation::new(ruled(pod("Never", &[], &["a", "b"])), vec![running("a", 0), running("b", 0)]);
    let demanded = before.then(both);
    assert_eq!(story(&demanded.generate(), "a"), "terminated 42 Error after none, 0");
    let half = demanded.then(vec![exited("a", 0, 42)]);
    assert_eq!(
        story(&half.generate(), "b"),
        "waiting RestartingAllContainers after terminated 137 RestartingAllContainers, 1"
    );
    assert_eq!(half.phase(), "Running");
    let at_limit = half.with(|s| {
        let mut old = s.old.container_statuses.iter_mut().flatten();
        old.find(|old| old.name == "b").expect("reported").restart_count = i32::MAX;
    });
    assert_eq!(container(&at_limit.generate(), "b").restart_count, i32::MAX);
    let gone = at_limit.then(vec![]);
    let status = gone.generate();
    assert_eq!(story(&status, "a"), "waiting RestartingAllContainers after terminated 137 RestartingAllContainers, 1");
    // Of `a` the exit was reported; of `b` it never was.
    let ids = ["a", "b"].map(|name| container(&status, name).container_id.as_deref());
    assert_eq!(ids, [Some("containerd://a-0"), None]);
    assert_eq!(container(&status, "a").image_id, "image@sha256:1");
    assert!(container(&status, "a").resources.is_some() && !container(&status, "a").ready);
    let begun = gone.then(vec![running("b", 1), running("a", 1)]);
    assert_eq!(story(&begun.generate(), "a"), "running after terminated 137 RestartingAllContainers, 1");
    assert_eq!(begun.phase(), "Running");
}

#[test]
fn ready_and_started_follow_the_process() {
    let status = Situation::new(
        with_ephemeral(pod("Always", &["one", "side"], &["a"]), "debug"),
        vec![running("debug", 0), running("a", 0), running("side", 0), exited("one", 0, 0)],
    )
    .generate();
    let flags = |name| (container(&status, name).ready, container(&status, name).started);
    assert_eq!(flags("a"), (true, Some(true)));
    assert_eq!(flags("side"), (true, Some(true)));
    assert_eq!(flags("one"), (true, Some(false)), "done, and so ready");
    assert_eq!(flags("debug"), (false, None));
    let failing = Situation::new(pod("Always", &["one"], &["a"]), vec![exited("one", 0, 1)]).generate();
    assert!(!container(&failing, "one").ready);
}

#[test]
fn lists_are_ordered() {
    let status = Situation::new(pod("Always", &["z", "y"], &["d", "c"]), vec![]).generate();
    let names = |list: &Option<Vec<k8s_openapi::api::core::v1::ContainerStatus>>| -> Vec<String> {
        list.iter().flatten().map(|status| status.name.clone()).collect()
    };
    assert_eq!(names(&status.container_statuses), ["c", "d"]);
    assert_eq!(names(&status.init_container_statuses), ["z", "y"]);
    assert_eq!(status.ephemeral_container_statuses, None);
}

#[test]
fn messages_share_a_limit() {
    let long = |mut status: ContainerStatus| {
        status.message = "€".repeat(10_000);
        status
    };
    let of_three = with_ephemeral(pod("Always", &["one"], &["a"]), "debug");
    let situation = Situation::new(of_three, vec![long(exited("a", 1, 1)), long(exited("a", 0, 1))]);
    let status = situation.generate();
    let a = container(&status, "a");
    for state in [&a.state, &a.last_state] {
        let message = state.as_ref().and_then(|s| s.terminated.as_ref()).and_then(|t| t.message.as_ref());
        assert_eq!(message.map(String::len), Some(4095), "whole characters of a third of 12 KiB");
    }
}

#[test]
fn mounts_and_resources_are_reported() {
    let requests = BTreeMap::from([("cpu".to_owned(), Quantity("1".into()))]);
    let resources = ResourceRequirements { requests: Some(requests.clone()), ..ResourceRequirements::default() };
    let mount = |name: &str, read_only| VolumeMount {
        name: name.into(),
        mount_path: format!("/{name}"),
        read_only,
        ..VolumeMount::default()
    };
    let waiting = one("Always", vec![]).with(|s| {
        let a = &mut s.pod.spec.as_mut().expect("a spec").containers[0];
        a.resources = Some(resources.clone());
        a.volume_mounts = Some(vec![mount("x", None), mount("y", Some(true))]);
    });
    let status = waiting.generate();
    let a = container(&status, "a");
    let mounts: Vec<_> = a
        .volume_mounts
        .iter()
        .flatten()
        .map(|m| (m.mount_path.as_str(), m.read_only, m.recursive_read_only.as_deref()))
        .collect();
    assert_eq!(mounts, [("/x", None, None), ("/y", Some(true), Some("Disabled"))]);
    assert_eq!((&a.resources, &a.allocated_resources), (&None, &None));
    let mounted = a.volume_mounts.clone();
    let running = waiting.then(vec![running("a", 0)]).generate();
    let a = container(&running, "a");
    assert_eq!((&a.volume_mounts, &a.resources), (&mounted, &Some(resources)));
    assert_eq!(a.allocated_resources, Some(requests));
}

#[test]
fn recursive_read_only_is_reported_as_resolved() {
    let mode = |mode: &str, supported| {
        let situation = one("Always", vec![]).with(|s| {
            s.recursive_read_only = supported;
            s.pod.spec.as_mut().expect("a spec").containers[0].volume_mounts = Some(vec![VolumeMount {
                name: "x".into(),
                mount_path: "/x".into(),
                read_only: Some(true),
                recursive_read_only: Some(mode.into()),
                ..VolumeMount::default()
            }]);
        });
        let status = situation.generate();
        container(&status, "a").volume_mounts.as_ref().expect("mounts")[0].recursive_read_only.clone()
    };
    for (stated, supported, expected) in
        [("IfPossible", true, "Enabled"), ("IfPossible", false, "Disabled"), ("Enabled", true, "Enabled")]
    {
        assert_eq!(mode(stated, supported).as_deref(), Some(expected), "{stated} {supported}");
    }
}

#[test]
fn the_user_is_reported() {
    let user = ContainerUser { uid: 1000, gid: 3000, supplemental_groups: vec![4000] };
    let status = one("Always", vec![ContainerStatus { user: Some(user), ..running("a", 0) }]).generate();
    let user = serde_json::to_value(&container(&status, "a").user).expect("JSON");
    assert_eq!(user, serde_json::json!({"linux": {"uid": 1000, "gid": 3000, "supplementalGroups": [4000]}}));
    assert_eq!(container(&one("Always", vec![running("a", 0)]).generate(), "a").user, None);
    let (large, max) = (i64::from(i32::MAX) + 1, i64::from(i32::MAX));
    for (uid, gid, groups, is_reported) in [
        (max, max, vec![0, max], true),
        (large, 0, vec![], false),
        (0, large, vec![], false),
        (0, 0, vec![0, large], false),
        (-1, 0, vec![], false),
    ] {
        let user = ContainerUser { uid, gid, supplemental_groups: groups };
        let status = one("Always", vec![ContainerStatus { user: Some(user), ..running("a", 0) }]).generate();
        assert_eq!(container(&status, "a").user.is_some(), is_reported, "{uid} {gid}: refused by the API server");
    }
}

#[test]
fn the_stop_signal_is_reported_behind_its_feature_gate() {
    for (stop_signals, reported, expected) in [
        (true, Some("SIGTERM"), Some("SIGTERM")),
        (true, Some("SIGRTMIN"), Some("SIGRTMIN")),
        (true, Some("SIGRTMINPLUS3"), Some("SIGRTMIN+3")),
        (true, Some("SIGRTMAXMINUS14"), Some("SIGRTMAX-14")),
        (true, None, None),
        (false, Some("SIGTERM"), None),
    ] {
        let newest = ContainerStatus { stop_signal: reported, ..running("a", 0) };
        let status = one("Always", vec![newest]).with(|s| s.stop_signals = stop_signals).generate();
        assert_eq!(container(&status, "a").stop_signal.as_deref(), expected, "{reported:?} {stop_signals}");
    }
}

#[test]
fn resources_of_a_running_container_are_the_runtimes() {
    let limited = || {
        one("Always", vec![]).with(|s| {
            s.pod.spec.as_mut().expect("a spec").containers[0].resources = serde_json::from_value(serde_json::json!({
                "limits": {"cpu": "0.5", "memory": "64Mi"}, "requests": {"cpu": "1m", "memory": "32Mi"}}))
            .expect("resources");
        })
    };
    let reported = |cpu_request, cpu_limit, memory_limit| ContainerStatus {
        resources: ContainerResources { cpu_request, cpu_limit, memory_limit },
        ..running("a", 0)
    };
    let texts = |status: &k8s_openapi::api::core::v1::PodStatus| {
        let resources = container(status, "a").resources.clone().expect("resources");
        let text =
            |list: &Option<BTreeMap<String, Quantity>>, name: &str| list.as_ref().expect("a list")[name].0.clone();
        [("cpu", &resources.limits), ("memory", &resources.limits), ("cpu", &resources.requests)]
            .map(|(name, list)| text(list, name))
    };
    let agreed = limited().then(vec![reported(Some(2), Some(500), Some(64 << 20))]).generate();
    assert_eq!(texts(&agreed), ["0.5", "64Mi", "1m"], "the spec's notation stays");
    let resized = limited().then(vec![reported(Some(100), Some(250), Some(32 << 20))]);
    assert_eq!(texts(&resized.generate()), ["250m", "32Mi", "100m"], "what is not applied yet is not claimed");
    let silent = resized.then(vec![running("a", 0)]);
    assert_eq!(texts(&silent.generate()), ["250m", "32Mi", "100m"], "kept for the same instance");
    let restarted = silent.then(vec![running("a", 1)]).generate();
    assert_eq!(texts(&restarted), ["0.5", "64Mi", "1m"]);
    let dead = ContainerStatus { resources: reported(Some(100), Some(250), None).resources, ..exited("a", 0, 0) };
    assert_eq!(texts(&limited().then(vec![dead]).generate()), ["0.5", "64Mi", "1m"]);
}

/// The earlier agent knew the code from the kernel, or had given it up; this one waits for that of the runtime.
#[test]
fn an_end_that_an_earlier_agent_has_reported_stays_while_its_code_is_held_back() {
    let held_back = |attempt| ContainerStatus { exit_code: None, ..exited("a", attempt, 0) };
    for (next, expected) in [
        (vec![held_back(0)], "terminated 3 Error after none, 0"),
        (vec![exited("a", 0, 4)], "terminated 4 Error after none, 0"),
        (vec![held_back(1), exited("a", 0, 3)], "running after terminated 3 Error, 1"),
    ] {
        let later = one("Always", vec![exited("a", 0, 3)]).then(next.clone());
        assert_eq!(story(&later.generate(), "a"), expected, "{next:?}");
    }
}

#[test]
fn resources_of_the_pod_are_reported() {
    let resources: ResourceRequirements =
        serde_json::from_value(serde_json::json!({"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}}))
            .expect("resources");
    let status = one("Always", vec![]).with(|s| s.resources = Some(resources.clone())).generate();
    assert_eq!((&status.allocated_resources, &status.resources), (&resources.requests, &Some(resources.clone())));
    let without = one("Always", vec![]).with(|s| {
        s.old = k8s_openapi::api::core::v1::PodStatus { phase: Some("Running".to_owned()), ..status };
        s.resize.is_resizing = true;
    });
    let status = without.generate();
    assert_eq!((status.allocated_resources, status.resources), (None, None), "their gate is off now");
}
