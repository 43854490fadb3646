//! A thousand clients that follow one log over HTTPS, some of which never read: every other client receives every line in
//! order, the agent's memory is bounded, and other requests are served.
//!
//! The server is the agent's main port in a process of its own (`log-server`), so that its memory, files and tasks can
//! be measured. The clients are in the test.

use std::fs;
use std::fs::File;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::ChildStdin;
use std::process::ChildStdout;
use std::process::Command;
use std::process::Stdio;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use nix::sys::resource::Resource;
use nix::sys::resource::getrlimit;
use nix::sys::resource::setrlimit;
use reqwest::Client;
use reqwest::Response;
use tokio::time::Instant;

/// Deadline of every wait.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Memory of the server per follower in bytes, at most: its TLS session and connection, and for a client that does not
/// read, buffered output.
const MEMORY_EACH: usize = 96 * 1024;
/// Open log files for all followers.
const LOGS: usize = 1;
/// Followers: from the beginning and never reading, from the beginning and reading, and from the last line on.
const NEVER: usize = 200;
const WHOLE: usize = 20;
const TAIL: usize = 780;
/// Lines before the clients connect, lines while all follow, and lines after a rotation.
const OLD: usize = 30_000;
const NEW: usize = 1_000;
const ROTATED: usize = 100;
const BURST: usize = 10;

fn text(n: usize) -> String {
    format!("line {n:06} of a container with long lines, so that few of them fit into a buffer of a client\n")
}

fn line(n: usize) -> String {
    format!("2026-01-01T00:00:{:02}.{n:09}Z stdout F {}", n % 60, text(n))
}

fn lines(range: std::ops::Range<usize>) -> String {
    range.map(line).collect()
}

fn log_of(folder: &Path) -> PathBuf {
    folder.join("main/0.log")
}

/// The server's process.
struct Server {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    address: SocketAddr,
    folder: PathBuf,
}

impl Server {
    fn start(folder: &Path) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_log-server"))
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let folder = folder.canonicalize().unwrap();
        let mut server = Self { process, input, output, address, folder };
        server.address = server.output().parse().unwrap();
        server
    }

    /// Its next line of output.
    fn output(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn tasks(&mut self) -> usize {
        self.input.write_all(b"tasks\n").unwrap();
        self.output().parse().unwrap()
    }

    fn proc(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.process.id()))
    }

    /// Resident memory in bytes, current or peak.
    fn memory(&self, which: &str) -> usize {
        let status = fs::read_to_string(self.proc("status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(which)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
    }

    /// Open files, open log files, and inotify watches.
    fn files(&self) -> (usize, usize, usize) {
        let (mut all, mut logs, mut watches) = (0, 0, 0);
        for entry in fs::read_dir(self.proc("fd")).unwrap().flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            all += 1;
            logs += usize::from(target.starts_with(&self.folder) && target.to_string_lossy().contains("0.log"));
            if target.to_string_lossy().contains("inotify") {
                let info = fs::read_to_string(self.proc("fdinfo").join(entry.file_name())).unwrap_or_default();
                watches += info.lines().filter(|line| line.starts_with("inotify")).count();
            }
        }
        (all, logs, watches)
    }

    /// Listening and connected sockets.
    fn sockets(&self) -> usize {
        let targets =
            fs::read_dir(self.proc("fd")).unwrap().flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
        targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
    }

    fn url(&self, path: &str) -> String {
        format!("https://{}{path}", self.address)
    }

    fn log_url(&self, query: &str) -> String {
        self.url(&format!("/containerLogs/default/talker/main?{query}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Raises this process's limit of open files to its maximum.
fn allow_files() {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, most, most).unwrap();
}

fn client() -> Client {
    // The server's certificate is self-signed.
    Client::builder().http1_only().danger_accept_invalid_certs(true).build().unwrap()
}

/// Reads the log from line `first` to line `last` and checks that no other line is in between.
async fn reads(mut response: Response, first: usize, last: usize) {
    let (mut next, mut rest) = (first, Vec::new());
    while next <= last {
        let chunk = tokio::time::timeout(TIMEOUT, response.chunk()).await.expect("data in time");
        rest.extend_from_slice(&chunk.expect("readable").unwrap_or_else(|| panic!("ended before line {next}")));
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            assert_eq!(String::from_utf8_lossy(&line), text(next));
            next += 1;
        }
    }
    assert!(rest.is_empty());
}

/// The whole log up to its end, and the agent's health.
async fn served(client: &Client, server: &(String, String)) {
    let asking = async {
        let whole = client.get(&server.0).send().await.unwrap().bytes().await.unwrap();
        assert!(whole.len() >= OLD * text(0).len());
        let health = client.get(&server.1).send().await.unwrap();
        assert_eq!(health.status(), 200);
    };
    tokio::time::timeout(TIMEOUT, asking).await.expect("served");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_log_followers_are_served_in_bounded_memory() {
    allow_files();
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("main")).unwrap();
    let path = log_of(folder.path());
    fs::write(&path, lines(0..OLD)).unwrap();
    let mut server = Server::start(folder.path());
    let urls = (server.log_url(""), server.url("/healthz"));
    let sockets = server.sockets();
    served(&client(), &urls).await;
    until("the first client is disconnected", || match server.sockets() {
        now if now <= sockets => Ok(()),
        now => Err(format!("{now} sockets instead of {sockets}")),
    })
    .await;
    let (tasks, files, memory) = (server.tasks(), server.files(), server.memory("VmRSS"));

    let open = |query: &str, count: usize| {
        let (client, url) = (client(), server.log_url(query));
        let all = stream::iter(0..count).map(move |_| client.get(&url).send()).buffer_unordered(50);
        all.map(|response| response.unwrap().error_for_status().unwrap()).collect::<Vec<Response>>()
    };
    let never = open("follow=true", NEVER).await;
    let whole = open("follow=true", WHOLE).await;
    let tail = open("follow=true&tailLines=1", TAIL).await;
    let last = OLD + NEW + ROTATED - 1;
    let readers = whole.into_iter().map(|response| reads(response, 0, last));
    let readers: Vec<_> = readers.map(tokio::spawn).collect();
    let tailers = tail.into_iter().map(|response| reads(response, OLD - 1, last));
    let readers: Vec<_> = readers.into_iter().chain(tailers.map(tokio::spawn)).collect();

    let writing = tokio::spawn(write(path));
    let neighbour = client();
    served(&neighbour, &urls).await;
    while !writing.is_finished() {
        served(&neighbour, &urls).await;
    }
    writing.await.unwrap();
    let (_, logs, watches) = server.files();
    let path = log_of(folder.path());
    fs::rename(&path, path.with_extension("log.20260101-000000")).unwrap();
    fs::write(&path, lines(OLD + NEW..OLD + NEW + ROTATED)).unwrap();
    for reader in readers {
        reader.await.unwrap();
    }
    let each = server.memory("VmHWM").saturating_sub(memory) / (NEVER + WHOLE + TAIL);
    println!("{each} bytes each, {logs} open logs, {watches} watches, {} tasks", server.tasks());
    drop((never, neighbour));
    // The one inotify instance remains.
    let (tasks, files) = (tasks + 1, (files.0 + 1, files.1, files.2));
    until(&format!("back to {tasks} tasks and {files:?} files"), || {
        let now = (server.tasks(), server.files());
        let is_back = now.0 <= tasks && now.1.0 <= files.0 && now.1.1 == 0 && now.1.2 == files.2;
        if is_back { Ok(()) } else { Err(format!("{now:?}")) }
    })
    .await;
    assert!(each <= MEMORY_EACH, "{each} bytes of memory for each follower");
    assert_eq!((logs, watches), (LOGS, files.2 + 1), "open logs, and watches, for all");
}

/// Writes lines at intervals, as containers do.
async fn write(path: PathBuf) {
    let mut log = File::options().append(true).open(path).unwrap();
    let mut pace = tokio::time::interval(Duration::from_millis(20));
    for burst in 0..NEW / BURST {
        pace.tick().await;
        let first = OLD + burst * BURST;
        log.write_all(lines(first..first + BURST).as_bytes()).unwrap();
    }
}

async fn until(what: &str, mut met: impl FnMut() -> Result<(), String>) {
    let deadline = Instant::now() + TIMEOUT;
    while let Err(now) = met() {
        assert!(Instant::now() < deadline, "timed out waiting for: {what}; last: {now}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
