//! A minimal HTTP server: one response, one connection at a time.

use std::io::ErrorKind;
use std::io::Read as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::net::TcpListener;
use std::net::TcpStream;
use std::time::Duration;

use crate::process;

const ANSWER: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n";
const LONGEST_REQUEST: usize = 16 * 1024;
const TIMEOUT: Duration = Duration::from_secs(5);

/// Answers every request with 200 until SIGTERM.
///
/// # Errors
/// The port cannot be bound.
pub(crate) fn serve(port: u16) -> Result<u8, String> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        .map_err(|error| format!("cannot listen on port {port}: {error}"))?;
    std::thread::Builder::new()
        .name("web".to_owned())
        .spawn(move || accept(&listener))
        .map_err(|error| format!("cannot start a thread: {error}"))?;
    process::run_until_signal(None)?;
    Ok(0)
}

fn accept(listener: &TcpListener) {
    for connection in listener.incoming() {
        if let Err(error) = connection.and_then(|mut stream| answer(&mut stream)) {
            eprintln!("probe: connection failed: {error}");
        }
    }
}

/// Reads the request's head, then responds.
fn answer(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let mut request = Vec::new();
    let mut chunk = [0; 1024];
    while !request.windows(4).any(|window| window == b"\r\n\r\n") {
        let read = stream.read(&mut chunk)?;
        if read == 0 || request.len() > LONGEST_REQUEST {
            return Err(ErrorKind::InvalidData.into());
        }
        request.extend_from_slice(&chunk[..read]);
    }
    stream.write_all(ANSWER)
}
