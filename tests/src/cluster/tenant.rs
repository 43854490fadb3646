//! A test's share of the cluster: a namespace, a node and kubectl.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::ensure;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::serde::Serialize;
use k8s_openapi::serde::de::DeserializeOwned;
use keblet_peers::BUSYBOX_IMAGE;
use kube::Api;
use kube::Resource;
use kube::api::DeleteParams;
use kube::api::ListParams;
use kube::api::PostParams;
use serde_json::Value;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::Cluster;
use super::ClusterNode;
use super::Kubectl;
use super::TIMEOUT;
use super::until;
use super::until_gone;

const POLL: Duration = Duration::from_millis(20);

/// A namespace, and the node of its pods.
pub struct Tenant {
    /// The control plane.
    pub cluster: Cluster,
    /// The node of its pods.
    pub node: Arc<ClusterNode>,
    /// The namespace's name.
    pub namespace: String,
}

impl Tenant {
    /// A namespace on the shared node.
    ///
    /// # Errors
    /// Control plane or node do not start, or the namespace cannot be created.
    pub async fn new_namespace(name: &str) -> Result<Self> {
        let cluster = Cluster::shared().await?;
        let node = cluster.node().await?;
        Self::on(cluster, node, name).await
    }

    /// A namespace on this node, ready for pods.
    ///
    /// # Errors
    /// The namespace cannot be created or gets no service account.
    pub async fn on(cluster: Cluster, node: Arc<ClusterNode>, name: &str) -> Result<Self> {
        let namespace = format!("{name}-{:04x}", fastrand::u16(..));
        let object: Namespace = serde_json::from_value(json!({ "metadata": { "name": namespace } }))?;
        let api: Api<Namespace> = Api::all(cluster.client());
        api.create(&PostParams::default(), &object).await.context("cannot create the namespace")?;
        // The API server rejects pods until the namespace has a default service account.
        let accounts: Api<ServiceAccount> = Api::namespaced(cluster.client(), &namespace);
        until(&accounts, "default", "a default service account", |account| account.map(|_| ())).await?;
        Ok(Self { cluster, node, namespace })
    }

    /// The objects of a kind in the namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.cluster.client(), &self.namespace)
    }

    /// kubectl in the namespace.
    pub fn kubectl(&self) -> Kubectl {
        Kubectl::new(self.cluster.ready(), &self.namespace)
    }

    /// Creates an object from its JSON.
    ///
    /// # Errors
    /// The object is malformed or the API server rejects it.
    pub async fn create<K>(&self, object: Value) -> Result<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + DeserializeOwned + Serialize + Debug,
    {
        let name = object["metadata"]["name"].to_string();
        let object: K = serde_json::from_value(object).with_context(|| format!("{name} is not a {}", K::kind(&())))?;
        self.api().create(&PostParams::default(), &object).await.with_context(|| format!("cannot create {name}"))
    }

    /// A pod spec with one container `main` that runs a shell script, bound to the node.
    pub fn shell(&self, script: &str) -> Value {
        json!({
            "nodeSelector": { "kubernetes.io/hostname": self.node.name() },
            "terminationGracePeriodSeconds": 5,
            "containers": [{
                "name": "main",
                "image": BUSYBOX_IMAGE,
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", script],
            }],
        })
    }

    /// Creates a pod with this spec.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub async fn pod(&self, name: &str, spec: Value) -> Result<Pod> {
        let pod = json!({ "metadata": { "name": name, "labels": { "app": name } }, "spec": spec });
        self.create(pod).await
    }

    /// Waits until a port of the pod accepts connections, which a Ready pod without probes does not guarantee.
    ///
    /// # Errors
    /// The pod has no address or the port is not open in time.
    pub async fn until_listening(&self, name: &str, port: u16) -> Result<()> {
        let pod = self.until_ready(name).await?;
        let address = pod.status.and_then(|status| status.pod_ip).with_context(|| format!("{name} has no address"))?;
        let deadline = Instant::now() + TIMEOUT;
        while let Err(error) = TcpStream::connect(format!("{address}:{port}")).await {
            ensure!(Instant::now() < deadline, "{name} does not listen on {address}:{port}: {error}");
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// Waits until `pick` returns a value for the object. The error has the end of the agent's log.
    ///
    /// # Errors
    /// It does not in time.
    pub async fn until<K, T>(&self, name: &str, what: &str, pick: impl FnMut(Option<&K>) -> Option<T>) -> Result<T>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + Serialize
            + Debug
            + Send
            + 'static,
    {
        until(&self.api::<K>(), name, what, pick).await.with_context(|| self.node.log_excerpt())
    }

    /// Waits until the pod is Ready.
    ///
    /// # Errors
    /// It is not in time.
    pub async fn until_ready(&self, pod: &str) -> Result<Pod> {
        self.until(pod, "Ready", |pod: Option<&Pod>| pod.filter(|pod| is_ready(pod)).cloned()).await
    }

    /// Waits until the pod is in this phase.
    ///
    /// # Errors
    /// It is not in time.
    pub async fn until_phase(&self, pod: &str, phase: &str) -> Result<Pod> {
        let reached = |pod: Option<&Pod>| {
            pod.filter(|pod| pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some(phase)).cloned()
        };
        self.until(pod, phase, reached).await
    }

    /// Deletes the namespace and waits until all its pods are removed. Other objects are removed by the namespace
    /// controller later.
    ///
    /// # Errors
    /// A request fails, or a pod is not removed in time.
    pub async fn delete_namespace(self) -> Result<(Cluster, Arc<ClusterNode>)> {
        let api: Api<Namespace> = Api::all(self.cluster.client());
        api.delete(&self.namespace, &DeleteParams::default()).await.context("cannot delete the namespace")?;
        // In a terminating namespace no pod can be created any more.
        let (pods, soon) =
            (self.api::<Pod>(), DeleteParams { grace_period_seconds: Some(1), ..DeleteParams::default() });
        pods.delete_collection(&soon, &ListParams::default()).await.context("cannot delete the pods")?;
        for pod in pods.list_metadata(&ListParams::default()).await.context("cannot list the pods")? {
            let name = pod.metadata.name.unwrap_or_default();
            until_gone(&pods, &name).await.with_context(|| self.node.log_excerpt())?;
        }
        Ok((self.cluster, self.node))
    }
}

/// Whether the pod's condition Ready is True.
pub(super) fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.is_some_and(|all| all.iter().any(|one| one.type_ == "Ready" && one.status == "True"))
}
