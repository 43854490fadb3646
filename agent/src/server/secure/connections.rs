//! Who is connected, and who has to go when too many are.
//!
//! A connection is *unauthorized* until one of its requests was let in. There is room for a fixed number of those: one more,
//! and the oldest is closed, so that clients that open connections and say nothing only push out each other. Proven
//! connections are bounded too; beyond that, newcomers are closed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::pki_types::CertificateDer;
use tokio_util::sync::CancellationToken;

/// Connections whose client is not known yet.
const MAX_UNAUTHORIZED: usize = 1024;
/// Connections of all kinds.
const MAX_CONNECTIONS: usize = 8192;

/// What is known of the other end of a connection. Requests carry it as an extension.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// Its address.
    pub address: Option<SocketAddr>,
    pub(super) certificates: Arc<[CertificateDer<'static>]>,
    pub(super) slot: Option<Arc<ConnectionSlot>>,
}

impl Peer {
    /// A request of this connection was let in.
    pub(super) fn mark_authorized(&self) {
        if let Some(slot) = &self.slot {
            slot.mark_authorized();
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
    unauthorized: BTreeMap<u64, CancellationToken>,
}

/// A place among the connections; dropping it gives the place away.
#[derive(Debug)]
pub(super) struct ConnectionSlot {
    connections: Connections,
    number: u64,
    evicted: CancellationToken,
    authorized: AtomicBool,
}

impl Connections {
    /// A place for one more, or `None` if there is none. May close the oldest unauthorized connection.
    pub(super) fn accept(&self) -> Option<ConnectionSlot> {
        let mut table = self.table();
        if table.open >= MAX_CONNECTIONS {
            return None;
        }
        if table.unauthorized.len() >= MAX_UNAUTHORIZED
            && let Some((_, oldest)) = table.unauthorized.pop_first()
        {
            oldest.cancel();
        }
        let (number, evicted) = (table.next, CancellationToken::new());
        table.next += 1;
        table.open += 1;
        table.unauthorized.insert(number, evicted.clone());
        Some(ConnectionSlot { connections: self.clone(), number, evicted, authorized: AtomicBool::new(false) })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Each change is a number or one insertion: a panic elsewhere leaves the table usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionSlot {
    /// Cancelled when the connection has to go.
    pub(super) fn evicted(&self) -> CancellationToken {
        self.evicted.clone()
    }

    fn mark_authorized(&self) {
        if !self.authorized.swap(true, Ordering::Relaxed) {
            self.connections.table().unauthorized.remove(&self.number);
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut table = self.connections.table();
        table.unauthorized.remove(&self.number);
        table.open -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_the_unproven_goes() {
        let connections = Connections::default();
        let mut slots: Vec<ConnectionSlot> =
            (0..MAX_UNAUTHORIZED).map(|_| connections.accept().expect("room")).collect();
        slots[0].mark_authorized();
        let one_more = connections.accept().expect("room");
        assert!(slots.iter().all(|slot| !slot.evicted.is_cancelled()), "the authorized one made room");
        let another = connections.accept().expect("room");
        assert!(slots[1].evicted.is_cancelled());
        assert!(!slots[0].evicted.is_cancelled() && !slots[2].evicted.is_cancelled());
        slots.clear();
        drop((one_more, another));
        let table = connections.table();
        assert_eq!((table.open, table.unauthorized.len()), (0, 0));
    }

    #[test]
    fn all_of_them_are_bounded() {
        let connections = Connections::default();
        let mut slots = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            let slot = connections.accept().expect("room");
            slot.mark_authorized();
            slots.push(slot);
        }
        assert!(connections.accept().is_none());
        slots.pop();
        assert!(connections.accept().is_some());
    }
}
