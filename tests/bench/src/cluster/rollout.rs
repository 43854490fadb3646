//! A Deployment: its creation and its rolling update, by the cluster's own controllers and scheduler.

use anyhow::Context as _;
use k8s_openapi::api::apps::v1::Deployment;
use kube::runtime::wait::await_condition;
use serde_json::Value;
use serde_json::json;

use super::api::ClusterClient;
use super::bench_node::BenchNode;
use super::bench_node::Context;
use super::parts::Row;
use crate::manifest;
use crate::manifest::LABEL;
use crate::manifest::PodSettings;
use crate::metric::Metric;
use crate::stamps::monotonic_now;
use crate::stamps::seconds;
use crate::workload;
use crate::workload::Check;

/// Period of the pods' readiness probes.
const PERIOD: u32 = 1;

/// Measures both.
///
/// # Errors
/// The agent exited, or the pods are not available or removed in time.
pub(super) async fn measure(
    context: &Context,
    node: &mut BenchNode,
    prefix: &str,
    row: &mut Row<'_>,
) -> anyhow::Result<()> {
    let name = format!("{prefix}-rollout");
    let replicas = context.args.pods;
    let object = deployment(&name, replicas, &node.settings, &context.args.node_name)?;
    let limit = context.limit(2 * replicas as usize);
    let client = &context.client;
    let (created, updated) = node
        .agent
        .while_running(async {
            let measured = tokio::time::timeout(limit, create_and_update(client, &name, &object, replicas)).await;
            let measured = measured.with_context(|| format!("Deployment {name} is not available in time"))??;
            client.delete_deployment(&name).await?;
            let removed = tokio::time::timeout(limit, client.until_no_pods()).await;
            removed.with_context(|| format!("the pods of Deployment {name} are not removed in time"))??;
            Ok(measured)
        })
        .await?;
    row.add(Metric::ApplyToAvailable, vec![created]);
    row.add(Metric::RollingUpdate, vec![updated]);
    Ok(())
}

/// Seconds that creation and update took.
async fn create_and_update(
    client: &ClusterClient,
    name: &str,
    object: &Deployment,
    replicas: u32,
) -> anyhow::Result<(f64, f64)> {
    let begin = monotonic_now()?;
    client.create_deployment(object).await?;
    let available = until_rolled_out(client, name, 1, replicas).await?;
    let update = monotonic_now()?;
    let generation = client.update_deployment(name).await?;
    let updated = until_rolled_out(client, name, generation, replicas).await?;
    Ok((seconds(begin, available), seconds(update, updated)))
}

/// Waits until all pods are of this generation and available; returns when the watch reported it.
async fn until_rolled_out(client: &ClusterClient, name: &str, generation: i64, replicas: u32) -> anyhow::Result<u64> {
    let replicas = i32::try_from(replicas).context("too many pods")?;
    let is_done = |deployment: Option<&Deployment>| is_rolled_out(deployment, generation, replicas);
    await_condition(client.deployments(), name, is_done).await.with_context(|| format!("waiting for {name}"))?;
    monotonic_now()
}

fn is_rolled_out(deployment: Option<&Deployment>, generation: i64, replicas: i32) -> bool {
    let Some(status) = deployment.and_then(|deployment| deployment.status.as_ref()) else { return false };
    let counts = [status.replicas, status.updated_replicas, status.available_replicas];
    counts == [Some(replicas); 3] && status.observed_generation >= Some(generation)
}

fn deployment(name: &str, replicas: u32, settings: &PodSettings, node: &str) -> anyhow::Result<Deployment> {
    let pod = workload::serving(1, name, &settings.stamps(), Check::Http, PERIOD).remove(0);
    let mut spec = manifest::manifest(&pod, settings)["spec"].take();
    spec["nodeSelector"] = json!({ "kubernetes.io/hostname": node });
    let labels: Value = json!({ LABEL.0: LABEL.1 });
    let object = json!({
        "metadata": { "name": name, "labels": labels },
        "spec": {
            "replicas": replicas,
            "selector": { "matchLabels": labels },
            "template": { "metadata": { "labels": labels }, "spec": spec },
        },
    });
    serde_json::from_value(object).with_context(|| format!("the manifest of Deployment {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollout_is_done_when_only_available_pods_of_the_generation_are_left() {
        let status = |replicas: i32, updated: i32, available: i32| {
            let status = json!({ "status": { "replicas": replicas, "updatedReplicas": updated,
                "availableReplicas": available, "observedGeneration": 2 } });
            serde_json::from_value::<Deployment>(status).unwrap()
        };
        assert!(is_rolled_out(Some(&status(3, 3, 3)), 2, 3));
        for (deployment, generation) in [((4, 3, 3), 2), ((3, 2, 3), 2), ((3, 3, 2), 2), ((3, 3, 3), 3)] {
            let (replicas, updated, available) = deployment;
            assert!(!is_rolled_out(Some(&status(replicas, updated, available)), generation, 3), "{deployment:?}");
        }
        assert!(!is_rolled_out(None, 1, 3));
    }
}
