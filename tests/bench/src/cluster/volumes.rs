//! Volumes from API objects: what they add to the time until the sandbox of a pod is created.
//!
//! Agents create the folder of a pod's logs just before its sandbox, when all volumes are there.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::try_join_all;
use serde_json::json;

use super::bench_node::BenchNode;
use super::bench_node::Context;
use super::parts::Row;
use crate::manifest::NAMESPACE;
use crate::metric::Metric;
use crate::stamps::monotonic_now;
use crate::stamps::seconds;
use crate::workload;
use crate::workload::BenchPod;
use crate::workload::Extras;

/// Secrets of a pod, each of them a volume.
const SECRETS: usize = 3;
/// Projected volumes of a pod, each with a token, a ConfigMap, one of the secrets and a field of the pod.
const PROJECTED: usize = 4;
/// The resolution of the times.
const POLL: Duration = Duration::from_millis(1);

/// Measures pods with and without the volumes, one after the other.
///
/// # Errors
/// The agent exited, or a pod is not started in time.
pub(super) async fn measure(
    context: &Context,
    node: &mut BenchNode,
    prefix: &str,
    row: &mut Row<'_>,
) -> anyhow::Result<()> {
    let without = workload::running(context.args.pods, &format!("{prefix}-plain"), &node.settings.stamps());
    let mut with = workload::running(context.args.pods, &format!("{prefix}-volumes"), &node.settings.stamps());
    for pod in &mut with {
        pod.extras = extras(&pod.name);
        context.client.create_secrets(&secrets(&pod.name)).await?;
    }
    let mut medians = [0.0; 2];
    for (pods, median) in [without, with].iter().zip(&mut medians) {
        let mut times = Vec::new();
        for pod in pods {
            times.push(until_sandbox(context, node, pod).await?);
        }
        *median = median_of(times);
        node.delete(context, pods).await?;
    }
    row.add(Metric::VolumeSetup, vec![medians[1] - medians[0]]);
    Ok(())
}

/// The requests for the objects of such pods, one pod after the other.
///
/// # Errors
/// The API server rejects a request.
pub(super) async fn request(context: &Context, prefix: &str, row: &mut Row<'_>) -> anyhow::Result<()> {
    let mut times = Vec::new();
    for index in 0..context.args.pods {
        let names = secrets(&format!("{prefix}-volumes-{index}"));
        context.client.create_secrets(&names).await?;
        let begin = monotonic_now()?;
        let secrets = try_join_all(names.iter().map(|name| context.client.read_secret(name)));
        tokio::try_join!(secrets, context.client.request_token())?;
        times.push(seconds(begin, monotonic_now()?));
    }
    row.add(Metric::VolumeSetup, vec![median_of(times)]);
    Ok(())
}

/// Seconds from the creation of a pod until its sandbox is created.
async fn until_sandbox(context: &Context, node: &mut BenchNode, pod: &BenchPod) -> anyhow::Result<f64> {
    let object = node.object(pod)?;
    let logs = node.settings.folder.join("logs");
    let (limit, observed) = (context.limit(1), node.observed.clone());
    node.agent
        .while_running(async {
            let begin = monotonic_now()?;
            context.client.create(std::slice::from_ref(&object)).await?;
            let created = tokio::time::timeout(limit, until_logs(&logs, &pod.name)).await;
            let created = created.with_context(|| format!("pod {} has no folder of logs in time", pod.name))??;
            observed.wait(std::slice::from_ref(&pod.name), "Ready", |times| times.ready, limit).await?;
            Ok(seconds(begin, created))
        })
        .await
}

async fn until_logs(logs: &Path, pod: &str) -> anyhow::Result<u64> {
    let prefix = format!("{NAMESPACE}_{pod}_");
    loop {
        let mut entries = std::fs::read_dir(logs).into_iter().flatten().flatten();
        if entries.any(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)) {
            return monotonic_now();
        }
        tokio::time::sleep(POLL).await;
    }
}

fn secrets(pod: &str) -> Vec<String> {
    (0..SECRETS).map(|index| format!("{pod}-{index}")).collect()
}

fn extras(pod: &str) -> Extras {
    let names = secrets(pod);
    let mut extras = Extras::default();
    for (index, name) in names.iter().enumerate() {
        let volume = json!({ "name": format!("secret-{index}"), "secret": { "secretName": name } });
        extras.volumes.push((volume, format!("/secret-{index}")));
    }
    for index in 0..PROJECTED {
        let sources = json!([
            { "serviceAccountToken": { "path": "token", "expirationSeconds": 3600 } },
            { "configMap": { "name": "kube-root-ca.crt" } },
            { "secret": { "name": names[index % SECRETS] } },
            { "downwardAPI": { "items": [{ "path": "name", "fieldRef": { "fieldPath": "metadata.name" } }] } },
        ]);
        let volume = json!({ "name": format!("projected-{index}"), "projected": { "sources": sources } });
        extras.volumes.push((volume, format!("/projected-{index}")));
    }
    extras
}

fn median_of(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = |index: usize| values.get(index).copied().unwrap_or_default();
    // Of an even number the mean of the two in the middle.
    f64::midpoint(at(values.len().saturating_sub(1) / 2), at(values.len() / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_has_volumes_of_its_own_secrets() {
        let extras = extras("p");
        assert_eq!(extras.volumes.len(), SECRETS + PROJECTED);
        assert_eq!(extras.volumes[2].0["secret"]["secretName"], "p-2");
        assert_eq!(extras.volumes[6].0["projected"]["sources"][2]["secret"]["name"], "p-0");
        assert_eq!(median_of(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median_of(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median_of(Vec::new()), 0.0);
    }
}
