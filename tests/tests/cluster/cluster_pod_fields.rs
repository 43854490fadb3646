//! Fields of pods and containers, as the containers themselves see them. They report through their termination messages.

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Service;
use keblet_peers::BUSYBOX_IMAGE;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::cluster::Tenant;
use serde_json::Value;
use serde_json::json;

/// Lines that the container `main` of the pod writes as its last words.
async fn report(tenant: &Tenant, name: &str, spec: Value) -> Vec<String> {
    tenant.pod(name, spec).await.unwrap();
    let message = |pod: Option<&Pod>| {
        let statuses = pod?.status.as_ref()?.container_statuses.as_ref()?;
        statuses.iter().find(|one| one.name == "main")?.state.as_ref()?.terminated.as_ref()?.message.clone()
    };
    let message = tenant.until(name, "a report", message).await.unwrap();
    message.lines().map(str::to_owned).collect()
}

/// A shell that runs once and whose output is its last words.
fn once(tenant: &Tenant, script: &str) -> Value {
    let mut spec = tenant.shell(&format!("{{ {script}; }} > /dev/termination-log 2>&1"));
    spec["restartPolicy"] = json!("Never");
    spec
}

#[tokio::test]
#[ignore = "real cluster"]
async fn commands_arguments_and_variables_reach_the_process() {
    let tenant = Tenant::new_namespace("variables").await.unwrap();
    let service = json!({ "metadata": { "name": "web" }, "spec": { "ports": [{ "port": 8042 }] } });
    tenant.create::<Service>(service).await.unwrap();
    let map = json!({ "metadata": { "name": "map" }, "data": { "A": "from-map", "B": "replaced" } });
    tenant.create::<ConfigMap>(map).await.unwrap();
    let script =
        "echo $0 $*; echo $POD $NODE $LABEL; echo $CPU $MEMORY $REQUEST; echo $P_A $P_B; echo [$WEB_SERVICE_PORT]";
    let mut spec = once(&tenant, script);
    let field = |name: &str, path: &str| json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } });
    let resource = |name: &str, resource: &str, divisor: &str| json!({ "name": name, "valueFrom": { "resourceFieldRef": { "resource": resource, "divisor": divisor } } });
    let main = &mut spec["containers"][0];
    main["command"].as_array_mut().unwrap().push(json!("$(NAME)"));
    main["args"] = json!(["$(NAME)-b", "$$(NAME)", "$(NONE)"]);
    main["envFrom"] = json!([{ "prefix": "P_", "configMapRef": { "name": "map" } }]);
    main["env"] = json!([
        { "name": "NAME", "value": "a" },
        { "name": "P_B", "value": "own" },
        field("POD", "metadata.name"),
        field("NODE", "spec.nodeName"),
        field("LABEL", "metadata.labels['app']"),
        resource("CPU", "limits.cpu", "1m"),
        resource("MEMORY", "limits.memory", "1Mi"),
        resource("REQUEST", "requests.cpu", "1m"),
    ]);
    main["resources"] = json!({ "requests": { "cpu": "20m" }, "limits": { "cpu": "250m", "memory": "64Mi" } });
    let mut without_links = spec.clone();
    without_links["enableServiceLinks"] = json!(false);
    let node = tenant.node.name();
    let lines = |name: &str, port: &str| {
        [
            "a a-b $(NAME) $(NONE)".to_owned(),
            format!("{name} {node} {name}"),
            "250 64 20".to_owned(),
            "from-map own".to_owned(),
            port.to_owned(),
        ]
    };
    assert_eq!(report(&tenant, "linked", spec).await, lines("linked", "[8042]"));
    assert_eq!(report(&tenant, "alone", without_links).await, lines("alone", "[]"));
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn volume_mounts_are_as_the_spec_says() {
    let tenant = Tenant::new_namespace("mounts").await.unwrap();
    let script = "cat /whole/part/f /part/f /expression/f; touch /ro/x; \
                  for at in whole follows; do grep -c \" /$at .* master:\" /proc/self/mountinfo; done; true";
    let mut spec = once(&tenant, script);
    spec["volumes"] = json!([{ "name": "data", "emptyDir": {} }]);
    let mount = |at: &str, more: Value| {
        let mut mount = json!({ "name": "data", "mountPath": at });
        mount.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        mount
    };
    spec["initContainers"] = json!([{
        "name": "before", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never",
        "command": ["sh", "-c", "mkdir /data/part && echo written > /data/part/f"],
        "volumeMounts": [mount("/data", json!({}))],
    }]);
    let main = &mut spec["containers"][0];
    main["env"] = json!([{ "name": "PART", "value": "part" }]);
    main["volumeMounts"] = json!([
        mount("/whole", json!({})),
        mount("/part", json!({ "subPath": "part" })),
        mount("/expression", json!({ "subPathExpr": "$(PART)" })),
        mount("/ro", json!({ "readOnly": true, "recursiveReadOnly": "IfPossible" })),
        mount("/follows", json!({ "mountPropagation": "HostToContainer" })),
    ]);
    let expected = ["written", "written", "written", "touch: /ro/x: Read-only file system", "0", "1"];
    assert_eq!(report(&tenant, "mounts", spec).await, expected);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn a_privileged_container_has_all_capabilities_and_can_share_its_mounts() {
    let tenant = Tenant::new_namespace("privileged").await.unwrap();
    let script = "awk '/CapBnd/ {print $2}' /proc/self/status; grep -c ' /shared .* shared:' /proc/self/mountinfo; \
                  test -w /proc/sys/kernel/hostname && echo writable";
    let mut spec = once(&tenant, script);
    spec["volumes"] = json!([{ "name": "data", "emptyDir": {} }]);
    let main = &mut spec["containers"][0];
    main["securityContext"] = json!({ "privileged": true });
    main["volumeMounts"] = json!([{ "name": "data", "mountPath": "/shared", "mountPropagation": "Bidirectional" }]);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let own = status.lines().find_map(|line| line.strip_prefix("CapBnd:")).unwrap().trim();
    assert_eq!(report(&tenant, "all", spec).await, [own, "1", "writable"]);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn containers_share_processes_if_the_pod_or_their_target_says_so() {
    let tenant = Tenant::new_namespace("processes").await.unwrap();
    // The pattern does not match itself.
    let mut spec = once(&tenant, "until grep -q '777[7]' /proc/[0-9]*/cmdline; do sleep 0.1; done; echo $(($$ > 1))");
    spec["shareProcessNamespace"] = json!(true);
    let other =
        json!({ "name": "other", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "7777"] });
    spec["containers"].as_array_mut().unwrap().push(other);
    assert_eq!(report(&tenant, "shared", spec).await, ["1"], "not the first process");

    let mut web = tenant.shell("");
    web["containers"][0]["image"] = json!(PROBE_IMAGE);
    web["containers"][0]["command"] = json!(["/probe", "web"]);
    tenant.pod("web", web).await.unwrap();
    tenant.until_ready("web").await.unwrap();
    let image = format!("--image={BUSYBOX_IMAGE}");
    let arguments = ["debug", "web", &image, "--image-pull-policy=Never", "-c", "look", "--target=main"];
    let script = ["--", "sh", "-c", "tr '\\0' ' ' < /proc/1/cmdline > /dev/termination-log"];
    tenant.kubectl().ok(&[&arguments[..], &script[..]].concat()).await.unwrap();
    let message = |pod: Option<&Pod>| {
        let statuses = pod?.status.as_ref()?.ephemeral_container_statuses.as_ref()?;
        statuses.first()?.state.as_ref()?.terminated.as_ref()?.message.clone()
    };
    assert_eq!(tenant.until("web", "the ephemeral container has ended", message).await.unwrap(), "/probe web ");
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn ports_have_names_and_root_is_refused_where_the_pod_says_so() {
    let tenant = Tenant::new_namespace("ports").await.unwrap();
    let mut web = tenant.shell("");
    let main = &mut web["containers"][0];
    main["image"] = json!(PROBE_IMAGE);
    main["command"] = json!(["/probe", "web"]);
    main["ports"] = json!([{ "name": "web", "containerPort": 8080, "protocol": "TCP" }]);
    main["readinessProbe"] = json!({ "httpGet": { "port": "web" }, "periodSeconds": 1 });
    tenant.pod("web", web).await.unwrap();
    tenant.until_ready("web").await.unwrap();

    for (name, at) in [("of-pod", "/securityContext"), ("of-container", "/containers/0/securityContext")] {
        let mut spec = once(&tenant, "id -u");
        match at {
            "/securityContext" => spec["securityContext"] = json!({ "runAsNonRoot": true }),
            _ => spec["containers"][0]["securityContext"] = json!({ "runAsNonRoot": true }),
        }
        tenant.pod(name, spec).await.unwrap();
        let waiting = |pod: Option<&Pod>| {
            let statuses = pod?.status.as_ref()?.container_statuses.as_ref()?;
            let waiting = statuses.first()?.state.as_ref()?.waiting.clone()?;
            (waiting.reason.as_deref() == Some("CreateContainerConfigError")).then_some(waiting.message)
        };
        let message = tenant.until(name, "a refused container", waiting).await.unwrap().unwrap();
        assert!(message.starts_with("container has runAsNonRoot and image will run as root"), "{message}");
    }
    tenant.delete_namespace().await.unwrap();
}
