//! One machine: starts it with its daemons, passes it a job, relays the output, and ends it.

use std::ffi::OsString;
use std::fs;
use std::fs::File;
use std::io::BufRead as _;
use std::io::BufReader;
use std::io::Write as _;
use std::os::unix::net::UnixListener;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::path::PathBuf;
use std::process::Child;
use std::process::Command;
use std::process::Stdio;
use std::sync::mpsc;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::Duration;
use std::time::Instant;

use anyhow::Context as _;
use anyhow::Result;
use anyhow::bail;
use keblet_peers::Cache;

use super::folder::Folder;
use super::job;
use super::qemu;
use super::qemu::Disk;
use super::qemu::Programs;
use super::qemu::Specification;
use super::relay::Relay;
use super::shared_folders;
use crate::interrupt::Interrupt;
use crate::paths;
use crate::setup::PREBUILT_VARIABLE;

/// Until the first message; a boot takes seconds, on a busy host longer.
const BOOT_DEADLINE: Duration = Duration::from_secs(120);
/// Until a daemon or qemu listens; on a busy host with a cold page cache this takes a while.
const SOCKET_DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
const LOG_TAIL: usize = 60;
/// As shells report a command that SIGINT ended.
const INTERRUPTED: u8 = 130;

/// A folder of the host in the machine.
#[derive(Clone, Debug)]
pub(super) struct Share {
    /// Name of its device.
    pub tag: String,
    /// The folder.
    pub folder: PathBuf,
    /// Its mount point in the machine.
    pub at: PathBuf,
    /// Whether the machine mounts it read-write.
    pub writable: bool,
}

/// Where the standard output of the command goes. Its standard error is always passed through.
pub(super) enum Output<'a> {
    /// To the standard output of this process.
    Inherit,
    /// Line by line to a function.
    Lines(&'a mut (dyn FnMut(&str) + Send)),
}

/// A machine to be started.
pub(super) struct Machine {
    cache: Cache,
    shares: Vec<Share>,
    /// Memory in MiB.
    pub memory: u32,
    /// Number of processors.
    pub cpus: u32,
    /// Whether systemd is the first process.
    pub systemd: bool,
    /// A disk of its own.
    pub disk: Option<Disk>,
    /// Working directory of the command.
    pub directory: PathBuf,
    /// Environment of the command.
    pub environment: Vec<(String, OsString)>,
}

impl Machine {
    /// A machine with the cache and the programs of the last build, in 1 GiB and on two processors.
    pub(super) fn new(cache: &Cache) -> Self {
        let programs = paths::target().join("debug");
        let mut path = programs.clone().into_os_string();
        path.push(":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        let mut machine = Self {
            cache: cache.clone(),
            shares: Vec::new(),
            memory: 1024,
            cpus: 2,
            systemd: false,
            disk: None,
            directory: "/".into(),
            environment: vec![
                ("PATH".to_owned(), path),
                ("KEBLET_CACHE".to_owned(), cache.root().into()),
                (PREBUILT_VARIABLE.to_owned(), "1".into()),
                ("CARGO_TARGET_DIR".to_owned(), paths::target().into()),
                ("KEBLET_BIN".to_owned(), programs.join("keblet").into()),
                ("KEBLET_PRIVATE_CONTAINERD".to_owned(), programs.join("private-containerd").into()),
            ],
        };
        if cache.peers().is_dir() {
            machine.environment.push(("KEBLET_CONTROL_PLANE".to_owned(), cache.peers().into()));
        }
        for folder in shared_folders(cache) {
            machine.share(&folder.clone(), &folder, false);
        }
        machine
    }

    /// Mounts a folder of the host at a path of the machine.
    pub(super) fn share(&mut self, folder: &Path, at: &Path, writable: bool) {
        let tag = format!("share{}", self.shares.len());
        self.shares.push(Share { tag, folder: folder.to_owned(), at: at.to_owned(), writable });
    }

    /// Boots the machine, runs the command in it and returns its exit code; on SIGINT ends the machine and returns 130.
    ///
    /// # Errors
    /// qemu or a daemon cannot be started, or the machine ended without an exit code, such as by a kernel panic; the
    /// error has the end of the kernel's log.
    pub(super) fn run(&self, command: &[OsString], output: Output<'_>, interrupt: &Interrupt) -> Result<u8> {
        let folder = Folder::create(&std::env::temp_dir())?;
        let script = job::script(&self.shares, &self.environment, &self.directory, command);
        let mut running = Running::start(self, folder.path())?;
        let result = running.perform(&script, output, interrupt);
        running.end();
        result.map_err(|error| anyhow::anyhow!("{error:#}\n{}", running.logs()))
    }

    fn tags(&self) -> Vec<String> {
        let shares = self.shares.iter().map(|share| share.tag.clone());
        std::iter::once(qemu::ROOT.to_owned()).chain(shares).collect()
    }
}

/// The processes of a started machine. Killed and reaped on drop.
struct Running {
    folder: PathBuf,
    processes: Vec<Child>,
    ports: [UnixListener; 3],
}

impl Running {
    fn start(machine: &Machine, folder: &Path) -> Result<Self> {
        let programs = Programs::find(&machine.cache)?;
        let listen = |port: &str| {
            let path = qemu::socket(folder, port);
            UnixListener::bind(&path).with_context(|| format!("cannot listen on {}", path.display()))
        };
        let [control, stdout, stderr] = qemu::PORTS;
        let ports = [listen(control)?, listen(stdout)?, listen(stderr)?];
        let mut running = Self { folder: folder.to_owned(), processes: Vec::new(), ports };
        let root = machine.cache.machine().join("root");
        let shared = machine.shares.iter().map(|share| (share.tag.as_str(), share.folder.as_path(), share.writable));
        for (tag, source, writable) in std::iter::once((qemu::ROOT, root.as_path(), false)).chain(shared) {
            let socket = qemu::socket(folder, tag);
            running.spawn(&mut programs.daemon(source, writable, &socket), tag)?;
            running.until_listening(&socket, tag)?;
        }
        if let Some(Disk { size, .. }) = machine.disk {
            let path = qemu::disk(folder);
            let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
            file.set_len(u64::from(size) << 20).with_context(|| format!("cannot enlarge {}", path.display()))?;
        }
        let tags = machine.tags();
        let Machine { memory, cpus, systemd, disk, .. } = *machine;
        let specification = Specification { memory, cpus, systemd, tags: &tags, disk, folder };
        running.spawn(&mut programs.machine(&specification), "qemu")?;
        Ok(running)
    }

    /// Starts a process, whose messages go to a file.
    fn spawn(&mut self, command: &mut Command, name: &str) -> Result<()> {
        let path = self.folder.join(format!("{name}.log"));
        let log = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let copy = log.try_clone().with_context(|| format!("cannot share {}", path.display()))?;
        // In a process group of its own: a Ctrl-C in the terminal is handled by this process.
        command.stdin(Stdio::null()).stdout(copy).stderr(log).process_group(0);
        self.processes.push(command.spawn().with_context(|| format!("cannot start {name} by setpriv"))?);
        Ok(())
    }

    fn until_listening(&mut self, socket: &Path, name: &str) -> Result<()> {
        let deadline = Instant::now() + SOCKET_DEADLINE;
        while !socket.exists() {
            if self.ended()? || Instant::now() > deadline {
                bail!("the daemon of {name} does not serve its folder\n{}", self.logs());
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Whether the process that was started last has exited.
    fn ended(&mut self) -> Result<bool> {
        let last = self.processes.last_mut().context("no process was started")?;
        Ok(last.try_wait().context("cannot wait for a process of the machine")?.is_some())
    }

    /// Connects the ports, passes the job and relays the output until the exit code.
    fn perform(&mut self, script: &[u8], output: Output<'_>, interrupt: &Interrupt) -> Result<u8> {
        let deadline = Instant::now() + SOCKET_DEADLINE;
        let mut streams = Vec::new();
        for index in 0..self.ports.len() {
            streams.push(self.accept(index, deadline)?);
        }
        let [control, stdout, stderr]: [UnixStream; 3] =
            streams.try_into().map_err(|_| anyhow::anyhow!("a port is missing"))?;
        let mut writer = control.try_clone().context("cannot share the control port")?;
        thread::scope(|scope| {
            let (sender, messages) = mpsc::channel();
            scope.spawn(move || {
                let lines = BufReader::new(control).lines().map_while(Result::ok);
                // The receiver is gone after the exit code.
                lines.for_each(|line| drop(sender.send(line)));
            });
            let out = Relay::of(output);
            let relays = [scope.spawn(move || out.copy(stdout)), scope.spawn(move || Relay::Stderr.copy(stderr))];
            let result = self.converse(&messages, &mut writer, script, interrupt);
            // Closes the ports, which ends the threads.
            self.end();
            for relay in relays {
                relay.join().map_err(|_| anyhow::anyhow!("relaying the output panicked"))??;
            }
            result
        })
    }

    /// Follows the protocol of `guest/run`: `up`, then the job with its length before it, then `exit CODE`.
    fn converse(
        &mut self,
        messages: &mpsc::Receiver<String>,
        control: &mut UnixStream,
        script: &[u8],
        interrupt: &Interrupt,
    ) -> Result<u8> {
        let mut boot = Some(Instant::now() + BOOT_DEADLINE);
        loop {
            if interrupt.raised() {
                return Ok(INTERRUPTED);
            }
            match messages.recv_timeout(POLL) {
                Ok(line) if line == "up" => {
                    boot = None;
                    let message = [format!("{}\n", script.len()).as_bytes(), script].concat();
                    control.write_all(&message).context("cannot pass the command to the machine")?;
                }
                Ok(line) => {
                    let code = line.strip_prefix("exit ").and_then(|code| code.parse().ok());
                    return code.with_context(|| format!("the machine sent {line:?}"));
                }
                Err(RecvTimeoutError::Timeout) if boot.is_some_and(|deadline| Instant::now() > deadline) => {
                    bail!("the machine did not boot within {} s", BOOT_DEADLINE.as_secs());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("the machine ended without an exit code"),
            }
        }
    }

    fn accept(&mut self, index: usize, deadline: Instant) -> Result<UnixStream> {
        let listener = self.ports[index].try_clone().context("cannot share a port")?;
        listener.set_nonblocking(true).context("cannot poll a port")?;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).context("cannot use a port")?;
                    return Ok(stream);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("cannot connect a port of the machine"),
            }
            if self.ended()? || Instant::now() > deadline {
                bail!("qemu does not start");
            }
            thread::sleep(POLL);
        }
    }

    /// Kills qemu first, so that the daemons exit by themselves.
    fn end(&mut self) {
        while let Some(mut process) = self.processes.pop() {
            // Both fail only if it was reaped already.
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    /// The ends of the logs that are not empty.
    fn logs(&self) -> String {
        let names = [qemu::kernel_log(&self.folder), self.folder.join("qemu.log")];
        let tail = |path: &PathBuf| {
            let text = String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
            let lines: Vec<&str> = text.lines().collect();
            let name = path.file_name().unwrap_or_default().display().to_string();
            let end = lines[lines.len().saturating_sub(LOG_TAIL)..].join("\n  ");
            (!lines.is_empty()).then(|| format!("end of {name}:\n  {end}"))
        };
        let found: Vec<String> = names.iter().filter_map(tail).collect();
        if found.is_empty() { "the machine logged nothing".to_owned() } else { found.join("\n") }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}
