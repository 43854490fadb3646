//! The Node status loop and Lease with a scripted API server and machine, on paused time.

mod lease;
mod loops;
mod refusals;
mod server;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use std::time::SystemTime;

use keblet_proto::cri::v1 as cri;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::sync::DropGuard;

use super::*;
use crate::metrics::Metrics;
use crate::model::Clock;
use crate::model::Pressures;
use crate::recorder::testing::RecordedEvents;
use crate::recorder::testing::listening;
use crate::runtime::RuntimeOffer;
use crate::runtime::RuntimeState;
use crate::status::NodeAddresses;
use server::Server;

impl Connections for AtomicUsize {
    fn retire(&self) {
        self.fetch_add(1, SeqCst);
    }
}

/// The simulated machine.
#[derive(Clone, Default)]
struct Script {
    images: Vec<cri::Image>,
    image_lists: usize,
    image_failures: usize,
    pod_cidrs: Vec<String>,
    cidr_failures: usize,
    /// No interface is up.
    is_offline: bool,
}

#[derive(Clone, Default)]
struct TestHost(Arc<Mutex<Script>>);

impl TestHost {
    fn with<T>(&self, apply: impl FnOnce(&mut Script) -> T) -> T {
        apply(&mut self.0.lock().expect("no test panics while it holds the script"))
    }
}

impl Host for TestHost {
    async fn machine(&self) -> Machine {
        let sizes = Sizes { cpus: 2, memory: 4 << 30, root_fs: Some(10 << 30), pids: 1000, ..Sizes::default() };
        let text = |text: &str| text.to_owned();
        Machine { boot_id: text("b00t"), kernel_version: text("6.12"), sizes: Some(sizes), ..Machine::default() }
    }

    async fn network(&self) -> addresses::Network {
        let is_offline = self.with(|script| script.is_offline);
        let local = if is_offline { Vec::new() } else { vec!["192.0.2.7".parse().expect("an address")] };
        addresses::Network { local, ..addresses::Network::default() }
    }

    async fn images(&self) -> Result<Vec<cri::Image>, String> {
        self.with(|script| {
            script.image_lists += 1;
            match script.image_failures.checked_sub(1) {
                Some(left) => {
                    script.image_failures = left;
                    Err("no list".to_owned())
                }
                None => Ok(script.images.clone()),
            }
        })
    }

    async fn set_pod_cidr(&self, cidr: &str) -> Result<(), String> {
        self.with(|script| match script.cidr_failures.checked_sub(1) {
            Some(left) => {
                script.cidr_failures = left;
                Err("no".to_owned())
            }
            None => {
                script.pod_cidrs.push(cidr.to_owned());
                Ok(())
            }
        })
    }
}

fn config(change: impl FnOnce(&mut NodeConfig)) -> Arc<NodeConfig> {
    let settings = crate::config::load(&crate::config::FlagValues::default()).expect("defaults are valid");
    let mut config = NodeConfig::new(&settings, "n", "v1.36.3");
    config.addresses.node_ips = vec!["192.0.2.7".parse().expect("an address")];
    change(&mut config);
    Arc::new(config)
}

fn ready() -> RuntimeState {
    let offer = RuntimeOffer { name: "containerd".to_owned(), version: "1.7".to_owned(), ..RuntimeOffer::default() };
    RuntimeState::Ready { network_error: None, offer: Arc::new(offer) }
}

/// A running status loop and its inputs.
struct Bench {
    server: Server,
    host: TestHost,
    cache: NodeCache,
    runtime: watch::Sender<RuntimeState>,
    health: watch::Sender<Vec<String>>,
    shutting_down: watch::Sender<bool>,
    volumes_in_use: watch::Sender<Option<BTreeSet<String>>>,
    images: watch::Sender<u64>,
    addresses: watch::Receiver<NodeAddresses>,
    events: Mutex<RecordedEvents>,
    metrics: Arc<Metrics>,
    /// How often the connections were retired.
    retired: Arc<AtomicUsize>,
    inputs: Option<Inputs<TestHost>>,
    _running: DropGuard,
    shutdown: CancellationToken,
}

impl Bench {
    fn new(change: impl FnOnce(&mut NodeConfig)) -> Self {
        let (server, host, cache) = (Server::default(), TestHost::default(), NodeCache::default());
        let runtime = watch::Sender::new(RuntimeState::Unknown);
        let health = watch::Sender::new(Vec::new());
        let (shutting_down, images) = (watch::Sender::new(false), watch::Sender::new(0));
        let volumes_in_use = watch::Sender::new(None);
        let (addresses_sender, addresses) = watch::channel(NodeAddresses::default());
        let ((recorder, events), metrics) = (listening(), Metrics::new());
        let retired = Arc::new(AtomicUsize::new(0));
        let inputs = Inputs {
            config: config(change),
            host: host.clone(),
            main: server.client(),
            heartbeat: server.client(),
            cache: cache.clone(),
            runtime: runtime.subscribe(),
            health: health.subscribe(),
            pressures: watch::channel(Pressures::default()).1,
            volumes_in_use: volumes_in_use.subscribe(),
            shutting_down: shutting_down.subscribe(),
            images: images.subscribe(),
            addresses: addresses_sender,
            recorder,
            connections: retired.clone(),
            metrics: metrics.clone(),
            clock: Clock::derived(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000)),
        };
        let shutdown = CancellationToken::new();
        let running = shutdown.clone().drop_guard();
        let inputs = Some(inputs);
        Self {
            server,
            host,
            cache,
            runtime,
            health,
            shutting_down,
            volumes_in_use,
            images,
            addresses,
            events: Mutex::new(events),
            metrics,
            retired,
            inputs,
            _running: running,
            shutdown,
        }
    }

    fn start(&mut self) {
        let status = StatusLoop::new(self.inputs.take().expect("started once"));
        tokio::spawn(status.run(self.shutdown.clone()));
    }

    /// A node that is registered, Ready and has sent its status.
    async fn settled(change: impl FnOnce(&mut NodeConfig)) -> Self {
        let mut bench = Self::new(change);
        bench.runtime.send_replace(ready());
        bench.start();
        pass(Duration::from_secs(1)).await;
        bench.server.asked();
        bench.events();
        bench
    }

    /// Reasons of the events since the last call.
    fn events(&self) -> Vec<String> {
        let events = self.events.lock().expect("unpoisoned").take();
        events.iter().filter_map(|event| event.split([' ', ':']).nth(2)).map(str::to_owned).collect()
    }

    /// Status and message of the Ready condition in the API server.
    fn ready(&self) -> (String, String) {
        let node = self.server.get(server::NODE);
        let all = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let ready = all.iter().find(|one| one["type"] == "Ready").cloned().unwrap_or_default();
        let text = |field: &str| ready[field].as_str().unwrap_or_default().to_owned();
        (text("status"), text("message"))
    }
}

/// Advances the clock step by step, so that timers fire in order.
async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}
