//! RuntimeClasses: pods run with the handler of their class, and a class whose handler the runtime lacks runs nothing.

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::node::v1::RuntimeClass;
use keblet_tests::cgroups::CgroupFiles;
use keblet_tests::cluster::Tenant;
use keblet_tests::cluster::until_some;
use kube::Api;
use kube::api::DeleteParams;
use kube::api::PostParams;
use kube::runtime::watcher::Config;
use serde_json::Value;
use serde_json::json;

/// A RuntimeClass, named after the namespace: other tests share the control plane.
async fn class(tenant: &Tenant, suffix: &str, handler: &str, overhead: Value) -> Result<String> {
    let name = format!("{}-{suffix}", tenant.namespace);
    let class = json!({ "metadata": { "name": name }, "handler": handler, "overhead": overhead });
    let class: RuntimeClass = serde_json::from_value(class)?;
    let api: Api<RuntimeClass> = Api::all(tenant.cluster.client());
    api.create(&PostParams::default(), &class).await.context("cannot create the RuntimeClass")?;
    Ok(name)
}

#[tokio::test]
#[ignore = "real cluster"]
async fn pods_run_with_the_handler_of_their_runtime_class() -> Result<()> {
    let tenant = Tenant::new_namespace("classes").await?;
    let (known, unknown) =
        (class(&tenant, "known", "runc", Value::Null).await?, class(&tenant, "unknown", "no-such", Value::Null).await?);
    let script = "trap exit TERM; while :; do sleep 0.1; done";
    for (name, class) in [("plain", None), ("known", Some(&known)), ("unknown", Some(&unknown))] {
        let mut spec = tenant.shell(script);
        spec["runtimeClassName"] = json!(class);
        tenant.pod(name, spec).await?;
    }
    tenant.until_ready("plain").await?;
    tenant.until_ready("known").await?;
    let wanted = Config::default().fields("involvedObject.name=unknown,reason=FailedCreatePodSandBox");
    let failed = until_some(tenant.api::<Event>(), wanted, "the event of the failed sandbox", |event: &Event| {
        event.message.clone()
    });
    let failed = failed.await.with_context(|| tenant.node.log_excerpt())?;
    ensure!(failed.starts_with("Failed to create pod sandbox: rpc error: "), "{failed}");
    ensure!(failed.contains("no-such"), "{failed}");

    let api: Api<RuntimeClass> = Api::all(tenant.cluster.client());
    for name in [known, unknown] {
        api.delete(&name, &DeleteParams::default()).await?;
    }
    tenant.delete_namespace().await?;
    Ok(())
}

#[tokio::test]
#[ignore = "real cluster"]
async fn the_cgroup_of_a_pod_has_room_for_its_overhead() -> Result<()> {
    let tenant = Tenant::new_namespace("overhead").await?;
    let overhead = json!({ "podFixed": { "cpu": "50m", "memory": "32Mi" } });
    let class = class(&tenant, "heavy", "runc", overhead).await?;
    let mut spec = tenant.shell("sleep 3600");
    spec["runtimeClassName"] = json!(class);
    spec["containers"][0]["resources"] = json!({ "limits": { "cpu": "100m", "memory": "64Mi" } });
    tenant.pod("heavy", spec).await?;
    tenant.until_ready("heavy").await?;
    let mut pods = tenant.node.pods()?.into_iter().filter(|pod| pod.namespace == tenant.namespace);
    let containers = pods.next().context("no sandbox")?.containers;
    let pid = containers.iter().find_map(|container| container.pid).context("no process")?;
    let files = CgroupFiles::of_machine()?;
    let container = files.of_process(pid)?;
    let (of_pod, _) = container.rsplit_once('/').context("no cgroup of the pod")?;
    let limits = |path: &str| anyhow::Ok((files.quota(path)?, files.memory(path)?.map(|bytes| bytes >> 20)));
    let found = (limits(&container)?, limits(of_pod)?);
    ensure!(found == ((Some(10_000), Some(64)), (Some(15_000), Some(96))), "{found:?}");
    Api::<RuntimeClass>::all(tenant.cluster.client()).delete(&class, &DeleteParams::default()).await?;
    tenant.delete_namespace().await?;
    Ok(())
}
