//! Whole configurations from whole specs, and tables for what the parts decide.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use keblet_proto::cri::v1 as cri;
use keblet_proto::cri::v1::security_profile::ProfileType;
use serde_json::Value;
use serde_json::json;

use super::container::Instance;
use super::container::container_config;
use super::container::environment;
use super::*;
use crate::model::Amount;
use crate::model::QosClass;
use crate::model::qos;
use crate::model::qos::ResourceKind;
use crate::user_namespaces::Mapping;

#[path = "environment_tests.rs"]
mod environments;
#[path = "from_objects_tests.rs"]
mod from_objects;
#[path = "growth_tests.rs"]
mod growth;

fn merged(mut base: Value, more: Value) -> Value {
    base.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    base
}

fn pod(spec: Value) -> Pod {
    let base = json!({"enableServiceLinks": true, "containers": [{"name": "c", "image": "app:1"}]});
    serde_json::from_value(json!({
        "metadata": {"name": "web-node1", "namespace": "ns", "uid": "u-1", "labels": {"app": "web"},
            "annotations": {"note": "x"}},
        "spec": merged(base, spec),
    }))
    .expect("a pod")
}

/// A pod whose only container has these fields besides name and image.
fn with_container(fields: Value) -> Pod {
    pod(json!({"containers": [merged(json!({"name": "c", "image": "app:1"}), fields)]}))
}

fn settings() -> NodeSettings {
    NodeSettings {
        pod_logs_dir: "/var/log/pods".into(),
        dns: DnsSettings { node_ips: vec!["192.0.2.7".into()].into(), ..Default::default() },
        resources: ResourceSettings {
            cfs_period: Some(100_000),
            memory_capacity: 16 << 30,
            allocatable: [("cpu", "2"), ("memory", "8Gi"), ("ephemeral-storage", "10Gi")]
                .map(|(name, amount)| (name.to_owned(), amount.parse().expect("an amount")))
                .into(),
            hugepage_sizes: vec![2 << 20],
            single_process_oom_kill: true,
            ..Default::default()
        },
        security: SecuritySettings { seccomp_root: "/root/seccomp".into(), ..Default::default() },
        ..Default::default()
    }
}

fn image(user: ImageUser) -> ResolvedImage {
    ResolvedImage { image_ref: "sha256:abc".into(), user }
}

fn generate(pod: &Pod, user: ImageUser) -> Result<cri::ContainerConfig, GenerateError> {
    let spec = ContainerSpec::named(pod, "c").expect("the container");
    let settings = settings();
    let objects = EnvObjects { files: Some(EnvFiles::default()), ..EnvObjects::default() };
    let environment = environment(pod, &spec, &["10.0.0.5".into()], &objects, &settings)?;
    let instance = Instance {
        image: &image(user),
        restarts: 2,
        environment: &environment,
        mounts: Vec::new(),
        devices: Vec::new(),
        target: None,
        users: &user_namespace::host(),
    };
    container_config(pod, &spec, instance, &settings)
}

fn security(pod: &Pod, user: ImageUser) -> cri::LinuxContainerSecurityContext {
    generate(pod, user).expect("valid").linux.expect("linux").security_context.expect("a security context")
}

fn resources_of(pod: &Pod) -> cri::LinuxContainerResources {
    generate(pod, ImageUser::Id(0)).expect("valid").linux.expect("linux").resources.expect("resources")
}

fn envs(config: &cri::ContainerConfig) -> BTreeMap<&str, &str> {
    let text = |value| std::str::from_utf8(value).expect("text");
    config.envs.iter().map(|env| (env.key.as_str(), text(&env.value))).collect()
}

#[test]
fn a_whole_container() {
    let pod = with_container(json!({
        "command": ["/bin/$(WHO)", "$$(WHO)"], "args": ["--ip=$(IP)", "$(NOBODY)"], "workingDir": "/w", "tty": true,
        "env": [
            {"name": "WHO", "value": "sh"}, {"name": "LATER", "value": "$(IP)"},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
            {"name": "WHO2", "value": "$(WHO)-$(APP)"}, {"name": "EMPTY"},
        ],
    }));
    let config = generate(&pod, ImageUser::Id(0)).expect("valid");
    assert_eq!(config.command, ["/bin/sh", "$(WHO)"]);
    assert_eq!(config.args, ["--ip=10.0.0.5", "$(NOBODY)"]);
    assert_eq!(config.working_dir, "/w");
    assert!(config.tty && !config.stdin);
    assert_eq!(config.log_path, "c/2.log");
    assert_eq!(config.metadata, Some(cri::ContainerMetadata { name: "c".into(), attempt: 2 }));
    let image = config.image.as_ref().expect("an image");
    assert_eq!((image.image.as_str(), image.user_specified_image.as_str()), ("sha256:abc", "app:1"));
    let expected =
        [("APP", "web"), ("EMPTY", ""), ("IP", "10.0.0.5"), ("LATER", "$(IP)"), ("WHO", "sh"), ("WHO2", "sh-web")];
    assert_eq!(envs(&config), BTreeMap::from(expected));
}

#[test]
fn non_root_is_verified() {
    let strict = |user: Value| with_container(json!({"securityContext": merged(json!({"runAsNonRoot": true}), user)}));
    let table = [
        (
            strict(json!({})),
            ImageUser::Id(0),
            Some("container has runAsNonRoot and image will run as root (pod: \"web-node1_ns(u-1)\", container: c)"),
        ),
        (strict(json!({})), ImageUser::Id(1000), None),
        (
            strict(json!({})),
            ImageUser::Id(1 << 40),
            Some("user id (1099511627776). (Must be 1-(2147483647)): must be between 0 and 2147483647, inclusive ("),
        ),
        (strict(json!({})), ImageUser::Id(-1), Some("image has an invalid user id (-1). (Must be 1-(2147483647))")),
        (
            strict(json!({})),
            ImageUser::Name("app".into()),
            Some("image has non-numeric user (app), cannot verify user is non-root"),
        ),
        (strict(json!({"runAsUser": 0})), ImageUser::Id(5), Some("container's runAsUser breaks non-root policy")),
        (strict(json!({"runAsUser": 7})), ImageUser::Name("root".into()), None),
        (with_container(json!({})), ImageUser::Id(0), None),
    ];
    for (pod, user, expected) in table {
        match (generate(&pod, user.clone()), expected) {
            (Ok(_), None) => {}
            (Err(error), Some(text)) => assert!(error.to_string().contains(text), "{error}"),
            (result, _) => panic!("{user:?}: {result:?}"),
        }
    }
}

#[test]
fn security_contexts() {
    let of_pod = json!({"runAsUser": 1, "runAsGroup": 2, "fsGroup": 3, "supplementalGroups": [4, 5],
        "supplementalGroupsPolicy": "Strict", "seccompProfile": {"type": "RuntimeDefault"},
        "seLinuxOptions": {"user": "u", "role": "r", "type": "t", "level": "s0:c1"}});
    let inherited = pod(json!({"securityContext": of_pod, "hostNetwork": true, "shareProcessNamespace": true}));
    let context = security(&inherited, ImageUser::Name("app".into()));
    assert_eq!(context.run_as_user, Some(cri::Int64Value { value: 1 }));
    assert_eq!(context.run_as_group, Some(cri::Int64Value { value: 2 }));
    assert_eq!(context.run_as_username, "");
    assert_eq!(context.supplemental_groups, [3, 4, 5]);
    assert_eq!(context.supplemental_groups_policy(), cri::SupplementalGroupsPolicy::Strict);
    assert_eq!(context.seccomp.expect("a profile").profile_type(), ProfileType::RuntimeDefault);
    let label = context.selinux_options.expect("a label");
    assert_eq!([label.user, label.role, label.r#type, label.level], ["u", "r", "t", "s0:c1"]);
    let namespaces = context.namespace_options.expect("namespaces");
    assert_eq!(namespaces.network(), cri::NamespaceMode::Node);
    assert_eq!(namespaces.pid(), cri::NamespaceMode::Pod);
    assert_eq!(namespaces.ipc(), cri::NamespaceMode::Pod);

    let own = with_container(json!({"securityContext": {"privileged": true, "readOnlyRootFilesystem": true,
        "allowPrivilegeEscalation": false, "capabilities": {"add": ["NET_ADMIN"], "drop": ["ALL"]},
        "procMount": "Unmasked", "seccompProfile": {"type": "Localhost", "localhostProfile": "p/x.json"},
        "appArmorProfile": {"type": "Localhost", "localhostProfile": "prof"}}}));
    let context = security(&own, ImageUser::Name("app".into()));
    assert!(context.privileged && context.readonly_rootfs && context.no_new_privs);
    assert_eq!(context.run_as_username, "app");
    assert_eq!(context.capabilities.expect("capabilities").add_capabilities, ["NET_ADMIN"]);
    assert_eq!(context.masked_paths.len() + context.readonly_paths.len(), 0);
    assert_eq!(context.seccomp.expect("a profile").localhost_ref, "/root/seccomp/p/x.json");
    assert_eq!(context.apparmor.expect("a profile").localhost_ref, "prof");

    let plain = security(&with_container(json!({})), ImageUser::Id(9));
    assert_eq!(plain.run_as_user, Some(cri::Int64Value { value: 9 }));
    assert_eq!(plain.namespace_options.expect("namespaces").pid(), cri::NamespaceMode::Container);
    assert_eq!(plain.seccomp.expect("a profile").profile_type(), ProfileType::Unconfined);
    assert!(plain.masked_paths.contains(&"/proc/kcore".to_owned()) && plain.apparmor.is_none());
}

#[test]
fn a_localhost_seccomp_profile_stays_below_its_directory() {
    let with = |path: &str| {
        let profile = json!({"type": "Localhost", "localhostProfile": path});
        generate(&with_container(json!({"securityContext": {"seccompProfile": profile}})), ImageUser::Id(0))
    };
    for path in ["/etc/passwd", "../x.json", "a/../../x.json", "a/.."] {
        let error = with(path).expect_err("rejected").to_string();
        assert!(error.contains(&format!("localhostProfile {path:?} of container \"c\"")), "{error}");
    }
    assert!(with("a/b.json").is_ok() && with("./a..b").is_ok());
    assert!(with("").expect_err("rejected").to_string().starts_with("localhostProfile must be set"));
}

#[test]
fn an_ephemeral_container_joins_its_target() {
    let pod = pod(json!({"ephemeralContainers": [{"name": "e", "image": "i", "targetContainerName": "c"}]}));
    let spec = ContainerSpec::named(&pod, "e").expect("the container");
    assert_eq!((spec.target, spec.field_path().as_str()), (Some("c"), "spec.ephemeralContainers{e}"));
    let options = security::namespaces(&pod, Some(&"id".into()), &user_namespace::host());
    assert_eq!((options.pid(), options.target_id.as_str()), (cri::NamespaceMode::Target, "id"));
}

#[test]
fn resources_become_shares_quota_and_limits() {
    let with = |resources: Value| resources_of(&with_container(json!({"resources": resources})));
    let none = with(json!({}));
    assert_eq!((none.cpu_shares, none.cpu_quota, none.cpu_period), (2, 0, 100_000));
    assert_eq!((none.memory_limit_in_bytes, none.oom_score_adj), (0, 1000));
    assert_eq!(none.hugepage_limits, [cri::HugepageLimit { page_size: "2MB".into(), limit: 0 }]);
    let limited = with(json!({"limits": {"cpu": "500m", "memory": "64Mi", "hugepages-2Mi": "4Mi"}}));
    assert_eq!((limited.cpu_shares, limited.cpu_quota), (512, 50_000));
    assert_eq!(limited.memory_limit_in_bytes, 64 << 20);
    assert_eq!(limited.hugepage_limits[0].limit, 4 << 20);
    let requested = with(json!({"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"cpu": "2"}}));
    assert_eq!((requested.cpu_shares, requested.cpu_quota, requested.oom_score_adj), (1024, 200_000, 750));
    let bad = with_container(json!({"resources": {"limits": {"cpu": "much"}}}));
    let error = generate(&bad, ImageUser::Id(0)).expect_err("invalid").to_string();
    assert!(error.contains("cpu") && error.contains("much"), "{error}");
}

#[test]
fn a_container_without_a_limit_of_its_own_has_that_of_the_pod() {
    let of_pod = json!({"limits": {"cpu": "500m", "memory": "64Mi", "hugepages-2Mi": "4Mi"}});
    let with = |own: Value| {
        let container = json!({"name": "c", "image": "app:1", "resources": {"limits": own}});
        let resources = resources_of(&pod(json!({"resources": of_pod.clone(), "containers": [container]})));
        (resources.cpu_shares, resources.cpu_quota, resources.memory_limit_in_bytes, resources.hugepage_limits[0].limit)
    };
    assert_eq!(with(json!({})), (512, 50_000, 64 << 20, 4 << 20));
    assert_eq!(with(json!({"cpu": "250m", "memory": "32Mi"})), (256, 25_000, 32 << 20, 4 << 20));
    assert_eq!(with(json!({"cpu": "0", "memory": "0"})), (512, 50_000, 64 << 20, 4 << 20), "zero is no limit");
    assert_eq!(with(json!({"hugepages-2Mi": "0"})), (512, 50_000, 64 << 20, 0), "of huge pages it is one");
}

#[test]
fn swap_and_group_kill_depend_on_the_cgroup_version() {
    let pod = with_container(json!({"resources": {"requests": {"memory": "4Gi"}, "limits": {"memory": "8Gi"}}}));
    let spec = ContainerSpec::named(&pod, "c").expect("the container");
    let with =
        |resources: ResourceSettings| resources::container_resources(&pod, &spec.container, &resources).expect("valid");
    let base = settings().resources;
    let v1 = with(ResourceSettings { swap: Swap::Forbidden, ..base.clone() });
    assert_eq!((v1.memory_swap_limit_in_bytes, v1.unified.len()), (8 << 30, 0));
    let v2 = ResourceSettings { cgroup_v2: true, protects_memory: true, single_process_oom_kill: false, ..base };
    let forbidden = with(ResourceSettings { swap: Swap::Forbidden, ..v2.clone() });
    assert_eq!(forbidden.unified["memory.swap.max"], "0");
    assert_eq!(forbidden.unified["memory.oom.group"], "1");
    let limited = with(ResourceSettings { swap: Swap::Limited { node_swap: 2 << 30 }, ..v2 });
    assert_eq!(limited.unified["memory.swap.max"], (512i64 << 20).to_string());
}

#[test]
fn qos_classes() {
    let table = [
        (json!({"containers": [{"name": "a"}]}), QosClass::BestEffort),
        (
            json!({"containers": [{"name": "a", "resources": {"requests": {"ephemeral-storage": "1Gi"}}}]}),
            QosClass::BestEffort,
        ),
        (json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}]}), QosClass::Burstable),
        (json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "0"}}}]}), QosClass::BestEffort),
        (
            json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1", "memory": "1Gi"},
                "limits": {"cpu": "1000m", "memory": "1024Mi"}}}]}),
            QosClass::Guaranteed,
        ),
        (
            json!({"containers": [{"name": "a", "resources": {"requests": {"cpu": "1", "memory": "1Gi"},
                "limits": {"cpu": "1", "memory": "1Gi"}}}, {"name": "b"}]}),
            QosClass::Burstable,
        ),
        (
            json!({"resources": {"requests": {"cpu": "1", "memory": "1"}, "limits": {"cpu": "1", "memory": "1"}},
                "containers": [{"name": "a"}]}),
            QosClass::Guaranteed,
        ),
        (
            json!({"resources": {}, "containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}]}),
            QosClass::Burstable,
        ),
        (
            json!({"resources": {"requests": {"cpu": "0"}},
                "containers": [{"name": "a", "resources": {"requests": {"cpu": "1"}}}]}),
            QosClass::BestEffort,
        ),
    ];
    for (spec, expected) in table {
        assert_eq!(qos::qos_class(&pod(spec.clone())).expect("valid"), expected, "{spec}");
    }
}

#[test]
fn a_pods_total_counts_init_containers_and_overhead() {
    let cpu = |name: &str, amount: &str, policy: Option<&str>| json!({"name": name, "restartPolicy": policy, "resources": {"requests": {"cpu": amount}, "limits": {"cpu": amount}}});
    let pod = pod(json!({
        "initContainers": [cpu("i", "3", None), cpu("s", "1", Some("Always")), cpu("j", "4", None)],
        "containers": [cpu("a", "1", None), cpu("b", "500m", None)],
        "overhead": {"cpu": "100m", "memory": "1Mi"},
    }));
    let total = |kind, overhead| qos::pod_total(&pod, kind, overhead).expect("valid");
    assert_eq!(total(ResourceKind::Requests, false)["cpu"], Amount::units(5));
    assert_eq!(total(ResourceKind::Requests, true)["cpu"], Amount::millis(5100));
    assert_eq!(total(ResourceKind::Requests, true)["memory"], Amount::bytes(1 << 20));
    assert!(!total(ResourceKind::Limits, true).contains_key("memory"));
    let reported = serde_json::to_value(qos::pod_resources(&pod).expect("valid")).expect("JSON");
    assert_eq!(reported, json!({"requests": {"cpu": "5100m", "memory": "1Mi"}, "limits": {"cpu": "5100m"}}));
    let values = resources::pod_cgroup_values(&pod, &settings().resources).expect("valid");
    assert_eq!((values.cpu_shares, values.cpu_max), (5222, Some((510_000, 100_000))));
    assert_eq!(values.memory_max, None);
}

#[test]
fn a_step_of_the_init_sequence_is_limited_by_a_sidecar_of_it() {
    let container = |policy: Option<&str>, limits: Option<[&str; 2]>| {
        let limits = limits.map(|[cpu, memory]| json!({"cpu": cpu, "memory": memory}));
        json!({"name": "c", "restartPolicy": policy, "resources": {"requests": {"cpu": "10m"}, "limits": limits}})
    };
    let (small, large) = (Some(["100m", "64Mi"]), Some(["200m", "128Mi"]));
    let (plain, sidecar) = (|limits| container(None, limits), |limits| container(Some("Always"), limits));
    let limits_of = |init: Value, regular: Value| {
        let pod = pod(json!({"initContainers": init, "containers": [regular]}));
        let values = resources::pod_cgroup_values(&pod, &settings().resources).expect("valid");
        values.cpu_max.map(|(quota, _)| quota).zip(values.memory_max)
    };
    let both = Some((30_000, 192 << 20));
    assert_eq!(limits_of(json!([sidecar(small), plain(None)]), plain(large)), both);
    assert_eq!(limits_of(json!([sidecar(small), sidecar(None)]), plain(large)), both);
    assert_eq!(limits_of(json!([plain(None), sidecar(small)]), plain(large)), None, "the first step is unlimited");
    assert_eq!(limits_of(json!([plain(small), plain(None)]), plain(large)), None, "the first one has ended");
    assert_eq!(limits_of(json!([sidecar(small)]), plain(None)), None, "regular containers have their own");
}

#[test]
fn huge_pages_of_a_size_that_is_named_in_two_ways_are_added() {
    let requests = json!({"hugepages-2Mi": "4Mi", "hugepages-2097152": "8Mi", "hugepages-4Mi": "16Mi"});
    let pod = with_container(json!({"resources": {"requests": requests}}));
    let values = resources::pod_cgroup_values(&pod, &settings().resources).expect("valid");
    assert_eq!(values.hugepages, BTreeMap::from([(2 << 20, 12 << 20)]), "the node has pages of 2 MiB only");
}

#[test]
fn out_of_memory_scores() {
    let with = |spec: Value, name: &str| {
        let pod = pod(spec);
        let spec = ContainerSpec::named(&pod, name).expect("the container");
        oom_score::oom_score(&pod, &spec.container, 1000 << 20).expect("valid")
    };
    let memory = |name: &str, request: &str| json!({"name": name, "resources": {"requests": {"memory": request}}});
    assert_eq!(with(json!({"containers": [memory("a", "500Mi")]}), "a"), 500);
    assert_eq!(with(json!({"containers": [memory("a", "999Mi")]}), "a"), 3);
    assert_eq!(with(json!({"containers": [memory("a", "100Ki")]}), "a"), 999);
    let sidecar = merged(memory("s", "10Mi"), json!({"restartPolicy": "Always"}));
    let spec = json!({"initContainers": [sidecar], "containers": [memory("a", "500Mi"), memory("b", "300Mi")]});
    assert_eq!(with(spec, "s"), 700);
    let critical =
        json!({"priorityClassName": "system-node-critical", "priority": 2_000_001_000, "containers": [{"name": "a"}]});
    assert_eq!(with(critical, "a"), -997);
    let huge =
        json!({"resources": {"requests": {"memory": "8Ei"}}, "containers": [memory("a", "8Ei"), memory("b", "-8Ei")]});
    assert_eq!((with(huge.clone(), "a"), with(huge, "b")), (3, 999));
}

#[test]
fn a_whole_sandbox() {
    let port = |fields: Value| merged(json!({"containerPort": 80}), fields);
    let pod = pod(json!({
        "subdomain": "s", "hostPID": true, "terminationGracePeriodSeconds": 3,
        "securityContext": {"sysctls": [{"name": "kernel/shm_rmid_forced", "value": "1"}], "fsGroup": 7},
        "containers": [{"name": "c", "image": "i", "ports": [port(json!({"hostPort": 8080})), port(json!({"hostPort": 8080})),
            port(json!({"name": "dns", "protocol": "UDP"}))], "securityContext": {"privileged": true}}],
    }));
    let (resolver, users) =
        (Some("nameserver 192.0.2.53"), user_namespace::own(Mapping { first: 65_536, length: 65_536 }));
    let generated = sandbox::sandbox_config(&pod, 3, "/kubepods/x", resolver, &users, &settings()).expect("valid");
    let config = generated.config;
    assert_eq!(config.metadata.expect("metadata").attempt, 3);
    assert_eq!(
        (config.hostname.as_str(), config.log_directory.as_str()),
        ("web-node1", "/var/log/pods/ns_web-node1_u-1")
    );
    assert_eq!(config.port_mappings.len(), 2);
    assert_eq!(config.port_mappings[1].protocol(), cri::Protocol::Udp);
    assert_eq!(config.annotations, BTreeMap::from([("note".to_owned(), "x".to_owned())]));
    assert_eq!(config.dns_config.expect("dns").servers, ["192.0.2.53"]);
    let linux = config.linux.expect("linux");
    assert_eq!(linux.cgroup_parent, "/kubepods/x");
    assert_eq!(linux.sysctls["kernel.shm_rmid_forced"], "1");
    let security = linux.security_context.expect("a security context");
    assert!(security.privileged);
    assert_eq!(security.namespace_options.as_ref().expect("namespaces").userns_options.as_ref(), Some(&users));
    assert_eq!(security.supplemental_groups, [7]);
    assert_eq!(security.seccomp.expect("a profile").profile_type(), ProfileType::RuntimeDefault);
    assert_eq!(security.namespace_options.expect("namespaces").pid(), cri::NamespaceMode::Node);
}
