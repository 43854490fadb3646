//! Reads the ring buffers; waits while they are empty.

use std::io;

use aya::maps::MapData;
use aya::maps::RingBuf;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::KernelRecord;
use super::load::Rings;
use super::record::decode;
use super::watch::Losses;
use super::watch::Probes;

/// Records of the probes, in the order of their time stamps.
pub struct Records {
    exits: Ring,
    cgroups: Ring,
    probes: Probes,
    /// Losses already reported.
    reported: Losses,
}

/// One ring buffer and the record at its head.
struct Ring {
    fd: AsyncFd<RingBuf<MapData>>,
    head: Option<KernelRecord>,
}

/// A record, or a report of lost ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProbeOutput {
    /// A record of a probe.
    Record(KernelRecord),
    /// Records were dropped, or cgroups not watched, since the last report: a relist is needed.
    Lost(Losses),
}

impl Records {
    pub(super) fn new(rings: Rings, probes: Probes) -> io::Result<Self> {
        Ok(Self {
            exits: Ring::new(rings.exits)?,
            cgroups: Ring::new(rings.cgroups)?,
            probes,
            reported: Losses::default(),
        })
    }

    /// Waits for the next record. Cancel-safe.
    ///
    /// # Errors
    /// The ring buffers cannot be polled.
    pub async fn next(&mut self) -> io::Result<ProbeOutput> {
        loop {
            if let Some(record) = self.earliest() {
                return Ok(ProbeOutput::Record(record));
            }
            // Records are dropped only while a ring is full: the counters are up to date now.
            if let Some(lost) = self.new_losses() {
                return Ok(ProbeOutput::Lost(lost));
            }
            tokio::select! {
                ready = self.exits.written() => ready?,
                ready = self.cgroups.written() => ready?,
            }
        }
    }

    /// The older of the two heads, so that a cgroup is reported before events in it.
    fn earliest(&mut self) -> Option<KernelRecord> {
        self.exits.fill();
        self.cgroups.fill();
        let first = match (&self.exits.head, &self.cgroups.head) {
            (Some(exit), Some(cgroup)) if exit.at() < cgroup.at() => &mut self.exits,
            (_, Some(_)) => &mut self.cgroups,
            (_, None) => &mut self.exits,
        };
        first.head.take()
    }

    fn new_losses(&mut self) -> Option<Losses> {
        let now = self.probes.losses();
        let reported = std::mem::replace(&mut self.reported, now);
        let lost = Losses {
            exits: now.exits.saturating_sub(reported.exits),
            cgroups: now.cgroups.saturating_sub(reported.cgroups),
            watches: now.watches.saturating_sub(reported.watches),
        };
        (lost != Losses::default()).then_some(lost)
    }
}

impl Ring {
    fn new(ring: RingBuf<MapData>) -> io::Result<Self> {
        // SAFETY: the ring owns the map's descriptor, keeps it open until it is dropped, and always names the same one.
        let fd = unsafe { AsyncFd::register_with_interest(ring, Interest::READABLE) }?;
        Ok(Self { fd, head: None })
    }

    fn fill(&mut self) {
        while self.head.is_none() {
            let Some(item) = self.fd.get_mut().next() else { return };
            self.head = decode(&item);
        }
    }

    /// Returns once the kernel has written since the last call. Clears the readiness before the caller reads, so that what
    /// is written meanwhile wakes it again.
    async fn written(&mut self) -> io::Result<()> {
        self.fd.readable_mut().await?.clear_ready();
        Ok(())
    }
}
