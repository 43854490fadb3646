//! Environments made from the pod, and paths that refer to them.

use super::*;

#[test]
fn fields_and_resources_in_the_environment() {
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let amount = |name: &str, resource: &str, divisor: &str| json!({"name": name, "valueFrom": {"resourceFieldRef": {"resource": resource, "divisor": divisor}}});
    let pod = with_container(json!({
        "resources": {"requests": {"cpu": "250m", "memory": "10Mi"}, "limits": {"memory": "100Mi"}},
        "env": [field("UID", "metadata.uid"), field("NOTE", "metadata.annotations['note']"),
            field("NONE", "metadata.labels['none']"), field("HOST", "status.hostIP"), field("SA", "spec.serviceAccountName"),
            amount("CPU_UP", "requests.cpu", "0"), amount("CPU_M", "requests.cpu", "1m"),
            amount("MEM", "limits.memory", "1Mi"), amount("CPU_LIMIT", "limits.cpu", "1"),
            amount("DISK", "limits.ephemeral-storage", "1Gi"), amount("NO_REQUEST", "requests.ephemeral-storage", "1")],
    }));
    let config = generate(&pod, ImageUser::Id(0)).expect("valid");
    let expected = [
        ("UID", "u-1"),
        ("NOTE", "x"),
        ("NONE", ""),
        ("HOST", "192.0.2.7"),
        ("SA", ""),
        ("CPU_UP", "1"),
        ("CPU_M", "250"),
        ("MEM", "100"),
        ("CPU_LIMIT", "2"),
        ("DISK", "10"),
        ("NO_REQUEST", "0"),
    ];
    assert_eq!(envs(&config), BTreeMap::from(expected));
}

#[test]
fn addresses_in_the_environment_are_those_of_the_status() {
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let pod = with_container(json!({"env": [field("IP", "status.podIP"), field("IPS", "status.podIPs")]}));
    let spec = ContainerSpec::named(&pod, "c").expect("the container");
    let reported = ["10.0.0.5", "10.0.0.6", "fd00::5"].map(str::to_owned);
    for (node, ip, ips) in
        [("192.0.2.7", "10.0.0.5", "10.0.0.5,fd00::5"), ("2001:db8::7", "fd00::5", "fd00::5,10.0.0.5")]
    {
        let dns = DnsSettings { node_ips: vec![node.to_owned()].into(), ..Default::default() };
        let settings = NodeSettings { dns, ..settings() };
        let found = environment(&pod, &spec, &reported, &EnvObjects::default(), &settings).expect("valid");
        assert_eq!((found["IP"].as_slice(), found["IPS"].as_slice()), (ip.as_bytes(), ips.as_bytes()), "{node}");
    }
}

#[test]
fn the_former_path_of_the_nodes_name_is_known() {
    let field = json!({"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.host"}}});
    let containers = json!([{"name": "c", "image": "app:1", "env": [field]}]);
    let config = generate(&pod(json!({"nodeName": "node1", "containers": containers})), ImageUser::Id(0));
    assert_eq!(envs(&config.expect("valid"))["NODE"], "node1");
}

#[test]
fn invalid_environments_are_rejected() {
    let from = |source: Value| with_container(json!({"env": [{"name": "X", "valueFrom": source}]}));
    let mut unlinked = pod(json!({}));
    unlinked.spec.as_mut().expect("a spec").enable_service_links = None;
    let table = [
        (unlinked, "nil pod.spec.enableServiceLinks encountered, cannot construct envvars"),
        (from(json!({"fieldRef": {"fieldPath": "spec.dnsPolicy"}})), "unsupported fieldPath: spec.dnsPolicy"),
        (from(json!({"resourceFieldRef": {"resource": "limits.gpu"}})), "unsupported container resource : limits.gpu"),
        (
            from(json!({"resourceFieldRef": {"resource": "limits.cpu", "containerName": "zz"}})),
            "container zz not found",
        ),
        (from(json!({"fileKeyRef": {"volumeName": "v", "path": "p", "key": "k"}})), "couldn't parse env file"),
    ];
    for (pod, expected) in table {
        let error = generate(&pod, ImageUser::Id(0)).expect_err("invalid").to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn sub_path_expressions_need_every_variable() {
    let environment = BTreeMap::from([("A".to_owned(), b"1".to_vec()), ("E".to_owned(), Vec::new())]);
    assert_eq!(env::expand_sub_path("d/$(A)", &environment), Ok("d/1".to_owned()));
    let error = env::expand_sub_path("$(Z)/$(E)/$(B)", &environment).expect_err("missing").to_string();
    assert_eq!(error, "missing value for B, E, Z");
    let long = BTreeMap::from([("A".to_owned(), b"x".repeat(1 << 10))]);
    let error = env::expand_sub_path(&"$(A)/".repeat(1 << 16), &long).expect_err("too long").to_string();
    assert_eq!(error, format!("subPathExpr becomes {} bytes long, a path can have 4096", 1025 << 16));
    let binary = BTreeMap::from([("A".to_owned(), vec![0xff])]);
    let error = env::expand_sub_path("$(A)", &binary).expect_err("not UTF-8").to_string();
    assert!(error.contains("\"$(A)\" refers to a variable that is not valid UTF-8"), "{error}");
}
