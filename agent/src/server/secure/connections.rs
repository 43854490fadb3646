//! Who is connected, and who has to go when too many are.
//!
//! A connection is *unproven* until one of its requests was let in. There is room for a fixed number of those: one more,
//! and the oldest is closed, so that clients that open connections and say nothing only push out each other. Proven
//! connections are bounded too; beyond that, newcomers are closed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::pki_types::CertificateDer;
use tokio_util::sync::CancellationToken;

/// Connections whose client is not known yet.
const UNPROVEN: usize = 1024;
/// Connections of all kinds.
const ALL: usize = 8192;

/// What is known of the other end of a connection. Requests carry it as an extension.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// Its address.
    pub address: Option<SocketAddr>,
    pub(super) certificates: Arc<[CertificateDer<'static>]>,
    pub(super) ticket: Option<Arc<Ticket>>,
}

impl Peer {
    /// A request of this connection was let in.
    pub(super) fn proved(&self) {
        if let Some(ticket) = &self.ticket {
            ticket.proved();
        }
    }
}

/// All connections.
#[derive(Clone, Debug, Default)]
pub(super) struct Connections(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    next: u64,
    open: usize,
    /// The oldest first.
    unproven: BTreeMap<u64, CancellationToken>,
}

/// A place among the connections; dropping it gives the place away.
#[derive(Debug)]
pub(super) struct Ticket {
    connections: Connections,
    number: u64,
    evicted: CancellationToken,
    proven: AtomicBool,
}

impl Connections {
    /// A place for one more, or `None` if there is none. May close the oldest unproven connection.
    pub(super) fn enter(&self) -> Option<Ticket> {
        let mut table = self.table();
        if table.open >= ALL {
            return None;
        }
        if table.unproven.len() >= UNPROVEN
            && let Some((_, oldest)) = table.unproven.pop_first()
        {
            oldest.cancel();
        }
        let (number, evicted) = (table.next, CancellationToken::new());
        table.next += 1;
        table.open += 1;
        table.unproven.insert(number, evicted.clone());
        Some(Ticket { connections: self.clone(), number, evicted, proven: AtomicBool::new(false) })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Each change is a number or one insertion: a panic elsewhere leaves the table usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ticket {
    /// Cancelled when the connection has to go.
    pub(super) fn evicted(&self) -> CancellationToken {
        self.evicted.clone()
    }

    fn proved(&self) {
        if !self.proven.swap(true, Ordering::Relaxed) {
            self.connections.table().unproven.remove(&self.number);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut table = self.connections.table();
        table.unproven.remove(&self.number);
        table.open -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_the_unproven_goes() {
        let connections = Connections::default();
        let mut tickets: Vec<Ticket> = (0..UNPROVEN).map(|_| connections.enter().expect("room")).collect();
        tickets[0].proved();
        let one_more = connections.enter().expect("room");
        assert!(tickets.iter().all(|ticket| !ticket.evicted.is_cancelled()), "the proven one made room");
        let another = connections.enter().expect("room");
        assert!(tickets[1].evicted.is_cancelled());
        assert!(!tickets[0].evicted.is_cancelled() && !tickets[2].evicted.is_cancelled());
        tickets.clear();
        drop((one_more, another));
        let table = connections.table();
        assert_eq!((table.open, table.unproven.len()), (0, 0));
    }

    #[test]
    fn all_of_them_are_bounded() {
        let connections = Connections::default();
        let mut tickets = Vec::new();
        for _ in 0..ALL {
            let ticket = connections.enter().expect("room");
            ticket.proved();
            tickets.push(ticket);
        }
        assert!(connections.enter().is_none());
        tickets.pop();
        assert!(connections.enter().is_some());
    }
}
