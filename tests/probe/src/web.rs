//! A minimal HTTP server: one response, one connection at a time. It may become unhealthy after a time, and may need a file
//! for each response.

use std::fs::File;
use std::io::ErrorKind;
use std::io::Read as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::net::TcpListener;
use std::net::TcpStream;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::time::Duration;

use crate::arguments::Web;
use crate::process;
use crate::random::Random;
use crate::stamp;

const ANSWER: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n";
const FAILURE: &[u8] = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
const LONGEST_REQUEST: usize = 16 * 1024;
const TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of the content that are read for a response.
const BLOCK: usize = 16 << 10;

/// Answers requests until SIGTERM.
///
/// # Errors
/// The port cannot be bound, a file cannot be written, or the content cannot be read or is smaller than a block.
pub(crate) fn serve(web: &Web) -> Result<u8, String> {
    let failed_before = match &web.once_file {
        Some(path) => !process::create(path)?,
        None => false,
    };
    let fails_at = web.fail_at.filter(|_| !failed_before);
    let content = web.content.as_deref().map(Content::open).transpose()?;
    let port = web.port;
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        .map_err(|error| format!("cannot listen on port {port}: {error}"))?;
    stamp::write(&web.stamp, "start")?;
    let health = Health { fails_at, stamp: web.stamp.clone(), has_failed: false };
    std::thread::Builder::new()
        .name("web".to_owned())
        .spawn(move || accept(&listener, health, content))
        .map_err(|error| format!("cannot start a thread: {error}"))?;
    process::run_until_signal(None)?;
    Ok(0)
}

/// Which answer is due.
struct Health {
    /// Nanoseconds of CLOCK_MONOTONIC.
    fails_at: Option<u64>,
    stamp: Option<PathBuf>,
    has_failed: bool,
}

impl Health {
    /// The answer; stamps the first failure.
    fn answer(&mut self) -> std::io::Result<&'static [u8]> {
        let now = stamp::now().map_err(std::io::Error::other)?;
        if self.fails_at.is_none_or(|at| now < at) {
            return Ok(ANSWER);
        }
        if !self.has_failed {
            stamp::write(&self.stamp, "fail").map_err(std::io::Error::other)?;
            self.has_failed = true;
        }
        Ok(FAILURE)
    }
}

/// A file of which every response needs a block.
struct Content {
    file: File,
    blocks: usize,
    random: Random,
}

impl Content {
    /// Reads the whole file once, so that it is in memory.
    fn open(path: &Path) -> Result<Self, String> {
        let failed = |error| format!("cannot read {}: {error}", path.display());
        let mut file = File::open(path).map_err(failed)?;
        let size = std::io::copy(&mut file, &mut std::io::sink()).map_err(failed)?;
        let blocks = size as usize / BLOCK;
        if blocks == 0 {
            return Err(format!("{} is smaller than {BLOCK} bytes", path.display()));
        }
        Ok(Self { file, blocks, random: Random::new(1) })
    }

    /// Reads any block.
    fn read(&mut self) -> std::io::Result<()> {
        let at = self.random.below(self.blocks) * BLOCK;
        self.file.read_exact_at(&mut [0; BLOCK], at as u64)
    }
}

fn accept(listener: &TcpListener, mut health: Health, mut content: Option<Content>) {
    for connection in listener.incoming() {
        if let Err(error) = connection.and_then(|mut stream| answer(&mut stream, &mut health, content.as_mut())) {
            eprintln!("probe: connection failed: {error}");
        }
    }
}

/// Reads the request's head, then responds.
fn answer(stream: &mut TcpStream, health: &mut Health, content: Option<&mut Content>) -> std::io::Result<()> {
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
    content.map_or(Ok(()), Content::read)?;
    stream.write_all(health.answer()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_fail_from_a_time_on_and_the_first_failure_is_stamped() {
        let stamp = std::env::temp_dir().join(format!("probe-web-{}", std::process::id()));
        let health = |fails_at| Health { fails_at, stamp: Some(stamp.clone()), has_failed: false };
        assert_eq!(health(None).answer().unwrap(), ANSWER);
        assert_eq!(health(Some(u64::MAX)).answer().unwrap(), ANSWER);
        assert!(!stamp.exists());
        let mut failing = health(Some(0));
        assert_eq!((failing.answer().unwrap(), failing.answer().unwrap()), (FAILURE, FAILURE));
        let written = std::fs::read_to_string(&stamp).unwrap();
        std::fs::remove_file(&stamp).unwrap();
        assert!(written.starts_with("fail ") && written.lines().count() == 1, "{written}");
    }

    #[test]
    fn a_response_needs_a_block_of_the_content() {
        let path = std::env::temp_dir().join(format!("probe-content-{}", std::process::id()));
        std::fs::write(&path, [1; BLOCK - 1]).unwrap();
        let short = Content::open(&path).err();
        std::fs::write(&path, [1; 3 * BLOCK]).unwrap();
        let mut content = Content::open(&path).unwrap();
        let read = (0..20).try_for_each(|_| content.read());
        std::fs::write(&path, []).unwrap();
        let truncated = content.read();
        std::fs::remove_file(&path).unwrap();
        assert!(short.is_some_and(|error| error.contains("smaller than")));
        read.unwrap();
        assert_eq!(truncated.unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
