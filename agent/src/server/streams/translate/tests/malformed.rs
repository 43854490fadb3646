//! Malformed and missing input of clients and runtimes.

use super::runtime_to_client::ACCEPT;
use super::runtime_to_client::RESULT_LENGTH;
use super::*;

#[tokio::test(start_paused = true)]
async fn accepting_the_streams_has_a_timeout() {
    let mut session = Session::start(INPUT_AND_OUTPUT, 1024).await;
    session.input().await.unwrap();
    let begin = Instant::now();
    let message = session.failure().await;
    assert!(message.contains("did not accept the streams in time"), "{message}");
    assert_eq!(begin.elapsed(), ACCEPT);
}

#[tokio::test]
async fn malformed_input_of_a_runtime_ends_the_session() {
    let too_long = [&[0, 0, 0, 1, 0, 1, 0, 1][..], &vec![b'x'; RESULT_LENGTH + 1]].concat();
    let not_spdy = b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec();
    for (bytes, reason) in [
        (too_long, "result is too long"),
        (not_spdy, "ended the stream without a result"),
        (vec![0x80, 2, 0, 1, 0, 0, 0, 0], "version 2"),
        (vec![0x80, 3, 0, 6, 0, 0, 0, 1, 0], "too few"),
    ] {
        let mut session = Session::begun(OUTPUT, 1 << 20).await;
        session.runtime.raw(&bytes).await;
        session.runtime.connection.shutdown().await.unwrap();
        let message = session.failure().await;
        assert!(message.contains(reason), "{message}");
    }
}

#[tokio::test]
async fn other_frames_instead_of_replies_are_errors() {
    for (bytes, reason) in [
        (&[0x80, 3, 0, 3, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0, 3][..], "did not accept"),
        (&[0, 0, 0, 3, 0, 0, 0, 1, b'x'], "did not accept"),
        (&[], "closed the connection before"),
    ] {
        let mut session = Session::start(OUTPUT, 1024).await;
        session.input().await.unwrap();
        session.runtime.raw(bytes).await;
        session.runtime.connection.shutdown().await.unwrap();
        let message = session.failure().await;
        assert!(message.contains(reason), "{message}");
    }
}

/// Unknown streams, headers of any size, and unknown types of frames.
#[tokio::test]
async fn irrelevant_frames_are_ignored() {
    let mut session = Session::begun(OUTPUT, 4096).await;
    session.runtime.raw(b"\x00\x00\x00\x63\x00\x00\x00\x03???").await;
    session.runtime.raw(&[0x80, 3, 0, 3, 0, 0, 0, 8, 0, 0, 0, 99, 0, 0, 0, 1]).await;
    let stuffed = |kind: u8, stream: u8, length: usize| {
        let size = u32::try_from(length + 4).unwrap().to_be_bytes();
        [&[0x80, 3, 0, kind, 0, size[1], size[2], size[3], 0, 0, 0, stream][..], &vec![0xee; length]].concat()
    };
    for frame in [stuffed(2, 3, 3 << 20), stuffed(8, 3, 1000), stuffed(77, 1, 5000), stuffed(1, 4, 1 << 20)] {
        session.runtime.raw(&frame).await;
    }
    assert_eq!(session.runtime.frame().await, Some(Frame::Reset { stream: 4 }), "only clients open streams");
    session.runtime.send("stdout", b"out", true).await;
    assert_eq!(session.input().await.unwrap(), b"\x01out");
    session.runtime.send("error", OK, true).await;
    assert_eq!(session.result().await["status"], "Success");
}

/// The runtime sends pings and does not read the answers.
#[tokio::test]
async fn pings_of_a_runtime_that_does_not_read_are_bounded() {
    let mut session = Session::begun(OUTPUT, 256).await;
    for _ in 0..10_000 {
        session.runtime.raw(&[0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 2]).await;
    }
    session.runtime.send("stdout", b"out", true).await;
    session.runtime.send("error", OK, true).await;
    assert_eq!(session.input().await.unwrap(), b"\x01out", "output is still translated");
    assert_eq!(session.result().await["status"], "Success");
}

/// A frame of a client, masked or not.
fn raw_frame(kind: u8, masked: bool, payload: &[u8]) -> Vec<u8> {
    let length = u64::try_from(payload.len()).unwrap().to_be_bytes();
    let mask = if masked { 0x80 } else { 0 };
    let head = [&[0x80 | kind, mask | 127][..], &length, if masked { &[0; 4] } else { &[] }].concat();
    [head, payload.to_vec()].concat()
}

#[tokio::test]
async fn malformed_input_of_a_client_ends_the_session() {
    let promise = raw_frame(2, true, &[0; 1])[..2].to_vec();
    let huge = [promise, u64::MAX.to_be_bytes().to_vec(), vec![0; 4]].concat();
    let mut unfinished = raw_frame(2, true, &vec![0; 3 << 20]);
    unfinished[0] = 2;
    let mut second = raw_frame(0, true, &vec![0; 3 << 20]);
    second[0] = 0;
    for (bytes, reason) in [
        (raw_frame(2, false, b"\x00unmasked"), "mask"),
        (huge, "long"),
        ([unfinished, second].concat(), "long"),
        (raw_frame(1, true, b"\x00\xff\xfe not a text"), "UTF-8"),
        (raw_frame(11, true, b"no such kind"), "opcode"),
    ] {
        let mut session = Session::begun(INPUT_AND_OUTPUT, 16 << 20).await;
        session.client.get_mut().write_all(&bytes).await.unwrap();
        let message = session.failure().await;
        assert!(message.contains("malformed message of the client") && message.contains(reason), "{message}");
        assert_eq!(session.input().await, None);
        session.agent.await.unwrap();
        // It may contain earlier input of the client.
        while session.runtime.frame().await.is_some() {}
    }
}

/// A message of the maximum size arrives complete, in small frames.
#[tokio::test]
async fn a_long_message_is_cut_into_frames() {
    let mut session = Session::begun(INPUT_AND_OUTPUT, 16 << 20).await;
    let long: Vec<u8> = std::iter::once(0).chain((1..4 << 20).map(|n: u32| n as u8)).collect();
    session.send(&long).await;
    let mut received = Vec::new();
    while received.len() < long.len() - 1 {
        match session.runtime.frame().await {
            Some(Frame::Data { bytes, last: false, .. }) => {
                assert!(bytes.len() <= 32 << 10);
                received.extend_from_slice(&bytes);
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(received == long[1..]);
}

/// The client sends pings and does not read the answers.
#[tokio::test]
async fn pings_of_a_client_that_does_not_read_are_bounded() {
    let mut session = Session::begun(INPUT_AND_OUTPUT, 1024).await;
    let ping = raw_frame_short(9, &[7; 125]);
    let asked = 20_000;
    for _ in 0..asked {
        session.client.get_mut().write_all(&ping).await.unwrap();
    }
    session.send(b"\x00x").await;
    assert_eq!(session.runtime.receive("stdin", 1).await.0, b"x", "all pings were received");
    let mut answers = 0;
    session.runtime.send("error", OK, true).await;
    session.runtime.send("stdout", b"", true).await;
    loop {
        match tokio::time::timeout(TIMEOUT, session.client.next()).await.expect("in time") {
            Some(Ok(Message::Pong(_))) => answers += 1,
            Some(Ok(Message::Binary(_))) => break,
            other => panic!("{other:?} after {answers} answers"),
        }
    }
    assert!(answers * 127 <= (256 << 10) + 4096 && answers > 0, "{answers} answers were held");
}

fn raw_frame_short(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0x80 | kind, 0x80 | length, 0, 0, 0, 0][..], payload].concat()
}

/// The runtime writes endlessly to a client that does not read.
#[tokio::test(start_paused = true)]
async fn a_peer_that_does_not_read_stops_reads_for_it() {
    let session = Session::begun(OUTPUT, 4096).await;
    let Session { client, mut runtime, agent } = session;
    let mut out = Vec::new();
    Writer::default().data(&mut out, runtime.streams["stdout"], &[7; 1024], false);
    let mut sent = 0;
    while let Ok(written) = tokio::time::timeout(Duration::from_secs(1), runtime.connection.write_all(&out)).await {
        written.unwrap();
        sent += out.len();
        assert!(sent < 1 << 20, "{sent} bytes are under way");
    }
    assert!(!agent.is_finished());
    drop(client);
    agent.await.unwrap();
}
