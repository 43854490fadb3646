//! A node agent under measurement, joined to the cluster.

use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use keblet::runtime::Runtime;
use keblet::runtime::RuntimeEndpoint;
use serde_json::json;

use super::ClusterArgs;
use super::api::ClusterClient;
use super::observed::ObservedPods;
use super::observed::PodTimes;
use crate::agent;
use crate::agent::Agent;
use crate::agent::Ports;
use crate::manifest;
use crate::manifest::PodSettings;
use crate::participant::Participant;
use crate::stamps::monotonic_now;
use crate::stamps::seconds;
use crate::workload::BenchPod;

/// Time for an agent to become idle before pods are created.
const START_SETTLE: Duration = Duration::from_secs(2);
/// Time for the last process to set its signal handlers: until then, PID 1 ignores SIGTERM.
const UP_SETTLE: Duration = Duration::from_secs(2);
const NODE_LIMIT: Duration = Duration::from_secs(60);

/// Flags that a peer would get as well.
const KEBLET_FLAGS: &str = "run --config={config} --root-dir={root} --cert-dir={root}/pki --kubeconfig={kubeconfig} \
                            --hostname-override={node} --node-ip={ip}";

/// What measurements need of the session.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) args: ClusterArgs,
    pub(super) keblet: std::path::PathBuf,
    pub(super) endpoint: RuntimeEndpoint,
    pub(super) runtime: Runtime,
    pub(super) runtime_pid: Option<u32>,
    pub(super) client: ClusterClient,
}

impl Context {
    /// How long the slowest agent may take for this many pods.
    pub(super) fn limit(&self, pods: usize) -> Duration {
        crate::workload::time_limit(u32::try_from(pods).unwrap_or(u32::MAX))
    }
}

/// A running agent and the times of its pods.
pub(super) struct BenchNode {
    pub(super) agent: Agent,
    pub(super) observed: ObservedPods,
    pub(super) settings: PodSettings,
    /// Start of the agent to its node being Ready, in seconds.
    pub(super) ready: f64,
    /// Whether it is keblet, in any configuration.
    pub(super) is_keblet: bool,
    node: String,
}

impl BenchNode {
    /// Starts the agent of a participant and waits for its node.
    ///
    /// # Errors
    /// The agent exited, or its node is not Ready after [`NODE_LIMIT`].
    pub(super) async fn start(
        context: &Context,
        participant: &Participant,
        settings: PodSettings,
        observed: ObservedPods,
    ) -> anyhow::Result<Self> {
        let mut agent = launch(context, participant, &settings)?;
        let client = context.client.clone();
        let ready = agent.while_running(async {
            let ready = tokio::time::timeout(NODE_LIMIT, client.node_ready()).await;
            ready.with_context(|| format!("the node is not Ready after {}", humantime::format_duration(NODE_LIMIT)))?
        });
        let ready = ready.await?;
        let ready = seconds(agent.begun(), ready);
        tokio::time::sleep(START_SETTLE).await;
        let is_keblet = matches!(participant, Participant::Keblet { .. });
        Ok(Self { ready, is_keblet, agent, observed, settings, node: context.args.node_name.clone() })
    }

    /// The object of a pod.
    ///
    /// # Errors
    /// The manifest is not a pod.
    pub(super) fn object(&self, pod: &BenchPod) -> anyhow::Result<Pod> {
        let manifest = manifest::bound_pod(pod, &self.settings, &self.node);
        serde_json::from_value(manifest).with_context(|| format!("the manifest of pod {}", pod.name))
    }

    /// Creates pods concurrently and waits until `time` is known of each; returns the time of the first creation, and
    /// `time` of each. `what` names it in errors.
    ///
    /// # Errors
    /// The agent exited, or a pod does not reach the state in time.
    pub(super) async fn create(
        &mut self,
        context: &Context,
        pods: &[BenchPod],
        what: &str,
        time: impl Fn(&PodTimes) -> Option<u64>,
    ) -> anyhow::Result<(u64, Vec<u64>)> {
        let objects = pods.iter().map(|pod| self.object(pod)).collect::<anyhow::Result<Vec<_>>>()?;
        let limit = context.limit(pods.len());
        let begin = monotonic_now()?;
        let observed = self.observed.clone();
        let times = self.agent.while_running(async {
            context.client.create(&objects).await?;
            observed.wait(&names(pods), what, time, limit).await
        });
        Ok((begin, times.await?))
    }

    /// Deletes pods concurrently and waits until they are gone; returns the seconds that each took.
    ///
    /// # Errors
    /// The agent exited, or a pod is not gone in time.
    pub(super) async fn delete(&mut self, context: &Context, pods: &[BenchPod]) -> anyhow::Result<Vec<f64>> {
        tokio::time::sleep(UP_SETTLE).await;
        let names = names(pods);
        let limit = context.limit(pods.len());
        let observed = self.observed.clone();
        let deleted = self.agent.while_running(async {
            let requested = context.client.delete(&names).await?;
            let gone = observed.wait(&names, "gone", |times| times.gone, limit).await?;
            Ok(requested.into_iter().zip(gone).map(|(requested, gone)| seconds(requested, gone)).collect())
        });
        deleted.await
    }
}

/// Names of pods.
pub(super) fn names(pods: &[BenchPod]) -> Vec<String> {
    pods.iter().map(|pod| pod.name.clone()).collect()
}

fn launch(context: &Context, participant: &Participant, settings: &PodSettings) -> anyhow::Result<Agent> {
    let args = &context.args;
    let folder = &settings.folder;
    let ports = Ports::free();
    let mut config = agent::kubelet_configuration(folder, &context.endpoint, args.pods.max(args.density_pods), &ports);
    config["staticPodPath"] = json!("");
    config["enableControllerAttachDetach"] = json!(true);
    if let Some(root) = &args.cgroup_root {
        config["cgroupsPerQOS"] = json!(true);
        config["cgroupRoot"] = json!(root);
    }
    let config = agent::write_configuration(participant, &config, folder)?;
    let flags = if args.node_ip.is_some() { KEBLET_FLAGS } else { KEBLET_FLAGS.trim_end_matches(" --node-ip={ip}") };
    let placeholders = [
        ("{config}", agent::quoted(&config)),
        ("{root}", agent::quoted(&folder.join("root"))),
        ("{kubeconfig}", agent::quoted(&args.node_kubeconfig)),
        ("{node}", args.node_name.clone()),
        ("{ip}", args.node_ip.map(|ip| ip.to_string()).unwrap_or_default()),
    ];
    let command = agent::command(participant, &context.keblet, flags, &placeholders);
    Agent::launch(participant.name(), command, folder, &ports)
}
