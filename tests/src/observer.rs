//! `keblet observe --json` as a process beside an agent. Its records are read as the JSON that users get.

use std::ffi::OsStr;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Read as _;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::net::TcpStream;
use std::path::Path;
use std::process::Child;
use std::process::ChildStdout;
use std::process::Command;
use std::process::Stdio;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet::kernel::facts::NodeFacts;
use keblet_skip::ports;
use serde_json::Value;

use crate::standalone::program;
use crate::standalone::timeout;

/// Everything it needs, and nothing else: root for the socket, and two capabilities.
pub const LEAST_PRIVILEGES: [&str; 4] = ["setpriv", "--inh-caps=-all", "--bounding-set=-all,+bpf,+perfmon", "--"];

/// What this machine lacks for the probes.
pub fn lacks_for_probes() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("not root".to_owned());
    }
    let facts = NodeFacts::observe();
    if !facts.btf {
        return Some("no BTF".to_owned());
    }
    if let Some(refused) = facts.bpf_refused {
        return Some(format!("bpf() is refused: {refused}"));
    }
    if !facts.host_pid_namespace {
        return Some("not in the host's PID namespace".to_owned());
    }
    facts.hierarchy.is_none().then(|| "no cgroup hierarchy".to_owned())
}

/// A running observer. Killed when dropped.
#[derive(Debug)]
pub struct Observer {
    process: Child,
    records: mpsc::Receiver<Value>,
    seen: Vec<Value>,
    port: u16,
}

impl Observer {
    /// Starts `keblet observe` on the runtime at `socket`, by a program that executes it, such as `setpriv`.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(socket: &Path, wrapper: &[&str]) -> Result<Self> {
        let keblet = program()?;
        let words = wrapper.iter().map(OsStr::new).chain([keblet.as_os_str()]).collect::<Vec<_>>();
        let (first, rest) = words.split_first().context("there is no program")?;
        let port = ports::free();
        let mut command = Command::new(first);
        command.args(rest).args(["observe", "--json", "--interval=1s"]);
        command.arg(format!("--metrics-address=127.0.0.1:{port}"));
        command.arg(format!("--container-runtime-endpoint=unix://{}", socket.display()));
        let mut process =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot start observe")?;
        let output = process.stdout.take().context("observe has no output")?;
        let (sender, records) = mpsc::channel();
        thread::Builder::new().spawn(move || read(output, &sender)).context("cannot start a thread")?;
        Ok(Self { process, records, seen: Vec::new(), port })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// All records so far.
    pub fn records(&mut self) -> &[Value] {
        self.seen.extend(self.records.try_iter());
        &self.seen
    }

    /// Waits for a record of this kind for which `is_it` holds, those seen before included.
    ///
    /// # Errors
    /// There is none in time, or a line is no record.
    pub fn until(&mut self, kind: &str, what: &str, is_it: impl Fn(&Value) -> bool) -> Result<Value> {
        let deadline = Instant::now() + timeout();
        let fits = |record: &&Value| record["kind"] == kind && is_it(record);
        loop {
            if let Some(found) = self.records().iter().find(fits) {
                return Ok(found.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.records.recv_timeout(left) {
                Ok(record) => self.seen.push(record),
                Err(_) => {
                    let same: Vec<&Value> = self.seen.iter().filter(|record| record["kind"] == kind).collect();
                    bail!("no {kind} record in time: {what}; there are {same:#?}");
                }
            }
        }
    }

    /// Waits until everything that existed was reported.
    ///
    /// # Errors
    /// It is not in time.
    pub fn until_ready(&mut self) -> Result<()> {
        self.until("ready", "ready", |_| true).map(drop)
    }

    /// The text of its metrics.
    ///
    /// # Errors
    /// The endpoint does not answer.
    pub fn metrics(&self) -> Result<String> {
        let mut stream =
            TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).context("cannot connect to the metrics")?;
        stream.set_read_timeout(Some(Duration::from_secs(10))).context("cannot set a timeout")?;
        write!(stream, "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").context("cannot ask for the metrics")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).context("cannot read the metrics")?;
        let (head, body) = answer.split_once("\r\n\r\n").context("the answer has no body")?;
        anyhow::ensure!(head.starts_with("HTTP/1.1 200") || head.starts_with("HTTP/1.0 200"), "{head}");
        Ok(body.to_owned())
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        // Both fail only if it has exited already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn read(output: ChildStdout, records: &mpsc::Sender<Value>) {
    for line in BufReader::new(output).lines().map_while(Result::ok) {
        // What is no JSON is a record of no kind, which fails the test that waits.
        let record = serde_json::from_str(&line).unwrap_or(Value::String(line));
        if records.send(record).is_err() {
            return;
        }
    }
}
