//! Regular sessions and their ends.

use super::channels::CLOSE;
use super::*;

#[tokio::test]
async fn a_command_with_everything() {
    let streams = Streams { stdin: true, stdout: true, stderr: true, tty: false };
    let mut session = Session::begun(streams, 64).await;
    session.send(b"\x00input").await;
    assert_eq!(session.runtime.receive("stdin", 5).await, (b"input".to_vec(), false));
    session.client.send(Message::text("\0text")).await.unwrap();
    assert_eq!(session.runtime.receive("stdin", 4).await, (b"text".to_vec(), false), "as some clients send it");
    session.send(&[CLOSE, 0]).await;
    assert_eq!(session.runtime.receive("stdin", 1).await, (Vec::new(), true));
    session.runtime.send("stdout", b"out", false).await;
    assert_eq!(session.input().await.unwrap(), b"\x01out");
    session.runtime.send("stderr", b"err", true).await;
    assert_eq!(session.input().await.unwrap(), b"\x02err");
    session.runtime.send("error", OK, true).await;
    session.runtime.send("stdout", b"late", true).await;
    assert_eq!(session.input().await.unwrap(), b"\x01late", "output comes before the result");
    assert_eq!(session.result().await["status"], "Success");
    assert_eq!(session.input().await, None);
    session.agent.await.unwrap();
    assert_eq!(session.runtime.frame().await, None);
}

#[tokio::test]
async fn a_terminal_has_a_size() {
    let streams = Streams { stdin: true, stdout: true, stderr: false, tty: true };
    let mut session = Session::begun(streams, 1024).await;
    session.send(b"\x04{\"Width\":80,\"Height\":24}").await;
    assert_eq!(session.runtime.receive("resize", 24).await.0, b"{\"Width\":80,\"Height\":24}");
    session.send(b"\x00x").await;
    assert_eq!(session.runtime.receive("stdin", 1).await.0, b"x");
    let mut old = Session::speaking(Protocol::V2, streams, 1024).await;
    old.input().await.unwrap();
    old.runtime.accept().await;
    old.send(b"\x04{\"Width\":80,\"Height\":24}").await;
    old.send(b"\x00x").await;
    assert_eq!(old.runtime.frame().await, Some(Frame::Data { stream: 3, bytes: "x".into(), last: false }));
}

#[tokio::test]
async fn much_data_in_both_directions_over_small_buffers() {
    let session = Session::begun(INPUT_AND_OUTPUT, 512).await;
    let all: Vec<u8> = (0..300_000_u32).map(|n| n as u8).collect();
    let Session { client, mut runtime, agent } = session;
    let (mut sink, mut stream) = client.split();
    let sent = all.clone();
    let says = tokio::spawn(async move {
        for part in sent.chunks(70_000) {
            sink.send(message(0, part)).await.unwrap();
        }
        sink.send(Message::Binary(vec![CLOSE, 0].into())).await.unwrap();
        sink
    });
    let expected = all.clone();
    let echo = tokio::spawn(async move {
        // A runtime that echoes everything, and sends pings in between.
        let mut received = Vec::new();
        while let Some(Frame::Data { bytes, last, .. }) = runtime.frame().await {
            received.extend_from_slice(&bytes);
            let mut out = Vec::new();
            Writer::default().ping(&mut out, 2);
            runtime.raw(&out).await;
            runtime.send("stdout", &bytes, last).await;
            if last {
                break;
            }
        }
        assert!(received == expected);
        runtime.send("error", OK, true).await;
        runtime
    });
    let mut received = Vec::new();
    while received.len() < all.len() {
        match tokio::time::timeout(TIMEOUT, stream.next()).await.expect("in time").unwrap().unwrap() {
            Message::Binary(bytes) => received.extend_from_slice(&bytes[1..]),
            other => panic!("{other:?}"),
        }
    }
    assert!(received == all);
    let runtime = echo.await.unwrap();
    let _sink = says.await.unwrap();
    assert!(matches!(stream.next().await, Some(Ok(Message::Binary(bytes))) if bytes[0] == ERROR));
    assert!(matches!(stream.next().await, Some(Ok(Message::Close(Some(end)))) if u16::from(end.code) == 1000));
    assert!(stream.next().await.is_none());
    agent.await.unwrap();
    drop(runtime);
}

#[tokio::test(start_paused = true)]
async fn pings_in_both_directions() {
    let mut session = Session::begun(INPUT_AND_OUTPUT, 1024).await;
    let begin = Instant::now();
    for id in [1, 3, 5] {
        assert_eq!(session.runtime.any_frame().await, Some(Frame::Ping { id }));
    }
    assert_eq!(begin.elapsed().as_secs(), 15);
    session.runtime.raw(&[0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 5]).await;
    session.runtime.raw(&[0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 8]).await;
    let answer = session.runtime.any_frame().await;
    assert_eq!(answer, Some(Frame::Ping { id: 8 }), "an answer is not answered, a ping is");
}

/// A runtime that has sent everything and closed the connection loses what its kernel has not sent yet when it is pinged.
#[tokio::test(start_paused = true)]
async fn a_runtime_whose_output_waits_for_a_slow_client_is_not_pinged() {
    let mut session = Session::begun(OUTPUT, 1024).await;
    let output = vec![b'x'; 256 * 1024];
    let sent = tokio::time::timeout(Duration::from_secs(60), session.runtime.send("stdout", &output, true)).await;
    assert!(sent.is_err(), "all output was read without a client that reads it");
    // When the client has read what was read for it, the rest of the output may not have arrived yet.
    let reading = async { while session.input().await.is_some() {} };
    assert!(tokio::time::timeout(Duration::from_secs(4), reading).await.is_err(), "the output has ended");
    let frame = tokio::time::timeout(Duration::from_millis(1), session.runtime.any_frame()).await;
    assert!(frame.is_err(), "{frame:?}");
    assert_eq!(session.runtime.any_frame().await, Some(Frame::Ping { id: 1 }), "it has sent nothing for five seconds");
}

#[tokio::test]
async fn a_disconnected_client_ends_the_session() {
    let mut session = Session::begun(INPUT_AND_OUTPUT, 1024).await;
    drop(session.client);
    session.agent.await.unwrap();
    assert_eq!(session.runtime.frame().await, None, "the runtime sees the end of the connection");
}

/// Its last input is not read, so its end is not detected by reading.
#[tokio::test(start_paused = true)]
async fn a_client_that_disconnects_during_back_pressure_ends_the_session() {
    let mut session = Session::begun(INPUT_AND_OUTPUT, 1024).await;
    let flood = async { while session.client.send(message(0, &[7; 900])).await.is_ok() {} };
    assert!(tokio::time::timeout(Duration::from_secs(1), flood).await.is_err(), "the output was read");
    assert!(!session.agent.is_finished());
    drop(session.client);
    tokio::time::timeout(TIMEOUT * 2, session.agent).await.expect("in time").unwrap();
}

/// The runtime has ended and does not read any more, while the client still writes.
#[tokio::test]
async fn the_result_is_sent_to_a_client_that_keeps_writing() {
    let session = Session::begun(INPUT_AND_OUTPUT, 512).await;
    let Session { client, mut runtime, agent } = session;
    let (mut sink, mut stream) = client.split();
    let flood = tokio::spawn(async move { while sink.send(message(0, &[7; 4096])).await.is_ok() {} });
    runtime.send("stdout", b"enough", true).await;
    runtime.send("error", OK, true).await;
    drop(runtime);
    let mut messages = Vec::new();
    while let Some(Ok(Message::Binary(bytes))) = tokio::time::timeout(TIMEOUT, stream.next()).await.expect("in time") {
        messages.push(bytes);
    }
    assert_eq!(messages[0].as_ref(), b"\x01enough");
    assert!(messages[1].starts_with(b"\x03") && messages[1].ends_with(br#""status":"Success"}"#), "{messages:?}");
    flood.await.unwrap();
    drop(stream);
    agent.await.unwrap();
}

/// Closing a socket with unread input would discard what the client has not read.
#[tokio::test(start_paused = true)]
async fn a_slow_client_receives_everything() {
    let mut session = Session::begun(INPUT_AND_OUTPUT, 4096).await;
    session.runtime.send("stdout", b"late", true).await;
    session.runtime.send("error", OK, true).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    session.client.send(Message::Ping("here".into())).await.unwrap();
    session.send(b"\x00more").await;
    assert_eq!(session.input().await.unwrap(), b"\x01late");
    assert_eq!(session.result().await["status"], "Success");
    assert_eq!(session.input().await, None);
    drop(session.client);
    session.agent.await.unwrap();
}

#[tokio::test]
async fn a_runtime_that_closes_the_connection_is_no_success() {
    for result in [&b""[..], OK] {
        let mut session = Session::begun(OUTPUT, 1024).await;
        if !result.is_empty() {
            session.runtime.send("error", result, false).await;
        }
        session.runtime.connection.shutdown().await.unwrap();
        let status = session.result().await;
        assert_eq!(status["status"] == "Success", !result.is_empty(), "{status}");
    }
}

#[tokio::test]
async fn an_old_protocol_has_no_result_on_success() {
    let away = [0x80, 3, 0, 7, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0];
    for (last, succeeds) in [(&away[..], true), (&[], false)] {
        let mut session = Session::speaking(Protocol::V1, OUTPUT, 1024).await;
        session.input().await.unwrap();
        session.runtime.accept().await;
        session.runtime.raw(last).await;
        session.runtime.connection.shutdown().await.unwrap();
        let status = session.result().await;
        assert_eq!(status["status"] == "Success", succeeds, "{status}");
    }
}

#[tokio::test]
async fn an_unreachable_runtime_is_reported() {
    let (client, agents) = tokio::io::duplex(1024);
    let server = WebSocketStream::from_raw_socket(agents, Role::Server, Some(websocket::limits())).await;
    let connect = async { Err::<(DuplexStream, Protocol), _>("no listener".to_owned()) };
    let agent = tokio::spawn(carry(server, connect, OUTPUT));
    let mut client = WebSocketStream::from_raw_socket(client, Role::Client, None).await;
    assert_eq!(client.next().await.unwrap().unwrap(), message(1, &[]));
    let status = client.next().await.unwrap().unwrap().into_data();
    let body: Value = serde_json::from_slice(&status[1..]).unwrap();
    assert_eq!((status[0], &body["message"]), (ERROR, &"Internal error occurred: no listener".into()));
    drop(client);
    agent.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn sending_the_result_has_a_timeout() {
    let mut session = Session::begun(OUTPUT, 64).await;
    session.runtime.send("stdout", b"", true).await;
    let begin = Instant::now();
    let failed = format!(r#"{{"status":"Failure","message":"{}"}}"#, "long".repeat(100));
    let mut out = Vec::new();
    Writer::default().data(&mut out, 1, failed.as_bytes(), true);
    session.runtime.raw(&out).await;
    session.agent.await.unwrap();
    assert_eq!(begin.elapsed(), RESULT);
}

#[tokio::test(start_paused = true)]
async fn idle_sessions_are_ended() {
    let mut session = Session::begun(INPUT_AND_OUTPUT, 1 << 20).await;
    let begin = Instant::now();
    tokio::time::sleep(idle::IDLE / 2).await;
    session.send(b"\x00x").await;
    tokio::time::sleep(idle::IDLE / 2).await;
    session.runtime.send("stdout", b"x", false).await;
    assert_eq!(session.input().await.unwrap(), b"\x01x", "data resets the timeout");
    tokio::time::sleep(idle::IDLE / 2).await;
    // Pings do not keep a session alive.
    session.client.send(Message::Ping("here".into())).await.unwrap();
    let status = session.failure().await;
    assert!(status.contains("idle for four hours"), "{status}");
    let expected = 2 * idle::IDLE;
    assert!(begin.elapsed() >= expected && begin.elapsed() < expected + TIMEOUT, "{:?}", begin.elapsed());
}
