//! Every kind of workload reaches its end state, with the real scheduler and controllers.

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::batch::v1::CronJob;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use keblet_peers::PROBE_IMAGE;
use keblet_tests::cluster::Tenant;
use kube::api::DeleteParams;
use kube::api::ListParams;
use kube::api::Patch;
use kube::api::PatchParams;
use serde_json::Value;
use serde_json::json;

/// Pods of a template that serve HTTP.
fn web(tenant: &Tenant, app: &str) -> Value {
    json!({
        "metadata": { "labels": { "app": app } },
        "spec": {
            "nodeSelector": { "kubernetes.io/hostname": tenant.node.name() },
            "terminationGracePeriodSeconds": 5,
            "containers": [{
                "name": "web",
                "image": PROBE_IMAGE,
                "imagePullPolicy": "Never",
                "command": ["/probe", "web"],
                "ports": [{ "name": "http", "containerPort": 8080 }],
            }],
        },
    })
}

fn workload(app: &str, spec: Value) -> Value {
    let mut spec = spec;
    spec["selector"] = json!({ "matchLabels": { "app": app } });
    json!({ "metadata": { "name": app }, "spec": spec })
}

#[tokio::test]
#[ignore = "real cluster"]
async fn deployment_rolls_out_scales_and_is_deleted() {
    let tenant = Tenant::new_namespace("deployment").await.unwrap();
    let spec = json!({ "replicas": 3, "template": web(&tenant, "web") });
    tenant.create::<Deployment>(workload("web", spec)).await.unwrap();
    let available = |expected: i32, generation: i64| {
        move |found: Option<&Deployment>| {
            let status = found?.status.as_ref()?;
            let counts = [status.replicas, status.updated_replicas, status.available_replicas];
            let all = counts == [Some(expected); 3] && status.observed_generation >= Some(generation);
            all.then_some(())
        }
    };
    tenant.until("web", "three available pods", available(3, 1)).await.unwrap();
    let pods = tenant.api::<Pod>();
    let ours = ListParams::default().labels("app=web");
    let mut addresses: Vec<String> = Vec::new();
    for pod in pods.list(&ours).await.unwrap() {
        let status = pod.status.unwrap();
        assert_eq!(status.host_ip, Some(tenant.node.access.address.to_string()));
        addresses.extend(status.pod_ip);
    }
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), 3, "each pod has an address of its own: {addresses:?}");

    // A new template replaces all pods, one after the other.
    let change = json!({ "spec": {
        "replicas": 2,
        "template": { "metadata": { "annotations": { "round": "2" } } },
    } });
    let deployments = tenant.api::<Deployment>();
    deployments.patch("web", &PatchParams::default(), &Patch::Merge(&change)).await.unwrap();
    tenant.until("web", "two pods of the new template", available(2, 2)).await.unwrap();

    deployments.delete("web", &DeleteParams::background()).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn job_retries_failed_pods_and_completes() {
    let tenant = Tenant::new_namespace("job").await.unwrap();
    // Fails once in each pod's folder on the node, so the second pod of each index succeeds.
    let mut pod =
        tenant.shell("test -e /marks/$JOB_COMPLETION_INDEX || { touch /marks/$JOB_COMPLETION_INDEX; exit 3; }");
    let marks = tenant.node.folder().unwrap().join("marks");
    std::fs::create_dir_all(&marks).unwrap();
    pod["restartPolicy"] = json!("Never");
    pod["volumes"] = json!([{ "name": "marks", "hostPath": { "path": marks, "type": "Directory" } }]);
    pod["containers"][0]["volumeMounts"] = json!([{ "name": "marks", "mountPath": "/marks" }]);
    pod["containers"][0]["env"] = json!([{
        "name": "JOB_COMPLETION_INDEX",
        "valueFrom": { "fieldRef": { "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']" } },
    }]);
    let job = json!({
        "metadata": { "name": "work" },
        "spec": {
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "backoffLimit": 6,
            "template": { "spec": pod },
        },
    });
    tenant.create::<Job>(job).await.unwrap();
    let complete = |job: Option<&Job>| {
        let status = job?.status.as_ref()?;
        let done = status.conditions.iter().flatten().any(|one| one.type_ == "Complete" && one.status == "True");
        done.then_some((status.succeeded, status.failed))
    };
    let counts = tenant.until("work", "complete", complete).await.unwrap();
    assert_eq!(counts, (Some(2), Some(2)), "succeeded and failed pods");
    for pod in tenant.api::<Pod>().list(&ListParams::default()).await.unwrap() {
        let status = pod.status.unwrap();
        let phase = status.phase.unwrap();
        let ended = status.container_statuses.unwrap()[0].state.clone().unwrap().terminated.unwrap();
        let expected = if phase == "Succeeded" { (0, "Completed") } else { (3, "Error") };
        assert_eq!((ended.exit_code, ended.reason.as_deref().unwrap()), expected, "{phase}");
    }
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn cron_job_runs_on_schedule_and_on_demand() {
    let tenant = Tenant::new_namespace("cron").await.unwrap();
    let mut pod = tenant.shell("echo tick");
    pod["restartPolicy"] = json!("OnFailure");
    let cron = json!({
        "metadata": { "name": "tick" },
        "spec": { "schedule": "* * * * *", "jobTemplate": { "spec": { "template": { "spec": pod } } } },
    });
    tenant.create::<CronJob>(cron).await.unwrap();
    let kubectl = tenant.kubectl();
    kubectl.ok(&["create", "job", "--from=cronjob/tick", "by-hand"]).await.unwrap();
    let complete = |job: Option<&Job>| {
        let status = job?.status.as_ref()?;
        status.conditions.iter().flatten().any(|one| one.type_ == "Complete" && one.status == "True").then_some(())
    };
    tenant.until("by-hand", "complete", complete).await.unwrap();
    // At most one minute.
    let ticked = |cron: Option<&CronJob>| cron?.status.as_ref()?.last_successful_time.clone();
    tenant.until("tick", "a scheduled run that succeeded", ticked).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn daemon_set_replaces_its_deleted_pod() {
    let tenant = Tenant::new_namespace("daemon").await.unwrap();
    tenant.create::<DaemonSet>(workload("agent", json!({ "template": web(&tenant, "agent") }))).await.unwrap();
    let available = |set: Option<&DaemonSet>| {
        let status = set?.status.as_ref()?;
        (status.desired_number_scheduled == 1 && status.number_available == Some(1)).then_some(())
    };
    tenant.until("agent", "its pod available", available).await.unwrap();
    let pods = tenant.api::<Pod>();
    let first = pods.list(&ListParams::default()).await.unwrap().items.remove(0).metadata;
    let name = first.name.unwrap();
    pods.delete(&name, &DeleteParams::default()).await.unwrap();
    tenant.until(&name, "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    tenant.until("agent", "another pod available", available).await.unwrap();
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn stateful_set_starts_in_order_behind_a_headless_service() {
    let tenant = Tenant::new_namespace("stateful").await.unwrap();
    let service = json!({
        "metadata": { "name": "db" },
        "spec": { "clusterIP": "None", "selector": { "app": "db" }, "ports": [{ "name": "http", "port": 8080 }] },
    });
    tenant.create::<Service>(service).await.unwrap();
    let spec = json!({ "serviceName": "db", "replicas": 2, "template": web(&tenant, "db") });
    tenant.create::<StatefulSet>(workload("db", spec)).await.unwrap();
    let ready = |expected: i32| {
        move |set: Option<&StatefulSet>| {
            let status = set?.status.as_ref()?;
            (status.replicas == expected && status.ready_replicas.unwrap_or_default() == expected).then_some(())
        }
    };
    tenant.until("db", "two ready pods", ready(2)).await.unwrap();
    let created = async |name: &str| tenant.api::<Pod>().get(name).await.unwrap();
    let (first, second) = (created("db-0").await, created("db-1").await);
    let ready_at = first.status.as_ref().unwrap().conditions.as_ref().unwrap();
    let ready_at = ready_at.iter().find(|one| one.type_ == "Ready").unwrap().last_transition_time.clone().unwrap();
    assert!(second.metadata.creation_timestamp.clone().unwrap() >= ready_at, "the second waits for the first");
    let spec = first.spec.as_ref().unwrap();
    assert_eq!((spec.hostname.as_deref(), spec.subdomain.as_deref()), (Some("db-0"), Some("db")));
    let output = tenant.kubectl().ok(&["get", "endpointslices", "-o", "name"]).await.unwrap();
    let slice = output.trim().rsplit('/').next().unwrap();
    let addresses = |slice: Option<&EndpointSlice>| {
        let ready =
            slice?.endpoints.iter().flatten().filter(|one| one.conditions.as_ref().and_then(|c| c.ready) == Some(true));
        let mut names: Vec<String> = ready.filter_map(|one| one.hostname.clone()).collect();
        names.sort();
        (names == ["db-0", "db-1"]).then_some(())
    };
    tenant.until(slice, "the addresses of both pods", addresses).await.unwrap();

    // Scaled down to one: the last pod is removed first, and the first is unchanged.
    let fewer = json!({ "spec": { "replicas": 1 } });
    let sets = tenant.api::<StatefulSet>();
    sets.patch("db", &PatchParams::default(), &Patch::Merge(&fewer)).await.unwrap();
    tenant.until("db-1", "gone", |pod: Option<&Pod>| pod.is_none().then_some(())).await.unwrap();
    tenant.until("db", "one ready pod", ready(1)).await.unwrap();
    assert_eq!(created("db-0").await.metadata.uid, first.metadata.uid);
    tenant.delete_namespace().await.unwrap();
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pod_reads_config_map_token_and_downward_fields() {
    let tenant = Tenant::new_namespace("config").await.unwrap();
    let map = json!({ "metadata": { "name": "settings" }, "data": { "colour": "green", "file.txt": "from the map" } });
    tenant.create::<ConfigMap>(map).await.unwrap();
    let script = "echo $COLOUR; cat /settings/file.txt; echo; cat /var/run/secrets/kubernetes.io/serviceaccount/namespace; \
                  echo; cut -d. -f1 /var/run/secrets/kubernetes.io/serviceaccount/token | wc -c; echo $SELF";
    let mut pod = tenant.shell(script);
    pod["restartPolicy"] = json!("Never");
    pod["volumes"] = json!([{ "name": "settings", "configMap": { "name": "settings" } }]);
    pod["containers"][0]["volumeMounts"] = json!([{ "name": "settings", "mountPath": "/settings" }]);
    pod["containers"][0]["env"] = json!([
        { "name": "COLOUR", "valueFrom": { "configMapKeyRef": { "name": "settings", "key": "colour" } } },
        { "name": "SELF", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } },
    ]);
    tenant.pod("reader", pod).await.unwrap();
    tenant.until_phase("reader", "Succeeded").await.unwrap();
    let output = tenant.kubectl().ok(&["logs", "reader"]).await.unwrap();
    let lines: Vec<&str> = output.lines().collect();
    assert_eq!(lines.len(), 5, "{output}");
    assert_eq!(
        (lines[0], lines[1], lines[2], lines[4]),
        ("green", "from the map", tenant.namespace.as_str(), "reader")
    );
    assert!(lines[3].trim().parse::<u32>().unwrap() > 20, "the token's header: {output}");
    tenant.delete_namespace().await.unwrap();
}
