//! The benchmark's client of the cluster: creates, deletes and watches pods, and removes objects of earlier runs.

use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::StreamExt;
use futures_util::TryStreamExt;
use futures_util::stream;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Api;
use kube::Client;
use kube::api::DeleteParams;
use kube::api::ListParams;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::api::PostParams;
use kube::config::KubeConfigOptions;
use kube::config::Kubeconfig;
use kube::runtime::WatchStreamExt;
use kube::runtime::wait::await_condition;
use kube::runtime::watcher;
use serde_json::json;
use tokio_util::task::AbortOnDropHandle;

use super::observed::ObservedPods;
use crate::manifest::LABEL;
use crate::manifest::NAMESPACE;
use crate::stamps::monotonic_now;

/// Time for the controllers to create the default service account.
const ACCOUNT_LIMIT: Duration = Duration::from_secs(60);
/// Time until objects without a node are removed.
const REMOVAL_LIMIT: Duration = Duration::from_secs(60);
/// Poll interval of waits that are not measured.
const POLL: Duration = Duration::from_millis(200);
/// Concurrent requests.
const PARALLEL: usize = 64;

/// Selects events of OOM kills.
const OOM_EVENTS: &str = "involvedObject.kind=Pod,reason=OOMKilled";

/// A client of the API server. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct ClusterClient {
    pods: Api<Pod>,
    nodes: Api<Node>,
    accounts: Api<ServiceAccount>,
    deployments: Api<Deployment>,
    replica_sets: Api<ReplicaSet>,
    secrets: Api<Secret>,
    events: Api<Event>,
    node: String,
}

impl ClusterClient {
    /// Connects with the kubeconfig.
    ///
    /// # Errors
    /// The kubeconfig is unusable.
    pub(crate) async fn connect(kubeconfig: &Path, node: &str) -> anyhow::Result<Self> {
        let file = || format!("kubeconfig {}", kubeconfig.display());
        let read = Kubeconfig::read_from(kubeconfig).with_context(file)?;
        let config =
            kube::Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await.with_context(file)?;
        let client = Client::try_from(config).with_context(file)?;
        Ok(Self {
            pods: Api::namespaced(client.clone(), NAMESPACE),
            nodes: Api::all(client.clone()),
            accounts: Api::namespaced(client.clone(), NAMESPACE),
            deployments: Api::namespaced(client.clone(), NAMESPACE),
            replica_sets: Api::namespaced(client.clone(), NAMESPACE),
            secrets: Api::namespaced(client.clone(), NAMESPACE),
            events: Api::namespaced(client, NAMESPACE),
            node: node.to_owned(),
        })
    }

    /// Waits until pods can be created: admission needs the namespace's service account.
    ///
    /// # Errors
    /// There is none after [`ACCOUNT_LIMIT`].
    pub(crate) async fn until_usable(&self) -> anyhow::Result<()> {
        let exists = |account: Option<&ServiceAccount>| account.is_some();
        let waiting = await_condition(self.accounts.clone(), "default", exists);
        let done = tokio::time::timeout(ACCOUNT_LIMIT, waiting).await;
        done.context("there is no default service account")?.context("waiting for the service account")?;
        Ok(())
    }

    /// Watches the benchmark's pods for as long as the handle is kept.
    pub(crate) fn watch(&self) -> (ObservedPods, AbortOnDropHandle<()>) {
        let observed = ObservedPods::default();
        let config = watcher::Config::default().labels(&selector());
        let events = watcher(self.pods.clone(), config).default_backoff();
        let task = tokio::spawn(observed.clone().follow(events));
        (observed, AbortOnDropHandle::new(task))
    }

    /// Watches events of OOM kills of pods for as long as the handle is kept.
    pub(super) fn watch_oom_events(&self, observed: &ObservedPods) -> AbortOnDropHandle<()> {
        let config = watcher::Config::default().fields(OOM_EVENTS);
        let events = watcher(self.events.clone(), config).default_backoff().applied_objects();
        AbortOnDropHandle::new(tokio::spawn(observed.clone().follow_oom_events(events)))
    }

    /// Waits until the node is Ready; returns when the watch reported it (CLOCK_MONOTONIC nanoseconds).
    ///
    /// # Errors
    /// The watch fails.
    pub(crate) async fn node_ready(&self) -> anyhow::Result<u64> {
        let is_ready = |node: Option<&Node>| {
            let status = node.and_then(|node| node.status.as_ref());
            let mut conditions = status.into_iter().flat_map(|status| status.conditions.iter().flatten());
            conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
        };
        await_condition(self.nodes.clone(), &self.node, is_ready).await.context("waiting for the node")?;
        monotonic_now()
    }

    /// Waits until the node has no memory pressure: until then it admits no pod without requests.
    ///
    /// # Errors
    /// The watch fails.
    pub(crate) async fn without_memory_pressure(&self) -> anyhow::Result<()> {
        let is_free = |node: Option<&Node>| {
            let status = node.and_then(|node| node.status.as_ref());
            let mut conditions = status.into_iter().flat_map(|status| status.conditions.iter().flatten());
            conditions.any(|condition| condition.type_ == "MemoryPressure" && condition.status == "False")
        };
        await_condition(self.nodes.clone(), &self.node, is_free)
            .await
            .context("waiting for the end of the pressure")?;
        Ok(())
    }

    /// Creates the pods concurrently.
    ///
    /// # Errors
    /// The API server rejects one of them.
    pub(crate) async fn create(&self, pods: &[Pod]) -> anyhow::Result<()> {
        let create = async |pod: &Pod| {
            self.pods.create(&PostParams::default(), pod).await.map(drop).context("cannot create a pod")
        };
        stream::iter(pods).map(create).buffer_unordered(PARALLEL).try_collect().await
    }

    /// Deletes the pods concurrently; returns the time of each request (CLOCK_MONOTONIC nanoseconds), in the same
    /// order.
    ///
    /// # Errors
    /// The API server rejects one of the deletions.
    pub(crate) async fn delete(&self, names: &[String]) -> anyhow::Result<Vec<u64>> {
        let delete = async |name: &String| {
            let at = monotonic_now()?;
            self.pods.delete(name, &DeleteParams::default()).await.with_context(|| format!("cannot delete {name}"))?;
            anyhow::Ok(at)
        };
        stream::iter(names).map(delete).buffered(PARALLEL).try_collect().await
    }

    /// The Deployments.
    pub(super) fn deployments(&self) -> Api<Deployment> {
        self.deployments.clone()
    }

    /// Creates a Deployment.
    ///
    /// # Errors
    /// The API server rejects it.
    pub(super) async fn create_deployment(&self, deployment: &Deployment) -> anyhow::Result<()> {
        self.deployments
            .create(&PostParams::default(), deployment)
            .await
            .map(drop)
            .context("cannot create a Deployment")
    }

    /// Changes the template of a Deployment, so that all its pods are replaced; returns its new generation.
    ///
    /// # Errors
    /// The API server rejects the change.
    pub(super) async fn update_deployment(&self, name: &str) -> anyhow::Result<i64> {
        let change = json!({ "spec": { "template": { "metadata": { "annotations": { "keblet.dev/round": "2" } } } } });
        let updated = self.deployments.patch(name, &PatchParams::default(), &Patch::Merge(&change)).await;
        let updated = updated.with_context(|| format!("cannot update Deployment {name}"))?;
        updated.metadata.generation.with_context(|| format!("Deployment {name} has no generation"))
    }

    /// Deletes a Deployment; its pods are removed later.
    ///
    /// # Errors
    /// The API server rejects it.
    pub(super) async fn delete_deployment(&self, name: &str) -> anyhow::Result<()> {
        let deleted = self.deployments.delete(name, &DeleteParams::background()).await;
        deleted.map(drop).with_context(|| format!("cannot delete Deployment {name}"))
    }

    /// Waits until the benchmark has no pod.
    ///
    /// # Errors
    /// A request fails.
    pub(super) async fn until_no_pods(&self) -> anyhow::Result<()> {
        let ours = ListParams::default().labels(&selector());
        while !self.pods.list_metadata(&ours).await.context("cannot list the benchmark's pods")?.items.is_empty() {
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Changes the CPU limit of a pod's container in place.
    ///
    /// # Errors
    /// The API server rejects it.
    pub(super) async fn resize(&self, pod: &str, cpu: &str) -> anyhow::Result<()> {
        let resources = json!({ "limits": { "cpu": cpu } });
        let change = json!({ "spec": { "containers": [{ "name": "main", "resources": resources }] } });
        let resized =
            self.pods.patch_subresource("resize", pod, &PatchParams::default(), &Patch::Strategic(&change)).await;
        resized.map(drop).with_context(|| format!("cannot resize {pod}"))
    }

    /// Creates secrets.
    ///
    /// # Errors
    /// The API server rejects one of them.
    pub(super) async fn create_secrets(&self, names: &[String]) -> anyhow::Result<()> {
        for name in names {
            let secret =
                json!({ "metadata": { "name": name, "labels": { LABEL.0: LABEL.1 } }, "stringData": { "key": name } });
            let secret = serde_json::from_value(secret).context("the manifest of a secret")?;
            let created = self.secrets.create(&PostParams::default(), &secret).await;
            created.with_context(|| format!("cannot create secret {name}"))?;
        }
        Ok(())
    }

    /// Reads a secret.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) async fn read_secret(&self, name: &str) -> anyhow::Result<()> {
        self.secrets.get(name).await.map(drop).with_context(|| format!("cannot read secret {name}"))
    }

    /// Requests a token of the pods' service account.
    ///
    /// # Errors
    /// The API server rejects it.
    pub(super) async fn request_token(&self) -> anyhow::Result<()> {
        let request = serde_json::from_value(json!({ "spec": { "audiences": [], "expirationSeconds": 3600 } }));
        let request = request.context("the request of a token")?;
        let token = self.accounts.create_token_request("default", &PostParams::default(), &request).await;
        token.map(drop).context("cannot get a token")
    }

    /// Removes the benchmark's objects and the Node, also if no agent runs.
    ///
    /// # Errors
    /// A request fails, or the node still exists after [`REMOVAL_LIMIT`].
    pub(crate) async fn sweep(&self) -> anyhow::Result<()> {
        let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        let ours = ListParams::default().labels(&selector());
        let background = DeleteParams::background();
        // Pods are last, or their controllers would replace them.
        self.deployments.delete_collection(&background, &ours).await.context("cannot delete the Deployments")?;
        self.replica_sets.delete_collection(&background, &ours).await.context("cannot delete the ReplicaSets")?;
        self.secrets.delete_collection(&background, &ours).await.context("cannot delete the secrets")?;
        self.pods.delete_collection(&at_once, &ours).await.context("cannot delete the benchmark's pods")?;
        match self.nodes.delete(&self.node, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            result => drop(result.with_context(|| format!("cannot delete node {}", self.node))?),
        }
        let gone = |node: Option<&Node>| node.is_none();
        tokio::time::timeout(REMOVAL_LIMIT, await_condition(self.nodes.clone(), &self.node, gone))
            .await
            .with_context(|| format!("node {} is not removed", self.node))?
            .context("waiting for the removal of the node")?;
        Ok(())
    }
}

fn selector() -> String {
    format!("{}={}", LABEL.0, LABEL.1)
}
