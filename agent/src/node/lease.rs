//! The node's Lease (KEP-589): created when the Node exists, renewed every quarter of its duration, never deleted.

use std::sync::Arc;
use std::time::Duration;
use std::time::SystemTime;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::Client;
use kube::api::PostParams;
use tokio_util::sync::CancellationToken;

use super::cache::NodeCache;
use super::call;
use super::call::CallError;
use super::call::Connections;
use super::call::FailureLog;
use super::config::NodeConfig;
use super::report;
use super::time;
use crate::model::Backoff;
use crate::model::Clock;

const NAMESPACE: &str = "kube-node-lease";
/// What fails, for the log.
const RENEW: &str = "cannot renew the Lease";
const ENSURE: &str = "cannot get or create the Lease";
/// Pause after the first failure to get or create the Lease.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Updates tried in one round.
const TRIES: usize = 5;
const PARAMS: PostParams = PostParams { dry_run: false, field_manager: None };

/// Renews the Lease of this node.
pub struct LeaseController {
    config: Arc<NodeConfig>,
    leases: Api<Lease>,
    nodes: Api<Node>,
    cache: NodeCache,
    clock: Clock,
    connections: Arc<dyn Connections>,
    /// The Lease as last written.
    known: Option<Lease>,
    failures: FailureLog,
}

impl LeaseController {
    /// `heartbeat` is the client without a rate limit; `connections` are retired when renewals fail repeatedly.
    pub fn new(
        config: Arc<NodeConfig>,
        heartbeat: Client,
        cache: NodeCache,
        clock: Clock,
        connections: Arc<dyn Connections>,
    ) -> Self {
        let leases = Api::namespaced(heartbeat.clone(), NAMESPACE);
        Self {
            config,
            leases,
            nodes: Api::all(heartbeat),
            cache,
            clock,
            connections,
            known: None,
            failures: FailureLog::default(),
        }
    }

    /// Renews the Lease until `shutdown`.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let period = Duration::from_secs(u64::try_from(self.config.lease_seconds).unwrap_or(40)) / 4;
        let beat = async {
            let mut nodes = self.cache.subscribe();
            // The Lease is owned by the Node.
            let there = async { nodes.wait_for(Option::is_some).await.is_ok() };
            let _is_there = tokio::time::timeout(period, there).await;
            loop {
                self.renew_or_create().await;
                tokio::time::sleep(report::jittered(period, fastrand::f64())).await;
            }
        };
        shutdown.run_until_cancelled(beat).await;
    }

    /// Renews the Lease, or finds or creates it first.
    async fn renew_or_create(&mut self) {
        if let Some(lease) = self.known.take() {
            self.known = self.renew(lease).await;
            if self.known.is_some() {
                return;
            }
        }
        match self.find_or_create().await {
            Some((lease, true)) => self.known = Some(lease),
            Some((lease, false)) => self.known = self.renew(lease).await,
            None => {}
        }
    }

    /// Up to five updates, back to back. `None` if none succeeded.
    async fn renew(&mut self, mut lease: Lease) -> Option<Lease> {
        for attempt in 0..TRIES {
            let owner = if has_owner(&lease) { Ok(None) } else { self.owner().await.map(Some) };
            let wanted = match owner {
                Ok(owner) => renewed(lease.clone(), &self.config, owner, self.clock.wall()),
                Err(error) => {
                    self.failures.failed(&self.config.name, RENEW, &error);
                    continue;
                }
            };
            match call::within(self.timeout(), self.leases.replace(&self.config.name, &PARAMS, &wanted)).await {
                Ok(lease) => {
                    self.failures.succeeded(RENEW);
                    return Some(lease);
                }
                Err(error) if error.is_conflict() => match self.find_or_create().await? {
                    (created, true) => return Some(created),
                    (found, false) => lease = found,
                },
                Err(error) => {
                    self.failures.failed(&self.config.name, RENEW, &error);
                    if attempt > 0 && error.is_unanswered() {
                        self.connections.retire();
                    }
                }
            }
        }
        None
    }

    /// The existing Lease, or a new one (true). `None` if there is no Node to own it yet. Retries without limit.
    async fn find_or_create(&mut self) -> Option<(Lease, bool)> {
        let mut backoff = Backoff::new(FIRST_PAUSE, call::LONGEST_PAUSE);
        loop {
            match self.try_find_or_create().await {
                Ok(found) => {
                    self.failures.succeeded(ENSURE);
                    return found;
                }
                Err(error) => self.failures.failed(&self.config.name, ENSURE, &error),
            }
            tokio::time::sleep(backoff.failed(0.0)).await;
        }
    }

    async fn try_find_or_create(&self) -> Result<Option<(Lease, bool)>, CallError> {
        match call::within(self.timeout(), self.leases.get(&self.config.name)).await {
            Ok(lease) => Ok(Some((lease, false))),
            Err(error) if error.is_undecodable() => {
                // Another client wrote it. A renewal needs no more of it than its metadata.
                let known = call::within(self.timeout(), self.leases.get_metadata(&self.config.name)).await?;
                Ok(Some((held(&self.config, known.metadata), false)))
            }
            Err(error) if error.is_not_found() => {
                let owner = match self.owner().await {
                    Ok(owner) => owner,
                    Err(error) => {
                        tracing::debug!(lease = self.config.name, %error, "no Lease before the Node exists");
                        return Ok(None);
                    }
                };
                let wanted = new(&self.config, owner, self.clock.wall());
                let created = call::within(self.timeout(), self.leases.create(&PARAMS, &wanted)).await?;
                Ok(Some((created, true)))
            }
            Err(error) => Err(error),
        }
    }

    async fn owner(&self) -> Result<OwnerReference, CallError> {
        let uid = match self.cache.current() {
            Some(node) => node.metadata.uid.clone(),
            // Also of a Node that cannot be decoded.
            None => call::within(self.timeout(), self.nodes.get_metadata(&self.config.name)).await?.metadata.uid,
        };
        Ok(OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: self.config.name.clone(),
            uid: uid.unwrap_or_default(),
            ..OwnerReference::default()
        })
    }

    fn timeout(&self) -> Duration {
        call::heartbeat_timeout(&self.config)
    }
}

/// A new Lease.
fn new(config: &NodeConfig, owner: OwnerReference, now: SystemTime) -> Lease {
    let metadata =
        ObjectMeta { name: Some(config.name.clone()), namespace: Some(NAMESPACE.to_owned()), ..ObjectMeta::default() };
    renewed(held(config, metadata), config, Some(owner), now)
}

/// A Lease that this node holds.
fn held(config: &NodeConfig, metadata: ObjectMeta) -> Lease {
    let spec = LeaseSpec { holder_identity: Some(config.name.clone()), ..LeaseSpec::default() };
    Lease { metadata, spec: Some(spec) }
}

/// The Lease renewed now; other fields are kept. The time of the renewal never goes back, however far it is in the future:
/// the node lifecycle controller only compares it with the last one that it has seen, and would make a node Unknown for a
/// while whose clock was set back.
fn renewed(mut lease: Lease, config: &NodeConfig, owner: Option<OwnerReference>, now: SystemTime) -> Lease {
    let spec = lease.spec.get_or_insert_default();
    spec.lease_duration_seconds = Some(config.lease_seconds);
    spec.renew_time = Some(time::micros_after(now, spec.renew_time.as_ref()));
    if !has_owner(&lease) {
        lease.metadata.owner_references = owner.map(|owner| vec![owner]);
    }
    lease
}

fn has_owner(lease: &Lease) -> bool {
    lease.metadata.owner_references.as_ref().is_some_and(|owners| !owners.is_empty())
}
