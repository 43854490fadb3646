//! Clients of services: as a proxy does, they follow the EndpointSlices of a service, with a delay, and send one request
//! after the other to the endpoints that are ready.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use keblet_tests::cluster::TIMEOUT;
use keblet_tests::cluster::Tenant;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher;
use kube::runtime::watcher::Event;
use tokio::sync::mpsc;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// A proxy applies changes at most once in this time.
const LAG: Duration = Duration::from_secs(1);
/// Generous, for a busy machine: a request that takes as long has failed.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(50);
const POLL: Duration = Duration::from_millis(50);

/// The clients of some services.
pub(super) struct Traffic {
    clients: Vec<Arc<Client>>,
    tasks: Vec<JoinHandle<()>>,
}

/// The client of one service.
struct Client {
    service: String,
    http: reqwest::Client,
    /// A service without ready endpoints is a failure.
    must_serve: AtomicBool,
    answered: AtomicUsize,
    failures: Mutex<Vec<String>>,
    began: Instant,
}

impl Traffic {
    pub(super) fn start(tenant: &Tenant, services: &[&str]) -> Self {
        let (mut clients, mut tasks) = (Vec::new(), Vec::new());
        for service in services {
            let client = Arc::new(Client {
                service: (*service).to_owned(),
                http: reqwest::Client::builder()
                    .no_proxy()
                    .pool_max_idle_per_host(0)
                    .timeout(REQUEST_TIMEOUT)
                    .build()
                    .unwrap(),
                must_serve: AtomicBool::new(false),
                answered: AtomicUsize::new(0),
                failures: Mutex::default(),
                began: Instant::now(),
            });
            let (changes, delayed) = mpsc::unbounded_channel();
            let (publish, endpoints) = watch::channel(Vec::new());
            tasks.push(tokio::spawn(follow(tenant.api(), client.service.clone(), changes)));
            tasks.push(tokio::spawn(delay(delayed, publish)));
            tasks.push(tokio::spawn(client.clone().request_all_the_time(endpoints)));
            clients.push(client);
        }
        Self { clients, tasks }
    }

    /// Waits until every service has answered so many requests more; from then on each has to have a ready endpoint.
    pub(super) async fn until_answered(&self, more: usize) {
        for client in &self.clients {
            let (goal, deadline) = (client.answered.load(Ordering::Relaxed) + more, Instant::now() + TIMEOUT);
            while client.answered.load(Ordering::Relaxed) < goal {
                assert!(Instant::now() < deadline, "{} does not answer: {:?}", client.service, client.failures());
                tokio::time::sleep(POLL).await;
            }
            client.must_serve.store(true, Ordering::Relaxed);
        }
    }

    /// From now on a service may have no ready endpoint.
    pub(super) fn permit_end(&self) {
        self.clients.iter().for_each(|client| client.must_serve.store(false, Ordering::Relaxed));
    }

    /// What has failed so far, one line each.
    pub(super) fn failures(&self) -> Vec<String> {
        self.clients.iter().flat_map(|client| client.failures()).collect()
    }

    /// Ends all clients; returns the number of requests that were answered and what has failed.
    pub(super) fn end(self) -> (usize, Vec<String>) {
        self.tasks.iter().for_each(JoinHandle::abort);
        let answered = self.clients.iter().map(|client| client.answered.load(Ordering::Relaxed)).sum();
        (answered, self.failures())
    }
}

impl Client {
    fn failures(&self) -> Vec<String> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn failed(&self, what: &str) {
        let line = format!("{:.2} s: {}: {what}", self.began.elapsed().as_secs_f64(), self.service);
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    async fn request_all_the_time(self: Arc<Self>, endpoints: watch::Receiver<Vec<String>>) {
        for turn in 0.. {
            let ready = endpoints.borrow().clone();
            match ready.get(turn % ready.len().max(1)) {
                Some(endpoint) => self.request(endpoint).await,
                None if self.must_serve.load(Ordering::Relaxed) => self.failed("no endpoint is ready"),
                None => {}
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn request(&self, endpoint: &str) {
        let answer = self.http.get(format!("http://{endpoint}/")).send().await;
        match answer.and_then(|answer| answer.error_for_status()) {
            Ok(_) => drop(self.answered.fetch_add(1, Ordering::Relaxed)),
            Err(error) => self.failed(&format!("{endpoint}: {error:?}")),
        }
    }
}

/// Sends the ready endpoints of a service at each change, with the time of the change.
async fn follow(
    api: kube::Api<EndpointSlice>,
    service: String,
    changes: mpsc::UnboundedSender<(Instant, Vec<String>)>,
) {
    let config = watcher::Config::default().labels(&format!("kubernetes.io/service-name={service}"));
    let mut events = Box::pin(watcher(api, config).default_backoff());
    let mut slices: BTreeMap<String, EndpointSlice> = BTreeMap::new();
    let mut is_complete = false;
    while let Some(event) = events.next().await {
        let name = |slice: &EndpointSlice| slice.metadata.name.clone().unwrap_or_default();
        match event {
            Ok(Event::Init) => {
                slices.clear();
                is_complete = false;
            }
            Ok(Event::InitDone) => is_complete = true,
            Ok(Event::Apply(slice) | Event::InitApply(slice)) => drop(slices.insert(name(&slice), slice)),
            Ok(Event::Delete(slice)) => drop(slices.remove(&name(&slice))),
            // The watch goes on by itself; a proxy keeps its endpoints meanwhile.
            Err(_) => continue,
        }
        let ready: Vec<String> = slices.values().flat_map(ready_endpoints).collect();
        if is_complete && changes.send((Instant::now(), ready)).is_err() {
            return;
        }
    }
}

/// Publishes each state some time after it was seen.
async fn delay(mut changes: mpsc::UnboundedReceiver<(Instant, Vec<String>)>, publish: watch::Sender<Vec<String>>) {
    while let Some((at, ready)) = changes.recv().await {
        tokio::time::sleep_until(at + LAG).await;
        publish.send_replace(ready);
    }
}

fn ready_endpoints(slice: &EndpointSlice) -> Vec<String> {
    let port = slice.ports.iter().flatten().find_map(|port| port.port);
    let ready = slice
        .endpoints
        .iter()
        .flatten()
        .filter(|endpoint| endpoint.conditions.as_ref().is_some_and(|conditions| conditions.ready == Some(true)));
    let address = |endpoint: &k8s_openapi::api::discovery::v1::Endpoint| {
        Some(format!("{}:{}", endpoint.addresses.first()?, port?))
    };
    ready.filter_map(address).collect()
}
