use std::net::Ipv4Addr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering;

use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::net::TcpStream;

use super::testing::ALL_ON;
use super::testing::Answer;
use super::testing::TIMEOUT;
use super::testing::exchange;
use super::testing::free_port;
use super::testing::handles;
use super::*;

/// Both servers and their state.
struct Served {
    health: SocketAddr,
    read_only: SocketAddr,
    metrics: Arc<Metrics>,
    sync_loop_seconds: Arc<AtomicU64>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<Result<(), ListenError>>,
}

async fn serve(pods: Vec<Arc<Pod>>) -> Served {
    let sync_loop_seconds = Arc::new(AtomicU64::new(0));
    let handles = handles(pods, sync_loop_seconds.clone());
    let metrics = handles.metrics.clone();
    let (health, read_only) = (free_port().await, free_port().await);
    let mut options = Options::new(&KubeletConfiguration::default(), &FeatureGates::default());
    (options.healthz, options.read_only) = (Some(health.into()), Some(read_only));
    let shutdown = CancellationToken::new();
    let task = tokio::spawn(run(options, handles, Mounted::default(), shutdown.clone()));
    Served { health, read_only, metrics, sync_loop_seconds, shutdown, task }
}

/// One request on a connection of its own; status, headers in lower case, body.
async fn request(address: SocketAddr, method: &str, path: &str, headers: &str) -> (u16, String, String) {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    let stream = loop {
        match TcpStream::connect(address).await {
            Ok(stream) => break stream,
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "cannot connect: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let Answer { status, head, body } = exchange(stream, method, path, headers).await;
    (status, head, body)
}

async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let (status, _, body) = request(address, "GET", path, "").await;
    (status, body)
}

#[tokio::test]
async fn health_server() {
    let served = serve(Vec::new()).await;
    let health = served.health;
    assert_eq!(get(health, "/healthz").await, (200, "ok".to_owned()));
    assert_eq!(get(health, "/healthz/ping").await, (200, "ok".to_owned()));
    assert_eq!(
        get(health, "/healthz?verbose").await.1,
        "[+]ping ok\nsensor exits down: no CAP_BPF\nsensor relist up\nhealthz check passed\n",
        "monitoring agents parse lines with a mark as checks, and a sensor is none"
    );
    let unready = "[+]ping ok\n[-]runtime failed: reason withheld\nhealthz check failed\n";
    assert_eq!(get(health, "/readyz").await, (500, unready.to_owned()));
    for unknown in ["/", "/pods", "/metrics", "/healthz/syncloop"] {
        assert_eq!(get(health, unknown).await, (404, "404 page not found\n".to_owned()), "{unknown}");
    }
}

#[tokio::test]
async fn read_only_health_follows_the_sync_loop() {
    let served = serve(Vec::new()).await;
    served.sync_loop_seconds.store(u64::MAX, Ordering::Relaxed);
    assert_eq!(get(served.read_only, "/healthz/syncloop").await, (200, "ok".to_owned()), "it has not started");
    served.sync_loop_seconds.store(299, Ordering::Relaxed);
    assert_eq!(get(served.read_only, "/healthz").await, (200, "ok".to_owned()));
    served.sync_loop_seconds.store(301, Ordering::Relaxed);
    let failed =
        "[+]ping ok\n[+]log ok\n[-]syncloop failed: reason withheld\n[+]device-plugin ok\nhealthz check failed\n";
    assert_eq!(get(served.read_only, "/healthz").await, (500, failed.to_owned()));
    let reason = "internal server error: sync Loop took longer than expected\n";
    assert_eq!(get(served.read_only, "/healthz/syncloop").await, (500, reason.to_owned()));
    assert_eq!(get(served.read_only, "/healthz?exclude=syncloop").await.0, 200);
    let slis = String::from_utf8(crate::metrics::encode_text(&served.metrics.slis.gather()).unwrap()).unwrap();
    for line in [
        r#"kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} 3"#,
        r#"kubernetes_healthchecks_total{name="syncloop",status="error",type="healthz"} 1"#,
    ] {
        assert!(slis.lines().any(|found| found == line), "{line} is missing in\n{slis}");
    }
    assert_eq!(get(served.health, "/healthz").await.0, 200, "the health server reports only that it responds");
}

#[tokio::test]
async fn pods_are_a_list_of_plain_items() {
    assert_eq!(
        get(serve(Vec::new()).await.read_only, "/pods").await,
        (200, "{\"kind\":\"PodList\",\"apiVersion\":\"v1\",\"metadata\":{},\"items\":null}\n".to_owned())
    );
    let pod: Pod = serde_json::from_value(serde_json::json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "web-node-1", "namespace": "default", "uid": "u"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
        "status": {"phase": "Running"}
    }))
    .unwrap();
    let served = serve(vec![Arc::new(pod)]).await;
    let (status, head, body) = request(served.read_only, "GET", "/pods/", "").await;
    assert_eq!(status, 200);
    assert!(head.contains("content-type: application/json"), "{head}");
    let list: serde_json::Value = serde_json::from_str(&body).unwrap();
    let item = &list["items"][0];
    assert_eq!((&item["metadata"]["name"], &item["status"]["phase"]), (&"web-node-1".into(), &"Running".into()));
    assert_eq!((item.get("kind"), item.get("apiVersion")), (None, None));
}

#[tokio::test]
async fn refusals_of_the_read_only_port() {
    let served = serve(Vec::new()).await;
    let address = served.read_only;
    for path in ["/exec/a/b/c", "/run/a/b/c", "/containerLogs/a/b/c", "/runningpods/", "/debug/pprof/heap", "/logs/"] {
        let answer = (405, "Debug endpoints are disabled.\n".to_owned());
        assert_eq!(get(address, path).await, answer, "{path}");
    }
    for path in ["/", "/configz", "/nope", "/flagz"] {
        assert_eq!(get(address, path).await, (404, "404 page not found\n".to_owned()), "{path}");
    }
    let (status, head, body) = request(address, "POST", "/pods", "").await;
    assert_eq!((status, body.as_str()), (405, "405: Method Not Allowed"));
    assert!(head.contains("allow: get"), "{head}");
    let (status, _, body) = request(address, "GET", "/pods", "Accept: text/html\r\n").await;
    assert_eq!((status, body.as_str()), (406, "406: Not Acceptable\n\nAvailable representations: application/json"));
}

#[tokio::test]
async fn metrics_are_exposed_and_requests_counted() {
    let served = serve(Vec::new()).await;
    served.metrics.node.name("node-1");
    get(served.read_only, "/pods").await;
    let (status, head, body) = request(served.read_only, "GET", "/metrics", "").await;
    assert_eq!(status, 200);
    assert!(head.contains("content-type: text/plain; version=0.0.4"), "{head}");
    let start = head.lines().find_map(|line| line.strip_prefix("process-start-time-unix: "));
    assert!(start.is_some_and(|start| start.trim().parse::<u64>().is_ok()), "{head}");
    let count =
        r#"kubelet_http_requests_total{long_running="false",method="GET",path="pods",server_type="readonly"} 1"#;
    for line in ["kubelet_node_name{node=\"node-1\"} 1", count] {
        assert!(body.lines().any(|found| found == line), "{line} is missing in\n{body}");
    }
}

/// A request that held the thread while its refresh waits for one would never return.
#[test]
fn metrics_are_read_in_parallel_with_one_thread_that_may_block() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        let served = serve(Vec::new()).await;
        let all = futures_util::future::join_all((0..8).map(|_| get(served.read_only, "/metrics")));
        let all = tokio::time::timeout(TIMEOUT, all).await.expect("in time");
        assert!(all.iter().all(|(status, _)| *status == 200), "{all:?}");
    });
}

/// Those of a full node take so long that exits and probes would wait for them on the threads of everything else.
#[test]
fn large_responses_are_encoded_on_threads_that_may_block() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        let served = serve(Vec::new()).await;
        get(served.read_only, "/healthz").await;
        for path in ["/pods", "/metrics/probes"] {
            let (release, released) = std::sync::mpsc::channel::<()>();
            let held = tokio::task::spawn_blocking(move || released.recv());
            let mut large = std::pin::pin!(get(served.read_only, path));
            for _ in 0..2 {
                tokio::select! {
                    biased;
                    answer = &mut large => panic!("{path} needs no such thread: {answer:?}"),
                    (status, _) = get(served.read_only, "/healthz") => assert_eq!(status, 200),
                }
            }
            release.send(()).expect("the thread waits");
            held.await.expect("no panic").expect("released");
            assert_eq!(tokio::time::timeout(TIMEOUT, large).await.expect("in time").0, 200, "{path}");
        }
    });
}

/// Prometheus asks for both.
#[tokio::test]
async fn metrics_have_the_format_and_encoding_that_the_client_accepts() {
    let served = serve(Vec::new()).await;
    for (accepted, kind, encoding) in [
        ("", "text/plain; version=0.0.4", None),
        ("Accept-Encoding: gzip\r\n", "text/plain; version=0.0.4", Some("gzip")),
        (
            "Accept: application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited\r\n",
            "application/vnd.google.protobuf",
            None,
        ),
    ] {
        for path in ["/metrics", "/metrics/probes", "/metrics/slis"] {
            let (status, head, _) = request(served.read_only, "GET", path, accepted).await;
            let sent = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            assert!(status == 200 && sent("content-type").is_some_and(|sent| sent.starts_with(kind)), "{path}: {head}");
            assert_eq!(sent("content-encoding"), encoding, "{path}: {head}");
        }
    }
}

#[tokio::test]
async fn servers_end_at_shutdown() {
    let served = serve(Vec::new()).await;
    get(served.health, "/healthz").await;
    served.shutdown.cancel();
    tokio::time::timeout(Duration::from_secs(10), served.task).await.expect("must end").unwrap().expect("no error");
}

#[tokio::test(start_paused = true)]
async fn the_health_port_is_bound_as_soon_as_it_is_free() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = taken.local_addr().unwrap();
    let mut options = Options::new(&KubeletConfiguration::default(), &FeatureGates::default());
    (options.healthz, options.read_only) = (Some(address.into()), None);
    let handles = handles(Vec::new(), Arc::default());
    let task = tokio::spawn(run(options, handles, Mounted::default(), CancellationToken::new()));
    tokio::time::sleep(Duration::from_secs(12)).await;
    drop(taken);
    assert_eq!(get(address, "/healthz").await, (200, "ok".to_owned()));
    task.abort();
}

#[tokio::test]
async fn the_health_port_is_bound_at_the_name_of_a_host() {
    let address = free_port().await;
    let mut options = Options::new(&KubeletConfiguration::default(), &FeatureGates::default());
    let named = HostPort { host: "localhost".to_owned(), port: address.port() };
    (options.healthz, options.read_only) = (Some(named), None);
    let handles = handles(Vec::new(), Arc::default());
    let task = tokio::spawn(run(options, handles, Mounted::default(), CancellationToken::new()));
    assert_eq!(get(address, "/healthz").await, (200, "ok".to_owned()));
    task.abort();
}

/// The sockets of a killed agent may close after its successor has started.
#[tokio::test(start_paused = true)]
async fn a_read_only_port_that_becomes_free_within_five_seconds_is_bound() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = taken.local_addr().unwrap();
    let mut options = Options::new(&KubeletConfiguration::default(), &FeatureGates::default());
    (options.healthz, options.read_only) = (None, Some(address));
    let handles = handles(Vec::new(), Arc::default());
    let task = tokio::spawn(run(options, handles, Mounted::default(), CancellationToken::new()));
    tokio::time::sleep(Duration::from_secs(4)).await;
    drop(taken);
    assert_eq!(get(address, "/healthz").await, (200, "ok".to_owned()));
    task.abort();
}

#[tokio::test]
async fn silent_connections_do_not_keep_others_out() {
    let served = serve(Vec::new()).await;
    for address in [served.health, served.read_only] {
        assert_eq!(get(address, "/healthz").await.0, 200);
        let mut silent = Vec::new();
        for _ in 0..1200 {
            silent.push(TcpStream::connect(address).await.expect("connected"));
        }
        assert_eq!(get(address, "/healthz").await.0, 200, "a new client is served");
        let closed = tokio::time::timeout(TIMEOUT, silent[0].read(&mut [0; 1])).await.expect("in time");
        assert!(matches!(closed, Ok(0) | Err(_)), "the oldest silent connection is closed");
    }
}

#[tokio::test(start_paused = true)]
async fn heads_have_a_time_limit() {
    let served = serve(Vec::new()).await;
    for address in [served.health, served.read_only] {
        get(address, "/healthz").await;
        let mut slow = TcpStream::connect(address).await.expect("connected");
        slow.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n").await.expect("sent");
        let start = tokio::time::Instant::now();
        let mut answer = Vec::new();
        let _ = slow.read_to_end(&mut answer).await;
        let took = start.elapsed();
        assert!((Duration::from_secs(85)..Duration::from_secs(100)).contains(&took), "{took:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_read_only_port_in_use_ends_the_agent() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = taken.local_addr().unwrap();
    let mut options = Options::new(&KubeletConfiguration::default(), &FeatureGates::default());
    (options.healthz, options.read_only) = (Some(free_port().await.into()), Some(address));
    let handles = handles(Vec::new(), Arc::default());
    let running = run(options, handles, Mounted::default(), CancellationToken::new());
    let error = tokio::time::timeout(TIMEOUT, running).await.expect("at once").expect_err("taken");
    assert!(
        error.to_string().starts_with(&format!("cannot bind the address {address} of the read-only server: ")),
        "{error}"
    );
}

#[test]
fn options_from_the_configuration() {
    let options = |change: fn(&mut KubeletConfiguration)| {
        let mut config = KubeletConfiguration::default();
        change(&mut config);
        Options::new(&config, &FeatureGates::default())
    };
    let default = options(|_| {});
    assert_eq!(default.healthz, Some(SocketAddr::from(([127, 0, 0, 1], 10248)).into()));
    assert_eq!((default.read_only, default.sync_loop_limit), (None, SYNC_LOOP_LEAST));
    assert_eq!(options(|config| config.healthz_port = 0).healthz, None);
    let named = options(|config| config.healthz_bind_address = "localhost".to_owned());
    assert_eq!(named.healthz, Some(HostPort { host: "localhost".to_owned(), port: 10248 }));
    assert_eq!(options(|config| config.read_only_port = 10255).read_only, Some(([0, 0, 0, 0], 10255).into()));
    let alone = options(|config| (config.read_only_port, config.enable_server) = (10255, false));
    assert!(alone.read_only.is_some(), "enableServer is about the main port");
    let slow = options(|config| config.sync_frequency = crate::config::duration::GoDuration::mins(10));
    assert_eq!(slow.sync_loop_limit, Duration::from_secs(1200));
}

#[test]
fn each_switch_is_about_its_own_handlers() {
    type Switch = (fn(&mut KubeletConfiguration), EnabledHandlers);
    let switches: [Switch; 5] = [
        (|_| {}, ALL_ON),
        (|config| config.enable_debugging_handlers = false, EnabledHandlers { debugging: false, ..ALL_ON }),
        (|config| config.enable_profiling_handler = false, EnabledHandlers { profiling: false, ..ALL_ON }),
        (|config| config.enable_debug_flags_handler = false, EnabledHandlers { debug_flags: false, ..ALL_ON }),
        (|config| config.enable_system_log_handler = false, EnabledHandlers { system_logs: false, ..ALL_ON }),
    ];
    for (change, expected) in switches {
        let mut config = KubeletConfiguration::default();
        change(&mut config);
        assert_eq!(Options::new(&config, &FeatureGates::default()).enabled, expected);
    }
    for (gate, expected) in [
        ("ContainerCheckpoint", EnabledHandlers { checkpoint: false, ..ALL_ON }),
        ("ComponentFlagz", EnabledHandlers { flagz: false, ..ALL_ON }),
        ("ComponentStatusz", EnabledHandlers { statusz: false, ..ALL_ON }),
    ] {
        let gates = FeatureGates::new(&[(gate.to_owned(), false)].into()).expect("a known gate");
        assert_eq!(Options::new(&KubeletConfiguration::default(), &gates).enabled, expected, "{gate}");
    }
}
