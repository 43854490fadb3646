//! Streams over real connections: a client, our server, and a streaming server that the runtime names.

mod requests;
mod websockets;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use axum::http::HeaderMap;
use axum::http::HeaderName;
use axum::http::StatusCode;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::PodStatus;
use tokio::io::AsyncReadExt as _;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpListener;
use tokio::net::TcpStream;
use tonic::Status;

use super::super::PodLookup;
use super::super::secure::Peer;
use super::*;
use crate::model::Pod;
use crate::model::PodSnapshot;
use crate::model::PodUid;
use crate::model::testing;
use crate::runtime::Runtime;
use crate::runtime::RuntimeOptions;
use crate::runtime::tests::server::Answer;
use crate::runtime::tests::server::Socket;
use crate::runtime::tests::server::say;
use crate::runtime::tests::server::script;

const TIMEOUT: Duration = Duration::from_secs(20);

struct OnePod(Pod);

impl PodLookup for OnePod {
    fn pod(&self, namespace: &str, name: &str) -> Option<Pod> {
        (namespace == "ns" && name == "pod").then(|| self.0.clone())
    }

    fn status(&self, _: &Pod) -> PodStatus {
        PodStatus::default()
    }

    fn snapshot(&self, _: &PodUid) -> Option<Arc<PodSnapshot>> {
        None
    }
}

/// Requests of the runtime, by name.
type Asked = Arc<Mutex<Vec<(String, axum::body::Bytes)>>>;

struct Node {
    address: SocketAddr,
    asked: Asked,
    metrics: Arc<Metrics>,
    checkpoints: tempfile::TempDir,
}

impl Node {
    /// A node whose runtime serves streams at `url`.
    async fn start(url: &str) -> Self {
        Self::at(url, true).await
    }

    /// The same with the feature gate ExtendWebSocketsToKubelet on or off.
    async fn at(url: &str, websockets: bool) -> Self {
        let (url, asked) = (url.to_owned(), Asked::default());
        let recorded = asked.clone();
        Self::serving(asked, websockets, move |method, message| {
            recorded.lock().unwrap().push((method.to_owned(), message));
            let url = url.clone();
            match method {
                "ListContainers" => say(&cri::ListContainersResponse {
                    containers: vec![cri::Container { id: "main-0".to_owned(), ..Default::default() }],
                }),
                "ListPodSandbox" => say(&cri::ListPodSandboxResponse {
                    items: vec![cri::PodSandbox { id: "sandbox-0".to_owned(), ..Default::default() }],
                }),
                "Exec" => say(&cri::ExecResponse { url }),
                "Attach" => say(&cri::AttachResponse { url }),
                "PortForward" => say(&cri::PortForwardResponse { url }),
                "ExecSync" => {
                    say(&cri::ExecSyncResponse { stdout: "out ".into(), stderr: "err".into(), ..Default::default() })
                }
                "CheckpointContainer" => say(&cri::CheckpointContainerResponse {}),
                _ => Err(Status::unimplemented(method.to_owned())),
            }
        })
        .await
    }

    async fn with(asked: Asked, answer: impl Fn(&str, axum::body::Bytes) -> Answer + Send + Sync + 'static) -> Self {
        Self::serving(asked, true, answer).await
    }

    async fn serving(
        asked: Asked,
        websockets: bool,
        answer: impl Fn(&str, axum::body::Bytes) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let socket = Socket::default();
        socket.serve(script(answer));
        let runtime =
            Runtime::with_connector("unix:///test.sock", move || socket.clone().connect(), RuntimeOptions::default());
        let mut pod = testing::pod("Always", &[], &["main", "terminal"]);
        pod.spec.get_or_insert_default().containers[1].tty = Some(true);
        let pod = Arc::new(pod);
        let containers = Containers { pods: Arc::new(OnePod(pod)), runtime };
        let checkpoints = tempfile::tempdir().unwrap();
        let metrics = Metrics::new();
        let websockets = websockets.then(|| metrics.clone());
        let router = router(containers, Some(checkpoints.path().to_owned()), websockets);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut peer = Peer::default();
        peer.address.replace(([127, 0, 0, 1], 7).into());
        let router = router.layer(axum::Extension(peer));
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, asked, metrics, checkpoints }
    }

    /// Sends a request; returns the head of the answer and the connection, where the body is still to come.
    async fn send(&self, method: &str, target: &str, headers: &str) -> (String, TcpStream) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let text = format!("{method} {target} HTTP/1.1\r\nHost: node\r\nContent-Length: 0\r\n{headers}\r\n");
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(tokio::time::timeout(TIMEOUT, stream.read_u8()).await.expect("an answer").unwrap());
        }
        (String::from_utf8(head).unwrap().to_lowercase(), stream)
    }

    async fn answer(&self, method: &str, target: &str, headers: &str) -> (u16, String) {
        let (head, mut stream) = self.send(method, target, &format!("{headers}Connection: close\r\n")).await;
        let mut body = String::new();
        stream.read_to_string(&mut body).await.unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body)
    }

    fn asked<M: prost::Message + Default>(&self, method: &str) -> M {
        let asked = self.asked.lock().unwrap();
        let (_, message) = asked.iter().find(|(name, _)| name == method).expect("the runtime was asked");
        <M as prost::Message>::decode(message.clone()).unwrap()
    }
}

/// A streaming server that echoes every byte and records its requests.
async fn echo() -> (String, Arc<Mutex<Vec<(String, HeaderMap)>>>) {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let recorded = asked.clone();
    let handler = move |mut request: Request| {
        let recorded = recorded.clone();
        async move {
            let line = format!("{} {}", request.method(), request.uri());
            recorded.lock().unwrap().push((line, request.headers().clone()));
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let (mut read, mut write) = tokio::io::split(TokioIo::new(upgrade.await.unwrap()));
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
            let offered = request.headers().get("x-stream-protocol-version").cloned();
            let chosen = offered.map(|offered| [(HeaderName::from_static("x-stream-protocol-version"), offered)]);
            (StatusCode::SWITCHING_PROTOCOLS, [("connection", "Upgrade"), ("upgrade", "SPDY/3.1")], chosen.unwrap())
        }
    };
    (serve(Router::new().fallback(handler)).await, asked)
}

async fn serve(router: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/stream/token?q=1", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    url
}

const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\
    X-Forwarded-For: 192.0.2.7\r\nUser-Agent: test\r\n";

#[tokio::test]
async fn bytes_flow_both_ways_until_one_side_ends() {
    let (url, seen) = echo().await;
    let node = Node::start(&url).await;
    let target = "/exec/ns/pod/some-uid/main?input=1&output=1&error=1&command=cat&command=a+b";
    let (head, mut stream) = node.send("POST", target, UPGRADE).await;
    assert!(
        head.starts_with("http/1.1 101") && head.contains("x-stream-protocol-version: v4.channel.k8s.io"),
        "{head}"
    );
    let text: Vec<u8> = (0..200_000_u32).map(|n| n as u8).collect();
    let (mut read, mut write) = stream.split();
    let sent = async { write.write_all(&text).await.unwrap() };
    let mut returned = vec![0; text.len()];
    let got = async { tokio::time::timeout(TIMEOUT, read.read_exact(&mut returned)).await.unwrap().unwrap() };
    tokio::join!(sent, got);
    assert!(returned == text, "the bytes come back as they were");
    stream.shutdown().await.unwrap();
    let end = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut Vec::new())).await.expect("an end").unwrap();
    assert_eq!(end, 0);
    let (line, headers) = seen.lock().unwrap()[0].clone();
    assert_eq!(line, "POST /stream/token?q=1", "path and query are the runtime's, the method the client's");
    assert_eq!((&headers["host"], &headers["user-agent"]), (&"node".parse().unwrap(), &"test".parse().unwrap()));
    assert_eq!(headers["x-forwarded-for"], "192.0.2.7, 127.0.0.1");
    let asked: cri::ExecRequest = node.asked("Exec");
    assert_eq!((asked.container_id.as_str(), asked.cmd), ("main-0", vec!["cat".to_owned(), "a b".to_owned()]));
    assert_eq!((asked.stdin, asked.stdout, asked.stderr, asked.tty), (true, true, true, false));
}

#[tokio::test]
async fn all_output_reaches_the_client_before_its_connection_ends() {
    let speech = |mut request: Request| async move {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgrade.await.unwrap());
            stream.write_all(&vec![7; 1 << 20]).await.unwrap();
            stream.shutdown().await.unwrap();
        });
        (StatusCode::SWITCHING_PROTOCOLS, [("connection", "Upgrade"), ("upgrade", "SPDY/3.1")])
    };
    let node = Node::start(&serve(Router::new().fallback(speech)).await).await;
    let (_, mut stream) = node.send("POST", "/exec/ns/pod/main?output=1", UPGRADE).await;
    let mut output = Vec::new();
    tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut output)).await.expect("an end").unwrap();
    assert_eq!(output.len(), 1 << 20);
}

#[tokio::test]
async fn the_runtime_is_not_read_for_a_client_that_does_not_read() {
    let sent = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = sent.clone();
    let flood = move |mut request: Request| {
        let count = count.clone();
        async move {
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let mut stream = TokioIo::new(upgrade.await.unwrap());
                while stream.write_all(&[7; 4096]).await.is_ok() {
                    count.fetch_add(4096, std::sync::atomic::Ordering::Relaxed);
                }
            });
            (StatusCode::SWITCHING_PROTOCOLS, [("connection", "Upgrade"), ("upgrade", "SPDY/3.1")])
        }
    };
    let node = Node::start(&serve(Router::new().fallback(flood)).await).await;
    let (_, stream) = node.send("POST", "/exec/ns/pod/main?output=1&command=yes", UPGRADE).await;
    // Until the buffers of the kernel are full.
    let mut before = usize::MAX;
    while before != sent.load(std::sync::atomic::Ordering::Relaxed) {
        before = sent.load(std::sync::atomic::Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert!(before > 0 && before < 32 << 20, "{before} bytes are under way");
    drop(stream);
}

#[tokio::test]
async fn attach_takes_the_terminal_of_the_container() {
    let (url, _) = echo().await;
    let node = Node::start(&url).await;
    let (head, _stream) = node.send("GET", "/attach/ns/pod/terminal?input=1&output=1&error=1", UPGRADE).await;
    assert!(head.starts_with("http/1.1 101"), "{head}");
    let asked: cri::AttachRequest = node.asked("Attach");
    assert_eq!((asked.stdin, asked.stdout, asked.stderr, asked.tty), (true, true, false, true));
    let (status, text) = node.answer("GET", "/attach/ns/pod/other-uid/main?output=1", UPGRADE).await;
    assert_eq!((status, text.as_str()), (500, "pod pod_ns not found"));
    let (status, text) = node.answer("GET", "/attach/ns/pod/nope?output=1", UPGRADE).await;
    assert_eq!((status, text.as_str()), (500, "container nope not found in pod pod_ns"));
}

#[tokio::test]
async fn ports_are_forwarded_to_the_sandbox() {
    let (url, _) = echo().await;
    let node = Node::start(&url).await;
    let (head, _stream) = node.send("POST", "/portForward/ns/pod/uid", UPGRADE).await;
    assert!(head.starts_with("http/1.1 101"), "{head}");
    let asked: cri::PortForwardRequest = node.asked("PortForward");
    assert_eq!((asked.pod_sandbox_id.as_str(), asked.port), ("sandbox-0", vec![]));
    assert_eq!(node.answer("POST", "/portForward/ns/pod/other", UPGRADE).await, (404, "pod not found".to_owned()));
    let websocket = "Connection: Upgrade\r\nUpgrade: websocket\r\n";
    let refused = node.answer("GET", "/portForward/ns/pod", websocket).await;
    assert_eq!(refused, (400, "query parameter \"port\" is required".to_owned()));
}

#[tokio::test]
async fn invalid_requests_are_refused() {
    let (url, _) = echo().await;
    let node = Node::start(&url).await;
    for (method, target, headers, status, text) in [
        ("POST", "/exec/ns/pod/main?command=x", UPGRADE, 400, "you must specify at least 1 of stdin, stdout, stderr"),
        ("POST", "/exec/ns/nope/main?output=1", UPGRADE, 404, "pod does not exist"),
        ("POST", "/exec/ns/pod/main?output=1", "", 500, "Upgrade request required\n"),
        ("POST", "/run/ns/nope/main?cmd=x", "", 404, "pod does not exist"),
        ("POST", "/checkpoint/ns/pod/nope", "", 404, "container nope does not exist"),
        ("POST", "/checkpoint/ns/pod/main?timeout=x", "", 404, "cannot parse value of timeout parameter"),
        (
            "POST",
            "/checkpoint/ns/pod/main?timeout=-1",
            "",
            500,
            "checkpointing of ns/pod/main failed (CheckpointContainer requires the timeout value to be > 0)",
        ),
    ] {
        assert_eq!(node.answer(method, target, headers).await, (status, text.to_owned()), "{method} {target}");
    }
    let dead = Node::start("http://127.0.0.1:1/x").await;
    let (status, text) = dead.answer("POST", "/exec/ns/pod/main?output=1", UPGRADE).await;
    assert!(status == 500 && text.starts_with("error dialing backend: "), "{status} {text}");
    let silent = Node::start("").await;
    let response = silent.answer("POST", "/exec/ns/pod/main?output=1", UPGRADE).await;
    assert_eq!(response, (500, "URL is not set".to_owned()));
}

#[tokio::test]
async fn errors_of_the_runtime_are_reported() {
    for (code, status) in
        [(Status::not_found("gone"), 404), (Status::resource_exhausted("busy"), 429), (Status::unknown("x"), 500)]
    {
        let text = format!("rpc error: code = {:?} desc = {}", code.code(), code.message());
        let node = Node::with(Asked::default(), move |method, _| match method {
            "ListContainers" => say(&cri::ListContainersResponse {
                containers: vec![cri::Container { id: "main-0".to_owned(), ..Default::default() }],
            }),
            _ => Err(code.clone()),
        })
        .await;
        assert_eq!(node.answer("POST", "/exec/ns/pod/main?output=1", UPGRADE).await, (status, text));
    }
    let empty = Node::with(Asked::default(), |_, _| say(&cri::ListContainersResponse::default())).await;
    let response = empty.answer("POST", "/exec/ns/pod/main?output=1", UPGRADE).await;
    assert_eq!(response, (500, "container not found (\"main\")".to_owned()));
    let response = empty.answer("POST", "/portForward/ns/pod", UPGRADE).await;
    assert_eq!(response, (500, "pod not found (\"pod_ns\")".to_owned()));
}

#[tokio::test]
async fn the_response_of_a_refusing_backend_is_passed_to_the_client() {
    let text = async |request: Request| match request.uri().path() {
        "/stream/token" => {
            (StatusCode::FORBIDDEN, [("x-accepted-stream-protocol-versions", "v4.channel.k8s.io")], "no such protocol")
        }
        _ => (StatusCode::OK, [("x", "y")], ""),
    };
    let url = serve(Router::new().fallback(text)).await;
    let node = Node::start(&url).await;
    let response = node.answer("POST", "/exec/ns/pod/main?output=1", UPGRADE).await;
    assert_eq!(response, (403, "no such protocol".to_owned()));
    let (head, _stream) = node.send("POST", "/exec/ns/pod/main?output=1", UPGRADE).await;
    let protocols = "\r\nx-accepted-stream-protocol-versions: v4.channel.k8s.io\r\n";
    assert!(head.contains(protocols) && head.contains("\r\nconnection: close\r\n"), "{head}");
    let node = Node::start(&url.replace("/stream/token", "/else")).await;
    let response = node.answer("POST", "/exec/ns/pod/main?output=1", UPGRADE).await;
    assert_eq!(response, (500, "invalid upgrade response: status code 200".to_owned()));
}

#[tokio::test]
async fn commands_are_run() {
    let node = Node::start("").await;
    assert_eq!(node.answer("POST", "/run/ns/pod/main?cmd=echo+a++b", "").await, (200, "out err".to_owned()));
    let asked: cri::ExecSyncRequest = node.asked("ExecSync");
    assert_eq!((asked.cmd, asked.timeout), (["echo", "a", "", "b"].map(str::to_owned).to_vec(), 0));
    let failing = Node::with(Asked::default(), |method, _| match method {
        "ListContainers" => say(&cri::ListContainersResponse {
            containers: vec![cri::Container { id: "main-0".to_owned(), ..Default::default() }],
        }),
        _ => say(&cri::ExecSyncResponse { stderr: "why".into(), exit_code: 3, ..Default::default() }),
    })
    .await;
    let response = failing.answer("POST", "/run/ns/pod/main?cmd=sh+-c", "").await;
    assert_eq!(response, (500, "command 'sh -c' exited with 3: why".to_owned()));
}

#[tokio::test]
async fn checkpoints_are_written_where_they_belong() {
    let node = Node::start("").await;
    let (status, text) = node.answer("POST", "/checkpoint/ns/pod/main?timeout=300", "").await;
    assert_eq!(status, 200, "{text}");
    let asked: cri::CheckpointContainerRequest = node.asked("CheckpointContainer");
    assert_eq!((asked.container_id.as_str(), asked.timeout), ("main-0", 300));
    let start = node.checkpoints.path().join("checkpoint-pod_ns-main-");
    let is_there = asked.location.starts_with(start.to_str().unwrap()) && asked.location.ends_with(".tar");
    assert!(is_there, "{}", asked.location);
    assert_eq!(text, serde_json::json!({ "items": [asked.location] }).to_string());
}
