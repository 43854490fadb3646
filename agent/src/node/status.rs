//! The loop that updates the Node's status: registers, computes, sends differences. `report` decides when, `content` what.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::core::v1::ContainerImage;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::Client;
use kube::api::Patch;
use kube::api::PatchParams;
use kube::api::PostParams;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::addresses;
use super::addresses::Network;
use super::cache::NodeCache;
use super::call;
use super::call::CallError;
use super::call::Connections;
use super::call::FailureLog;
use super::conditions;
use super::conditions::Readiness;
use super::config::NodeConfig;
use super::content;
use super::content::NodeInfo;
use super::events::ReportedState;
use super::host::Host;
use super::images;
use super::initial;
use super::machine::Machine;
use super::patch;
use super::reconcile;
use super::report;
use super::report::Schedule;
use super::runtime_view::RuntimeView;
use super::startup::Startup;
use super::time;
use crate::metrics::Metrics;
use crate::model::Backoff;
use crate::model::Clock;
use crate::model::Pressures;
use crate::recorder::Recorder;
use crate::retry::Operation;
use crate::retry::RetryTracker;
use crate::runtime::RuntimeState;
use crate::status::NodeAddresses;

/// What fails, for the log.
const UPDATE: &str = "cannot update the node status";
/// Tries of one status update, back to back.
const TRIES: usize = 5;
/// Pause after the first failure to register the Node.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Deadline of the calls that register the Node.
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(30);
/// Changes within this time are sent together.
const COALESCE_DELAY: Duration = Duration::from_millis(20);
/// Interval after which images are listed even if no pull or removal was noticed.
const IMAGES_PERIOD: Duration = Duration::from_secs(300);
/// The target of lists of images that fail.
const NODE: &str = "this node";

/// Inputs and outputs of the loop.
pub struct Inputs<H> {
    /// The configuration.
    pub config: Arc<NodeConfig>,
    /// The machine.
    pub host: H,
    /// For registration.
    pub main: Client,
    /// For updates: without a rate limit.
    pub heartbeat: Client,
    /// The own Node.
    pub cache: NodeCache,
    /// The container runtime's state.
    pub runtime: watch::Receiver<RuntimeState>,
    /// Messages of failing health checks.
    pub health: watch::Receiver<Vec<String>>,
    /// Resources under pressure.
    pub pressures: watch::Receiver<Pressures>,
    /// Names of volumes in use; `None` until they are known.
    pub volumes_in_use: watch::Receiver<Option<BTreeSet<String>>>,
    /// The node is shutting down.
    pub shutting_down: watch::Receiver<bool>,
    /// Incremented with every pulled or removed image.
    pub images: watch::Receiver<u64>,
    /// Publishes the node's addresses.
    pub addresses: watch::Sender<NodeAddresses>,
    /// Events.
    pub recorder: Recorder,
    /// Retired when updates fail repeatedly.
    pub connections: Arc<dyn Connections>,
    /// Startup durations.
    pub metrics: Arc<Metrics>,
    /// Wall clock.
    pub clock: Clock,
}

/// Updates the status of one Node.
pub struct StatusLoop<H> {
    inputs: Inputs<H>,
    nodes: Nodes,
    registered: bool,
    runtime: RuntimeView,
    images: Option<Vec<ContainerImage>>,
    images_at: Option<Instant>,
    /// The pod CIDR that the runtime has accepted.
    pod_cidr: String,
    schedule: Schedule,
    /// What was sent and the API server has not kept, such as a field whose feature gate is off there: it is sent with the
    /// next report, not with every computation.
    not_kept: Option<Value>,
    reported: ReportedState,
    startup: Startup,
    /// Errors that were logged already.
    logged_errors: Vec<String>,
    failures: FailureLog,
    /// Calls that the runtime refuses.
    retries: RetryTracker,
}

/// The Node through both clients.
struct Nodes {
    main: Api<Node>,
    heartbeat: Api<Node>,
    timeout: Duration,
}

/// Machine and network at one moment.
struct HostReading {
    machine: Machine,
    network: Network,
}

impl<H: Host> StatusLoop<H> {
    /// Does nothing until [`Self::run`].
    pub fn new(inputs: Inputs<H>) -> Self {
        let timeout = call::heartbeat_timeout(&inputs.config);
        let (main, heartbeat) = (Api::all(inputs.main.clone()), Api::all(inputs.heartbeat.clone()));
        Self {
            nodes: Nodes { main, heartbeat, timeout },
            registered: !inputs.config.register,
            runtime: RuntimeView::default(),
            images: None,
            images_at: None,
            pod_cidr: String::new(),
            schedule: Schedule::new(inputs.config.report_period),
            not_kept: None,
            reported: ReportedState::default(),
            startup: Startup::new(inputs.metrics.clone()),
            logged_errors: Vec::new(),
            failures: FailureLog::default(),
            retries: RetryTracker::new(inputs.recorder.clone(), Some(inputs.metrics.clone())),
            inputs,
        }
    }

    /// Runs until `shutdown`, which drops a call in progress.
    pub async fn run(mut self, shutdown: CancellationToken) {
        shutdown.run_until_cancelled(self.run_loop()).await;
    }

    async fn run_loop(&mut self) {
        let mut runtime = self.inputs.runtime.clone();
        // Without the first state of the runtime the node would be NotReady at first.
        drop(runtime.wait_for(|state| *state != RuntimeState::Unknown).await);
        let mut own = self.inputs.cache.subscribe();
        let configured = self.inputs.config.pod_cidr.clone();
        if !configured.is_empty() {
            self.apply_pod_cidr(&configured).await;
        }
        loop {
            own.mark_unchanged();
            self.sync().await;
            let pause = report::jittered(self.inputs.config.update_period, fastrand::f64());
            let next = Instant::now() + pause;
            let next = self.runtime.down_at(Instant::now()).map_or(next, |down| next.min(down));
            if self.images_at.is_none() && self.registered {
                // Registration did not wait for the images.
                continue;
            }
            let known = own.borrow().clone();
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                () = self.wait_for_change(&mut own, known) => tokio::time::sleep(COALESCE_DELAY).await,
            }
        }
    }

    /// Waits for a change of an input.
    async fn wait_for_change(&mut self, own: &mut watch::Receiver<Option<Arc<Node>>>, known: Option<Arc<Node>>) {
        let inputs = &mut self.inputs;
        tokio::select! {
            Ok(()) = inputs.runtime.changed() => {}
            Ok(()) = inputs.health.changed() => {}
            Ok(()) = inputs.pressures.changed() => {}
            Ok(()) = inputs.volumes_in_use.changed() => {}
            Ok(()) = inputs.shutting_down.changed() => {}
            true = until_changed(own, known) => {}
            else => std::future::pending().await,
        }
    }

    /// Registers the node if needed, and updates its status.
    async fn sync(&mut self) {
        if !self.registered {
            return self.register().await;
        }
        if self.schedule.is_new() {
            self.wait_until_healthy().await;
        }
        let host = self.read_host().await;
        self.list_images().await;
        for attempt in 0..TRIES {
            let Err(error) = self.update(&host, attempt > 0).await else {
                self.failures.succeeded(UPDATE);
                return;
            };
            self.failures.failed(&self.inputs.config.name, UPDATE, &error);
            if error.is_not_found() {
                // A retry does not help: the Node has to be created by another client.
                return;
            }
            if attempt > 0 && error.is_unanswered() {
                self.inputs.connections.retire();
            }
        }
    }

    /// A node that was Ready before the agent started stays so during the first health checks: a restart of the agent does
    /// not make it NotReady.
    async fn wait_until_healthy(&mut self) {
        let known = self.inputs.cache.current();
        let status = known.as_ref().and_then(|node| node.status.as_ref());
        let runs = self.inputs.runtime.borrow().is_ready();
        if runs && conditions::status_of(status, conditions::READY) == Some("True") {
            let healthy = async { self.inputs.health.wait_for(Vec::is_empty).await.is_ok() };
            let _in_time = tokio::time::timeout(self.inputs.config.update_period, healthy).await;
        }
    }

    /// Reads the state of runtime, machine and network. Inputs that have changed until now count as seen: without a Node
    /// nothing else reads them, and each would end the pause before the next try.
    async fn read_host(&mut self) -> HostReading {
        self.inputs.health.mark_unchanged();
        self.inputs.pressures.mark_unchanged();
        self.inputs.volumes_in_use.mark_unchanged();
        self.inputs.shutting_down.mark_unchanged();
        let state = self.inputs.runtime.borrow_and_update().clone();
        self.runtime.observe(&state, Instant::now());
        HostReading { machine: self.inputs.host.machine().await, network: self.inputs.host.network().await }
    }

    /// Creates the Node, or corrects the existing one. Retries without limit.
    async fn register(&mut self) {
        let began = self.inputs.clock.wall();
        let mut backoff = Backoff::new(FIRST_PAUSE, call::LONGEST_PAUSE);
        loop {
            let host = self.read_host().await;
            let Err(error) = self.try_register(&host, began).await else { return };
            self.failures.failed(&self.inputs.config.name, "cannot register the node", &error);
            tokio::time::sleep(backoff.failed(0.0)).await;
        }
    }

    async fn try_register(&mut self, host: &HostReading, began: SystemTime) -> Result<(), CallError> {
        let mut wanted = initial::node(&self.inputs.config);
        self.fill(&mut wanted, host);
        let existing = match self.inputs.cache.current() {
            Some(known) => Node::clone(&known),
            None => {
                let params = PostParams::default();
                match call::within(REGISTRATION_TIMEOUT, self.nodes.main.create(&params, &wanted)).await {
                    Ok(created) => {
                        self.created(&created, began);
                        return Ok(());
                    }
                    Err(error) if error.is_conflict() || error.is_forbidden() => {
                        call::within(REGISTRATION_TIMEOUT, self.nodes.main.get(&self.inputs.config.name)).await?
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        self.reconcile(existing, &wanted).await
    }

    fn created(&mut self, node: &Node, began: SystemTime) {
        tracing::info!(node = self.inputs.config.name, "node registered");
        self.startup.created(began, self.inputs.clock.wall());
        self.record_events(&Node::default(), node);
        self.reported(node, true);
        self.inputs.cache.offer(node.clone());
        self.registered = true;
    }

    async fn reconcile(&mut self, existing: Node, wanted: &Node) -> Result<(), CallError> {
        let corrected = reconcile::reconciled(&existing, wanted, self.inputs.config.has_new_root);
        match patch::between(&existing, &corrected) {
            None => self.inputs.cache.offer(existing),
            Some(body) => {
                let params = PatchParams::default();
                let (name, body) = (&self.inputs.config.name, Patch::Strategic(&body));
                let patched = self.nodes.main.patch_status(name, &params, &body);
                self.inputs.cache.offer(call::within(REGISTRATION_TIMEOUT, patched).await?);
            }
        }
        tracing::info!(node = self.inputs.config.name, "node was registered before");
        self.registered = true;
        Ok(())
    }

    /// The Node as the API server has it; as the watch has it if it cannot be decoded.
    async fn read_node(&self) -> Result<Node, CallError> {
        match call::within(self.nodes.timeout, self.nodes.heartbeat.get(&self.inputs.config.name)).await {
            Err(error) if error.is_undecodable() => {
                self.inputs.cache.current().map(|known| Node::clone(&known)).ok_or(error)
            }
            answer => answer,
        }
    }

    /// Computes the status and sends it if it differs or is due. `fresh`: reads the Node from the API server first.
    async fn update(&mut self, host: &HostReading, fresh: bool) -> Result<(), CallError> {
        let cached = self.inputs.cache.current().filter(|_| !fresh);
        let known = match cached {
            Some(known) => Node::clone(&known),
            None => self.read_node().await?,
        };
        let mut node = known.clone();
        self.fill(&mut node, host);
        self.record_events(&known, &node);
        let moved = self.apply_pod_cidr(&pod_cidr(&node)).await;
        let restored = report::restore_labels(&mut node);
        let difference = report::difference(known.status.as_ref(), node.status.as_ref());
        let changed = moved || restored || (difference.is_some() && difference != self.not_kept);
        if !changed && !self.schedule.is_due(Instant::now()) {
            return Ok(());
        }
        let Some(body) = patch::between(&known, &node) else { return Ok(()) };
        let (params, body) = (PatchParams::default(), Patch::Strategic(&body));
        let patched = self.nodes.heartbeat.patch_status(&self.inputs.config.name, &params, &body);
        let answer = match call::within(self.nodes.timeout, patched).await {
            // The watch logs that the Node cannot be decoded.
            Err(error) if error.is_undecodable() => None,
            answer => Some(answer?),
        };
        self.reported(&node, changed);
        let lost = answer.as_ref().and_then(|kept| report::difference(kept.status.as_ref(), node.status.as_ref()));
        // Another client may have changed more meanwhile.
        self.not_kept = lost.filter(|lost| difference.as_ref() == Some(lost));
        match answer {
            Some(answer) => self.inputs.cache.offer(answer),
            None => self.inputs.cache.sent(node),
        }
        Ok(())
    }

    /// Records events of changes since `known`.
    fn record_events(&mut self, known: &Node, node: &Node) {
        node.metadata.uid.iter().for_each(|uid| self.inputs.recorder.identify_node(uid));
        for event in self.reported.events_since(known, node) {
            self.inputs.recorder.node_event(event.kind, event.reason, &event.message);
        }
    }

    /// The status was sent.
    fn reported(&mut self, node: &Node, changed: bool) {
        self.schedule.sent(Instant::now(), changed, fastrand::f64());
        if conditions::status_of(node.status.as_ref(), conditions::READY) == Some("True") {
            self.startup.ready(self.inputs.clock.wall());
        }
    }

    /// Sets the fields of the agent, and publishes the addresses.
    fn fill(&mut self, node: &mut Node, host: &HostReading) {
        let health = self.inputs.health.borrow_and_update().clone();
        let volumes_in_use = self.inputs.volumes_in_use.borrow_and_update().clone();
        let now = time::seconds(self.inputs.clock.wall());
        let failed = content::apply(
            node,
            &NodeInfo {
                config: &self.inputs.config,
                machine: &host.machine,
                network: &host.network,
                runtime: &self.runtime,
                images: self.images.as_deref(),
                pressures: *self.inputs.pressures.borrow_and_update(),
                volumes_in_use: volumes_in_use.as_ref(),
                readiness: Readiness {
                    health: &health,
                    shutting_down: *self.inputs.shutting_down.borrow_and_update(),
                    local_storage: self.inputs.config.resources.local_storage,
                    warning: self.inputs.config.warning,
                },
                at: Instant::now(),
                now: &now,
            },
        );
        for error in failed.iter().filter(|error| !self.logged_errors.contains(error)) {
            tracing::error!(node = self.inputs.config.name, error, "cannot set part of the node status");
        }
        self.logged_errors = failed;
        let listed = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
        let prefers_v6 = self.inputs.config.addresses.prefers_v6();
        let addresses = NodeAddresses { ips: addresses::host_ips(listed), prefers_v6 };
        self.inputs.addresses.send_if_modified(|known| std::mem::replace(known, addresses.clone()) != addresses);
    }

    /// Lists the images after a pull or removal, and periodically in case another client changed them. Keeps the old list
    /// on errors, and tries again after a growing pause.
    async fn list_images(&mut self) {
        let overdue = self.images_at.is_none_or(|at| at.elapsed() >= IMAGES_PERIOD);
        let failing = self.retries.is_failing(Operation::ListImages, NODE);
        let wanted = overdue || failing || self.inputs.images.has_changed().unwrap_or(false);
        if !wanted || self.retries.due(Operation::ListImages, NODE).is_some() {
            return;
        }
        self.inputs.images.mark_unchanged();
        self.images_at = Some(Instant::now());
        let listed = tokio::time::timeout(self.nodes.timeout, self.inputs.host.images()).await;
        match listed.unwrap_or_else(|_| Err("no response from the runtime".to_owned())) {
            Ok(all) => {
                self.retries.succeeded(Operation::ListImages, NODE);
                self.images = Some(images::listed(all, self.inputs.config.max_images));
            }
            Err(error) => {
                self.retries.failed(Operation::ListImages, NODE, &error);
            }
        }
    }

    /// Sets a new pod CIDR in the runtime, unless the pause after a failure has not ended. True if the status must be sent
    /// because of it.
    async fn apply_pod_cidr(&mut self, cidr: &str) -> bool {
        if cidr.is_empty() || cidr == self.pod_cidr || self.retries.due(Operation::SetPodCidr, cidr).is_some() {
            return false;
        }
        self.retries.keep_only(Operation::SetPodCidr, |target| target == cidr);
        let taken = tokio::time::timeout(self.nodes.timeout, self.inputs.host.set_pod_cidr(cidr)).await;
        match taken.unwrap_or_else(|_| Err("no response from the runtime".to_owned())) {
            Ok(()) => {
                self.retries.succeeded(Operation::SetPodCidr, cidr);
                tracing::info!(cidr, "set the pod CIDR of the runtime");
                cidr.clone_into(&mut self.pod_cidr);
            }
            Err(error) => {
                self.retries.failed(Operation::SetPodCidr, cidr, &error);
            }
        }
        true
    }
}

fn pod_cidr(node: &Node) -> String {
    let spec = node.spec.as_ref();
    let all = spec.and_then(|spec| spec.pod_cidrs.as_ref()).map(|cidrs| cidrs.join(","));
    all.or_else(|| spec?.pod_cidr.clone()).unwrap_or_default()
}

/// True once the own Node differs from `known` in a field that the agent uses; false if the cache was dropped.
async fn until_changed(own: &mut watch::Receiver<Option<Arc<Node>>>, known: Option<Arc<Node>>) -> bool {
    own.wait_for(|now| concerns(known.as_deref(), now.as_deref())).await.is_ok()
}

/// Another client changed a field that the agent uses.
fn concerns(known: Option<&Node>, now: Option<&Node>) -> bool {
    let relevant = |node: &Node| {
        let addresses = node.status.as_ref().and_then(|status| status.addresses.clone());
        let unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable);
        (node.metadata.uid.clone(), pod_cidr(node), unschedulable, addresses)
    };
    known.map(relevant) != now.map(relevant)
}
