//! The agent's main port with one log to follow, for tests that count its memory, files and tasks from outside; the
//! runtime beside it is simulated. `log-server FOLDER` tells its address, then the number of its tasks for each line it
//! is sent, and ends with its input.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use keblet::config::{FeatureGates, KubeletConfiguration};
use keblet::metrics::Metrics;
use keblet::model::PodUid;
use keblet::runtime::RuntimeOptions;
use keblet::server::secure::{Secure, serving_files};
use keblet::server::{Containers, Handles, Mounted, Options, SensorReport, logs, run_main};
use keblet_tests::cri::{SimRuntime, client};
use keblet_tests::node::{PlegHarness, SensorSet, runtime};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The container is seen long before.
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
        anyhow::ensure!(Instant::now() < deadline, "the container is never seen");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let status = json!({"name": "main", "ready": true, "restartCount": 0, "image": "busybox", "imageID": "",
        "containerID": format!("sim://{id}"), "state": {"running": {}}});
    let pod = json!({"metadata": {"name": "talker", "namespace": "default", "uid": "talker-uid"},
        "spec": {"containers": [{"name": "main"}]}, "status": {"containerStatuses": [status]}});
    let pod = Arc::new(serde_json::from_value::<k8s_openapi::api::core::v1::Pod>(pod)?);
    let containers = Containers {
        pod: Arc::new(move |namespace, name| (namespace == "default" && name == "talker").then(|| pod.clone())),
        status: Arc::new(|pod| pod.status.clone().unwrap_or_default()),
        snapshot: Arc::new(move |uid| pleg.cached(uid)),
        runtime: runtime(&sim, RuntimeOptions::default()),
    };
    let mounted = Mounted { debug: logs::router(containers, false), stats: axum::Router::new() };
    let (address, gates) = ("127.0.0.1".to_owned(), FeatureGates::default());
    let mut config = KubeletConfiguration { address, port: 0, ..KubeletConfiguration::default() };
    config.authentication.anonymous.enabled = true;
    config.authentication.webhook.enabled = false;
    config.authorization.mode = "AlwaysAllow".to_owned();
    let source = serving_files(&config, &gates, &folder, "localhost")?;
    let main = Secure::open(&config, &gates, "node", source, None, &Metrics::new()).await?;
    println!("{}", main.address().context("the port has no address")?);
    run_main(main, Options::new(&config, &gates), handles(), mounted, shutdown).await;
    Ok(())
}

fn handles() -> Handles {
    Handles {
        pods: Arc::new(Vec::new),
        running_pods: Arc::new(|| Ok(Vec::new())),
        sensors: Arc::new(Vec::<SensorReport>::new),
        sync_loop_age: Arc::new(|| Some(Duration::ZERO)),
        ready: Arc::new(|| Ok(())),
        refresh: Arc::new(|| ()),
        verbosity: Arc::new(|_| Ok(())),
        configz: Arc::new(json!({})),
        version: "v1.36.3",
        flags: Arc::default(),
        metrics: Metrics::new(),
    }
}
