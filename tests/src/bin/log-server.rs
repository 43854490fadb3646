//! The agent's main port with one pod log to follow, for tests that measure memory, files and tasks of the process. The
//! runtime is simulated, in the same process. `log-server FOLDER` prints its address, then its number of tasks for each
//! line on standard input, and exits at the end of the input.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::PodStatus;
use keblet::config::FeatureGates;
use keblet::config::KubeletConfiguration;
use keblet::metrics::Metrics;
use keblet::model::Pod;
use keblet::model::PodSnapshot;
use keblet::model::PodUid;
use keblet::pleg::PlegHandle;
use keblet::runtime::RuntimeOptions;
use keblet::server::AgentState;
use keblet::server::Configz;
use keblet::server::Containers;
use keblet::server::Handles;
use keblet::server::Mounted;
use keblet::server::Options;
use keblet::server::PodLookup;
use keblet::server::SensorReport;
use keblet::server::logs;
use keblet::server::run_main;
use keblet::server::secure::Secure;
use keblet::server::secure::SecureOptions;
use keblet::server::secure::bind;
use keblet::server::secure::serving_files;
use keblet_tests::cri::SimRuntime;
use keblet_tests::cri::client;
use keblet_tests::node::PlegHarness;
use keblet_tests::node::SensorSet;
use keblet_tests::node::runtime;
use nix::sys::resource::Resource;
use nix::sys::resource::getrlimit;
use nix::sys::resource::setrlimit;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Generous: the container is inspected within milliseconds.
const TIMEOUT: Duration = Duration::from_secs(120);

fn main() -> anyhow::Result<()> {
    let folder = PathBuf::from(std::env::args_os().nth(1).context("usage: log-server FOLDER")?);
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let all = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let metrics = all.metrics();
    all.spawn(async {
        if let Err(error) = serve(folder, CancellationToken::new()).await {
            eprintln!("log-server: {error:#}");
            std::process::exit(1);
        }
    });
    for line in std::io::stdin().lines() {
        line?;
        println!("{}", metrics.num_alive_tasks());
    }
    Ok(())
}

async fn serve(folder: PathBuf, shutdown: CancellationToken) -> anyhow::Result<()> {
    let sim = SimRuntime::new(keblet_tests::cri::Options::default());
    sim.images(|images| images.store("busybox", 1 << 20));
    let mut runtime_client = client::Client::new(sim.memory().channel());
    let mut sandbox = client::sandbox("talker", 0);
    sandbox.log_directory = folder.display().to_string();
    let sandbox = runtime_client.run_sandbox(sandbox).await?;
    let id = runtime_client.launch(&sandbox, client::container("main", 0, "run")).await?;
    let harness = PlegHarness::open(&sim, SensorSet::ALL);
    let (uid, pleg) = (PodUid::from("talker-uid"), harness.pleg.clone());
    let deadline = Instant::now() + TIMEOUT;
    while pleg.cached(&uid).is_none_or(|snapshot| snapshot.newest("main").is_none()) {
        anyhow::ensure!(Instant::now() < deadline, "the container was not inspected in time");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let status = json!({"name": "main", "ready": true, "restartCount": 0, "image": "busybox", "imageID": "",
        "containerID": format!("sim://{id}"), "state": {"running": {}}});
    let pod = json!({"metadata": {"name": "talker", "namespace": "default", "uid": "talker-uid"},
        "spec": {"containers": [{"name": "main"}]}, "status": {"containerStatuses": [status]}});
    let pod = Arc::new(serde_json::from_value::<k8s_openapi::api::core::v1::Pod>(pod)?);
    let pods = Arc::new(OnePod { pod, pleg });
    let containers = Containers { pods, runtime: runtime(&sim, RuntimeOptions::default()) };
    let mounted = Mounted { debug: logs::router(containers, false), stats: axum::Router::new() };
    let (address, gates) = ("127.0.0.1".to_owned(), FeatureGates::default());
    let mut config = KubeletConfiguration { address, port: 0, ..KubeletConfiguration::default() };
    config.authentication.anonymous.enabled = true;
    config.authentication.webhook.enabled = false;
    config.authorization.mode = "AlwaysAllow".to_owned();
    let (serving, metrics) = (serving_files(&config, &gates, &folder, "localhost")?, Metrics::new());
    let node = "node";
    let secure = SecureOptions { config: &config, gates: &gates, node, serving, reviews: None, metrics: &metrics };
    let main = Secure::open(bind(&config).await?, secure)?;
    println!("{}", main.address().context("the port has no address")?);
    run_main(main, Options::new(&config, &gates), handles(), mounted, shutdown).await;
    Ok(())
}

/// A pod list with the pod whose log is followed.
struct OnePod {
    pod: Pod,
    pleg: PlegHandle,
}

impl PodLookup for OnePod {
    fn pod(&self, namespace: &str, name: &str) -> Option<Pod> {
        (namespace == "default" && name == "talker").then(|| self.pod.clone())
    }

    fn status(&self, pod: &Pod) -> PodStatus {
        pod.status.clone().unwrap_or_default()
    }

    fn snapshot(&self, uid: &PodUid) -> Option<Arc<PodSnapshot>> {
        self.pleg.cached(uid)
    }
}

/// An agent that serves only logs.
struct LogsOnly;

impl AgentState for LogsOnly {
    fn pods(&self) -> Vec<Pod> {
        Vec::new()
    }

    fn running_pods(&self) -> Result<Vec<Pod>, String> {
        Ok(Vec::new())
    }

    fn sensors(&self) -> Vec<SensorReport> {
        Vec::new()
    }

    fn sync_loop_age(&self) -> Option<Duration> {
        Some(Duration::ZERO)
    }

    fn runtime_ready(&self) -> Result<(), String> {
        Ok(())
    }

    fn refresh_metrics(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    fn set_verbosity(&self, _level: u32) -> Result<(), String> {
        Ok(())
    }
}

fn handles() -> Handles {
    Handles {
        agent: Arc::new(LogsOnly),
        configz: Configz::new(json!({})),
        version: "v1.36.3",
        flags: Arc::default(),
        metrics: Metrics::new(),
    }
}
