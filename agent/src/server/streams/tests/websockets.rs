//! WebSocket clients, and what reaches the streaming server.

use futures_util::SinkExt as _;
use futures_util::StreamExt as _;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::*;

const WEBSOCKET: &str = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
    Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

fn offering(protocols: &str) -> String {
    format!("{WEBSOCKET}Sec-WebSocket-Protocol: {protocols}\r\n")
}

async fn client(stream: TcpStream) -> WebSocketStream<TcpStream> {
    WebSocketStream::from_raw_socket(stream, Role::Client, None).await
}

async fn receive(client: &mut WebSocketStream<TcpStream>) -> Option<Vec<u8>> {
    match tokio::time::timeout(TIMEOUT, client.next()).await.expect("in time")? {
        Ok(Message::Binary(bytes)) => Some(bytes.to_vec()),
        Ok(Message::Close(_)) | Err(_) => None,
        Ok(other) => panic!("{other:?}"),
    }
}

impl Node {
    /// How many sessions were counted.
    fn count(&self, subresource: &str) -> u64 {
        let name = format!("kubelet_websocket_streaming_requests_total{{subresource=\"{subresource}\"}} ");
        let metrics = self.metrics.render().unwrap();
        metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).unwrap_or_default()
    }
}

#[tokio::test]
async fn a_tunnel_passes_spdy_frames_unchanged() {
    let (url, seen) = echo().await;
    let node = Node::start(&url).await;
    let (head, stream) = node.send("GET", "/portForward/ns/pod", &offering("SPDY/3.1+portforward.k8s.io")).await;
    assert!(head.starts_with("http/1.1 101") && head.contains("upgrade: websocket"), "{head}");
    assert!(head.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="), "{head}");
    assert!(head.contains("sec-websocket-protocol: spdy/3.1+portforward.k8s.io"), "what the runtime chose: {head}");
    let mut client = client(stream).await;
    let all: Vec<u8> = (0..100_000_u32).map(|n| n as u8).collect();
    client.send(Message::Binary(all.clone().into())).await.unwrap();
    let mut returned = Vec::new();
    while returned.len() < all.len() {
        returned.extend(receive(&mut client).await.expect("more"));
    }
    assert!(returned == all);
    client.close(None).await.unwrap();
    assert_eq!(receive(&mut client).await, None);
    let (line, headers) = seen.lock().unwrap()[0].clone();
    assert_eq!(line, "POST /stream/token?q=1");
    assert_eq!(headers["upgrade"], "SPDY/3.1");
    assert_eq!(headers["x-stream-protocol-version"], "portforward.k8s.io");
    assert!(!headers.keys().any(|name| name.as_str().starts_with("sec-websocket")), "{headers:?}");
    assert_eq!(node.count("portforward"), 1);
}

#[tokio::test]
async fn a_tunnel_is_refused_as_the_runtime_refuses() {
    let answers = async |request: Request| match request.uri().path() {
        "/stream/token" => (StatusCode::FORBIDDEN, [("upgrade", "x")], "no such protocol"),
        "/silent" => (StatusCode::SWITCHING_PROTOCOLS, [("connection", "upgrade")], ""),
        _ => (StatusCode::OK, [("x", "y")], ""),
    };
    let url = serve(Router::new().fallback(answers)).await;
    for (path, expected) in [
        ("/stream/token", (403, "no such protocol")),
        ("/silent", (500, "unable to upgrade: missing upgrade headers in response")),
        ("/else", (500, "invalid upgrade response: status code 200")),
    ] {
        let node = Node::start(&url.replace("/stream/token", path)).await;
        let tunnel = offering("SPDY/3.1+portforward.k8s.io");
        let (status, text) = node.answer("GET", "/portForward/ns/pod", &tunnel).await;
        assert_eq!((status, text.as_str()), expected, "{path}");
    }
}

/// A streaming server that accepts this many streams, writes `hello` and reports success.
fn polite(expected: usize, seen: Arc<Mutex<Vec<u8>>>) -> Router {
    Router::new().fallback(move |mut request: Request| async move {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgrade.await.unwrap());
            let (mut frames, mut buffer, mut opened) = (spdy::Frames::default(), bytes::BytesMut::new(), 0);
            while opened < expected {
                match frames.next(&mut buffer).unwrap() {
                    Some(spdy::Frame::Open { stream: number }) => {
                        opened += 1;
                        let reply = [&[0x80, 3, 0, 2, 0, 0, 0, 4][..], &number.to_be_bytes()].concat();
                        stream.write_all(&reply).await.unwrap();
                    }
                    Some(_) => {}
                    None => {
                        let mut piece = [0; 1024];
                        let read = stream.read(&mut piece).await.unwrap();
                        assert!(read > 0);
                        seen.lock().unwrap().extend_from_slice(&piece[..read]);
                        buffer.extend_from_slice(&piece[..read]);
                    }
                }
            }
            let (mut out, writer) = (Vec::new(), spdy::Writer::default());
            // One of them is the output; input is ignored.
            for number in [3, 5] {
                writer.data(&mut out, number, b"hello", true);
            }
            writer.data(&mut out, 1, br#"{"status":"Success"}"#, true);
            stream.write_all(&out).await.unwrap();
        });
        let headers =
            [("connection", "Upgrade"), ("upgrade", "SPDY/3.1"), ("x-stream-protocol-version", "v4.channel.k8s.io")];
        (StatusCode::SWITCHING_PROTOCOLS, headers)
    })
}

#[tokio::test]
async fn the_fifth_protocol_is_spoken_here() {
    let node = Node::start(&serve(polite(2, Arc::default())).await).await;
    let headers = offering("v5.channel.k8s.io, v4.channel.k8s.io");
    let (head, stream) = node.send("GET", "/exec/ns/pod/main?output=1&command=x", &headers).await;
    assert!(head.starts_with("http/1.1 101") && head.contains("sec-websocket-protocol: v5.channel.k8s.io"), "{head}");
    let mut client = client(stream).await;
    assert_eq!(receive(&mut client).await.unwrap(), [1]);
    assert_eq!(receive(&mut client).await.unwrap(), b"\x01hello");
    let result = receive(&mut client).await.unwrap();
    assert!(result[0] == 3 && result.ends_with(br#""status":"Success"}"#), "{result:?}");
    assert_eq!(receive(&mut client).await, None);
    assert_eq!(node.count("exec"), 1);
    let dead = Node::start("http://127.0.0.1:1/x").await;
    let (head, stream) = dead.send("GET", "/attach/ns/pod/main?output=1", &headers).await;
    assert!(head.starts_with("http/1.1 101"), "errors are reported in the session: {head}");
    let mut client = self::client(stream).await;
    assert_eq!(receive(&mut client).await.unwrap(), [1]);
    let text = String::from_utf8(receive(&mut client).await.unwrap()).unwrap();
    assert!(text.contains("InternalError") && text.contains("error dialing backend"), "{text}");
    let (status, _) = node.answer("GET", "/exec/ns/nope/main?output=1", &headers).await;
    assert_eq!((status, node.count("exec")), (404, 1), "what is refused before is no session");
}

/// A runtime waits for the requested streams, which for attach are those of the container, not of the client.
#[tokio::test]
async fn attach_opens_the_requested_streams() {
    let seen = Arc::<Mutex<Vec<u8>>>::default();
    let node = Node::start(&serve(polite(4, seen.clone())).await).await;
    let target = "/attach/ns/pod/terminal?input=1&output=1&error=1";
    let (_, stream) = node.send("GET", target, &offering("v5.channel.k8s.io")).await;
    let mut client = client(stream).await;
    assert_eq!(receive(&mut client).await.unwrap(), [1]);
    assert_eq!(receive(&mut client).await.unwrap(), b"\x01hello");
    assert_eq!(receive(&mut client).await.unwrap()[0], 3);
    let asked: cri::AttachRequest = node.asked("Attach");
    assert_eq!((asked.stdin, asked.stdout, asked.stderr, asked.tty), (true, true, false, true));
    let seen = seen.lock().unwrap().clone();
    let opened = |name: &str| seen.windows(name.len()).any(|part| part == name.as_bytes());
    assert_eq!(["error", "stdin", "stdout", "resize", "stderr"].map(opened), [true, true, true, true, false]);
}

#[tokio::test]
async fn a_refusal_of_the_runtime_is_reported_in_the_session() {
    let answers = async |request: Request| match request.uri().path() {
        "/stream/token" => (StatusCode::FOUND, [("location", "http://127.0.0.1/")], ""),
        "/refuses" => (StatusCode::NOT_FOUND, [("x", "y")], "token expired"),
        _ => (StatusCode::SWITCHING_PROTOCOLS, [("connection", "upgrade")], ""),
    };
    let url = serve(Router::new().fallback(answers)).await;
    for (path, reason) in [
        ("/stream/token", "redirect not allowed"),
        ("/refuses", "status code 404: token expired"),
        ("/other", "unable to upgrade connection: status code 101"),
    ] {
        let node = Node::start(&url.replace("/stream/token", path)).await;
        let (_, stream) = node.send("GET", "/exec/ns/pod/main?output=1", &offering("v5.channel.k8s.io")).await;
        let mut client = client(stream).await;
        assert_eq!(receive(&mut client).await.unwrap(), [1]);
        let text = String::from_utf8(receive(&mut client).await.unwrap()).unwrap();
        assert!(text.contains(reason), "{text}");
    }
}

#[tokio::test]
async fn malformed_handshakes() {
    let (url, _) = echo().await;
    let node = Node::start(&url).await;
    let headers = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\n";
    let (status, text) = node.answer("GET", "/exec/ns/pod/main?output=1", headers).await;
    assert_eq!((status, text.as_str()), (400, "unable to upgrade: no WebSocket handshake of version 13"));
    let headers = format!("{headers}Sec-WebSocket-Version: 13\r\n");
    let (status, text) = node.answer("GET", "/exec/ns/pod/main?output=1", &headers).await;
    assert_eq!((status, text.as_str()), (400, "unable to upgrade: a WebSocket handshake without a key"));
}

/// Older protocols, and all protocols while the feature gate is off, are passed through.
#[tokio::test]
async fn other_protocols_pass_through() {
    for (websockets, protocols) in [(true, "v4.channel.k8s.io"), (false, "v5.channel.k8s.io")] {
        let passed = Arc::new(Mutex::new(None));
        let seen = passed.clone();
        let handler = move |request: Request| async move {
            *seen.lock().unwrap() = Some(request.headers().clone());
            (StatusCode::SWITCHING_PROTOCOLS, [("connection", "Upgrade"), ("upgrade", "selected-by-runtime")])
        };
        let node = Node::at(&serve(Router::new().fallback(handler)).await, websockets).await;
        let (head, _) = node.send("GET", "/exec/ns/pod/main?output=1", &offering(protocols)).await;
        assert!(head.contains("upgrade: selected-by-runtime"), "{head}");
        let headers = passed.lock().unwrap().clone().unwrap();
        assert_eq!(headers["sec-websocket-protocol"], protocols);
        assert_eq!(node.count("exec"), 0);
    }
    let node = Node::at("http://127.0.0.1:1/x", false).await;
    let refused = node.answer("GET", "/portForward/ns/pod", &offering("SPDY/3.1+portforward.k8s.io")).await;
    assert_eq!(refused, (400, "query parameter \"port\" is required".to_owned()), "the tunnel is unknown");
}
