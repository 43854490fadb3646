//! Limits of connections and requests.

use super::*;

#[tokio::test]
async fn request_heads_are_limited() {
    let port = Setup::new(Some(api())).start().await;
    let long = "x".repeat(60_000);
    let answer = port.ask(None, "GET", &format!("/pods/{long}"), "").await;
    assert_eq!(answer.status, 401, "a long path is a path");
    let mut headers = String::new();
    for index in 0..90 {
        headers.push_str(&format!("X-{index}: {}\r\n", "y".repeat(2000)));
    }
    assert_eq!(port.ask(None, "GET", "/pods", &headers).await.status, 401, "180 kB of headers are fine");
    let mut stream = port.connect(port.client(None)).await.expect("a connection");
    let endless = format!("GET /pods HTTP/1.1\r\nHost: x\r\nX-0: {}", "y".repeat(400 << 10));
    let refused = async {
        // The server may close the connection while the client still writes.
        let _ = stream.write_all(endless.as_bytes()).await;
        stream.read_to_end(&mut Vec::new()).await
    };
    let _ = tokio::time::timeout(TIMEOUT, refused).await.expect("a head of 400 KiB is refused before it is complete");
    let mut stream = port.connect(port.client(None)).await.expect("a connection");
    let chunk = "y".repeat(8192);
    let _ = stream.write_all(b"GET /pods HTTP/1.1\r\nHost: x\r\n").await;
    let mut sent = 0;
    for index in 0..1000 {
        // The server may close the connection while the client still writes.
        if stream.write_all(format!("X-{index}: {chunk}\r\n").as_bytes()).await.is_err() {
            break;
        }
        sent += chunk.len();
    }
    assert!(sent < 1000 * chunk.len(), "8 MB of headers were accepted");
}

#[tokio::test]
async fn silent_connections_do_not_keep_others_out() {
    let port = Setup::new(Some(api())).start().await;
    let root = port.authority.client("root", &[]);
    let mut known = Session { stream: port.connect(port.client(Some(&root))).await.expect("a connection") };
    assert_eq!(known.ask("GET", "/healthz", "").await.0, 200);
    let mut silent = Vec::new();
    for _ in 0..1200 {
        silent.push(TcpStream::connect(port.address).await.expect("connected"));
    }
    assert_eq!(port.ask(Some(&root), "GET", "/healthz", "").await.status, 200, "a newcomer is served");
    assert_eq!(known.ask("GET", "/healthz", "").await.0, 200, "existing connections are served");
    let closed = tokio::time::timeout(TIMEOUT, silent[0].read(&mut [0; 1])).await.expect("in time");
    assert!(matches!(closed, Ok(0) | Err(_)), "the oldest silent one had to go");
}

#[tokio::test(start_paused = true)]
async fn handshakes_and_heads_have_a_time_limit() {
    let port = Setup::new(Some(api())).start().await;
    let start = tokio::time::Instant::now();
    let mut silent = TcpStream::connect(port.address).await.expect("connected");
    assert_eq!(silent.read(&mut [0; 1]).await.unwrap_or(0), 0);
    let took = start.elapsed();
    assert!((Duration::from_secs(9)..Duration::from_secs(12)).contains(&took), "{took:?}");
}

#[tokio::test]
async fn shutdown_ends_the_server() {
    let port = Setup::new(Some(api())).start().await;
    let root = port.authority.client("root", &[]);
    let mut idle = Session { stream: port.connect(port.client(Some(&root))).await.expect("a connection") };
    assert_eq!(idle.ask("GET", "/healthz", "").await.0, 200);
    port.shutdown.cancel();
    tokio::time::timeout(TIMEOUT, port.task).await.expect("in time").expect("ends");
}
