//! `keblet observe`: the terminal view, JSON lines, the metrics endpoint, and pictures of recorded nodes.

use std::fs::File;
use std::io;
use std::io::BufReader;
use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use anyhow::Context as _;
use anyhow::bail;
use anyhow::ensure;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use tokio::sync::mpsc;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use super::closed_output::closed;
use super::host;
use super::logging;
use super::process;
use super::version::KEBLET;
use crate::exit::Exit;
use crate::observe::collect;
use crate::observe::collect::CollectOptions;
use crate::observe::collect::Measure;
use crate::observe::collect::Message;
use crate::observe::metrics;
use crate::observe::metrics::SharedNode;
use crate::observe::replay;
use crate::observe::state::ObservedNode;
use crate::observe::view;
use crate::observe::view::Settings;
use crate::runtime::RuntimeEndpoint;
use crate::server;

/// Time between measurements: in the view, and otherwise.
const VIEW_INTERVAL: Duration = Duration::from_secs(2);
const LINES_INTERVAL: Duration = Duration::from_secs(10);
/// Measurements cost processor time.
const LEAST_INTERVAL: Duration = Duration::from_millis(500);
/// Lines that wait for a slow reader; then collecting waits.
const LINES: usize = 256;
/// How long after a signal the lines that are queued may take: the output may be a pipe that is no longer read.
const LAST_LINES: Duration = Duration::from_secs(2);

/// The node that is observed.
#[derive(Clone, Debug, clap::Args)]
pub struct Source {
    /// Socket of the container runtime, such as unix:///run/containerd/containerd.sock [default: the first usual one]
    #[arg(long, value_name = "URL")]
    container_runtime_endpoint: Option<RuntimeEndpoint>,
    /// Look for pods below this cgroup only
    #[arg(long, value_name = "CGROUP", default_value = "/")]
    cgroup_root: String,
    /// Name of the node in records and in the view [default: the hostname]
    #[arg(long, value_name = "NAME", env = NODE_NAME, hide_env_values = true)]
    node_name: Option<String>,
}

/// Environment variable with the name of the pod's node: the hostname in a pod is the pod's own. Programs that are executed
/// in the pod have it too.
const NODE_NAME: &str = "NODE_NAME";

impl Source {
    /// What to collect.
    ///
    /// # Errors
    /// There is no runtime, or the node has no name.
    pub(super) fn options(&self, interval: Duration) -> anyhow::Result<CollectOptions> {
        let found = || RuntimeEndpoint::discover_of_kubelet(Path::new("/"));
        let endpoint = self.container_runtime_endpoint.clone().or_else(found);
        let endpoint = endpoint
            .context("no container runtime was found; name its socket by --container-runtime-endpoint=unix:///...")?;
        let cgroup_root = format!("/{}", self.cgroup_root.trim_matches('/'));
        let node = host::node_name(self.node_name.as_deref().unwrap_or_default())?;
        Ok(CollectOptions { endpoint, cgroup_root, interval, node, version: KEBLET })
    }
}

/// `keblet observe`
#[derive(Debug, clap::Args)]
#[command(args_override_self = true)]
pub struct Args {
    #[command(flatten)]
    source: Source,
    /// Print JSON lines instead of showing a view; docs/observe.md describes them
    #[arg(long)]
    json: bool,
    /// Serve Prometheus metrics at this address; without a value on loopback
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, require_equals = true, default_missing_value = "127.0.0.1:9469")]
    metrics_address: Option<SocketAddr>,
    /// Time between measurements of pressure [default: 2s in the view, else 10s]
    #[arg(long, value_name = "DURATION", value_parser = interval)]
    interval: Option<Duration>,
    /// Show a recorded node instead of this one: a file of JSON lines
    #[arg(long, value_name = "FILE", conflicts_with_all = ["json", "metrics_address", "interval"])]
    replay: Option<PathBuf>,
    /// Write a picture of the recorded node
    #[arg(long, value_name = "FILE", requires = "replay", hide = true)]
    svg: Option<PathBuf>,
    /// Size of that picture in characters
    #[arg(long, value_name = "COLUMNSxLINES", requires = "svg", default_value = "130x34", value_parser = size, hide = true)]
    size: (u16, u16),
    /// In that picture, open the first pod with this name
    #[arg(long, value_name = "POD", requires = "svg", hide = true)]
    open: Option<String>,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if interval < LEAST_INTERVAL {
        return Err(format!("at least {}", humantime::format_duration(LEAST_INTERVAL)));
    }
    Ok(interval)
}

fn size(text: &str) -> Result<(u16, u16), String> {
    let parsed = text.split_once('x').and_then(|(width, height)| Some((width.parse().ok()?, height.parse().ok()?)));
    parsed
        .filter(|(width, height)| (1..=500).contains(width) && (1..=200).contains(height))
        .ok_or_else(|| "expected columns and lines, such as 130x34, at most 500x200".to_owned())
}

/// Observes until a signal or the user ends it.
///
/// # Errors
/// There is no runtime or no cgroup, the metrics' address cannot be bound, or a file cannot be read or written.
pub fn run(args: &Args) -> anyhow::Result<Exit> {
    if let Some(file) = &args.replay {
        return recorded(args, file);
    }
    let in_view = !args.json && io::stdout().is_terminal();
    if !args.json && !in_view && args.metrics_address.is_none() {
        eprintln!("keblet: the output is no terminal: use --json for JSON lines, or --metrics-address for metrics");
        return Ok(Exit::Usage);
    }
    if !in_view {
        logging::warnings(if args.json { logging::Output::Records } else { logging::Output::Other })?;
    }
    let options = args.source.options(args.interval.unwrap_or(if in_view { VIEW_INTERVAL } else { LINES_INTERVAL }))?;
    let runtime = process::light_runtime().context("cannot start the async runtime")?;
    let outcome = runtime.block_on(observe(args, options, in_view));
    // The thread that reads keys may wait for one.
    runtime.shutdown_background();
    outcome.map(|()| Exit::Success)
}

async fn observe(args: &Args, options: CollectOptions, in_view: bool) -> anyhow::Result<()> {
    let shutdown = process::shutdown().context("cannot wait for signals")?;
    let (messages, measure) = collect::start(options, shutdown.clone()).await?;
    let node = SharedNode::default();
    let serving = serve(args.metrics_address, node.clone(), measure, shutdown.clone());
    let showing = async {
        match (in_view, args.json) {
            (true, _) => {
                let shown = view::terminal::run(messages, node, Settings::default(), true, shutdown.clone());
                shown.await.context("cannot use the terminal")
            }
            (false, json) => {
                let unread = closed(json.then(io::stdout));
                lines(messages, node, json.then(io::stdout), unread, &shutdown).await
            }
        }
    };
    tokio::select! {
        shown = showing => shown,
        Err(error) = serving => Err(error),
    }
}

/// Serves metrics; without an address it never ends.
async fn serve(
    address: Option<SocketAddr>,
    node: SharedNode,
    measure: Measure,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    match address {
        Some(address) => {
            server::run_plain("metrics", address, metrics::router(node, measure), shutdown).await?;
            Ok(())
        }
        None => std::future::pending().await,
    }
}

/// Takes records until the collector ends; prints them to `out` if there is one, until it is closed, which `unread` reports
/// before the next record. The collector ends by a signal; then what is queued is printed, within [`LAST_LINES`].
async fn lines(
    messages: mpsc::Receiver<Message>,
    node: SharedNode,
    out: Option<impl io::Write + Send + 'static>,
    unread: impl Future<Output = ()>,
    shutdown: &CancellationToken,
) -> anyhow::Result<()> {
    let late = async {
        shutdown.cancelled().await;
        tokio::time::sleep(LAST_LINES).await;
    };
    tokio::select! {
        taken = take_all(messages, node, out) => taken,
        // Not logged: the log may go to the same pipe.
        () = late => Ok(()),
        () = unread => Ok(()),
    }
}

async fn take_all(
    mut messages: mpsc::Receiver<Message>,
    node: SharedNode,
    out: Option<impl io::Write + Send + 'static>,
) -> anyhow::Result<()> {
    let printer = out.map(Printer::start).transpose().context("cannot start the thread that prints")?;
    while let Some(message) = messages.recv().await {
        if let (Some(printer), Message::Line(line)) = (&printer, &message) {
            let text = serde_json::to_string(line).context("cannot encode a record")?;
            if printer.lines.send(text).await.is_err() {
                break;
            }
        }
        view::terminal::take(message, &node);
    }
    match printer {
        Some(printer) => printer.finish().await.context("cannot print records"),
        None => Ok(()),
    }
}

/// Prints lines on a thread of its own: a write to a full pipe blocks.
struct Printer {
    lines: mpsc::Sender<String>,
    /// Why the thread has ended.
    ended: oneshot::Receiver<io::Result<()>>,
}

impl Printer {
    fn start(out: impl io::Write + Send + 'static) -> io::Result<Self> {
        let (lines, queue) = mpsc::channel(LINES);
        let (sender, ended) = oneshot::channel();
        // Fails if the lines are not waited for.
        let thread = move || drop(sender.send(print(queue, out)));
        std::thread::Builder::new().name("lines".to_owned()).spawn(thread)?;
        Ok(Self { lines, ended })
    }

    /// Waits until all lines are written, or the output is closed.
    async fn finish(self) -> io::Result<()> {
        drop(self.lines);
        match self.ended.await {
            Ok(Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }
}

fn print(mut queue: mpsc::Receiver<String>, mut out: impl io::Write) -> io::Result<()> {
    while let Some(line) = queue.blocking_recv() {
        writeln!(out, "{line}").and_then(|()| out.flush())?;
    }
    Ok(())
}

/// Shows a recorded node, or writes a picture of it.
fn recorded(args: &Args, file: &Path) -> anyhow::Result<Exit> {
    let shown = file.display();
    let input = File::open(file).with_context(|| format!("cannot open {shown}"))?;
    let node = replay::read(BufReader::new(input)).with_context(|| format!("cannot replay {shown}"))?;
    if let Some(svg) = &args.svg {
        let picture = picture(&node, args.size, args.open.as_deref())?;
        std::fs::write(svg, picture).with_context(|| format!("cannot write {}", svg.display()))?;
        return Ok(Exit::Success);
    }
    ensure!(io::stdout().is_terminal(), "a recorded node is shown on a terminal, which the output is not; use --svg");
    let runtime = process::light_runtime().context("cannot start the async runtime")?;
    let outcome = runtime.block_on(async {
        let shutdown = process::shutdown().context("cannot wait for signals")?;
        // Nothing is sent, and the view ends when the sender is dropped.
        let (_sender, messages) = mpsc::channel(1);
        let node = Arc::new(Mutex::new(node));
        let shown = view::terminal::run(messages, node, Settings::default(), false, shutdown);
        shown.await.context("cannot use the terminal")
    });
    runtime.shutdown_background();
    outcome.map(|()| Exit::Success)
}

fn picture(node: &ObservedNode, (width, height): (u16, u16), open: Option<&str>) -> anyhow::Result<String> {
    let named = |name: &str| node.pods.values().find(|pod| pod.pod.pod.name == name).map(|pod| pod.pod.pod.uid.clone());
    let opened = match open.map(|name| (name, named(name))) {
        Some((name, None)) => bail!("no pod is called {name}"),
        Some((_, uid)) => uid,
        None => None,
    };
    let area = Rect::new(0, 0, width, height);
    let mut buffer = Buffer::empty(area);
    view::draw(node, &Settings { opened, ..Settings::default() }, area, &mut buffer);
    Ok(view::svg::picture(&buffer))
}

/// The node after what was there has been reported, and after so many measurements.
///
/// # Errors
/// There is no runtime or no cgroup, or the runtime does not answer.
pub(super) fn once(source: &Source, interval: Duration, measurements: usize) -> anyhow::Result<ObservedNode> {
    /// The runtime has five seconds to answer, and lists take time on a busy node.
    const LIMIT: Duration = Duration::from_secs(20);
    let options = source.options(interval)?;
    let endpoint = options.endpoint.clone();
    let runtime = process::light_runtime().context("cannot start the async runtime")?;
    let node = runtime.block_on(async {
        let shutdown = CancellationToken::new();
        let (messages, _measure) = collect::start(options, shutdown.clone()).await?;
        let node = SharedNode::default();
        let taken = tokio::time::timeout(LIMIT, take_until(messages, &node, measurements)).await;
        shutdown.cancel();
        let node = node.lock().unwrap_or_else(PoisonError::into_inner).clone();
        taken.with_context(|| format!("nothing was reported within {LIMIT:?}")).map(|()| node)
    })?;
    runtime.shutdown_background();
    let relist = node.sensors.get("relist");
    if relist.is_none_or(|relist| relist.state != "up") {
        let reason = relist.and_then(|relist| relist.reason.clone()).unwrap_or_else(|| "no answer".to_owned());
        bail!("the container runtime at {endpoint} does not list its pods: {reason}");
    }
    Ok(node)
}

async fn take_until(mut messages: mpsc::Receiver<Message>, node: &SharedNode, measurements: usize) {
    let mut measured = 0;
    while let Some(message) = messages.recv().await {
        let ends = matches!(&message, Message::Line(line) if metrics::ends_measurement(line));
        view::terminal::take(message, node);
        measured += usize::from(ends);
        if measured >= measurements && node.lock().unwrap_or_else(PoisonError::into_inner).ready {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::pin::pin;
    use std::sync::mpsc as blocking;

    use super::*;
    use crate::observe::record::Line;
    use crate::observe::record::Ready;
    use crate::observe::record::Record;
    use crate::observe::record::Timestamp;

    /// An output that takes nothing as long as there is a sender of `gate`.
    struct Slow {
        gate: blocking::Receiver<()>,
        written: Arc<Mutex<Vec<u8>>>,
        /// Dropped after the last write.
        _open: blocking::Sender<()>,
    }

    impl io::Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // Fails when the sender is gone.
            let _ = self.gate.recv();
            self.written.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// An output that refuses everything.
    struct Refusing(io::ErrorKind);

    impl io::Write for Refusing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// So many messages of a collector that has ended.
    fn collected(count: usize) -> mpsc::Receiver<Message> {
        let (sender, messages) = mpsc::channel(count);
        for _ in 0..count {
            let line = Line::new(Timestamp::default(), Record::Ready(Ready::default()));
            sender.try_send(Message::Line(Box::new(line))).unwrap();
        }
        messages
    }

    fn signalled() -> CancellationToken {
        let token = CancellationToken::new();
        token.cancel();
        token
    }

    #[tokio::test(start_paused = true)]
    async fn queued_lines_are_written_after_a_signal() {
        const COUNT: usize = 20;
        let (gate, blocked) = blocking::channel();
        let (open, closed) = blocking::channel();
        let written = Arc::new(Mutex::new(Vec::new()));
        let out = Slow { gate: blocked, written: written.clone(), _open: open };
        let shutdown = signalled();
        let mut printed = pin!(lines(collected(COUNT), SharedNode::default(), Some(out), pending(), &shutdown));
        assert!(futures_util::poll!(&mut printed).is_pending(), "the lines are not written yet");
        drop(gate);
        // The clock stands still while a blocking task runs.
        let all = tokio::task::spawn_blocking(move || closed.recv());
        printed.await.unwrap();
        assert!(all.await.unwrap().is_err(), "nothing is sent");
        let written = String::from_utf8(written.lock().unwrap().clone()).unwrap();
        assert_eq!(written.lines().filter(|line| line.contains("\"ready\"")).count(), COUNT, "{written}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_output_that_is_not_read_delays_the_end_by_two_seconds() {
        let (_gate, blocked) = blocking::channel();
        let (open, _closed) = blocking::channel();
        let out = Slow { gate: blocked, written: Arc::default(), _open: open };
        let (start, shutdown) = (tokio::time::Instant::now(), signalled());
        let printed = lines(collected(2 * LINES), SharedNode::default(), Some(out), pending(), &shutdown);
        tokio::time::timeout(2 * LAST_LINES, printed).await.expect("the end is delayed for longer").unwrap();
        let delay = start.elapsed();
        assert!(delay >= LAST_LINES && delay < LAST_LINES + Duration::from_millis(10), "{delay:?}");
    }

    #[tokio::test]
    async fn a_closed_output_ends_the_lines_quietly_and_a_full_disk_does_not() {
        let shutdown = CancellationToken::new();
        for (kind, quiet) in [(io::ErrorKind::BrokenPipe, true), (io::ErrorKind::StorageFull, false)] {
            let printed = lines(collected(1), SharedNode::default(), Some(Refusing(kind)), pending(), &shutdown).await;
            assert_eq!(printed.is_ok(), quiet, "{kind}: {printed:?}");
        }
    }

    #[tokio::test]
    async fn a_closed_output_ends_the_lines_before_the_next_record() {
        let (_collector, messages) = mpsc::channel(1);
        let (reader, writer) = io::pipe().unwrap();
        let (unread, shutdown) = (closed(Some(writer.try_clone().unwrap())), CancellationToken::new());
        let mut printed = pin!(lines(messages, SharedNode::default(), Some(writer), unread, &shutdown));
        assert!(futures_util::poll!(&mut printed).is_pending(), "the collector goes on");
        drop(reader);
        tokio::time::timeout(Duration::from_secs(60), printed).await.expect("it waits for a record").unwrap();
    }

    #[test]
    fn values_of_flags() {
        assert_eq!(interval("1500ms"), Ok(Duration::from_millis(1500)));
        assert!(interval("1ms").unwrap_err().contains("at least 500ms"));
        assert!(interval("often").is_err());
        assert_eq!(size("80x24"), Ok((80, 24)));
        for wrong in ["80", "0x24", "80x", "501x1", "axb"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_missing_runtime_is_named() {
        let endpoint = "unix:///nonexistent/runtime.sock".parse().unwrap();
        let source = Source {
            container_runtime_endpoint: Some(endpoint),
            cgroup_root: "/keblet-no-such".into(),
            node_name: Some("Worker-7".into()),
        };
        let options = source.options(Duration::from_secs(1)).unwrap();
        assert_eq!((options.cgroup_root.as_str(), options.node.as_str()), ("/keblet-no-such", "worker-7"));
        let error = once(&source, Duration::from_secs(1), 1).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/runtime.sock"), "{error}");
    }
}
