//! The simulated kernel: PIDs, exit and OOM records, pidfds.
//!
//! Exits are recorded immediately, long before the runtime reports them, in the order of the real kernel: first the
//! exit record, while files and sockets may still be open; later the pidfd becomes readable (the process is *gone*).

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::MutexGuard;
use std::sync::PoisonError;
use std::time::Duration;

use tokio::sync::broadcast;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::program::Exit;

/// Records buffered for a slow subscriber before it loses the oldest and receives their number.
const FACT_BACKLOG: usize = 4096;

/// What a kernel probe reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelFact {
    /// A container's init process exited. Its files may still be open.
    Exit(ExitRecord),
    /// The OOM killer killed a process.
    Oom(OomRecord),
}

/// The exit of one container's init process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExitRecord {
    /// Process id in the host's PID namespace.
    pub pid: u32,
    /// Container or sandbox whose init process it was.
    pub container_id: String,
    /// How it exited.
    pub exit: Exit,
    /// Time of the exit.
    pub at: Instant,
    /// Whether it was the init of a PID namespace of its own, so that no other process of the container can survive it.
    pub ns_init: bool,
}

/// One OOM kill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomRecord {
    /// The victim.
    pub pid: u32,
    /// Container of its cgroup.
    pub container_id: String,
    /// Whether the victim is the container's init (then an exit record follows).
    pub init: bool,
    /// The container's init, or the process of an exec: the uppermost process above the victim.
    pub root: u32,
    /// Time of the kill.
    pub at: Instant,
}

/// An open pidfd: refers to the same process even if its PID is reused.
#[derive(Clone, Debug)]
pub struct Pinned {
    /// Container of the process's cgroup.
    pub container_id: String,
    /// Full cgroup path of that container.
    pub cgroup: String,
    gone: CancellationToken,
}

impl Pinned {
    /// Completes when the pidfd is readable; immediately if it already is. Cancel-safe.
    pub async fn gone(&self) {
        self.gone.cancelled().await;
    }

    /// Whether the pidfd is readable.
    pub fn is_gone(&self) -> bool {
        self.gone.is_cancelled()
    }
}

#[derive(Debug)]
struct Process {
    container_id: String,
    cgroup: String,
    gone: CancellationToken,
}

#[derive(Debug)]
struct Table {
    next: u32,
    forced: Vec<u32>,
    alive: HashMap<u32, Process>,
}

/// The simulated kernel. Cheap to share behind an `Arc`.
#[derive(Debug)]
pub struct Kernel {
    table: Mutex<Table>,
    facts: broadcast::Sender<KernelFact>,
    to_gone: Duration,
}

impl Kernel {
    /// A kernel whose pidfds become readable `to_gone` after the exit record.
    pub fn new(to_gone: Duration) -> Self {
        let table = Table { next: 1000, forced: Vec::new(), alive: HashMap::new() };
        Self { table: Mutex::new(table), facts: broadcast::Sender::new(FACT_BACKLOG), to_gone }
    }

    /// All records from now on.
    pub fn subscribe(&self) -> broadcast::Receiver<KernelFact> {
        self.facts.subscribe()
    }

    /// Opens the process that has `pid` now, as pidfd_open(2) does; `None` if there is none.
    pub fn open(&self, pid: u32) -> Option<Pinned> {
        let table = self.lock();
        let process = table.alive.get(&pid)?;
        Some(Pinned {
            container_id: process.container_id.clone(),
            cgroup: process.cgroup.clone(),
            gone: process.gone.clone(),
        })
    }

    /// Waits until the process that has `pid` now is gone; returns immediately if there is none.
    pub async fn wait_gone(&self, pid: u32) {
        if let Some(pinned) = self.open(pid) {
            pinned.gone().await;
        }
    }

    /// Assigns `pid` to the next process if it is free by then.
    pub fn reuse(&self, pid: u32) {
        self.lock().forced.push(pid);
    }

    /// Number of running processes.
    pub fn alive(&self) -> usize {
        self.lock().alive.len()
    }

    pub(super) fn spawn(&self, container_id: &str, cgroup: &str) -> u32 {
        let mut table = self.lock();
        let forced = table.forced.iter().position(|pid| !table.alive.contains_key(pid));
        let pid = match forced {
            Some(at) => table.forced.remove(at),
            None => {
                table.next += 1;
                table.next
            }
        };
        let process = Process {
            container_id: container_id.to_owned(),
            cgroup: cgroup.to_owned(),
            gone: CancellationToken::new(),
        };
        table.alive.insert(pid, process);
        pid
    }

    /// Time between a process's exit record and its readable pidfd.
    pub(super) fn to_gone(&self) -> Duration {
        self.to_gone
    }

    /// Marks the process as gone: its pidfds become readable and its PID is free.
    pub(super) fn gone(&self, pid: u32) {
        let process = self.lock().alive.remove(&pid);
        if let Some(process) = process {
            process.gone.cancel();
        }
    }

    /// Reports a record, which changes no process.
    pub fn publish(&self, fact: KernelFact) {
        // Sending fails only without subscribers, which is a node without probes.
        let _ = self.facts.send(fact);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
